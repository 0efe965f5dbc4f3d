"""Sampling chunk by chunk with cached state, and the distribution of the next chunk.

Nothing is recomputed from the start. The prompt's last chunk is left open: its tokens are fed to the decoder, which may
continue or end it. So a prompt may stop in the middle of a word. When the window of T chunks is full, the main model's
cache is rebuilt from the newest half of it, a constant cost per chunk. A system of tokens knows no ends: K tokens are
drawn at a time.

A mixture has C + 1 outcomes: a known chunk, with probability g · q(c) and without the decoder, or to spell a chunk
symbol by symbol, with 1 − g. A spelled chunk may be a known one too, so both ways to it add up. First it is drawn
whether the chunk is a whole one, then which, or each of its symbols. Temperature and cut-offs apply to each of these
draws: among single chunks, all that may be spelled together would seem likelier than the likeliest. At temperature 1
and without cut-offs the draws follow the likelihood.

A prompt may end inside a chunk. Then the chunk begins with given tokens. Known chunks that do not begin with them are
impossible, and to spell has (1 − g) · p_decoder(these tokens). The sum of these is the probability of the beginning.
Divided by it they are, by Bayes' rule, the outcomes given the beginning.

Legend: B samples, N chunks, C known ones, K tokens of a chunk, V vocabulary, W width of ŷ.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch
import torch.nn.functional as F
from torch import Tensor

from haed.base import TokenBatch, check_finite, length_mask, to_device
from haed.chunk.memory import DocumentMemory
from haed.chunk.mixture import ChunkVocabulary
from haed.chunk.model import HAED, mask_end
from haed.chunk.packing import Chunks, find_distinct
from haed.chunk.rejection import LEAST, RejectionSampler
from haed.token.base import TokenModel

_BEAM = 64  # least width of the beam search
_AT_ONCE = 16  # samples for which all known chunks are scored together


def mask_largest(values: Tensor, number: int) -> Tensor:
    """Return a mask (…, n) of exactly `number` of the largest values, 0 to n; of equal ones the lowest indices."""
    if not number:
        return torch.zeros_like(values, dtype=torch.bool)
    nth = values.topk(number).values[..., -1:]
    above, equal = values > nth, values == nth
    return above | (equal & (equal.cumsum(-1) <= number - above.sum(-1, keepdim=True)))


@torch.no_grad()
def outcome_log_probs(system: HAED, prediction: Tensor, before: Chunks, opened: Tensor) -> Tensor:
    """Return log probabilities (N, C + 1), in nats, of each outcome jointly with the beginning; to spell is the last.

    Args:
        system: in evaluation mode; without known chunks there is one outcome, to spell.
        prediction: ŷ (N, W).
        before: the chunks before, on the CPU, of length 0 for none.
        opened: (n,) tokens with which the chunks begin, on the CPU, 0 ≤ n ≤ K.
    """
    spelled = prediction.new_zeros(len(prediction))
    if n := len(opened):
        spelled = _spell_beginning(system, prediction, before, opened)[1][:, :n].sum(1)  # without the end
    if system.known is None or system.mixture is None:
        return spelled[:, None]
    gate = system.mixture(prediction)[:, None]
    known = system.known.score_queries(system.compute_query(prediction), system.mixture.prior).log_softmax(1)
    if n:
        known[:, ~system.known.lexicon.prefix_mask(opened).to(system.device)] = -torch.inf
    return torch.cat([F.logsigmoid(gate) + known, F.logsigmoid(-gate) + spelled[:, None]], 1)


@dataclass
class Outcomes:
    """Every outcome for the next chunk of one document with memory, jointly with the beginning, on the CPU.

    Attributes:
        vocabulary: the first of the n different chunks, the same for every document.
        others: the further chunks.
        log_prob: (n + 1,) float64 log P of drawing each chunk whole, by all parts together; to spell is the last.
        ways: for each part but the decoder its name, rows (m,) of chunks, and its joint probability (m,) of them.
    """

    vocabulary: ChunkVocabulary
    others: Chunks
    log_prob: Tensor
    ways: list[tuple[str, Tensor, Tensor]]

    def __len__(self) -> int:
        return len(self.log_prob) - 1

    def __getitem__(self, rows: Tensor) -> Chunks:
        """Return the chunks of rows (N,)."""
        size = len(self.vocabulary)
        first = rows < size
        tokens = self.vocabulary.chunks.tokens.new_zeros(len(rows), self.vocabulary.chunks.tokens.shape[1])
        chunks = Chunks(tokens, torch.zeros_like(rows))
        for some, source, at in ((first, self.vocabulary.chunks, rows), (~first, self.others, rows - size)):
            chunks.tokens[some], chunks.lengths[some] = source.tokens[at[some]], source.lengths[at[some]]
        return chunks

    def find_rows(self, chunks: Chunks) -> Tensor:
        """Return the row (N,) of each of N chunks on the CPU, −1 for those that are no outcome."""
        rows, others = self.vocabulary.find_rows(chunks), ChunkVocabulary(self.others).find_rows(chunks)
        return rows.where(others < 0, others + len(self.vocabulary))

    def share_of_parts(self, row: int) -> dict[str, float]:
        """Return by which parts the chunk of a row is drawn: probabilities that sum to one."""
        joint_of_parts = {name: float(joint[rows == row].sum()) for name, rows, joint in self.ways}
        total = sum(joint_of_parts.values()) or 1.0
        return {name: value / total for name, value in joint_of_parts.items()}


def _join_vocabularies(system: HAED) -> tuple[ChunkVocabulary, list[Tensor]]:
    """Return the chunks that a model with memory can draw whole after any document; see `Memory.join_vocabularies`."""
    assert system.memory is not None
    return system.memory.join_vocabularies(system.cut.k, None if system.known is None else system.known.lexicon.chunks)


def _score_known(system: HAED, predictions: Tensor) -> Tensor | None:
    """Return q (N, C) of all known chunks for ŷ (N, W), None without them."""
    known, mixture = system.known, system.mixture
    if known is None or mixture is None:
        return None
    return known.score_queries(system.compute_query(predictions), mixture.prior).softmax(1)


def _list_outcomes(
    system: HAED, document: DocumentMemory, prediction: Tensor, before: Chunks, opened: Tensor, known: Tensor | None
) -> Outcomes:
    """Return the outcomes after what a document has; see `outcome_log_probs`.

    Args:
        system: in evaluation mode, with `memory`.
        document: remembers the chunks before.
        prediction: ŷ (W,).
        before: the chunk before, on the CPU, of length 0 for none.
        opened: (n,) tokens with which the chunk begins, on the CPU.
        known: (C,) q of the known chunks, see `_score_known`.
    """
    assert system.memory is not None
    vocabulary, sets = _join_vocabularies(system)
    rows = list(sets)
    gate = None if system.mixture is None or known is None else system.mixture(prediction[None])[0]
    weights, predictions = system.memory.predict_next(document, prediction, gate)
    ways, first = [], 1
    if known is not None:
        ways.append(("known", rows.pop(0), weights[0] * known.double().cpu()))
        first = 2
    listed = []
    for part, prediction_of, weight in zip(document.parts, predictions, weights[first:], strict=True):
        places = rows.pop(0) if part.vocabulary is not None else None
        if prediction_of.present:
            chunks, probability = prediction_of.list_outcomes()
            listed.append((part.name, chunks, places, weight * probability))
    rows_of_sets, others = _find_rows(vocabulary, [chunks for _, chunks, places, _ in listed if places is None])
    for name, _, places, probability in listed:
        ways.append((name, next(rows_of_sets) if places is None else places, probability))
    spelled = weights[first - 1].log()
    if n := len(opened):
        begins = torch.cat([vocabulary.prefix_mask(opened), ChunkVocabulary(others).prefix_mask(opened)])
        ways = [(name, at, probability * begins[at]) for name, at, probability in ways]
        beginning, decisions = _spell_beginning(system, prediction[None], before, opened)
        spelled = spelled + system.memory.spell_decisions(document, decisions, beginning)[0, :n].double().sum().cpu()
    joint = torch.zeros(len(vocabulary) + len(others), dtype=torch.float64)
    for _, places, probability in ways:
        joint.index_add_(0, places, probability)
    return Outcomes(vocabulary, others, torch.cat([joint.log(), spelled[None]]), ways)


def _find_rows(vocabulary: ChunkVocabulary, sets: Sequence[Chunks]) -> tuple[Iterator[Tensor], Chunks]:
    """Return the rows of the chunks of each of some sets, and the chunks that the vocabulary lacks."""
    every = Chunks.concatenate([vocabulary.chunks[:0], *sets])
    rows = vocabulary.find_rows(every)
    missing = (rows < 0).nonzero().squeeze(1)
    others = find_distinct(every.tokens[missing], every.lengths[missing])
    rows[missing] = len(vocabulary) + others.inverse
    return iter(rows.split([len(each) for each in sets])), Chunks(others.tokens, others.lengths)


def _spell_beginning(system: HAED, prediction: Tensor, before: Chunks, opened: Tensor) -> tuple[Chunks, Tensor]:
    """Return N chunks of the tokens `opened` (n,) alone, and the decoder's log p (N, K + 1) of them."""
    n = len(opened)
    tokens = F.pad(opened.long(), (0, system.cut.k - n)).expand(len(prediction), -1)
    chunks = Chunks(tokens, torch.full((len(tokens),), n))
    return chunks, system.decoder_log_probs(prediction, chunks, before)


