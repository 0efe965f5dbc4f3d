"""Likelihood of the model's parts and of those that remember, joined by a gate.

    P(c | before) = Σ_j g_j · p_j(c),    g = softmax over the parts present of (w_j · φ + b_j)

The parts are *known* (the IEM score over the vocabulary) and *spelled* (the decoder), and any that remember: *copied* and
*repeated* from the document (`copied.py`, `repeated.py`), *recalled* from the train split (`recalled.py`). φ is ŷ, the
logit of the model's own gate, and what each part says of itself before it sees the chunk. Each p_j sums to one over what it
knows, and so does P over all strings.

The gate is linear and is fitted on held-out chunks by penalised maximum likelihood: what memory is worth cannot be seen in
training, where everything was read before. Cf. Grave et al. 2017 and Khandelwal et al. 2020, who choose the weight and
the temperature of a cache on the validation split.

Legend: N chunks of a document, J parts, F features, W width of ŷ.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from haed.chunk.mixture import ChunkVocabulary, MixtureScores
from haed.chunk.packing import Chunks, find_distinct
from haed.chunk.spelling import DocumentWords, Speller, minimise

_PRIOR, _BIAS_PRIOR = 160.0, 1.0  # chunks: the strength of the pull of the gate's weights and biases towards 0
_BOUND = 5.0  # deviations: a feature beyond counts as this


@dataclass
class PartScores:
    """Scores of N consecutive chunks of a document by a part.

    Attributes:
        log_prob: (N,) log p of each chunk, in nats; −∞ for what the part cannot produce.
        features: (N, F) what the part says of itself before it sees the chunk, for the gate.
        present: (N,) true where the part has outcomes, whose probabilities sum to one.
    """

    log_prob: Tensor
    features: Tensor
    present: Tensor


@dataclass
class PartPrediction:
    """Prediction of the next chunk of a document by a part.

    Attributes:
        features: (F,), as in `PartScores`.
        present: true if there is an outcome.
        list_outcomes: returns n chunks, and p (n,) float64 of each; equal chunks may stand several times, and all
            probabilities sum to one.
        draw_outcome: draws one of them, with a random generator. Both are only to be called if the part is present.
    """

    features: Tensor
    present: bool
    list_outcomes: Callable[[], tuple[Chunks, Tensor]]
    draw_outcome: Callable[[torch.Generator | None], Chunks]


class Part(ABC):
    """The memory of one document by one part of the likelihood.

    Everything is on the CPU but the states. Probabilities depend on nothing but earlier chunks and states of the
    document, and on what the part was made with. A copy (`copy.copy`) goes on by itself.

    Attributes:
        name: name of the part in results.
        features: F, the number of features.
    """

    name: ClassVar[str]
    features: ClassVar[int]

    @property
    def vocabulary(self) -> Chunks | None:
        """The chunks of `PartPrediction.list_outcomes`, if they are always the same; else None."""
        return None

    @abstractmethod
    def score(self, states: Tensor, chunks: Chunks) -> PartScores:
        """Score the document's next N chunks, each given those before it, and remember them.

        Args:
            states: (N, W) ŷ of their places.
            chunks: the chunks.
        """

    @abstractmethod
    def remember_chunks(self, states: Tensor, chunks: Chunks) -> None:
        """Remember the document's next N chunks, as `score` does."""

    @abstractmethod
    def predict_next(self, state: Tensor) -> PartPrediction:
        """Predict the next chunk, given its ŷ (W,). Nothing is remembered."""


@dataclass
class MemoryScores:
    """Scores of N chunks by every part, and the weights of the parts.

    Attributes:
        log_prob: (N, J) float64 log p_j, in nats.
        log_weight: (N, J) float64 log g_j; −∞ for a part that is not present.
    """

    log_prob: Tensor
    log_weight: Tensor

    @property
    def joint_log_prob(self) -> Tensor:
        """Log P (N,), in nats."""
        return (self.log_prob + self.log_weight).logsumexp(1)

    @property
    def shares(self) -> Tensor:
        """Probability (N, J) that each part produced the chunk."""
        return (self.log_prob + self.log_weight).softmax(1)


