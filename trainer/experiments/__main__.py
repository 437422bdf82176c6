"""``python -m trainer.experiments``."""

import sys

from trainer.experiments.cli import main

if __name__ == "__main__":
    sys.exit(main())
