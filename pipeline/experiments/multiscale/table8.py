"""Multi-scale, Table 8: what is kept in memory, by kind of tensor and by scale, computed and measured."""

from pipeline.experiments.experiment import Arm, Experiment
from pipeline.experiments.multiscale.sizes import HALF, PRESETS, SMALL, layers

ROWS = {  # kind; layers, ours and the paper's; GB that the paper computed, and that PyTorch told it
    "Vanilla, 12 layers": ("Vanilla", "6", "12", 21.52, 20.98),
    "Top-down, 30 layers": ("Top-down", "3@64 3@16 4@4 4@1", "7@64 7@16 8@4 8@1", 17.98, 18.22),
    "Bottom-up, 23 layers": ("Bottom-up", "3@16 4@4 4@1", "7@16 8@4 8@1", 19.97, 20.41),
}
# Its 0.05 GB of embeddings are those of 32 windows of 512; memory is the same after a few steps as after a million.
PAPER = ("batch.sequences=32", "train.steps=10", "optimizer.warmup_steps=2")


def arms(which: int, *sizes: str) -> tuple[Arm, ...]:
    """Return the arms of all rows: small (0) or of the paper's sizes (1)."""
    return tuple(
        Arm(
            name,
            PRESETS[kind][which],
            (*sizes, layers(kind, depths[which]), "precision=fp32"),
            {"GB measured": measured, "GB computed": computed},
        )
        for name, (kind, *depths, computed, measured) in ROWS.items()
    )


TABLE8 = Experiment(
    name="multiscale-table8",
    source="Subramanian et al. 2020, Table 8",
    question=f"what a step keeps for its backward pass, by kind of tensor and by scale, computed and measured; {HALF}",
    arms=arms(0, *SMALL),
    claim="what is computed is what is measured, within a few per cent, and layers of coarse scales cost little",
    better=(("Top-down, 30 layers", "Vanilla, 12 layers"), ("Bottom-up, 23 layers", "Vanilla, 12 layers")),
    by=("MB measured",),
    below={
        "share that the computed is off": 0.05,
        "a layer at 4x, of one at 1x": 0.3,
        "a layer at 16x, of one at 1x": 0.1,
    },
    measures=("memory",),
    enough=60,
    full=arms(1, *PAPER),
)
