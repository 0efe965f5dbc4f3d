"""What is minimised: the IEM loss, a random share of exact decoding, or both; one object for every phase.

Phase one is `iem_weight` > 0 and a small `decode_fraction` (0 in the paper); of a mixture phase two has the IEM loss as well.
Training end to end, and phase two of a decoder alone, are `iem_weight` = 0. A `decode_fraction` below 1 is a random share of
the chunks, which gives an unbiased gradient of the exact loss at that share of the decoder's cost.

With several ranks the candidates are those of all of them, or of groups of them: each rank encodes a share of the distinct
chunks, and the embeddings are gathered with their gradients; queries stay where they are. With several pieces, a batch's
windows are computed one piece at a time and again when their gradient is due (gradient caching, Gao et al. 2021, here as
activation checkpointing), so that the memory of one piece carries the candidates of the whole batch. Neither changes the
result, but groups do: each chooses among its own candidates.

Legend: B sequences, T chunks of a window, K tokens of a chunk, M real chunks of this rank's batch, C candidates of its
group of ranks, E width of an embedding.
"""

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from haed.blocks.rows import taken
from haed.chunk.encoder import Embedding
from haed.chunk.known import Lexicon
from haed.chunk.main import TransformerMain
from haed.chunk.mixture import joint
from haed.chunk.model import HAED
from haed.iem.batch import ChunkBatch, Piece, prepare
from haed.iem.candidates import Candidates
from haed.iem.softmax import SoftmaxLoss, blockwise_cross_entropy
from haed.options import IEMOptions
from haed.ranks import Ranks
from haed.system import Losses, Objective, Windows

log = logging.getLogger(__name__)


