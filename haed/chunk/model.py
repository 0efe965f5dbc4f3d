"""The Hierarchical Attention Encoder-Decoder: encoder, main model and decoder as one pure map of tensors.

Legend: B sequences, T chunks of a window, K tokens of a chunk, N chunks of a flat set, E width of an embedding, W width
of ŷ, V vocabulary, S packed decisions.
"""

import math
from itertools import pairwise, zip_longest
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from haed.base import (
    ChunkingSpec,
    ParameterGroup,
    SequenceModel,
    TokenBatch,
    count_flops,
    describe_value,
    length_mask,
    to_device,
)
from haed.chunk.decoder import Decoder, LSTMDecoder
from haed.chunk.encoder import Embedding, Encoder
from haed.chunk.main import Main
from haed.chunk.memory import Memory
from haed.chunk.mixture import ChunkVocabulary, Mixture, MixtureScores, VocabularyScorer
from haed.chunk.packing import Chunks, Packed, find_distinct, previous_chunks
from haed.layers.lstm import ROW_MULTIPLE, LSTMLayer, initialise_lstm
from haed.layers.transformer import scale_residual_init
from haed.options import DECODERS, ENCODERS, MAINS, IEMOptions, ModelOptions, PartKinds

_SCALE_BOUND = math.log(1000)
_CLOSE = 1e-3, 1e-3  # relative and absolute: results of other shapes differ by their rounding
_EMBEDDED = 1 << 13  # known chunks at a time


