"""``python -m trainer.report``."""

import sys

from trainer.reporting.report import main

if __name__ == "__main__":
    sys.exit(main())
