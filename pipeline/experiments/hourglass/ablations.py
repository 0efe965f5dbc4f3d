"""Hourglass, Tables 3 to 7: depth, vanilla layers, upsampling, pooling, hierarchies, each on as much data."""

from pipeline.experiments.experiment import Arm, Experiment

# What the paper's depths leave room for.
SMALL = ("model.token.width=128", "model.token.heads=2", "model.token.ffn=512")
PAPER = "paper-hourglass-enwik8"
ABLATION = ("model.token.dropout=0.15", "train.steps=200000", "train.rate_to=0")  # appendix C.2


def of(
    number: int, question: str, rows: dict[str, tuple[str, float]], claim: str, better: tuple[tuple[str, str], ...]
) -> Experiment:
    """A table: its rows with an option in place of the preset's, and the paper's bits/char of enwik8."""
    small, full = (
        tuple(
            Arm(name, preset, (*sizes, *options.split("; ")), {"enwik8": bits})
            for name, (options, bits) in rows.items()
        )
        for preset, sizes in (("hourglass", SMALL), (PAPER, ABLATION))
    )
    source = f"Nawrot et al. 2021, Table {number}"
    return Experiment(f"hourglass-table{number}", source, question, small, claim, better, full=full)


def hierarchy(layers: str) -> str:
    """Layers and factors."""
    return f"model.hourglass.hierarchy={layers}"


def at_baseline(which: str, kinds: dict[str, tuple[str, float]]) -> dict[str, tuple[str, float]]:
    """Ways to shorten or to lengthen, at the baseline's factor."""
    base = hierarchy("1@1 4@4 1@1")
    return {name: (f"{base}; model.hourglass.{which}={kind}", bits) for name, (kind, bits) in kinds.items()}


TABLE3 = of(
    3,
    "the number of shortened layers",
    {f"n = {n}": (hierarchy(f"1@1 {n}@3 1@1"), bits) for n, bits in {1: 1.164, 4: 1.134, 8: 1.108, 16: 1.096}.items()},
    "more shortened layers are better, up to 16",
    (("n = 4", "n = 1"), ("n = 8", "n = 4"), ("n = 16", "n = 8")),
)
TABLE4 = of(
    4,
    "layers at every token, before shortening and after lengthening",
    {
        f"({a}, {b})": (hierarchy(f"{a}@1 4@3 {b}@1"), bits)
        for a, b, bits in ((0, 0, 1.460), (0, 2, 1.176), (2, 0, 1.189), (1, 1, 1.171), (2, 2, 1.128))
    },
    "without vanilla layers it is much worse; an equal number at both ends is best",
    (("(0, 2)", "(0, 0)"), ("(2, 0)", "(0, 0)"), ("(1, 1)", "(0, 2)"), ("(1, 1)", "(2, 0)"), ("(2, 2)", "(1, 1)")),
)
TABLE5 = of(
    5,
    "how vectors are lengthened",
    at_baseline(
        "lengthening",
        {
            "repeat": ("repeat", 1.148),
            "linear": ("linear", 1.163),
            "U = x": ("attention", 1.145),
            "U = x + Linear(x')": ("attention_linear", 1.132),
        },
    ),
    "of text, attention from x + Linear(x') is best, and linear worst",
    (("U = x + Linear(x')", "U = x"), ("U = x", "repeat"), ("repeat", "linear")),
)
TABLE6 = of(
    6,
    "how vectors are shortened",
    at_baseline(
        "shortening",
        {
            "average": ("average", 1.129),
            "attention, S = average": ("attention_average", 1.124),
            "attention, S = linear": ("attention_linear", 1.142),
            "linear": ("linear", 1.159),
        },
    ),
    "of text, attention from averages is best, and linear worst",
    (("attention, S = average", "average"), ("average", "attention, S = linear"), ("attention, S = linear", "linear")),
)
TABLE7 = of(
    7,
    "hierarchies, with their linear cost in parentheses",
    {
        f"{layers} ({cost})": (hierarchy(layers), bits)
        for layers, bits, cost in (
            ("2@1 4@4 2@1", 1.143, "7"),
            ("2@1 8@4 2@1", 1.128, "8"),
            ("3@1 8@4 3@1", 1.109, "10"),
            ("4@1 8@4 4@1", 1.098, "12"),
            ("2@1 1@3 2@1", 1.163, "6.33"),
            ("2@1 4@3 2@1", 1.128, "7.33"),
            ("2@1 8@3 2@1", 1.111, "8.66"),
            ("2@1 16@3 2@1", 1.096, "11.33"),
            ("2@1 1@2 4@4 1@2 2@1", 1.115, "9"),
        )
    },
    "what costs more is better, at either factor",
    (("4@1 8@4 4@1 (12)", "2@1 4@4 2@1 (7)"), ("2@1 16@3 2@1 (11.33)", "2@1 1@3 2@1 (6.33)")),
)
