"""The library's own generation: each row as it would be alone, however prompts come."""

from __future__ import annotations

import pytest
import torch

import implicit_blocks as ib

COUNT = 7
MODES = {
    "greedy": {},
    "sampling": {"temperature": 1.5, "seed": [3, 1, 4, 1]},
    "top-k-and-p": {"temperature": 2.0, "top_k": 6, "top_p": 0.8, "seed": [2, 7, 1, 8]},
}


@torch.no_grad()
def by_hand(model, prompt, count):
    """Solve everything anew for each token, greedily."""
    tokens = torch.tensor([prompt])
    for _ in range(count):
        logits = model(tokens).logits[:, -1, :19]
        tokens = torch.cat((tokens, logits.argmax(-1, keepdim=True)), 1)
    return tokens[0, len(prompt) :]


def alone_with(options, row):
    return options | ({"seed": [options["seed"][row]]} if "seed" in options else {})


def padded(prompts, *, left):
    width = max(map(len, prompts))
    ids, mask = torch.zeros(len(prompts), width, dtype=torch.int64), torch.zeros(len(prompts), width)
    for row, prompt in enumerate(prompts):
        where = slice(width - len(prompt), None) if left else slice(0, len(prompt))
        ids[row, where], mask[row, where] = torch.tensor(prompt), 1
    return ids, mask


def test_greedy_tokens_are_those_of_solving_everything_anew(family, tiny_model, prompts):
    model = tiny_model(family)
    found = ib.generate(model, prompts, max_new_tokens=COUNT)
    assert found.converged.all()
    assert found.prompt.converged.all()
    assert found.lengths.eq(COUNT).all()
    assert not found.stopped.any()
    for row, prompt in enumerate(prompts):
        assert torch.equal(found.tokens[row], by_hand(model, prompt, COUNT))
    assert len(set(map(tuple, found.tokens.tolist()))) == len(prompts)  # or the comparison says little


@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
@pytest.mark.parametrize("tolerance", [1e-2, 1e-6])
def test_a_row_is_what_it_is_alone(family, tiny_model, prompts, mode, tolerance):
    model = tiny_model(family)
    options = {"max_new_tokens": COUNT, "return_logits": True, "tolerance": tolerance}
    together = ib.generate(model, prompts, **options, **mode)
    for row, prompt in enumerate(prompts):
        alone = ib.generate(model, [prompt], **options, **alone_with(mode, row))
        assert torch.equal(alone.tokens[0], together.tokens[row])
        torch.testing.assert_close(alone.logits[0], together.logits[row], atol=1e-5, rtol=0)
        if tolerance > 1e-6:  # there, in float32, rounding may take an iteration more
            assert torch.equal(alone.iterations[0], together.iterations[row])


def test_padding_on_either_side_lists_and_windows_say_the_same(family, tiny_model, prompts):
    model = tiny_model(family)
    expected = ib.generate(model, prompts, max_new_tokens=COUNT, return_logits=True)
    for left in (True, False):
        ids, mask = padded(prompts, left=left)
        for window_length in (None, 1, 3):
            found = ib.generate(
                model,
                ids,
                attention_mask=mask,
                max_new_tokens=COUNT,
                window_length=window_length,
                return_logits=True,
            )
            assert torch.equal(found.tokens, expected.tokens)
            torch.testing.assert_close(found.logits, expected.logits, atol=1e-4, rtol=0)


@pytest.mark.parametrize("knobs", [{"warm_start": True}, {"moving_average": 0.6}, {"damping": 0.7}], ids=str)
def test_knobs_find_the_same_tokens_in_every_row(family, tiny_model, prompts, knobs):
    model = tiny_model(family)
    plain = ib.generate(model, prompts, max_new_tokens=COUNT)
    found = ib.generate(model, prompts, max_new_tokens=COUNT, **knobs)
    assert torch.equal(found.tokens, plain.tokens)
    assert not torch.equal(found.iterations, plain.iterations)
    loose = {"max_new_tokens": COUNT, "tolerance": 1e-2, "return_logits": True}
    together = ib.generate(model, prompts, **loose, **knobs)
    for row, prompt in enumerate(prompts):
        alone = ib.generate(model, [prompt], **loose, **knobs)
        assert torch.equal(alone.tokens[0], together.tokens[row])
        torch.testing.assert_close(alone.logits[0], together.logits[row], atol=1e-5, rtol=0)


