"""What tests of ``python -m trainer.evaluate`` share: the command, and the results that it writes."""

import json
from pathlib import Path
from typing import Any

from trainer.evaluation.command import main


def evaluate(*arguments: Any) -> int:
    return main([str(argument) for argument in arguments])


def results(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "results.json").read_text())
    return found
