"""``generate`` of transformers with the library's models: modes, caches and errors."""

from __future__ import annotations

import copy

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

from implicit_blocks.hf import ImplicitCache  # noqa: E402  # after the skip

CACHES = {"mamba2": "cache_params", "attention": "past_key_values"}
MODES = {
    "greedy": {},
    "sampling": {"do_sample": True, "temperature": 0.7, "top_k": 8, "top_p": 0.9},
    "beams": {"num_beams": 3},
    "beam-sampling": {"num_beams": 2, "do_sample": True},
    "several-of-each": {"do_sample": True, "num_return_sequences": 2},
    "several-beams": {"num_beams": 4, "num_return_sequences": 3, "length_penalty": 0.5},
}


@pytest.fixture
def lively_model(tiny_model):
    """Return a function that builds models of one layer whose tokens differ between prompts.

    The caches of several layers are in test_transformers_classes.py.
    """

    def make(*arguments, **changes):
        model = tiny_model(*arguments, **({"n_layers": 1} | changes))
        with torch.no_grad():
            model.get_input_embeddings().weight.mul_(20)
            model.get_input_embeddings().weight[18] = 0  # padding, which is not generated
        return model

    return make


def prompts(ids):
    """Return prompts of unequal length, padded on the left by 18."""
    padded, mask = ids.clone(), torch.ones_like(ids)
    padded[1, :4], mask[1, :4] = 18, 0
    padded[2, :1], mask[2, :1] = 18, 0
    return {"input_ids": padded, "attention_mask": mask, "pad_token_id": 18}


def run(model, ids, **options):
    torch.manual_seed(11)
    return model.generate(**prompts(ids), **({"max_new_tokens": 4, "do_sample": False} | options))


@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
def test_every_mode_gives_equal_tokens_with_any_cache(family, lively_model, ids, mode):
    """Left-padded, at a tight tolerance, token for token."""
    model = lively_model(family)
    plain = run(model, ids, use_cache=False, **mode)
    assert plain.shape[1] == 13
    for implementation in ("dynamic", "static"):
        assert torch.equal(run(model, ids, cache_implementation=implementation, **mode), plain)


@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
def test_padded_vocabulary_is_never_generated(family, lively_model, ids, mode):
    """No tokenizer knows these entries; here they would be by far the most likely."""
    model = lively_model(family, pad_vocab_to=32, tie_embeddings=False)
    assert model.config.vocab_size == 32
    with torch.no_grad():
        model.lm_head.weight[19:] = 1e3 * torch.randn(13, 16, generator=torch.Generator().manual_seed(2))
        free = model(ids).logits.argmax(-1)
    assert (free >= 19).all()
    assert (run(model, ids, **mode) < 19).all()
    with pytest.raises(ValueError, match=r"prompt 0 has token 20.*0 to 18"):
        model.generate(torch.full_like(ids, 20), pad_token_id=18)


def test_batch_mates_do_not_change_a_row(family, lively_model, ids):
    model = lively_model(family)
    options = {
        "max_new_tokens": 4,
        "do_sample": False,
        "output_logits": True,
        "return_dict_in_generate": True,
    }
    together = model.generate(**prompts(ids), **options)
    for row, first in enumerate((0, 4, 1)):
        alone = model.generate(ids[row : row + 1, first:], pad_token_id=18, **options)
        assert torch.equal(alone.sequences[0, -4:], together.sequences[row, -4:])
        for a, b in zip(alone.logits, together.logits, strict=True):
            torch.testing.assert_close(a[0], b[row], atol=1e-5, rtol=0)


def test_a_stop_token_ends_only_its_row(family, lively_model, ids):
    model = lively_model(family)
    free = run(model, ids)
    stop = int(free[0, 10])
    stopped = run(model, ids, eos_token_id=stop)
    for row in range(3):
        found = free[row, 9:].tolist()
        expected = found[: found.index(stop) + 1] if stop in found else found
        expected += [18] * (stopped.shape[1] - 9 - len(expected))
        assert stopped[row, 9:].tolist() == expected[: stopped.shape[1] - 9]


def test_streamers_receive_every_token(family, lively_model, ids):
    class Streamer(transformers.generation.BaseStreamer):
        def __init__(self):
            self.seen, self.ended = [], False

        def put(self, value):
            self.seen += value.flatten().tolist()

        def end(self):
            self.ended = True

    model, streamer = lively_model(family), Streamer()
    out = model.generate(ids[:1], max_new_tokens=5, do_sample=False, pad_token_id=18, streamer=streamer)
    assert streamer.seen == out[0].tolist()
    assert streamer.ended


