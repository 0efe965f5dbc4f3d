"""Transformers position by position, from their formulas: slow, in float64, without a line of `haed`'s.

Weights are those of a system's `state_dict`, as arrays; `name` is the prefix of a module's.
"""

import math
from collections.abc import Callable

import numpy as np

Array = np.ndarray
Weights = dict[str, Array]


def linear(w: Weights, name: str, x: Array) -> Array:
    return w[f"{name}.weight"] @ x + w[f"{name}.bias"]


def norm(w: Weights, name: str, x: Array) -> Array:
    centred = x - x.mean()
    return w[f"{name}.weight"] * centred / math.sqrt((centred**2).mean() + 1e-5) + w[f"{name}.bias"]


def gelu(x: Array) -> Array:
    return np.array([a * 0.5 * (1 + math.erf(a / math.sqrt(2))) for a in x])


def turned(x: Array, position: float) -> Array:
    """Rotary position embedding of a vector (D,): coordinate i and i + D/2 are a point, turned by position · 10000^(−2i/D)."""
    half, found = len(x) // 2, x.copy()
    for i in range(half):
        angle = position * 10_000.0 ** (-i / half)
        a, b = x[i], x[half + i]
        found[i] = a * math.cos(angle) - b * math.sin(angle)
        found[half + i] = a * math.sin(angle) + b * math.cos(angle)
    return found


def attention(
    w: Weights,
    name: str,
    queries: list[Array],
    sources: list[Array],
    heads: int,
    seen: Callable[[int], list[int]],
    step: int = 1,
    rotary: bool = True,
) -> list[Array]:
    """Query t looks at the sources `seen(t)`; source j stands at position j · step."""
    place = turned if rotary else lambda x, position: x
    pairs = [np.split(linear(w, f"{name}.qkv", x), 3 * heads)[heads:] for x in sources]
    keys = [[place(part, j * step) for part in pair[:heads]] for j, pair in enumerate(pairs)]
    found = []
    for t, x in enumerate(queries):
        mixed = []
        for h, part in enumerate(np.split(linear(w, f"{name}.qkv", x), 3 * heads)[:heads]):
            query = place(part, t)
            scores = [math.exp(float(query @ keys[j][h]) / math.sqrt(len(query))) for j in seen(t)]
            values = [score * pairs[j][heads + h] for j, score in zip(seen(t), scores, strict=True)]
            mixed.append(np.sum(values, 0) / sum(scores))
        found.append(linear(w, f"{name}.out", np.concatenate(mixed)))
    return found


def shifted(xs: list[Array]) -> list[Array]:
    """The second half of each from the one before, zeros for the first."""
    half = len(xs[0]) // 2
    return [np.concatenate([x[:half], y[half:]]) for x, y in zip(xs, [np.zeros_like(xs[0]), *xs], strict=False)]


def layer(
    w: Weights, name: str, xs: list[Array], heads: int, window: int | None = None, shift: bool = False
) -> list[Array]:
    """A pre-norm layer over a sequence; position t sees positions up to t, the last `window` of them."""
    normed = [norm(w, f"{name}.norm", x) for x in xs]
    normed = shifted(normed) if shift else normed
    far = len(xs) if window is None else window
    mixed = attention(w, f"{name}.attention", normed, normed, heads, lambda t: list(range(max(0, t - far + 1), t + 1)))
    xs = [x + found for x, found in zip(xs, mixed, strict=True)]
    normed = [norm(w, f"{name}.feed_forward.norm", x) for x in xs]
    normed = shifted(normed) if shift else normed
    return [x + hidden(w, f"{name}.feed_forward", seen) for x, seen in zip(xs, normed, strict=True)]


def layers(
    w: Weights, name: str, number: int, xs: list[Array], heads: int, window: int | None = None, shift: bool = False
) -> list[Array]:
    for place in range(number):
        xs = layer(w, f"{name}.{place}", xs, heads, window, shift)
    return xs


def hidden(w: Weights, name: str, x: Array) -> Array:
    return linear(w, f"{name}.down", gelu(linear(w, f"{name}.up", x)))


def feed_forward(w: Weights, name: str, x: Array) -> Array:
    return x + hidden(w, name, norm(w, f"{name}.norm", x))


def logits(w: Weights, xs: list[Array]) -> Array:
    return np.stack([linear(w, "output", norm(w, "norm", x)) for x in xs])


def pooled(w: Weights, name: str, xs: list[Array], kind: str) -> Array:
    """A group of vectors as one."""
    if kind == "convolution":
        return linear(w, f"{name}.convolution", np.concatenate(xs))
    return np.mean(xs, 0) if kind == "average" else np.max(xs, 0)


def groups(w: Weights, name: str, xs: list[Array], size: int, kind: str) -> list[Array]:
    """Of a sequence at positions 0, 1, …: the first position alone, then so many each; incomplete ones are not there."""
    if size == 1:
        return xs
    found = [pooled(w, name, [xs[0]] * size, kind)]
    while len(found) * size < len(xs):
        first = (len(found) - 1) * size + 1
        found.append(pooled(w, name, xs[first : first + size], kind))
    return found
