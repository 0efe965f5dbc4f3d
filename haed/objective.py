"""What is minimised: the IEM loss, a random share of exact decoding, or both; one object for every phase.

Phase one is `iem_weight` > 0 and a small `decode_fraction` (0 in the paper), phase two and training end to end are
`iem_weight` = 0 and a `decode_fraction` of 1 or less: a random share of the chunks gives an unbiased gradient of the
exact loss at that share of the decoder's cost.

With several ranks the candidates are those of all of them: each rank encodes a share of the distinct chunks, and the
embeddings are gathered with their gradients; queries stay where they are. With several pieces, a batch's windows are
computed one piece at a time and again when their gradient is due (gradient caching, Gao et al. 2021, here as activation
checkpointing), so that the memory of one piece carries the candidates of the whole batch. Neither changes the result.

Legend: B sequences, T chunks of a window, K tokens of a chunk, M real chunks of this rank's batch, C candidates of all
ranks, E width of an embedding, H mined negatives of a query.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from haed.candidates import Candidates, Prepared, prepare
from haed.chunks import distinct
from haed.encoder import Embedding
from haed.iem import blockwise_cross_entropy
from haed.model import HAED
from haed.options import IEMOptions
from haed.ranks import Ranks

log = logging.getLogger(__name__)
# Queries (M, E) on any device to the tokens (M, H, K), lengths (M, H) and keys (M, H) of their mined negatives, or None.
Miner = Callable[[Tensor], tuple[Tensor, Tensor, Tensor] | None]


@dataclass
class Losses:
    """Parts of a step's loss, as scalars on the device; their mean over ranks is that of the joined batch.

    Attributes:
        total: what is minimised.
        iem: IEM loss in nats per chunk (depends on the number of candidates: not a likelihood), or None.
        accuracy: how often the target scores highest among the candidates, or None.
        rank: place of the target among them, or None unless asked for; likewise `effective`.
        effective: number of candidates that the softmax hesitates between (exp of its entropy).
        decoder: exact loss in nats per chunk, over the decoded share, or None.
    """

    total: Tensor
    iem: Tensor | None = None
    accuracy: Tensor | None = None
    rank: Tensor | None = None
    effective: Tensor | None = None
    decoder: Tensor | None = None


class Objective(nn.Module):
    """Model and loss in one.

    Parameters that the phase has no use for are frozen: the decoder without a decoded share, head, scale and bias of
    candidates without an IEM loss.

    Args:
        model: the model.
        iem: options of the IEM loss.
        iem_weight: its weight; 0 switches it off.
        decode_fraction: share of a batch's chunks that is decoded.
        pieces: in which a batch's windows are computed.
        ranks: processes that train together.
        seed: of draws from the bank, the same on all ranks.

    Attributes:
        candidates: where they come from, and how often each is among them.
        miner: finds hard negatives, or None.
    """

    def __init__(
        self,
        model: HAED,
        iem: IEMOptions,
        iem_weight: float,
        decode_fraction: float,
        pieces: int = 1,
        ranks: Ranks | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__()
        if iem_weight == 0 and decode_fraction == 0:
            raise ValueError("iem_weight and decode_fraction are both 0: nothing would be trained; raise one of them")
        self.model = model
        self.options, self.iem_weight, self.decode_fraction = iem, iem_weight, decode_fraction
        self.pieces, self.ranks = pieces, ranks or Ranks()
        self.candidates = Candidates(iem, model.k, self.ranks, seed) if iem_weight else None
        self.miner: Miner | None = None
        self._compiled: Callable[..., Tensor] | None = None
        for name, parameter in model.named_parameters():
            part = "decoder" if name.startswith("decoder.") else "iem"
            if name.startswith(("decoder.", "head.", "encoder.bias.")) or name == "scale":
                parameter.requires_grad_(decode_fraction > 0 if part == "decoder" else iem_weight > 0)

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
        model = self.model
        return prepare(
            (tokens, lengths, starts),
            negatives,
            self.candidates,
            decode_fraction=self.decode_fraction,
            pieces=self.pieces,
            ranks=self.ranks,
            generator=generator,
            layout=(model.vocabulary, model.fixed, model.decoder.sees_before),
        )

    def forward(self, batch: Prepared, diagnose: bool = False) -> Losses:
        """The losses of a prepared batch, on the model's device; `diagnose` adds rank and effective number."""
        model = self.model
        parts = [
            self._remembered(model.embed, tokens, lengths)
            for tokens, lengths in zip(
                batch.tokens.tensor_split(self.pieces), batch.lengths.tensor_split(self.pieces), strict=True
            )
        ]
        vectors, bias = (torch.cat([getattr(part, name) for part in parts]) for name in ("vector", "bias"))
        if batch.shared:
            both = self.ranks.join(torch.cat([vectors, bias[:, None].to(vectors.dtype)], 1))
            vectors, bias = both[:, :-1], both[:, -1]
        predictions = [self._remembered(self.predict, vectors, piece) for piece in batch.pieces]
        losses = Losses(vectors.new_zeros((), dtype=torch.float32))
        if batch.adjustment is not None:
            self.score(losses, batch, Embedding(vectors, bias), torch.cat(predictions), diagnose)
        if self.decode_fraction:
            scores = [
                self._remembered(self.decode, prediction, piece)
                for prediction, piece in zip(predictions, batch.pieces, strict=True)
            ]
            losses.decoder = -torch.stack(scores).sum() * (self.ranks.size / max(1, batch.decoded))
            losses.total = losses.total + losses.decoder
        return losses

    def _remembered(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """The function's value; with several pieces, what happened inside is computed again for its gradient."""
        if self.pieces == 1:
            return function(*arguments)
        return checkpoint(function, *arguments, use_reentrant=False, preserve_rng_state=False)

    def predict(self, vectors: Tensor, piece: Any) -> Tensor:
        """ŷ (m, W) of a piece's chunks."""
        shape = piece.starts.shape
        grid = vectors.new_zeros(shape.numel(), vectors.shape[-1])
        grid = grid.index_copy(0, piece.where, vectors[piece.inverse])
        return self._main(grid.unflatten(0, shape), piece.starts).flatten(0, 1)[piece.where]

    def _main(self, grid: Tensor, starts: Tensor) -> Tensor:
        if self._compiled is not None:
            try:
                return self._compiled(grid, starts)
            except Exception as error:  # of many kinds: no compiler, an operator it does not know, …
                reason = (str(error).splitlines() or [type(error).__name__])[0]
                log.warning("torch.compile failed (%s): training goes on without it", reason)
                self._compiled = None
        return self.model.predict(grid, starts)

    def compile_main(self) -> None:
        """Has the main model compiled at its first use, by torch.compile."""
        self._compiled = torch.compile(self.model.predict, dynamic=False)

    def decode(self, prediction: Tensor, piece: Any) -> Tensor:
        """Sum of the log likelihoods of a piece's decoded chunks."""
        return self.model.decode(prediction[piece.decoded], piece.packed).sum()

    def score(self, losses: Losses, batch: Prepared, found: Embedding, prediction: Tensor, diagnose: bool) -> None:
        """Adds the IEM loss of ŷ (M, W) among the embedded chunks to the losses."""
        assert batch.adjustment is not None
        model, query = self.model, self.model.query(prediction)
        wide = torch.promote_types(query.dtype, torch.float32)
        bias = found.bias[: batch.candidates].to(wide) - batch.adjustment.to(wide)
        keys = model.key(found.vector[: batch.candidates]).to(query.dtype)
        target = torch.cat([piece.inverse for piece in batch.pieces])
        mined = self._mined(batch, query, target) if self.miner is not None else None
        result = blockwise_cross_entropy(query, keys, bias, target, self.options.block, mined, diagnose)
        weight = self.ranks.size * batch.targets / max(1, batch.targets_of_all)
        losses.iem, losses.accuracy = weight * result.loss, weight * result.accuracy
        if diagnose:
            losses.rank, losses.effective = weight * result.rank, weight * result.effective
        losses.total = losses.total + self.iem_weight * losses.iem

    def _mined(self, batch: Prepared, query: Tensor, target: Tensor) -> tuple[Tensor, Tensor] | None:
        """Scores (M, H) of each query's own negatives, and the columns (M, H) of those that are candidates anyway.

        A mined negative is certain to be there, so it counts with π = 1, in its own row, and instead of its column.
        """
        assert self.miner is not None
        negatives = self.miner(query.detach())
        if negatives is None:
            return None
        tokens, lengths, keys = negatives
        count = min(keys.shape[1], int(self.options.mined_share * batch.candidates))
        if not count:
            return None
        chunks = distinct(tokens[:, :count].flatten(0, 1), lengths[:, :count].flatten())
        column = torch.searchsorted(batch.keys, keys[:, :count]).clamp(max=batch.candidates - 1)
        column = torch.where(batch.keys[column] == keys[:, :count], column, -1).to(query.device, non_blocking=True)
        found = self.model.embed(chunks.tokens.to(query.device), chunks.lengths.to(query.device))
        own = self.model.key(found.vector).to(query.dtype)[chunks.inverse.to(query.device)].unflatten(0, (-1, count))
        scores = (own @ query[:, :, None]).squeeze(2)
        scores = scores + found.bias[chunks.inverse.to(query.device)].unflatten(0, (-1, count))
        hit = column == target[:, None]
        return scores.masked_fill(hit, -torch.inf), column.masked_fill(hit, -1)
