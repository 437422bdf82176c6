"""The solver study: configurations, and further training with a penalty."""

from __future__ import annotations

from pathlib import Path

import torch

from implicit_blocks.registry import build
from implicit_blocks.specs import AndersonSpec, BroydenSpec, ImplicitLMSpec, Mamba2Spec, PicardSpec
from trainer.data.source import Batch
from trainer.experiments.common.search import SearchConfig, reference
from trainer.experiments.solvers.experiment import compare, state_bytes
from trainer.experiments.solvers.jacobian_penalty import continued
from trainer.specs.run import RunSpec

MODEL = ImplicitLMSpec(vocab_size=6, d_model=8, n_layers=1, mixer=Mamba2Spec(d_state=4, head_dim=8))


def test_token_coupling_solvers_use_sequence_scope_and_the_model_is_restored() -> None:
    torch.manual_seed(0)
    model = build(MODEL).eval()
    ids = torch.randint(0, 6, (2, 5))
    batch = Batch(inputs=ids, labels=ids)
    tight = reference(model, batch, 4)
    model.reconfigure(MODEL)
    chosen = [SearchConfig("picard", PicardSpec()), SearchConfig("anderson", AndersonSpec(memory=2))]
    rows = compare(model, batch, chosen, tight, tolerances=(1e-9, 0.5), max_iterations=3, repeats=1)
    coupled = [config.name for config in chosen if config.solver.couples_tokens]
    expected = [
        (config.name, scope, tolerance)
        for config in chosen
        for scope in config.scopes
        for tolerance in (0.5, 1e-9)
        if scope == "sequence" or config.name not in coupled
    ]
    assert [(row["config"], row["scope"], row["tolerance"]) for row in rows] == expected
    tightest = [row for row in rows if row["config"] == "picard" and row["tolerance"] == 1e-9]
    assert all(row["calls"] == 4 and row["work"] == 4.0 for row in tightest)  # and the last one
    assert model.spec == MODEL


def test_solver_state_is_reported_per_token() -> None:
    broyden = SearchConfig("", BroydenSpec(memory=5))
    assert state_bytes(broyden, "prefix", MODEL, length=12) == 12 * 8 * 4 + 14
    whole = broyden.solver.state_bytes(12 * 8, itemsize=4)
    assert state_bytes(broyden, "sequence", MODEL, length=12) == -(-whole // 12)
    windows = SearchConfig("", BroydenSpec(memory=5), window_length=4)
    of_window = broyden.solver.state_bytes(4 * 8, itemsize=4)
    assert state_bytes(windows, "sequence", MODEL, length=12) == -(-of_window // 4)


def test_penalty_training_continues_the_last_phase_at_a_low_rate() -> None:
    spec = RunSpec.model_validate(
        {
            "model": MODEL.model_dump(mode="json"),
            "data": {"kind": "word_problem", "group": "S3", "seq_len": 8},
            "training": {
                "max_tokens": 8000,
                "batch_size": 4,
                "evaluate_every": 3,
                "optimizer": {"kind": "adamw", "learning_rate": 1e-2},
            },
            "phases": [
                {"name": "first", "until": 0.5, "model": {"gradient": {"kind": "unrolled", "steps": 2}}},
                {"name": "last", "training": {"batch_size": 2, "optimizer": {"learning_rate": 4e-3}}},
            ],
            "callbacks": [{"kind": "stop_when", "value": "loss", "below": 1.0}],
            "evaluation": {"lengths": [8, 16], "last_tokens": 4},
        }
    )
    for weight in (0.0, 0.3):
        made = continued(spec, Path("step"), weight=weight, steps=7)
        training = made.training
        assert (made.total_steps, training.batch_size, training.evaluate_every) == (7, 2, None)
        assert training.optimizer.learning_rate == 0.1 * 4e-3
        assert training.init_from is not None
        assert (training.init_from.path, made.phases, made.callbacks) == ("step", (), ())
        assert made.evaluation.sequences == 1
        gradient = made.model.gradient  # type: ignore[attr-defined]  # of an implicit model
        if weight:
            assert (gradient.kind, gradient.weight) == ("jacobian_penalty", weight)
            gradient = gradient.gradient
        assert gradient == spec.final_model.gradient  # type: ignore[attr-defined]  # the same
