"""Candidates of the IEM loss, and the correction of their scores for candidate sampling.

Each row has candidates of its own. Let S be the chunks of all *other* windows of the step, H those *before* the row in
its own window, y its target. The row chooses among D = S ∪ H ∪ {y}. The step's other chunks occur only at or after the
row in its own window. They depend on y and are masked.

S says nothing of y, and H is part of the context. So the probability of D depends on which of its chunks is the target
only through that chunk's own presence. With presences in S independent, π_c for chunk c,

    P(D | c, context)  ∝  1 if c ∈ H,  1/π_c if not:

c ∈ H is there anyway. Otherwise D is found with c as the target whether or not S has c, which is 1/π_c times as likely
as that S has it. By Bayes, p(c | D, context) ∝ p(c | context) · P(D | c, context). With π = 1 in H, a softmax over D of
log p − log π *is* the distribution of the target, whatever D is. So cross-entropy with scores s − log π, the target's
column included, is a conditional likelihood. Its minimum over s is log p(c | context) up to a constant of the row, at
any number of candidates (sampling of alternatives: McFadden 1978; ranking NCE: Ma and Collins 2018). See docs/iem.md
for what it leaves out.

π_c = 1 − (1 − P_c)^n for the n other windows, where P_c is the share of windows that have c.

With `iem.group` ranks share candidates only within their group, and n is the number of its windows. Groups take turns
in being counted, one a step. So all ranks have the same counts, and counting costs no more than in one group. For P,
each group adds its own windows of the step to those counts.

Legend: B windows of this rank, T places of a window, K tokens of a chunk, M real chunks, C candidates of a group of
ranks.
"""

import logging
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from haed.base import TokenBatch
from haed.chunk.packing import Distinct, find_distinct
from haed.distributed import Ranks
from haed.options import IEMOptions

_ODD = (
    0x9E3779B97F4A7C15 - (1 << 64),
    0xC2B2AE3D27D4EB4F - (1 << 64),
)  # factors of multiply-shift hashing (Dietzfelbinger 1997)


