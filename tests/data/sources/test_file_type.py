"""Texts in other encodings: named, with a command that really converts them; what is no text is not taken for one.

What is odd about a text is found wherever its pieces end, and counted once.
"""

import re
import shutil
import subprocess
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from data.options import SourceOptions
from data.sources import file_type
from data.sources.file_type import (
    HEAD,
    TextFindings,
    TextInspector,
    check_head,
    describe_doubt,
    describe_findings,
    detect_foreign_format,
    wide_encoding,
)
from data.sources.source import Input, Piece, Source, make_source
from tests.data.conftest import brief

TEXTS = {
    "Latin": "It is a truth universally acknowledged, that a single man wants “une idée fixe”.\n" * 200,
    "Russian": "Все счастливые семьи похожи друг на друга, каждая несчастливая — по-своему.\n" * 200,
    "Chinese": "天地玄黃，宇宙洪荒。日月盈昃，辰宿列張。\n寒來暑往，秋收冬藏。" * 200,
    "beyond the plane": "words 🙂 and 𝔘𝔫𝔦𝔠𝔬𝔡𝔢, odd:\n" * 300,
    "short": "Привет, мир\n",
}
ENCODINGS = {"UTF-16LE": "utf-16-le", "UTF-16BE": "utf-16-be", "UTF-32LE": "utf-32-le", "UTF-32BE": "utf-32-be"}
needs_iconv = pytest.mark.skipif(not shutil.which("iconv"), reason="there is no iconv")


@needs_iconv
@pytest.mark.parametrize("mark", ["", "\ufeff"])
@pytest.mark.parametrize("name", ENCODINGS)
@pytest.mark.parametrize("text", TEXTS)
def test_wide_encodings_are_named_and_the_advice_converts_them(tmp_path: Path, text: str, name: str, mark: str) -> None:
    (tmp_path / "my book.txt").write_bytes((mark + TEXTS[text]).encode(ENCODINGS[name]))
    said = f"my book.txt is text in {name} {'with' if mark else 'without'} a byte order mark"
    with pytest.raises(ValueError, match=said) as error:
        list(make_source(SourceOptions(kind="text", path=str(tmp_path))).inputs(1000, 1))
    (command,) = re.findall("`(.*)`", str(error.value))
    subprocess.run(["bash", "-ec", command], cwd=tmp_path, check=True)
    assert (tmp_path / "NEW").read_bytes() == TEXTS[text].encode()
    made = make_source(SourceOptions(kind="text", path=str(tmp_path / "NEW")))
    assert list(made.inputs(1000, 1)) and made.record.notes == []


@needs_iconv
@pytest.mark.parametrize(("encoding", "text"), [("cp1251", "Russian"), ("koi8-r", "Russian"), ("gb18030", "Chinese")])
def test_other_encodings_are_guessed_by_a_name_that_iconv_knows(encoding: str, text: str) -> None:
    plain = TEXTS[text].replace("—", "-")
    content = plain.encode(encoding)
    (command,) = re.findall("`(.*)`", str(describe_doubt(content[:HEAD])))
    done = subprocess.run(command.split(), input=content, capture_output=True, check=True)
    assert done.stdout.decode()[:900] == plain[:900]


@needs_iconv
def test_iconv_knows_every_name_that_is_given() -> None:
    for name in file_type._LEGACY.values():
        subprocess.run(["iconv", "-f", name, "-t", "UTF-8"], input=b"text", check=True, capture_output=True)


