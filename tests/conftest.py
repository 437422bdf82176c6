"""What all tests share: strict arithmetic, poisoned memory, and where development data lies."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

SHARED = Path(__file__).resolve().parents[2] / "shared"


@pytest.fixture(autouse=True)
def _strict_torch():
    """One thread a worker, NaN in uninitialized memory, the same seed for every test."""
    torch.set_num_threads(1)
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.manual_seed(0)


@pytest.fixture(autouse=True, scope="module")
def _no_pictures(request: pytest.FixtureRequest) -> Iterator[None]:
    """Leave out the picture at the end of a run, which takes longer than it, but for modules that look at it.

    Those say ``WITH_PICTURES = True``.
    """
    run = sys.modules.get("trainer.run.build")
    if run is None or getattr(request.module, "WITH_PICTURES", False):
        yield
        return
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(run, "draw", lambda runs, path: None)
        yield


@pytest.fixture
def shared_data() -> Path:
    """Return the folder of development data beside the repository, or skip, saying so."""
    path = SHARED / "data"
    if not path.is_dir():
        pytest.skip(f"no development data at {path}")
    return path


@pytest.fixture(scope="session")
def tokenizer_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a tokenizer.json of 300 entries: bytes, and what a few sentences have in common."""
    tokenizers = pytest.importorskip("tokenizers", reason="tokenizers is not installed")
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(SENTENCES, trainer)
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    made.save(str(path))
    return path


SENTENCES = (
    "Question: Which of these is the source of the light that the other ones only reflect?",
    "She put the lid on the pot because the water in it was about to boil over again.",
    "To clean the brush, rinse it with water; then hang it up with its head down and let it dry.",
    "Answer: the sun, the water, the wind, the other side of the moon, and the one that there was.",
)
