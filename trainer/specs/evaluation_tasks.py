"""Specs of evaluation tasks, run by ``python -m trainer.evaluate``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar, Literal

from implicit_blocks.specs import ComponentSpec


class EvaluationTaskSpec(ComponentSpec):
    """Base class of all evaluation task specs.

    A task is built as ``builder(spec, data=folder)``, which returns an ``lm_eval.api.task.Task``. lm-eval
    creates the requests and scores the responses; ``trainer.evaluation.HarnessLM`` runs the model.
    """

    family: ClassVar[str] = "evaluation_task"

    columns: ClassVar[Mapping[str, str]] = {}
    """Metrics in the results table and their column headers; empty: all metrics of the task."""
    usual_files: ClassVar[tuple[str, ...]] = ()
    """File names in the data directory, in order of preference; empty: the task needs no file."""

    path: str | None = None
    """File with the task's items; null: the first of `usual_files` that exists in the data directory."""

    def locate(self, data: Path) -> Path | None:
        """Return the file with the items, or None for a task that needs none.

        Raises:
            FileNotFoundError: no file exists; the message lists the candidates.

        """
        candidates = [Path(self.path)] if self.path is not None else [data / f for f in self.usual_files]
        found = next((path for path in candidates if path.is_file()), None)
        if candidates and found is None:
            raise FileNotFoundError(f"{self.kind}: no file {' or '.join(map(str, candidates))}")
        return found


class StandardTaskSpec(EvaluationTaskSpec):
    """A task of lm-eval: prompts and metrics are lm-eval's, items are read from a file.

    ``lm_eval_task`` is lm-eval's configuration file, relative to its task directory.
    """

    lm_eval_task: ClassVar[str]


class LambadaSpec(StandardTaskSpec):
    """LAMBADA as released by OpenAI: predict the last word of a passage."""

    kind: Literal["lambada"] = "lambada"
    lm_eval_task: ClassVar[str] = "lambada/lambada_openai.yaml"
    columns: ClassVar[Mapping[str, str]] = {"perplexity": "LMB ppl", "acc": "LMB"}
    usual_files: ClassVar[tuple[str, ...]] = (
        "lambada/lambada_openai_llmfoundry.jsonl",
        "lambada/lambada_test.jsonl",
        "lambada.jsonl",
    )


class HellaSwagSpec(StandardTaskSpec):
    """HellaSwag, validation set: select the continuation of a description."""

    kind: Literal["hellaswag"] = "hellaswag"
    lm_eval_task: ClassVar[str] = "hellaswag/hellaswag.yaml"
    columns: ClassVar[Mapping[str, str]] = {"acc_norm": "HS"}
    usual_files: ClassVar[tuple[str, ...]] = (
        "hellaswag/hellaswag_val.jsonl",
        "hellaswag/hellaswag_val_full.txt",
        "hellaswag/hellaswag_val_full.txt.bz2",
        "hellaswag.jsonl",
    )


class PIQASpec(StandardTaskSpec):
    """PIQA, validation set: select the better of two ways to reach a goal."""

    kind: Literal["piqa"] = "piqa"
    lm_eval_task: ClassVar[str] = "piqa/piqa.yaml"
    columns: ClassVar[Mapping[str, str]] = {"acc": "PIQA"}
    usual_files: ClassVar[tuple[str, ...]] = ("piqa/valid.jsonl", "piqa.jsonl")


class ArcEasySpec(StandardTaskSpec):
    """ARC-Easy, test set: school science questions."""

    kind: Literal["arc_easy"] = "arc_easy"
    lm_eval_task: ClassVar[str] = "arc/arc_easy.yaml"
    columns: ClassVar[Mapping[str, str]] = {"acc": "ArcE"}
    usual_files: ClassVar[tuple[str, ...]] = (
        "arc/ARC-Easy-Test.jsonl",
        "arc/arc_easy_test_llmfoundry.jsonl",
        "arc_easy.jsonl",
    )


class ArcChallengeSpec(StandardTaskSpec):
    """ARC-Challenge, test set."""

    kind: Literal["arc_challenge"] = "arc_challenge"
    lm_eval_task: ClassVar[str] = "arc/arc_challenge.yaml"
    columns: ClassVar[Mapping[str, str]] = {"acc_norm": "ArcC"}
    usual_files: ClassVar[tuple[str, ...]] = (
        "arc/ARC-Challenge-Test.jsonl",
        "arc/arc_challenge_test_llmfoundry.jsonl",
        "arc_challenge.jsonl",
    )


class WinoGrandeSpec(StandardTaskSpec):
    """WinoGrande, development set: resolve a pronoun."""

    kind: Literal["winogrande"] = "winogrande"
    lm_eval_task: ClassVar[str] = "winogrande/default.yaml"
    columns: ClassVar[Mapping[str, str]] = {"acc": "WG"}
    usual_files: ClassVar[tuple[str, ...]] = (
        "winogrande/dev.jsonl",
        "winogrande/winogrande_dev_llmfoundry.jsonl",
        "winogrande.jsonl",
    )


class OpenBookQASpec(StandardTaskSpec):
    """OpenBookQA, test set: elementary science without the book."""

    kind: Literal["openbookqa"] = "openbookqa"
    lm_eval_task: ClassVar[str] = "openbookqa/openbookqa.yaml"
    # The paper's values must be length-normalized: plain accuracy at its model sizes is about .2, normalized
    # .33.
    columns: ClassVar[Mapping[str, str]] = {"acc_norm": "OBQA"}
    usual_files: ClassVar[tuple[str, ...]] = (
        "openbookqa/test.jsonl",
        "openbookqa/openbookqa_test_llmfoundry.jsonl",
        "openbookqa.jsonl",
    )


class BoolQSpec(StandardTaskSpec):
    """BoolQ, validation set: answer yes or no, given a passage. Not in the paper's table."""

    kind: Literal["boolq"] = "boolq"
    lm_eval_task: ClassVar[str] = "super_glue/boolq/default.yaml"
    columns: ClassVar[Mapping[str, str]] = {"acc": "BoolQ"}
    usual_files: ClassVar[tuple[str, ...]] = (
        "boolq/val.jsonl",
        "boolq/dev.jsonl",
        "boolq/boolq_llmfoundry.jsonl",
        "boolq.jsonl",
    )


class HarnessTaskSpec(EvaluationTaskSpec):
    """Any lm-eval task, by its name or its YAML file, which also determine where its items come from."""

    kind: Literal["lm_eval"] = "lm_eval"
    path: str
    """YAML file of the task, or its name in lm-eval; also those of a group or tag, for all of its tasks."""
    include_path: str | None = None
    """Directory of lm-eval YAML files that define further names."""

    def locate(self, data: Path) -> Path | None:
        """Return the YAML file, or None for a task of lm-eval.

        Raises:
            FileNotFoundError: the file does not exist.

        """
        return super().locate(data) if self.path.endswith((".yaml", ".yml")) else None
