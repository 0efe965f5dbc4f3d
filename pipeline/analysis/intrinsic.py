"""Intrinsic checks: precision@10 of word sets for the model and for baselines.

The baselines are chance, counted contexts (PPMI-SVD), a skip-gram and spelling alone. All systems search the same
words: the most frequent form of each word of the corpus (see `pipeline.analysis.word_sets.extract_word`). For each member
of a set, precision@10 is the number of other members among its 10 nearest words, divided by the largest possible
number. For pairs it is the share whose other half is among the 10 nearest. The model is searched by the centred
cosine, as an index of chunks is: the mean embedding is subtracted first (Mu & Viswanath 2018), so that a common
component hides no difference. It is also searched by the plain cosine.
"""

import logging

import numpy as np

from pipeline.analysis.distributional import spelling_similarity
from pipeline.analysis.geometry import find_nearest, highest_columns
from pipeline.analysis.word_sets import WORD_SETS, WordSet, extract_word
from pipeline.run.analysis_results import Check, Difference, Intrinsic

log = logging.getLogger(__name__)
AT, FEWEST = 10, 4  # neighbours; minimum number of members in the corpus
MODEL, WHOLE, COUNTED = "model (centred cosine)", "model (cosine)", "PPMI-SVD"
SKIP_GRAM, SPELLED, CHANCE = "skip-gram", "spelling", "chance"
_SENTENCE, _EPOCHS, _WINDOW = 1000, 5, 2


def index_words(chunks: list[bytes]) -> dict[str, int]:
    """Map each word to the row of its most frequent form; `chunks` are sorted from frequent to rare."""
    rows: dict[str, int] = {}
    for row, chunk in enumerate(chunks):
        if word := extract_word(chunk):
            rows.setdefault(word, row)
    return rows


def measure_precision(words: list[str], chunks: list[bytes], spaces: dict[str, np.ndarray]) -> Intrinsic | None:
    """Measure the precision@10 of each set for each system, and for spelling.

    Sets for text are used only if the corpus has at least half of their words. The same holds for sets for code.

    Args:
        words: W words of the corpus.
        chunks: the chunk that stands for each word, by whose spelling it is searched.
        spaces: vectors (W, E) of the words by system, searched by cosine.

    Returns:
        The results, or None if no set is frequent enough or there are too few words for 10 neighbours.
    """
    size, places = len(words), {word: place for place, word in enumerate(words)}
    if size <= AT + 1:
        return None
    chosen, left_out = _select_sets(places)
    members = {word for each in chosen for member in each.members for word in member}
    queries = np.array(sorted(places[word] for word in members if word in places), int)
    if not len(queries):
        return None
    lists = {name: find_nearest(vectors, queries, AT) for name, vectors in spaces.items()}
    lists[SPELLED] = highest_columns(spelling_similarity(chunks, queries), queries[:, None] == np.arange(size), AT)
    checks = [_check_set(each, places, queries, lists) for each in chosen]
    used_alike, spelled_alike = [check for check in checks if check.use], [check for check in checks if not check.use]
    others = [name for name in checks[0].precision if name not in (MODEL, WHOLE)]
    difference = {
        name: _mean_difference([check.precision[MODEL] - check.precision[name] for check in used_alike])
        for name in (others if used_alike else ())
    }
    return Intrinsic(size, checks, left_out, _mean_precision(used_alike), _mean_precision(spelled_alike), difference)


def _select_sets(places: dict[str, int]) -> tuple[list[WordSet], list[str]]:
    """Return the sets that can be checked, and a line with the reason for each set left out."""
    chosen, left_out = [], []
    for language in ("text", "code"):
        sets = [each for each in WORD_SETS if each.of == language]
        known = [word in places for each in sets for member in each.members for word in member]
        if 2 * sum(known) < len(known):
            left_out.append(f"all for {language} (only {sum(known)} of their {len(known)} words are frequent enough)")
            continue
        for each in sets:
            if (present := len(_known_members(each, places))) >= FEWEST:
                chosen.append(each)
            else:
                left_out.append(f"{each.name} ({present} of {len(each.members)})")
    return chosen, left_out


def _known_members(each: WordSet, places: dict[str, int]) -> list[tuple[str, ...]]:
    """Return the members, words or whole pairs, that the corpus has."""
    return [member for member in each.members if all(word in places for word in member)]


def _check_set(each: WordSet, places: dict[str, int], queries: np.ndarray, lists: dict[str, np.ndarray]) -> Check:
    """Check one set by the neighbours (Q, 10) of some words (Q,), which are sorted and contain the set's, by system."""
    present, size = _known_members(each, places), len(places)
    rows = np.array([[places[word] for word in member] for member in present], int)
    if each.pairs:
        members, others = np.concatenate([rows, rows[:, ::-1]]).T
        lines = np.searchsorted(queries, members)
        precision = {name: float((near[lines] == others[:, None]).any(1).mean()) for name, near in lists.items()}
        precision[CHANCE] = AT / (size - 1)
    else:
        members, most = rows[:, 0], min(AT, len(rows) - 1)
        lines = np.searchsorted(queries, members)
        precision = {name: float(np.isin(near[lines], members).sum(1).mean() / most) for name, near in lists.items()}
        precision[CHANCE] = AT * (len(members) - 1) / (size - 1) / most
    missing = ["/".join(member) for member in each.members if member not in present]
    return Check(each.name, each.of, not each.spelled, each.pairs, len(present), len(each.members), missing, precision)


def _mean_precision(checks: list[Check]) -> dict[str, float]:
    names = checks[0].precision if checks else ()
    return {name: float(np.mean([check.precision[name] for check in checks])) for name in names}


def _mean_difference(values: list[float]) -> Difference:
    error = float(np.std(values, ddof=1) / np.sqrt(len(values))) if len(values) > 1 else None
    return Difference(float(np.mean(values)), error, len(values))


def skip_gram(stream: np.ndarray, rows: int, width: int, seed: int) -> np.ndarray | None:
    """Train skip-gram vectors (n, E) on a stream of chunks with gensim (Mikolov et al. 2013).

    Chunks missing from the table are dropped from the stream. The window spans two chunks on each side. Return None
    if gensim is not installed.
    """
    try:
        from gensim.models import Word2Vec
    except ImportError:
        return None
    known = stream[(stream >= 0) & (stream < rows)]
    names = [str(row) for row in range(rows)]
    sentences = [[names[row] for row in known[at : at + _SENTENCE].tolist()] for at in range(0, len(known), _SENTENCE)]
    log.info("skip-gram of %s chunks, %d times", f"{len(known):,}", _EPOCHS)
    settings = dict(window=_WINDOW, min_count=1, sg=1, negative=5, epochs=_EPOCHS, workers=1, seed=seed % (1 << 31))
    model = Word2Vec(sentences, vector_size=width, **settings)
    vectors = np.zeros((rows, width), np.float32)
    for row, name in enumerate(names):
        if name in model.wv:
            vectors[row] = model.wv[name]
    return vectors
