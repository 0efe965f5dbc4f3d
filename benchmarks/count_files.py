"""Count the files that a reader passes through: in one training step, and from two commands to the core of their work.

    python benchmarks/count_files.py [--list]

A file counts if one of its functions is called. A tiny run is trained in a temporary folder (half a minute).
"""

import argparse
import contextlib
import io
import os
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType

ROOT = Path(__file__).resolve().parent.parent
sys.path[0] = str(ROOT)  # else `data` would be the script beside this one

from flows.cli import main as run_command
from pipeline.console import exit_on_error
from pipeline.training.trainer import Trainer

PACKAGES = tuple(f"{ROOT}/{name}/" for name in ("haed", "data", "pipeline", "flows"))
SMALL = [
    *("model.encoder.rows=64", "model.mixture.known=64", "batch.sequences=2", "batch.context=16", "validation.times=0"),
    *("pretrain.steps=5", "finetune.steps=5", "pretrain.seconds=null", "finetune.seconds=null", "threads=1"),
]


def count_files(words: list[str], begin: Callable[[FrameType], bool], end: Callable[[FrameType], bool]) -> list[str]:
    """Run a command and return the files called between the calls for which `begin` and `end` are true."""
    files: set[str] = set()
    state = "before"

    def profile(frame: FrameType, event: str, argument: object) -> None:
        nonlocal state
        if event != "call" or state == "after":
            return
        if state == "before" and begin(frame):
            state = "during"
        elif state == "during" and end(frame):
            state = "after"
        elif state == "during" and frame.f_code.co_filename.startswith(PACKAGES) and frame.f_code.co_name != "<module>":
            files.add(str(Path(frame.f_code.co_filename).relative_to(ROOT)))

    sys.setprofile(profile)
    threading.setprofile(profile)
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()) as log:
            status = run_command(words)
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    if status or state != "after":
        raise RuntimeError(
            f"haed {' '.join(words)}: status {status}, {state} the counted part\n{log.getvalue()[-2000:]}"
        )
    return sorted(files)


class NthCall:
    """A condition that is true at the nth call of a function."""

    def __init__(self, function: Callable[..., object], number: int = 1) -> None:
        self.code, self.left = function.__code__, number

    def __call__(self, frame: FrameType) -> bool:
        """Return whether this call is the one."""
        self.left -= frame.f_code is self.code
        return not self.left


def calls_faiss(frame: FrameType) -> bool:
    """Return whether a call is a search of FAISS."""
    return "/faiss/" in frame.f_code.co_filename and ("search" in frame.f_code.co_name or "knn" in frame.f_code.co_name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="also print the files")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        at_once = lambda frame: True  # noqa: E731
        count_files(["shard", "--config", "quickstart"], at_once, at_once)
        files_of_steps = {
            "one training step": count_files(
                ["pretrain", "--config", "quickstart", *SMALL],
                NthCall(Trainer._take_next_step, 3),
                NthCall(Trainer._take_next_step, 1),
            ),
            "haed finetune RUN to the trainer": count_files(
                ["finetune", "quickstart", "finetune.steps=6"], at_once, NthCall(Trainer.fit)
            ),
        }
        count_files(["index", "quickstart", "index.max_chunks=2000"], at_once, at_once)
        files_of_steps["haed neighbours RUN to FAISS"] = count_files(
            ["neighbours", "quickstart", "def ", "--min-count", "1"], at_once, calls_faiss
        )
        os.chdir("/")
    for name, files in files_of_steps.items():
        print(f"{name}: {len(files)} files")
        if arguments.list:
            print("".join(f"    {file}\n" for file in files), end="")


if __name__ == "__main__":
    with exit_on_error():
        main()
