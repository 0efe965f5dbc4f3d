"""Multi-scale, Figure 5: which words the models tell better, by how often training has them."""

from pipeline.experiments.experiment import Arm, Experiment
from pipeline.experiments.multiscale.sizes import PRESETS, SMALL, WORDS, layers

DEPTHS = {"Vanilla": ("6", "16"), "Top-down": ("3@4 6@1", "6@4 12@1"), "Bottom-up": ("2@4 5@1", "5@4 10@1")}
DEPTHS |= {"Retina": ("6", "16")}


def arms(which: int, *sizes: str) -> tuple[Arm, ...]:
    """Return a model of each kind on words, small or of the paper's sizes."""
    return tuple(Arm(kind, PRESETS[kind][which], (*sizes, layers(kind, DEPTHS[kind][which]))) for kind in DEPTHS)


FIGURE5 = Experiment(
    name="multiscale-figure5",
    source="Subramanian et al. 2020, Figure 5",
    question="bits of words by how often training has them, in ten bins of equal mass; layers: "
    + ", ".join(f"{kind} {small} for {paper}" for kind, (small, paper) in DEPTHS.items()),
    arms=arms(0, *SMALL, *WORDS, "batch.sequences=2"),
    claim="models of several scales gain most on rare words",
    better=(("Top-down", "Vanilla"), ("Bottom-up", "Vanilla")),
    by=("rarest less most frequent",),
    equal="seconds",
    measures=("frequency",),
    full=arms(1, *WORDS),
)
