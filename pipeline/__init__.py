"""The commands of haed: shard, pretrain, finetune, train, evaluate, sample, index, neighbours, report.

`open_run` opens a trained run from Python.
"""

import os
import sys

# Where several train at once, idle threads of OpenMP sleep; torch must find this when it is loaded. Left to itself libgomp has
# them spin, which takes the cores from whatever else computes: two trainings then wait for each other. One alone is slower
# with it (docs/log.md).
if os.environ.get("HAED_TRAININGS", "1") != "1":
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

ROOT = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))
sys.path.insert(0, ROOT)  # before the working folder, which may have a data.py
import data  # noqa: E402, F401
import haed  # noqa: E402, F401

del sys.path[0]

TYPE_CHECKING = False  # `typing` takes longer to import than all that stands before a signal is met
if TYPE_CHECKING:
    from pipeline.run.opened import Run, open_run

__all__ = ["Run", "open_run"]


def __getattr__(name: str) -> object:
    """Import torch and the model on first access to `Run` or `open_run`."""
    if name in __all__:
        from pipeline.run import opened

        return getattr(opened, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
