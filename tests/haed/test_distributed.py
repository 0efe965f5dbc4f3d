"""Two, four and eight processes (gloo) against one with the joined batch, in float64."""

import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from threading import Barrier, Lock

import pytest
import torch
import torch.distributed as dist

from haed.base import Likelihood, Objective, TokenBatch
from haed.chunk.mixture import ChunkVocabulary
from haed.chunk.packing import Chunks
from haed.distributed import SUMMED_IN_SHARES, Ranks, copy_to_cpu
from haed.fsdp import ShardedModule, shard_blocks
from haed.iem.objective import ChunkObjective
from haed.options import SYSTEMS, IEMOptions
from tests.flows.api import PATIENCE

ROOT = Path(__file__).resolve().parents[2]
# kind, IEM weight, decoded share, options, real chunks of the second rank's windows, pieces
CASES = {
    "phase one": ("lstm", 1.0, 0.0, {}, 6, 1),
    "both losses, corrected": ("lstm", 0.7, 1.0, {}, 6, 1),
    "unequal batches, pieces": ("transformer", 1.0, 1.0, {"correction": "none"}, 2, 2),
    "a rank without chunks": ("transformer", 1.0, 1.0, {"similarity": "cosine"}, 0, 1),
    "phase two": ("lstm", 0.0, 1.0, {}, 3, 2),
    "the chunk before, pieces": ("previous", 1.0, 1.0, {}, 3, 2),
    "HRED": ("hred", 1.0, 1.0, {}, 2, 1),
    "patches": ("megabyte", 1.0, 1.0, {}, 6, 1),
    "a transformer encoder with a table, a rank without chunks": ("reader", 1.0, 1.0, {}, 0, 2),
    "n-grams, a rank without chunks": ("grams", 0.0, 1.0, {}, 0, 1),
    "n-grams, pieces": ("grams", 1.0, 1.0, {}, 4, 2),
    "a mixture": ("mixed", 1.0, 1.0, {}, 3, 2),
    "a mixture, a rank without chunks": ("mixed", 1.0, 1.0, {}, 0, 1),
    "a mixture that does not decode": ("mixed", 1.0, 0.0, {}, 6, 1),
}
GROUPED = {  # of two of four processes
    "groups": ("lstm", 1.0, 1.0, {"group": 2}, 6, 1),
    "groups without correction": ("lstm", 1.0, 0.0, {"group": 2, "correction": "none"}, 6, 2),
    "groups and a mixture": ("mixed", 1.0, 1.0, {"group": 2}, 6, 1),
}
EIGHT = ["phase one", "unequal batches, pieces", "n-grams, pieces", "a mixture", "hourglass"]  # of eight processes
# Of the train split, which only a mixture asks for: some strings of two tokens, one of them in one document alone.
STRINGS = Chunks(torch.tensor([[0, 1, 0], [2, 1, 0], [1, 1, 0]]), torch.tensor([2, 2, 2]))
LEXICON = ChunkVocabulary(STRINGS, torch.tensor([4, 2, 3]), torch.tensor([1, 2, 3]))
MAKING = Lock()  # weights are drawn from one generator, which threads share
OF_TOKENS = {kind: 3 for kind, family in SYSTEMS.items() if not family.chunks}  # real chunks, likewise


def objective(case: str, ranks: Ranks) -> Objective:
    from tests.haed import test_systems
    from tests.haed.chunk.test_model import small

    if case in CASES or case in GROUPED:
        kind, weight, fraction, options, _, pieces = (CASES | GROUPED)[case]
        iem = IEMOptions(**options)
        return ChunkObjective(small(kind, iem=iem), iem, weight, fraction, pieces, ranks, LEXICON)
    name = next(name for name, options in test_systems.CASES.items() if options.kind == case)
    return Likelihood(test_systems.system(name), ranks)


class Meeting:
    """Of threads, in the place of ranks that have this one's place in other groups."""

    def __init__(self, size: int) -> None:
        self.size, self.barrier, self.brought = size, Barrier(size, timeout=60), dict[int, tuple[torch.Tensor, int]]()

    def at(self, place: int) -> "Meeting":
        found = object.__new__(Meeting)
        vars(found).update(vars(self), place=place)
        return found

    def broadcast(self, x: torch.Tensor, number: int, by: int) -> tuple[torch.Tensor, int]:
        self.barrier.wait()
        self.brought[self.place] = x, number
        self.barrier.wait()
        return self.brought[by]


