"""The evaluation task: an lm-eval task defined by a file."""

from __future__ import annotations

import json

from datasets import Dataset
from lm_eval.api.task import ConfigurableTask


def build_rhyme(spec, *, data):
    lines = (data / spec.file).read_text(encoding="utf-8").splitlines()
    verses = Dataset.from_list([json.loads(line) for line in lines])
    metric = {"metric": "acc", "aggregation": "mean", "higher_is_better": True}
    return ConfigurableTask(
        config={
            "task": "rhyme",
            "custom_dataset": lambda **_: {"test": verses},
            "test_split": "test",
            "output_type": "loglikelihood",
            "doc_to_text": "{{verse}}",
            "doc_to_target": " {{word}}",
            "metric_list": [metric],
        }
    )
