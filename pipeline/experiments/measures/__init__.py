"""Measures of a finished run beside its bits, one module each. Results are kept in the run's folder.

A module has `measure(run) -> Measured`, which takes an opened run. `python -m pipeline.experiments.measures NAME RUN
[key=value …]` calls it in a process of its own.
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
    """Metrics of a run, and further results to show.

    Attributes:
        figures: metrics by name; for those in a claim lower is better. The table shows means over seeds.
        axes: labels of the line's x- and y-axis.
        line: its points.
        examples: rows of cells, below a header row.
        notes: remarks on the results.
    """

    figures: dict[str, float]
    axes: tuple[str, str] = ("", "")
    line: list[tuple[float, float]] = field(default_factory=list)
    examples: list[list[str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def kept_at(run: Path, name: str) -> Path:
    """Return the path of a measure's results in a run."""
    return run / "measures" / f"{name}.json"
