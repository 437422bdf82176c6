"""``python -m trainer.sweep``."""

import sys

from trainer.sweep.command import main

if __name__ == "__main__":
    sys.exit(main())
