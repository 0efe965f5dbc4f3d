"""The copy task of Hourglass's appendix A.1 (Nawrot et al. 2021): what a hierarchy cannot learn without layers at the tokens.

    python benchmarks/copy_task.py [--steps 300] [--seeds 0 1 2] [--to copy-task]

Sequences are chunks of three symbols, a random letter, #, and the letter again: A#AC#CD#D. The first of a chunk is chance, the
second certain, the third a copy from two places before. A hierarchy that shortens by 3 knows, at the third place, the chunks
before and the symbol just fed, which is #: without layers at the finest scale it cannot do better than chance there, with one,
before shortening or after it, it can. With 26 letters that is 36 % of all symbols against 68 %. Resampling is by average and
repetition. Writes TO.csv (hierarchy, seed, step, share right of all symbols, of each third) and TO.png; prints the end.
"""

import argparse
import csv
import sys
import time
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parent.parent)  # else `data` would be the script beside this one

import torch

from haed.build import make_system
from haed.options import HourglassOptions, IEMOptions, ModelOptions, TokenOptions
from haed.system import Cut, Windows, moved
from haed.token.sequence import TokenSystem

LETTERS, CHUNKS, BATCH, RATE, EVERY, HELD_OUT = 26, 16, 32, 1e-2, 10, 64
ARMS = {  # hierarchy: how it is drawn
    "0@1 2@3 0@1": "tab:red",
    "1@1 2@3 0@1": "tab:blue",
    "0@1 2@3 1@1": "tab:green",
    "1@1": "tab:gray",
}
RESAMPLING = {"shortening": "average", "lengthening": "repeat"}
TOKEN = TokenOptions(width=32, heads=2, head_width=16, ffn=64)


def sequences(count: int, generator: torch.Generator) -> Windows:
    """(count, CHUNKS, 3) symbols, of which the last of the vocabulary is #."""
    letters = torch.randint(LETTERS, (count, CHUNKS), generator=generator)
    tokens = torch.stack([letters, torch.full_like(letters, LETTERS), letters], -1)
    return Windows.of(tokens, torch.full_like(letters, 3))


@torch.no_grad()
def right(system: TokenSystem, given: Windows) -> tuple[float, float]:
    """Share of symbols, and of each chunk's third ones, that are the likeliest."""
    laid = moved(system.lay_out(given), system.device)
    hits = (system.eval()(laid.symbols.cpu()).argmax(-1) == laid.targets).float()
    return float(hits.mean()), float(hits[:, 2::3].mean())


def learn(hierarchy: str, seed: int, steps: int) -> list[tuple[int, float, float]]:
    """(step, share right of all, of each third) every few steps, on sequences that are not trained on."""
    torch.manual_seed(seed)
    options = ModelOptions(kind="hourglass", token=TOKEN, hourglass=HourglassOptions(hierarchy=hierarchy, **RESAMPLING))
    system = make_system(options, IEMOptions(), Cut(3, LETTERS + 1, True, CHUNKS))
    assert isinstance(system, TokenSystem)
    optimizer = torch.optim.Adam(system.parameters(), RATE)
    generator = torch.Generator().manual_seed(seed)
    held_out, curve = sequences(HELD_OUT, generator), []
    for step in range(steps + 1):
        if step % EVERY == 0:
            curve.append((step, *right(system, held_out)))
        loss = -system.train().total(system.lay_out(sequences(BATCH, generator))) / (BATCH * CHUNKS * 3)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return curve


def draw(curves: dict[str, list[list[tuple[int, float, float]]]], to: Path) -> None:
    """Means over seeds, and the range between them."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(9, 3.4), sharey=True, layout="constrained")
    for place, (axis, title) in enumerate(zip(axes, ("all symbols", "the third of each chunk"), strict=True)):
        for arm, runs in curves.items():
            steps = [step for step, *_ in runs[0]]
            shares = torch.tensor([[point[1 + place] for point in run] for run in runs])
            axis.plot(steps, shares.mean(0), color=ARMS[arm], label=arm)
            axis.fill_between(steps, shares.amin(0), shares.amax(0), color=ARMS[arm], alpha=0.2, linewidth=0)
        axis.axhline(((2 + 1 / LETTERS) / 3, 1.0)[place], color="black", linewidth=0.8, linestyle=":")
        axis.axhline(((1 + 2 / LETTERS) / 3, 1 / LETTERS)[place], color="black", linewidth=0.8, linestyle=":")
        axis.set(title=title, xlabel="steps", ylim=(0, 1.02))
    axes[0].set_ylabel("predicted right")
    axes[1].legend(frameon=False, loc="center right")
    figure.savefig(to, dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--arms", nargs="+", default=list(ARMS), choices=ARMS)
    parser.add_argument("--to", type=Path, default=Path("copy-task"))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    began, curves = time.perf_counter(), {}
    for arm in arguments.arms:
        curves[arm] = [learn(arm, seed, arguments.steps) for seed in arguments.seeds]
        ends = [run[-1] for run in curves[arm]]
        every, third = (sorted(end[place] for end in ends) for place in (1, 2))
        print(
            f"{arm:<12} all {every[0]:.1%} to {every[-1]:.1%}, each third {third[0]:.1%} to {third[-1]:.1%}", flush=True
        )
    with arguments.to.with_suffix(".csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["hierarchy", "seed", "step", "all", "third"])
        for arm, runs in curves.items():
            for seed, run in zip(arguments.seeds, runs, strict=True):
                writer.writerows([arm, seed, step, f"{a:.4f}", f"{b:.4f}"] for step, a, b in run)
    draw(curves, arguments.to.with_suffix(".png"))
    print(f"{time.perf_counter() - began:.0f} s; {arguments.to}.csv, {arguments.to}.png")


if __name__ == "__main__":
    main()
