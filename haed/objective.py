"""What is minimised: the IEM loss, a random share of exact decoding, or both; one object for every phase.

Phase one is `iem_weight` > 0 and a small `decode_fraction` (0 in the paper), phase two and training end to end are
`iem_weight` = 0 and a `decode_fraction` of 1 or less: a random share of the chunks gives an unbiased gradient of the
exact loss at that share of the decoder's cost.

Legend: B sequences, T chunks of a window, K tokens of a chunk, M real chunks of a batch, C candidates, E width.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from haed.chunks import Distinct, Packed, distinct, pack
from haed.iem import UnigramCounts, blockwise_cross_entropy, correction
from haed.model import HAED
from haed.options import IEMOptions


@dataclass
class Losses:
    """Parts of a step's loss, as scalars on the device.

    Attributes:
        total: what is minimised.
        iem: IEM loss in nats per chunk (depends on the number of candidates: not a likelihood), or None.
        accuracy: how often the target scores highest among the candidates, or None.
        decoder: exact loss in nats per chunk, over the decoded share, or None.
        decoded_tokens: number of source tokens in that share.
        decoded_chunks: number of chunks in that share.
        candidates: number of candidates C.
    """

    total: Tensor
    iem: Tensor | None
    accuracy: Tensor | None
    decoder: Tensor | None
    decoded_tokens: int
    decoded_chunks: int
    candidates: int


@dataclass
class Prepared:
    """A batch worked out on the CPU: where its chunks are, which are distinct, and which are decoded.

    Attributes:
        real: (B, T) true where a chunk is.
        starts: (B, T) true where a chunk begins a document.
        chunks: distinct chunks of the batch, and of the negatives if the IEM loss is on; `inverse` begins with the
            M chunks of the batch, in the order of `real.nonzero()`.
        targets: M.
        adjustment: (C,) correction of the candidates' scores, or None without the IEM loss.
        decoded: (m,) the chunks that are decoded, in [0, M).
        packed: their decisions.
        decoded_tokens: number of their tokens.
    """

    real: Tensor
    starts: Tensor
    chunks: Distinct
    targets: int
    adjustment: Tensor | None
    decoded: Tensor
    packed: Packed
    decoded_tokens: int


class Objective(nn.Module):
    """Model and loss in one.

    Args:
        model: the model.
        iem: options of the IEM loss.
        iem_weight: its weight; 0 switches it off.
        decode_fraction: share of a batch's chunks that is decoded.
    """

    def __init__(self, model: HAED, iem: IEMOptions, iem_weight: float, decode_fraction: float) -> None:
        super().__init__()
        if iem_weight == 0 and decode_fraction == 0:
            raise ValueError("iem_weight and decode_fraction are both 0: nothing would be trained; raise one of them")
        self.model = model
        self.options, self.iem_weight, self.decode_fraction = iem, iem_weight, decode_fraction
        self.unigram = UnigramCounts()

    def prepare(
        self,
        tokens: Tensor,
        lengths: Tensor,
        starts: Tensor,
        negatives: tuple[Tensor, Tensor] | None = None,
        generator: torch.Generator | None = None,
    ) -> Prepared:
        """Works out, on the CPU, everything whose shape depends on the data, and counts the chunks.

        Args:
            tokens: (B, T, K).
            lengths: (B, T), 0 where no chunk is.
            starts: (B, T), true where a chunk begins a document.
            negatives: tokens (n, K) and lengths (n,) of further candidates.
            generator: of the random choice of chunks to decode.
        """
        real = lengths > 0
        tokens, lengths = tokens[real], lengths[real]
        targets = len(tokens)
        pool = (tokens, lengths)
        if self.iem_weight and negatives is not None:
            pool = (torch.cat([tokens, negatives[0]]), torch.cat([lengths, negatives[1]]))
        chunks = distinct(*pool)
        adjustment = None
        if self.iem_weight:
            self.unigram.update(chunks.keys, chunks.counts)
            adjustment = correction(self.options.correction, self.unigram.probability(chunks.keys), len(pool[0]))
        share = round(targets * self.decode_fraction)
        decoded = torch.arange(targets) if share == targets else torch.randperm(targets, generator=generator)[:share]
        return Prepared(
            real=real,
            starts=starts,
            chunks=chunks,
            targets=targets,
            adjustment=adjustment,
            decoded=decoded,
            packed=pack(tokens[decoded], lengths[decoded], self.model.vocabulary, self.model.fixed),
            decoded_tokens=int(lengths[decoded].sum()),
        )

    def forward(self, batch: Prepared) -> Losses:
        """The losses of a prepared batch."""
        model = self.model
        device = model.scale.device
        inverse = batch.chunks.inverse.to(device, non_blocking=True)[: batch.targets]
        embedding = model.embed(batch.chunks.tokens.to(device), batch.chunks.lengths.to(device))
        where = batch.real.nonzero(as_tuple=True)
        vectors = embedding.vector
        grid = vectors.new_zeros(*batch.real.shape, vectors.shape[-1])
        grid[where] = vectors[inverse]
        prediction = model.predict(grid, batch.starts.to(device))[where]
        iem = accuracy = decoder = None
        total = prediction.new_zeros((), dtype=torch.float32)
        if batch.adjustment is not None:
            query = model.query(prediction)
            bias = embedding.bias.float() - batch.adjustment.to(device, torch.float32)
            iem, accuracy = blockwise_cross_entropy(query, vectors.to(query.dtype), bias, inverse, self.options.block)
            total = total + self.iem_weight * iem
        if len(batch.decoded):
            packed = batch.packed.to(device)
            scores = model.decode(prediction[batch.decoded.to(device)], packed)
            decoder = -scores.sum() / len(batch.decoded)
            total = total + decoder
        return Losses(total, iem, accuracy, decoder, batch.decoded_tokens, len(batch.decoded), len(batch.chunks.tokens))