@dataclass
class MemoryGate:
    """The gate between parts, on the CPU.

    Attributes:
        weight: (F, J) float64.
        bias: (J,) float64.
        mean: (F,) of the features it was fitted with.
        deviation: (F,) likewise.
    """

    weight: Tensor
    bias: Tensor
    mean: Tensor
    deviation: Tensor

    @classmethod
    def fit(cls, features: Tensor, present: Tensor, log_prob: Tensor) -> "MemoryGate":
        """Fit the gate by penalised maximum likelihood.

        Args:
            features: (N, F) float64 of held-out chunks.
            present: (N, J) true where a part has outcomes.
            log_prob: (N, J) float64 log p_j of the chunks.
        """
        mean, deviation = features.mean(0), features.std(0, correction=0).clamp(min=1e-6)
        weight, bias = (
            torch.zeros(*shape, dtype=torch.float64)
            for shape in ((features.shape[1], present.shape[1]), (present.shape[1],))
        )
        gate = cls(weight.requires_grad_(), bias.requires_grad_(), mean, deviation)
        scaled = gate.scale_features(features)

        def loss() -> Tensor:
            value = -(gate.weigh_scaled(scaled, present) + log_prob).logsumexp(1).mean()
            penalty = _PRIOR * weight.square().sum() + _BIAS_PRIOR * bias.square().sum()
            return value + penalty / len(features)

        minimise(loss, [weight, bias])
        return cls(weight.detach(), bias.detach(), mean, deviation)

    def scale_features(self, features: Tensor) -> Tensor:
        """Return features (N, F) in deviations from their mean, within bounds."""
        return ((features - self.mean) / self.deviation).clamp(-_BOUND, _BOUND)

    def weigh_scaled(self, scaled: Tensor, present: Tensor) -> Tensor:
        """Return log g (N, J) from scaled features (N, F) and which parts are present (N, J)."""
        return (scaled @ self.weight + self.bias).masked_fill(~present, -torch.inf).log_softmax(1)

    def weigh_parts(self, features: Tensor, present: Tensor) -> Tensor:
        """Return log g (N, J) from features (N, F) and which parts are present (N, J)."""
        return self.weigh_scaled(self.scale_features(features), present)


@dataclass
class ReadChunks:
    """Scores of N chunks by a document's memory, before they are joined.

    Attributes:
        features: (N, F) float64, for the gate.
        present: (N, J) true where a part has outcomes.
        log_prob: (N, J) float64 log p_j; *spelled* is the decoder's alone.
        decisions: (N, K + 1) float64 of the decoder.
        counts: (N, K + 1, 3) of the words of the document, see `DocumentWords`; None if they are not remembered.
    """

    features: Tensor
    present: Tensor
    log_prob: Tensor
    decisions: Tensor
    counts: Tensor | None

    @classmethod
    def concatenate(cls, parts: "Sequence[ReadChunks]") -> "ReadChunks":
        """Concatenate several, all with or all without counts."""
        counts = [part.counts for part in parts if part.counts is not None]
        features, present, log_prob, decisions = (
            torch.cat([getattr(part, name) for part in parts])
            for name in ("features", "present", "log_prob", "decisions")
        )
        return cls(features, present, log_prob, decisions, torch.cat(counts) if counts else None)

    def spell(self, speller: Speller, column: int) -> None:
        """Let the words of the document help the decoder, whose column of `log_prob` is `column`."""
        assert self.counts is not None
        self.log_prob[:, column] = speller.mix_decisions(self.decisions, self.counts).sum(1)


class DocumentMemory:
    """The memory of one document by all parts that remember.

    Args:
        parts: new parts.
        words: the words of the document for the decoder, none yet; None: it spells without.
    """

    def __init__(self, parts: Sequence[Part], words: DocumentWords | None = None) -> None:
        self.parts, self.words = list(parts), words

    def read_chunks(self, chunks: Chunks, scores: MixtureScores) -> ReadChunks:
        """Score the document's next N chunks, and remember them.

        Args:
            chunks: the chunks, on the CPU.
            scores: the model's own parts.
        """
        there = torch.ones(len(chunks), dtype=torch.bool)
        of_model = [scores.decoder_log_prob] if scores.known is None else [scores.known, scores.decoder_log_prob]
        gate = [] if scores.gate is None else [scores.gate[:, None]]
        scores_of_parts = [part.score(scores.prediction, chunks) for part in self.parts]
        features = [
            *(x.double().cpu() for x in (scores.prediction, *gate)),
            *(each.features.double() for each in scores_of_parts),
        ]
        present = [there] * len(of_model) + [each.present for each in scores_of_parts]
        log_prob = [x.double().cpu() for x in (*of_model, *(each.log_prob for each in scores_of_parts))]
        return ReadChunks(
            torch.cat(features, 1),
            torch.stack(present, 1),
            torch.stack(log_prob, 1),
            scores.decisions.double().cpu(),
            None if self.words is None else self.words.read_chunks(chunks),
        )

    def remember_chunks(self, prediction: Tensor, chunks: Chunks) -> None:
        """Remember the document's next N chunks, given ŷ (N, W) of their places, without scoring them."""
        for part in self.parts:
            part.remember_chunks(prediction, chunks)
        if self.words is not None:
            self.words.remember_chunks(chunks)

    def fork(self) -> "DocumentMemory":
        """Return a memory that goes on by itself from what is remembered so far."""
        return DocumentMemory([copy(part) for part in self.parts], self.words and self.words.fork())


