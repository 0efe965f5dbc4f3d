"""Edit distances by bit vectors against the textbook's table, and pixels."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.analysis.distributional import spelling_similarity


def by_the_table(a: bytes, b: bytes) -> int:
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        before, row[0] = row[0], i
        for j, y in enumerate(b, 1):
            before, row[j] = row[j], min(before + (x != y), row[j] + 1, row[j - 1] + 1)
    return row[-1]


@settings(max_examples=60)
@given(
    st.lists(st.binary(min_size=1, max_size=70) | st.text("ab", min_size=1, max_size=64).map(str.encode), min_size=2)
)
def test_it_is_the_edit_distance(chunks: list[bytes]) -> None:
    found = spelling_similarity(chunks, np.arange(len(chunks)))
    cut = [chunk[:64] for chunk in chunks]
    for a, row in zip(cut, found, strict=True):
        expected = [1 - by_the_table(a, b) / max(len(a), len(b)) for b in cut]
        np.testing.assert_allclose(row, expected, atol=1e-6)


def test_pixels_are_alike_by_their_values() -> None:
    chunks = [bytes([0] * 6), bytes([255] * 6), bytes([51] * 6), bytes([0] * 3)]
    found = spelling_similarity(chunks, np.array([0, 3]), pixels=True)
    np.testing.assert_allclose(found, [[1, 0, 0.8, 1], [1, 0, 0.8, 1]], atol=1e-6)
