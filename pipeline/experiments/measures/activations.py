"""Activation memory that a training step saves for its backward pass, computed from the sizes of a model.

Compare `measures.memory`, which measures it. The formulas cover layers with rotary attention without dropout, in
float32, on a CPU, where attention is computed in blocks of queries (`haed.layers.attention`). Other models are not
covered.

Legend: J positions of a scale, W width, H·D heads and their width, F hidden units, V vocabulary.
"""

from collections import Counter

from haed.options import ModelOptions, TokenOptions

EMBEDDING, QKV, SCORES, VALUES = "embedding", "q, k, v", "scores", "values"
FEED_FORWARD, NORMS, HIERARCHY, OUTPUT = "feed-forward", "norms, residual", "hierarchy", "output"
KINDS = (EMBEDDING, QKV, SCORES, VALUES, FEED_FORWARD, NORMS, HIERARCHY, OUTPUT)
Table = Counter[tuple[str, str]]  # bytes by part and kind
_FLOAT, _INTEGER, _BLOCK = 4, 8, 128  # bytes, bytes, queries


def computed(options: ModelOptions, vocabulary: int, sequences: int, length: int) -> Table | None:
    """Return the bytes by part and kind, or None for models that are not covered.

    Args:
        options: of the model.
        vocabulary: V.
        sequences: in a batch.
        length: of a sequence, in tokens.
    """
    token, found = options.token, Count(options.token, sequences)
    if token.attention != "rotary" or token.dropout or token.grams.rows or token.positions != "none":
        return None
    if options.kind == "hourglass":
        number, _, factor = options.hourglass.hierarchy.partition("@")
        if factor != "1":
            return None
        layers = {1: int(number)}
    elif options.kind in ("top_down", "bottom_up") and (options.multiscale.pooling, options.multiscale.heads) == (
        "average",
        "",
    ):
        layers = {int(own): int(depth) for depth, own in (x.split("@") for x in options.multiscale.layers.split())}
    else:
        return None
    coarse = sorted(layers, reverse=True)[:-1]
    found.table["embedding", EMBEDDING] = _INTEGER * sequences * length
    for scale, depth in layers.items():
        found.level(scale, (length - 1) // scale + 1, depth, options.kind == "top_down", scale == max(layers))
    if options.kind == "bottom_up":
        found.aggregation(sorted(coarse), length)
    found.norm("output", length)
    found.add("output", OUTPUT, length * (token.width + vocabulary))
    found.table["output", OUTPUT] += sequences * length * (_INTEGER + 1)  # targets, and whether each is one
    return found.table


class Count:
    """A counter of activation bytes by part and kind.

    Args:
        token: sizes of the layers.
        sequences: B.
    """

    def __init__(self, token: TokenOptions, sequences: int) -> None:
        self.token, self.sequences = token, sequences
        self.table: Table = Counter()

    def add(self, part: str, kind: str, values: int, of_each: bool = True) -> None:
        """Add a number of values, for each sequence or for all together."""
        self.table[part, kind] += _FLOAT * values * (self.sequences if of_each else 1)

    def norm(self, part: str, positions: int) -> None:
        """Add the input of a norm, and two statistics of each position."""
        self.add(part, NORMS, positions * (self.token.width + 2))

    def feed_forward(self, part: str, positions: int) -> None:
        """Add the norm, the inputs of both matrices, and the input of the activation."""
        self.norm(part, positions)
        self.add(part, FEED_FORWARD, positions * (self.token.width + 2 * self.token.ffn))

    def attention(self, part: str, queries: int, keys: int, heads: int, step: int = 1) -> None:
        """Add attention by blocks of queries, each with the keys up to its last one.

        Values are copied for each block.
        """
        width, ends = self.token.head_width, [*range(_BLOCK, queries, _BLOCK), queries]
        seen = [(end - 1) // step + 1 for end in ends]
        rows = [end - begin for begin, end in zip([0, *ends], ends, strict=False)]
        self.add(part, QKV, heads * width * (queries + keys + sum(seen)))
        self.add(part, QKV, 2 * (width // 2) * (queries + keys), of_each=False)  # cosines and sines
        self.add(part, SCORES, heads * sum(n * m for n, m in zip(rows, seen, strict=True)))
        self.add(part, VALUES, heads * width * queries)

    def level(self, scale: int, positions: int, depth: int, top_down: bool, coarsest: bool) -> None:
        """Add the layers of a scale, and its connections to other scales."""
        part, width = f"scale_{scale}", self.token.width
        for _ in range(depth):
            self.norm(part, positions)
            self.add(part, QKV, positions * width)
            self.attention(part, positions, positions, self.token.heads)
            self.feed_forward(part, positions)
        if scale > 1:
            self.norm(part, positions)
        if top_down:  # what it is joined from, and that before its activation; what is lengthened
            self.add(part, HIERARCHY, positions * width * (3 * (not coarsest) + (scale > 1)))

    def aggregation(self, coarse: list[int], length: int) -> None:
        """Add the layer that attends to the coarse scales.

        The heads are divided equally among them; the remainder goes to the first scales of `coarse`, the finest.
        """
        part, width = "aggregation", self.token.width
        each, rest = divmod(self.token.heads, len(coarse))
        self.norm(part, length)
        self.add(part, QKV, length * width)
        for place, scale in enumerate(coarse):
            groups = (length - 1) // scale + 1
            self.add(part, QKV, groups * width)
            self.attention(part, length, groups, each + (place < rest), scale)
        self.feed_forward(part, length)
