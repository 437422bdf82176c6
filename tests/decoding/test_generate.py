"""``generate``: each row gets the tokens it would get alone, in any batch, padding or window."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

import implicit_blocks as ib
from implicit_blocks.layers import WeightNorm

COUNT = 7
MODES = {
    "greedy": {},
    "sampling": {"temperature": 1.5, "seed": [3, 1, 4, 1]},
    "top-k-and-p": {"temperature": 2.0, "top_k": 6, "top_p": 0.8, "seed": [2, 7, 1, 8]},
}


@torch.no_grad()
def recomputed(model, prompt, count):
    """Recompute the whole sequence for each greedy token."""
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


def test_greedy_tokens_equal_those_of_full_recomputation(family, tiny_model, prompts):
    model = tiny_model(family)
    found = ib.generate(model, prompts, max_new_tokens=COUNT)
    assert found.converged.all()
    assert found.prompt.converged.all()
    assert found.lengths.eq(COUNT).all()
    assert not found.stopped.any()
    for row, prompt in enumerate(prompts):
        assert torch.equal(found.tokens[row], recomputed(model, prompt, COUNT))
    assert len(set(map(tuple, found.tokens.tolist()))) == len(prompts)  # no two rows are equal


@pytest.mark.parametrize(
    ("mode", "tolerance"), [("greedy", 1e-2), ("greedy", 1e-6), ("sampling", 1e-2), ("top-k-and-p", 1e-2)]
)
def test_a_row_generates_the_same_alone_and_in_a_batch(family, tiny_model, prompts, mode, tolerance):
    model, sampling = tiny_model(family), MODES[mode]
    options = {"max_new_tokens": COUNT, "return_logits": True, "tolerance": tolerance}
    together = ib.generate(model, prompts, **options, **sampling)
    for row, prompt in enumerate(prompts):
        alone = ib.generate(model, [prompt], **options, **alone_with(sampling, row))
        assert torch.equal(alone.tokens[0], together.tokens[row])
        torch.testing.assert_close(alone.logits[0], together.logits[row], atol=1e-5, rtol=0)
        if tolerance > 1e-6:  # at 1e-6 rounding in float32 may cost one more iteration
            assert torch.equal(alone.iterations[0], together.iterations[row])


@pytest.mark.parametrize("search", [{"tolerance": 0.05}, {"loops": 2}], ids=str)
def test_windows_of_a_row_do_not_depend_on_the_padding(family, tiny_model, prompts, search):
    model = tiny_model(family)
    options = {"max_new_tokens": COUNT, "return_logits": True, "window_length": 2, **search}
    ids, mask = padded(prompts, left=True)
    for found in (
        ib.generate(model, prompts, **options),
        ib.generate(model, ids, attention_mask=mask, **options),
    ):
        for row, prompt in enumerate(prompts):
            alone = ib.generate(model, [prompt], **options)
            assert torch.equal(alone.tokens[0], found.tokens[row])
            assert torch.equal(alone.iterations[0], found.iterations[row])
            assert torch.equal(alone.prompt.iterations[0], found.prompt.iterations[row])
            torch.testing.assert_close(alone.logits[0], found.logits[row], atol=1e-5, rtol=0)


def test_padding_side_and_window_length_do_not_change_tokens(family, tiny_model, prompts):
    model = tiny_model(family)
    expected = ib.generate(model, prompts, max_new_tokens=COUNT, return_logits=True)
    for left, window_length in ((True, None), (True, 3), (False, None), (False, 1)):
        ids, mask = padded(prompts, left=left)
        options = {"max_new_tokens": COUNT, "window_length": window_length, "return_logits": True}
        found = ib.generate(model, ids, attention_mask=mask, **options)
        assert torch.equal(found.tokens, expected.tokens)
        torch.testing.assert_close(found.logits, expected.logits, atol=1e-4, rtol=0)


@pytest.mark.parametrize("search", [{"warm_start": True}, {"moving_average": 0.6}, {"damping": 0.7}], ids=str)
def test_search_options_do_not_change_greedy_tokens(family, tiny_model, prompts, search):
    model = tiny_model(family)
    plain = ib.generate(model, prompts, max_new_tokens=COUNT)
    found = ib.generate(model, prompts, max_new_tokens=COUNT, **search)
    assert torch.equal(found.tokens, plain.tokens)
    assert not torch.equal(found.iterations, plain.iterations)
    loose = {"max_new_tokens": COUNT, "tolerance": 1e-2, "return_logits": True}
    together = ib.generate(model, prompts, **loose, **search)
    for row, prompt in enumerate(prompts):
        alone = ib.generate(model, [prompt], **loose, **search)
        assert torch.equal(alone.tokens[0], together.tokens[row])
        torch.testing.assert_close(alone.logits[0], together.logits[row], atol=1e-5, rtol=0)


@pytest.mark.parametrize("token", [-1, 99])
def test_token_ids_at_padding_are_ignored(tiny_model, prompts, token):
    model, (ids, mask) = tiny_model("attention"), padded(prompts, left=True)
    expected = ib.generate(model, ids, attention_mask=mask, max_new_tokens=2)
    found = ib.generate(model, ids.masked_fill(mask == 0, token), attention_mask=mask, max_new_tokens=2)
    assert torch.equal(found.tokens, expected.tokens)


@pytest.mark.parametrize("mode", ["greedy", "sampling"])
def test_a_stopped_row_does_not_affect_the_others(family, tiny_model, prompts, mode):
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


def test_stream_yields_the_tokens_of_generate_step_by_step(family, tiny_model, prompts):
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
    assert len(calls) < 200  # the prompt and the first token only


@pytest.mark.parametrize("in_flight", [1, 4])
def test_stream_reports_the_statistics_of_generate(family, tiny_model, prompts, in_flight):
    model = tiny_model(family, tolerance=1e-3)
    options = {"max_new_tokens": COUNT, "max_in_flight": in_flight, "max_length": 12}
    expected = ib.generate(model, prompts, **options).statistics
    steps = ib.stream(model, prompts, **options)
    assert steps.statistics.calls == 0
    next(steps)
    begun = steps.statistics.calls
    assert len(list(steps)) > 1
    assert begun < expected.calls
    assert steps.statistics == expected


def test_decoding_computes_each_token_once_and_weights_once(tiny_model, prompts):
    model = tiny_model("attention")
    lengths = []
    model.backbone.norm.register_forward_pre_hook(lambda _, args: lengths.append(args[0].shape[1]))
    with mock.patch.object(WeightNorm, "compute", side_effect=WeightNorm.compute) as compute:
        found = ib.generate(model, prompts[:1], max_new_tokens=4, max_in_flight=1)
    assert compute.call_count == sum(isinstance(m, WeightNorm) for m in model.modules())
    decoding = lengths[lengths.index(1) :]
    assert set(decoding) == {1}
    assert len(decoding) == int((found.iterations[0, 1:] + 1).sum())


def test_generate_reserves_the_cache_for_prompt_and_new_tokens(tiny_model, prompts):
    model = tiny_model("attention")
    with mock.patch.object(
        type(model), "initial_state", autospec=True, side_effect=type(model).initial_state
    ) as made:
        ib.generate(model, prompts, max_new_tokens=3, max_in_flight=1)
    (call,) = made.call_args_list
    assert call.kwargs == {"max_seq_len": 8 + 3}


def test_explicit_models_generate_the_tokens_of_full_recomputation(family, explicit_model, prompts):
    model = explicit_model(family)
    found = ib.generate(model, prompts, max_new_tokens=COUNT, warm_start=True)
    assert found.iterations is None
    assert found.prompt is None
    for row, prompt in enumerate(prompts):
        assert torch.equal(found.tokens[row], recomputed(model, prompt, COUNT))


def test_padded_vocabulary_is_never_generated(tiny_model, prompts):
    model = tiny_model("mamba2")
    with torch.no_grad():
        model.embedding.weight[19:] = 50 * model.embedding.weight[:5]
    found = ib.generate(model, prompts, max_new_tokens=COUNT, return_logits=True, temperature=3.0)
    assert found.logits.shape[-1] == 19
    assert found.tokens.max() < 19


def test_invalid_prompts_and_options_are_refused(tiny_model, prompts):
    model = tiny_model("mamba2")

    def check_refused(message, given=prompts, **options):
        with pytest.raises(ValueError, match=message):
            ib.generate(model, given, **({"max_new_tokens": 2} | options))
        with pytest.raises(ValueError, match=message):
            ib.stream(model, given, **({"max_new_tokens": 2} | options))  # raised before the first token

    check_refused("no prompts", given=[])
    check_refused("prompt 1 .*shape", given=[[1], []])
    check_refused("prompt 1 .*'It was'", given=[[1], "It was"])
    check_refused("prompt 0 .*'It was'", given="It was")
    check_refused("prompt 0 .*3", given=[3, 1])
    check_refused("token", given=torch.zeros(2, 0, dtype=torch.int64))
    padding_only = torch.tensor([[1, 1], [0, 0]])
    check_refused("prompt 1 .*empty", given=torch.ones(2, 2).long(), attention_mask=padding_only)
    check_refused("prompt 3 .*8 tokens.* 7 .*max_length", max_length=7)
    check_refused("prompt 0 .*19.* 0 to 18", given=[[19]])
    check_refused("prompt 0 .*-1", given=[[-1]])
    check_refused("attention_mask|lists", attention_mask=torch.ones(4, 8))
    check_refused("flag|attention_mask", given=torch.ones(2, 2).long(), attention_mask=torch.ones(2, 3))
    check_refused("max_new_tokens .*0", max_new_tokens=0)
    check_refused("temperature .*-1", temperature=-1.0)
    check_refused("top_k and top_p", top_k=3)
    check_refused("top_k .*0", temperature=1.0, top_k=0)
    check_refused("top_k .*1.5", temperature=1.0, top_k=1.5)
    check_refused("top_p .*1.5", temperature=1.0, top_p=1.5)
    check_refused("2 seeds.* 4 rows", temperature=1.0, seed=[1, 2])
    for seed in (0.5, None, 2**63):
        check_refused(f"seed .*{seed}", temperature=1.0, seed=seed)
    check_refused("prompt 0 .*float32", given=[[1.5]])
    check_refused("prompts .*float32", given=torch.ones(2, 2))
    check_refused("stop_token_ids .*3", stop_token_ids=3)
    check_refused("stop_token_ids .*19.* 0 to 18", stop_token_ids=[1, 19])
    model.train()
    check_refused("training mode")
    with pytest.raises(ValueError, match="to_library"):
        ib.generate(torch.nn.Linear(2, 2), prompts, max_new_tokens=1)