@dataclass
class LikeliestChunks:
    """Some chunks that may be next, the likeliest first, on the CPU.

    Probabilities are conditional on the beginning, in float64.

    Attributes:
        chunks: n chunks.
        probability: (n,) probability by all parts together.
        parts: for each part but the decoder, the share (n,) of that by which it draws the chunk; the rest is spelled.
        gate: for each part but the decoder, the probability that it draws the next chunk.
    """

    chunks: Chunks
    probability: Tensor
    parts: dict[str, Tensor]
    gate: dict[str, float]


@torch.no_grad()
def find_likeliest_chunks(
    system: HAED, prediction: Tensor, before: Chunks, opened: Tensor, count: int, document: DocumentMemory | None = None
) -> LikeliestChunks:
    """Return the likeliest next chunks, at most `count`, of ŷ (1, W), after a remembered document or none.

    Probabilities are exact. The choice of chunks is approximate: those that are likeliest to be drawn whole, and those
    that a beam search finds among what may be spelled, twice as many of each as are wanted or more.
    """
    if document is None:
        outcomes = _known_outcomes(system, prediction, before, opened)
    else:
        known_of_all = _score_known(system, prediction)
        known = None if known_of_all is None else known_of_all[0]
        outcomes = _list_outcomes(system, document, prediction[0], before, opened, known)
    shares, whole = outcomes.log_prob, check_finite(outcomes.log_prob.logsumexp(0), "scores")
    beam, possible = max(2 * count, _BEAM), int(shares[:-1].isfinite().sum())
    likeliest = _beam_search(system, prediction, before, opened, beam, document)
    named = outcomes[mask_largest(shares[:-1], min(beam, possible)).nonzero().squeeze(1)]
    every = Chunks.concatenate([likeliest, named])
    chunks = find_distinct(every.tokens, every.lengths)
    size = len(chunks)
    repeated = Chunks(before.tokens.expand(size, -1), before.lengths.expand(size))
    decisions = system.decoder_log_probs(prediction.expand(size, -1), chunks, repeated).double().cpu()
    if document is not None and system.memory is not None:
        decisions = system.memory.spell_decisions(document, decisions, chunks)
    spelled = shares[-1] + decisions[:, len(opened) :].sum(1)
    rows = outcomes.find_rows(chunks)
    drawn = shares[rows].where(rows >= 0, -torch.inf)
    joint = torch.logaddexp(drawn, spelled)
    best = joint.argsort(descending=True, stable=True)[:count]
    parts = {name: torch.zeros(len(best), dtype=torch.float64) for name, _, _ in outcomes.ways}
    for place, row in enumerate(rows[best].tolist()):
        for name, share in (outcomes.share_of_parts(row) if row >= 0 else {}).items():
            parts[name][place] = share * float((drawn - joint)[best[place]].exp())
    gate = {name: float((joint_of.sum().log() - whole).exp()) for name, _, joint_of in outcomes.ways}
    return LikeliestChunks(chunks[best], (joint - whole)[best].exp(), parts, gate)


