"""Evaluation tasks: questions with known answers, asked by ``python -m trainer.evaluate``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar, Literal

from implicit_blocks.specs import ComponentSpec


class EvaluationTaskSpec(ComponentSpec):
    """Base of all evaluation tasks' specs.

    A task is built as ``builder(spec, data=folder)``, which returns a task of lm-eval (an instance of
    ``lm_eval.api.task.Task``). lm-eval makes the requests from it and scores the answers; the model is asked
    by ``trainer.evaluation.HarnessLM``.
    """

    family: ClassVar[str] = "evaluation_task"

    columns: ClassVar[Mapping[str, str]] = {}
    """The metrics that the table shows, and under which header; none: all that the task has."""
    usual_files: ClassVar[tuple[str, ...]] = ()
    """Where its items are in a folder of data, by preference; none: the task needs no file there."""

    path: str | None = None
    """File of its items; null: the first of the usual ones that is in the folder of data."""

    def locate(self, data: Path) -> Path | None:
        """Find the file of the items; None for a task that needs none.

        Raises:
            FileNotFoundError: it isn't there; says where it was looked for.

        """
        candidates = [Path(self.path)] if self.path is not None else [data / f for f in self.usual_files]
        found = next((path for path in candidates if path.is_file()), None)
        if candidates and found is None:
            raise FileNotFoundError(f"{self.kind}: no file {' or '.join(map(str, candidates))}")
        return found


class StandardTaskSpec(EvaluationTaskSpec):
    """A task that lm-eval has too: its prompts and metrics are lm-eval's own, its items come from a file.

    ``lm_eval_task`` is the file of lm-eval's own configuration, in its folder of tasks.
    """

    lm_eval_task: ClassVar[str]


class LambadaSpec(StandardTaskSpec):
    """LAMBADA, as OpenAI released it: the last word of a passage."""

    kind: Literal["lambada"] = "lambada"
    lm_eval_task: ClassVar[str] = "lambada/lambada_openai.yaml"
    columns: ClassVar[Mapping[str, str]] = {"perplexity": "LMB ppl", "acc": "LMB"}
    usual_files: ClassVar[tuple[str, ...]] = (
        "lambada/lambada_openai_llmfoundry.jsonl",
        "lambada/lambada_test.jsonl",
        "lambada.jsonl",
    )


class HellaSwagSpec(StandardTaskSpec):
    """HellaSwag, validation: how a description goes on."""

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
    """PIQA, validation: which of two ways reaches a goal."""

    kind: Literal["piqa"] = "piqa"
    lm_eval_task: ClassVar[str] = "piqa/piqa.yaml"
    columns: ClassVar[Mapping[str, str]] = {"acc": "PIQA"}
    usual_files: ClassVar[tuple[str, ...]] = ("piqa/valid.jsonl", "piqa.jsonl")


class ArcEasySpec(StandardTaskSpec):
    """ARC, the easy part's test set: questions of school science."""

    kind: Literal["arc_easy"] = "arc_easy"
    lm_eval_task: ClassVar[str] = "arc/arc_easy.yaml"
    columns: ClassVar[Mapping[str, str]] = {"acc": "ArcE"}
    usual_files: ClassVar[tuple[str, ...]] = (
        "arc/ARC-Easy-Test.jsonl",
        "arc/arc_easy_test_llmfoundry.jsonl",
        "arc_easy.jsonl",
    )


class ArcChallengeSpec(StandardTaskSpec):
    """ARC, the challenging part's test set."""

    kind: Literal["arc_challenge"] = "arc_challenge"
    lm_eval_task: ClassVar[str] = "arc/arc_challenge.yaml"
    columns: ClassVar[Mapping[str, str]] = {"acc_norm": "ArcC"}
    usual_files: ClassVar[tuple[str, ...]] = (
        "arc/ARC-Challenge-Test.jsonl",
        "arc/arc_challenge_test_llmfoundry.jsonl",
        "arc_challenge.jsonl",
    )


class WinoGrandeSpec(StandardTaskSpec):
    """WinoGrande, development set: whom a pronoun stands for."""

    kind: Literal["winogrande"] = "winogrande"
    lm_eval_task: ClassVar[str] = "winogrande/default.yaml"
    columns: ClassVar[Mapping[str, str]] = {"acc": "WG"}
    usual_files: ClassVar[tuple[str, ...]] = (
        "winogrande/dev.jsonl",
        "winogrande/winogrande_dev_llmfoundry.jsonl",
        "winogrande.jsonl",
    )


class OpenBookQASpec(StandardTaskSpec):
    """OpenBookQA, test set: elementary science, without the book."""

    kind: Literal["openbookqa"] = "openbookqa"
    lm_eval_task: ClassVar[str] = "openbookqa/openbookqa.yaml"
    # The paper's table can't mean the plain accuracy: models of its sizes have about .2 there, .33 by length.
    columns: ClassVar[Mapping[str, str]] = {"acc_norm": "OBQA"}
    usual_files: ClassVar[tuple[str, ...]] = (
        "openbookqa/test.jsonl",
        "openbookqa/openbookqa_test_llmfoundry.jsonl",
        "openbookqa.jsonl",
    )


class BoolQSpec(StandardTaskSpec):
    """BoolQ, validation: yes or no, given a passage. Not in the paper's table."""

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
    """Any task of lm-eval, from the YAML file that configures it; what it loads is the file's affair."""

    kind: Literal["lm_eval"] = "lm_eval"
    path: str
    """The task's YAML file."""
