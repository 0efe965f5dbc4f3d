"""The main model f_main: embeddings of the chunks so far to the prediction ŷ of the next one, one step a chunk."""

import torch
from torch import Tensor, nn

from haed.blocks.transformer import Block, Cache
from haed.options import MainOptions


class TransformerMain(nn.Module):
    """A causal transformer over chunk embeddings, zero-padded from E to its width W.

    With `positions="concatenated"` learned position vectors stand in the padded coordinates (paper, appendix; the size
    100 there is 356 − 256); with `rotary` queries and keys are rotated.
    """

    def __init__(self, options: MainOptions, embedding: int, context: int) -> None:
        super().__init__()
        padding = options.width - embedding
        concatenated = options.positions == "concatenated"
        if padding < 0 or (concatenated and padding == 0):
            wanted = f"more than {embedding}" if concatenated else f"at least {embedding}"
            raise ValueError(
                f"model.main.width is {options.width}, expected {wanted} (model.encoder.width) "
                f"with model.main.positions={options.positions}"
            )
        self.context = context
        self.padding = padding
        self.positions = nn.Parameter(torch.empty(context, padding)) if concatenated else None
        self.start = nn.Parameter(torch.empty(embedding))
        self.blocks = nn.ModuleList(
            Block(options.width, options.heads, options.head_width, options.ffn, not concatenated)
            for _ in range(options.layers)
        )
        self.norm = nn.LayerNorm(options.width)

    def forward(self, embeddings: Tensor, starts: Tensor) -> Tensor:
        """Predicts every chunk of a window from the chunks before it.

        Args:
            embeddings: (B, T, E) of the window's chunks.
            starts: (B, T) true where a chunk begins a document; it is predicted from the start vector, not from the
                last chunk of another document.

        Returns:
            (B, T, W): ŷ for each chunk; it depends on earlier chunks only.
        """
        before = torch.cat([embeddings[:, :1], embeddings[:, :-1]], 1)
        first = starts.clone()
        first[:, 0] = True
        return self.step(torch.where(first[..., None], self.start.to(before.dtype), before), None)

    def step(self, inputs: Tensor, cache: Cache | None) -> Tensor:
        """Feeds inputs (B, T, E), which follow those in the cache, and returns ŷ (B, T, W) after each."""
        past = cache.length() if cache is not None else 0
        batch, length, _ = inputs.shape
        if self.positions is not None:
            if past + length > self.context:
                raise ValueError(
                    f"{past + length} chunks are more than the {self.context} this model has positions for"
                )
            extra = self.positions[past : past + length].to(inputs.dtype).expand(batch, -1, -1)
            inputs = torch.cat([inputs, extra], -1)
        elif self.padding:
            inputs = nn.functional.pad(inputs, (0, self.padding))
        for layer, block in enumerate(self.blocks):
            inputs = block(inputs, cache, layer)
        return self.norm(inputs)

    def cache(self) -> Cache:
        """An empty cache for `step`."""
        return Cache(len(self.blocks))