@dataclass
class Memory:
    """The parts that remember, and their gate.

    Attributes:
        names: names of all J parts, those of the model first.
        start_document: returns an empty memory of a document.
        gate: weighs the parts.
        speller: joins the decoder and the words of the document; None: it spells without.
    """

    names: tuple[str, ...]
    start_document: Callable[[], DocumentMemory]
    gate: MemoryGate
    speller: Speller | None = None
    _joined: tuple[Chunks | None, tuple[ChunkVocabulary, list[Tensor]]] | None = field(default=None, repr=False)

    @classmethod
    def fit(cls, names: tuple[str, ...], start_document: Callable[[], DocumentMemory], read: ReadChunks) -> "Memory":
        """Fit speller and gate on held-out chunks, which a memory without a speller has read."""
        speller = None
        column = names.index("spelled")
        if read.counts is not None:
            others = torch.arange(len(names)) != column
            unknown = (read.log_prob[:, others] == -torch.inf).all(1)
            speller = Speller.fit(read.decisions, read.counts, unknown)
            read.spell(speller, column)
        return cls(names, start_document, MemoryGate.fit(read.features, read.present, read.log_prob), speller)

    def join_vocabularies(self, k: int, known: Chunks | None) -> tuple[ChunkVocabulary, list[Tensor]]:
        """Return the chunks that some part can always draw, and the rows of the known ones and of each such part's.

        They are kept for the next call with the same known chunks.

        Args:
            k: K.
            known: known chunks, if the model has any.
        """
        if self._joined is None or self._joined[0] is not known:
            parts = self.start_document().parts
            sets = [each for each in (known, *(part.vocabulary for part in parts)) if each is not None]
            every = Chunks.concatenate([Chunks.empty(k), *(Chunks(x.tokens.long(), x.lengths.long()) for x in sets)])
            distinct = find_distinct(every.tokens, every.lengths)
            rows = list(distinct.inverse.split([len(each) for each in sets]))
            self._joined = known, (ChunkVocabulary(Chunks(distinct.tokens, distinct.lengths)), rows)
        return self._joined[1]

    def predict_next(
        self, document: DocumentMemory, prediction: Tensor, gate_logit: Tensor | None
    ) -> tuple[Tensor, list[PartPrediction]]:
        """Return the weight g (J,) float64 of every part, and the predictions of those that remember.

        Args:
            document: remembers the chunks before.
            prediction: ŷ (W,) of the next place.
            gate_logit: logit () of the model's own gate there; None without known chunks.
        """
        predictions = [part.predict_next(prediction) for part in document.parts]
        gate = [] if gate_logit is None else [gate_logit.reshape(1)]
        features = [*(x.double().cpu() for x in (prediction, *gate)), *(each.features.double() for each in predictions)]
        present = [True] * (1 + len(gate)) + [each.present for each in predictions]
        return self.gate.weigh_parts(torch.cat(features)[None], torch.tensor([present]))[0].exp(), predictions

    def score_chunks(self, document: DocumentMemory, chunks: Chunks, scores: MixtureScores) -> MemoryScores:
        """Score the next N chunks of a document, and remember them; see `DocumentMemory.read_chunks`."""
        read = document.read_chunks(chunks, scores)
        if self.speller is not None:
            read.spell(self.speller, self.names.index("spelled"))
        return MemoryScores(read.log_prob, self.gate.weigh_parts(read.features, read.present))

    def spell_decisions(self, document: DocumentMemory, decisions: Tensor, chunks: Chunks) -> Tensor:
        """Return log p (N, K + 1) of every decision of N possible next chunks, from the decoder's alone."""
        if self.speller is None or document.words is None:
            return decisions
        counts = document.words.count_symbols(chunks)
        return self.speller.mix_decisions(decisions.cpu(), counts).to(decisions)


def name_parts(known: bool, parts: Sequence[Part]) -> tuple[str, ...]:
    """Return the names of all parts of a model with or without known chunks."""
    return (*(("known",) if known else ()), "spelled", *(part.name for part in parts))
