"""Two processes (gloo) against one with the joined batch, in float64."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from haed.chunk.known import Lexicon
from haed.chunk.packing import Chunks
from haed.iem.objective import ChunkObjective
from haed.options import SYSTEMS, IEMOptions
from haed.ranks import Ranks
from haed.system import Likelihood, Objective, Windows

# kind, IEM weight, decoded share, options, real chunks of the second rank's windows, pieces
CASES = {
    "phase one": ("lstm", 1.0, 0.0, {}, 6, 1),
    "both losses, corrected": ("lstm", 0.7, 1.0, {}, 6, 1),
    "unequal batches, pieces": ("transformer", 1.0, 1.0, {"correction": "none"}, 2, 2),
    "a rank without chunks": ("transformer", 1.0, 1.0, {"similarity": "cosine"}, 0, 1),
    "phase two": ("lstm", 0.0, 1.0, {}, 3, 2),
    "HRED": ("hred", 1.0, 1.0, {}, 2, 1),
    "patches": ("megabyte", 1.0, 1.0, {}, 6, 1),
    "a transformer encoder with a table, a rank without chunks": ("reader", 1.0, 1.0, {}, 0, 2),
    "n-grams, a rank without chunks": ("grams", 0.0, 1.0, {}, 0, 1),
    "n-grams, pieces": ("grams", 1.0, 1.0, {}, 4, 2),
    "a mixture": ("mixed", 1.0, 1.0, {}, 3, 2),
    "a mixture, a rank without chunks": ("mixed", 1.0, 1.0, {}, 0, 1),
    "a mixture that does not decode": ("mixed", 1.0, 0.0, {}, 6, 1),
}
# Of the train split, which only a mixture asks for: some strings of two tokens, one of them in one document alone.
STRINGS = Chunks(torch.tensor([[0, 1, 0], [2, 1, 0], [1, 1, 0]]), torch.tensor([2, 2, 2]))
LEXICON = Lexicon(STRINGS, torch.tensor([4, 2, 3]), torch.tensor([1, 2, 3]))
OF_TOKENS = {kind: 3 for kind, family in SYSTEMS.items() if not family.chunks}  # real chunks, likewise


def objective(case: str, ranks: Ranks) -> Objective:
    from tests.haed import test_systems
    from tests.haed.chunk.test_model import small

    if case in CASES:
        kind, weight, fraction, options, _, pieces = CASES[case]
        iem = IEMOptions(**options)
        return ChunkObjective(small(kind, iem=iem), iem, weight, fraction, pieces, ranks, LEXICON)
    name = next(name for name, options in test_systems.CASES.items() if options.kind == case)
    return Likelihood(test_systems.system(name), ranks)


def train(case: str, ranks: Ranks, joined: bool) -> dict[str, torch.Tensor]:
    """Two steps: means of the losses, and gradients of the second."""
    made, real = objective(case, ranks), CASES[case][4] if case in CASES else OF_TOKENS[case]
    tables = [x for group in made.system.groups() if group.table for x in group.parameters]
    module = ranks.averaging(made, tables)
    generator = torch.Generator().manual_seed(3)
    for _ in range(2):
        lengths = torch.randint(1, 4, (4, 6), generator=generator)
        lengths[2:, real:] = 0
        tokens = torch.randint(3, (4, 6, 3), generator=generator) * (torch.arange(3) < lengths[..., None])
        starts = torch.rand(4, 6, generator=generator) < 0.2
        extra = Windows.of(torch.randint(3, (8, 1, 3), generator=generator), torch.full((8, 1), 3))
        mine = slice(None) if joined else slice(2 * ranks.rank, 2 * ranks.rank + 2)
        own = slice(None) if joined else slice(4 * ranks.rank, 4 * ranks.rank + 4)
        made.zero_grad()
        batch = made.prepare(Windows(tokens, lengths, starts)[mine], extra[own])
        losses = module(batch, True)
        losses.total.backward()
    for table in tables:
        table.grad = ranks.mean_rows(table)
    values = {"total": losses.total, "nats": losses.nats} | losses.figures | losses.diagnosis
    if not CASES.get(case, ("", 1.0))[1]:
        del values["candidates"]  # each rank's own, where none are shared
    means = ranks.sum(
        [float("nan") if value is None else float(torch.as_tensor(value).detach()) for value in values.values()]
    )
    found = {
        name: torch.tensor(value / ranks.size, dtype=torch.float64) for name, value in zip(values, means, strict=True)
    }
    return found | {name: p.grad.to_dense() for name, p in made.system.named_parameters() if p.grad is not None}


def all_cases(rank: int, meeting: Path) -> dict[str, dict[str, torch.Tensor]]:
    """What a rank of two finds; they meet at a file."""
    dist.init_process_group("gloo", init_method=meeting.as_uri(), rank=rank, world_size=2)
    try:
        return {case: train(case, Ranks(), False) for case in [*CASES, *OF_TOKENS]}
    finally:
        dist.destroy_process_group()


@pytest.fixture(scope="module")
def together(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, torch.Tensor]]:
    """The first rank is this process, the second another."""
    meeting = tmp_path_factory.mktemp("ranks") / "meeting"
    command = [sys.executable, "-m", __name__, str(meeting)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2]) as other:
        try:
            found = all_cases(0, meeting)
            _, said = other.communicate()
        finally:
            other.kill()
    assert other.returncode == 0, said[-3000:]
    return found


@pytest.mark.parametrize("case", [*CASES, *OF_TOKENS])
def test_two_ranks_are_one_with_the_joined_batch(case: str, together: dict[str, dict[str, torch.Tensor]]) -> None:
    alone = train(case, Ranks(), True)
    assert together[case].keys() == alone.keys() and len(alone) > 20
    for name, value in alone.items():
        torch.testing.assert_close(together[case][name], value, rtol=1e-9, atol=1e-9, equal_nan=True, msg=name)


if __name__ == "__main__":
    all_cases(1, Path(sys.argv[1]))
