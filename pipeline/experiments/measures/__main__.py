"""Measure a run and keep the results in its folder."""

import sys
from dataclasses import asdict
from importlib import import_module

from data.filesystem import write_json
from pipeline.experiments.measures import MEASURES, kept_at
from pipeline.run.opened import Run
from pipeline.run.run_directory import RunFolder


def main(name: str, run: str, *words: str) -> None:
    """Run `NAME RUN [key=value …]`."""
    folder = RunFolder.find(run, "")
    found = import_module(f"{__package__}.{MEASURES[name]}").measure(
        Run(folder, folder.load_options(list(words), "profile"))
    )
    kept = kept_at(folder.path, name)
    kept.parent.mkdir(exist_ok=True)
    write_json(kept, asdict(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
