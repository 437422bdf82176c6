"""``python -m trainer.experiments``."""

import sys

from implicit_blocks._utils.programs import run_program
from trainer.experiments.cli import main

if __name__ == "__main__":
    sys.exit(run_program(main))
