"""Training objective of chunk models: the IEM loss, a random share of exact decoding, or both, in every phase.

Phase one has `iem_weight` > 0 and a small `decode_fraction` (0 in the paper). Phase two of a mixture has the IEM loss
as well. Training end to end, and phase two of a decoder alone, have `iem_weight` = 0. A `decode_fraction` below 1
decodes a random share of the chunks. This gives an unbiased gradient of the exact loss at that share of the decoder's
cost.

With several ranks, candidates are shared by all of them, or within groups. Each rank encodes a share of the distinct
chunks, and the embeddings are gathered with their gradients. Queries stay where they are. With several pieces, a
batch's windows are computed one piece at a time, and again for their gradient (gradient caching, Gao et al. 2021, here
as activation checkpointing). So the memory of one piece suffices for the candidates of the whole batch. Neither changes
the result, but groups do: each chooses among its own candidates.

A batch is prepared where the model is: its distinct chunks, the candidate that each chunk is, and the chunks to decode.
Shapes depend on the data there, and the device is waited for once, for all sizes together. Ranks that exchange chunks
wait again, and so do encoders that read tokens one by one if there are several pieces. Afterwards a step is tensors of
known shapes, and waits no more.

Legend: B sequences, T chunks of a window, K tokens of a chunk, M real chunks of this rank's batch, m chunks of a piece,
C candidates of its group of ranks, E width of an embedding.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from haed.base import CompiledFunction, Objective, StepOutput, TokenBatch, describe_value, length_mask, to_device
from haed.chunk.encoder import Embedding
from haed.chunk.main import TransformerMain
from haed.chunk.mixture import ChunkVocabulary, mixture_log_prob, select_decoded, target_log_prob
from haed.chunk.model import HAED
from haed.chunk.packing import Chunks, Packed, mask_decisions, previous_chunks, select_distinct
from haed.distributed import Ranks, single_process
from haed.iem.candidates import Candidates, CandidateSet, StepChunks
from haed.iem.sampled_softmax import SoftmaxLoss, blockwise_cross_entropy
from haed.layers.lstm import gather_rows
from haed.options import LOSS_TERMS, IEMOptions


@dataclass
class MicroBatch:
    """Some windows of a batch, which are computed together.

    Attributes:
        starts: (b, T) true where a chunk begins a document.
        places: (m,) of its chunks among b·T.
        inverse: (m,) the candidate that each chunk is.
        decoded: (d,) indices, in [0, m), of the chunks that are decoded.
        packed: decisions of the decoded chunks.
        weights: (d,) inverse of the probability with which each was chosen to be decoded; only for a mixture.
        unknown: (d,) true where no other document of the train split has the chunk; only for a mixture.
    """

    starts: Tensor
    places: Tensor
    inverse: Tensor
    decoded: Tensor
    packed: Packed
    weights: Tensor | None = None
    unknown: Tensor | None = None


@dataclass
class ChunkBatch:
    """A batch, ready for the device.

    Attributes:
        encoded: prepared encoder inputs of the distinct chunks that this rank encodes, in pieces.
        candidates: the distinct chunks of the group, and their adjustments.
        pieces: the windows, in order.
        targets: M, the number of real chunks.
        targets_of_all: sum of `targets` over ranks.
        decoded: number of decoded chunks of all ranks; of all chunks for a mixture, where weights make the decoded ones
            stand for all.
        decoded_tokens: scalar, number of tokens in this rank's decoded chunks, weighted likewise.
        log_counts: (C,) log counts of the candidates in the train split; only for a mixture.
    """

    encoded: list[Any]
    candidates: CandidateSet
    pieces: list[MicroBatch]
    targets: int
    targets_of_all: int
    decoded: int
    decoded_tokens: Tensor
    log_counts: Tensor | None


@dataclass
class LossTermInputs:
    """Inputs of a further term of the IEM loss: a function of them that returns a scalar tensor, installed by name.

    With several ranks a term sees the queries of its own rank and the candidates of its group. The result is the mean
    of the ranks' terms, weighted by their numbers of queries.

    Attributes:
        prediction: (M, W) ŷ of each chunk, as wide as the main model.
        queries: (M, E) whose products with the keys are the scores.
        keys: (C, E) of the candidates: their embeddings, of unit length with `iem.similarity=cosine`.
        embeddings: (C, E) of the candidates, as the encoder makes them.
        target: (M,) index of each chunk's candidate.
    """

    prediction: Tensor
    queries: Tensor
    keys: Tensor
    embeddings: Tensor
    target: Tensor


def choose_preparation_device(system: HAED) -> torch.device:
    """Return where batches are prepared: on the model's device, unless that has no values."""
    return torch.device("cpu") if system.device.type == "meta" else system.device