class ChunkObjective(Objective):
    """A chunk model with its losses: the IEM loss, the exact one of a random share of the chunks, or both.

    Parameters that the phase has no use for are frozen: the decoder without a decoded share, head, scale and bias of
    candidates without an IEM loss.

    Args:
        system: the model.
        iem: options of the IEM loss.
        iem_weight: its weight; 0 switches it off.
        decode_fraction: share of a batch's chunks that is decoded.
        pieces: in which a batch's windows are computed.
        ranks: processes that train together.
        lexicon: the known chunks of a mixture, whose likelihood is then trained in the place of the decoder's.

    Attributes:
        candidates: where they come from, and in how many windows each chunk was; None without the IEM loss.
    """

    system: HAED

    def __init__(
        self,
        system: HAED,
        iem: IEMOptions,
        iem_weight: float,
        decode_fraction: float,
        pieces: int = 1,
        ranks: Ranks | None = None,
        lexicon: Lexicon | None = None,
    ) -> None:
        super().__init__(system, ranks)
        if iem_weight == 0 and decode_fraction == 0:
            raise ValueError("iem_weight and decode_fraction are both 0: nothing would be trained; raise one of them")
        self.options, self.iem_weight, self.decode_fraction, self.pieces = iem, iem_weight, decode_fraction, pieces
        self.lexicon = lexicon if iem_weight and system.mixture is not None else None
        if self.lexicon is not None:
            iem.check_calibrated()
        self.candidates = Candidates(iem, system.cut.context, self.ranks) if iem_weight else None
        self._compiled: Callable[..., Tensor] | None = None
        for name, parameter in system.named_parameters():
            if name.startswith(("log_scale", "head.", "encoder.bias.")):
                parameter.requires_grad_(iem_weight > 0)
        system.decoder.requires_grad_(decode_fraction > 0)
        if system.mixture is not None:
            system.mixture.prior.requires_grad_(self.lexicon is not None)
            system.mixture.gate.requires_grad_(self.lexicon is not None and decode_fraction > 0)

    def prepare(
        self, windows: Windows, negatives: Windows | None = None, generator: torch.Generator | None = None
    ) -> ChunkBatch:
        """Chooses what is decoded, finds and counts the candidates; see `Objective.prepare`."""
        return prepare(
            windows,
            negatives,
            self.candidates,
            self.system,
            self.lexicon,
            decode_fraction=self.decode_fraction,
            pieces=self.pieces,
            ranks=self.ranks,
            generator=generator,
        )

    def forward(self, batch: object, diagnose: bool = False) -> Losses:
        """The losses of a prepared batch; figures are `candidates`, and of the IEM loss itself and its accuracy.

        The IEM loss is in nats per chunk and depends on the number of candidates: it is no likelihood. Its accuracy is how
        often the target scores highest. `diagnose` adds the place of the target among the candidates (`iem_rank`) and the
        number that the softmax hesitates between (`iem_effective`, exp of its entropy).
        """
        assert isinstance(batch, ChunkBatch)
        parts = [self._remembered(self.system.encoder, part) for part in batch.encoded]
        vectors, bias = (torch.cat([getattr(part, name) for part in parts]) for name in ("vector", "bias"))
        if batch.shared:
            assert self.candidates is not None
            both = self.candidates.group.join(torch.cat([vectors, bias[:, None].to(vectors.dtype)], 1))
            vectors, bias = both[:, :-1], both[:, -1]
        vectors = self.system.mark("encoder", vectors)
        predictions = [
            self.system.mark("main", self._remembered(self.predict, vectors, piece)) for piece in batch.pieces
        ]
        losses = Losses(vectors.new_zeros((), dtype=torch.float32), batch.targets_of_all)
        losses.figures["candidates"] = float(batch.candidates)
        found = None
        if batch.adjustment is not None:
            found = self._score(losses, batch, Embedding(vectors, bias), torch.cat(predictions), diagnose)
        if self.decode_fraction:
            scores = [
                self._remembered(self.decode, prediction, piece)
                for prediction, piece in zip(predictions, batch.pieces, strict=True)
            ]
            if found is not None and batch.correction is not None and batch.log_counts is not None:
                scores = self._mix(losses, batch, log_q(found, batch.correction), predictions, scores)
            total = torch.stack([each.sum() for each in scores]).sum()
            exact = -self.system.mark("decoder", total) * (self.ranks.size / max(1, batch.decoded))
            losses.total = losses.total + exact
            losses.nats, losses.tokens = exact * batch.decoded, batch.decoded_tokens * self.ranks.size
        return losses

    def _remembered(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """The function's value; with several pieces, what happened inside is computed again for its gradient."""
        if self.pieces == 1:
            return function(*arguments)
        return checkpoint(function, *arguments, use_reentrant=False, preserve_rng_state=False)

    def predict(self, vectors: Tensor, piece: Piece) -> Tensor:
        """ŷ (m, W) of a piece's chunks."""
        shape = piece.starts.shape
        grid = vectors.new_zeros(shape.numel(), vectors.shape[-1])
        grid = grid.index_copy(0, piece.where, taken(vectors, piece.inverse))
        return self._main(grid.unflatten(0, shape), piece.starts).flatten(0, 1)[piece.where]

    def _main(self, grid: Tensor, starts: Tensor) -> Tensor:
        if self._compiled is not None:
            try:
                return self._compiled(grid, starts)
            except Exception as error:  # of many kinds: no compiler, an operator it does not know, …
                reason = (str(error).splitlines() or [type(error).__name__])[0]
                log.warning("torch.compile failed (%s): training goes on without it", reason)
                self._compiled = None
        return self.system.main(grid, starts)

    def compile_parts(self) -> None:
        """A main transformer is compiled, an LSTM would be unrolled; see `Objective.compile_parts`."""
        if isinstance(self.system.main, TransformerMain):
            self._compiled = torch.compile(self.system.main, dynamic=False)

    def decode(self, prediction: Tensor, piece: Piece) -> Tensor:
        """Log p of the decisions of a piece's decoded chunks, as they are packed."""
        return self.system.decode(prediction[piece.decoded], piece.packed)

    def _mix(
        self, losses: Losses, batch: ChunkBatch, known: Tensor, predictions: list[Tensor], scores: list[Tensor]
    ) -> list[Tensor]:
        """Log P of the decoded chunks of each piece by the mixture, weighed to stand for all.

        The decoder's gradient is weighed by its share of P, its responsibility; the gate learns how often the score says more.
        A chunk that no other document has counts as unknown, as new ones will be: this one is left out (Good 1953 leaves out
        occurrences; but a new name is in its own document again and again). `known`, log q (M,), has no gradient: it is trained
        on all chunks by the IEM loss.
        """
        assert self.system.mixture is not None
        mixed, gates, sizes = [], [], [len(piece.where) for piece in batch.pieces]
        for piece, log_q, prediction, score in zip(batch.pieces, known.split(sizes), predictions, scores, strict=True):
            assert piece.weights is not None and piece.unknown is not None
            decoder = score.new_zeros(len(piece.decoded)).index_add(0, piece.packed.order[piece.packed.chunk], score)
            gate = self.system.mixture(prediction[piece.decoded])
            named = log_q[piece.decoded].masked_fill(piece.unknown, -torch.inf)
            mixed.append(piece.weights * joint(gate, named.to(decoder.dtype), decoder))
            gates.append((piece.weights * gate.detach().sigmoid()).sum())
        losses.figures["gate"] = torch.stack(gates).sum() * (self.ranks.size / max(1, batch.decoded))
        return mixed

    def _score(
        self, losses: Losses, batch: ChunkBatch, found: Embedding, prediction: Tensor, diagnose: bool
    ) -> SoftmaxLoss:
        """Adds the IEM loss of ŷ (M, W) among the embedded chunks to the losses."""
        assert batch.adjustment is not None
        query = self.system.query(prediction)
        wide = torch.promote_types(query.dtype, torch.float32)
        bias = found.bias[: batch.candidates].to(wide) - batch.adjustment.to(wide)
        if batch.log_counts is not None and self.system.mixture is not None:
            bias = bias + self.system.mixture.prior * batch.log_counts.to(wide)
        keys = self.system.key(found.vector[: batch.candidates]).to(query.dtype)
        target = torch.cat([piece.inverse for piece in batch.pieces])
        changes = batch.own.changes if batch.own is not None else None
        result = blockwise_cross_entropy(query, keys, bias, target, self.options.block, changes, diagnose)
        weight = self.ranks.size * batch.targets / max(1, batch.targets_of_all)
        loss = weight * self.system.mark("loss", result.loss)
        if self.options.duplicates:  # a target is one of its n columns: log n more than all of them together
            loss = loss - weight * batch.adjustment[target].sum() / max(1, batch.targets)
        losses.figures |= {"iem": loss, "iem_accuracy": weight * result.accuracy}
        if diagnose:
            losses.diagnosis |= {"iem_rank": weight * result.rank, "iem_effective": weight * result.effective}
        losses.total = losses.total + self.iem_weight * loss
        return result

    def flops(self, batch: object) -> float:
        """Of the products that the algorithm asks for, forward and twice that backward; (n, a) · (a, b) is 2·n·a·b.

        The encoder sees the distinct chunks, the main model every place of every window, the decoder the decoded chunks; each
        part knows its `products`. What is frozen is only passed forward. Recomputation (`pieces`), element-wise work, and
        attention within chunks and to the one before do not count.
        """
        assert isinstance(batch, ChunkBatch)
        system, scored = self.system, batch.adjustment is not None
        found = [pair for laid in batch.encoded for pair in system.encoder.products(laid.chunks)]
        found += [pair for piece in batch.pieces for pair in system.main.products(*piece.starts.shape)]
        found += system.decoder.products([piece.packed for piece in batch.pieces])
        for layer, rows in (system.encoder.bias, sum(map(len, batch.encoded))), (system.head, batch.targets):
            if scored and layer is not None:
                found.append((layer.weight, rows * layer.weight.numel()))
        if batch.log_counts is not None and system.mixture is not None:
            gate = system.mixture.gate.weight
            found.append((gate, sum(len(piece.decoded) for piece in batch.pieces) * gate.numel()))
        total = sum(count * (3 if weight.requires_grad else 1) for weight, count in found)
        scores = 3 * batch.targets * batch.candidates * system.encoder.width if scored else 0
        return 2.0 * (total + scores) * self.ranks.size

    def extra_state(self) -> dict[str, Tensor]:
        """In how many windows each chunk was; see `Objective.extra_state`."""
        return {
            f"candidates/{name}": x for name, x in (self.candidates.state_dict() if self.candidates else {}).items()
        }

    def load_extra_state(self, state: dict[str, Tensor]) -> None:
        """See `Objective.load_extra_state`."""
        found = {name.removeprefix("candidates/"): x for name, x in state.items() if name.startswith("candidates/")}
        if found and self.candidates is not None:
            self.candidates.load_state_dict(found)


def log_q(found: SoftmaxLoss, correction: Tensor) -> Tensor:
    """Log q (M,) of the targets among all chunks, as far as a step's candidates tell; without a gradient.

    The correction, 1/π each, makes the sum over the candidates other than the target an unbiased estimate of that over all other
    chunks (Horvitz and Thompson 1952). The target is there anyway, and counts once.
    """
    others = found.normaliser + torch.log1p(-(found.wanted - found.normaliser).exp().clamp(max=1))
    own = found.wanted + correction.to(found.wanted.dtype)
    return own - torch.logaddexp(others, own)
