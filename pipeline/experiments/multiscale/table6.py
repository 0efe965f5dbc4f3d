"""Multi-scale, Table 6: the nearest passages at each scale."""

from pipeline.experiments.experiment import Arm, Experiment
from pipeline.experiments.multiscale.sizes import HALF, PRESETS, SMALL, layers

ROWS = {  # layers, ours and the paper's
    "Top-down": ("3@64 3@16 4@4 4@1", "7@64 7@16 8@4 8@1"),
    "Bottom-up": ("3@16 4@4 4@1", "7@16 8@4 8@1"),
}


def arms(which: int, *sizes: str) -> tuple[Arm, ...]:
    """Return both arms: small (0) or of the paper's sizes (1)."""
    return tuple(Arm(kind, PRESETS[kind][which], (*sizes, layers(kind, each[which]))) for kind, each in ROWS.items())


TABLE6 = Experiment(
    name="multiscale-table6",
    source="Subramanian et al. 2020, Table 6",
    question=f"passages of 512 bytes that are nearest at each scale, and whether they are of one topic; {HALF}",
    arms=arms(0, *SMALL),
    claim="at every scale the nearest passages are often of one topic",
    better=(),
    below={f"distance of topics at {scale}x, of random": 1.0 for scale in (4, 16, 64)},
    measures=("passages",),
    full=arms(1),
)
