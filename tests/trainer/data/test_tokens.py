"""Token files and the samples cut from them."""

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.data.source import rank_share
from trainer.data.tokens import TokenData, build, write_tokens
from trainer.specs.data import TokensSpec

SHAKESPEARE = Path(__file__).parents[4] / "shared" / "data" / "tinyshakespeare"


def shards(folder: Path, sizes: list[int]) -> np.ndarray:
    """Write shards of consecutive numbers, alternately raw and .npy; return all tokens."""
    tokens = np.arange(sum(sizes))
    start = 0
    for i, size in enumerate(sizes):
        suffix = "npy" if i % 2 else "bin"
        write_tokens(folder / f"shard_{i:03d}.{suffix}", tokens[start : start + size], vocab_size=1000)
        start += size
    return tokens


def test_samples_are_cut_from_concatenated_shards(tmp_path: Path) -> None:
    tokens = shards(tmp_path, [30, 1, 2, 47, 21])  # 101 tokens: ten samples of 10 and the last label
    data = TokenData(tmp_path, length=10)
    assert (data.tokens, data.samples, data.vocab_size, data.length) == (101, 10, 1000, 10)
    for i in range(10):
        assert data.sample(i).tolist() == tokens[10 * i : 10 * i + 11].tolist()
    with pytest.raises(ValueError, match="sample index must be from 0 to 9, got 10"):
        data.sample(10)