def test_generation_continues_from_a_cache(family, lively_model, ids):
    model = lively_model(family)
    name = CACHES[family]
    options = {"do_sample": False, "pad_token_id": 18}
    whole = model.generate(ids, max_new_tokens=5, **options)
    first = model.generate(ids, max_new_tokens=3, return_dict_in_generate=True, **options)
    cache = first.past_key_values  # transformers' name for all families
    assert isinstance(cache, ImplicitCache)
    assert cache.get_seq_length() == 11  # the last token is not in it
    padded = torch.ones_like(first.sequences)
    for mask in ({}, {"attention_mask": padded}):
        given = {name: copy.deepcopy(cache)}
        rest = model.generate(first.sequences, max_new_tokens=2, **given, **mask, **options)
        assert torch.equal(rest, whole)
        assert given[name].get_seq_length() == 13
    new = model.generate(
        first.sequences[:, 11:], max_new_tokens=2, attention_mask=padded, **given | {name: cache}, **options
    )
    assert torch.equal(new[:, 1:], whole[:, 12:])


def test_prompts_are_solved_in_windows(lively_model, ids):
    model = lively_model("attention")
    assert torch.equal(run(model, ids, prefill_chunk_size=4), run(model, ids))


@pytest.mark.parametrize(
    "knobs",
    [
        {"warm_start": True},
        {"moving_average": 0.6},
        {"damping": 0.7, "warm_start": True},
        {"window_length": 2},
    ],
    ids=str,
)
def test_search_options_reach_the_search(family, lively_model, ids, knobs):
    model = lively_model(family)
    assert torch.equal(run(model, ids, **knobs), run(model, ids, use_cache=False))
    with torch.no_grad():
        found = model(ids, max_iterations=2, tolerance=0.0, **({"window_length": 1} | knobs))
        plain = model(ids, max_iterations=2, tolerance=0.0, window_length=1)
    assert not torch.equal(found.logits, plain.logits)


def test_assisted_generation_gives_equal_tokens(lively_model, ids):
    """Prompt lookup and a smaller model both propose tokens, and wrong ones are removed from the cache."""
    model, helper = lively_model("attention", n_layers=2), lively_model("attention")
    prompt = torch.cat((ids[:1], ids[:1, :5]), 1)
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 18}
    plain = model.generate(prompt, **options)
    assert torch.equal(model.generate(prompt, prompt_lookup_num_tokens=3, **options), plain)
    assert torch.equal(model.generate(prompt, assistant_model=helper, **options), plain)
    assert torch.equal(model.generate(prompt, assistant_model=model, **options), plain)
    with pytest.raises(ValueError, match="stateful"):
        lively_model("mamba2").generate(prompt, prompt_lookup_num_tokens=3, **options)


@pytest.mark.parametrize("max_seq_len", [None, 20])
@torch.no_grad()
def test_cropping_removes_the_last_tokens(lively_model, ids, max_seq_len):
    model = lively_model("attention")
    mask = torch.ones_like(ids)
    mask[1, :4] = 0
    mask[2, 7:] = 0
    name = "past_key_values"
    cache = model(ids, attention_mask=mask, use_cache=True, **{name: ImplicitCache(max_seq_len)})[name]
    assert cache.is_croppable
    cache.crop(0)
    assert cache.get_seq_length() == 9
    cache.crop(-4)
    assert cache.get_seq_length() == 5
    shorter = model(ids[:, :5], attention_mask=mask[:, :5], use_cache=True)[name]
    assert torch.equal(cache.state.next_position, shorter.state.next_position)
    more = ids[:, :3]
    for knobs in ({}, {"warm_start": True}):
        found = model(more, **{name: copy.deepcopy(cache)}, **knobs).logits
        expected = model(more, **{name: copy.deepcopy(shorter)}).logits
        torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-4)
    with pytest.raises(ValueError, match="6 tokens cannot be removed from the 5"):
        cache.crop(-6)


@torch.no_grad()
def test_cropping_a_recurrent_state_is_an_error(lively_model, ids):
    cache = lively_model("mamba2")(ids, use_cache=True).cache_params
    assert not cache.is_croppable
    cache.crop(0)
    with pytest.raises(ValueError, match=r"a recurrent state.*deepcopy"):
        cache.crop(-1)
    with pytest.raises(ValueError, match="contains no tokens"):
        ImplicitCache().crop(-1)


GUIDED = {
    "more": {"guidance_scale": 1.7},
    "none": {"guidance_scale": 0.0},
    "negative-prompt": {"guidance_scale": 1.7, "negative_prompt_ids": [[3, 1, 4]]},
}


