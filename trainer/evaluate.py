"""``python -m trainer.evaluate``."""

import sys

from trainer.evaluation.command import main

if __name__ == "__main__":
    sys.exit(main())
