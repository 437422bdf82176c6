"""``python -m trainer.tokenize``."""

import sys

from trainer.data.tokenizing.command import main

if __name__ == "__main__":
    sys.exit(main())
