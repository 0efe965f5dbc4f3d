import pytest

from tests.conftest import SHARED


@pytest.fixture
def shared_wikitext() -> bytes:
    path = SHARED / "wikitext-2" / "valid.txt"
    if not path.is_file():
        pytest.skip("WikiText-2 is not in ../shared/data")
    return path.read_bytes()
