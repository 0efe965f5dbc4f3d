"""Comparison of all systems and of public packages at equal seconds, with two to three million parameters each."""

from pipeline.config import Phase
from pipeline.experiments.experiment import OURS, Arm, Experiment
from pipeline.experiments.haed.sizes import ALONE, TABLES, TODAY, UNTABLED

SMALL = (*("model.main.layers=2", "model.main.ffn=512", "model.decoder.width=320", "model.decoder.token_width=32"),)
PLAIN = (*SMALL, *UNTABLED)
GRAMS = ("model.token.grams.rows=32768",)
SHIFTED, UNSHIFTED = ("model.token.shift=true",), ("model.token.shift=false",)
TRAIN: tuple[Phase, ...] = ("train",)

ARMS = (
    Arm("haed, with its tables", "wikitext2", SMALL),
    Arm("haed", "wikitext2", PLAIN),
    Arm("haed, decoder alone", "wikitext2", (*PLAIN, *ALONE)),
    Arm("haed, end to end", "wikitext2", PLAIN, only=TRAIN),
    *(Arm(name, name, only=TRAIN) for name in ("hred", "hred-transformer", "megabyte", "flat")),
    Arm("flat, without shift", "flat", UNSHIFTED),
    Arm("flat, with n-grams", "flat", GRAMS),
    *(Arm(name, name) for name in ("hourglass", "hourglass-annotated", "top-down", "bottom-up", "retina", "spacebyte")),
    Arm("spacebyte, with n-grams", "spacebyte", GRAMS),
)
PAPER = "paper-wikitext103"
FULL = (  # each by its own preset's limits
    Arm("haed, with its tables", PAPER, (*TODAY, *TABLES)),
    Arm("haed", PAPER, TODAY),
    Arm("haed, decoder alone", PAPER, (*TODAY, *ALONE)),
    Arm("haed, end to end", PAPER, only=TRAIN),
    Arm("hred", "paper-hred-wikitext103", only=TRAIN),
    Arm("hred-transformer", "paper-hred-transformer-wikitext103", only=TRAIN),
    Arm("megabyte", "paper-megabyte", only=TRAIN),
    Arm("flat", "paper-transformer-wikitext103", SHIFTED),
    Arm("flat, without shift", "paper-transformer-wikitext103"),
    Arm("flat, with n-grams", "paper-transformer-wikitext103", (*SHIFTED, *GRAMS)),
    Arm("hourglass", "paper-hourglass-enwik8"),
    Arm("hourglass-annotated", "paper-hourglass-annotated"),
    *(Arm(name, f"paper-{name}-wikitext103") for name in ("top-down", "bottom-up", "retina")),
    Arm("spacebyte", "paper-spacebyte", SHIFTED),
    Arm("spacebyte, with n-grams", "paper-spacebyte", (*SHIFTED, *GRAMS)),
)
# The packages of benchmarks/peers.txt, and what of ours is the same model.
PACKAGES = {
    "x-transformers": "flat",
    "x-transformers, 768": "flat",
    "MEGABYTE-pytorch": "megabyte",
    "hourglass-transformer-pytorch": "hourglass",
    "labml-nn": "hourglass-annotated",
    "h-net-dynamic-chunking": "spacebyte",
    "transformers, BLT": "spacebyte, with n-grams",
}

SYSTEMS = Experiment(
    name="systems",
    source=OURS,
    question="all systems at equal seconds, of two to three million parameters beside tables",
    arms=ARMS,
    claim="chunks that are learned in two phases and scored as a mixture need the fewest bits",
    # than its rivals at their best: `flat` has shift
    better=tuple(("haed, with its tables", arm.name) for arm in ARMS[2:] if arm.name != "flat, without shift"),
    equal="seconds",
    measures=("speed",),
    full=FULL,
)
PEERS = Experiment(
    name="peers",
    source=OURS,
    question="public packages beside the same models of ours, and HAED, at equal seconds",
    arms=(
        *(arm for arm in ARMS if arm.name in {"haed, with its tables", "haed", *PACKAGES.values()}),
        *(Arm(name, package=name) for name in PACKAGES),
    ),
    claim="ours are no worse than the packages of the same models, and HAED is better than all",
    better=(*((own, name) for name, own in PACKAGES.items()), *(("haed", name) for name in PACKAGES)),
    equal="seconds",
    beside=45,  # a package's rates are tried for as long as it is trained
)
