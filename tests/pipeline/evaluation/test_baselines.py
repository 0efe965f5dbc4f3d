"""Baselines against a dictionary in float64, and against lzma."""

import lzma
import math
from collections import Counter, defaultdict

import pyppmd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.evaluation.baselines import measure_baselines, not_beaten
from pipeline.run.files import Baseline
from tests.conftest import SHARED

LETTERS = st.lists(st.sampled_from(b"abc\xff"), min_size=1, max_size=60).map(bytes)


def brute_force(train: bytes, order: int, history: bytes, symbol: int) -> float:
    """p_n(symbol | last n bytes of history), by the definition."""
    lower = 1 / 256 if order == 0 else brute_force(train, order - 1, history, symbol)
    if len(history) < order:
        return lower
    context = history[len(history) - order :]
    counts = Counter(train[i + order] for i in range(len(train) - order) if train[i : i + order] == context)
    if not counts:
        return lower
    return (counts[symbol] + len(counts) * lower) / (counts.total() + len(counts))


@settings(max_examples=30)
@given(train=LETTERS, held_out=LETTERS)
def test_agrees_with_the_definition(train: bytes, held_out: bytes) -> None:
    for order, found in enumerate(measure_baselines(train, held_out, range(4))[:-2]):
        bits = -sum(math.log2(brute_force(train, order, held_out[:i], x)) for i, x in enumerate(held_out))
        assert found.bits == pytest.approx(bits, rel=1e-9)


def test_probabilities_sum_to_one() -> None:
    totals: dict[int, float] = defaultdict(float)
    before = measure_baselines(b"abracadabra", b"ab", range(3))
    for symbol in range(256):
        after = measure_baselines(b"abracadabra", b"ab" + bytes([symbol]), range(3))
        for order in range(3):
            exact = brute_force(b"abracadabra", order, b"ab", symbol)
            assert 2 ** (before[order].bits - after[order].bits) == pytest.approx(exact, rel=1e-9)
            totals[order] += exact
    assert list(totals.values()) == pytest.approx([1, 1, 1])


def test_xz_characters_and_edges() -> None:
    held_out = "naïve\n".encode() * 10 + b"\xff"
    *_, xz, _ = measure_baselines(b"", held_out, [0])
    assert xz.name == "xz -9" and xz.bits == 8 * len(lzma.compress(held_out, preset=9))
    assert xz.bits_per_char == xz.bits / 61 and xz.bits_per_byte == xz.bits / 71
    assert measure_baselines(b"", held_out, [0])[0].bits_per_byte == pytest.approx(8)
    with pytest.raises(ValueError, match="no held-out bytes"):
        measure_baselines(b"abc", b"")
    with pytest.raises(ValueError, match="0 to 6"):
        measure_baselines(b"abc", b"a", [7])


def test_ppmd_is_what_the_held_out_bytes_add_to_the_compressed_train_split() -> None:
    train, held_out = b"".join(b"line %d of many\n" % n for n in range(2000)), b"line 7 of many lines\n" * 5
    *_, ppmd = measure_baselines(train, held_out, [0])
    sizes = [len(pyppmd.compress(text, max_order=16, mem_size=1 << 24)) for text in (train + held_out, train)]
    assert ppmd.name == "PPMd, order 16, given train"
    assert ppmd.bits == pytest.approx(8 * (sizes[0] - sizes[1]), abs=8 * 16)
    assert ppmd.bits < measure_baselines(b"", held_out, [0])[-1].bits


def test_not_beaten_is_plain() -> None:
    found = [Baseline("a", 1, 1, 2.0), Baseline("b", 1, 1, 3.0)]
    assert not_beaten(2.5, found) == not_beaten(2.0, found) == ["a"]
    assert not_beaten(math.nan, found) == ["a", "b"]


@pytest.mark.nightly  # the counts of 10 MB
def test_wikitext2_figures() -> None:
    folder = SHARED / "wikitext-2"
    if not folder.is_dir():
        pytest.skip("WikiText-2 is not in ../shared/data")
    found = measure_baselines((folder / "train.txt").read_bytes(), (folder / "test.txt").read_bytes())
    assert [round(item.bits_per_char, 2) for item in found[2:6]] == [2.70, 2.16, 1.83, 1.71]
