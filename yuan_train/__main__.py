"""Entry point of `python -m yuan_train`, the same as `yuan-train`."""

import sys

from yuan_train.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
