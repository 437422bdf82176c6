"""The tokenization job: reproducible shards, resuming after kills, and invalid options."""

from __future__ import annotations

import errno
import hashlib
import json
import random
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trainer.data.manifest import read_manifest, verify
from trainer.data.token_folder import open_tokens
from trainer.data.tokenizing import Documents, Job, load_tokenizer, shards, tokenize
from trainer.data.tokenizing.command import main
from trainer.data.tokenizing.documents import find_sources
from trainer.data.tokenizing.shards import DiskFullError
from trainer.specs.data import TokensSpec

WORDS = ["the", "of", "and", "to", "in", "that", "it", "is", "was", "he", "for", "on", "are", "with"]


def write_rows(path: Path, rows: int, *, seed: int = 0) -> list[str]:
    drawn = random.Random(seed)
    texts = [f"{n} " + " ".join(drawn.choices(WORDS, k=drawn.randint(1, 60))) for n in range(rows)]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return texts


def job(tmp_path: Path, output: str = "out", **options: Any) -> Job:
    documents = Documents(sources=find_sources([str(tmp_path / "rows.jsonl")]))
    settings = {"tokenizer": load_tokenizer("bytes"), "shard_tokens": 20_000, **options}
    return Job(output=tmp_path / output, documents=documents, **settings)


def contents(folder: Path) -> dict[str, str]:
    """Return the checksums of the written files by name, without the lock file, which contains the time."""
    mine = {".verified.json", ".lock"}
    found = sorted(path for path in folder.rglob("*") if path.is_file() and path.name not in mine)
    return {str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).hexdigest() for p in found}


def read(folder: Path) -> list[list[int]]:
    """Return the documents in a folder's shards, each without its end token."""
    manifest = read_manifest(folder)
    assert manifest is not None
    ids, ends = [], []
    for shard in manifest["shards"]:
        path = folder / shard["file"]
        before = sum(map(len, ids))
        ids.append(np.fromfile(path, dtype="<u2"))
        ends += (np.fromfile(path.with_suffix(".documents"), dtype="<i8") + before).tolist()
        assert len(ids[-1]) == shard["tokens"]
    whole = np.concatenate(ids).tolist()
    assert ends[-1] == len(whole) == manifest["tokens"]
    assert len(ends) == manifest["documents"]
    assert all(whole[end - 1] == 256 for end in ends)
    return [whole[start : end - 1] for start, end in zip([0, *ends], ends, strict=False)]


def test_shards_hold_the_documents(tmp_path: Path) -> None:
    texts = write_rows(tmp_path / "rows.jsonl", 500)
    (result,) = tokenize(job(tmp_path), log=lambda text: None)
    assert result.folder == tmp_path / "out" / "train"
    assert result.shards > 2
    assert [bytes(ids).decode() for ids in read(result.folder)] == texts
    assert verify(result.folder) > 0
    assert verify(result.folder) == 0  # unchanged since


def test_shards_do_not_depend_on_the_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer.data.tokenizing.job._TASK", 3_000)
    write_rows(tmp_path / "rows.jsonl", 600)
    tokenize(job(tmp_path, "one", validation_fraction=0.1), log=lambda text: None)
    tokenize(job(tmp_path, "two", validation_fraction=0.1, workers=2), log=lambda text: None)
    assert contents(tmp_path / "one") == contents(tmp_path / "two")


def test_whole_documents_are_held_out(tmp_path: Path) -> None:
    texts = write_rows(tmp_path / "rows.jsonl", 1000)
    with (tmp_path / "rows.jsonl").open("a") as file:
        file.write("".join(json.dumps({"text": text}) + "\n" for text in texts))  # every document twice
    sides = {}
    for seed in (1, 2):
        tokenize(job(tmp_path, f"out{seed}", validation_fraction=0.2, seed=seed), log=lambda text: None)
        sides[seed] = [
            [bytes(ids).decode() for ids in read(tmp_path / f"out{seed}" / side)]
            for side in ("train", "validation")
        ]
    train, validation = sides[1]
    assert sorted(train + validation) == sorted(texts * 2)
    assert not set(train) & set(validation)  # copies stay together
    assert 0.15 < len(validation) / 2000 < 0.25
    assert set(sides[2][1]) != set(validation)


def test_long_documents_continue_in_the_next_shard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer.data.tokenizing.pieces.PIECE", 100)
    text = "".join(f"line {number}\n" for number in range(300))
    (tmp_path / "rows.jsonl").write_text(json.dumps({"text": text}) + "\n" + json.dumps({"text": "short"}))
    (result,) = tokenize(job(tmp_path, shard_tokens=1000), log=lambda text: None)
    assert result.shards == 3
    manifest = read_manifest(result.folder)
    assert manifest is not None
    assert [shard["documents"] for shard in manifest["shards"]] == [0, 0, 2]
    assert [bytes(ids).decode() for ids in read(result.folder)] == [text, "short"]