def _known_outcomes(system: HAED, prediction: Tensor, before: Chunks, opened: Tensor) -> Outcomes:
    """Return the outcomes of a model without memory for ŷ (1, W)."""
    log_prob = outcome_log_probs(system, prediction, before, opened)[0].double().cpu()
    nothing = Chunks.empty(system.cut.k)
    if system.known is None:
        return Outcomes(ChunkVocabulary(nothing), nothing, log_prob, [])
    lexicon = system.known.lexicon
    return Outcomes(lexicon, nothing, log_prob, [("known", torch.arange(len(lexicon)), log_prob[:-1].exp())])


def _beam_search(
    system: HAED, prediction: Tensor, before: Chunks, opened: Tensor, beam: int, document: DocumentMemory | None
) -> Chunks:
    """Return the chunks with a given beginning that are likeliest to be spelled, at most `beam`, by a beam search."""
    cut = system.cut
    decoder = system.decoder
    state = decoder.initial_state(prediction, to_device(before, system.device))
    tokens, score = torch.zeros(1, cut.k, dtype=torch.long), torch.zeros(1, dtype=torch.float64)
    symbol, ended = torch.full((1,), cut.vocabulary), []
    for place in range(cut.k):
        logits = decoder.step(state, symbol.to(system.device))
        if place < len(opened):
            symbol = opened[place : place + 1].long()
        else:
            logits = mask_end(logits, [len(logits)] if place == 0 else [0], cut.fixed)
            spelled = spell_symbols(system, logits, [document] * len(tokens), tokens[:, :place])
            check_finite(spelled.amax(1), "scores")
            grown = score[:, None] + spelled.double().log_softmax(1).cpu()
            ended.append((tokens, torch.full_like(tokens[:, 0], place), grown[:, -1]))
            score, best = grown[:, :-1].flatten().topk(min(beam, grown[:, :-1].numel()))
            parent, symbol = best // cut.vocabulary, best % cut.vocabulary
            tokens = tokens[parent]
            state.select_rows(parent.to(system.device))
        tokens[:, place] = symbol
    ended.append((tokens, torch.full_like(tokens[:, 0], cut.k), score))
    every, lengths, scores = (torch.cat(column) for column in zip(*ended, strict=True))
    best = scores.topk(min(beam, int(scores.isfinite().sum()))).indices
    return Chunks(every, lengths)[best]


