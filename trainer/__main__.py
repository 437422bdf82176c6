"""``python -m trainer``."""

import sys

from trainer.cli.train import main

if __name__ == "__main__":
    sys.exit(main())
