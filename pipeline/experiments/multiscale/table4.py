"""Multi-scale, Table 4: scales, layers of each, pooling, depth and width, windows of attention, Retina."""

from itertools import pairwise

from pipeline.experiments.experiment import Arm, Experiment
from pipeline.experiments.multiscale.sizes import HALF, PRESETS, SMALL, layers

FOUR = "Top-down 64,16,4,1: "
NARROW = "model.token.width={0}; model.token.heads={1}; model.token.head_width={2}; model.token.ffn={3}"
# Of each row: the kind; its layers, ours and the paper's; other options, ours and the paper's; BookCorpus perplexity and GB.
Line = tuple[str, str, str, tuple[str, str], float, float]


def scales(found: str) -> str:
    """Return the option of layers from their numbers at the scales 64, 16, 4 and 1, or at the last of these."""
    numbers = found.split(",")
    return " ".join(f"{n}@{scale}" for n, scale in zip(numbers, (64, 16, 4, 1)[-len(numbers) :], strict=True))


def top_down(small: str, paper: str, perplexity: float, memory: float, option: str = "") -> Line:
    """Return a row of a top-down model with these numbers of layers at each scale."""
    return "Top-down", scales(small), scales(paper), (option, option), perplexity, memory


def vanilla(depth: int, perplexity: float, memory: float, small: str = "", paper: str = "") -> Line:
    """Return a row of a vanilla model of this depth."""
    return "Vanilla", str(depth // 2), str(depth), (small, paper), perplexity, memory


def local(window: int, perplexity: float) -> Line:
    """Return a row of twelve layers with local attention to `window` tokens.

    They are rotary at both sizes, as local attention requires.
    """
    option = f"model.token.attention=local; model.token.window={window}"
    return vanilla(12, perplexity, 23.78, option, f"{option}; model.token.positions=none")


def retina(windows: str, perplexity: float) -> Line:
    """Return a row of twelve layers with windows of three scales."""
    option = f"model.retina.windows={windows}"
    return "Retina", "6", "12", (option, option), perplexity, 23.95


SCALES = {
    "Vanilla 12": vanilla(12, 16.95, 20.98),
    "Vanilla 14": vanilla(14, 16.54, 23.78),
    "Top-down 4,1: 8,12": top_down("4,6", "8,12", 15.87, 25.45),
    "Top-down 16,4,1: 4,8,12": top_down("2,4,6", "4,8,12", 15.76, 25.23),
    f"{FOUR}2,4,8,12": top_down("1,2,4,6", "2,4,8,12", 16.00, 22.62),
}
CAPACITY = {  # halves of odd numbers are rounded so that no two rows are alike
    f"{FOUR}{paper}": top_down(small, paper, perplexity, memory)
    for paper, small, perplexity, memory in (
        ("16,12,6,1", "8,6,3,1", 22.14, 10.61),
        ("10,10,8,5", "5,5,4,2", 17.89, 13.59),
        ("8,8,7,7", "4,4,3,3", 17.16, 16.87),
        ("7,7,8,8", "3,3,4,4", 16.86, 18.22),
        ("5,5,9,9", "2,2,4,5", 16.57, 19.47),
        ("3,3,10,10", "1,1,5,5", 16.31, 20.71),
        ("2,2,11,11", "1,1,5,6", 16.12, 22.05),
        ("1,1,12,12", "1,1,6,6", 15.95, 23.40),
    )
}
POOLING = {
    "Top-down (Conv): 7,7,8,8": top_down("3,3,4,4", "7,7,8,8", 17.95, 18.45, "model.multiscale.pooling=convolution")
}
DEEP = {
    "Vanilla (256/1024) 30": vanilla(30, 22.15, 22.07, NARROW.format(44, 2, 22, 176), NARROW.format(256, 4, 64, 1024)),
    "Vanilla (512/2048) 20": vanilla(20, 17.70, 22.77, NARROW.format(84, 3, 28, 336), NARROW.format(512, 8, 64, 2048)),
}
LOCAL = {
    f"Vanilla 0:{window}": local(window, bits)
    for window, bits in ((256, 17.00), (128, 17.39), (64, 17.88), (16, 19.01), (8, 20.19))
}
RETINA = {
    "Retina 0:8,8:256,256:512": retina("256:512@16 8:256@4 0:8@1", 16.81),
    "Retina 0:16,16:256,256:512": retina("256:512@16 16:256@4 0:16@1", 17.07),
    "Retina 0:128,64:256,128:512": retina("128:512@16 64:256@4 0:128@1", 17.08),
}
ROWS = {**SCALES, **CAPACITY, **POOLING, **DEEP, **LOCAL, **RETINA}


def arms(which: int, *sizes: str) -> tuple[Arm, ...]:
    """Return the arms of all rows: small (0) or of the paper's sizes (1)."""
    found = []
    for name, (kind, *depths, options, perplexity, memory) in ROWS.items():
        own = [word for word in options[which].split("; ") if word]
        paper = {"BookCorpus, perplexity": perplexity, "memory, GB": memory}
        found.append(Arm(name, PRESETS[kind][which], (*sizes, layers(kind, depths[which]), *own), paper))
    return tuple(found)


TABLE4 = Experiment(
    name="multiscale-table4",
    source="Subramanian et al. 2020, Table 4",
    question=f"scales, layers of each, pooling, depth, windows; {HALF}",
    arms=arms(0, *SMALL),
    claim="a coarser scale and more layers at the finest are better, averages than convolutions, wide models than deep ones; and "
    "what a short window costs, Retina makes good",
    better=(
        ("Top-down 16,4,1: 4,8,12", "Vanilla 12"),
        *((fine, coarse) for coarse, fine in pairwise(CAPACITY)),
        (f"{FOUR}7,7,8,8", "Top-down (Conv): 7,7,8,8"),
        *(("Vanilla 12", narrow) for narrow in DEEP),
        ("Vanilla 0:64", "Vanilla 0:8"),
        ("Retina 0:8,8:256,256:512", "Vanilla 0:8"),
    ),
    measures=("profile",),
    across="MB kept",
    full=arms(1),
)
