"""Entry point of `python -m pipeline COMMAND`: the commands that need no Prefect."""

import gc
import sys

from pipeline.cli import main

gc.set_threshold(5_000)  # as in `flows`

if __name__ == "__main__":
    sys.exit(main())
