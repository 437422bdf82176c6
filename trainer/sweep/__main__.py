"""``python -m trainer.sweep``."""

import sys

from implicit_blocks._utils.programs import run_program
from trainer.sweep.command import main

if __name__ == "__main__":
    sys.exit(run_program(main))
