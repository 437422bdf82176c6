"""The published word-problem files: round trip, format, and invalid files."""

from pathlib import Path

import pytest
import torch

from trainer.data.published_bin import published_name, read_published, write_published
from trainer.data.word_problem import WordProblem


def split() -> tuple[torch.Tensor, torch.Tensor]:
    problem = WordProblem(group="A5", monoid="EABX", identity_probability=0.5, draw_order="published")
    return problem.sample(20, 16, torch.Generator().manual_seed(0))


@pytest.mark.parametrize("mmap", [True, False])
@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.int32])
def test_written_files_are_read_back(tmp_path: Path, dtype: torch.dtype, mmap: bool) -> None:
    inputs, labels = split()
    path = tmp_path / "train.bin"
    write_published(path, inputs, labels, vocab_size=240, dtype=dtype)
    read = read_published(path, mmap=mmap)
    assert (len(read), read.length, read.vocab_size) == (20, 16, 240)
    assert read.inputs.dtype == dtype
    got = read.batch(5, 7)
    assert got.inputs.dtype == torch.int64
    assert torch.equal(got.inputs, inputs[5:12])
    assert torch.equal(got.labels, labels[5:12])


def test_a_batch_is_owned_by_the_caller(tmp_path: Path) -> None:
    inputs, labels = split()
    write_published(tmp_path / "a.bin", inputs, labels, vocab_size=240)
    read = read_published(tmp_path / "a.bin")
    read.batch(0, 2).inputs.zero_()
    assert torch.equal(read.batch(0, 2).inputs, inputs[:2])


def test_labels_are_copies_whatever_type_the_inputs_have(tmp_path: Path) -> None:
    path = tmp_path / "train.bin"
    torch.save(
        {
            "inputs": torch.zeros(2, 3, dtype=torch.uint8),
            "targets": torch.ones(2, 3, dtype=torch.int64),
            "vocab_size": torch.tensor([6]),
        },
        path,
    )
    split = read_published(path, mmap=False)
    split.batch(0, 2).labels.zero_()
    assert bool((split.batch(0, 2).labels == 1).all())


def test_written_files_match_the_published_format(tmp_path: Path) -> None:
    inputs, labels = split()
    write_published(tmp_path / "a.bin", inputs[3:9], labels[3:9], vocab_size=240)
    content = torch.load(tmp_path / "a.bin", weights_only=True)
    assert list(content) == ["inputs", "targets", "vocab_size"]
    assert content["inputs"].dtype == content["targets"].dtype == content["vocab_size"].dtype == torch.int64
    assert torch.equal(content["inputs"], inputs[3:9])
    assert torch.equal(content["targets"], labels[3:9])
    assert content["vocab_size"].tolist() == [240]
    # Only the slice is read: two tensors of 6·16 int64 and a few kB of the archive.
    assert (tmp_path / "a.bin").stat().st_size < 6000


def test_reads_the_shape_of_the_published_readme(tmp_path: Path) -> None:
    inputs, labels = split()
    content = {
        "inputs": inputs.reshape(5, 4, 16),
        "targets": labels.reshape(5, 4, 16),
        "vocab_size": torch.tensor([240]),
    }
    torch.save(content, tmp_path / "a.bin")
    assert torch.equal(read_published(tmp_path / "a.bin").batch(0, 20).inputs, inputs)


def test_file_names_are_the_published_ones() -> None:
    name = published_name("train", group="A5", length=256, identity_probability=0.5)
    assert name == "train_A5_L256_P050.bin"
    assert published_name("test", group="A5", length=1024, identity_probability=1).endswith("L1024_P100.bin")


def test_invalid_files_are_refused(tmp_path: Path) -> None:
    inputs, labels = split()
    path = tmp_path / "a.bin"
    with pytest.raises(ValueError, match=r"there is no word-problem file .*a\.bin"):
        read_published(path)
    write_published(path, inputs, labels, vocab_size=240)
    whole = path.read_bytes()
    for cut in (0, 10, len(whole) // 2, len(whole) - 30):
        path.write_bytes(whole[:cut])
        with pytest.raises(ValueError, match=r"a\.bin cannot be read as a torch file"):
            read_published(path)
    path.write_bytes(b"tokens" * 100)
    with pytest.raises(ValueError, match="cannot be read as a torch file"):
        read_published(path)
    torch.save(inputs, path)
    with pytest.raises(ValueError, match=r"lacks inputs, targets, vocab_size: .* contains Tensor"):
        read_published(path)
    torch.save({"inputs": inputs, "vocab_size": torch.tensor([240])}, path)
    with pytest.raises(ValueError, match=r"lacks targets: .* contains \['inputs', 'vocab_size'\]"):
        read_published(path)
    torch.save({"inputs": inputs, "targets": labels[:3], "vocab_size": torch.tensor([240])}, path)
    with pytest.raises(ValueError, match=r"shapes \(20, 16\) and \(3, 16\)"):
        read_published(path)
    torch.save({"inputs": inputs.float(), "targets": labels, "vocab_size": torch.tensor([240])}, path)
    with pytest.raises(ValueError, match=r"inputs of .* have dtype torch\.float32"):
        read_published(path)


def test_invalid_ids_and_ranges_are_refused(tmp_path: Path) -> None:
    inputs, labels = split()
    path = tmp_path / "a.bin"
    with pytest.raises(ValueError, match="all IDs must be from 0 to 5"):
        write_published(path, inputs, labels, vocab_size=6)
    with pytest.raises(ValueError, match=r"uint8 is too small for a vocabulary of 480"):
        write_published(path, inputs, labels, vocab_size=480, dtype=torch.uint8)
    torch.save({"inputs": inputs, "targets": labels, "vocab_size": torch.tensor([6])}, path)
    read = read_published(path)
    with pytest.raises(ValueError, match="outside its vocabulary of 6"):
        read.batch(0, 20)
    with pytest.raises(ValueError, match="has 20 samples; 18 to 20 are out of range"):
        read.batch(18, 3)
