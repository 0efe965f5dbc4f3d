"""What a person runs: shard, pretrain, finetune, train, evaluate, sample, index, neighbours, report.

`open_run` opens a trained run from Python.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pipeline.inference import Run, open_run

__all__ = ["Run", "open_run"]


def __getattr__(name: str) -> Any:
    """Imports torch and the model only when they are asked for."""
    if name in __all__:
        from pipeline import inference

        return getattr(inference, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
