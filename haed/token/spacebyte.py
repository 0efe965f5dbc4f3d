"""SpaceByte: larger layers only where a word begins (Slagle 2024).

Layers with local attention run at every token. Between them, wider layers with attention to everything run only at some
tokens. These are the tokens where the last one fed is not a letter and the one before it was, and where a document or
the window starts. The wider layers get the residual stream there, padded with zeros in front to their width. The last W
coordinates of their output are added to the stream.

The number of such places differs between rows. Rows are padded behind them, which causal layers do not notice. While
sampling, rows reach them at different steps, and each continues by itself.

Legend: B sequences, L tokens, G places at most, V vocabulary, W width.
"""

import re
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from haed.base import ChunkingSpec
from haed.layers.attention import BlockOptions, KeyValueCache
from haed.layers.transformer import TransformerStack
from haed.options import IEMOptions, ModelOptions
from haed.token.base import MULTIPLE, TokenModel, Tokens


@dataclass
class Words:
    """Places where words begin.

    Attributes:
        places: (B, G) in rising order, L behind the last one.
        counts: number of places in each row.
    """

    places: Tensor
    counts: list[int]


@dataclass
class SpaceByteMemory:
    """Memory of a SpaceByte model.

    Attributes:
        before: caches of the layers before the larger ones.
        words: caches of the larger layers, by row.
        after: caches of the layers after the larger ones.
        inside: (B,) true if the last symbol was a letter.
    """

    before: list[KeyValueCache]
    words: list[list[KeyValueCache]]
    after: list[KeyValueCache]
    inside: Tensor


def letter_mask(ranges: str, vocabulary: int) -> Tensor:
    """Return a mask (V + 1,) of the symbols 0 … V that are inside a word; V, the start of a document, never is.

    Raises:
        ValueError: the ranges are not written like 48-57 65-90, or are beyond the vocabulary.
    """
    is_letter = torch.zeros(vocabulary + 1, dtype=torch.bool, device="cpu")  # where routes are computed
    for part in ranges.split():
        match = re.fullmatch(r"([0-9]+)-([0-9]+)", part)
        if match is None or not int(match[1]) <= int(match[2]) < vocabulary:
            raise ValueError(
                f"model.spacebyte.letters={ranges!r}: expected ranges of tokens from 0 to {vocabulary - 1}, such as 1-1 5-9"
            )
        is_letter[int(match[1]) : int(match[2]) + 1] = True
    return is_letter


class SpaceByte(TokenModel):
    """Local layers, larger ones where words begin, local layers.

    Raises:
        ValueError: the larger layers are narrower than the others, or the letters are invalid.
    """

    submodules = ("embedding", "before", "words", "after", "output")

    def __init__(self, options: ModelOptions, iem: IEMOptions, cut: ChunkingSpec) -> None:
        super().__init__(options.token, cut)
        token, chosen, longest = options.token, options.spacebyte, cut.context * cut.k
        sizes = {name: getattr(chosen, name) or getattr(token, name) * 3 // 2 for name in ("width", "heads", "ffn")}
        if sizes["width"] < token.width:
            raise ValueError(f"model.spacebyte.width={chosen.width} must be at least model.token.width={token.width}")
        self.wider = sizes["width"] - token.width
        self.letters = letter_mask(chosen.letters, cut.vocabulary)
        local = BlockOptions.from_token_options(token, longest, attention="local")
        self.before = TransformerStack(chosen.before, local)
        self.words = TransformerStack(chosen.layers, replace(local, attention=token.attention, **sizes))
        self.after = TransformerStack(chosen.after, local)
        self.initialise_parameters()

    def compile_training(self) -> bool:
        """Compile nothing, as the number of words differs; see `SequenceModel.compile_training`."""
        return False

    def route_symbols(self, symbols: Tensor, memory: SpaceByteMemory | None = None) -> Words:
        """Find where words begin; see `TokenModel.route_symbols`."""
        inside = self.letters[symbols]
        first = torch.ones_like(inside[:, :1]) if memory is None else memory.inside[:, None]
        begins = (~inside & torch.cat([first, inside[:, :-1]], 1)) | (symbols == self.cut.vocabulary)
        if memory is not None:
            memory.inside = inside[:, -1]
        counts = begins.sum(1)
        most = int(counts.max()) if len(counts) else 0
        if memory is None:
            most += -most % MULTIPLE
        order = (~begins).byte().argsort(dim=1, stable=True)[:, :most]
        places = order.masked_fill(torch.arange(order.shape[1]) >= counts[:, None], symbols.shape[1])
        return Words(places, counts.tolist())

    def forward_body(self, x: Tensor, route: Words | None = None, memory: SpaceByteMemory | None = None) -> Tensor:
        """See `TokenModel.forward_body`."""
        assert route is not None
        x = self.mark("before", self.before(x, memory.before if memory is not None else None))
        index = route.places[:, :, None].expand(-1, -1, x.shape[2])
        words = F.pad(x, (0, 0, 0, 1)).gather(1, index)  # zeros for padding
        words = F.pad(words, (self.wider, 0))
        if memory is None:
            words = self.words(words)
        else:
            for row, (count, cache) in enumerate(zip(route.counts, memory.words, strict=True)):
                words[row, :count] = self.words(words[row : row + 1, :count], cache)
        words = words[..., -x.shape[2] :].to(x.dtype)
        x = self.mark("words", F.pad(x, (0, 0, 0, 1)).scatter_add(1, index, words)[:, :-1])
        return self.mark("after", self.after(x, memory.after if memory is not None else None))

    def shape_key(self, inputs: object) -> tuple[int, ...]:
        """See `SequenceModel.shape_key`."""
        assert isinstance(inputs, Tokens) and isinstance(inputs.route, Words)
        return (*inputs.symbols.shape, inputs.route.places.shape[1])

    def create_body_memory(self, samples: int) -> SpaceByteMemory:
        """See `TokenModel.create_body_memory`."""
        words = [self.words.create_cache() for _ in range(samples)]
        return SpaceByteMemory(
            self.before.create_cache(), words, self.after.create_cache(), torch.ones(samples, dtype=torch.bool)
        )