class HAED(SequenceModel):
    """Encoder, main model, decoder, and the head that turns ŷ into a query for chunk embeddings.

    Args:
        options: options of the parts.
        iem: options of the IEM loss, of which the head between ŷ and the score is used here.
        cut: how the corpus is cut into chunks.

    Attributes:
        mixture: the gate that joins known chunks and decoder in one likelihood, if `model.mixture.known` is not 0.
        known: the known chunks; while it is None, the decoder alone is the likelihood.
        memory: parts that remember, which samplers and scores by document use; None: none.
    """

    submodules = ("encoder", "main", "decoder")
    vector_spaces = ("chunks", "contexts", "predictions")

    def __init__(self, options: ModelOptions, iem: IEMOptions, cut: ChunkingSpec) -> None:
        super().__init__(cut)
        width = self.width = options.main.width
        make_encoder = _load_part(ENCODERS, options.encoder.kind, Encoder)
        make_main = _load_part(MAINS, options.main.kind, Main)
        self.encoder: Encoder = make_encoder(options.encoder, cut.k, cut.vocabulary, iem.bias)
        self.main: Main = make_main(options.main, options.encoder.width, cut.context)
        if iem.head == "none" and width < options.encoder.width:
            raise ValueError(
                f"iem.head=none needs a model.main.width of at least {options.encoder.width} (model.encoder.width), "
                f"but it is {width}. Set iem.head=linear"
            )
        self.head = nn.Linear(width, options.encoder.width, bias=False) if iem.head == "linear" else None
        self.log_scale = nn.Parameter(torch.empty(())) if iem.scale == "learned" else None
        self.cosine, self.temperature = iem.similarity == "cosine", iem.temperature
        make_decoder = _load_part(DECODERS, options.decoder.kind, Decoder)
        self.decoder: Decoder = make_decoder(options.decoder, width, cut.vocabulary, cut.k)
        self.mixture = Mixture(width) if options.mixture.known != 0 else None
        self.known: VocabularyScorer | None = None
        self.memory: Memory | None = None
        self._flops: dict[tuple[str, int], int] = {}
        self.initialise_parameters()
        parts = (
            (self.encoder, options.encoder, ENCODERS),
            (self.main, options.main, MAINS),
            (self.decoder, options.decoder, DECODERS),
        )
        foreign = [part for part, part_options, kinds in parts if part_options.kind not in kinds]
        if foreign and self.device.type != "meta":
            self._check_parts(foreign)

    @torch.no_grad()
    def initialise_parameters(self) -> None:
        """Initialise every parameter.

        Matrices are normal with deviation 1/√fan_in. This includes the decoder's output layer: from zero, the rest
        learns late (dev/LOG.md). Matrices that end a residual branch are divided by √(2·layers) (GPT-2).

        Token embeddings are normal with deviation 1, so that a concatenation of them feeds the first layer at unit
        scale. So are tokens and positions of transformers within chunks. The decoder learns much more slowly from small
        ones (dev/LOG.md). The main model's position vectors have deviation 0.1, small beside the content.

        Forget gates of an LSTM start at bias 1. The scale starts at 1/√E, which gives normalised vectors first scores
        of about unit size. For the cosine it starts at the inverse of its temperature. The encoder's table has
        deviation 0.5, so that chunks differ from the start; zeros learn slowly (dev/LOG.md). The candidate bias is
        zero, so that the first loss of candidates is about log C.
        """
        self.initialise_layers()
        for part in (self.encoder, self.main, self.decoder):
            scale_residual_init(part)
        nn.init.normal_(self.main.start)
        if self.main.positions is not None:
            nn.init.normal_(self.main.positions, std=0.1)
        if isinstance(self.decoder, LSTMDecoder):
            layers = (self.decoder.input, *self.decoder.upper)
            for recurrent, layer in zip(self.decoder.recurrent, layers, strict=True):
                initialise_lstm(recurrent, layer.bias)
        for module in self.modules():
            if isinstance(module, LSTMLayer):
                initialise_lstm(module.recurrent, module.input.bias)
        if self.mixture is not None:
            self.mixture.initialise_parameters()
        if self.encoder.bias is not None:
            nn.init.zeros_(self.encoder.bias.weight)
        if self.log_scale is not None:
            self.log_scale.fill_(_invert_scale(1 / self.temperature if self.cosine else self.encoder.width**-0.5))
        if self.encoder.table is not None:
            nn.init.normal_(self.encoder.table, std=0.5)  # last, so that all other parameters begin as without it
        if self.decoder.grams is not None:
            self.decoder.grams.initialise_parameters()
        for part in (self.encoder, self.main, self.decoder):
            part.initialise_parameters()

    @torch.no_grad()
    def _check_parts(self, parts: list[nn.Module]) -> None:
        """Check the parts of other packages on some chunks: no test of ours knows them.

        Raises:
            ValueError: a result has another shape, depends on what it must not see, so bits would mean nothing,
                differs between training and sampling, or there is none without a chunk.
        """
        was_training = self.training
        self.eval()
        with torch.random.fork_rng(devices=[]):
            rows, lengths = torch.randint(self.cut.vocabulary, (3, self.cut.k)), torch.tensor([1, self.cut.k, 1])
            chunks = Chunks(rows.masked_fill(~length_mask(lengths, self.cut.k), 0), lengths)
            grid = torch.randn(2, min(4, self.cut.context), self.encoder.width).to(next(self.parameters()))
            predictions = torch.randn(3, self.width).to(grid)
        if self.encoder in parts:
            together, alone = (self.encode(chunks[:count]).vector for count in (3, 1))
            _require_finite(type(self.encoder).__name__, together)
            if not torch.allclose(together[:1], alone, *_CLOSE):
                raise ValueError(f"{type(self.encoder).__name__}: the vector of a chunk depends on the other chunks")
        if self.main in parts:
            self._check_main(grid)
        if self.decoder in parts:
            self._check_decoder(predictions, chunks)
        for part in parts:
            self._check_empty(part, grid)
        self.train(was_training)

    def _check_empty(self, part: nn.Module, grid: Tensor) -> None:
        """Check that a part takes no chunk and no window, as in a rank or a piece without any; see `_check_parts`."""
        try:
            if part is self.main:
                self.main(grid[:0], grid[:0, :, 0].bool())
            else:
                self._count_equal_chunks("encoder" if part is self.encoder else "decoder", 0)
        except Exception as error:
            raise ValueError(
                f"{type(part).__name__} fails without any chunk, as in a rank or a piece that has none: {error}"
            ) from error

    def _check_main(self, grid: Tensor) -> None:
        """Check the main model on vectors (2, T, E); see `_check_parts`."""
        name, context = type(self.main).__name__, grid.shape[1]
        starts = torch.zeros(grid.shape[:2], dtype=torch.bool, device=grid.device)
        predictions = self.main(grid, starts)
        if not isinstance(predictions, Tensor) or predictions.shape != (2, context, self.width):
            expected = f"{(2, context, self.width)}: windows × chunks × model.main.width"
            raise ValueError(f"{name} returned {describe_value(predictions)}, expected {expected}")
        _require_finite(name, predictions)
        for place in range(context):
            other = torch.cat([grid[:, :place], grid[:, place:] + 1], 1)
            if not torch.allclose(predictions[:, : place + 1], self.main(other, starts)[:, : place + 1], *_CLOSE):
                raise ValueError(f"{name}: a prediction depends on its own chunk or a later one")
        if not torch.allclose(predictions[:1], self.main(grid[:1], starts[:1]), *_CLOSE):
            raise ValueError(f"{name}: a prediction depends on other windows. Is its batch the first dimension?")
        inputs, cache = torch.cat([self.main.start.expand(2, 1, -1), grid[:, :-1]], 1), self.main.create_cache()
        steps = [self.main.step(inputs[:, place : place + 1], cache) for place in range(context)]
        if not torch.allclose(predictions, torch.cat(steps, 1), *_CLOSE):
            raise ValueError(
                f"{name}: `step` with a cache predicts otherwise than `forward`, so samples would not follow the likelihood"
            )

    def _check_decoder(self, predictions: Tensor, chunks: Chunks) -> None:
        """Check the decoder on ŷ (3, W) and three chunks; see `_check_parts`."""
        name, before = type(self.decoder).__name__, chunks[torch.tensor([1, 2, 0])]
        before.tokens[2], before.lengths[2] = 0, 0
        packed = to_device(self.decoder.pack_chunks(chunks, before, self.cut.fixed), self.device)
        logits, expected = self.decoder(predictions, packed), (len(packed.targets), self.cut.vocabulary + 1)
        if not isinstance(logits, Tensor) or logits.shape != expected:
            raise ValueError(
                f"{name} returned {describe_value(logits)}, expected {expected}: decisions × (symbols, and the end of a chunk)"
            )
        _require_finite(name, logits.masked_fill(logits == -torch.inf, 0))  # a symbol may be impossible
        for number in range(3):
            is_of_chunk, rows = packed.order[packed.chunk] == number, torch.tensor([number - 1, number])
            state = self.decoder.initial_state(predictions[rows], to_device(before[rows], self.device))
            if not hasattr(state, "select_rows"):
                raise ValueError(
                    f"{name}: initial_state returned {describe_value(state)}, expected a state with select_rows(rows), "
                    "which keeps some chunks"
                )
            steps = []
            for place, symbol in enumerate(packed.inputs[is_of_chunk]):
                if place == 1:
                    kept = torch.tensor([False, True] if number % 2 else [1], device=self.device)  # a mask, or indices
                    state.select_rows(kept)
                steps.append(self.decoder.step(state, symbol.expand(1 if place else 2))[-1:])
            together = torch.cat(steps)
            if together.shape != logits[is_of_chunk].shape or not torch.allclose(
                logits[is_of_chunk], together, *_CLOSE
            ):
                raise ValueError(
                    f"{name}: `step` gives other logits than `forward`. Each decision may depend on earlier symbols of its "
                    "own chunk and on the chunk before, or samples would not follow the likelihood"
                )

    def compute_query(self, prediction: Tensor) -> Tensor:
        """Return the query (N, E). A chunk's score is its dot product with the chunk's key, plus the chunk's bias."""
        projected = prediction[..., : self.encoder.width] if self.head is None else self.head(prediction)
        return (
            self.compute_key(projected)
            if self.log_scale is None
            else self.compute_key(projected) * self.bounded_scale(self.log_scale)
        )

    @staticmethod
    def bounded_scale(log_scale: Tensor) -> Tensor:
        """Return the factor of all scores: the exponential of a smoothly bounded logarithm, which never gets stuck.

        The logarithm is what is learned. A step changes the factor by a share of itself, and it cannot become 0 or
        negative.
        """
        return torch.exp(_SCALE_BOUND * torch.tanh(log_scale / _SCALE_BOUND))

    def compute_key(self, vector: Tensor) -> Tensor:
        """Return the keys (N, E) that queries are compared with: the embeddings, of unit length for the cosine."""
        return F.normalize(vector, dim=-1) if self.cosine else vector

    def score_decisions(self, prediction: Tensor, packed: Packed) -> Tensor:
        """Return log p of every packed decision, (S,) float32 or wider, from ŷ (N, W) of the packed chunks."""
        logits = self.decoder(prediction, packed)
        logits = mask_end(logits.to(torch.promote_types(logits.dtype, torch.float32)), packed.sizes, self.cut.fixed)
        return -F.cross_entropy(logits, packed.targets, reduction="none")

    def encode(self, chunks: Chunks) -> Embedding:
        """Embed chunks (N, K) on the CPU, each of length 1 or more, on the model's device."""
        return self.encoder(to_device(self.encoder.prepare_inputs(chunks), self.device))

    def predict_vectors(self, windows: TokenBatch) -> Tensor:
        """Return ŷ (M, W) of the M real chunks of windows on the CPU, on the model's device."""
        return self.main(*self._main_inputs(windows))[windows.chunk_mask.nonzero(as_tuple=True)]

    def layer_states(self, windows: TokenBatch) -> list[Tensor]:
        """Return each main-model layer's output (M, ·) for the M real chunks, and ŷ at last."""
        places = windows.chunk_mask.nonzero(as_tuple=True)
        return [each[places] for each in self.main.layer_states(*self._main_inputs(windows))]

    def _main_inputs(self, windows: TokenBatch) -> tuple[Tensor, Tensor]:
        """Return the inputs of the main model: embeddings (B, T, E), and a mask of the document starts."""
        real = windows.chunk_mask
        chunks = find_distinct(windows.tokens[real], windows.lengths[real])
        vectors = self.encode(chunks).vector
        places = real.nonzero(as_tuple=True)
        grid = vectors.new_zeros(*real.shape, vectors.shape[-1])
        grid[places] = vectors[chunks.inverse.to(self.device)]
        return grid, windows.starts.to(self.device)

    def decision_log_likelihood(self, windows: TokenBatch) -> Tensor:
        """Return log p of the decisions by the decoder alone; see `SequenceModel.decision_log_likelihood`."""
        windows = to_device(windows, torch.device("cpu"))
        chunks, before = (
            x[windows.chunk_mask] for x in (Chunks(windows.tokens, windows.lengths), previous_chunks(windows))
        )
        return self._place_values(
            self.decoder_log_probs(self.predict_vectors(windows), chunks, before), windows.chunk_mask
        )

    def log_likelihood(self, windows: TokenBatch) -> Tensor:
        """Return log p by the mixture if chunks are `known`, else by the decoder; see `SequenceModel.log_likelihood`."""
        windows = to_device(windows, torch.device("cpu"))
        return self._place_values(self.score(windows, windows.chunk_mask).joint_log_prob, windows.chunk_mask)

    def score(self, windows: TokenBatch, which: Tensor) -> MixtureScores:
        """Return log probabilities, by each part, of the chunks for which `which` (B, T) is true.

        The windows are on the CPU.
        """
        prediction = self.predict_vectors(windows)[which[windows.chunk_mask].nonzero().squeeze(1).to(self.device)]
        chunks = Chunks(windows.tokens, windows.lengths)[which]
        parts = MixtureScores(prediction, self.decoder_log_probs(prediction, chunks, previous_chunks(windows)[which]))
        if self.known is not None and self.mixture is not None:
            rows = self.known.lexicon.find_rows(chunks)
            parts.known = self.known.log_softmax(self.compute_query(prediction), rows, self.mixture.prior)
            parts.gate = self.mixture(prediction)
        return parts

    def closed_log_prob(self, windows: TokenBatch, closed: VocabularyScorer, prior: Tensor | float = 0.0) -> Tensor:
        """Return log q (B, T), in nats, of the chunks of windows on the CPU: the IEM score normalised over a closed set."""
        rows = closed.lexicon.find_rows(Chunks(windows.tokens, windows.lengths)[windows.chunk_mask])
        query = self.compute_query(self.predict_vectors(windows))
        return self._place_values(closed.log_softmax(query, rows, prior), windows.chunk_mask)

    def decoder_log_probs(self, prediction: Tensor, chunks: Chunks, before: Chunks) -> Tensor:
        """Return the decoder's log p (N, K + 1) of chunks on the CPU, from ŷ (N, W) and the chunks before.

        See `SequenceModel.decision_log_likelihood`.
        """
        packed = to_device(self.decoder.pack_chunks(chunks, before, self.cut.fixed), self.device)
        scores = self.score_decisions(prediction, packed)
        sizes = torch.tensor(packed.sizes, dtype=torch.long)
        place = torch.arange(len(packed.sizes)).repeat_interleave(sizes).to(self.device)
        log_probs = scores.new_zeros(len(prediction), self.cut.k + 1)
        log_probs[packed.order[packed.chunk], place] = scores
        return log_probs

    def _place_values(self, values: Tensor, which: Tensor) -> Tensor:
        """Return values (N, …) of some chunks of windows at their places (B, T, …), elsewhere 0."""
        result = values.new_zeros(*which.shape, *values.shape[1:])
        result[which.nonzero(as_tuple=True)] = (
            values  # by places, which the host knows: a mask would wait for the device
        )
        return result

    @torch.no_grad()
    def embed_vocabulary(self, lexicon: ChunkVocabulary, dtype: torch.dtype | None = None) -> VocabularyScorer:
        """Embed a vocabulary of at least one chunk, in evaluation mode; keys are rounded to `dtype` if given."""
        keys, biases = [], []
        for rows in torch.arange(len(lexicon)).split(_EMBEDDED):
            embedding = self.encode(lexicon.chunks[rows])
            key = self.compute_key(embedding.vector)
            keys.append(key.to(dtype or key.dtype))
            biases.append(embedding.bias.to(torch.promote_types(embedding.bias.dtype, torch.float32)))
        return VocabularyScorer(lexicon, torch.cat(keys), torch.cat(biases))

    def extract_vectors(
        self, windows: TokenBatch, space: str, layer: int | None = None, scale: int | None = None
    ) -> Tensor:
        """Return embeddings (`chunks`), states of the main model (`contexts`), or queries for chunks (`predictions`).

        Without a layer, `contexts` are ŷ. See `SequenceModel.extract_vectors`.
        """
        real = windows.chunk_mask
        if scale is not None:
            return super().extract_vectors(windows, space, layer, scale)
        if space == "chunks" and layer is None:
            return self.encode(Chunks(windows.tokens[real], windows.lengths[real])).vector
        if space == "predictions" and layer is None:
            return self.compute_query(self.predict_vectors(windows))
        layers = len(self.main.get_layers())
        if space != "contexts":
            return super().extract_vectors(windows, space, layer)
        if layer is not None and not 0 <= layer < layers:
            raise ValueError(
                f"{type(self).__name__} has no layer {layer} of contexts. Its layers are 0 to {layers - 1}"
            )
        return self.predict_vectors(windows) if layer is None else self.layer_states(windows)[layer]

    @torch.no_grad()
    def main_flops(self, windows: int, context: int) -> int:
        """Return the FLOPs of a forward pass of the main model over windows of `context` chunks."""
        if ("main", context) not in self._flops:
            inputs = next(self.parameters()).new_zeros(1, context, self.encoder.width)
            starts = torch.zeros(1, context, dtype=torch.bool, device=self.device)
            self._flops["main", context] = count_flops(self.main, inputs, starts)
        return windows * self._flops["main", context]

    def chunk_flops(self, part: Literal["encoder", "decoder"], pieces: list[list[int]]) -> int:
        """Return the FLOPs of a forward pass of the encoder or the decoder, without padding unless the encoder is `padded`.

        Args:
            part: a part that computes each chunk by itself, so that FLOPs add up.
            pieces: number of chunks of each piece that have a token t, or take decision t, for each t.
        """
        sizes = [sum(counts) for counts in zip_longest(*pieces, fillvalue=0)]
        shared = self._count_equal_chunks(part, 0)  # such as of a table of all symbols
        ends = [size - longer for size, longer in pairwise([*sizes, 0])]
        per_length = {length: self._count_equal_chunks(part, length) for length, count in enumerate(ends, 1) if count}
        return shared + sum(ends[length - 1] * (flops - shared) // ROW_MULTIPLE for length, flops in per_length.items())

    @torch.no_grad()
    def _count_equal_chunks(self, part: str, length: int) -> int:
        """Return the FLOPs of a part for `ROW_MULTIPLE` chunks of one length; of length 0: for no chunk."""
        if (part, length) not in self._flops:
            count = ROW_MULTIPLE if length else 0
            chunks = Chunks(torch.zeros(count, self.cut.k, dtype=torch.long), torch.full((count,), length))
            if part == "encoder":
                self._flops[part, length] = count_flops(self.encode, chunks)
            else:
                packed = to_device(self.decoder.pack_chunks(chunks, chunks, True), self.device)
                prediction = next(self.parameters()).new_zeros(count, self.width)
                self._flops[part, length] = count_flops(self.score_decisions, prediction, packed)
        return self._flops[part, length]

    def count_all_flops(self) -> None:
        """Count the FLOPs of every length of a chunk and of whole windows now, before the model is sharded."""
        self.main_flops(1, self.cut.context)
        for length in range(self.cut.k + 1):
            self._count_equal_chunks("encoder", length)
            self._count_equal_chunks("decoder", length)

    def parameter_groups(self) -> list[ParameterGroup]:
        """Return the groups: encoder, main model by layer, decoder, and what only the IEM loss trains (`head`)."""
        levels = self.main.parameters_by_depth()

        def group(role: str, depth: int, *modules: nn.Module | None) -> ParameterGroup:
            return ParameterGroup(
                [x for module in modules if module is not None for x in module.parameters()], role, depth
            )

        grams = self.decoder.grams
        encoder = group("encoder", 1 + max(depth for depth, _ in levels), self.encoder)
        return [
            ParameterGroup([self.log_scale] if self.log_scale is not None else [], "head", 0),
            *encoder.split_off_table(self.encoder.table),
            *(ParameterGroup(parameters, "main", depth) for depth, parameters in levels),
            group("head", 0, self.head, self.mixture),
            *group("decoder", 0, self.decoder).split_off_table(None if grams is None else grams.table),
        ]


def _load_part(kinds: PartKinds, kind: str, base: type[nn.Module]) -> Any:
    """Return the class of a kind of part, after checking that it is one of this base class."""
    part = kinds.load_class(kind)
    if not (isinstance(part, type) and issubclass(part, base)):
        raise ValueError(f"{kind} of {kinds.group} is {part!r:.100}, expected a class derived from {base.__name__}")
    return part


def _require_finite(part: str, values: Tensor) -> None:
    if not values.isfinite().all():
        raise ValueError(
            f"{part} returned a number that is infinite or NaN. Does each parameter have a value at first?"
        )


def mask_end(logits: Tensor, sizes: list[int], fixed: bool) -> Tensor:
    """Mask the end where it is impossible: before a chunk's first token, and always for chunks of a fixed size."""
    logits = logits.clone()
    logits[: None if fixed else (sizes[0] if sizes else 0), -1] = -torch.inf
    return logits


def _invert_scale(scale: float) -> float:
    """Return the `log_scale` of a positive scale, or the nearest one if the scale is out of bounds."""
    share = math.log(scale) / _SCALE_BOUND
    return _SCALE_BOUND * math.atanh(min(max(share, -0.999), 0.999))
