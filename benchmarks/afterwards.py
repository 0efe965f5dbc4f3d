"""Known chunks bolted on afterwards: the mixture of runs that were trained for their decoder alone.

    python benchmarks/afterwards.py RUN … [--beside RUN …] [--windows 64]

For each RUN (of benchmarks/two_phases.py, arm `two-phases`) log q is a · score + b · log count over the known chunks, and the
gate is a constant: three numbers, fitted on every other one of a fixed subset of windows of valid, and scored on the rest. RUNs
--beside were trained as a mixture, and are scored on the same rest as they are. Bits per token.
"""

import argparse
import math
import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parent.parent)  # else `data` would be the script beside this one

import torch
from torch import Tensor

from haed.chunk.known import Known
from haed.chunk.mixture import joint
from haed.chunk.model import HAED
from haed.chunk.packing import Chunks
from haed.system import Windows
from pipeline.kinds import FITTING
from pipeline.run.folder import RunFolder
from pipeline.run.known import lexicon
from pipeline.run.opened import Run
from pipeline.run.windows import fixed_subset

AT_ONCE = 8


class Bolted:
    """Windows, as decoder and known chunks of a run score them.

    Attributes:
        decoder: (N,) log p of the decoder.
        scores: (N, C) of all known chunks.
        rows: (N,) which of them each chunk is, or −1.
    """

    @torch.no_grad()
    def __init__(self, system: HAED, known: Known, windows: Windows) -> None:
        self.log_counts, self.windows = known.log_counts, windows
        parts = [windows[rows] for rows in torch.arange(len(windows.lengths)).split(AT_ONCE)]
        self.decoder = torch.cat([system.score(part, part.real).decoder for part in parts])
        self.scores = torch.cat([known.scores(system.query(system.predictions(part))) for part in parts])
        self.rows = known.lexicon.find(Chunks(windows.tokens[windows.real], windows.lengths[windows.real]))

    def log_p(self, numbers: Tensor) -> Tensor:
        """Of the mixture (N,), by a, b and the gate's logit."""
        a, b, gate = numbers
        scores = a * self.scores + b * self.log_counts
        own = scores.gather(1, self.rows.clamp(min=0)[:, None]).squeeze(1) - scores.logsumexp(1)
        return joint(gate, own.masked_fill(self.rows < 0, -torch.inf), self.decoder)

    def fitted(self) -> Tensor:
        """The numbers that make it most."""
        numbers = torch.tensor([1.0, 0.5, 2.0], requires_grad=True)
        optimizer = torch.optim.LBFGS([numbers], max_iter=20, line_search_fn="strong_wolfe")

        def loss() -> Tensor:
            optimizer.zero_grad()
            found = -self.log_p(numbers).mean()
            found.backward()
            return found

        optimizer.step(loss)
        return numbers.detach()


def bits(log_p: Tensor, windows: Windows) -> float:
    return -float(log_p.double().sum()) / math.log(2) / int(windows.lengths.sum())


def opened(name: str, count: int) -> tuple[Run, Windows]:
    folder = RunFolder.find(name, "runs")
    options = folder.options()
    options.threads = 1
    windows = fixed_subset(folder.corpus(), options.batch.context, count)
    assert windows is not None
    return Run(folder, options), windows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+")
    parser.add_argument("--beside", nargs="*", default=[])
    parser.add_argument("--windows", type=int, default=64)
    arguments = parser.parse_args()
    fitting, scored = torch.arange(0, arguments.windows, 2), torch.arange(1, arguments.windows, 2)
    for name in arguments.runs:
        run, windows = opened(name, arguments.windows)
        assert isinstance(run.system, HAED)
        known = run.system.embedded(lexicon(run.folder.corpus(), FITTING))
        numbers = Bolted(run.system, known, windows[fitting]).fitted()
        rest = Bolted(run.system, known, windows[scored])
        a, b, gate = numbers.tolist()
        print(
            f"{name}: {bits(rest.decoder, rest.windows):.3f} decoder, {bits(rest.log_p(numbers), rest.windows):.3f} mixture "
            f"(a {a:.2f}, b {b:.2f}, gate {1 / (1 + math.exp(-gate)):.2f})",
            flush=True,
        )
    for name in arguments.beside:
        run, windows = opened(name, arguments.windows)
        with torch.no_grad(), run.compute.precision():
            found = torch.cat(
                [run.likelihood.log_likelihood(windows[rows]).flatten() for rows in scored.split(AT_ONCE)]
            )
        print(f"{name}: {bits(found, windows[scored]):.3f} as it was trained", flush=True)


if __name__ == "__main__":
    main()
