"""Multi-scale, Table 7: models of one coarse scale, to which the next k tokens are a bag."""

from pipeline.experiments.experiment import Arm, Experiment
from pipeline.experiments.multiscale.sizes import PRESETS, SMALL

SCALES = (2, 4, 8, 16, 64)


def arms(which: int, depth: int, *sizes: str) -> tuple[Arm, ...]:
    """Return a model with `depth` layers for each scale, small (0) or of the paper's width (1)."""
    bag = "model.multiscale.upsampling=repeat"
    preset = PRESETS["Top-down"][which]
    return tuple(Arm(f"{k}x", preset, (*sizes, f"model.multiscale.layers={depth}@{k}", bag)) for k in SCALES)


TABLE7 = Experiment(
    name="multiscale-table7",
    source="Subramanian et al. 2020, Table 7",
    question="layers of one coarse scale alone, to which the next k bytes are a bag; 6 layers, widths a sixth of the paper's",
    arms=arms(0, 6, *SMALL),
    claim="at every scale a model learns what will follow",
    better=(),
    below={"share of a unigram model's bits": 1.0},
    measures=("bags",),
    full=arms(1, 12),  # layers of our choice
)
