"""Estimates of composed models: activations, logits, the state in decoding, the report of a dry run."""

from __future__ import annotations

from typing import Any, Literal

import pytest
import torch
from torch.utils import _pytree as pytree

import implicit_blocks as ib
from implicit_blocks import registry
from implicit_blocks.models.counting import count_flops
from implicit_blocks.specs import load_spec
from trainer.__main__ import main
from trainer.estimate.flops import training_flops
from trainer.estimate.memory import Memory, decoding_state, estimate_memory

CORE = [
    "phases=[]",
    "model.n_layers=2",
    "model.injection.kind=add",
    "model.gradient={kind: last_loops, loops: 3}",
]
PRELUDE, CODA = "model.prelude={n_layers: 2}", "model.coda={n_layers: 2}"
FIXED = "model.depth={kind: fixed, loops: 8}"


def memory_of(*changes: str) -> Memory:
    spec: Any = load_spec("word_problem_s3", [*CORE, FIXED, *changes])
    memory = estimate_memory(spec, spec.phase_specs()[0])
    assert memory is not None
    return memory


def test_activations_are_those_of_prelude_and_coda_once_and_of_the_differentiated_loops() -> None:
    alone = memory_of().activations
    assert memory_of(PRELUDE).activations == pytest.approx(4 / 3 * alone)
    assert memory_of(PRELUDE, CODA).activations == pytest.approx(5 / 3 * alone)
    assert memory_of("model.gradient.loops=1").activations == pytest.approx(alone / 3)
    assert memory_of("model.gradient.loops=null").activations == pytest.approx(8 / 3 * alone)
    assert memory_of("model.depth.loops=2").activations == pytest.approx(2 / 3 * alone)


def test_activations_are_those_of_the_largest_number_of_loops() -> None:
    everything = "model.gradient.loops=null"
    fixed = memory_of(everything, "model.depth.loops=6").activations
    assert memory_of(everything, "model.depth={kind: uniform, low: 1, high: 6}").activations == fixed
    unbounded = memory_of(everything, "model.depth={kind: log_normal_poisson, mean: 5}").activations
    assert unbounded == pytest.approx(2 * fixed)  # twice the mean, 6


def test_the_coda_is_stored_for_each_iterate_that_the_objective_reads() -> None:
    read = "model.objective={kind: iterates, at: [6, 7, last]}"
    alone, once, thrice = memory_of(), memory_of(CODA), memory_of(CODA, read)
    assert thrice.activations - alone.activations == pytest.approx(3 * (once.activations - alone.activations))
    gated = memory_of("model.exit_gate=true", "model.objective.kind=exit_mixture")
    assert gated.logits > 8 * alone.logits  # the logits of all loops exist together
    assert memory_of("model.logit_softcap=30").logits >= alone.logits


@pytest.mark.parametrize("what", ["steps", "layers"])
def test_recomputed_sandwiches_store_the_starts(what: str) -> None:
    kept = memory_of(PRELUDE, CODA)
    again = memory_of(PRELUDE, CODA, f"training.checkpoint_activations={what}")
    assert again.activations < kept.activations / 2
    starts = 3 + 1 + 1 if what == "steps" else 2 * (3 + 1 + 1)
    assert again.activations > 128 * 32 * starts * 64 * 4


def test_checkpointed_prelude_and_coda_are_computed_twice() -> None:
    model: Any = load_spec("word_problem_s3", [*CORE, FIXED, PRELUDE, CODA]).model
    once: Any = count_flops(model, length=32)
    kept: Any = training_flops(model, length=32)
    again: Any = training_flops(model, length=32, checkpoint_activations="layers")
    assert kept.executed == kept.useful == again.useful
    assert again.executed - kept.executed == pytest.approx(3 * once.layers + once.prelude + once.coda)


def test_a_model_of_value_embeddings_stores_no_table_per_token() -> None:
    mixer = "model.mixer={kind: attention, n_heads: 4"
    plain, tabled = memory_of(f"{mixer}}}"), memory_of(f"{mixer}, value_embeddings: 6000}}")
    assert plain.activations < tabled.activations < 1.3 * plain.activations


@pytest.mark.parametrize(
    "changes",
    [
        [],
        ["model.mixer={kind: attention, n_heads: 4, n_kv_heads: 2, head_dim: 6}"],
        ["model.mixer={kind: hybrid, mixers: [{kind: attention, n_heads: 4}, {kind: mamba2}]}"],
        ["model.state_policy=per_loop", "model.at_evaluation.exit={kind: fixed, loops: 3}"],
        ["model.kind=explicit_lm"],
    ],
    ids=["mamba2", "attention", "hybrid", "per_loop", "explicit"],
)
def test_the_state_in_decoding_has_the_estimated_size(changes: list[str]) -> None:
    spec = load_spec("word_problem_s3", [*CORE[:2], PRELUDE, CODA, *changes]).model
    model = ib.build(spec).eval()
    with torch.no_grad():
        state = model(torch.zeros(1, 7, dtype=torch.int64), return_state=True).state
    leaves = [leaf for leaf in pytree.tree_leaves(state.layers) if isinstance(leaf, torch.Tensor)]
    assert decoding_state(spec, tokens=7) == sum(leaf.nbytes for leaf in leaves)


def test_the_size_of_an_undeclared_state_is_unknown() -> None:
    class SilentSpec(ib.MixerSpec):
        kind: Literal["silent"] = "silent"

    with registry.isolated():
        registry.add("mixer", SilentSpec, "builtins:object", owner="tests", version="0")
        spec = ib.ExplicitLMSpec(vocab_size=6, d_model=8, n_layers=1, mixer={"kind": "silent"})
        assert decoding_state(spec, tokens=4) is None


def report(capsys: pytest.CaptureFixture[str], *changes: str) -> str:
    assert main(["--spec", "word_problem_s3", "--dry-run", *CORE, *changes]) == 0
    return capsys.readouterr().out


def test_the_dry_run_names_the_parts_and_loops(capsys: pytest.CaptureFixture[str]) -> None:
    text = report(capsys, PRELUDE, CODA, FIXED)
    for words in (
        "prelude ",
        "core ",
        "coda ",
        "8 loops",
        "gradient of the last 3",
        "through prelude and coda",
    ):
        assert words in text
    assert "at most" not in text.partition("evaluation")[0]  # the cost is exact
    assert "on average" in report(capsys, "model.depth={kind: poisson, mean: 6}")
    per_loop = ["model.state_policy=per_loop", "model.at_evaluation.exit={kind: fixed, loops: 3}"]
    assert "each of 3 loops" in report(capsys, FIXED, *per_loop)
    assert "exit criterion kl" in report(capsys, "model.at_evaluation.exit={kind: kl}")
    searched = report(capsys, FIXED, "model.gradient={kind: phantom}")
    assert "8 loops with picard, phantom gradient" in searched
