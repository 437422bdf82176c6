"""Documents from files: formats, compression, separators, pieces, and damaged files."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.data.tokenizing import pieces as pieces_module
from trainer.data.tokenizing import reading as module
from trainer.data.tokenizing.documents import Documents, find_sources
from trainer.data.tokenizing.pieces import Piece

SEPARATOR = "<|endoftext|>"


def documents_of(paths: list[Path], **options: object) -> list[str]:
    """Return the documents of the sources, each joined from its pieces."""
    sources = find_sources([str(path) for path in paths], format=options.pop("format", "auto"))  # type: ignore[arg-type]  # one of them
    return together(list(Documents(sources=sources, **options).pieces()))  # type: ignore[arg-type]  # as named


def together(pieces: list[Piece]) -> list[str]:
    found: list[str] = []
    for piece in pieces:
        assert piece.begins == (not found or found[-1].endswith("\0"))
        found = [*found, ""] if piece.begins else found
        found[-1] += piece.text + ("\0" if piece.ends else "")
    return [text.removesuffix("\0") for text in found]


def zstd(data: bytes) -> bytes:
    pyarrow = pytest.importorskip("pyarrow", reason=".zst is read by pyarrow")
    compressed: bytes = pyarrow.compress(data, codec="zstd", asbytes=True)
    # The header of a streamed frame has no length, which the reader must not require.
    return compressed


@pytest.mark.parametrize(
    ("suffix", "compress"),
    [("", bytes), (".xz", lzma.compress), (".gz", gzip.compress), (".bz2", bz2.compress), (".zst", zstd)],
)
def test_documents_are_the_text_between_separators(
    tmp_path: Path, suffix: str, compress: Callable[[bytes], bytes]
) -> None:
    text = f"one\r\nline{SEPARATOR}\ntwo ü\n{SEPARATOR}{SEPARATOR}\n \n{SEPARATOR}three"
    path = tmp_path / f"a.txt{suffix}"
    path.write_bytes(compress(text.encode()))
    assert documents_of([path], separator=SEPARATOR) == ["one\nline", "two ü\n", "three"]
    assert documents_of([path]) == [text.replace("\r\n", "\n")]


@settings(max_examples=60)
@given(
    texts=st.lists(st.text(alphabet="ab \n<|", max_size=60), max_size=6),
    piece=st.integers(1, 20),
    block=st.integers(1, 30),
)
def test_joined_pieces_equal_the_documents(texts: list[str], piece: int, block: int) -> None:
    separator = "<|>"
    whole = separator.join(texts)
    blocks = [whole[start : start + block] for start in range(0, len(whole), block)]
    expected = [
        text[1:] if n and text.startswith("\n") else text for n, text in enumerate(whole.split(separator))
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pieces_module, "PIECE", piece)
        pieces = list(pieces_module.cut(iter(blocks), separator))
        assert together(pieces) == expected
        # Document boundaries do not depend on the block size of reading.
        again = list(pieces_module.cut(iter([whole]), separator))
        assert [p.text for p in again if p.text] == [p.text for p in pieces if p.text]


def test_a_long_file_is_read_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces_module, "PIECE", 100)
    monkeypatch.setattr(module, "_BLOCK", 64)
    text = "".join(f"line {number}\n" for number in range(500))
    path = tmp_path / "a.txt"
    path.write_text(text)
    pieces = list(Documents(sources=find_sources([str(path)])).pieces())
    assert "".join(piece.text for piece in pieces) == text
    assert all(100 <= len(piece.text) < 110 for piece in pieces[:-1])
    assert [piece.ends for piece in pieces] == [False] * (len(pieces) - 1) + [True]


def test_jsonl_files_are_read_and_invalid_ones_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "one\\n", "n": 1}\n\n{"text": "two \\ud800"}\n{"text": "  "}\n')
    assert documents_of([path]) == ["one\n", "two ?"]
    with pytest.raises(
        ValueError, match=r"line 1 of .*a\.jsonl has no field 'body', only text, n; select .*--text"
    ):
        documents_of([path], text_field="body")
    path.write_text('{"text": "one"}\n{"text": 2}\n')
    with pytest.raises(ValueError, match=r"'text' in line 2 of .*a\.jsonl is int, not text"):
        documents_of([path])
    path.write_text('{"text": "one"}\nnot json\n')
    with pytest.raises(ValueError, match=r"line 2 of .*a\.jsonl is not JSON"):
        documents_of([path])
    path.write_text("[1]\n")
    with pytest.raises(ValueError, match="is a JSON list; jsonl has one object"):
        documents_of([path])


def test_parquet_files_are_read_and_invalid_ones_refused(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow", reason="parquet is read by pyarrow")
    import pyarrow.parquet as parquet

    path = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.table({"text": ["one", "", "two"], "n": [1, 2, 3]}), path)
    assert documents_of([path]) == ["one", "two"]
    with pytest.raises(ValueError, match=r"has no field .body., only text, n"):
        documents_of([path], text_field="body")
    with pytest.raises(ValueError, match=r"'n' in row 0 of .* is int, not text"):
        documents_of([path], text_field="n")
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(ValueError, match=r"a\.parquet cannot be read .*truncated or of another format"):
        documents_of([path])


def test_jsonl_that_is_nested_too_deeply_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "one"}\n' + "[" * 100_000 + "]" * 100_000)
    with pytest.raises(ValueError, match=r"line 2 of .*a\.jsonl is nested too deeply"):
        documents_of([path])


@pytest.mark.parametrize("compress", [bytes, gzip.compress], ids=["plain", "gz"])
def test_a_byte_order_mark_is_skipped(tmp_path: Path, compress: Callable[[bytes], bytes]) -> None:
    suffix = "" if compress is bytes else ".gz"
    for name, content, found in (("a.txt", "one", "one"), ("a.jsonl", '{"text": "two"}\n', "two")):
        path = tmp_path / f"{name}{suffix}"
        path.write_bytes(compress(b"\xef\xbb\xbf" + content.encode()))
        assert documents_of([path]) == [found]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the package's own making
def test_datasets_are_read_by_split_and_field(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets", reason="datasets are read by the package of that name")
    rows = datasets.Dataset.from_dict({"text": ["one", "two"], "body": ["x", "y"]})
    (tmp_path / "folder").mkdir()
    rows.save_to_disk(str(tmp_path / "plain"))
    datasets.DatasetDict(train=rows, test=rows.select([1])).save_to_disk(str(tmp_path / "split"))
    assert documents_of([tmp_path / "plain"]) == ["one", "two"]
    assert documents_of([tmp_path / "split"], dataset_split="test", text_field="body") == ["y"]
    rows.to_parquet(str(tmp_path / "folder" / "data.parquet"))
    seen: list[float] = []
    hub = Documents(sources=find_sources([str(tmp_path / "folder")], format="dataset"))
    assert [piece.text for piece in hub.pieces(seen.append)] == ["one", "two"]
    assert seen[-1] == 1.0
    with pytest.raises(ValueError, match="it has no split 'dev'; available: train, test"):
        documents_of([tmp_path / "split"], dataset_split="dev")
    with pytest.raises(ValueError, match="has no field 'words', only text, body"):
        documents_of([tmp_path / "plain"], text_field="words")


def test_finds_the_files_of_a_folder_in_order(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    for name in ("c.txt", "a.jsonl", "b/d.txt.gz", "notes.pdf"):
        (tmp_path / name).write_text("{}")
    found = find_sources([str(tmp_path)])
    assert [(Path(source.name).name, source.format) for source in found] == [
        ("a.jsonl", "jsonl"),
        ("d.txt.gz", "text"),
        ("c.txt", "text"),
    ]
    with pytest.raises(ValueError, match=r"the format of .*notes\.pdf from its name; .* set --format"):
        find_sources([str(tmp_path / "notes.pdf")])
    assert find_sources([str(tmp_path / "notes.pdf")], format="text")[0].format == "text"
    with pytest.raises(ValueError, match=r"there is no file or directory .*gone; check the path \(Hub data"):
        find_sources([str(tmp_path / "gone")])
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="contains no file with a suffix of"):
        find_sources([str(tmp_path / "empty")])


def test_damaged_or_mislabeled_files_are_rejected(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"caf\xe9 " * 10)
    with pytest.raises(ValueError, match=r"a\.txt is not UTF-8"):
        documents_of([path])
    for name, compress in (
        ("b.txt.xz", lzma.compress),
        ("c.txt.gz", gzip.compress),
        ("d.txt.bz2", bz2.compress),
    ):
        (tmp_path / name).write_bytes(compress(json.dumps(list(range(5000))).encode())[:-10])
        with pytest.raises(ValueError, match=rf"{name} cannot be read .*truncated"):
            documents_of([tmp_path / name])
    (tmp_path / "e.jsonl.gz").write_bytes(b"no gzip")
    with pytest.raises(ValueError, match=r"e\.jsonl\.gz cannot be read after line 0"):
        documents_of([tmp_path / "e.jsonl.gz"])


def test_progress_follows_the_bytes_read(tmp_path: Path) -> None:
    for name in ("a.txt", "b.txt.xz"):
        data = ("some words\n" * 1000).encode()
        (tmp_path / name).write_bytes(lzma.compress(data) if name.endswith("xz") else data)
    seen: list[float] = []
    list(Documents(sources=find_sources([str(tmp_path)])).pieces(seen.append))
    assert seen == sorted(seen)
    assert seen[-1] == 1.0


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the package's own making
def test_datasets_are_streamed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets", reason="datasets are read by the package of that name")
    made: list[int] = []

    def rows() -> Any:
        for number in range(1000):
            made.append(number)
            yield {"text": str(number)}
            if number == 500:
                raise OSError("connection lost")

    def load(name: str, *, split: str, config: str | None, streaming: bool) -> Any:
        assert (name, split, config, streaming) == ("acme/rows", "train", "en", True)
        return datasets.IterableDataset.from_generator(rows)

    monkeypatch.setattr(module, "load_dataset", load)
    sources = find_sources(["acme/rows"], format="dataset")
    pieces = Documents(sources=sources, dataset_config="en").pieces()
    assert [next(pieces).text for _ in range(3)] == ["0", "1", "2"]
    assert len(made) < 10
    with pytest.raises(ValueError, match=r"dataset acme/rows cannot be read after row 501 \(OSError: connec"):
        list(pieces)
    with pytest.raises(ValueError, match=r"row 0 of acme/rows has no field 'body', only text"):
        list(Documents(sources=sources, dataset_config="en", text_field="body").pieces())
