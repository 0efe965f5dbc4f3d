"""Attention of tokens to groups of several scales, to each scale by heads of its own.

The heads of a scale are an attention to themselves: adding what all of them find is what joining heads by one matrix does.

Legend: B sequences, L tokens, J groups of a scale, W width. How groups lie is said in `haed.token.pooling`.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from haed.blocks.attention import Attention, Grid, Past, Shifted
from haed.blocks.layer import ATTENTIONS
from haed.options import TokenOptions
from haed.system import Mark, unmarked
from haed.token.notation import NUMBER, parsed


def shares_of_heads(notation: str, option: str, heads: int, scales: Iterable[int]) -> dict[int, int]:
    """Heads of each scale, the finest first: as in 2@16 2@4, or, where that is empty, equal parts, the rest to the finest.

    Raises:
        ValueError: they do not make up all heads, or a scale has none.
    """
    ordered = sorted(scales)
    if not notation:
        each, rest = divmod(heads, len(ordered))
        if not each:
            raise ValueError(f"model.token.heads={heads}: {len(ordered)} scales need a head each; set at least so many")
        return {scale: each + (place < rest) for place, scale in enumerate(ordered)}
    found = {scale: int(number) for scale, number in parsed(notation, option, NUMBER).items()}
    if sorted(found) != ordered or sum(found.values()) != heads:
        example = " ".join(f"{number}@{scale}" for scale, number in shares_of_heads("", option, heads, ordered).items())
        raise ValueError(
            f"{option}={notation!r}: expected heads at the scales {ordered}, {heads} in all (model.token.heads); set {example}"
        )
    return dict(sorted(found.items()))


@dataclass
class ScaledMemory:
    """How many tokens such an attention was given, and what it keeps of each scale's groups, if it keeps any.

    Of the layer it is in, what was shifted last; see `haed.blocks.layer.Norm`.
    """

    pasts: Sequence[Past | None]
    fed: int = 0
    last: Shifted = field(default_factory=dict)


class ScaledAttention(nn.Module):
    """Attention of tokens to groups, causal.

    Args:
        options: sizes; the kind of attention, which is rotary for local and LSH.
        heads: of each scale.
        longest: tokens of a sequence.
        windows: of each scale, from which distance on and below which one tokens are looked at; None: at all distances. A
            group is seen if one of its tokens is that far away and the group complete; by a token before which there is
            no such group, the first one, which tells nothing.
    """

    def __init__(
        self,
        options: TokenOptions,
        heads: dict[int, int],
        longest: int,
        windows: dict[int, tuple[int, int]] | None = None,
    ) -> None:
        super().__init__()
        self.scales = list(heads)
        self.attentions = nn.ModuleList()
        kind = "rotary" if options.attention in ("local", "lsh") else options.attention  # those know no two levels
        for scale, own in heads.items():
            attention = ATTENTIONS[kind](replace(options, heads=own), longest)
            if windows is not None:
                begin, attention.window = windows[scale]
                attention.nearest = max(0, begin - scale + 1)
            self.attentions.append(attention)

    def forward(
        self, x: Tensor, groups: Iterable[Tensor], memory: ScaledMemory | None = None, mark: Mark = unmarked
    ) -> Tensor:
        """What tokens (B, L, W) find in the groups (B, J, W) of each scale, each marked; both follow those in the memory."""
        memory = memory or ScaledMemory([None] * len(self.scales))
        found, queries = torch.zeros_like(x), Grid(memory.fed)
        for attention, scale, new, past in zip(self.attentions, self.scales, groups, memory.pasts, strict=True):
            assert isinstance(attention, Attention)
            keys = Grid(past.seen * scale if past is not None else 0, scale)
            found = mark(f"scale_{scale}", found + attention.between(x, new, queries, keys, past))
        memory.fed += x.shape[1]
        return found

    def memory(self) -> ScaledMemory:
        """Still empty."""
        return ScaledMemory([Past() for _ in self.scales])
