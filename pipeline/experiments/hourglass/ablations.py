"""Hourglass, Tables 3 to 7: depth, vanilla layers, upsampling, pooling, hierarchies, with equal amounts of data."""

from pipeline.experiments.experiment import Arm, Experiment

# What the paper's depths leave room for, and its definition.
SMALL = ("model.token.width=128", "model.token.heads=2", "model.token.ffn=512", "model.token.shift=false")
PAPER = "paper-hourglass-enwik8"
# Appendix C.2; windows of 2,048 (section 4), scored without context.
ABLATION = (
    *("model.token.dropout=0.15", "train.steps=200000", "train.rate_to=0"),
    *("batch.context=128", "evaluate.stride=128"),
)

# Of a row: its hierarchy, ours and the paper's; other options; and the paper's bits/char of enwik8.
Line = tuple[str, str, tuple[str, ...], float]


def of(
    number: int, question: str, rows: dict[str, Line], claim: str, better: tuple[tuple[str, str], ...]
) -> Experiment:
    """Return the experiment for a table, from its rows."""
    small, full = (
        tuple(
            Arm(name, preset, (*sizes, hierarchy(depths[which]), *more), {"enwik8": bits})
            for name, (*depths, more, bits) in rows.items()
        )
        for which, (preset, sizes) in enumerate((("hourglass", SMALL), (PAPER, ABLATION)))
    )
    source = f"Nawrot et al. 2021, Table {number}"
    return Experiment(f"hourglass-table{number}", source, question, small, claim, better, full=full)


def hierarchy(layers: str) -> str:
    """Return the option of a hierarchy, as layers@factor."""
    return f"model.hourglass.hierarchy={layers}"


def as_there(layers: str, bits: float) -> Line:
    """Return a row with the paper's hierarchy at both sizes."""
    return layers, layers, (), bits


def at_baseline(which: str, kinds: dict[str, tuple[str, float]]) -> dict[str, Line]:
    """Return rows for ways to shorten or lengthen, in the paper's baseline or a smaller one with its factor."""
    base = "1@1 4@4 1@1", "2@1 24@4 2@1"
    return {name: (*base, (f"model.hourglass.{which}={kind}",), bits) for name, (kind, bits) in kinds.items()}


TABLE3 = of(
    3,
    "the number of shortened layers, between one vanilla layer and another (the paper: two and two)",
    {
        f"n = {n}": (f"1@1 {n}@3 1@1", f"2@1 {n}@3 2@1", (), bits)
        for n, bits in {1: 1.164, 4: 1.134, 8: 1.108, 16: 1.096}.items()
    },
    "more shortened layers are better, up to 16",
    (("n = 4", "n = 1"), ("n = 8", "n = 4"), ("n = 16", "n = 8")),
)
TABLE4 = of(
    4,
    "layers at every token, before shortening and after lengthening",
    {
        f"({a}, {b})": as_there(f"{a}@1 4@3 {b}@1", bits)
        for a, b, bits in ((0, 0, 1.460), (0, 2, 1.176), (2, 0, 1.189), (1, 1, 1.171), (2, 2, 1.128))
    },
    "without vanilla layers it is much worse; an equal number at both ends is best",
    (("(0, 2)", "(0, 0)"), ("(2, 0)", "(0, 0)"), ("(1, 1)", "(0, 2)"), ("(1, 1)", "(2, 0)"), ("(2, 2)", "(1, 1)")),
)
TABLE5 = of(
    5,
    "how vectors are lengthened, in 1@1 4@4 1@1 (the paper: 2@1 24@4 2@1)",
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
    "how vectors are shortened, in 1@1 4@4 1@1 (the paper: 2@1 24@4 2@1)",
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
        f"{layers} ({cost})": as_there(layers, bits)
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
