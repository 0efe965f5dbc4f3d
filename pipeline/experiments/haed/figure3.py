"""HAED, Figure 3: a larger decoder is better, and takes the time."""

from itertools import pairwise

from pipeline.experiments.experiment import Arm, Experiment
from pipeline.experiments.haed.sizes import ALONE, UNTABLED

UNITS = (64, 128, 256, 512)


def arms(preset: str, units: tuple[int, ...], *options: str) -> tuple[Arm, ...]:
    """Return HAED end to end with decoders of different widths."""
    return tuple(Arm(f"{n} units", preset, (f"model.decoder.width={n}", *options), only=("train",)) for n in units)


FIGURE3 = Experiment(
    name="haed-figure3",
    source="Mujika 2023, Figure 3",
    question="units of the decoder: bits, and the decoder's share of a step, on as much data",
    arms=arms("quickstart", UNITS, *UNTABLED, *ALONE),
    claim="a larger decoder is better all the way",
    better=tuple((f"{more} units", f"{fewer} units") for fewer, more in pairwise(UNITS)),
    measures=("profile",),
    across="share of the decoder",
    full=arms("paper-wikitext103", (*UNITS, 1024, 2048), "model.main.heads=8"),  # units of our choice
)
