"""What is worked out from a finished run beside its bits: a module each, by name, and what it found is kept in the run's folder.

A module has `measure(run) -> Measured`, of an opened run; `python -m pipeline.experiments.measures NAME RUN [key=value …]` calls
it, in a process of its own.
"""

from dataclasses import dataclass, field
from pathlib import Path

MEASURES = {  # name: module of this package
    "profile": "profiled",
    "copies": "copied",
    "distance": "distance",
    "frequency": "frequency",
    "memory": "memory",
    "bags": "bags",
    "samples": "samples",
    "speed": "speed",
    "passages": "passages",
}
OF_SIZES = {"profile", "memory", "speed"}  # time and memory, which depend on no seed: of one run of an arm


@dataclass
class Measured:
    """Figures of a run, and what of it is shown.

    Attributes:
        figures: by name; of those that a claim is about fewer is better. Means over seeds stand in the table.
        axes: of the lines: what is across, and what upwards.
        line: its points.
        examples: rows of cells, below a first one with their heads.
        notes: what has to be said of it.
    """

    figures: dict[str, float]
    axes: tuple[str, str] = ("", "")
    line: list[tuple[float, float]] = field(default_factory=list)
    examples: list[list[str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def kept_at(run: Path, name: str) -> Path:
    """Where a run keeps a measure."""
    return run / "measures" / f"{name}.json"
