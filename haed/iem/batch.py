"""A batch of a chunk model worked out on the CPU: where its chunks are, which candidate each is, what is decoded.

Shapes depend on the data here; afterwards a step is tensors of known shapes, and never waits for its device.

Legend: B sequences, T chunks of a window, K tokens of a chunk, M real chunks of this rank's batch, C candidates of its
group of ranks, m chunks of a piece.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from haed.chunk.known import Lexicon
from haed.chunk.model import HAED
from haed.chunk.packing import Chunks, Packed, distinct, shifted
from haed.iem.candidates import Candidates, OwnWindow
from haed.ranks import Ranks
from haed.system import Windows


@dataclass
class Piece:
    """Some windows of a batch.

    Attributes:
        starts: (b, T) true where a chunk begins a document.
        where: (m,) the places of its chunks among b·T.
        inverse: (m,) the candidate that each of them is.
        decoded: (d,) those that are decoded, in [0, m).
        packed: their decisions.
        weights: (d,) inverse of the probability with which each was chosen to be decoded; only of a mixture.
        unknown: (d,) true where no other document of the train split has the chunk; only of a mixture.
    """

    starts: Tensor
    where: Tensor
    inverse: Tensor
    decoded: Tensor
    packed: Packed
    weights: Tensor | None = None
    unknown: Tensor | None = None


@dataclass
class ChunkBatch:
    """A batch, ready for the device.

    Attributes:
        encoded: the distinct chunks that this rank encodes, in pieces, each as the encoder lays them out.
        shared: they are a share of the group's chunks, to be gathered.
        candidates: C, the number of the group's distinct chunks.
        pieces: the windows, in order.
        adjustment: (C,) correction of the candidates' scores, or None without the IEM loss.
        own: by which that differs between rows, or None.
        targets: M.
        targets_of_all: its sum over ranks.
        decoded: number of decoded chunks of all ranks; of a mixture all chunks, for which they stand by their weights.
        decoded_tokens: number of tokens in those of this rank, weighed likewise.
        log_counts: (C,) of the candidates in the train split; only of a mixture.
        correction: (M,) what the adjustment and `own` took from each row's target; only of a mixture.
    """

    encoded: list[Any]
    shared: bool
    candidates: int
    pieces: list[Piece]
    adjustment: Tensor | None
    own: OwnWindow | None
    targets: int
    targets_of_all: int
    decoded: int
    decoded_tokens: int
    log_counts: Tensor | None = None
    correction: Tensor | None = None


def prepare(
    windows: Windows,
    negatives: Windows | None,
    candidates: Candidates | None,
    model: HAED,
    lexicon: Lexicon | None = None,
    *,
    decode_fraction: float,
    pieces: int,
    ranks: Ranks,
    generator: torch.Generator | None,
) -> ChunkBatch:
    """Works a batch out; see `Objective.prepare`.

    Args:
        windows: on the CPU.
        negatives: whose chunks are further candidates.
        candidates: None without the IEM loss.
        model: that will see the batch.
        lexicon: the known chunks of a mixture.
        decode_fraction: share of the chunks that is decoded; at least one, if it is not 0.
        pieces: in which the windows are computed.
        ranks: processes that train together.
        generator: of the random choice of chunks to decode.
    """
    real = windows.real
    own = Chunks(windows.tokens, windows.lengths)[real]
    targets, adjustment, differing, correction = len(own), None, None, None
    if candidates is None:
        chunks = distinct(own.tokens, own.lengths)
        share = torch.arange(len(chunks.keys))
    else:
        found = candidates.of(windows, negatives)
        chunks, adjustment, differing = found.chunks, found.adjustment.float(), found.own
        correction = found.correction
        rows = candidates.group.share(len(chunks.keys))
        share = torch.arange(rows.start, rows.stop).clamp(max=max(0, len(chunks.keys) - 1))
    distinct_ones = Chunks(chunks.tokens, chunks.lengths)
    log_counts = elsewhere = None
    if lexicon is not None:
        counts, documents = lexicon.told(distinct_ones)
        log_counts = counts.clamp(min=1).float().log()
        elsewhere = documents[chunks.inverse] - 1
    chosen, weights = chosen_to_decode(targets, decode_fraction, elsewhere, generator)
    earlier = shifted(windows)[real]
    made, first = [], 0
    for part, begins in zip(real.tensor_split(pieces), windows.starts.tensor_split(pieces), strict=True):
        where = part.flatten().nonzero().squeeze(1)
        mine = torch.arange(first, first := first + len(where))
        decoded = chosen[mine].nonzero().squeeze(1)
        packed = model.decoder.pack(own[mine[decoded]], earlier[mine[decoded]], model.cut.fixed)
        piece = Piece(begins, where, chunks.inverse[mine], decoded, packed)
        if weights is not None and elsewhere is not None:
            piece.weights, piece.unknown = weights[mine[decoded]].float(), elsewhere[mine[decoded]] < 1
        made.append(piece)
    all_targets, all_decoded = ranks.sum([targets, int(chosen.sum()) if weights is None else targets])
    tokens = own.lengths[chosen] if weights is None else own.lengths[chosen] * weights[chosen]
    return ChunkBatch(
        encoded=[model.encoder.lay_out(distinct_ones[rows]) for rows in share.tensor_split(pieces)],
        shared=candidates is not None and candidates.group.size > 1,
        candidates=len(chunks.keys),
        pieces=made,
        adjustment=adjustment,
        own=differing,
        targets=targets,
        targets_of_all=int(all_targets),
        decoded=int(all_decoded),
        decoded_tokens=int(tokens.sum()),
        log_counts=log_counts,
        correction=None if correction is None else correction.float(),
    )


def chosen_to_decode(
    targets: int, fraction: float, elsewhere: Tensor | None, generator: torch.Generator | None
) -> tuple[Tensor, Tensor | None]:
    """Which of M chunks are decoded (M,), and the inverse of the probabilities with which each was chosen (M,).

    Args:
        targets: M.
        fraction: of them; at least one, if it is not 0.
        elsewhere: (M,) how many other documents have each chunk, of a mixture; None: all are as likely, without weights.
        generator: of the choice.
    """
    chosen = torch.zeros(targets, dtype=torch.bool)
    if not fraction:
        return chosen, None
    count = max(round(targets * fraction), min(1, targets))
    if elsewhere is not None:
        likely = shares(elsewhere, count)
        return drawn(likely, generator), 1 / likely
    chosen[torch.randperm(targets, generator=generator)[:count] if count < targets else slice(None)] = True
    return chosen, None


def shares(elsewhere: Tensor, count: int) -> Tensor:
    """Probabilities (M,) with which chunks are decoded, about `count` of them in all: the rarer, the likelier.

    A rare chunk is what the score is bad at, and the decoder's gradient is weighed by how much better it is. The probability of
    a chunk that n other documents have goes with 1/√(n + 1), up to certainty.

    Args:
        elsewhere: (M,) n of each chunk.
        count: at most M.
    """
    rarity = (elsewhere.double().clamp(min=0) + 1).rsqrt()
    if not len(rarity):  # a rank without a chunk
        return rarity
    ranked = rarity.sort(descending=True).values
    rest = ranked.flip(0).cumsum(0).flip(0)  # of each and all after it
    factors = (count - torch.arange(len(ranked))) / rest  # if those before it are certain
    certain = int((factors * ranked >= 1).sum())
    return (rarity * torch.cat([factors, factors.new_tensor([torch.inf])])[certain]).clamp(max=1)


def drawn(share: Tensor, generator: torch.Generator | None) -> Tensor:
    """Which of M things are drawn, each with the probability that it has (M,): systematic sampling, in random order.

    Their number is that of the sum of the probabilities, rounded up or down.
    """
    order = torch.randperm(len(share), generator=generator)
    first = torch.rand((), dtype=torch.float64, generator=generator)
    passed = torch.cat([first[None], first + share[order].cumsum(0)]).floor()
    chosen = torch.zeros(len(share), dtype=torch.bool)
    chosen[order] = passed[1:] > passed[:-1]
    return chosen
