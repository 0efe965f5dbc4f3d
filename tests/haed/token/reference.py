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
        found[i], found[half + i] = (
            a * math.cos(angle) - b * math.sin(angle),
            a * math.sin(angle) + b * math.cos(angle),
        )
    return found


def attention(query: Array, keys: list[Array], values: list[Array]) -> Array:
    scores = [math.exp(float(query @ key) / math.sqrt(len(query))) for key in keys]
    return sum(score * value for score, value in zip(scores, values, strict=True)) / sum(scores)


def block(
    w: Weights, name: str, xs: list[Array], heads: int, sees: Callable[[int, int], bool] | None = None
) -> list[Array]:
    """A pre-norm block over a sequence of vectors; position t sees s ≤ t, if `sees(t, s)`."""
    q, k, v = [], [], []
    for t, x in enumerate(xs):
        parts = np.split(linear(w, f"{name}.attention.qkv", norm(w, f"{name}.attention_norm", x)), 3 * heads)
        q.append([turned(part, t) for part in parts[:heads]])
        k.append([turned(part, t) for part in parts[heads : 2 * heads]])
        v.append(parts[2 * heads :])
    found = []
    for t, x in enumerate(xs):
        seen = [s for s in range(t + 1) if sees is None or sees(t, s)]
        mixed = [attention(q[t][h], [k[s][h] for s in seen], [v[s][h] for s in seen]) for h in range(heads)]
        found.append(feed_forward(w, name, x + linear(w, f"{name}.attention.out", np.concatenate(mixed))))
    return found


def feed_forward(w: Weights, name: str, x: Array) -> Array:
    return x + linear(w, f"{name}.down", gelu(linear(w, f"{name}.up", norm(w, f"{name}.ffn_norm", x))))


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
