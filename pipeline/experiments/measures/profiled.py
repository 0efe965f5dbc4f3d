"""Profile of a training step: its time, the decoder's share of it, and the memory saved for the backward pass."""

from pipeline.experiments.measures import Measured
from pipeline.run.opened import Run
from pipeline.train.profile import profile_phase


def measure(run: Run) -> Measured:
    """Measure `milliseconds of a step`, `MB kept` and, with a decoder, `share of the decoder`, in the last phase."""
    found = profile_phase(run.options, run.phase)
    whole = sum(found.milliseconds.values())
    figures = {"milliseconds of a step": whole, "MB kept": sum(found.kept.values()) / 1e6}
    if "decoder" in found.milliseconds:
        figures["share of the decoder"] = found.milliseconds["decoder"] / whole
    return Measured(figures)
