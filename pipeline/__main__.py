"""Entry point of `python -m pipeline COMMAND`: the commands that need no Prefect."""

import sys

from pipeline.cli import main

if __name__ == "__main__":
    sys.exit(main())
