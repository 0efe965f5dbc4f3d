"""The Hierarchical Attention Encoder-Decoder: encoder, main model and decoder as one pure map of tensors.

Legend: B sequences, T chunks of a window, K tokens of a chunk, N chunks of a flat set, E width of an embedding, W width
of ŷ, V vocabulary, S packed decisions.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from haed.chunks import Packed, distinct, pack, shifted
from haed.decoder import LSTMDecoder, TransformerDecoder
from haed.encoder import Embedding, MLPEncoder
from haed.main import TransformerMain
from haed.options import IEMOptions, ModelOptions


class HAED(nn.Module):
    """Encoder, main model, decoder, and the head that turns ŷ into a query for chunk embeddings.

    Args:
        options: what the parts are.
        iem: the head between ŷ and the score (the rest concerns the loss).
        k: tokens per chunk at most.
        vocabulary: number of tokens V.
        fixed: chunks have a fixed size, so that their ends are certain and never predicted.
        context: T, chunks per window.
    """

    def __init__(
        self, options: ModelOptions, iem: IEMOptions, k: int, vocabulary: int, fixed: bool, context: int
    ) -> None:
        super().__init__()
        self.k, self.vocabulary, self.fixed, self.context = k, vocabulary, fixed, context
        width = options.main.width
        self.encoder = MLPEncoder(options.encoder, k, vocabulary)
        self.main = TransformerMain(options.main, options.encoder.width, context)
        self.head = nn.Linear(width, options.encoder.width, bias=False) if iem.head == "linear" else None
        self.scale = nn.Parameter(torch.empty(()))
        self.cosine, self.temperature = iem.similarity == "cosine", iem.temperature
        self.decoder: LSTMDecoder | TransformerDecoder
        if options.decoder.kind == "lstm":
            if options.decoder.previous:
                raise ValueError(
                    "model.decoder.previous is of the transformer decoder: set model.decoder.kind=transformer"
                )
            self.decoder = LSTMDecoder(options.decoder, width, vocabulary)
        else:
            self.decoder = TransformerDecoder(options.decoder, width, vocabulary, k)
        self.initialise()

    @torch.no_grad()
    def initialise(self) -> None:
        """Sets every parameter.

        Matrices: normal with deviation 1/√fan_in; those that end a residual branch are divided by √(2·layers) (GPT-2).
        Token and position embeddings: normal, 1, so that a concatenation of them feeds the first layer at unit scale;
        those of the transformer decoder and position vectors 0.02·√W likewise small beside the content. LSTM: forget
        gates start at bias 1. Scale: 1/√E, which makes first scores of normalised vectors about unit size; of a cosine
        the inverse of its temperature.
        Output layer and candidate bias: zero, so that the first losses are log(V + 1) and log C.
        """
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=module.in_features**-0.5)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
            elif isinstance(module, nn.Embedding):
                nn.init.normal_(module.weight)
        stacks: list[Any] = [self.main.blocks, getattr(self.decoder, "blocks", ())]
        for blocks in stacks:
            for block in blocks:
                for layer in (block.attention.out, block.down):
                    layer.weight /= (2 * len(blocks)) ** 0.5
        nn.init.normal_(self.main.start)
        if self.main.positions is not None:
            nn.init.normal_(self.main.positions, std=0.1)
        if isinstance(self.decoder, LSTMDecoder):
            for recurrent in self.decoder.recurrent:
                nn.init.orthogonal_(recurrent)
            width = self.decoder.output.in_features
            for layer in (self.decoder.input, *self.decoder.upper):
                layer.bias[width : 2 * width] = 1
        nn.init.zeros_(self.decoder.output.weight)
        nn.init.zeros_(self.encoder.bias.weight)
        self.scale.fill_(1 / self.temperature if self.cosine else self.encoder.width**-0.5)

    def embed(self, tokens: Tensor, lengths: Tensor) -> Embedding:
        """Embeds chunks `tokens` (N, K) of `lengths` (N,): vector (N, E), bias (N,)."""
        return self.encoder(tokens, lengths)

    def predict(self, embeddings: Tensor, starts: Tensor) -> Tensor:
        """ŷ (B, T, W) for every chunk of windows with embeddings (B, T, E), from the chunks before it."""
        return self.main(embeddings, starts)

    def query(self, prediction: Tensor) -> Tensor:
        """The vector (N, E) whose dot product with a chunk's key, plus the chunk's bias, is the chunk's score."""
        narrow = prediction[..., : self.encoder.width] if self.head is None else self.head(prediction)
        return self.key(narrow) * self.scale

    def key(self, vector: Tensor) -> Tensor:
        """What a query is compared with: embeddings (N, E), of unit length for the cosine."""
        return F.normalize(vector, dim=-1) if self.cosine else vector

    def decode(self, prediction: Tensor, packed: Packed) -> Tensor:
        """Log p of every packed decision, (S,) float32 or wider, from ŷ (N, W) of the packed chunks."""
        logits = self.decoder(prediction, packed)
        logits = mask_end(logits.to(torch.promote_types(logits.dtype, torch.float32)), packed.sizes, self.fixed)
        return -F.cross_entropy(logits, packed.targets, reduction="none")

    def predictions(self, tokens: Tensor, lengths: Tensor, starts: Tensor) -> Tensor:
        """ŷ (M, W) of the M real chunks of windows, on the model's device; arguments as for `log_likelihood`."""
        device = self.scale.device
        real = lengths > 0
        chunks = distinct(tokens[real], lengths[real])
        vectors = self.embed(chunks.tokens.to(device), chunks.lengths.to(device)).vector
        where = real.nonzero(as_tuple=True)
        grid = vectors.new_zeros(*real.shape, vectors.shape[-1])
        grid[where] = vectors[chunks.inverse.to(device)]
        return self.predict(grid, starts.to(device))[where]

    def decisions(self, tokens: Tensor, lengths: Tensor, starts: Tensor) -> Tensor:
        """Exact log p, in nats, of every token and end of a chunk given the chunks before it in its window.

        Args:
            tokens: (B, T, K), on the CPU; `lengths` (B, T), 0 where no chunk is; `starts` (B, T), see `TransformerMain`.
            lengths: see above.
            starts: see above.

        Returns:
            (B, T, K + 1) float32 or wider on the model's device: of token t at place t, of the end at the place after
            the last one; 0 where nothing is decided.
        """
        real = lengths > 0
        prediction = self.predictions(tokens, lengths, starts)
        device = prediction.device
        before = None
        if self.decoder.sees_before:
            earlier, ends = shifted(tokens, lengths, starts)
            before = earlier[real], ends[real]
        packed = pack(tokens[real], lengths[real], self.vocabulary, self.fixed, before).to(device)
        scores = self.decode(prediction, packed)
        place = (
            torch.arange(len(packed.sizes)).repeat_interleave(torch.tensor(packed.sizes, dtype=torch.long)).to(device)
        )
        chunks = scores.new_zeros(len(prediction), self.k + 1)
        chunks[packed.order[packed.chunk], place] = scores
        result = scores.new_zeros(*real.shape, self.k + 1)
        result[real.to(device)] = chunks
        return result

    def log_likelihood(self, tokens: Tensor, lengths: Tensor, starts: Tensor) -> Tensor:
        """Exact log p (B, T), in nats, of whole chunks; see `decisions`."""
        return self.decisions(tokens, lengths, starts).sum(-1)


def mask_end(logits: Tensor, sizes: list[int], fixed: bool) -> Tensor:
    """Makes the end impossible where it is: before a chunk's first token, and always for chunks of a fixed size."""
    logits = logits.clone()
    logits[: None if fixed else (sizes[0] if sizes else 0), -1] = -torch.inf
    return logits
