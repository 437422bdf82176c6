"""The command ``generate``: continue prompts, given as text or token IDs, with a trained model."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Unpack

from torch import Tensor

from implicit_blocks._utils.devices import choose_device
from implicit_blocks._utils.stop_strings import StopScanner
from implicit_blocks.checkpoints.find import BYTES
from implicit_blocks.checkpoints.load_model import load_model
from implicit_blocks.checkpoints.run_folder import tokenizer_of
from implicit_blocks.decoding.generated import Generated
from implicit_blocks.decoding.generation import Options, generate
from implicit_blocks.decoding.processors import with_transformers
from implicit_blocks.decoding.sampling import Sampling
from implicit_blocks.models.language_model import LanguageModel


class Language(NamedTuple):
    """Conversions between the text of prompts and tokens."""

    encode: Callable[[str], list[int]]
    decode: Callable[[list[int]], str]
    stop_token_ids: tuple[int, ...] = ()


def continue_prompts(
    source: Path,
    prompts: Sequence[str],
    *,
    spec: str | None = None,
    tokenizer: Path | None = None,
    device: str = "auto",
    min_p: float | None = None,
    repetition_penalty: float | None = None,
    stop: Sequence[str] = (),
    **options: Unpack[Options],
) -> None:
    """Print each prompt with its continuation, and a summary of the searches on stderr.

    Args:
        source: see ``load_model``.
        prompts: text, or without a tokenizer token IDs such as ``"0 3 2"``.
        spec: the spec of the model, where the source has none.
        tokenizer: a ``tokenizer.json``, a folder with one, or ``bytes``. None: the tokenizer in the source or
            of the run's data, if it is known.
        device: the device, such as ``cpu`` or ``cuda:1``; ``auto`` is CUDA if available.
        min_p: sample from the tokens whose probability is at least this share of the largest one, after
            top-k and top-p (transformers' ``MinPLogitsWarper``).
        repetition_penalty: divide the positive logits of tokens that occur in the text by this number, and
            multiply the negative ones (transformers' ``RepetitionPenaltyLogitsProcessor``).
        stop: a continuation ends before the first of these texts.
        **options: as for ``generate``.

    Raises:
        ValueError: as for ``load_model`` and ``generate``; an invalid tokenizer; prompts that are not IDs.
        ImportError: for ``min_p``, ``repetition_penalty``, and a tokenizer other than ``bytes``, if
            transformers is not installed.

    """
    found = tokenizer if tokenizer is not None else tokenizer_of(source)
    language = _numbers() if found is None else _bytes() if str(found) == BYTES else _words(found)
    place = choose_device(device)
    model: LanguageModel = load_model(source, spec=spec).to(place)
    ids = [language.encode(prompt) for prompt in prompts]
    options["stop_token_ids"] = language.stop_token_ids
    if any(not text for text in stop):
        raise ValueError("--stop has an empty text; give at least one character")
    if stop:
        options["stopping_criteria"] = _EndsWith(language, stop)
    if min_p is not None or repetition_penalty is not None:
        rule = Sampling(
            temperature=options.get("temperature", 0.0),
            top_k=options.get("top_k"),
            top_p=options.get("top_p"),
        )
        options["logits_processor"], rule = with_transformers(
            rule, min_p=min_p, repetition_penalty=repetition_penalty
        )
        options["temperature"], options["top_k"], options["top_p"] = rule.temperature, rule.top_k, rule.top_p
    outputs = generate(model, ids, **options)
    for row, prompt in enumerate(ids):
        whole = language.decode([*prompt, *outputs.tokens[row, : int(outputs.lengths[row])].tolist()])
        prompt_length = len(language.decode(prompt)) if stop else len(whole)
        print(whole[:prompt_length] + _before(stop, whole[prompt_length:]))
    if (message := _summary_line(outputs)) is not None:
        print(message, file=sys.stderr)


class _EndsWith:
    """A stopping criterion: one of several texts ends in the newest token."""

    def __init__(self, language: Language, stops: Sequence[str]) -> None:
        self.decode, self.stops = language.decode, stops
        self.window = 4 * max(map(len, stops)) + 8  # tokens; a character has at most four bytes

    def __call__(self, input_ids: Tensor, scores: Tensor) -> bool:
        """Return whether a text is complete with the last of the tokens, (1, T)."""
        ids = input_ids[0, -self.window :].tolist()
        text, before = self.decode(ids), self.decode(ids[:-1]).rstrip("\N{REPLACEMENT CHARACTER}")
        return any(text.find(stop, max(0, len(before) - len(stop) + 1)) >= 0 for stop in self.stops)


def _before(stops: Sequence[str], text: str) -> str:
    """Return a text up to the first of several others."""
    scanner = StopScanner(stops)
    released, found = scanner.push(text)
    return released if found else released + scanner.finish()


def _words(path: Path) -> Language:
    from implicit_blocks.hf.tokenizer import load_tokenizer

    tokenizer: Any = load_tokenizer(path)
    return Language(
        encode=lambda text: list(tokenizer.encode(text, add_special_tokens=False)),
        decode=lambda ids: str(tokenizer.decode(ids, skip_special_tokens=True)),
        stop_token_ids=() if tokenizer.eos_token_id is None else (int(tokenizer.eos_token_id),),
    )


def _bytes() -> Language:
    """UTF-8 bytes as tokens, and 256 as the end of a text; requires no package."""
    return Language(
        encode=lambda text: list(text.encode("utf-8", errors="surrogateescape")),  # as the shell gave it
        decode=lambda ids: bytes(token for token in ids if token < 256).decode("utf-8", errors="replace"),
        stop_token_ids=(256,),
    )


def _numbers() -> Language:
    def encode(text: str) -> list[int]:
        try:
            return [int(word) for word in text.split()]
        except ValueError:
            raise ValueError(
                f"the prompt {text!r} is not a list of token IDs, and no tokenizer was found to encode text; "
                "name one with --tokenizer, or give IDs such as '0 3 2'"
            ) from None

    return Language(encode=encode, decode=lambda ids: " ".join(map(str, ids)))


def _summary_line(outputs: Generated) -> str | None:
    if outputs.iterations is None or outputs.converged is None:
        return None
    real = [row[: int(length)] for row, length in zip(outputs.iterations, outputs.lengths, strict=True)]
    mean = sum(float(row.sum()) for row in real) / max(1, int(outputs.lengths.sum()))
    unconverged = int((~outputs.converged).sum())
    left = "all converged" if not unconverged else f"{unconverged} did not converge"
    return f"{int(outputs.lengths.sum())} tokens, {mean:.1f} iterations each, {left}"