def spell_symbols(
    system: HAED, logits: Tensor, documents: Sequence[DocumentMemory | None], beginnings: Tensor
) -> Tensor:
    """Return log p of the next symbols of chunks, up to a constant of each row, helped by the words of their documents.

    Args:
        system: the model.
        logits: (b, V + 1) of the decoder.
        documents: the b documents, or none at all.
        beginnings: (b, n) symbols of the chunks so far.
    """
    speller = None if system.memory is None else system.memory.speller
    if speller is None or not any(documents):
        return logits
    following = [
        [] if document is None or document.words is None else document.words.next_symbols(tuple(beginning))
        for document, beginning in zip(documents, beginnings.tolist(), strict=True)
    ]
    return speller.mix_symbols(logits, following, beginnings.shape[1])


_MANY = 1024  # more outcomes stay on their device, in their own precision
_COOLEST = 0.5  # at a lower temperature most proposals are in vain
_COLDEST = 1e-30  # a smaller temperature is 0 in float32, and 0 / 0 is not 0


@dataclass
class Draw:
    """Settings for drawing one of n outcomes: a symbol of a chunk or its end, or an outcome of a mixture.

    Attributes:
        temperature: divides the logarithms of the probabilities; 0 takes the likeliest outcome.
        top_k: keep only the k likeliest outcomes; 0 keeps all. Of equal ones the lowest indices are kept.
        top_p: keep only the fewest likeliest outcomes that together have this probability. Of equal ones the lowest
            indices are kept.
        generator: random generator of the draws, on the CPU.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    generator: torch.Generator | None = None

    def __post_init__(self) -> None:
        """Raise ValueError for values out of range."""
        if not (0 <= self.temperature < math.inf and self.top_k >= 0 and 0 < self.top_p <= 1):
            raise ValueError(
                f"temperature={self.temperature}, top_k={self.top_k}, top_p={self.top_p}: must be at least 0, at least 0, and "
                "above 0 to 1. Use Draw(temperature=0.8, top_k=0, top_p=0.95)."
            )

    @property
    def is_plain(self) -> bool:
        """True if outcomes are drawn with their own probabilities, without temperature or cut-offs."""
        return self.temperature == 1 and not self.cuts_off

    @property
    def cuts_off(self) -> bool:
        """True if unlikely outcomes are never drawn."""
        return self.top_k > 0 or self.top_p < 1

    def __call__(self, logits: Tensor) -> Tensor:
        """Draw outcomes (B,) from logits (B, n).

        Raises:
            FloatingPointError: the largest logit is infinite or no number.
        """
        logits = logits.double().cpu() if logits.shape[-1] <= _MANY else logits
        largest = logits.amax(-1, keepdim=True)
        check_finite(largest, "scores")
        if self.temperature == 0:
            return logits.argmax(-1).cpu()
        if self.top_k:  # before dividing: rounding can make unequal logits equal
            logits = logits.masked_fill(~mask_largest(logits, min(self.top_k, logits.shape[-1])), -torch.inf)
        weights = ((logits - largest) / max(self.temperature, _COLDEST)).exp()
        if self.top_p >= 1:
            return self._draw_weighted(weights).squeeze(1).cpu()
        rounding = 8 * torch.finfo(weights.dtype).eps  # 0.1 added seven times is a little less than 0.7
        enough = self.top_p * (1 - rounding) * weights.sum(-1, keepdim=True, dtype=torch.float64)
        drawn, waiting = torch.zeros(len(weights), dtype=torch.long), torch.arange(len(weights))
        numbers = torch.arange(weights.shape[-1], device=weights.device)
        while len(waiting):
            place = self._draw_weighted(weights)
            drawn[waiting] = place.squeeze(1).cpu()
            # An outcome is kept if those before it have not enough. If it is not, one of those is drawn.
            weight = weights.gather(1, place)
            before = weights * ((weights > weight) | ((weights == weight) & (numbers < place)))
            cut = (before.sum(-1, keepdim=True, dtype=torch.float64) >= enough).squeeze(1)
            waiting, weights, enough = waiting[cut.cpu()], before[cut], enough[cut]
        return drawn

    def _draw_weighted(self, weights: Tensor) -> Tensor:
        """Draw outcomes (B, 1) in proportion to weights (B, n); `multinomial` would draw a number for each outcome."""
        passed = weights.cumsum(-1, dtype=torch.float64)
        share = torch.rand(len(passed), 1, dtype=torch.float64, generator=self.generator).to(passed.device)
        return torch.searchsorted(passed, share * passed[:, -1:], right=True)


def draw_whole(draw: Draw, whole: Tensor, spelled: Tensor) -> Tensor:
    """Draw whether each chunk is a whole one (B,), from the log probabilities (B,) of that and of spelling it."""
    return draw(torch.stack([whole, spelled], 1)) == 0


def draw_outcomes(draw: Draw, log_prob: Tensor) -> Tensor:
    """Draw an outcome (B,) from log probabilities (B, n + 1) of n chunks, and of spelling one; −1 is to spell."""
    whole = draw_whole(draw, log_prob[:, :-1].logsumexp(1), log_prob[:, -1])
    rows = torch.full((len(log_prob),), -1)
    if whole.any():
        rows[whole] = draw(log_prob[whole.to(log_prob.device), :-1])
    return rows


class Sampler(ABC):
    """Continues B prompts of the same number of chunks, chunk by chunk.

    The constructor takes (system, prompt, samples), as `haed.registry.make_sampler` does.

    Attributes:
        parts: for each part that draws whole chunks, the number (B,) of chunks of each sample that it drew; the others
            were spelled. A chunk that several parts may draw counts for each by its share.
        unread: number of tokens at the beginning of the prompt that the main model does not read.
    """

    unread = 0
    parts: Mapping[str, Tensor] = MappingProxyType({})

    @abstractmethod
    def draw_chunk(self, draw: Draw, opened: Tensor | None = None) -> Chunks:
        """Draw the next chunk of every sample and append it.

        Args:
            draw: settings of the draws.
            opened: (n,) tokens with which every chunk begins, n ≤ K.

        Returns:
            B chunks on the CPU.
        """


class ChunkSampler(Sampler):
    """Sampler of a chunk model."""

    @torch.no_grad()
    def __init__(self, system: HAED, prompt: TokenBatch, samples: int = 1) -> None:
        self.system, self.samples, self.device = system, samples, system.device
        self.cache = system.main.create_cache()
        first = max(0, prompt.lengths.shape[1] - system.cut.context + 1)
        tokens, lengths = prompt.tokens[:, first:].long(), prompt.lengths[:, first:]
        self.unread = int(prompt.lengths[0, :first].sum())
        tokens, lengths = tokens.expand(samples, -1, -1), lengths.expand(samples, -1)
        seen = self._embed_chunks(Chunks(tokens.flatten(0, 1), lengths.flatten())).unflatten(0, lengths.shape)
        self.inputs = torch.cat([self._start_vectors(), seen], 1)
        self.prediction = system.main.step(self.inputs, self.cache)[:, -1]
        none = Chunks(tokens.new_zeros(samples, system.cut.k), lengths.new_zeros(samples))
        self.last = Chunks(tokens[:, -1], lengths[:, -1]) if lengths.shape[1] else none
        names = [] if system.known is None else ["known"]
        self.documents: list[DocumentMemory] = []
        if system.memory is not None:
            self.documents = self._remember_prompts(prompt)
            names += [part.name for part in self.documents[0].parts]
        self.parts = {name: torch.zeros(samples, dtype=torch.float64) for name in names}

    def _remember_prompts(self, prompt: TokenBatch) -> list[DocumentMemory]:
        """Return the memory of each sample's prompt."""
        assert self.system.memory is not None
        documents = []
        for row in range(len(prompt)):
            document = self.system.memory.start_document()
            for windows, new in _overlapping_windows(prompt[row : row + 1], self.system.cut.context):
                prediction = self.system.predict_vectors(windows)[new]
                document.remember_chunks(prediction, Chunks(windows.tokens[0, new], windows.lengths[0, new]))
            documents.append(document)
        if len(documents) < self.samples:
            documents = [documents[0].fork() for _ in range(self.samples)]
        return documents

    def draw_chunk(self, draw: Draw, opened: Tensor | None = None) -> Chunks:
        """See `Sampler.draw_chunk`."""
        with torch.inference_mode() if self.device.type == "cpu" else torch.no_grad():  # less to do for each small call
            return self._draw_next(draw, opened)

    def _draw_next(self, draw: Draw, opened: Tensor | None) -> Chunks:
        k, known = self.system.cut.k, self.system.known
        drawn = Chunks(torch.zeros(self.samples, k, dtype=torch.long), torch.zeros(self.samples, dtype=torch.long))
        opened = drawn.lengths[:0] if opened is None else opened.long()
        if self.documents:
            self._draw_outcomes(drawn, draw, opened)
        elif known is not None:
            self._draw_known(drawn, draw, opened)
        spelled = (drawn.lengths == 0).nonzero().squeeze(1)
        if len(spelled):
            decoded = self._decode_chunks(spelled, draw, opened)
            drawn.tokens[spelled], drawn.lengths[spelled] = decoded.tokens, decoded.lengths
        for row, document in enumerate(self.documents):
            document.remember_chunks(self.prediction[row : row + 1], drawn[torch.tensor([row])])
        self._feed_chunks(drawn)
        return drawn

    def _draw_outcomes(self, drawn: Chunks, draw: Draw, opened: Tensor) -> None:
        """Draw an outcome of every sample by all parts, and enter the chunks that are drawn whole."""
        if draw.is_plain and not len(opened):
            self._draw_parts(drawn, draw)
            return
        for some in torch.arange(self.samples).split(_AT_ONCE):
            scores = _score_known(self.system, self.prediction[some.to(self.device)])
            for number, row in enumerate(some.tolist()):
                before, known = self.last[torch.tensor([row])], None if scores is None else scores[number]
                outcomes = _list_outcomes(self.system, self.documents[row], self.prediction[row], before, opened, known)
                place = int(draw_outcomes(draw, outcomes.log_prob[None].float()))
                if place >= 0:
                    chunk = outcomes[torch.tensor([place])]
                    drawn.tokens[row], drawn.lengths[row] = chunk.tokens[0], chunk.lengths[0]
                    for name, share in outcomes.share_of_parts(place).items():
                        self.parts[name][row] += share

    def _draw_parts(self, drawn: Chunks, draw: Draw) -> None:
        """Draw a part for every sample, and a chunk of that part: the same distribution, without listing all outcomes."""
        system, from_known = self.system, []
        assert system.memory is not None
        gates = None if system.known is None or system.mixture is None else system.mixture(self.prediction)
        for row, document in enumerate(self.documents):
            gate = None if gates is None else gates[row]
            weights, predictions = system.memory.predict_next(document, self.prediction[row], gate)
            number = int(torch.multinomial(weights, 1, generator=draw.generator))
            name, remembering = system.memory.names[number], number - len(weights) + len(predictions)
            if remembering >= 0:
                chunk = predictions[remembering].draw_outcome(draw.generator)
                self._enter_chunks(drawn, torch.tensor([row]), chunk, name)
            elif name == "known":
                from_known.append(row)
        self._draw_by_score(drawn, torch.tensor(from_known), draw)

    def _draw_known(self, drawn: Chunks, draw: Draw, opened: Tensor) -> None:
        """Draw for every sample of a model without memory a known chunk, or none where it is to be spelled."""
        system = self.system
        assert system.known is not None and system.mixture is not None
        if len(opened):
            rows = draw_outcomes(draw, outcome_log_probs(system, self.prediction, self.last, opened))
            whole = (rows >= 0).nonzero().squeeze(1)
            self._enter_chunks(drawn, whole, system.known.lexicon.chunks[rows[whole]], "known")
        else:
            gate = system.mixture(self.prediction)
            whole = draw_whole(draw, F.logsigmoid(gate), F.logsigmoid(-gate))
            self._draw_by_score(drawn, whole.nonzero().squeeze(1), draw)

    def _draw_by_score(self, drawn: Chunks, samples: Tensor, draw: Draw) -> None:
        """Draw known chunks for some samples (n,) by the IEM score."""
        known, mixture = self.system.known, self.system.mixture
        if len(samples) and known is not None and mixture is not None:
            query = self.system.compute_query(self.prediction[samples.to(self.device)])
            rows = torch.full_like(samples, -1)
            if not draw.cuts_off and draw.temperature >= _COOLEST and len(known) >= LEAST:
                rows = _prepare_rejection(self.system).draw_rows(query, draw.generator, draw.temperature)
            left = rows < 0
            if left.any():
                rows[left] = draw(known.score_queries(query[left.to(self.device)], mixture.prior))
            self._enter_chunks(drawn, samples, known.lexicon.chunks[rows], "known")

    def _enter_chunks(self, drawn: Chunks, samples: Tensor, chunks: Chunks, part: str) -> None:
        """Enter n chunks that a part has drawn for some samples (n,)."""
        drawn.tokens[samples] = chunks.tokens.to(drawn.tokens.dtype)  # those of a prompt are bytes
        drawn.lengths[samples] = chunks.lengths
        self.parts[part][samples] += 1

    def _decode_chunks(self, rows: Tensor, draw: Draw, opened: Tensor) -> Chunks:
        """Draw chunks of some of the samples symbol by symbol from the decoder."""
        cut, batch = self.system.cut, len(rows)
        tokens = torch.zeros(batch, cut.k, dtype=torch.long)
        lengths = torch.full((batch,), cut.k)
        decoder = self.system.decoder
        state = decoder.initial_state(self.prediction[rows.to(self.device)], to_device(self.last[rows], self.device))
        open_rows, symbol = torch.arange(batch), torch.full((batch,), cut.vocabulary)
        for position in range(cut.k):
            logits = decoder.step(state, symbol.to(self.device))
            if position < len(opened):
                symbol = opened[position].expand(batch)
            else:
                logits = mask_end(logits, [batch] if position == 0 else [0], cut.fixed)
                documents = [self.documents[row] for row in rows[open_rows].tolist()] if self.documents else []
                symbol = draw(spell_symbols(self.system, logits, documents, tokens[open_rows, :position]))
            goes_on = symbol != cut.vocabulary
            if not goes_on.all():  # chunks that have ended cost nothing more
                lengths[open_rows[~goes_on]] = position
                open_rows, symbol = open_rows[goes_on], symbol[goes_on]
                if not len(open_rows):
                    break
                state.select_rows(goes_on.to(self.device))
            tokens[open_rows, position] = symbol
        return Chunks(tokens, lengths)

    def _feed_chunks(self, drawn: Chunks) -> None:
        """Feed the chunks to the main model, which predicts the next ones."""
        main, context = self.system.main, self.system.cut.context
        if context > 1:  # with a context of 1 no chunk sees the one before
            self.last = drawn
        vector = self._embed_chunks(drawn)[:, None]
        self.inputs = torch.cat([self.inputs, vector], 1)
        if self.inputs.shape[1] > context:
            self.inputs = torch.cat([self._start_vectors(), self.inputs[:, self.inputs.shape[1] - context // 2 :]], 1)
            self.cache, vector = main.create_cache(), self.inputs
        self.prediction = main.step(vector, self.cache)[:, -1]

    def _start_vectors(self) -> Tensor:
        """Return the vectors (B, 1, E) before the first chunk."""
        return self.system.main.start.expand(self.samples, 1, -1)

    def _embed_chunks(self, chunks: Chunks) -> Tensor:
        """Return the embeddings (N, E) of chunks on the CPU."""
        return self.system.encode(chunks).vector.to(self.system.main.start.dtype)


def _prepare_rejection(system: HAED) -> RejectionSampler:
    """Return what draws known chunks, made at first use from the queries after chunks drawn by their counts."""
    known, mixture = system.known, system.mixture
    assert known is not None and mixture is not None
    if known.rejection is None:
        passed = known.log_counts.double().exp().cpu().cumsum(0)
        share = torch.rand(
            8, min(system.cut.context, 64), dtype=torch.float64, generator=torch.Generator().manual_seed(0)
        )
        chunks = known.lexicon.chunks[torch.searchsorted(passed, share * passed[-1], right=True)]
        queries = system.compute_query(system.predict_vectors(TokenBatch.from_chunks(chunks.tokens, chunks.lengths)))
        known.rejection = RejectionSampler(known.keys, known.score_bias(mixture.prior), queries)
    return known.rejection


def _overlapping_windows(document: TokenBatch, context: int) -> Iterator[tuple[TokenBatch, Tensor]]:
    """Yield the windows (1, T) of one document that cover it, half of each new, with the places of the new chunks."""
    size, begin, read = document.lengths.shape[1], 0, 0
    while read < size:
        end = min(begin + context, size)
        windows = TokenBatch.from_chunks(document.tokens[:, begin:end], document.lengths[:, begin:end])
        windows.starts[:, 0] = begin == 0
        yield windows, torch.arange(read - begin, end - begin)
        read, begin = end, begin + max(1, context // 2)


class TokenSampler(Sampler):
    """Sampler of a system of tokens, K of them a chunk.

    A window has T·K tokens if chunks have a fixed size. Otherwise it has half as many, as windows of training seldom
    have more. When it is full, the memory is rebuilt from the newest half of it.

    Raises:
        ValueError: the prompts have different numbers of tokens.
    """

    def __init__(self, system: TokenModel, prompt: TokenBatch, samples: int = 1) -> None:
        cut = system.cut
        self.system, self.samples = system, samples
        most = cut.context * cut.k
        self.window = most if cut.fixed else max(min(2, most), most // 2)
        sizes = prompt.lengths.sum(1)
        if sizes.unique().numel() > 1:
            raise ValueError(
                f"prompts have {int(sizes.min())} to {int(sizes.max())} tokens. Sample prompts of one length together"
            )
        real = length_mask(prompt.lengths, cut.k)
        tokens = prompt.tokens.long()[real].view(len(sizes), -1).expand(samples, -1)
        self.symbols = torch.cat([torch.full((samples, 1), cut.vocabulary), tokens], 1)  # the whole window
        self.unread = max(0, tokens.shape[1] - self.window + 1)
        self._restart_window(self.window - 1)

    @torch.no_grad()
    def draw_chunk(self, draw: Draw, opened: Tensor | None = None) -> Chunks:
        """See `Sampler.draw_chunk`."""
        k = self.system.cut.k
        known = [] if opened is None else list(opened.long())
        tokens = torch.zeros(self.samples, k, dtype=torch.long)
        for place in range(k):
            symbol = known[place].expand(self.samples) if place < len(known) else draw(self.logits)
            tokens[:, place] = symbol
            self._feed_symbols(symbol[:, None])
        return Chunks(tokens, torch.full((self.samples,), k))

    def _feed_symbols(self, symbols: Tensor) -> None:
        self.symbols = torch.cat([self.symbols, symbols], 1)
        if self.symbols.shape[1] > self.window:
            self._restart_window(self.window // 2)
        else:
            self.logits = self.system(symbols, self.memory)[:, -1]

    @torch.no_grad()
    def _restart_window(self, newest: int) -> None:
        """Restart the window with at most `newest` of the newest tokens."""
        kept = self.symbols[:, 1:][:, max(0, self.symbols.shape[1] - 1 - newest) :]
        self.symbols = torch.cat([self.symbols.new_full((self.samples, 1), self.system.cut.vocabulary), kept], 1)
        self.memory = self.system.create_memory(self.samples)
        self.logits = self.system(self.symbols, self.memory)[:, -1]
