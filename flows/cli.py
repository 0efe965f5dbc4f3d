"""The console script `haed`: the commands of `pipeline`, and those of `flows.commands`, which need Prefect."""

import sys

from pipeline.cli import main as pipeline_main


def main(argv: list[str] | None = None) -> int:
    """Run a command and return the exit status."""
    return pipeline_main(argv, "haed", _load_flow_commands)


def _load_flow_commands() -> tuple:  # of `pipeline.arguments.Command`, which is imported later
    from flows.commands import COMMANDS

    return COMMANDS


if __name__ == "__main__":
    sys.exit(main())
