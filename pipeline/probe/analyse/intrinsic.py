"""Intrinsic checks: do words of a kind find each other? Beside chance, contexts counted, a skip-gram, and spelling alone.

Every system is asked the same: among the most frequent form of each word of the corpus (see `sets.heading`), which are the 10
nearest of a member of a set, and how many of those are other members? Precision@10 is their number over the most that there
could be. Of pairs it is the share whose other half is among the 10 nearest. The model is asked as an index of chunks is, by
the centred cosine: the mean embedding is taken off first (Mu & Viswanath 2018), so that what all have in common hides no
difference; and once more with it.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from pipeline.probe.analyse.geometry import nearest
from pipeline.probe.analyse.sets import KINDS, PAIRS, Kinds, Pairs, heading
from pipeline.probe.analyse.use import similarity

log = logging.getLogger(__name__)
AT, FEWEST = 10, 4  # neighbours; members without which a set tells nothing
MODEL, WHOLE, COUNTED, SKIP_GRAM, SPELLED, CHANCE = (
    "model (centred cosine)",
    "model (cosine)",
    "PPMI-SVD",
    "skip-gram",
    "spelling",
    "chance",
)
_SENTENCE, _EPOCHS, _WINDOW = 1000, 5, 2

Near = Callable[[np.ndarray], np.ndarray]  # words (Q,): the nearest others of each (Q, 10)


@dataclass
class Check:
    """What one set came to.

    Attributes:
        name: of the set.
        of: text or code.
        use: its members are alike in use; else in spelling as well, which spelling alone can find.
        pairs: they are pairs.
        found: members, or pairs, that the corpus has often enough.
        members: of the set.
        missing: some that it has not.
        precision: @10, by system.
    """

    name: str
    of: str
    use: bool
    pairs: bool
    found: int
    members: int
    missing: list[str]
    precision: dict[str, float]


@dataclass
class Difference:
    """The model's precision less another system's: mean over sets and its standard error (None of one set)."""

    mean: float
    error: float | None

    @property
    def clear(self) -> bool:
        """The mean is more than two standard errors from nothing."""
        return self.error is not None and abs(self.mean) > 2 * self.error


@dataclass
class Intrinsic:
    """All sets that the corpus has enough of.

    Attributes:
        words: among which neighbours were looked for.
        checks: the sets.
        left_out: sets of which too few are in the corpus, or that are of another kind of corpus.
        mean: over the sets whose members are alike in use, by system.
        mean_spelled: over those that are alike in spelling as well.
        difference: of the first, by other system.
    """

    words: int
    checks: list[Check]
    left_out: list[str]
    mean: dict[str, float] = field(default_factory=dict)
    mean_spelled: dict[str, float] = field(default_factory=dict)
    difference: dict[str, Difference] = field(default_factory=dict)

    @property
    def verdict(self) -> str:
        """Which yardsticks the model beats, as far as so few sets can tell."""
        groups = {
            "beaten": [name for name, found in self.difference.items() if found.clear and found.mean > 0],
            "not told apart": [name for name, found in self.difference.items() if not found.clear],
            "better": [name for name, found in self.difference.items() if found.clear and found.mean < 0],
        }
        return "; ".join(f"{what}: {', '.join(names)}" for what, names in groups.items() if names)


def words(chunks: list[bytes]) -> dict[str, int]:
    """The row of the most frequent form of each word, of chunks from the most frequent to the rarest."""
    found: dict[str, int] = {}
    for row, chunk in enumerate(chunks):
        if word := heading(chunk):
            found.setdefault(word, row)
    return found


def systems(chunks: list[bytes], spaces: dict[str, np.ndarray]) -> dict[str, Near]:
    """How each system finds neighbours among words: by cosine in its space (W, E), and, of the last, by edit distance."""

    def spelled(rows: np.ndarray) -> np.ndarray:
        likeness = similarity(chunks, rows)
        likeness[np.arange(len(rows)), rows] = -1
        return np.argsort(-likeness, axis=1, kind="stable")[:, :AT]

    by_cosine: dict[str, Near] = {name: partial(_nearest, vectors) for name, vectors in spaces.items()}
    return by_cosine | {SPELLED: spelled}


def _nearest(vectors: np.ndarray, rows: np.ndarray) -> np.ndarray:
    return nearest(vectors, rows, AT)


def intrinsic(places: dict[str, int], near: dict[str, Near]) -> Intrinsic | None:
    """Precision@10 of each set by each system.

    Sets for text are asked if the corpus has half of all their words, and so are those for code.

    Args:
        places: the words, and their places among those that systems know.
        near: the systems.

    Returns:
        None if the corpus has enough of no set, or not more words than neighbours are asked for.
    """
    size = len(places)
    if size <= AT + 1:
        return None
    chosen, left_out = _chosen(places)
    asked = np.array(sorted({places[word] for each in chosen for word in _members(each) if word in places}), int)
    if not len(asked):
        return None
    lists = {name: find(asked) for name, find in near.items()}
    checks = [_checked(each, places, lambda rows: np.searchsorted(asked, rows), lists, size) for each in chosen]
    own = [check for check in checks if check.use]
    others = [name for name in checks[0].precision if name not in (MODEL, WHOLE)]
    difference = {
        name: _difference([check.precision[MODEL] - check.precision[name] for check in own])
        for name in (others if own else ())
    }
    return Intrinsic(
        size, checks, left_out, _mean(own), _mean([check for check in checks if not check.use]), difference
    )


def _members(each: Kinds | Pairs) -> list[str]:
    """All words of a set."""
    return [word for member in _every(each) for word in member]


def _chosen(places: dict[str, int]) -> tuple[list[Kinds | Pairs], list[str]]:
    """The sets that can be asked, and what is left out, and why."""
    every: list[Kinds | Pairs] = [*KINDS, *PAIRS]
    chosen, left_out = [], []
    for of in ("text", "code"):
        mine = [each for each in every if each.of == of]
        known = [word in places for each in mine for word in _members(each)]
        if 2 * sum(known) < len(known):
            left_out.append(f"all for {of} (the corpus has {sum(known)} of their {len(known)} words often enough)")
            continue
        for each in mine:
            if (found := len(_found(each, places))) >= FEWEST:
                chosen.append(each)
            else:
                left_out.append(f"{each.name} ({found} of {len(each.members)})")
    return chosen, left_out


def _found(each: Kinds | Pairs, places: dict[str, int]) -> list[tuple[str, ...]]:
    """The members that the corpus has: words, or whole pairs."""
    return [member for member in _every(each) if all(word in places for word in member)]


def _every(each: Kinds | Pairs) -> list[tuple[str, ...]]:
    return [(word,) for word in each.members] if isinstance(each, Kinds) else list(each.members)


def _checked(
    each: Kinds | Pairs,
    places: dict[str, int],
    line: Callable[[np.ndarray], np.ndarray],
    lists: dict[str, np.ndarray],
    size: int,
) -> Check:
    """The check of a set; `line` is where in the lists of neighbours the queries are that are given as rows."""
    found = _found(each, places)
    rows = np.array([[places[word] for word in member] for member in found], int)
    pairs = isinstance(each, Pairs)
    if pairs:
        queries, others = np.concatenate([rows, rows[:, ::-1]]).T
        precision = {
            name: float((near[line(queries)] == others[:, None]).any(1).mean()) for name, near in lists.items()
        }
        precision[CHANCE] = AT / (size - 1)
    else:
        members, most = rows[:, 0], min(AT, len(rows) - 1)
        precision = {
            name: float(np.isin(near[line(members)], members).sum(1).mean() / most) for name, near in lists.items()
        }
        precision[CHANCE] = AT * (len(members) - 1) / (size - 1) / most
    missing = ["/".join(member) for member in _every(each) if member not in found]
    use = not (isinstance(each, Pairs) and each.spelled)
    return Check(each.name, each.of, use, pairs, len(found), len(each.members), missing, precision)


def _mean(checks: list[Check]) -> dict[str, float]:
    names = checks[0].precision if checks else ()
    return {name: float(np.mean([check.precision[name] for check in checks])) for name in names}


def _difference(values: list[float]) -> Difference:
    error = float(np.std(values, ddof=1) / np.sqrt(len(values))) if len(values) > 1 else None
    return Difference(float(np.mean(values)), error)


def skip_gram(stream: np.ndarray, rows: int, width: int, seed: int) -> np.ndarray | None:
    """Skip-gram vectors (n, E) of the chunks of a stream (Mikolov et al. 2013), by gensim; None where it is not installed.

    Chunks that the table does not have are dropped from it; a window reaches two chunks to each side.
    """
    try:
        from gensim.models import Word2Vec
    except ImportError:
        return None
    known = stream[(stream >= 0) & (stream < rows)]
    names = [str(row) for row in range(rows)]
    sentences = [[names[row] for row in known[at : at + _SENTENCE].tolist()] for at in range(0, len(known), _SENTENCE)]
    log.info("skip-gram of %s chunks, %d times", f"{len(known):,}", _EPOCHS)
    model = Word2Vec(
        sentences,
        vector_size=width,
        window=_WINDOW,
        min_count=1,
        sg=1,
        negative=5,
        epochs=_EPOCHS,
        workers=1,
        seed=seed,
    )
    found = np.zeros((rows, width), np.float32)
    for row, name in enumerate(names):
        if name in model.wv:
            found[row] = model.wv[name]
    return found
