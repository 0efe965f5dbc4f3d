"""Hourglass, appendix A.1: what a hierarchy cannot learn without layers at the tokens."""

from pipeline.experiments.experiment import Arm, Experiment

LETTERS = 26
BLIND, BEST = (
    1 - (1 + 2 / LETTERS) / 3,
    1 - (2 + 1 / LETTERS) / 3,
)  # wrong: of chance at two of three symbols, and at one
SMALL = (
    *("model.token.width=32", "model.token.heads=2", "model.token.head_width=16", "model.token.ffn=64"),
    "model.token.shift=false",
    *("model.hourglass.shortening=average", "model.hourglass.lengthening=repeat"),
    *("batch.context=16", "batch.sequences=32", "optimizer.learning_rate=0.01"),
)


def hierarchy(layers: str, wrong: float) -> Arm:
    """Return an arm with these layers and factors, and the error that such a model cannot avoid."""
    return Arm(
        layers, "hourglass", (*SMALL, f"model.hourglass.hierarchy={layers}"), {"wrong, at best": wrong}, "copies"
    )


COPY = Experiment(
    name="hourglass-copy",
    source="Nawrot et al. 2021, appendix A.1",
    question="A#AC#CD#D: the third of each chunk is a copy of the first",
    arms=(
        hierarchy("0@1 2@3 0@1", BLIND),
        hierarchy("1@1 2@3 0@1", BEST),
        hierarchy("0@1 2@3 1@1", BEST),
        hierarchy("1@1", BEST),
    ),
    claim="without layers at the tokens the copies stay at chance, and one layer learns them",
    better=(("1@1 2@3 0@1", "0@1 2@3 0@1"), ("0@1 2@3 1@1", "0@1 2@3 0@1")),
    by=("wrong, of each third",),
    margin=0.5,  # chance is 25 of 26
    measures=("copies",),
    enough=120,
)
