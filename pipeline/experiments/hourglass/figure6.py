"""Hourglass, Figure 6 and Table 9: bits against training memory, with and without shortening."""

from pipeline.experiments.experiment import Arm, Experiment
from pipeline.experiments.hourglass.ablations import ABLATION, PAPER, SMALL, hierarchy

# bits/char of enwik8, and GB of running memory
ROWS = {
    "6@1": (1.182, 4.53),
    "2@1 4@4 2@1": (1.143, 4.41),
    "8@1": (1.151, 5.75),
    "2@1 8@3 2@1": (1.111, 5.50),
    "10@1": (1.128, 6.99),
    "2@1 16@3 2@1": (1.096, 5.89),
    "12@1": (1.115, 8.12),
    "4@1 8@4 4@1": (1.098, 7.20),
    "14@1": (1.102, 9.35),
}


def arms(preset: str, *sizes: str) -> tuple[Arm, ...]:
    """Return the arms of all rows, with a preset and further options."""
    return tuple(
        Arm(layers, preset, (*sizes, hierarchy(layers)), {"enwik8": bits, "memory, GB": memory})
        for layers, (bits, memory) in ROWS.items()
    )


FIGURE6 = Experiment(
    name="hourglass-figure6",
    source="Nawrot et al. 2021, Figure 6 and Table 9",
    question="bits against the memory of training, of Transformer-XL and of hierarchies",
    arms=arms("hourglass", *SMALL),
    claim="a hierarchy needs fewer bits and less memory than a transformer",
    better=(
        ("2@1 4@4 2@1", "6@1"),
        ("2@1 8@3 2@1", "8@1"),
        ("2@1 16@3 2@1", "10@1"),
        ("4@1 8@4 4@1", "12@1"),
    ),
    by=("bits", "MB kept"),
    measures=("profile",),
    across="MB kept",
    full=arms(PAPER, *ABLATION),
)
