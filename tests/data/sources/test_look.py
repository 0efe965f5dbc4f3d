"""What is odd about texts is found wherever their pieces end, and counted once a text."""

from hypothesis import given
from hypothesis import strategies as st

from data.options import SourceOptions
from data.sources.file_type import TextFindings, TextInspector, describe_findings
from data.sources.source import Piece, Source, make_source

PARTS = ["a", "é", "\U0001f642", "\n", "\r", "\r\n", "\0"]


def pieces(data: bytes, cuts: list[int], name: str = "a") -> list[Piece]:
    places = sorted({cut % (len(data) + 1) for cut in cuts} | {0, len(data)})
    found = [data[a:b] for a, b in zip(places, places[1:], strict=False)]
    return [Piece(name, "train", each, number > 0) for number, each in enumerate(found) if each]


def look(all_pieces: list[Piece], skip: int = 0) -> TextFindings:
    made = TextInspector(skip, whole_files=False)
    for piece in all_pieces:
        made.inspect_piece(piece)
    return made.found


@given(st.lists(st.sampled_from(PARTS), min_size=1), st.lists(st.integers(0, 99)))
def test_pieces_change_nothing(parts: list[str], cuts: list[int]) -> None:
    data = "".join(parts).encode()
    found = look(pieces(data, cuts))
    crlf = data.count(b"\r\n")
    wanted = {"CRLF": crlf, "CR": data.count(b"\r") - crlf, "LF": data.count(b"\n") - crlf}
    assert +found.lines == {end: number for end, number in wanted.items() if number}
    assert ("NUL" in found.odd) == (b"\0" in data) and ("ends" in found.odd) == (b"\r" in data)
    assert "encoding" not in found.odd


@given(st.lists(st.sampled_from(PARTS), min_size=1), st.lists(st.integers(0, 99)))
def test_ends_of_lines_become_lf_wherever_pieces_end(parts: list[str], cuts: list[int]) -> None:
    source: Source = make_source(SourceOptions(kind="text", path="x", newlines="lf"))
    data = "".join(parts).encode()
    both = [*pieces(data, cuts), *pieces(data, cuts, "b")]
    found = list(source.convert_piece_newlines(iter(both)))
    assert all(piece.data for piece in found)
    for name in ("a", "b"):
        own = [piece for piece in found if piece.name == name]
        assert b"".join(piece.data for piece in own) == data.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        assert [piece.continues for piece in own] == [False] + [True] * (len(own) - 1)


def test_what_was_said_of_a_beginning_is_not_said_again() -> None:
    for bad in (b"\xe9", b"\0"):
        assert not look([Piece("a", "train", bad + b"plain " * 9)], 20).odd
        assert look([Piece("a", "train", b"plain " * 9 + bad + b" ")], 20).odd
    assert not look(
        [Piece("a", "train", "é".encode()[1:] + b"plain", continues=True)]
    ).odd  # a range inside a character


def test_a_text_in_many_parts_is_one() -> None:
    first = look([Piece("a", "train", b"one\r\n")])
    second = look([Piece("a", "train", b"two\r\n", continues=True), Piece("b", "train", b"three\n")])
    (note,) = describe_findings([first, second])
    assert note.startswith("a: of all 3 lines 2 end in CRLF (Windows).")
    many = [look([Piece(f"{part} {n}", "train", b"\r") for n in range(500)]) for part in range(3)]
    (note,) = describe_findings(many)
    assert note.startswith("0 0, 0 1, 0 2, … (1,500 texts): of all 1,500 lines 1,500 end in CR alone (old Mac).")