@pytest.mark.parametrize("stands", [-1, 99])
def test_what_stands_at_padding_may_be_no_token(tiny_model, prompts, stands):
    model, (ids, mask) = tiny_model("attention"), padded(prompts, left=True)
    expected = ib.generate(model, ids, attention_mask=mask, max_new_tokens=2)
    found = ib.generate(model, ids.masked_fill(mask == 0, stands), attention_mask=mask, max_new_tokens=2)
    assert torch.equal(found.tokens, expected.tokens)


@pytest.mark.parametrize("mode", ["greedy", "sampling"])
def test_rows_end_by_themselves_and_the_others_go_on(family, tiny_model, prompts, mode):
    model, options = tiny_model(family), MODES[mode]
    free = ib.generate(model, prompts, max_new_tokens=COUNT, return_logits=True, **options)

    def ends_with(stops):
        return [
            next((i + 1 for i, token in enumerate(tokens) if token in stops), COUNT)
            for tokens in free.tokens.tolist()
        ]

    stops = max(([a, b] for a in range(19) for b in range(a)), key=lambda stops: len(set(ends_with(stops))))
    ends = ends_with(stops)
    assert len(set(ends)) > 2
    found = ib.generate(
        model,
        prompts,
        max_new_tokens=COUNT,
        stop_token_ids=stops,
        pad_token=-1,
        return_logits=True,
        **options,
    )
    for row, end in enumerate(ends):
        tokens = free.tokens[row].tolist()
        assert found.tokens[row].tolist() == (tokens[:end] + [-1] * COUNT)[: found.tokens.shape[1]]
        torch.testing.assert_close(found.logits[row, :end], free.logits[row, :end], atol=1e-5, rtol=0)
        assert found.logits[row, end:].eq(0).all()
        assert found.converged[row].all()
        assert found.iterations[row, end:].eq(0).all()
        assert bool(found.stopped[row]) == (tokens[end - 1] in stops)
    assert found.lengths.tolist() == ends


def test_max_length_counts_the_prompt(family, tiny_model, prompts):
    model = tiny_model(family)
    free = ib.generate(model, prompts, max_new_tokens=COUNT)
    found = ib.generate(model, prompts, max_new_tokens=COUNT, max_length=8)
    assert found.lengths.tolist() == [2, 5, 7, 0]
    for row, length in enumerate(found.lengths.tolist()):
        assert torch.equal(found.tokens[row, :length], free.tokens[row, :length])
        assert found.tokens[row, length:].eq(0).all()


def test_streaming_yields_the_same_tokens_one_by_one(family, tiny_model, prompts):
    model = tiny_model(family)
    seen = []
    options = {"max_new_tokens": COUNT, "temperature": 1.0, "seed": 5}
    expected = ib.generate(model, prompts, on_step=seen.append, **options)
    steps = list(ib.stream(model, prompts, **options))
    assert torch.equal(torch.stack([step.tokens for step in steps], 1), expected.tokens)
    assert torch.equal(torch.stack([step.tokens for step in seen], 1), expected.tokens)
    calls = []
    model.backbone.norm.register_forward_hook(lambda *_: calls.append(1))
    lazy = ib.stream(model, prompts, max_new_tokens=100)
    assert not calls
    next(lazy)
    assert len(calls) < 200  # a prompt and no token more


def test_no_token_is_computed_twice_and_weights_are_made_ready_once(tiny_model, prompts):
    from unittest import mock

    from implicit_blocks.weights.weight_norm import WeightNorm

    model = tiny_model("attention")
    lengths = []
    model.backbone.norm.register_forward_pre_hook(lambda _, args: lengths.append(args[0].shape[1]))
    with mock.patch.object(WeightNorm, "compute", side_effect=WeightNorm.compute) as compute:
        found = ib.generate(model, prompts[:1], max_new_tokens=4)
    assert compute.call_count == sum(isinstance(m, WeightNorm) for m in model.modules())
    decoding = lengths[lengths.index(1) :]
    assert set(decoding) == {1}
    assert len(decoding) == int((found.iterations[0, 1:] + 1).sum())