class CountMin:
    """Count-min sketch with conservative update: counts windows by a chunk's 64-bit key, in bounded memory, on the CPU.

    Every key has a cell in each of several rows. Its count is the smallest of them (Cormode and Muthukrishnan 2005),
    and an update raises only cells below the new count (Estan and Varghese 2002). Counts are never too small. They are
    too large for keys that collide in every row. With 4 million distinct keys, each as likely, 2 rows of 2²¹ cells are
    1.7 times too large in the geometric mean. One row of 2²⁰ is 5 times too large (dev/LOG.md).

    Args:
        bits: logarithm to base 2 of the number of cells of a row.

    Attributes:
        table: (R, 2^bits) int64.
    """

    def __init__(self, bits: int = 21) -> None:
        self.bits = bits
        self.table = torch.zeros(len(_ODD), 1 << bits, dtype=torch.long)

    def update(self, keys: Tensor, counts: Tensor) -> None:
        """Add counts (C,) to distinct keys (C,)."""
        cells = self._cell_indices(keys)
        new = self.table.gather(1, cells).amin(0) + counts
        self.table.scatter_reduce_(1, cells, new.expand_as(cells), "amax")

    def __call__(self, keys: Tensor) -> Tensor:
        """Return the counts (C,) of keys (C,), float64."""
        return self.table.gather(1, self._cell_indices(keys)).amin(0).double()

    def _cell_indices(self, keys: Tensor) -> Tensor:
        return torch.stack([(keys * odd >> (64 - self.bits)) & ((1 << self.bits) - 1) for odd in _ODD])

    def state_dict(self) -> dict[str, Tensor]:
        """Return the state for a checkpoint: the table (34 MB), or its occupied cells where that is smaller."""
        flat = self.table.view(-1)
        cells = flat.nonzero().squeeze(1)
        return {"table": self.table} if 2 * len(cells) > len(flat) else {"cells": cells, "counts": flat[cells]}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Restore the result of `state_dict`."""
        if "table" in state:
            self.table.copy_(state["table"])
        else:
            self.table.zero_().view(-1)[state["cells"]] = state["counts"]


log = logging.getLogger(__name__)


@dataclass
class WindowAdjustment:
    """Adjustments of a row's scores for the chunks of its own window, beside those that all rows share.

    Attributes:
        columns: (B, T) candidate at each place of a window, 0 where there is no chunk.
        before: (B, T) added in rows behind a chunk's first place: its log π, which cancels the correction; 0 elsewhere.
        ahead: (B, T) added in the other rows: −∞ at the first place of a chunk that no other window has; 0 elsewhere.
        place: (M,) place of each row among B·T.
    """

    columns: Tensor
    before: Tensor
    ahead: Tensor
    place: Tensor

    def score_adjustments(self, rows: slice, target: Tensor) -> tuple[Tensor, Tensor]:
        """Return the columns (m, T), and the terms added to the scores there, for m rows and their targets (m,)."""
        places = self.columns.shape[1]
        place = self.place[rows, None]
        window = place.squeeze(1) // places
        columns = self.columns[window]
        ahead = self.ahead[window].masked_fill(columns == target[:, None], 0)
        behind = torch.arange(places, device=place.device) < place % places
        return columns, torch.where(behind, self.before[window], ahead)


@dataclass
class CandidateSet:
    """The candidates of a step.

    Attributes:
        chunks: distinct chunks of all ranks of a group; their `inverse` (M,) is for this rank's own windows.
        adjustment: (C,) float64, subtracted from the scores of all rows.
        own: adjustments that differ between rows; None if there are none.
        correction: (M,) total amount subtracted from each row's target; None without a correction.
    """

    chunks: Distinct
    adjustment: Tensor
    own: WindowAdjustment | None
    correction: Tensor | None = None


class Candidates:
    """Finds the candidates of each step and counts the windows that have each chunk; the same on all ranks.

    Args:
        options: options of the IEM loss.
        context: T.
        ranks: processes that train together.

    Attributes:
        group: those of the processes that share their candidates.
        counts: number of windows that have a chunk; None if no correction needs it.
        windows: number of windows counted.
        turns: number of steps in which one of several groups was counted.

    Raises:
        ValueError: the ranks do not divide into groups.
    """

    def __init__(self, options: IEMOptions, context: int, ranks: Ranks) -> None:
        self.options, self.context = options, context
        self.group, self._elsewhere = ranks.split_into_groups(options.group)
        self.counts = CountMin() if options.correction == "inclusion" else None
        self.windows, self.turns = 0.0, 0

    def candidates_for_windows(self, own: TokenBatch, negatives: TokenBatch | None) -> CandidateSet:
        """Return the candidates of a step: the chunks of all windows of this rank's group, `negatives` included."""
        here, holders, windows, is_first = _chunks_and_windows([own] if negatives is None else [own, negatives])
        mine = slice(0, int(own.chunk_mask.sum()))
        chunks, holders = self._merge_group_chunks(here, holders)
        target = replace(chunks, inverse=chunks.inverse[mine])
        if self.counts is None:
            times = chunks.counts if self.options.duplicates else torch.ones_like(chunks.counts)
            return CandidateSet(target, -times.double().log(), None)
        log_pi = self._log_inclusion(chunks.keys, holders, int(sum(self.group.sum_over_ranks([windows]))))
        place = own.chunk_mask.flatten().nonzero().squeeze(1)
        inverse, new = target.inverse, is_first[mine]
        correction = torch.where(new, log_pi[inverse], 0)

        def grid(values: Tensor) -> Tensor:
            return (
                values.new_zeros(own.chunk_mask.numel()).index_copy(0, place, values).unflatten(0, own.chunk_mask.shape)
            )

        before = grid(correction.float())
        alone = new & (holders[inverse] == 1)
        ahead = grid(torch.zeros(len(inverse)).masked_fill(alone, -torch.inf))
        return CandidateSet(target, log_pi, WindowAdjustment(grid(inverse), before, ahead, place), correction)

    def _merge_group_chunks(self, here: Distinct, holders: Tensor) -> tuple[Distinct, Tensor]:
        """Return the distinct chunks of a group, and the number of windows that have each.

        `inverse` is for this rank's chunks. Each rank sends its distinct chunks, since the distinct chunks of all ranks
        grow more slowly than the chunks themselves.
        """
        if self.group.size == 1:
            return here, holders
        numbers = torch.stack([here.counts, holders], 1).int().view(torch.uint8)
        parts = self.group.gather_tensors(torch.cat([here.tokens, here.lengths[:, None], numbers], 1))
        first, k = sum(len(part) for part in parts[: self.group.rank]), here.tokens.shape[1]
        every = torch.cat(parts)
        chunks = find_distinct(every[:, :k], every[:, k])
        numbers = every[:, k + 1 :].contiguous().view(torch.int32).long()
        totals = torch.zeros(len(chunks.keys), 2, dtype=torch.long).index_add_(0, chunks.inverse, numbers)
        return replace(chunks, inverse=chunks.inverse[first + here.inverse], counts=totals[:, 0]), totals[:, 1]

    def _log_inclusion(self, keys: Tensor, holders: Tensor, windows: int) -> Tensor:
        """Return log π (C,) of chunks, after counting the numbers `holders` (C,) of the group's windows that have each.

        Counting a chunk before its probability is asked for is add-one smoothing. Over the draws, 1/π̂ of a chunk that
        is present then has the expectation (1 − e^−λ)/π for λ expected windows so far, almost unbiased after a few.
        """
        assert self.counts is not None
        if windows < 2 and self.windows == 0:
            log.warning(
                "one window a step: nothing but what stands before in it to choose among; raise batch.sequences or "
                "iem.extra_batches"
            )
        if self._elsewhere.size == 1:
            self.counts.update(keys, holders)
            self.windows += windows
            seen, of = self.counts(keys), self.windows
        else:
            seen, of = self.counts(keys) + holders, self.windows + windows
            self._take_turns(keys, holders, windows)
        presence = (seen + self.options.smoothing) / (of + self.options.smoothing)
        return log_inclusion(presence.clamp(max=1), windows - 1)

    def _take_turns(self, keys: Tensor, holders: Tensor, windows: int) -> None:
        """Count the chunks of the group whose turn it is, on all ranks."""
        assert self.counts is not None
        own = torch.cat([torch.stack([keys, holders], 1), torch.tensor([[0, windows]])])
        told = self._elsewhere.broadcast(own, self.turns % self._elsewhere.size)
        self.counts.update(*told[:-1].unbind(1))
        self.windows += float(told[-1, 1])
        self.turns += 1

    def state_dict(self) -> dict[str, Tensor]:
        """Return the state for a checkpoint."""
        if self.counts is None:
            return {}
        state = self.counts.state_dict() | {"windows": torch.tensor(self.windows, dtype=torch.float64)}
        state |= {"turns": torch.tensor(self.turns)} if self.turns else {}
        return {f"unigram/{name}": value for name, value in state.items()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Restore the result of `state_dict`."""
        found = {name.removeprefix("unigram/"): x for name, x in state.items() if name.startswith("unigram/")}
        if self.counts is None or not found:
            return
        self.counts.load_state_dict(found)
        self.windows, self.turns = float(found["windows"]), int(found.get("turns", 0))


def _chunks_and_windows(windows: list[TokenBatch]) -> tuple[Distinct, Tensor, int, Tensor]:
    """Return the distinct chunks of windows, as bytes, with their numbers of windows.

    Returns:
        The chunks; the number of windows (C,) that have each; the number of windows; a mask (N,) of the chunks that are
        their window's first occurrence.
    """
    tokens = torch.cat([each.tokens[each.chunk_mask] for each in windows]).to(torch.uint8)
    lengths = torch.cat([each.lengths[each.chunk_mask] for each in windows]).to(torch.uint8)
    begins = torch.cat([(each.chunk_mask & (each.chunk_mask.cumsum(1) == 1))[each.chunk_mask] for each in windows])
    chunks = find_distinct(tokens, lengths)
    size = max(1, len(chunks.keys))
    pairs, where = np.unique(((begins.cumsum(0) - 1) * size + chunks.inverse).numpy(), return_index=True)
    is_first = torch.zeros(len(tokens), dtype=torch.bool)
    is_first[torch.from_numpy(where)] = True
    return (
        chunks,
        torch.bincount(torch.from_numpy(pairs) % size, minlength=len(chunks.keys)),
        int(begins.sum()),
        is_first,
    )


def log_inclusion(presence: Tensor, windows: int) -> Tensor:
    """Return log π with π = 1 − (1 − P)ⁿ, computed without cancellation: (C,) float64; −50 if there are no windows.

    Args:
        presence: P of each candidate, (C,) float64.
        windows: n.
    """
    if windows < 1:
        return torch.full_like(presence, -50.0)
    return torch.log(-torch.expm1(windows * torch.log1p(-presence)))