def test_every_epoch_has_every_sample_once_in_another_order(tmp_path: Path) -> None:
    shards(tmp_path, [50, 51])
    data = TokenData(tmp_path, length=5, seed=1)
    whole = data.batch(0, 60)
    inputs, labels = whole.inputs, whole.labels
    assert inputs.dtype == labels.dtype == torch.int64
    assert inputs.is_contiguous()
    assert labels.is_contiguous()
    assert torch.equal(inputs + 1, labels)
    epochs = [inputs[20 * e : 20 * (e + 1), 0].tolist() for e in range(3)]
    assert all(sorted(epoch) == list(range(0, 100, 5)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]
    assert epochs[0] != sorted(epochs[0])
    other = TokenData(tmp_path, length=5, seed=2).batch(0, 20).inputs
    assert other[:, 0].tolist() != epochs[0]


@settings(max_examples=50)
@given(position=st.integers(0, 100), count=st.integers(1, 60), world_size=st.integers(1, 5))
def test_batches_and_ranks_share_one_order(
    tmp_path_factory: pytest.TempPathFactory, position: int, count: int, world_size: int
) -> None:
    folder = tmp_path_factory.getbasetemp() / "one_order"
    if not folder.exists():
        folder.mkdir()
        shards(folder, [70, 31])
    data = TokenData(folder, length=5, seed=4)
    whole = data.batch(0, 160)
    inputs, labels = whole.inputs, whole.labels
    assert torch.equal(data.batch(position, count).inputs, inputs[position : position + count])
    assert torch.equal(data.batch(position, count).labels, labels[position : position + count])
    shares = [rank_share(11, rank=rank, world_size=world_size) for rank in range(world_size)]
    parts = [data.batch(22 + first, size) for first, size in shares]
    assert torch.equal(torch.cat([part.inputs for part in parts]), inputs[22:33])


@pytest.mark.parametrize(("vocab_size", "dtype"), [(256, "uint16"), (65536, "uint16"), (65537, "uint32")])
@pytest.mark.parametrize("suffix", ["bin", "npy"])
def test_written_tokens_are_read_back(tmp_path: Path, vocab_size: int, dtype: str, suffix: str) -> None:
    path = write_tokens(tmp_path / f"a.{suffix}", [0, vocab_size - 1, 1], vocab_size=vocab_size)
    assert json.loads((tmp_path / "a.json").read_text()) == {
        "dtype": dtype,
        "count": 3,
        "vocab_size": vocab_size,
    }
    data = TokenData(path, length=2)
    assert data.sample(0).tolist() == [0, vocab_size - 1, 1]
    if suffix == "bin":
        assert (
            path.read_bytes()
            == np.array([0, vocab_size - 1, 1], dtype=f"<u{2 if dtype == 'uint16' else 4}").tobytes()
        )


def test_files_without_a_sidecar_require_a_dtype(tmp_path: Path) -> None:
    np.arange(10, dtype="<u4").tofile(tmp_path / "a.bin")
    assert TokenData(tmp_path / "a.bin", length=3, dtype="uint32").sample(2).tolist() == [6, 7, 8, 9]
    assert TokenData(tmp_path / "a.bin", length=3, dtype="uint32").vocab_size is None
    with pytest.raises(ValueError, match=r"dtype of .*a\.bin is unknown; set dtype"):
        TokenData(tmp_path / "a.bin", length=3)
    np.save(tmp_path / "b.npy", np.arange(10, dtype=np.int32))
    assert TokenData(tmp_path / "b.npy", length=3).sample(0).tolist() == [0, 1, 2, 3]


def test_ids_are_checked_as_they_are_read(tmp_path: Path) -> None:
    tokens = np.arange(50)
    write_tokens(tmp_path / "a.bin", tokens[:20], vocab_size=50)
    write_tokens(tmp_path / "b.bin", tokens[20:], vocab_size=50)
    raw = np.fromfile(tmp_path / "b.bin", dtype="<u2")
    raw[7] = 60000
    raw.tofile(tmp_path / "b.bin")
    data = TokenData(tmp_path, length=7)
    data.sample(0)
    message = r"token ID 60000 at offset 7 of .*b\.bin is outside the vocabulary of 50"
    with pytest.raises(ValueError, match=message):
        data.batch(0, 7)
    (tmp_path / "c").mkdir()
    np.save(tmp_path / "c" / "c.npy", np.array([1, 2, -1, 3]))
    with pytest.raises(ValueError, match="token ID -1 at offset 2"):
        TokenData(tmp_path / "c", length=3).sample(0)
    assert TokenData(tmp_path / "a.bin", length=7, vocab_size=60).vocab_size == 50
    with pytest.raises(ValueError, match=r"declares a vocabulary of 50, but the model has vocab_size 10"):
        TokenData(tmp_path / "a.bin", length=7, vocab_size=10)


def test_a_text_file_is_rejected(tmp_path: Path) -> None:
    """With a dtype, two letters would be read as one token."""
    path = tmp_path / "input.txt"
    path.write_text("First Citizen:\nBefore we proceed any further, hear me speak.\n")
    for options in ({}, {"dtype": "uint16"}):
        with pytest.raises(
            ValueError, match=r"input\.txt is not a token file .*-m trainer\.tokenize"
        ) as error:
            TokenData(path, length=3, **options)
        assert "dtype" not in str(error.value)


def test_invalid_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.bin"
    with pytest.raises(ValueError, match=r"there is no token file or directory '.*'; .* trainer\.tokenize"):
        TokenData(path, length=3)
    with pytest.raises(ValueError, match=r"contains no \.bin or \.npy file"):
        TokenData(tmp_path, length=3)
    path.write_bytes(b"")
    with pytest.raises(ValueError, match=r"a\.bin is empty"):
        TokenData(path, length=3, dtype="uint16")
    path.write_bytes(b"12345")
    with pytest.raises(ValueError, match=r"5 bytes, not a multiple of 2 \(uint16\): truncated"):
        TokenData(path, length=3, dtype="uint16")
    with pytest.raises(ValueError, match="dtype 'int8' is not a token dtype"):
        TokenData(path, length=3, dtype="int8")  # type: ignore[arg-type]  # wrong on purpose
    write_tokens(path, range(10), vocab_size=10)
    with pytest.raises(ValueError, match=r"has 10 tokens, too few for one sample of length 10"):
        TokenData(path, length=10)
    with pytest.raises(ValueError, match="length must be at least 1, got 0"):
        TokenData(path, length=0)
    with pytest.raises(ValueError, match="seed -1 is out of range"):
        TokenData(path, length=2, seed=-1)
    with pytest.raises(ValueError, match="declares uint16, but dtype is uint32"):
        TokenData(path, length=3, dtype="uint32")
    path.write_bytes(path.read_bytes()[:-2])
    with pytest.raises(ValueError, match="has 9 tokens but its sidecar declares 10: truncated"):
        TokenData(path, length=3)


def test_invalid_npy_files_are_refused(tmp_path: Path) -> None:
    path = write_tokens(tmp_path / "a.npy", range(10), vocab_size=10)
    path.write_bytes(path.read_bytes()[:-2])
    with pytest.raises(ValueError, match=r"a\.npy cannot be read as \.npy"):
        TokenData(path, length=3)
    np.save(path, np.zeros((2, 2), dtype=np.uint16))
    with pytest.raises(ValueError, match=r"has dtype uint16 and shape \(2, 2\)"):
        TokenData(path, length=3)
    np.save(path, np.zeros(10))
    with pytest.raises(ValueError, match="has dtype float64"):
        TokenData(path, length=3)
    np.save(path, np.zeros(10, dtype=np.int64))
    with pytest.raises(ValueError, match="declares int64, not uint16"):
        TokenData(path, length=3)


@pytest.mark.parametrize(
    ("sidecar", "message"),
    [
        ("{", "cannot be read as JSON"),
        ("[]", "contains a list, not an object"),
        ('{"dtype": "float16"}', "dtype 'float16'"),
        ('{"count": "ten"}', "must be a positive integer, got 'ten'"),
        ('{"vocab_size": 0}', "must be a positive integer, got 0"),
    ],
)
def test_invalid_sidecars_are_refused(tmp_path: Path, sidecar: str, message: str) -> None:
    path = write_tokens(tmp_path / "a.bin", range(10), vocab_size=10)
    (tmp_path / "a.json").write_text(sidecar)
    with pytest.raises(ValueError, match=message):
        TokenData(path, length=3)


def test_refuses_shards_of_two_tokenizers(tmp_path: Path) -> None:
    write_tokens(tmp_path / "a.bin", range(10), vocab_size=10)
    write_tokens(tmp_path / "b.bin", range(10), vocab_size=11)
    with pytest.raises(ValueError, match=r"different vocabularies, \[10, 11\]"):
        TokenData(tmp_path, length=3)


def test_invalid_tokens_are_not_written(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"suffix '\.txt'"):
        write_tokens(tmp_path / "a.txt", [1], vocab_size=2)
    with pytest.raises(ValueError, match="IDs range from 0 to 2; all must be from 0 to 1"):
        write_tokens(tmp_path / "a.bin", [0, 2], vocab_size=2)
    with pytest.raises(ValueError, match="'uint16' does not fit a vocabulary of 65537"):
        write_tokens(tmp_path / "a.bin", [0], vocab_size=65537, dtype="uint16")
    with pytest.raises(ValueError, match=r"shape \(0,\)"):
        write_tokens(tmp_path / "a.bin", [], vocab_size=2)


def test_evaluation_sets_have_the_requested_lengths(tmp_path: Path) -> None:
    train = write_tokens(tmp_path / "train.bin", range(100), vocab_size=100)
    valid = write_tokens(tmp_path / "valid.bin", range(41), vocab_size=100)
    wanted = SimpleNamespace(lengths=(4, 40), identity_probabilities=(), sequences=6, seed=9)
    spec = TokensSpec(path=str(train), validation_path=str(valid), seq_len=8)
    data = build(spec, seed=1, vocab_size=128)
    sets = data.evaluation_sets(wanted)
    assert {name: s.sequences for name, s in sets.items()} == {"L4": 6, "L40": 1}
    (batch,) = sets["L40"].batches(16)
    assert batch.labels.tolist() == [list(range(1, 41))]
    rows = torch.cat([batch.inputs for batch in sets["L4"].batches(4)])
    assert len(rows.unique(dim=0)) == 6
    wanted.lengths = (41,)
    with pytest.raises(ValueError, match=r"valid\.bin has 41 tokens, too few for one sample of length 41"):
        data.evaluation_sets(wanted)
    assert TokenData(train, length=8).evaluation_sets(wanted) == {}
    with pytest.raises(ValueError, match=r"data\.path is not set"):
        build(TokensSpec())


def test_samples_cover_a_real_text_once(tmp_path: Path) -> None:
    texts = sorted(p for p in SHAKESPEARE.glob("*") if p.is_file() and p.stat().st_size > 100_000)
    if not texts:
        pytest.skip(f"no text under {SHAKESPEARE.name}: the data folder is not beside the repository")
    text = texts[0].read_bytes()
    data = TokenData(
        write_tokens(tmp_path / "t.bin", np.frombuffer(text, np.uint8), vocab_size=256), length=512
    )
    assert data.samples == (len(text) - 1) // 512
    seen = torch.cat([data.batch(i, 64).inputs for i in range(0, data.samples, 64)])[: data.samples]
    counts = torch.bincount(seen.reshape(-1), minlength=256)
    cut = np.frombuffer(text, np.uint8)[: 512 * data.samples]
    assert counts.tolist() == np.bincount(cut, minlength=256).tolist()
