"""Precision@10 on vectors that know everything, or nothing."""

import numpy as np
import pytest

from pipeline.analysis import intrinsic as checks
from pipeline.analysis.word_sets import WORD_SETS, extract_word

WORDS = [word for kind in WORD_SETS if kind.of == "text" for member in kind.members for word in member]


@pytest.mark.parametrize(
    ("chunk", "word"),
    [
        (b"self, ", "self"),
        (b"None:\n", "None"),
        (b"== ", "=="),
        (b" \n", ""),
        (b"\xff\xfe", ""),
        (b"don't ", "don't"),
        (b"St. ", "St"),
    ],
)
def test_a_word_stands_for_its_forms(chunk: bytes, word: str) -> None:
    assert extract_word(chunk) == word


def test_the_most_frequent_form_is_the_word() -> None:
    assert checks.index_words([b"self.", b"\n", b"self, ", b"def "]) == {"self": 0, "def": 3}


def test_sets_are_consistent() -> None:
    for each in WORD_SETS:
        assert len(each.members) >= 5 and len(set(each.members)) == len(each.members), each.name
        words = [word for member in each.members for word in member]
        assert [extract_word(word.encode()) for word in words] == words, each.name


def test_who_knows_the_kinds_finds_them_and_chance_is_chance() -> None:
    words = list(dict.fromkeys(WORDS)) + [f"filler{number}" for number in range(300)]
    places = {word: place for place, word in enumerate(words)}
    chance = np.random.default_rng(0)
    months = next(kind for kind in WORD_SETS if kind.name == "months")
    knowing, knowing_nothing = (0.01 * chance.normal(size=(len(words), 40)) for _ in range(2))
    for (word,) in months.members:
        knowing[places[word], 0] = 1
    chunks, spaces = [word.encode() for word in words], {checks.MODEL: knowing, "noise": knowing_nothing}
    found = checks.measure_precision(words, chunks, spaces)
    assert found is not None and found.words == len(words)
    check = {each.name: each for each in found.checks}["months"]
    assert check.precision[checks.MODEL] == 1 and check.found == 12 and not check.missing
    assert check.precision["noise"] < 0.2 and check.precision[checks.CHANCE] == pytest.approx(11 / (len(words) - 1))
    spelled = {each.name: each for each in found.checks}["plurals"]
    assert not spelled.use and spelled.pairs and spelled.precision[checks.SPELLED] > 0.9
    assert any(each.startswith("all for code") for each in found.left_out)
    assert set(found.difference) == {"noise", checks.SPELLED, checks.CHANCE}
    assert checks.measure_precision(words[:2], chunks[:2], {}) is None


def test_the_verdict_is_by_students_t() -> None:
    made = checks.Intrinsic(9, [], [])
    made.difference = {
        "a": checks.Difference(0.5, 0.1, 5),
        "b": checks.Difference(-0.5, 0.1, 5),
        "c": checks.Difference(0.27, 0.1, 5),  # t has 4 degrees of freedom: 2.776 standard errors
        "d": checks.Difference(0.1, None, 1),
    }
    assert made.verdict == "over 5 sets, beaten: a; not told apart: c, d; better: b"
    assert checks.Difference(0.21, 0.1, 200).is_significant
    assert not checks.Difference(0.204, 0.1, 30).is_significant and checks.Difference(0.205, 0.1, 30).is_significant


def test_few_sets_tell_nothing_apart() -> None:
    assert not checks.Difference(0.5, 0.0, 2).is_significant and not checks.Difference(0.5, 0.01, 4).is_significant


def test_a_skip_gram_learns_what_goes_together_or_is_left_out() -> None:
    pytest.importorskip("gensim")
    stream = np.tile([0, 1, -1, 2, 3], 4000).astype(np.int32)
    found = checks.skip_gram(stream, 5, 8, seed=0)
    assert found is not None and found.shape == (5, 8) and not found[4].any()
