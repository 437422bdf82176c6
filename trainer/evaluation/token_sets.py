"""Sets of held-out tokens on which a trained model's perplexity is measured."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from trainer.data.chat import ChatData
from trainer.data.source import EvaluationSet
from trainer.data.token_folder import open_tokens
from trainer.data.tokens import TokenData
from trainer.evaluation.eval_model import EvalModel


def token_sets(
    tokens: Path | None, eval_model: EvalModel, *, lengths: Sequence[int] | None, limit: int | None
) -> list[EvaluationSet]:
    """Return a set of at most ``limit`` sequences for each length.

    Args:
        tokens: held-out tokens; None: no set.
        eval_model: the model that they are for.
        lengths: in tokens; None: 1, 2, 4 and 8 times the training length.
        limit: maximum number of sequences of a set; None: all.

    Raises:
        ValueError: lengths without tokens, or tokens that are not the model's.

    """
    if tokens is None:
        if lengths:
            raise ValueError("--lengths requires --tokens")
        return []
    lengths = lengths or [eval_model.length * factor for factor in (1, 2, 4, 8)]
    vocab_size = getattr(eval_model.spec, "vocab_size", None)
    sets = []
    for length in lengths:
        source = _held_out(tokens, length, vocab_size, eval_model)
        made_by, known = source.files.tokenizer, eval_model.token_identity
        if made_by is not None and known is not None and made_by != known:
            raise ValueError(
                f"the tokens in {source.files.path} were written with a different tokenizer than those that "
                f"{eval_model.name} was trained on (SHA-256 {made_by[:16]}…, not {known[:16]}…); tokenize "
                "the text with its own"
            )
        count = source.samples if limit is None else min(limit, source.samples)
        name = f"L{length} ({count} sequences)"
        sets.append(EvaluationSet(name=name, source=source, sequences=count))
    return sets


def _held_out(
    tokens: Path, length: int, vocab_size: int | None, eval_model: EvalModel
) -> TokenData | ChatData:
    """Open held-out tokens; of conversations only the answers are scored."""
    files = open_tokens(tokens)
    if files.has_targets:
        return ChatData(tokens, length=length, vocab_size=vocab_size)
    if eval_model.documents == "reset" and files.documents is None:
        raise ValueError(
            f"{eval_model.name} was trained with separate documents (data.documents=reset), but {files.path} "
            "has no document ends; write the tokens by python -m trainer.tokenize"
        )
    return TokenData(tokens, length=length, vocab_size=vocab_size, documents=eval_model.documents)
