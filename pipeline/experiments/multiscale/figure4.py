"""Multi-scale, Figure 4: how far back the order of words counts, for every system."""

from pipeline.config import Phase
from pipeline.experiments.experiment import Arm, Experiment
from pipeline.experiments.multiscale.sizes import QUICK, WORDS

FLAT = (*WORDS, "batch.sequences=2")  # as many words a step as the others
SYSTEMS: dict[str, tuple[str, tuple[str, ...], tuple[Phase, ...]]] = {
    "flat": ("paper-transformer-wikitext103", FLAT, ()),
    "hourglass": ("paper-hourglass-enwik8", FLAT, ()),
    "hourglass-annotated": ("paper-hourglass-annotated", FLAT, ()),
    "top-down": ("paper-top-down-wikitext103", FLAT, ()),
    "bottom-up": ("paper-bottom-up-wikitext103", FLAT, ()),
    "retina": ("paper-retina-wikitext103", FLAT, ()),
    "spacebyte": ("paper-spacebyte", FLAT, ()),
    "megabyte": ("paper-megabyte", (), ("train",)),
    "hred": ("paper-hred-wikitext103", (), ("train",)),
    "hred-transformer": ("paper-hred-transformer-wikitext103", (), ("train",)),
    "haed": ("paper-wikitext103", (), ()),
}

FIGURE4 = Experiment(
    name="multiscale-figure4",
    source="Subramanian et al. 2020, Figure 4",
    question="bits lost where 64 chunks before are in random order, by distance; chunks are words, MEGABYTE's are 4 bytes",
    arms=tuple(
        Arm(name, "quickstart" if name == "haed" else name, ("batch.context=128", *QUICK, *options), only=only)
        for name, (_, options, only) in SYSTEMS.items()
    ),
    claim="more than 50 tokens away the order of words changes next to nothing",
    better=(),
    below={"far of near": 0.1},
    equal="seconds",
    measures=("distance",),
    beside=65,
    full=tuple(
        Arm(name, preset, WORDS if own is FLAT else (), only=only) for name, (preset, own, only) in SYSTEMS.items()
    ),
)
