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
any number of candidates (sampling of alternatives: McFadden 1978; ranking NCE: Ma and Collins 2018). The approximations
that remain are listed in docs/explanation/iem-loss.md.

π_c = 1 − (1 − P_c)^n for the n other windows, where P_c is the share of windows that have c.

With `iem.group` ranks share candidates only within their group, and n is the number of its windows. Groups take turns
in being counted, one a step. So all ranks have the same counts, and counting costs no more than in one group. For P,
each group adds its own windows of the step to those counts.

All of it runs where the model is. The device is waited for once, for the number of distinct chunks, and again if ranks
exchange theirs.

Legend: B windows of this rank, T places of a window, K tokens of a chunk, N real chunks of a step, M of them in the
windows that are trained on, C candidates of a group of ranks.
"""

import logging
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from haed.base import TokenBatch, to_device
from haed.chunk.packing import Chunks, Distinct, chunk_keys, find_distinct
from haed.distributed import Ranks
from haed.layers.ngram_embedding import SortedIntegers
from haed.options import CELLS, IEMOptions

log = logging.getLogger(__name__)

# Factors of multiply-shift hashing (Dietzfelbinger 1997)
_ODD = (0x9E3779B97F4A7C15 - (1 << 64), 0xC2B2AE3D27D4EB4F - (1 << 64))


class CountMin:
    """Count-min sketch with conservative update: counts windows by a chunk's 64-bit key, in bounded memory.

    Every key has a cell in each of several rows. Its count is the smallest of them (Cormode and Muthukrishnan 2005),
    and an update raises only cells below the new count (Estan and Varghese 2002). Counts are never too small. They are
    too large for keys that collide in every row. With 4 million distinct keys, each as likely, 2 rows of 2²¹ cells are
    1.7 times too large in the geometric mean. One row of 2²⁰ is 5 times too large (dev/LOG.md).

    Args:
        cells: least number of cells of a row, which is a power of two.
        device: device of the keys.

    Attributes:
        table: (R, 2^bits) int64.
    """

    def __init__(self, cells: int = CELLS, device: torch.device | None = None) -> None:
        self.bits = (cells - 1).bit_length()
        self.table = torch.zeros(len(_ODD), 1 << self.bits, dtype=torch.long, device=device)

    def update(self, keys: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
        """Add counts (C,) to distinct keys (C,); return the changed cells (R, C) and their values before."""
        cells = self._cell_indices(keys)
        before = self.table.gather(1, cells)
        self.table.scatter_reduce_(1, cells, (before.amin(0) + counts).expand_as(cells), "amax")
        return cells, before

    def __call__(self, keys: Tensor) -> Tensor:
        """Return the counts (C,) of keys (C,), float64."""
        return self.table.gather(1, self._cell_indices(keys)).amin(0).double()

    def _cell_indices(self, keys: Tensor) -> Tensor:
        return torch.stack([(keys * odd >> (64 - self.bits)) & ((1 << self.bits) - 1) for odd in _ODD])

    def state_dict(self) -> dict[str, Tensor]:
        """Return the state for a checkpoint: the table, or its occupied cells where that is smaller."""
        flat = self.table.view(-1)
        cells = flat.nonzero().squeeze(1)
        many = 2 * len(cells) > len(flat)
        state = {"table": self.table} if many else {"cells": cells, "counts": flat[cells]}
        return state | {"bits": torch.tensor(self.bits)}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Restore the result of `state_dict`.

        Raises:
            ValueError: it is of a sketch of another size.
        """
        if (bits := int(state["bits"])) != self.bits:
            raise ValueError(
                f"the checkpoint counts chunks in {1 << bits:,} cells, not in {1 << self.bits:,}. Set iem.cells={1 << bits}"
            )
        if "table" in state:
            self.table.copy_(state["table"])
        else:
            cells, counts = (state[name].to(self.table.device) for name in ("cells", "counts"))
            self.table.zero_().view(-1)[cells] = counts


