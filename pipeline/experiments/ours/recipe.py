"""Training of the preset `wikitext2` and its hashed tables: one setting changed at a time, at equal seconds."""

from pipeline.experiments.experiment import OURS, Arm, Experiment
from pipeline.experiments.haed.sizes import ALONE, UNTABLED

PRESET, SHIPPED = "wikitext2", "as shipped"
FLAT_END = ("pretrain.rate_to=1", "finetune.rate_from=1", "finetune.rate_to=0")

RECIPES = {
    "straight to zero": ("optimizer.schedule=linear", "finetune.rate_to=0"),
    "stable, then to zero": ("optimizer.schedule=stable", *FLAT_END),
    "rates halved": ("optimizer.learning_rate=1e-3", "optimizer.main_learning_rate=5e-4"),
    "rates doubled": ("optimizer.learning_rate=4e-3", "optimizer.main_learning_rate=2e-3"),
    "warm-up of 30 steps": ("optimizer.warmup_steps=30",),
    "warm-up of 300 steps": ("optimizer.warmup_steps=300",),
    "batches of 2 windows": ("batch.sequences=2",),
    "batches of 8 windows": ("batch.sequences=8",),
    "8 windows of 64": ("batch.context=64", "batch.sequences=8"),
    "2 windows of 256": ("batch.context=256", "batch.sequences=2"),
    "average of weights": ("optimizer.ema=0.99",),
    "no weight decay": ("optimizer.weight_decay=0",),
    "phase one a third": ("pretrain.seconds=200", "finetune.seconds=400"),
    "phase one four fifths": ("pretrain.seconds=480", "finetune.seconds=120"),
}
WHICH = {
    "no tables": UNTABLED,
    "chunks alone": ("model.decoder.grams.rows=0",),
    "n-grams alone": ("model.encoder.rows=0",),
}
GRAMS = {
    "n-grams of 2 and 3": ("model.decoder.grams.orders=[2,3]",),
    "n-grams of 2 to 4": ("model.decoder.grams.orders=[2,3,4]",),
    "n-grams of 2 to 6": ("model.decoder.grams.orders=[2,3,4,5,6]",),
    "n-grams of 3 to 8": ("model.decoder.grams.orders=[3,4,5,6,7,8]",),
    "n-grams in 8,192 rows": ("model.decoder.grams.rows=8192",),
    "n-grams in 131,072 rows": ("model.decoder.grams.rows=131072",),
    "n-grams 16 wide": ("model.decoder.grams.width=16",),
    "n-grams 64 wide": ("model.decoder.grams.width=64",),
}
SPELT = "decoder alone"  # where n-grams have the most to do
SPELLING = {f"{SPELT}, {name}": (*ALONE, *options) for name, options in (WHICH | GRAMS).items()}


def one_by_one(name: str, question: str, claim: str, *groups: dict[str, tuple[str, ...]]) -> Experiment:
    """Return an experiment that compares groups of changes to the preset.

    The claim is that the first of a group is better than the others.
    """
    return Experiment(
        name=name,
        source=OURS,
        question=question,
        arms=tuple(Arm(each, PRESET, options) for group in groups for each, options in group.items()),
        claim=claim,
        better=tuple((first, other) for first, *others in groups for other in others),
        equal="seconds",
    )


RECIPE = one_by_one(
    "recipe",
    "how wikitext2 is trained, one setting changed at a time",
    "none of these changes makes the preset better",
    {SHIPPED: ()} | RECIPES,
)
LOOKED_UP = one_by_one(
    "tables",
    "the tables of hashed rows of wikitext2, one setting changed at a time, in the mixture and of the decoder alone",
    "both tables help, and none of these changes makes the preset better",
    {SHIPPED: ()} | WHICH,
    {SPELT: ALONE} | SPELLING,
)
