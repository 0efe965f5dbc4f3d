"""Two processes of torchrun (gloo) against one with the joined batch, in float64."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from haed.objective import Objective
from haed.options import IEMOptions
from haed.ranks import Ranks

# decoder, IEM weight, decoded share, options, real chunks of the second rank's windows, pieces
CASES = {
    "phase one": ("lstm", 1.0, 0.0, {}, 6, 1),
    "both losses, corrected, bank": ("lstm", 0.7, 1.0, {"bank": 20, "bank_draws": 5}, 6, 1),
    "unequal batches, pieces": ("transformer", 1.0, 1.0, {"correction": "log_q"}, 2, 2),
    "a rank without chunks": ("transformer", 1.0, 1.0, {"similarity": "cosine"}, 0, 1),
    "phase two": ("lstm", 0.0, 1.0, {}, 3, 2),
}


def train(case: str, ranks: Ranks, joined: bool) -> dict[str, torch.Tensor]:
    """Two steps: means of the losses, and gradients of the second."""
    from tests.haed.test_model import small

    decoder, weight, fraction, options, real, pieces = CASES[case]
    iem = IEMOptions(**options)
    made = Objective(small(decoder, iem=iem), iem, weight, fraction, pieces, ranks)
    module = DistributedDataParallel(made) if ranks.size > 1 else made
    generator = torch.Generator().manual_seed(3)
    for _ in range(2):
        lengths = torch.randint(1, 4, (4, 6), generator=generator)
        lengths[2:, real:] = 0
        tokens = torch.randint(3, (4, 6, 3), generator=generator) * (torch.arange(3) < lengths[..., None])
        starts = torch.rand(4, 6, generator=generator) < 0.2
        extra = torch.randint(3, (8, 3), generator=generator), torch.full((8,), 3)
        mine = slice(None) if joined else slice(2 * ranks.rank, 2 * ranks.rank + 2)
        own = slice(None) if joined else slice(4 * ranks.rank, 4 * ranks.rank + 4)
        made.zero_grad()
        batch = made.prepare(tokens[mine], lengths[mine], starts[mine], (extra[0][own], extra[1][own]))
        losses = module(batch, True)
        losses.total.backward()
    names = ("total", "iem", "accuracy", "rank", "effective", "decoder")
    values = [getattr(losses, name) for name in names]
    means = ranks.sum([float("nan") if value is None else float(value.detach()) for value in values])
    found = {
        name: torch.tensor(value / ranks.size, dtype=torch.float64) for name, value in zip(names, means, strict=True)
    }
    return found | {name: p.grad for name, p in made.model.named_parameters() if p.grad is not None}


@pytest.fixture(scope="module")
def together(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, torch.Tensor]]:
    out = tmp_path_factory.mktemp("ranks") / "found.pt"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", __name__]
    done = subprocess.run(
        [*command, str(out)], capture_output=True, text=True, timeout=40, cwd=Path(__file__).parents[2]
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, dict[str, torch.Tensor]] = torch.load(out, weights_only=True)
    return found


@pytest.mark.parametrize("case", CASES)
def test_two_ranks_are_one_with_the_joined_batch(case: str, together: dict[str, dict[str, torch.Tensor]]) -> None:
    alone = train(case, Ranks(), True)
    assert together[case].keys() == alone.keys() and len(alone) > 20
    for name, value in alone.items():
        torch.testing.assert_close(together[case][name], value, rtol=1e-9, atol=1e-9, equal_nan=True, msg=name)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    results = {case: train(case, Ranks(), False) for case in CASES}
    if dist.get_rank() == 0:
        torch.save(results, sys.argv[1])
    dist.destroy_process_group()
