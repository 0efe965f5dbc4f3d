"""A batch worked out on the CPU: where its chunks are, which candidates there are and how likely, what is decoded.

Shapes depend on the data here; afterwards a step is tensors of known shapes, and never waits for its device.

Legend: B sequences, T chunks of a window, K tokens of a chunk, M real chunks of this rank's batch, C candidates of all
ranks, m chunks of a piece.
"""

from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor

from haed.bank import Bank
from haed.chunks import Distinct, Packed, distinct, pack, shifted
from haed.iem import UnigramCounts, correction
from haed.options import IEMOptions
from haed.ranks import Ranks


@dataclass
class Piece:
    """Some windows of a batch.

    Attributes:
        starts: (b, T) true where a chunk begins a document.
        where: (m,) the places of its chunks among b·T.
        inverse: (m,) the candidate that each of them is.
        decoded: (d,) those that are decoded, in [0, m).
        packed: their decisions.
    """

    starts: Tensor
    where: Tensor
    inverse: Tensor
    decoded: Tensor
    packed: Packed


@dataclass
class Prepared:
    """A batch, ready for the device.

    Attributes:
        tokens: (c, K) uint8 of the distinct chunks that this rank encodes; `lengths` (c,).
        lengths: see above.
        shared: they are a share of all ranks' chunks, to be gathered.
        keys: (C,) int64 ascending, of all ranks' distinct chunks, see `chunks.chunk_keys`.
        pieces: the windows, in order.
        adjustment: (C,) correction of the candidates' scores, or None without the IEM loss.
        targets: M; `targets_of_all` is its sum over ranks.
        targets_of_all: see above.
        decoded: number of decoded chunks of all ranks; `decoded_tokens` of tokens in this rank's.
        decoded_tokens: see above.
    """

    tokens: Tensor
    lengths: Tensor
    shared: bool
    keys: Tensor
    pieces: list[Piece]
    adjustment: Tensor | None
    targets: int
    targets_of_all: int
    decoded: int
    decoded_tokens: int

    @property
    def candidates(self) -> int:
        """C."""
        return len(self.keys)

    def to(self, device: torch.device) -> "Prepared":
        """On the device, without waiting for the copies; keys stay, since only the host asks for them."""
        return replace(_moved(self, device), keys=self.keys)


def _moved(value: Any, device: torch.device) -> Any:
    if isinstance(value, Tensor):
        return (value.pin_memory() if device.type == "cuda" else value).to(device, non_blocking=True)
    if isinstance(value, list) and value and is_dataclass(value[0]):
        return [_moved(each, device) for each in value]
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{field.name: _moved(getattr(value, field.name), device) for field in fields(value)})
    return value


