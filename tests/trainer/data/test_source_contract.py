"""Errors for data sources that violate their contract name the source, its result and the requirement."""

from __future__ import annotations

from typing import Any, Literal

import pytest
import torch

from implicit_blocks import registry
from trainer.cli.train import main
from trainer.data.source import Batch, DataSource, EvaluationSet
from trainer.specs.run import DataSpec


class BitsSpec(DataSpec):
    """Bits, labeled with themselves."""

    kind: Literal["test.bits"] = "test.bits"
    fault: str = ""

    @property
    def vocab_size(self) -> int:
        return 2


class Bits(DataSource):
    vocab_size = 2
    samples = None

    def __init__(self, spec: BitsSpec) -> None:
        self.spec = spec

    @property
    def length(self) -> int:
        return self.spec.seq_len

    def batch(self, position: int, count: int) -> Any:
        bits = torch.randint(2, (count, self.length))
        if self.spec.fault == "pair":
            return bits, bits
        if self.spec.fault == "one":
            return Batch(inputs=bits[:1], labels=bits[:1])
        if self.spec.fault == "cut":
            return Batch(inputs=bits[:, 1:], labels=bits[:, 1:])
        if self.spec.fault == "labels":
            return Batch(inputs=bits, labels=bits[:, 1:])
        if self.spec.fault == "numbers":
            return Batch(inputs=bits.float(), labels=bits)
        return Batch(inputs=bits, labels=bits)

    def evaluation_sets(self, evaluation: Any) -> Any:
        sets = [EvaluationSet(name="bits", source=self, sequences=evaluation.sequences)]
        return sets if self.spec.fault == "list" else {"bits": sets[0]}


def build_bits(spec: BitsSpec, *, seed: int, vocab_size: int | None) -> Any:
    return None if spec.fault == "nothing" else Bits(spec)


@pytest.fixture(autouse=True)
def _registered():
    with registry.isolated():
        registry.add("data", BitsSpec, build_bits, owner="acme-bits", version="0.7")
        yield


SPEC = """\
extends: word_problem_s3
model: {d_model: 16, mixer: {d_state: 8, head_dim: 8}, at_evaluation: {stopping: {max_iterations: 8}}}
data: {kind: test.bits, seq_len: 6}
training: {max_steps: 2, batch_size: 4, threads: 1}
evaluation: {lengths: [], identity_probabilities: [], sequences: 4, batch_size: 4, last_tokens: 2}
"""


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("pair", "returned a tuple; return a trainer.data.source.Batch"),
        ("one", "inputs (1, 6) of int64 and labels (1, 6) of int64; return"),
        ("cut", "inputs (4, 5) of int64 and labels (4, 5) of int64; return"),
        ("labels", "inputs (4, 6) of int64 and labels (4, 5) of int64; return"),
        ("numbers", "inputs (4, 6) of float32 and labels (4, 6) of int64; return"),
        ("list", "breaks the contract 'evaluation sets': evaluation_sets returned a list"),
        ("nothing", "returned a NoneType; return an instance of trainer.data.source.DataSource"),
    ],
)
def test_an_invalid_batch_is_reported(fault, message, tmp_path, capsys):
    file = tmp_path / "bits.yaml"
    file.write_text(SPEC)
    arguments = [
        "--spec",
        str(file),
        f"data.fault={fault}",
        "--output",
        str(tmp_path / "run"),
        "--device",
        "cpu",
    ]
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert "Bits" in error or "acme-bits" in error
    assert message in error


def test_a_valid_source_trains(tmp_path):
    file = tmp_path / "bits.yaml"
    file.write_text(SPEC)
    assert main(["--spec", str(file), "--output", str(tmp_path / "run"), "--device", "cpu"]) == 0
