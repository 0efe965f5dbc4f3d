"""Where the time and the memory of a step go: the decoder's share, and what is kept for the backward pass."""

from pipeline.experiments.measures import Measured
from pipeline.run.opened import Run
from pipeline.train.profile import profile


def measure(run: Run) -> Measured:
    """Of the last phase: `milliseconds of a step`, `MB kept`, and `share of the decoder` of models that have one."""
    found = profile(run.options, run.phase)
    whole = sum(found.milliseconds.values())
    figures = {"milliseconds of a step": whole, "MB kept": sum(found.kept.values()) / 1e6}
    if "decoder" in found.milliseconds:
        figures["share of the decoder"] = found.milliseconds["decoder"] / whole
    return Measured(figures)
