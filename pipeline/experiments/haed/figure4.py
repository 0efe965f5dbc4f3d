"""HAED, Figure 4: learning in the embedding space first, or end to end, at equal seconds."""

from pipeline.experiments.experiment import Arm, Experiment
from pipeline.experiments.haed.sizes import ALONE, TODAY

PAPER = (
    *ALONE,
    "pretrain.decode_fraction=0",
    "finetune.decode_fraction=1",
    "iem.duplicates=true",
    "iem.similarity=dot",
    "iem.scale=none",
    "iem.bias=false",
    "iem.head=none",
    "iem.extra_batches=3",
)

FIGURE4 = Experiment(
    name="haed-figure4",
    source="Mujika 2023, Figure 4",
    question="end to end, or the IEM loss first",
    arms=(
        Arm("end to end", "quickstart", ALONE, only=("train",)),
        Arm("IEM, then everything", "quickstart", PAPER),
        Arm("IEM and a share decoded, then the decoder", "quickstart", ALONE),
        Arm("the preset, one mixture", "quickstart"),
        Arm("phase one alone, one mixture", "quickstart", ("pretrain.rate_to=0.05",), only=("pretrain",)),
    ),
    claim="the IEM loss first is better",
    better=(("IEM, then everything", "end to end"), ("the preset, one mixture", "end to end")),
    equal="seconds",
    beside=85,  # evaluation and validations against all known chunks
    full=(
        Arm("end to end", "paper-wikitext103", only=("train",)),
        Arm("IEM, then everything", "paper-wikitext103"),
        Arm("the preset, one mixture", "paper-wikitext103", TODAY),
    ),
)