@dataclass
class StepChunks:
    """The real chunks of a step's windows. Those of the windows that are trained on come first.

    Attributes:
        windows: the windows that are trained on.
        place: (M,) place of each of their chunks among B·T.
        chunks: N chunks, uint8.
        keys: their keys; see `haed.chunk.packing.chunk_keys`.
        window: (N,) number of each chunk's window.
        window_count: number of windows that have a chunk.
    """

    windows: TokenBatch
    place: Tensor
    chunks: Chunks
    keys: SortedIntegers
    window: Tensor
    window_count: int

    @classmethod
    def from_windows(cls, windows: TokenBatch, negatives: TokenBatch | None, device: torch.device) -> "StepChunks":
        """Return the chunks, on a device, of windows on the CPU; all windows have the same number of places."""
        every = windows if negatives is None else TokenBatch.concatenate_batches([windows, negatives])
        mask, targets = every.chunk_mask, int(windows.chunk_mask.sum())
        every, place = to_device((every, mask.flatten().nonzero().squeeze(1)), device)
        tokens, lengths = (x.flatten(0, 1)[place].to(torch.uint8) for x in (every.tokens, every.lengths))
        keys = SortedIntegers.from_values(chunk_keys(tokens, lengths))
        window, window_count = place // mask.shape[1], int(mask.any(1).sum())
        return cls(every[: len(windows)], place[:targets], Chunks(tokens, lengths), keys, window, window_count)


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
        adjustment: (C,) float32, subtracted from the scores of all rows; None without the IEM loss.
        window_adjustment: changes to the scores that differ between rows; None if there are none.
        correction: (M,) float32, total amount subtracted from each row's target; None without a correction.
    """

    chunks: Distinct
    adjustment: Tensor | None = None
    window_adjustment: WindowAdjustment | None = None
    correction: Tensor | None = None


class Candidates:
    """Finds the candidates of each step and counts the windows that have each chunk; the same on all ranks.

    Args:
        options: options of the IEM loss.
        ranks: processes that train together.
        device: device on which candidates are found.
        for_mixture: the likelihood of known chunks is estimated from the candidates, which needs other windows.

    Attributes:
        group: those of the processes that share their candidates.
        counts: number of windows that have a chunk; None if no correction needs it.
        windows: number of windows counted.
        turns: number of steps in which one of several groups was counted.

    Raises:
        ValueError: the ranks do not divide into groups.
    """

    def __init__(
        self, options: IEMOptions, ranks: Ranks, device: torch.device | None = None, for_mixture: bool = False
    ) -> None:
        self.options, self.for_mixture = options, for_mixture
        self.group, self._elsewhere = ranks.split_into_groups(options.group)
        self.counts = CountMin(options.cells or CELLS, device) if options.correction == "inclusion" else None
        self.windows, self.turns = 0.0, 0
        self._before: tuple[float, int, tuple[Tensor, Tensor]] | None = None  # this step was counted

    def begin_step(self) -> None:
        """Keep what was counted so far; `undo_step` no longer forgets it."""
        self._before = None

    def undo_step(self) -> None:
        """Forget the windows that were counted since `begin_step`."""
        if self.counts is not None and self._before is not None:
            self.windows, self.turns, replaced = self._before
            self.counts.table.scatter_(1, *replaced)
            self._before = None

    def find_candidates(self, step: StepChunks, distinct: Distinct) -> CandidateSet:
        """Return the candidates of a step, the chunks of all windows of this rank's group; `distinct` are this rank's."""
        keys = step.keys
        window, is_new = step.window[keys.order], keys.is_new.clone()
        is_new[1:] |= window[1:] != window[:-1]  # equal chunks keep their order, which is that of the windows
        is_first = torch.empty_like(is_new).scatter_(0, keys.order, is_new)  # of its window to have this chunk
        holders = torch.zeros_like(distinct.counts).index_add_(0, distinct.inverse, is_first.long())
        chunks, holders = self._merge_group_chunks(distinct, holders)
        target = replace(chunks, inverse=chunks.inverse[: len(step.place)])
        if self.counts is None:
            times = chunks.counts if self.options.duplicates else torch.ones_like(chunks.counts)
            return CandidateSet(target, -times.double().log().float())
        windows = int(sum(self.group.sum_over_ranks([step.window_count])))
        log_pi = self._log_inclusion(chunks.keys, holders, windows).float()
        inverse, is_first, shape = target.inverse, is_first[: len(step.place)], step.windows.lengths.shape
        correction = torch.where(is_first, log_pi[inverse], 0)

        def grid(values: Tensor) -> Tensor:
            return values.new_zeros(shape.numel()).index_copy(0, step.place, values).unflatten(0, shape)

        ahead = torch.zeros_like(correction).masked_fill(is_first & (holders[inverse] == 1), -torch.inf)
        adjustment = WindowAdjustment(grid(inverse), grid(correction), grid(ahead), step.place)
        return CandidateSet(target, log_pi, adjustment, correction)

    def _merge_group_chunks(self, here: Distinct, holders: Tensor) -> tuple[Distinct, Tensor]:
        """Return the distinct chunks of a group, and the number of windows that have each.

        `inverse` is for this rank's chunks. Each rank sends its distinct chunks, since the distinct chunks of all ranks
        grow more slowly than the chunks themselves.
        """
        if self.group.size == 1:
            return here, holders
        parts = self.group.gather_tensors(torch.cat([here.tokens, here.lengths[:, None]], 1))
        numbers = torch.cat(self.group.gather_tensors(torch.stack([here.counts, holders], 1).int())).long()
        first, every = sum(len(part) for part in parts[: self.group.rank]), torch.cat(parts)
        chunks = find_distinct(every[:, :-1], every[:, -1])
        totals = numbers.new_zeros(len(chunks), 2).index_add_(0, chunks.inverse, numbers)
        return replace(chunks, inverse=chunks.inverse[first + here.inverse], counts=totals[:, 0]), totals[:, 1]

    def _log_inclusion(self, keys: Tensor, holders: Tensor, windows: int) -> Tensor:
        """Return log π (C,) of chunks, after counting the numbers `holders` (C,) of the group's windows that have each.

        Counting a chunk before its probability is asked for is add-one smoothing. Over the draws, 1/π̂ of a chunk that
        is present then has the expectation (1 − e^−λ)/π for λ expected windows so far, almost unbiased after a few.

        Raises:
            ValueError: a mixture has one window a step. No other window shows how likely its chunks are.
        """
        assert self.counts is not None
        if windows < 2 and self.windows == 0:
            if self.for_mixture and windows:
                self.options.check_windows(windows)
            log.warning(
                "with one window per step, only the chunks before are candidates. Raise batch.sequences or "
                "iem.extra_batches"
            )
        if self._elsewhere.size == 1:
            self._before = self.windows, self.turns, self.counts.update(keys, holders)
            self.windows += windows
            seen, windows_counted = self.counts(keys), self.windows
        else:
            seen, windows_counted = self.counts(keys) + holders, self.windows + windows
            self._take_turns(keys, holders, windows)
        presence = (seen + self.options.smoothing) / (windows_counted + self.options.smoothing)
        return log_inclusion(presence.clamp(max=1), windows - 1)

    def _take_turns(self, keys: Tensor, holders: Tensor, windows: int) -> None:
        """Count the chunks of the group whose turn it is, on all ranks; see `CountMin.update`."""
        assert self.counts is not None
        counted_here = torch.stack([keys, holders], 1)
        received, counted = self._elsewhere.broadcast(counted_here, windows, self.turns % self._elsewhere.size)
        self._before = self.windows, self.turns, self.counts.update(*received.unbind(1))
        self.windows += counted
        self.turns += 1

    def state_dict(self) -> dict[str, Tensor]:
        """Return the state for a checkpoint."""
        if self.counts is None:
            return {}
        passed = {"windows": torch.tensor(self.windows, dtype=torch.float64), "turns": torch.tensor(self.turns)}
        return self.counts.state_dict() | passed

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Restore the result of `state_dict`."""
        if self.counts is not None:
            self.counts.load_state_dict(state)
            self.windows, self.turns = float(state["windows"]), int(state["turns"])


def log_inclusion(presence: Tensor, windows: int) -> Tensor:
    """Return log π with π = 1 − (1 − P)ⁿ, computed without cancellation: (C,) float64; −50 if there are no windows.

    Args:
        presence: P of each candidate, (C,) float64.
        windows: n.
    """
    if windows < 1:
        return torch.full_like(presence, -50.0)
    return torch.log(-torch.expm1(windows * torch.log1p(-presence)))