class ChunkObjective(Objective):
    """A chunk model with its losses: the IEM loss, the exact one of a random share of the chunks, or both.

    Parameters that the phase does not use are frozen: the decoder without a decoded share; head, scale and bias of
    candidates without an IEM loss.

    Args:
        system: the model.
        iem: options of the IEM loss.
        iem_weight: weight of the IEM loss; 0 switches it off.
        decode_fraction: share of a batch's chunks that is decoded.
        pieces: number of pieces in which a batch's windows are computed.
        ranks: processes that train together.
        lexicon: the known chunks of a mixture, whose likelihood is then trained instead of the decoder's.

    Attributes:
        candidates: finds the candidates and counts the windows that have each chunk; None without the IEM loss.
        group: processes that share their candidates; this one alone without the IEM loss.
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
        lexicon: ChunkVocabulary | None = None,
    ) -> None:
        super().__init__(system, ranks)
        if iem_weight == 0 and decode_fraction == 0:
            raise ValueError(
                "iem_weight and decode_fraction are both 0, so nothing would be trained. Raise one of them"
            )
        self.options, self.iem_weight, self.decode_fraction, self.pieces = iem, iem_weight, decode_fraction, pieces
        self.preparation_device = choose_preparation_device(system)
        self.lexicon = None
        if lexicon is not None and iem_weight and system.mixture is not None:
            iem.check_calibrated()
            self.lexicon = lexicon.to(self.preparation_device)
        self.candidates = (
            Candidates(iem, self.ranks, self.preparation_device, self.lexicon is not None) if iem_weight else None
        )
        self.group = single_process() if self.candidates is None else self.candidates.group
        self.terms = {name: (weight, LOSS_TERMS.load_class(name)) for name, weight in iem.split_terms().items()}
        self._compiled_main: CompiledFunction | None = None
        for name, parameter in system.named_parameters():
            if name.startswith(("log_scale", "head.", "encoder.bias.")):
                parameter.requires_grad_(iem_weight > 0)
        system.decoder.requires_grad_(decode_fraction > 0)
        if system.mixture is not None:
            system.mixture.prior.requires_grad_(self.lexicon is not None)
            system.mixture.gate.requires_grad_(self.lexicon is not None and decode_fraction > 0)

    def prepare_batch(
        self, windows: TokenBatch, negatives: TokenBatch | None = None, generator: torch.Generator | None = None
    ) -> ChunkBatch:
        """Choose the chunks to decode, find and count the candidates; see `Objective.prepare_batch`."""
        if self.candidates is not None:
            self.candidates.begin_step()
        try:
            return self._prepare_batch(windows, negatives, generator)
        except Exception:
            self.undo_preparation()
            raise

    def _prepare_batch(
        self, windows: TokenBatch, negatives: TokenBatch | None, generator: torch.Generator | None
    ) -> ChunkBatch:
        device, k = self.preparation_device, self.system.cut.k
        step = StepChunks.from_windows(windows, negatives, device)
        targets = len(step.place)
        chunks, keys = step.chunks[:targets], step.keys.values[:targets]
        other_documents = None if self.lexicon is None else self.lexicon.counts_of(chunks, keys)[1] - 1
        chosen, weights = select_decoded(targets, self.decode_fraction, other_documents, generator)
        chosen = to_device(chosen, device)
        decisions = mask_decisions(chunks.lengths, k, self.system.cut.fixed) & chosen[:, None]
        parts = [int(part.sum()) for part in windows.chunk_mask.tensor_split(self.pieces)]  # chunks of each piece
        tokens = length_mask(step.chunks.lengths[step.keys.order], k) & step.keys.is_new[:, None]
        token_counts = torch.stack([each.sum(0) for each in (tokens, *decisions.split(parts))])
        distinct_sizes, *sizes = token_counts.cpu().tolist()  # waits for the device

        distinct, log_counts = select_distinct(step.chunks, step.keys, distinct_sizes[0]), None
        candidate_set = CandidateSet(distinct)
        if self.candidates is not None:
            candidate_set = self.candidates.find_candidates(step, distinct)
            distinct = candidate_set.chunks
        if self.lexicon is not None:
            log_counts = self.lexicon.counts_of(distinct, distinct.keys)[0].clamp(min=1).float().log()
        share = self.group.own_slice(len(distinct))
        rows = torch.arange(share.start, share.stop, device=device).clamp(max=max(0, len(distinct) - 1))
        encode = self.system.encoder.prepare_inputs
        encoder_sizes = distinct_sizes if self.pieces == 1 and self.group.size == 1 else None
        before, first, place, pieces = previous_chunks(step.windows), 0, 0, list[MicroBatch]()
        before = Chunks(before.tokens.flatten(0, 1), before.lengths.flatten())
        for starts, part, size in zip(step.windows.starts.tensor_split(self.pieces), parts, sizes, strict=True):
            here = slice(first, first + part)
            decoded = torch.searchsorted(chosen[here].cumsum(0), torch.arange(1, size[0] + 1, device=device))
            which = first + decoded
            earlier = before[step.place[which]]
            packed = self.system.decoder.pack_chunks(chunks[which], earlier, self.system.cut.fixed, size)
            piece = MicroBatch(starts, step.place[here] - place, distinct.inverse[here], decoded, packed)
            if weights is not None and other_documents is not None:
                piece.weights, piece.unknown = weights[which].float(), other_documents[which] < 1
            pieces.append(piece)
            first, place = here.stop, place + starts.numel()
        decoded_chunks = targets if weights is not None else sum(size[0] for size in sizes)
        totals = self.ranks.sum_over_ranks([targets, decoded_chunks])
        return ChunkBatch(
            encoded=[
                encode(distinct[some], distinct.keys[some], encoder_sizes) for some in rows.tensor_split(self.pieces)
            ],
            candidates=candidate_set,
            pieces=pieces,
            targets=targets,
            targets_of_all=int(totals[0]),
            decoded=int(totals[1]),
            decoded_tokens=(chunks.lengths * chosen * (1 if weights is None else weights)).sum(),
            log_counts=log_counts,
        )

    def undo_preparation(self) -> None:
        """Forget the windows that were counted; see `Objective.undo_preparation`."""
        if self.candidates is not None:
            self.candidates.undo_step()

    def forward(self, batch: object, diagnose: bool = False) -> StepOutput:
        """Return the losses of a prepared batch; metrics are `candidates`, the IEM loss and its accuracy.

        The IEM loss is in nats per chunk and depends on the number of candidates, so it is not a likelihood. Its
        accuracy is how often the target scores highest. `diagnose` adds the rank of the target among the candidates
        (`iem_rank`), and the number that the softmax hesitates between (`iem_effective`, exp of its entropy).
        """
        assert isinstance(batch, ChunkBatch)
        parts = [self._checkpointed(self.system.encoder, part) for part in batch.encoded]
        vectors, bias = (torch.cat([getattr(part, name) for part in parts]) for name in ("vector", "bias"))
        if self.group.size > 1:
            both = self.group.gather_with_gradients(torch.cat([vectors, bias[:, None].to(vectors.dtype)], 1))
            vectors, bias = both[:, :-1], both[:, -1]
        vectors = self.system.mark("encoder", vectors)
        predictions = [
            self.system.mark("main", self._checkpointed(self.predict_vectors, vectors, piece)) for piece in batch.pieces
        ]
        losses = StepOutput(vectors.new_zeros((), dtype=torch.float32), batch.targets_of_all)
        losses.figures["candidates"] = float(len(batch.candidates.chunks))
        result, correction = None, batch.candidates.correction
        if batch.candidates.adjustment is not None:
            result = self._iem_loss(losses, batch, Embedding(vectors, bias), torch.cat(predictions), diagnose)
        if self.decode_fraction:
            scores = [
                self._checkpointed(self.score_decisions, prediction, piece)
                for prediction, piece in zip(predictions, batch.pieces, strict=True)
            ]
            if result is not None and correction is not None and batch.log_counts is not None:
                log_q = target_log_prob(result.target_score, result.normaliser, correction)
                scores = self._mixture_loss(losses, batch, log_q, predictions, scores)
            total = torch.stack([each.sum() for each in scores]).sum()
            exact = -self.system.mark("decoder", total) * (self.ranks.size / max(1, batch.decoded))
            losses.total = losses.total + exact
            losses.nats, losses.tokens = exact * batch.decoded, batch.decoded_tokens * self.ranks.size
        return losses

    def _checkpointed(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Return the function's value; with several pieces, its inside is computed again for the gradient."""
        if self.pieces == 1:
            return function(*arguments)
        # Dropout is drawn again on the devices of the arguments that are tensors. A part of a batch is none.
        anchor = next(self.system.parameters())
        return self.recompute(lambda _, *rest: function(*rest), anchor, *arguments, use_reentrant=False)

    def predict_vectors(self, vectors: Tensor, piece: MicroBatch) -> Tensor:
        """Return ŷ (m, W) of a piece's chunks."""
        shape = piece.starts.shape
        grid = vectors.new_zeros(shape.numel(), vectors.shape[-1])
        grid = grid.index_copy(0, piece.places, gather_rows(vectors, piece.inverse))
        predict = self._compiled_main or self.system.main
        return predict(grid.unflatten(0, shape), piece.starts).flatten(0, 1)[piece.places]

    def compile_training(self) -> bool:
        """Compile a transformer as main model; see `Objective.compile_training`.

        All else has as many rows as a step happens to have distinct chunks, candidates, or chunks of a length.
        """
        if isinstance(self.system.main, TransformerMain) and self.pieces == 1:
            self._compiled_main = CompiledFunction(self.system.main)
        return self._compiled_main is not None

    def score_decisions(self, prediction: Tensor, piece: MicroBatch) -> Tensor:
        """Return log p of the packed decisions of a piece's decoded chunks."""
        return self.system.score_decisions(prediction[piece.decoded], piece.packed)

    def _mixture_loss(
        self, losses: StepOutput, batch: ChunkBatch, log_q: Tensor, predictions: list[Tensor], scores: list[Tensor]
    ) -> list[Tensor]:
        """Return the mixture's log P of the decoded chunks of each piece, weighted to stand for all.

        The decoder's gradient is weighted by its share of P, its responsibility. The gate learns how often the score
        says more. A chunk that no other document has counts as unknown, as new ones will be. Its own document is left
        out. (Good 1953 leaves out occurrences; but a new name occurs in its own document again and again.)
        `log_q` (M,) has no gradient: the IEM loss trains it on all chunks.
        """
        assert self.system.mixture is not None
        mixed, gates, sizes = [], [], [len(piece.places) for piece in batch.pieces]
        for piece, known, prediction, score in zip(batch.pieces, log_q.split(sizes), predictions, scores, strict=True):
            assert piece.weights is not None and piece.unknown is not None
            decoder = score.new_zeros(len(piece.decoded)).index_add(0, piece.packed.order[piece.packed.chunk], score)
            gate = self.system.mixture(prediction[piece.decoded])
            known = known[piece.decoded].masked_fill(piece.unknown, -torch.inf)
            mixed.append(piece.weights * mixture_log_prob(gate, known.to(decoder.dtype), decoder))
            gates.append((piece.weights * gate.detach().sigmoid()).sum())
        losses.figures["gate"] = torch.stack(gates).sum() * (self.ranks.size / max(1, batch.decoded))
        return mixed

    def _iem_loss(
        self, losses: StepOutput, batch: ChunkBatch, embeddings: Embedding, prediction: Tensor, diagnose: bool
    ) -> SoftmaxLoss:
        """Add the IEM loss of ŷ (M, W) among the embedded chunks to the losses."""
        adjustment, window_adjustment = batch.candidates.adjustment, batch.candidates.window_adjustment
        count = len(batch.candidates.chunks)
        assert adjustment is not None
        query = self.system.compute_query(prediction)
        score_dtype = torch.promote_types(query.dtype, torch.float32)
        bias = embeddings.bias[:count].to(score_dtype) - adjustment.to(score_dtype)
        if batch.log_counts is not None and self.system.mixture is not None:
            bias = bias + self.system.mixture.prior * batch.log_counts.to(score_dtype)
        keys = self.system.compute_key(embeddings.vector[:count]).to(query.dtype)
        target = torch.cat([piece.inverse for piece in batch.pieces])
        changes = window_adjustment.score_adjustments if window_adjustment is not None else None
        result = blockwise_cross_entropy(query, keys, bias, target, self.options.block, changes, diagnose)
        weight = self.ranks.size * batch.targets / max(1, batch.targets_of_all)
        loss = weight * self.system.mark("loss", result.loss)
        if self.options.duplicates:  # the target is one of n equal columns: its loss is log n larger than that of all n
            loss = loss - weight * adjustment[target].sum() / max(1, batch.targets)
        losses.figures |= {"iem": loss, "iem_accuracy": weight * result.accuracy}
        if diagnose:
            losses.diagnosis |= {"iem_rank": weight * result.rank, "iem_effective": weight * result.effective}
        losses.total = losses.total + self.iem_weight * loss
        for name, (term_weight, compute_term) in self.terms.items():
            term = torch.zeros_like(loss)  # of a rank without chunks, where a mean is 0 / 0
            if batch.targets:
                value = compute_term(LossTermInputs(prediction, query, keys, embeddings.vector[:count], target))
                if not isinstance(value, Tensor) or value.ndim or prediction.requires_grad > value.requires_grad:
                    description = describe_value(value)
                    raise ValueError(
                        f"iem.terms: {name} returned {description}, expected a scalar tensor with a gradient"
                    )
                term = weight * value
            losses.figures[f"iem_{name}"] = term
            losses.total = losses.total + self.iem_weight * term_weight * term
        return result

    def estimate_flops(self, batch: object) -> float:
        """Return the FLOPs of the required products, forward and twice that backward.

        The encoder sees the distinct chunks, the main model every place of every window, the decoder the decoded
        chunks. Frozen parts are only passed forward. Not counted are recomputation (`pieces`), element-wise work, and
        padding within chunks, except for an encoder that is `padded`, as an MLP is.
        """
        assert isinstance(batch, ChunkBatch)
        system = self.system
        forward: list[tuple[nn.Module, int]] = [
            (system.encoder, system.chunk_flops("encoder", [each.sizes for each in batch.encoded]))
        ]
        forward += [(system.main, system.main_flops(*piece.starts.shape)) for piece in batch.pieces]
        if self.decode_fraction:
            sizes = [piece.packed.sizes for piece in batch.pieces]
            forward.append((system.decoder, system.chunk_flops("decoder", sizes)))
        if batch.candidates.adjustment is not None and system.head is not None:
            forward.append((system.head, 2 * batch.targets * system.head.weight.numel()))
        if batch.log_counts is not None and system.mixture is not None:
            decoded = sum(len(piece.decoded) for piece in batch.pieces)
            forward.append((system.mixture, 2 * decoded * system.mixture.gate.weight.numel()))
        total = sum(flops * (3 if any(x.requires_grad for x in part.parameters()) else 1) for part, flops in forward)
        if batch.candidates.adjustment is not None:
            total += 6 * batch.targets * len(batch.candidates.chunks) * system.encoder.width
        return float(total) * self.ranks.size

    def extra_state(self) -> dict[str, Tensor]:
        """Return the number of windows that had each chunk; see `Objective.extra_state`."""
        state = self.candidates.state_dict() if self.candidates is not None else {}
        return {f"candidates/{name}": x for name, x in state.items()}

    def load_extra_state(self, state: dict[str, Tensor]) -> None:
        """See `Objective.load_extra_state`."""
        counts = {name.removeprefix("candidates/"): x for name, x in state.items() if name.startswith("candidates/")}
        if counts and self.candidates is not None:
            self.candidates.load_state_dict(counts)
