"""What may be asked of an index; answers are in tests/pipeline/probe/test_neighbours.py."""

import pytest

from pipeline.run.index import parse


@pytest.mark.parametrize("query", ["#12345", "12345g", "00" * 11, ""])
def test_what_is_no_chunk_of_pixels(query: str) -> None:
    with pytest.raises(ValueError, match="is no chunk of pixels"):
        parse(query, "pixels", 12)
    assert parse("#FF0080", "pixels", 8) == bytes.fromhex("ff0080ff0080ff00")
