"""Logits processors and stopping criteria of transformers in our generation, and functions like them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import implicit_blocks as ib
from implicit_blocks.decoding import ContinuousDecoder, Request, Sampling
from implicit_blocks.decoding.slots.generation import SlotGeneration

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

from transformers import generation as hf  # noqa: E402  # after the skip

from implicit_blocks.hf import from_library  # noqa: E402  # the same

NEW = 7


def allowed_choice(_: int, ids: Tensor) -> list[int]:
    """Allow one of two sequences of tokens after the prompt, [3, 5, 3, 5, …] or [4, 6, 4, 6, …]."""
    return {3: [5], 5: [3], 4: [6], 6: [4]}.get(int(ids[-1]), [3, 4])


PROCESSORS: dict[str, Any] = {
    "repetition penalty": {"repetition_penalty": 1.7},
    "bad words": {"bad_words_ids": [[15], [5, 18], [6, 6]]},
    "no repeated tokens": {"no_repeat_ngram_size": 1},
    "guided choice": {"prefix_allowed_tokens_fn": allowed_choice},
    "penalty and length": {"repetition_penalty": 1.3, "min_new_tokens": 4, "eos_token_id": 7},
}


def processors_of(options: dict[str, Any], *, prompt: int) -> hf.LogitsProcessorList:
    """Return the processors that transformers makes of its options."""
    made: list[Any] = []
    if "repetition_penalty" in options:
        made.append(hf.RepetitionPenaltyLogitsProcessor(options["repetition_penalty"]))
    if "no_repeat_ngram_size" in options:
        made.append(hf.NoRepeatNGramLogitsProcessor(options["no_repeat_ngram_size"]))
    if "bad_words_ids" in options:
        made.append(hf.NoBadWordsLogitsProcessor(options["bad_words_ids"], eos_token_id=None))
    if "min_new_tokens" in options:
        made.append(
            hf.MinNewTokensLengthLogitsProcessor(prompt, options["min_new_tokens"], options["eos_token_id"])
        )
    if "prefix_allowed_tokens_fn" in options:
        made.append(hf.PrefixConstrainedLogitsProcessor(allowed_choice, num_beams=1))
    return hf.LogitsProcessorList(made)


@pytest.fixture
def ids() -> Tensor:
    return torch.randint(19, (3, 6), generator=torch.Generator().manual_seed(5))


@pytest.mark.parametrize("options", PROCESSORS.values(), ids=PROCESSORS)
def test_greedy_tokens_are_those_of_transformers(options, family, explicit_model, ids):
    library = explicit_model(family)
    with torch.no_grad():
        library.embedding.weight.mul_(20)  # so that logits and rows differ clearly
        for block in library.backbone.blocks():
            block.mixer.out_proj.weight.mul_(30)
    given = {"do_sample": False, "max_new_tokens": NEW, "pad_token_id": 0}
    given["attention_mask"] = torch.ones_like(ids)  # otherwise tokens 0 of the prompt count as padding
    theirs = from_library(library).generate(ids, **given, **options)[:, ids.shape[1] :]
    processors = processors_of(options, prompt=ids.shape[1])
    stops = [options["eos_token_id"]] if "eos_token_id" in options else []
    ours = ib.generate(
        library, ids, max_new_tokens=NEW, logits_processor=processors, stop_token_ids=stops, pad_token=0
    )
    plain = ib.generate(library, ids, max_new_tokens=NEW)
    assert torch.equal(ours.tokens[:, : theirs.shape[1]], theirs)
    assert not torch.equal(ours.tokens, plain.tokens)  # the processors had an effect
    streamed = ib.stream(
        library, ids, max_new_tokens=NEW, logits_processor=processors, stop_token_ids=stops, pad_token=0
    )
    assert torch.equal(torch.stack([step.tokens for step in streamed], 1), ours.tokens[:, : theirs.shape[1]])


def first_even(input_ids: Tensor, scores: Tensor) -> Tensor:
    """Exclude odd tokens after an odd number of tokens."""
    scores[:, 1::2] = -torch.inf if input_ids.shape[1] % 2 else 0.0
    return scores


def after_a_pair(input_ids: Tensor, scores: Tensor) -> Tensor:
    """End a text whose last two tokens are even."""
    return (input_ids[:, -2:] % 2 == 0).all(1)


@pytest.mark.parametrize(
    ("sampling", "family"),
    [(Sampling(), "attention"), (Sampling(temperature=0.9, top_k=9), "mamba2")],
    ids=["greedy", "drawn"],
)
@pytest.mark.parametrize("late", [False, True], ids=["at-once", "late"])  # as on a GPU
def test_rows_do_not_depend_on_the_batch_or_the_way_of_decoding(sampling, family, tiny_model, prompts, late):
    """Padded prompts, slots, tokens in flight, and requests of one decoder with different processors."""
    model = tiny_model(family, tolerance=1e-5)
    rule = {"temperature": sampling.temperature, "top_k": sampling.top_k}
    process = {"logits_processor": [first_even], "stopping_criteria": after_a_pair}
    together = ib.generate(model, prompts, max_new_tokens=NEW, seed=3, **rule, **process)
    assert set(together.lengths.tolist()) != {NEW}  # the criterion had an effect
    decoder = ContinuousDecoder(model, max_batch_size=2, max_seq_len=16, max_in_flight=4)
    decoder.on_gpu |= late
    for row, prompt in enumerate(prompts):
        alone = ib.generate(model, [prompt], max_new_tokens=NEW, seed=3 + row, **rule, **process)
        length = int(alone.lengths[0])
        assert int(together.lengths[row]) == length
        assert torch.equal(together.tokens[row, :length], alone.tokens[0, :length])
        assert bool(together.stopped[row]) == bool(alone.stopped[0])
        wanted = process if row % 2 else {}
        decoder.submit(Request(prompt=prompt, max_new_tokens=NEW, sampling=sampling, seed=3 + row, **wanted))
    slots = SlotGeneration(
        model, [torch.tensor(prompt) for prompt in prompts], limits=[NEW] * 4, sampling=sampling,
        seeds=[3, 4, 5, 6], stop_token_ids=[], pad_token=0, window_length=None, **process,
    )  # fmt: skip
    of_slots = torch.stack([step.tokens for step in slots.steps()], 1)
    assert torch.equal(of_slots, together.tokens[:, : of_slots.shape[1]])
    assert slots.stopped == together.stopped.tolist()
    plain = ib.generate(model, prompts, max_new_tokens=NEW, seed=3, **rule)
    made: dict[int, list[int]] = {row: [] for row in range(4)}
    for new in decoder.run():
        made[new.request].append(new.token)
        assert new.stopped == (new.last and len(made[new.request]) < NEW) or len(made[new.request]) == NEW
    for row, tokens in made.items():
        source = together if row % 2 else plain
        assert decoder.statistics.tokens_in_flight > 1
        assert tokens == source.tokens[row, : int(source.lengths[row])].tolist()


def test_stop_strings_of_transformers_end_a_row(tiny_model):
    from implicit_blocks.hf.tokenizer import load_tokenizer

    model = tiny_model("attention", vocab_size=257)
    tokenizer = load_tokenizer("bytes")
    letters = hf.SuppressTokensLogitsProcessor([n for n in range(257) if not 97 <= n <= 122])
    options: dict[str, Any] = {"max_new_tokens": 12, "logits_processor": [letters]}
    plain = ib.generate(model, [list(b"abc")], **options).tokens[0].tolist()
    stop = tokenizer.decode(plain[3:5])
    criteria = hf.StoppingCriteriaList([hf.StopStringCriteria(tokenizer, [stop])])
    made = ib.generate(model, [list(b"abc")], stopping_criteria=criteria, **options)
    text, length = tokenizer.decode(plain), int(made.lengths[0])
    assert made.tokens[0, :length].tolist() == plain[: text.index(stop) + 2]
    assert made.stopped.tolist() == [True]


def test_min_p_of_transformers_excludes_unlikely_tokens(tiny_model, ids):
    model = tiny_model("mamba2")
    warpers = hf.LogitsProcessorList([hf.TemperatureLogitsWarper(2.0), hf.MinPLogitsWarper(0.5)])
    made = ib.generate(
        model, ids, max_new_tokens=NEW, temperature=1.0, logits_processor=warpers, return_logits=True
    )
    probability = (made.logits / 2.0).softmax(-1)
    chosen = probability.gather(-1, made.tokens[..., None]).squeeze(-1)
    assert (chosen >= 0.5 * probability.amax(-1)).all()  # the logits are the model's, before processors


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"logits_processor": ["min_p"]}, "logits_processor has 'min_p', which cannot be called"),
        ({"stopping_criteria": 3}, "stopping_criteria has 3, which cannot be called"),
        ({"logits_processor": lambda ids, scores: scores[0]}, r"returned \(19,\); expected scores \(1, 19\)"),
        ({"logits_processor": lambda ids, scores: None}, r"returned NoneType; expected scores \(1, 19\)"),
        (
            {"logits_processor": lambda ids, scores: scores - torch.inf},
            "exclude all 19 tokens after 6 tokens",
        ),
    ],
)
def test_unusable_processors_are_refused(options, message, tiny_model, ids):
    model = tiny_model("attention")
    with pytest.raises(ValueError, match=message):
        ib.generate(model, ids, max_new_tokens=2, **options)
    decoder = ContinuousDecoder(model, max_batch_size=1, max_seq_len=16)

    def run() -> None:
        decoder.submit(Request(prompt=ids[0], max_new_tokens=2, **options))
        list(decoder.run())

    with pytest.raises(ValueError, match=message):
        run()