def command(tmp_path: Path, output: str, *more: str) -> list[str]:
    options = ["--tokenizer", "bytes", "--shard-tokens", "30e3", "--validation-fraction", "0.2", *more]
    inputs = [str(tmp_path / "rows.jsonl"), "--output", str(tmp_path / output)]
    return [sys.executable, "-m", "trainer.tokenize", *inputs, *options]


def running_in(group: int) -> list[str]:
    """Return the running processes of a group."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            name, _, rest = path.read_text().rpartition(")")
        except OSError:  # it ended just now
            continue
        state, _, of = rest.split()[:3]
        if int(of) == group and state != "Z":
            found.append(name)
    return found


@pytest.mark.slow
def test_a_job_resumes_after_a_kill_at_any_moment(tmp_path: Path) -> None:
    """Two workers, killed ten times by SIGKILL: no process remains, and the shards are the same."""
    write_rows(tmp_path / "rows.jsonl", 300_000)
    subprocess.run(command(tmp_path, "whole", "--workers", "1"), check=True, capture_output=True)
    arguments, drawn = command(tmp_path, "out", "--workers", "2"), random.Random(0)
    kills, kept = 0, 0
    while kills < 10:
        process = subprocess.Popen(arguments, stderr=subprocess.DEVNULL, start_new_session=True)
        try:
            process.wait(drawn.uniform(0.8, 3.0))
            break
        except subprocess.TimeoutExpired:
            kept = max(kept, len(list((tmp_path / "out").glob("train/shard_*.json"))))
            process.send_signal(signal.SIGKILL)
            process.wait()
            kills += 1
            time.sleep(0.5)
            assert not running_in(process.pid)  # the workers went with it
    done = subprocess.run(arguments, capture_output=True, text=True, check=True)
    assert kills >= 3
    assert kept > 0
    assert "finished" in done.stderr
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def interrupted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: int) -> None:
    """Write some shards and stop."""

    class StoppedError(Exception):
        pass

    written = 0
    original = shards.ShardWriter._finish

    def finish(self: shards.ShardWriter) -> None:
        nonlocal written
        if written == after:
            raise StoppedError
        written += 1
        original(self)

    with monkeypatch.context() as patch:
        patch.setattr(shards.ShardWriter, "_finish", finish)
        with pytest.raises(StoppedError):
            tokenize(job(tmp_path), log=lambda text: None)


def test_a_job_resumes_after_the_finished_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_rows(tmp_path / "rows.jsonl", 800)
    tokenize(job(tmp_path, "whole"), log=lambda text: None)
    interrupted(tmp_path, monkeypatch, 3)
    folder = tmp_path / "out" / "train"
    assert len(list(folder.glob("shard_*.bin"))) == 3
    kept = [folder / "shard_00000.bin", folder / "shard_00001.bin"]
    times = [path.stat().st_mtime_ns for path in kept]
    # A shard that was truncated in the meantime and those after it are written again.
    (folder / "shard_00002.bin").write_bytes(b"cut")
    messages: list[str] = []
    tokenize(job(tmp_path), log=messages.append)
    assert any(
        "shard_00002.bin is written again: shard_00002.bin is missing, trunc" in text for text in messages
    )
    assert any("2 finished shards" in text for text in messages)
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")
    assert [path.stat().st_mtime_ns for path in kept] == times
    messages.clear()
    tokenize(job(tmp_path), log=messages.append)
    assert messages == [f"{folder} is finished; its checksums match"]
    (folder / "shard_00001.bin").write_bytes(bytes(len((folder / "shard_00001.bin").read_bytes())))
    with pytest.raises(ValueError, match=r"shard_00001\.bin has been modified: its SHA-256 is"):
        tokenize(job(tmp_path), log=messages.append)


def test_resuming_with_different_options_is_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_rows(tmp_path / "rows.jsonl", 300)
    interrupted(tmp_path, monkeypatch, 1)
    with pytest.raises(
        ValueError, match=r"started with different shard_tokens \(shard_tokens was 20000, is now 99\)"
    ):
        tokenize(job(tmp_path, shard_tokens=99))
    tokenizers = pytest.importorskip("tokenizers", reason="another tokenizer than bytes")
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({"<eos>": 0, "the": 1}, unk_token="<eos>"))
    made.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ValueError, match="was started with different tokenizer, vocab_size"):
        tokenize(job(tmp_path, tokenizer=load_tokenizer(tmp_path / "tokenizer.json")))
    write_rows(tmp_path / "rows.jsonl", 301)
    with pytest.raises(ValueError, match=r"started with different train .*rows\.jsonl"):
        tokenize(job(tmp_path))
    write_rows(tmp_path / "rows.jsonl", 300)
    text = (tmp_path / "rows.jsonl").read_text()
    for changed in (text.replace("the", "teh"), text[:-9] + "x" + text[-8:]):  # as long as it was
        (tmp_path / "rows.jsonl").write_text(changed)
        with pytest.raises(ValueError, match=r"started with different train .*rows\.jsonl"):
            tokenize(job(tmp_path))
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "file").write_text("")
    with pytest.raises(ValueError, match=r"other contains other files \(file\)"):
        tokenize(job(tmp_path, "other"))


def test_a_changed_folder_of_a_dataset_is_noticed(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    for name, content in (("dataset_info.json", "{}"), ("one.arrow", "a" * 200_000)):
        (tmp_path / "data" / name).write_text(content)
    (source,) = find_sources([str(tmp_path / "data")])
    before = source.fingerprint()
    assert before == source.fingerprint()
    assert before["bytes"] == 200_002
    (tmp_path / "data" / "one.arrow").write_text("a" * 100_000 + "b" + "a" * 99_999)
    assert source.fingerprint()["glimpse"] != before["glimpse"]


def test_tokens_of_an_incomplete_job_are_rejected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_rows(tmp_path / "rows.jsonl", 800)
    interrupted(tmp_path, monkeypatch, 2)
    for path in (tmp_path / "out", tmp_path / "out" / "train"):
        with pytest.raises(ValueError, match=r"is incomplete: .*train is not finished; run"):
            open_tokens(path)
    tokenize(job(tmp_path), log=lambda text: None)
    tokens = open_tokens(tmp_path / "out").tokens
    # The training split is finished and the validation split is not, so there is nothing to evaluate.
    tokenize(job(tmp_path, "half", validation_fraction=0.5), log=lambda text: None)
    (tmp_path / "half" / "validation" / "manifest.json").unlink()
    with pytest.raises(ValueError, match="validation is not finished"):
        open_tokens(tmp_path / "half")
    assert main(["--verify", str(tmp_path / "half")]) == 2
    assert "validation is not finished" in capsys.readouterr().err
    assert 0 < open_tokens(tmp_path / "half" / "train").tokens < tokens


def test_inputs_shorter_than_the_finished_shards_are_rejected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer.data.tokenizing.documents.Source.fingerprint", lambda self: {})
    write_rows(tmp_path / "rows.jsonl", 800)
    interrupted(tmp_path, monkeypatch, 2)
    write_rows(tmp_path / "rows.jsonl", 20)
    with pytest.raises(
        ValueError, match=r"the inputs have 20 pieces of text, but .* were written from \d\d\d"
    ):
        tokenize(job(tmp_path))
    assert not (tmp_path / "out" / "train" / "manifest.json").exists()


def test_two_concurrent_writers_are_rejected(tmp_path: Path) -> None:
    fcntl = pytest.importorskip("fcntl", reason="file locks of POSIX")
    write_rows(tmp_path / "rows.jsonl", 3)
    (tmp_path / "out").mkdir()
    with (tmp_path / "out" / ".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(ValueError, match="another process is writing to"):
            tokenize(job(tmp_path))


def test_a_full_disk_is_reported_with_the_remedy(tmp_path: Path) -> None:
    """A limit on the size of files has the same effect: the kernel rejects the write."""
    write_rows(tmp_path / "rows.jsonl", 2000)
    arguments = command(tmp_path, "out", "--workers", "1", "--shard-tokens", "300e3")

    def limit() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))

    done = subprocess.run(arguments, preexec_fn=limit, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "error: no space for another shard in" in done.stderr
    assert "run the same command again to resume after 0 finished" in done.stderr
    assert "Traceback" not in done.stderr
    assert not list((tmp_path / "out").rglob("*shard*"))
    done = subprocess.run(arguments, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_disk_that_fills_up_at_the_sidecar(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_rows(tmp_path / "rows.jsonl", 800)
    calls = 0

    def full(path: Path, value: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        write_json(path, value)

    write_json = shards.write_json
    with monkeypatch.context() as patch:
        patch.setattr(shards, "write_json", full)
        with pytest.raises(DiskFullError, match=r"No space left on device.*1 finished"):
            tokenize(job(tmp_path), log=lambda text: None)
    tokenize(job(tmp_path), log=lambda text: None)
    tokenize(job(tmp_path, "whole"), log=lambda text: None)
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_invalid_options_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_rows(tmp_path / "rows.jsonl", 5)
    with pytest.raises(ValueError, match=r"validation fraction must be at least 0 and below 1, got 1\.0"):
        tokenize(job(tmp_path, validation_fraction=1.0))
    with pytest.raises(ValueError, match="workers must be at least 1, got 0"):
        tokenize(job(tmp_path, workers=0))
    with pytest.raises(ValueError, match="none of the 5 documents is assigned to validation"):
        tokenize(job(tmp_path, validation_fraction=1e-9), log=lambda text: None)
    inputs = [str(tmp_path / "rows.jsonl"), "--output", str(tmp_path / "cli")]
    assert main([*inputs, "--tokenizer", "gone.json"]) == 2
    assert "there is no tokenizer gone.json" in capsys.readouterr().err
    rows, again, empty = inputs[0], f"{tmp_path}/./rows.jsonl", tmp_path / "a.txt"
    empty.touch()
    for given, message in (
        (
            [rows, "--validation", again],
            "rows.jsonl: used for both training and validation; hold out other inputs",
        ),
        ([rows, again], f"rows.jsonl is given 2 times (as {again}); give each input once"),
        ([rows, "--validation-fraction", "0.1", "--seed", "-1"], "seed -1 is out of range; use 0 to 2**64"),
        ([rows, "--validation-fraction", "0.1", "--seed", str(2**64)], "is out of range; use 0 to 2**64"),
        (
            [rows, "--seed", "1"],
            "--seed 1 has no effect on these inputs: it selects the documents of --validation-fraction",
        ),
        (
            [rows, "--separator", "x"],
            "--separator 'x' has no effect on these inputs: it separates documents in text files",
        ),
        ([rows, "--config", "x"], "--config 'x' has no effect on these inputs"),
        ([rows, "--split", "test"], "--split 'test' has no effect on these inputs"),
        ([rows, "--shard-tokens", "inf"], "--shard-tokens must be at least 1, got inf"),
        ([rows, "--shard-tokens", "nan"], "--shard-tokens must be at least 1, got nan"),
        ([rows, "--end-of-document", "</s>"], "ends documents with <|endoftext|>, not with '</s>'"),
        ([str(empty)], "the inputs contain no text: "),
        ([rows, "--validation", str(empty)], "the held-out inputs contain no text: "),
        ([str(empty), "--separator", ""], "the separator is empty; give the text between documents"),
    ):
        assert main([*given, *inputs[1:], "--train-tokenizer", "300"]) == 2
        assert message in capsys.readouterr().err
    assert not (tmp_path / "cli").exists()
    assert main([str(empty), *inputs[1:], "--tokenizer", "bytes", "--text-field", "body"]) == 2
    assert "--text-field 'body' has no effect on these inputs" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(inputs)
    assert "give either --tokenizer FILE or --train-tokenizer SIZE" in capsys.readouterr().err


def test_the_command_trains_a_tokenizer_and_writes_both_splits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_rows(tmp_path / "rows.jsonl", 200)
    write_rows(tmp_path / "held_out.jsonl", 20, seed=1)
    inputs = [str(tmp_path / "rows.jsonl"), "--validation", str(tmp_path / "held_out.jsonl")]
    arguments = [*inputs, "--output", str(tmp_path / "out"), "--train-tokenizer", "300", "--workers", "1"]
    assert main(arguments) == 0
    message = capsys.readouterr().err
    assert "200 documents, 1 shard" in message
    assert "vocabulary 300, uint16" in message
    tokenizer = load_tokenizer(tmp_path / "out" / "tokenizer.json")
    assert (tokenizer.vocab_size, tokenizer.end_of_document) == (300, 0)
    manifest = read_manifest(tmp_path / "out" / "validation")
    assert manifest is not None
    assert manifest["tokenizer"] == tokenizer.identity
    assert manifest["documents"] == 20
    assert main(["--verify", str(tmp_path / "out")]) == 0
    assert capsys.readouterr().out.count("bytes verified") == 2
    assert main(arguments) == 0  # nothing left to do
    assert main(["--verify", str(tmp_path)]) == 2
    assert "has no manifest.json" in capsys.readouterr().err


def test_a_separator_without_matches_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = tmp_path / "a.txt"
    text.write_text("one\n\ntwo\n\nthree")

    def message(separator: str, name: str) -> str:
        output = str(tmp_path / name)
        options = ["--tokenizer", "bytes", "--workers", "1", "--output", output, "--separator", separator]
        assert main([str(text), *options]) == 0
        shown = capsys.readouterr()
        return shown.out + shown.err

    assert "occurs in no file" not in message("\n\n", "breaks")
    letters = message("\\n\\n", "letters")
    assert r"the separator '\\n\\n' occurs in no file" in letters
    assert r"in a shell, write a line break as $'\n'" in letters
    assert "1 document, 1 shard" in letters


def test_an_empty_validation_split_leaves_a_reusable_directory(tmp_path: Path) -> None:
    write_rows(tmp_path / "rows.jsonl", 5)
    with pytest.raises(ValueError, match="none of the 5 documents is assigned to validation"):
        tokenize(job(tmp_path, validation_fraction=1e-9), log=lambda text: None)
    assert not list((tmp_path / "out").rglob("shard_*"))
    tokenize(job(tmp_path, validation_fraction=0.5), log=lambda text: None)


@pytest.mark.parametrize("link", ["hard", "symbolic", "copy"])
def test_copies_of_training_inputs_cannot_be_held_out(tmp_path: Path, link: str) -> None:
    rows, other = tmp_path / "rows.jsonl", tmp_path / "other.jsonl"
    write_rows(rows, 20)
    if link == "hard":
        other.hardlink_to(rows)
    elif link == "symbolic":
        other.symlink_to(rows)
    else:
        other.write_bytes(rows.read_bytes())
    held_out = Documents(sources=find_sources([str(other)]))
    message = r"rows\.jsonl = .*other\.jsonl: used for both training and validation"
    with pytest.raises(ValueError, match=message):
        tokenize(job(tmp_path, validation=held_out))
    assert not (tmp_path / "out").exists()
    if link != "copy":
        with pytest.raises(ValueError, match=r"rows\.jsonl is given 2 times \(as .*other\.jsonl\)"):
            Documents(sources=find_sources([str(rows), str(other)]))


def test_held_out_documents_that_are_trained_on_are_counted(tmp_path: Path) -> None:
    texts = write_rows(tmp_path / "rows.jsonl", 200)
    held_out = tmp_path / "held_out.jsonl"
    held_out.write_text("".join(json.dumps({"text": f"{text}\n"}) + "\n" for text in ["new", *texts[:3]]))
    messages: list[str] = []
    validation = Documents(sources=find_sources([str(held_out)]))
    tokenize(job(tmp_path, validation=validation), log=messages.append)
    assert [text for text in messages if "WARNING" in text] == [
        "WARNING: 3 of 200 training documents are identical to held-out documents, which are therefore not "
        "unseen"
    ]
    held_out.write_text(json.dumps({"text": "new"}))
    messages.clear()
    tokenize(job(tmp_path, "other", validation=validation), log=messages.append)
    assert not any("WARNING" in text for text in messages)


def test_another_tokenizer_in_the_folder_is_not_replaced(tmp_path: Path) -> None:
    write_rows(tmp_path / "rows.jsonl", 5)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"tokenizer\.json is not the tokenizer of this job"):
        tokenize(job(tmp_path))
    assert (tmp_path / "out" / "tokenizer.json").read_text() == "{}"


def test_a_dry_run_reports_missing_validation_tokens(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one two three " * 10)
    options = ["--tokenizer", "bytes", "--workers", "1", "--output", str(tmp_path / "tokens")]
    assert main([str(tmp_path / "a.txt"), *options]) == 0
    report = "\n".join(
        TokensSpec(path=str(tmp_path / "tokens"), seq_len=8).describe(sequences=5, vocab_size=8192)
    )
    assert "1 document in 1 file" in report
    assert "validation: none, so evaluation is skipped; tokenize with --validation" in report
    assert "vocabulary: 257 in the data, 8,192 in the model" in report


def test_a_dry_run_compares_the_vocabulary_with_the_ids_of_raw_files(tmp_path: Path) -> None:
    np.arange(512, dtype="<u2").tofile(tmp_path / "a.bin")
    spec = TokensSpec(path=str(tmp_path), dtype="uint16", seq_len=8)
    hint = "vocabulary: 512 in the first 512 tokens, 50,000 in the model (model.vocab_size)"
    assert hint in spec.describe(sequences=5, vocab_size=50_000)
    assert not any("vocabulary" in line for line in spec.describe(sequences=5, vocab_size=512))
    with pytest.raises(
        ValueError, match=r"token ID 500 at offset 500 of .* is outside the vocabulary of 500"
    ):
        spec.describe(sequences=5, vocab_size=500)