def train(
    case: str,
    ranks: Ranks,
    place: int,
    places: int,
    windows: int = 4,
    others: Meeting | None = None,
    is_sharded: bool = False,
) -> dict[str, torch.Tensor]:
    """Two steps on one of so many shares of the windows: means of the losses, and gradients of the second."""
    with MAKING:
        made = objective(case, ranks)
    real = (CASES | GROUPED)[case][4] if case not in OF_TOKENS else OF_TOKENS[case]
    if others is not None:
        made.candidates._elsewhere = others
    tables = [x for group in made.system.parameter_groups() if group.table for x in group.parameters]
    sharded = ShardedModule(made, shard_blocks(made.system, torch.device("cpu"))) if is_sharded else None
    module = sharded.compute_losses if sharded is not None else ranks.wrap_data_parallel(made, tables)
    generator = torch.Generator().manual_seed(4)
    for _ in range(2):
        lengths = torch.randint(1, 4, (windows, 6), generator=generator)
        lengths[windows // 2 :, real:] = 0
        tokens = torch.randint(3, (windows, 6, 3), generator=generator) * (torch.arange(3) < lengths[..., None])
        starts = torch.rand(windows, 6, generator=generator) < 0.2
        extra = TokenBatch.from_chunks(
            torch.randint(3, (2 * windows, 6, 3), generator=generator) * (torch.arange(6) < 1)[:, None],
            torch.full((2 * windows, 6), 3) * (torch.arange(6) < 1),
        )
        mine, own = (slice(place * n // places, (place + 1) * n // places) for n in (windows, 2 * windows))
        made.zero_grad()
        draws = torch.Generator().manual_seed(0)  # the global one is for weights, see MAKING
        batch = made.prepare_batch(TokenBatch(tokens, lengths, starts)[mine], extra[own], draws)
        losses = module(batch, True)
        losses.total.backward()
    for table in tables:
        table.grad = ranks.average_sparse_gradient(table)
        if table.grad is not None and ranks.size >= SUMMED_IN_SHARES:  # a row is sent once
            rows = table.grad._indices()[0]
            assert len(rows) == len(rows.unique())
    if sharded is not None:
        sharded.average_scalars()
    values = {"total": losses.total, "nats": losses.nats} | losses.figures | losses.diagnosis
    if not (CASES | GROUPED).get(case, ("", 1.0))[1]:
        del values["candidates"]  # each rank's own, where none are shared
    means = ranks.sum_over_ranks(
        [float("nan") if value is None else float(torch.as_tensor(value).detach()) for value in values.values()]
    )
    found = {
        name: torch.tensor(value / ranks.size, dtype=torch.float64) for name, value in zip(values, means, strict=True)
    }
    gradients = {name: p.grad for name, p in made.system.named_parameters() if p.grad is not None}
    return found | {name: copy_to_cpu(x.to_dense() if x.is_sparse else x) for name, x in gradients.items()}


def check_shares_of_rows(ranks: Ranks) -> None:
    """Rows and padding, as a device has them: each row comes once, with the sum of its values, and no padding."""
    generator = torch.Generator().manual_seed(ranks.rank)
    rows = torch.randint(10, (2 * ranks.rank,), generator=generator).unique()  # none on the first rank
    values = torch.ones(len(rows), 2, dtype=torch.float64) * (1 + rows[:, None])
    more = 7 if len(rows) else 0  # padding comes with rows alone
    padded = torch.cat([rows, rows.new_zeros(more)]), torch.cat([values, values.new_zeros(more, 2)])
    found, sums = (torch.cat(ranks.gather_tensors(x)) for x in ranks._sum_share(*padded))
    everywhere = torch.cat(ranks.gather_tensors(rows)).bincount(minlength=10)
    assert torch.equal(found.sort().values, everywhere.nonzero().squeeze(1))
    assert torch.equal(sums[:, 0], (everywhere[found] * (1 + found)).double())


Found = dict[str, dict[str, torch.Tensor]]


def all_cases(rank: int, meetings: Path, sizes: Sequence[int]) -> dict[int, Found]:
    """What a rank finds in groups of some sizes, the largest first, of which it may be one; they meet at files."""
    patience = timedelta(seconds=PATIENCE)  # to find the others, and for each exchange
    asked = {8: (EIGHT, 8), 4: (list(GROUPED), 8), 2: ([*CASES, *OF_TOKENS], 4)}
    found = dict[int, Found]()
    for size in sizes:
        cases, windows = asked[size]
        if rank < size:
            meeting = (meetings / str(size)).as_uri()
            dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=size, timeout=patience)
            try:
                check_shares_of_rows(Ranks())
                found[size] = {case: train(case, Ranks(), rank, size, windows) for case in cases}
                sharded = [case for case in cases if case not in GROUPED]
                found[-size] = {case: train(case, Ranks(), rank, size, windows, None, True) for case in sharded}
            finally:
                dist.destroy_process_group()
    return found


@pytest.fixture(scope="module")
def together(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Found]:
    """By the number of ranks, negative of sharded models."""
    return meet(tmp_path_factory.mktemp("ranks"), 4, 2)


@pytest.fixture(scope="module")
def eight_together(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Found]:
    return meet(tmp_path_factory.mktemp("ranks"), 8)


def meet(meetings: Path, *sizes: int) -> dict[int, Found]:
    """What groups of some sizes find. The first rank is this process, the others are processes of their own."""
    command = [sys.executable, "-m", __name__, str(meetings), ",".join(map(str, sizes))]
    with ExitStack() as stack:
        others = []
        for rank in range(1, max(sizes)):
            other = subprocess.Popen([*command, str(rank)], stderr=subprocess.PIPE, text=True, cwd=ROOT)
            others.append(stack.enter_context(other))
        try:
            found = all_cases(0, meetings, sizes)
            said = [other.communicate()[1] for other in others]
        except RuntimeError as error:  # also that another is gone, which has said why
            for other in others:
                other.kill()
            error.add_note("".join(other.communicate()[1] for other in others)[-3000:])
            raise
        finally:
            for other in others:
                other.kill()
    assert all(other.returncode == 0 for other in others), "".join(said)[-3000:]
    return found


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("case", "size"),
    [
        pytest.param(case, sign * size, marks=marks)
        for size, cases, marks in ((2, [*CASES, *OF_TOKENS], ()), (8, EIGHT, pytest.mark.nightly))
        for case in cases
        for sign in (1, -1)
    ],
)
def test_ranks_are_one_with_the_joined_batch(case: str, size: int, request: pytest.FixtureRequest) -> None:
    """Also if the model is sharded over them."""
    together = request.getfixturevalue("eight_together" if abs(size) == 8 else "together")
    found, alone = together[size][case], train(case, Ranks(), 0, 1, 8 if abs(size) == 8 else 4)
    assert found.keys() == alone.keys() and len(alone) > 20
    for name, value in alone.items():
        torch.testing.assert_close(found[name], value, rtol=1e-9, atol=1e-9, equal_nan=True, msg=name)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("case", GROUPED)
def test_groups_choose_among_their_own_candidates_and_take_turns_in_being_counted(
    case: str, together: dict[int, Found]
) -> None:
    meeting = Meeting(2)
    with ThreadPoolExecutor(2) as pool:
        groups = [pool.submit(train, case, Ranks(), place, 2, 8, meeting.at(place)) for place in range(2)]
        one, other = (group.result() for group in groups)
    assert one["candidates"] != other["candidates"] and len(one) > 20
    for name, value in together[4][case].items():
        mean = (one[name] + other[name]) / (1 if name == "nats" else 2)
        torch.testing.assert_close(value, mean, rtol=1e-9, atol=1e-9, equal_nan=True, msg=name)


def test_groups_that_leave_ranks_over_are_refused() -> None:
    ranks = Ranks()
    ranks.size = 6
    assert ranks.split_into_groups(None)[0] is ranks and ranks.split_into_groups(8)[0] is ranks
    with pytest.raises(ValueError, match="6 processes cannot be divided into groups of 4"):
        ranks.split_into_groups(4)


if __name__ == "__main__":
    all_cases(int(sys.argv[3]), Path(sys.argv[1]), [int(size) for size in sys.argv[2].split(",")])