def test_what_is_binary_is_in_no_wide_encoding() -> None:
    rng = np.random.default_rng(0)
    binaries = {
        "all bytes": bytes(range(256)) * 32,
        "noise": rng.bytes(HEAD),
        "sound": rng.normal(0, 800, HEAD // 2).astype("<i2").tobytes(),
        "floats": rng.normal(0, 1, HEAD // 4).astype("<f4").tobytes(),
        "tokens": (rng.zipf(1.3, HEAD // 2) % 50257).astype("<u2").tobytes(),
        "wide tokens": (rng.zipf(1.3, HEAD // 4) % 50257).astype("<u4").tobytes(),
        "names": b"\0".join(b"/usr/share/doc/package-%d/some file.txt" % number for number in range(200)),
        "UTF-8 and NUL": "né\r\n\0".encode() * 100,
        "zeros": bytes(HEAD),
    }
    assert [name for name, content in binaries.items() if wide_encoding(content[:HEAD])] == []
    assert all("NUL" in str(describe_doubt(content[:HEAD])) for content in binaries.values())


def test_a_binary_member_is_refused_and_one_in_another_encoding_is_not() -> None:
    rng = np.random.default_rng(0)
    noise, floats = rng.bytes(HEAD), rng.normal(0, 1, 99).astype("<f4").tobytes()
    for content in (bytes(range(256)), noise, floats, zlib.compress(b"text" * 99)):
        with pytest.raises(ValueError, match="its .bin is binary, not text .*Name the member .* in source.field="):
            check_head(content, "its .bin", "")
        assert check_head(content, "a.bin", "a.bin")  # files may be binary, which is said
    for encoding, text in (
        ("cp1251", "Все счастливые семьи\r\n"),
        ("shift_jis", "吾輩は猫である\n"),
        ("cp437", "║ 5 │\n"),
    ):
        assert "iconv" in str(check_head(text.encode(encoding) * 30 + b"\x1a", "its .txt", ""))


def test_a_few_bytes_of_other_encodings_are_in_no_wide_one() -> None:
    short = {
        "latin-1": "Le café était fermé à côté de la forêt, où l'été",
        "cp1251": "Все счастливые семьи похожи друг на друга, каждая",
        "koi8-r": "Все счастливые семьи похожи друг на друга, каждая",
        "big5": "天地玄黃，宇宙洪荒。日月盈昃",
    }
    heads = [
        text[at : at + size].encode(encoding)
        for encoding, text in short.items()
        for size in range(2, 20)
        for at in range(20)
    ]
    heads += [b"a\0b %d" % number for number in range(50)] + [b"\0ab\n", b"a\0", b"abc\0\0\0\0"]
    assert [head for head in heads if wide_encoding(head)] == []


@pytest.mark.parametrize(
    "text", ["Μῆνιν ἄειδε", "Привет", "كان يا ما كان", "words", "天地玄黃。\n", "吾輩は猫である", "나라의 말이"]
)
def test_a_few_words_in_a_wide_encoding_are_known(text: str) -> None:
    for name, encoding in ENCODINGS.items():
        assert wide_encoding(text.encode(encoding)) == (name, name)


@pytest.mark.parametrize(
    "text",
    [b"GIF89a is a format of pictures.", b"OggS is how Ogg begins", b"FORM 12 of the office", b"BM is no film"]
    + [b"", b"\0" * 2000, b"PK", b"BZh is no word", bytes(range(256)), "né".encode("utf-16"), b"RIFF of a guitar"],
    ids=brief,
)
def test_prose_that_begins_as_a_magic_number_is_text(text: bytes) -> None:
    assert detect_foreign_format(text) is detect_foreign_format(text * 100) is None


PARTS = ["a", "é", "\U0001f642", "\n", "\r", "\r\n", "\0"]


def pieces(data: bytes, cuts: list[int], name: str = "a") -> list[Piece]:
    places = sorted({cut % (len(data) + 1) for cut in cuts} | {0, len(data)})
    found = [data[a:b] for a, b in zip(places, places[1:], strict=False)]
    return [Piece(name, "train", each, number > 0) for number, each in enumerate(found) if each]


def look(all_pieces: list[Piece], skip: int = 0) -> TextFindings:
    made = TextInspector(skip, whole_files=False)
    for piece in all_pieces:
        made.inspect_piece(piece, "text")
    return made.findings


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
    data = "".join(parts).encode()
    both = [*pieces(data, cuts), *pieces(data, cuts, "b")]

    class Own(Source):
        """A source of another package, which gives text and does nothing about its line ends."""

        def inputs(self, size: int, align: int) -> Iterator[Input]:
            raise NotImplementedError

        def read(self, item: Input) -> Iterator[Piece]:
            yield from both

    source, item = Own(SourceOptions(kind="text", path="x", newlines="lf")), Input("a", "a", 1)
    assert list(source.read_pieces(item)) == both
    source.is_text = True
    found = list(source.read_pieces(item))
    assert all(piece.data for piece in found)
    for name in ("a", "b"):
        own = [piece for piece in found if piece.name == name]
        assert b"".join(piece.data for piece in own) == data.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        assert [piece.continues for piece in own] == [False] + [True] * (len(own) - 1)


def test_what_was_said_of_a_beginning_is_not_said_again() -> None:
    for bad in (b"\xe9", b"\0"):
        assert not look([Piece("a", "train", bad + b"plain " * 9)], 20).odd
        assert look([Piece("a", "train", b"plain " * 9 + bad + b" ")], 20).odd
    inside_a_character = Piece("a", "train", "é".encode()[1:] + b"plain", continues=True)
    assert not look([inside_a_character]).odd


def test_a_text_in_many_parts_is_one() -> None:
    first = look([Piece("a", "train", b"one\r\n")])
    second = look([Piece("a", "train", b"two\r\n", continues=True), Piece("b", "train", b"three\n")])
    (note,) = describe_findings([first, second])
    assert note.startswith("a: of 3 lines, 2 end in CRLF (Windows).")
    many = [look([Piece(f"{part} {n}", "train", b"\r") for n in range(500)]) for part in range(3)]
    (note,) = describe_findings(many)
    assert note.startswith("0 0, 0 1, 0 2, … (1,500 texts): of 1,500 lines, 1,500 end in CR alone (old Mac).")
