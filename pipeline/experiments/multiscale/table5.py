"""Multi-scale, Table 5: samples of the models, by what can be counted in them."""

from pipeline.experiments.experiment import Arm, Experiment
from pipeline.experiments.multiscale.sizes import HALF, PRESETS, SMALL, layers

NAMES = "perplexity of n-grams", "seconds a sample", "BLEU", *(f"repeated {n}-grams" for n in (1, 2, 3, 4))
ROWS = {  # layers, ours and the paper's; and its figures
    "Vanilla": ("7", "14", (22.81, 1.35, 7.45, 0.75, 0.45, 0.29, 0.20)),
    "Top-down": ("1@64 2@16 4@4 6@1", "2@64 4@16 8@4 12@1", (21.17, 0.93, 6.80, 0.73, 0.41, 0.26, 0.16)),
    "Bottom-up": ("4@16 4@4 5@1", "8@16 9@4 9@1", (24.54, 1.36, 7.04, 0.75, 0.45, 0.28, 0.18)),
    "Retina": ("6", "12", (20.91, 1.72, 7.37, 0.73, 0.42, 0.26, 0.17)),
}


def arms(which: int, *sizes: str) -> tuple[Arm, ...]:
    """Return the arms of all rows: small (0) or of the paper's sizes (1)."""
    return tuple(
        Arm(kind, PRESETS[kind][which], (*sizes, layers(kind, depths[which])), dict(zip(NAMES, paper, strict=True)))
        for kind, (*depths, paper) in ROWS.items()
    )


TABLE5 = Experiment(
    name="multiscale-table5",
    source="Subramanian et al. 2020, Table 5",
    question=f"samples of 320 bytes after 64 words: n-grams, repeats, BLEU, time; {HALF}",
    arms=arms(0, *SMALL),
    claim="a top-down model takes the least time for a sample",
    better=tuple(("Top-down", other) for other in ROWS if other != "Top-down"),
    by=("seconds a sample",),
    measures=("samples",),
    across="seconds a sample",
    full=arms(1),
)