class Candidates:
    """Where candidates come from, and how often each is among them; the same on all ranks.

    Args:
        options: of the IEM loss.
        k: tokens per chunk.
        ranks: processes that train together.
        seed: of draws from the bank.

    Attributes:
        unigram: how often chunks are drawn.
        bank: chunks seen before, or None.
        counting: false keeps the counts as they are.
    """

    def __init__(self, options: IEMOptions, k: int, ranks: Ranks, seed: int) -> None:
        self.options, self.ranks, self.seed, self.steps = options, ranks, seed, 0
        self.unigram = UnigramCounts(options.smoothing)
        self.bank = Bank(options.bank, k) if options.bank else None
        self.counting = options.counts == "streaming"

    def of(self, tokens: Tensor, lengths: Tensor) -> tuple[Distinct, Tensor]:
        """The candidates of a step, from the chunks (n, K), (n,) that this rank has drawn.

        Returns:
            Distinct chunks of all ranks and the bank, whose `inverse` (n,) is of this rank's, and their correction (C,).
        """
        parts = self.ranks.gather(torch.cat([tokens.to(torch.uint8), lengths.to(torch.uint8)[:, None]], 1))
        first = sum(len(part) for part in parts[: self.ranks.rank])
        rows = torch.cat(parts)
        drawn = len(rows)
        if self.bank is not None:
            chosen = self.bank.draw(self.options.bank_draws, self.seed * 1_000_003 + self.steps)
            rows = torch.cat([rows, torch.cat([self.bank.tokens, self.bank.lengths[:, None]], 1)[chosen]])
        chunks = distinct(rows[:, :-1], rows[:, -1])
        counts = torch.bincount(chunks.inverse[:drawn], minlength=len(chunks.keys))
        if self.counting:
            self.unigram.update(chunks.keys, counts)
        draws = [(self.unigram.probability(chunks.keys), drawn)]
        if self.bank is not None:
            if len(self.bank):
                draws.append((self.bank.holds(chunks.keys).double() * (len(chosen) / len(self.bank)), 1))
            self.bank.add(chunks)
        self.steps += 1
        chunks = replace(chunks, inverse=chunks.inverse[first : first + len(tokens)], counts=counts)
        return chunks, correction(self.options.correction, draws)

    def state_dict(self) -> dict[str, Tensor]:
        """For a checkpoint."""
        state = {"steps": torch.tensor(self.steps)}
        state |= {f"unigram/{name}": value for name, value in self.unigram.state_dict().items()}
        return state | {f"bank/{name}": value for name, value in (self.bank.state_dict() if self.bank else {}).items()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """See `state_dict`; a bank that was not there before begins empty."""
        parts: dict[str, dict[str, Tensor]] = {"unigram": {}, "bank": {}}
        for name, value in state.items():
            part, _, rest = name.partition("/")
            if rest:
                parts[part][rest] = value
        self.steps = int(state["steps"])
        self.unigram.load_state_dict(parts["unigram"])
        if self.bank is not None and parts["bank"]:
            self.bank.load_state_dict(parts["bank"])


def prepare(
    batch: tuple[Tensor, Tensor, Tensor],
    negatives: tuple[Tensor, Tensor] | None,
    candidates: Candidates | None,
    *,
    decode_fraction: float,
    pieces: int,
    ranks: Ranks,
    generator: torch.Generator | None,
    layout: tuple[int, bool, bool],
) -> Prepared:
    """Works a batch out; see `Objective.prepare`.

    Args:
        batch: tokens (B, T, K), lengths (B, T), starts (B, T).
        negatives: tokens (n, K) and lengths (n,) of further candidates.
        candidates: None without the IEM loss.
        decode_fraction: share of the chunks that is decoded; at least one, if it is not 0.
        pieces: in which the windows are computed.
        ranks: processes that train together.
        generator: of the random choice of chunks to decode.
        layout: size of the vocabulary, whether chunks have a fixed size, and whether the decoder sees the chunk before.
    """
    tokens, lengths, starts = batch
    real = lengths > 0
    own, sizes = tokens[real], lengths[real]
    targets = len(own)
    adjustment = None
    if candidates is None:
        chunks = distinct(own, sizes)
        share = torch.arange(len(chunks.keys))
    else:
        extra = negatives or (own[:0], sizes[:0])
        chunks, adjustment = candidates.of(torch.cat([own, extra[0]]), torch.cat([sizes, extra[1]]))
        rows = ranks.share(len(chunks.keys))
        share = torch.arange(rows.start, rows.stop).clamp(max=max(0, len(chunks.keys) - 1))
    count = max(round(targets * decode_fraction), min(1, targets)) if decode_fraction else 0
    chosen = torch.zeros(targets, dtype=torch.bool)
    chosen[torch.randperm(targets, generator=generator)[:count] if count < targets else slice(None)] = True
    vocabulary, fixed, sees_before = layout
    earlier = [x[real] for x in shifted(tokens, lengths, starts)] if sees_before else []
    made, first = [], 0
    for part, begins in zip(real.tensor_split(pieces), starts.tensor_split(pieces), strict=True):
        where = part.flatten().nonzero().squeeze(1)
        mine = slice(first, first := first + len(where))
        decoded = chosen[mine].nonzero().squeeze(1)
        before = (earlier[0][mine][decoded], earlier[1][mine][decoded]) if earlier else None
        packed = pack(own[mine][decoded], sizes[mine][decoded], vocabulary, fixed, before)
        made.append(Piece(begins, where, chunks.inverse[mine], decoded, packed))
    all_targets, all_decoded = ranks.sum([targets, count])
    return Prepared(
        tokens=chunks.tokens[share],
        lengths=chunks.lengths[share],
        shared=candidates is not None and ranks.size > 1,
        keys=chunks.keys,
        pieces=made,
        adjustment=None if adjustment is None else adjustment.float(),
        targets=targets,
        targets_of_all=int(all_targets),
        decoded=int(all_decoded),
        decoded_tokens=int(sizes[chosen].sum()),
    )