@pytest.mark.parametrize("guided", GUIDED.values(), ids=GUIDED)
def test_guidance_combines_the_logits_of_both_prompts(family, lively_model, ids, guided):
    """The reference has no cache; a scale of 0 also excludes padding entries of the vocabulary."""
    model = lively_model(family, pad_vocab_to=32, tie_embeddings=False)
    scale = guided["guidance_scale"]
    other = torch.tensor(guided.get("negative_prompt_ids", ids[:1, -1:].tolist()))
    given = guided | ({"negative_prompt_ids": other} if "negative_prompt_ids" in guided else {})
    options = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 18}
    prompt, rest = ids[:1], other
    for _ in range(3):
        with torch.no_grad():
            conditional, unconditional = (model(row).logits[:, -1].log_softmax(-1) for row in (prompt, rest))
        mixed = scale * (conditional - unconditional) + unconditional
        token = mixed[:, :19].argmax(-1, keepdim=True)
        prompt, rest = torch.cat((prompt, token), 1), torch.cat((rest, token), 1)
    for use_cache in (True, False):
        found = model.generate(ids[:1], use_cache=use_cache, **given, **options)
        assert torch.equal(found, prompt)


def test_guidance_with_beams_is_refused(family, lively_model, ids):
    """Transformers does not reorder the cache of the unconditional branch."""
    with pytest.raises(ValueError, match="guidance_scale with num_beams=2 is not supported"):
        lively_model(family).generate(ids, max_new_tokens=2, num_beams=2, guidance_scale=1.5, pad_token_id=18)


def test_guidance_uses_the_search_options_of_generate(family, lively_model, ids):
    model, seen = lively_model(family), []
    model.register_forward_hook(lambda *given: seen.append(int(given[-1].solution.iterations.max())))
    model.generate(
        ids[:1],
        max_new_tokens=2,
        do_sample=False,
        pad_token_id=18,
        guidance_scale=1.5,
        max_iterations=2,
        tolerance=0.0,
    )
    assert seen == [2] * 4


def test_stop_strings_end_a_text(family, lively_model, ids):
    """The tokenizer is an argument of ``generate``, which transformers also passes to the model."""
    from tokenizers import Tokenizer, decoders, models

    letters = {letter: token for token, letter in enumerate("abcdefghijklmnopqrs")}
    inner = Tokenizer(models.BPE(vocab=letters, merges=[]))
    inner.decoder = decoders.Fuse()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="s")
    model = lively_model(family)
    free = model.generate(ids[:1], max_new_tokens=8, do_sample=False, pad_token_id=18)[0]
    made = tokenizer.decode(free[9:])
    ended = model.generate(
        ids[:1],
        max_new_tokens=8,
        do_sample=False,
        pad_token_id=18,
        stop_strings=[made[2]],
        tokenizer=tokenizer,
    )[0]
    assert torch.equal(ended, free[: 9 + made.index(made[2]) + 1])
    pipe = transformers.pipeline("text-generation", model=model, tokenizer=tokenizer)
    prompt = "".join("abcdefghijklmnopqrs"[token] for token in ids[0].tolist())
    (answer,) = pipe(prompt, max_new_tokens=8, do_sample=False, stop_sequence=made[2], return_tensors=True)
    assert answer["generated_token_ids"] == ended.tolist()


def test_invalid_prompts_are_refused(family, lively_model, ids):
    model = lively_model(family)
    options = {"max_new_tokens": 2, "pad_token_id": 18}
    with pytest.raises(ValueError, match="at least one token"):
        model.generate(ids[:, :0], **options)
    empty = torch.ones_like(ids)
    empty[2] = 0
    with pytest.raises(ValueError, match="prompt 2 is empty"):
        model.generate(ids, attention_mask=empty, **options)
    behind = torch.ones_like(ids)
    behind[1, 7:] = 0
    with pytest.raises(ValueError, match=r"prompt 1 is padded on the right.*left"):
        model.generate(ids, attention_mask=behind, **options)
    with pytest.raises(ValueError, match=r"prompt 0 has token 19.*0 to 18"):
        model.generate(torch.full_like(ids, 19), **options)
    with pytest.raises(ValueError, match="at least one token"):
        model.generate(inputs_embeds=model.get_input_embeddings()(ids)[:, :0], **options)
    other = {"mamba2": "past_key_values", "attention": "cache_params"}[family]
    with pytest.raises(
        ValueError, match=f"pass the cache of these models as {CACHES[family]}, not as {other}"
    ):
        model(ids, **{other: ImplicitCache()})


def test_the_number_of_positions_in_the_configuration_limits_no_prompt(family, lively_model, ids):
    """The models have none: rotary positions and recurrent states continue beyond the training length."""
    model = lively_model(family)
    expected = model.generate(ids, max_new_tokens=3, do_sample=False, pad_token_id=18)
    model.config.max_position_embeddings = 8
    assert torch.equal(model.generate(ids, max_new_tokens=3, do_sample=False, pad_token_id=18), expected)