def test_the_cache_is_written_where_it_was_reserved(tiny_model, prompts):
    from unittest import mock

    model = tiny_model("attention")
    with mock.patch.object(
        type(model), "initial_state", autospec=True, side_effect=type(model).initial_state
    ) as made:
        ib.generate(model, prompts, max_new_tokens=3)
    (call,) = made.call_args_list
    assert call.kwargs == {"max_seq_len": 8 + 3}


def test_explicit_models_generate_too(family, explicit_model, prompts):
    model = explicit_model(family)
    found = ib.generate(model, prompts, max_new_tokens=COUNT, warm_start=True)
    assert found.iterations is None
    assert found.prompt is None
    for row, prompt in enumerate(prompts):
        assert torch.equal(found.tokens[row], by_hand(model, prompt, COUNT))


def test_padded_vocabulary_is_never_generated(tiny_model, prompts):
    model = tiny_model("mamba2")
    with torch.no_grad():
        model.embedding.weight[19:] = 50 * model.embedding.weight[:5]
    found = ib.generate(model, prompts, max_new_tokens=COUNT, return_logits=True, temperature=3.0)
    assert found.logits.shape[-1] == 19
    assert found.tokens.max() < 19


def test_what_makes_no_sense_is_refused(tiny_model, prompts):
    model = tiny_model("mamba2")

    def refused(message, given=prompts, **options):
        with pytest.raises(ValueError, match=message):
            ib.generate(model, given, **({"max_new_tokens": 2} | options))
        with pytest.raises(ValueError, match=message):
            ib.stream(model, given, **({"max_new_tokens": 2} | options))  # before the first token

    refused("there are no prompts", given=[])
    refused("prompt 1 has shape", given=[[1], []])
    refused("prompt 1 is the text 'It was'; give its tokens", given=[[1], "It was"])
    refused("prompt 0 is the text 'It was'; give its tokens", given="It was")
    refused("prompt 0 is the number 3; give a list of prompts", given=[3, 1])
    refused("at least one token", given=torch.zeros(2, 0, dtype=torch.int64))
    refused("prompt 1 is empty", given=torch.ones(2, 2).long(), attention_mask=torch.tensor([[1, 1], [0, 0]]))
    refused("prompt 3 has 8 tokens, more than the 7 of max_length", max_length=7)
    refused("prompt 0 has token 19, and the model knows 0 to 18", given=[[19]])
    refused("prompt 0 has token -1", given=[[-1]])
    refused("with lists of tokens", attention_mask=torch.ones(4, 8))
    refused("one flag per token", given=torch.ones(2, 2).long(), attention_mask=torch.ones(2, 3))
    refused("max_new_tokens is 0", max_new_tokens=0)
    refused("temperature is -1", temperature=-1.0)
    refused("top_k and top_p require a temperature", top_k=3)
    refused("top_k is 0", temperature=1.0, top_k=0)
    refused("top_k is 1.5; choose an integer", temperature=1.0, top_k=1.5)
    refused("top_p is 1.5", temperature=1.0, top_p=1.5)
    refused("2 seeds for 4 rows", temperature=1.0, seed=[1, 2])
    for seed in (0.5, None, 2**63):
        refused(f"a seed is {seed}; choose integers", temperature=1.0, seed=seed)
    refused("prompt 0 holds torch.float32; give tokens as integers", given=[[1.5]])
    refused("prompts holds torch.float32; give tokens", given=torch.ones(2, 2))
    refused("stop_token_ids is the number 3; give a list of tokens, .3.$", stop_token_ids=3)
    refused("stop_token_ids have 19, and the model knows 0 to 18", stop_token_ids=[1, 19])
    model.train()
    refused("training mode")
    with pytest.raises(ValueError, match="to_library"):
        ib.generate(torch.nn.Linear(2, 2), prompts, max_new_tokens=1)
