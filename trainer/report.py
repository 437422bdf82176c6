"""``python -m trainer.report``."""

import sys

from implicit_blocks._utils.programs import run_program
from trainer.reporting.report import main

if __name__ == "__main__":
    sys.exit(run_program(main))
