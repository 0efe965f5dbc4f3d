"""The commands of haed: shard, pretrain, finetune, train, evaluate, sample, index, neighbours, report.

`open_run` opens a trained run from Python.
"""

import os
import sys

# If several trainings run at once, idle OpenMP threads must sleep. By default libgomp lets them spin, which takes cores
# from the other trainings. A single training is slower with it (dev/LOG.md). It must be set before torch is loaded.
if os.environ.get("HAED_TRAININGS", "1") != "1":
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

ROOT = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))
sys.path.insert(0, ROOT)  # before the working folder, which may contain a data.py
import data  # noqa: E402, F401
import haed  # noqa: E402, F401

del sys.path[0]

TYPE_CHECKING = False  # importing `typing` would delay the handling of signals
if TYPE_CHECKING:
    from pipeline.run.opened import Run, open_run

__all__ = ["Run", "open_run"]


def __getattr__(name: str) -> object:
    """Import torch and the model on first access to `Run` or `open_run`."""
    if name in __all__:
        from pipeline.run import opened

        return getattr(opened, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
