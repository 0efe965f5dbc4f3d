"""Sources of text: every kind gives its bytes back, whole documents to one split, plain or compressed."""

import bz2
import gzip
import lzma
import os
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import pytest

from data.options import SourceOptions
from data.sources.files import zstd
from data.sources.source import Source, make_source, named_split
from tests.conftest import mostly_nightly
from tests.data.conftest import brief, shard_source, shared_data

COMPRESS = {
    "": lambda content: content,
    ".gz": gzip.compress,
    ".xz": lzma.compress,
    ".bz2": bz2.compress,
    ".zst": lambda content: zstd.compress(content),
}


def documents(source: Source, size: int = 1 << 20, align: int = 1) -> dict[str, list[tuple[str, bytes]]]:
    """Name and bytes of every document, by split; pieces are joined."""
    found: dict[str, list[tuple[str, bytes]]] = defaultdict(list)
    for item in source.inputs(size, align):
        for piece in source.read_pieces(item):
            if piece.continues:
                name, data = found[piece.split].pop()
                assert name == piece.name
                found[piece.split].append((name, data + piece.data))
            else:
                found[piece.split].append((piece.name, piece.data))
    return found


def joined(found: dict[str, list[tuple[str, bytes]]], split: str) -> bytes:
    return b"".join(data for _, data in found[split])


def source(kind: str, path: Path, **options: object) -> Source:
    return make_source(SourceOptions(kind=kind, path=str(path), **options))  # type: ignore[arg-type]


@pytest.mark.parametrize("suffix", COMPRESS)
@pytest.mark.parametrize(("size", "end"), [(1 << 20, b"\n"), (1000, b"\n"), (1 << 20, b"\r\n")])
def test_one_text_is_cut_in_three_between_paragraphs_alike_plain_or_compressed(
    tmp_path: Path, suffix: str, size: int, end: bytes
) -> None:
    text = b"".join(b"paragraph %d%bsecond line%b%b" % (number, end, end, end) for number in range(1000))
    (tmp_path / f"book.txt{suffix}").write_bytes(COMPRESS[suffix](text))
    found = documents(source("text", tmp_path), size)
    parts = [joined(found, split) for split in ("train", "valid", "test")]
    assert b"".join(parts) == text and all(part.endswith(end + end) for part in parts)
    assert [round(len(part) / len(text), 2) for part in parts] == [0.9, 0.05, 0.05]
    assert [len(found[split]) for split in ("train", "valid", "test")] == [1, 1, 1]
    if suffix:  # a worker finds where to cut, as in the plain file
        (item,) = source("text", tmp_path).inputs(size, 1)
        assert item.stop is None
        (tmp_path / "book.txt").write_bytes(text)
        plain = documents(source("text", tmp_path / "book.txt"), size)
        assert parts == [joined(plain, split) for split in ("train", "valid", "test")]


@pytest.mark.parametrize("suffix", [".gz", ".xz", ".bz2", ".zst"])
def test_a_truncated_or_false_compressed_file_is_named(tmp_path: Path, suffix: str) -> None:
    whole = COMPRESS[suffix](bytes(range(256)) * 999)
    for content in (whole[: len(whole) // 2], b"not compressed at all, but named so"):
        (tmp_path / f"train{suffix}").write_bytes(content)
        with pytest.raises(ValueError, match=f"train{suffix} cannot be read"):
            shard_source(tmp_path, tmp_path / "shards")


@pytest.mark.parametrize("suffix", mostly_nightly([".gz", ".xz", ".bz2", ".zst"], ".gz"))
def test_a_decompression_bomb_is_refused(tmp_path: Path, suffix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("data.sources.files.FREE", 1 << 20)
    (tmp_path / f"train.txt{suffix}").write_bytes(COMPRESS[suffix](bytes(100 << 20)))
    with pytest.raises(ValueError, match="a decompression bomb.*source.expansion"):
        documents(source("text", tmp_path))


def test_a_window_of_xz_that_asks_for_too_much_memory_is_refused(tmp_path: Path) -> None:
    filters = [{"id": lzma.FILTER_LZMA2, "preset": 0, "dict_size": 256 << 20}]
    (tmp_path / "train.xz").write_bytes(lzma.compress(b"text", filters=filters))
    with pytest.raises(ValueError, match="train.xz cannot be read: [Mm]emory"):
        documents(source("text", tmp_path))


def test_names_of_splits() -> None:
    said = {"train/val_1.txt": "train", "wiki.dev.raw": "valid", "test_batch": "test", "validation.txt": "valid"}
    said |= {f"wiki.{split}.{suffix}": split for split in ("train", "valid", "test") for suffix in ("tokens", "raw")}
    assert {name: named_split(name) for name in said} == said
    assert [named_split(name) for name in ("contest.txt", "latest", "training.txt", "data_batch_1")] == [None] * 4


def test_patterns_decide_before_all_else(tmp_path: Path) -> None:
    for number in range(10):
        (tmp_path / f"train-{number}.txt").write_bytes(b"%d" % number)
    found = documents(source("text", tmp_path, valid_pattern="[34]", test_pattern=r"-[0-2]\.txt$"))
    assert [len(found[split]) for split in ("train", "valid", "test")] == [5, 2, 3]


TEXTS = [f"text {number} é𝔘\r\n\x00" * (number % 7 + 1) for number in range(300)]


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_a_blank_line_far_from_the_place_to_cut_takes_no_text_from_the_next_split(tmp_path: Path, suffix: str) -> None:
    """Else valid would be all that is before the blank line, and test the last two lines."""
    lines = b"".join(b"event %d of a log without paragraphs\n" % number for number in range(3000))
    (tmp_path / f"log.txt{suffix}").write_bytes(COMPRESS[suffix](b"Title\n\n" + lines + b"\nTOTAL\n"))
    found = documents(source("text", tmp_path))
    sizes = [len(joined(found, split)) for split in ("train", "valid", "test")]
    assert sizes == pytest.approx([0.9 * sum(sizes), 0.05 * sum(sizes), 0.05 * sum(sizes)], abs=100)
    assert all(joined(found, split).endswith(b"\n") for split in ("train", "valid", "test"))


@pytest.mark.parametrize("suffix", ["", ".xz"])
@pytest.mark.parametrize("offsets", [[], [10, 1234]])
def test_enwik8_is_cut_by_offset(tmp_path: Path, suffix: str, offsets: list[int]) -> None:
    text = bytes(range(256)) * 20
    (tmp_path / f"enwik8{suffix}").write_bytes(COMPRESS[suffix](text))
    found = documents(source("enwik8", tmp_path / f"enwik8{suffix}", offsets=offsets), 700)
    a, b = offsets or (len(text) * 90 // 100, len(text) * 95 // 100)
    assert [joined(found, s) for s in ("train", "valid", "test")] == [text[:a], text[a:b], text[b:]]
    with pytest.raises(ValueError, match="expected two ascending"):
        documents(source("enwik8", tmp_path / f"enwik8{suffix}", offsets=[5, 3]))
    with pytest.raises(ValueError, match=r"source\.test_pattern would have no effect"):
        documents(source("enwik8", tmp_path / f"enwik8{suffix}", test_pattern="enwik"))
    if not offsets:
        found = documents(source("enwik8", tmp_path / f"enwik8{suffix}", valid_percent=20))
        assert [len(joined(found, s)) for s in ("train", "valid", "test")] == [3072, 1024, 1024]


@pytest.mark.parametrize("suffix", ["", ".xz"])
def test_a_cut_within_the_end_of_a_line_makes_no_line(tmp_path: Path, suffix: str) -> None:
    text = b"abcdefg\r\n" * 1000
    (tmp_path / f"enwik8{suffix}").write_bytes(COMPRESS[suffix](text))
    for offset in (7208, 7207, 7209):
        chosen = source("enwik8", tmp_path / f"enwik8{suffix}", offsets=[offset, 8100], newlines="lf")
        found = [(piece.split, piece.data) for item in chosen.inputs(1 << 20, 1) for piece in chosen.read_pieces(item)]
        parts = [b"".join(data for split, data in found if split == name) for name in ("train", "valid", "test")]
        assert b"".join(parts) == text.replace(b"\r", b"") and parts[1][:1] == (b"a" if offset > 7207 else b"\n")


@pytest.mark.parametrize("align", [1, 12])
def test_a_large_document_is_cut_into_ranges_where_that_does_no_harm(tmp_path: Path, align: int) -> None:
    text = b"".join(b"line %d\n" % number for number in range(5000))
    (tmp_path / "train.txt").write_bytes(text)
    items = list(source("text", tmp_path).inputs(1000, align))
    assert len(items) > 20 and [item.continues for item in items] == [False] + [True] * (len(items) - 1)
    cuts = [item.start for item in items[1:]]
    assert all(cut % align == 0 if align > 1 else text[cut - 1 : cut] == b"\n" for cut in cuts)
    assert documents(source("text", tmp_path), 1000, align)["train"] == [("train.txt", text)]


@pytest.mark.parametrize("suffix", ["", ".gz"])
@pytest.mark.parametrize("end", ["", "\n", "\n\n", "\n\nhere it ends\n"])
@pytest.mark.parametrize("paragraphs", [1, 2, 20])
def test_every_split_has_text_however_long_the_last_line_is(
    paragraphs: int, end: str, suffix: str, tmp_path: Path
) -> None:
    content = ("\n\n".join(["the quick brown fox jumps over the lazy dog " * 200] * paragraphs) + end).encode()
    (tmp_path / f"book.txt{suffix}").write_bytes(COMPRESS[suffix](content))
    found = documents(source("text", tmp_path))
    parts = [joined(found, split) for split in ("train", "valid", "test")]
    assert b"".join(parts) == content and all(part.strip() for part in parts)


def test_a_hash_alone_may_leave_splits_empty(tmp_path: Path) -> None:
    """As `source.cut=false` asks for, also of two files."""
    for name in range(2):
        (tmp_path / f"{name}.txt").write_bytes(b"text %d alone\n" % name * 9)
    found = documents(source("text", tmp_path, cut=False))
    assert sorted(name for each in found.values() for name, _ in each) == ["0.txt", "1.txt"]


@pytest.mark.parametrize("suffix", ["", ".gz"])
@pytest.mark.parametrize(
    ("text", "is_whole"),
    [
        (b"anarchism originated  as " * 4_000, lambda part: part.endswith(b" ") and not part.startswith(b" ")),
        ("漢字é🙂".encode() * 8_001, lambda part: bool(part.decode())),
    ],
    ids=["words", "characters"],
)
def test_a_text_without_lines_is_cut_between_words_or_characters(
    tmp_path: Path, suffix: str, text: bytes, is_whole: Callable[[bytes], bool]
) -> None:
    (tmp_path / f"book.txt{suffix}").write_bytes(COMPRESS[suffix](text))
    made = source("text", tmp_path)
    for item in made.inputs(1_000, 1):
        assert suffix or all(is_whole(piece.data) for piece in made.read(item))
    found = documents(source("text", tmp_path), 1_000)
    parts = [joined(found, split) for split in ("train", "valid", "test")]
    assert all(map(is_whole, parts)) and b"".join(parts) == text


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_a_text_without_characters_is_cut_anywhere(tmp_path: Path, suffix: str) -> None:
    (tmp_path / f"book.txt{suffix}").write_bytes(COMPRESS[suffix](b"\x80" * 100_000))  # no UTF-8
    assert len(joined(documents(source("text", tmp_path), 1_000), "train")) == 90_000


def test_python_sources_are_listed_as_all_files_are(tmp_path: Path) -> None:
    """What is no part of the library is not told."""
    for name in ("package.py", "test", "site-packages", "json"):
        (tmp_path / name).mkdir()
    for name in ("a.py", "b.py", "c.txt", ".hidden.py", "test/d.py", "site-packages/empty.py", "json/empty.py"):
        (tmp_path / name).write_text(f"x = {name!r}\n" * ("empty" not in name))
    (tmp_path / "nowhere.py").symlink_to("is not there")
    os.mkfifo(tmp_path / "test" / "pipe.py")
    made = source("stdlib", tmp_path)
    assert [file.name for file in made.files] == ["a.py", "b.py"]
    left_out = {"hidden": [".hidden.py"], "links to nowhere": ["nowhere.py"], "empty": ["json/empty.py"]}
    assert made.record.left_out == left_out
    assert made.record.notes == ["source.kind=stdlib reads **/*.py of it. For other texts add source.kind=text"]
    assert [file.name for file in source("stdlib", tmp_path, pattern="a*").files] == ["a.py"]


@pytest.mark.parametrize("name", ["notes.md", "tests/a.py"])
def test_a_folder_of_other_texts_is_told_its_kind(name: str, tmp_path: Path) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text("words\n")
    with pytest.raises(ValueError, match="For other texts add source.kind=text$"):
        source("stdlib", tmp_path).files  # noqa: B018


def test_a_name_that_ends_like_an_offset_is_said_whole(tmp_path: Path) -> None:
    for number in (1, 2):
        (tmp_path / f"user@{number}").write_bytes(b"\xef\xbb\xbftext %d\n" % number)
    corpus = shard_source(tmp_path, tmp_path / "shards")
    assert any("user@1" in note and "user@2" in note for note in corpus.manifest["splits"]["notes"])


@pytest.mark.parametrize(
    ("kind", "folder", "name"),
    [
        ("wikitext", "wikitext-103", "test.txt"),
        ("enwik8", "enwik8-prefix", "enwik8_prefix_4150000.xz"),
        ("text", "tiny-shakespeare", "input.txt"),
        ("wikitext", "wikipedia-en-2015", "valid.txt.xz"),
    ],
)
def test_real_texts(tmp_path: Path, kind: str, folder: str, name: str) -> None:
    path = shared_data(f"{folder}/{name}")
    whole = lzma.open(path).read() if name.endswith(".xz") else path.read_bytes()
    corpus = shard_source(path, tmp_path, kind, valid_pattern="(?!)" if kind == "wikitext" else None)
    assert b"".join(b"".join(corpus.iterate_originals(split)) for split in ("train", "valid", "test")) == whole
    expected = {"wikitext-103": 60, "wikipedia-en-2015": 84}.get(folder)
    assert expected is None or sum(corpus.split_counts(s).documents for s in ("train", "valid", "test")) == expected
    if kind == "enwik8":
        sizes = [corpus.split_counts(split).source_bytes for split in ("train", "valid", "test")]
        assert sizes == [3_735_000, 207_500, 207_500]


def test_other_encodings_and_binary_files_are_said(tmp_path: Path) -> None:
    for name, text in {"a": "né" * 5000, "b": "nö" * 5000}.items():
        (tmp_path / f"{name}.txt").write_text(text)
    made = source("text", tmp_path)
    assert list(made.inputs(1000, 1)) and made.record.notes == []
    (tmp_path / "latin.txt").write_bytes("né ".encode("latin-1") * 50)
    (tmp_path / "data.bin").write_bytes(bytes(range(256)))
    (tmp_path / "packed.txt.gz").write_bytes(gzip.compress(b"\0" * 99))
    (tmp_path / "lines.jsonl.gz").write_bytes(gzip.compress(b'{"text": "a"}\n'))
    (tmp_path / "one.json").write_bytes(b'{"text": "a"}\n\n')
    made = source("text", tmp_path)
    assert list(made.inputs(1000, 1))
    notes = made.record.notes
    assert sorted(note.partition(" (perhaps")[0] for note in notes) == [
        "data.bin, packed.txt.gz: not text (NUL bytes); leave it out with source.pattern=; the bytes are read as they are",
        "latin.txt: not text in UTF-8: it is binary, or another encoding that `iconv -f … -t UTF-8` converts; "
        "the bytes are read as they are",
        "lines.jsonl.gz: JSON lines, read as text with their braces. With source.kind=jsonl, the field source.field of each "
        "line is a document",
    ]


def test_what_is_odd_behind_the_first_bytes_is_said(folder: Path, tmp_path: Path) -> None:
    head = b"plain words\n" * 2000
    for split in ("train", "valid", "test"):
        (folder / f"{split}.txt").write_bytes(head + split.encode())
    (folder / "train-latin.txt").write_bytes(head + "né à côté\n".encode("latin-1") * 99)
    (folder / "train-nul.txt").write_bytes(head + b"a\0b\n")
    (folder / "train-said.txt").write_bytes(b"\0" + head + b"a\0b\n")
    corpus = shard_source(folder, tmp_path / "shards")
    notes = corpus.manifest["splits"]["notes"]
    assert sorted(note.partition(";")[0] for note in notes) == [
        "train-latin.txt: bytes that are not UTF-8 (another encoding, or binary)",
        "train-nul.txt: NUL bytes, so it is probably no text",
        "train-said.txt: not text (NUL bytes)",
    ]


LINES = b"".join(b"line %d of a text\n%s" % (number, b"\n" * (number % 7 == 0)) for number in range(900))
AS_CRLF, AS_CR = LINES.replace(b"\n", b"\r\n"), LINES.replace(b"\n", b"\r")


@pytest.mark.parametrize("suffix", COMPRESS)
@pytest.mark.parametrize("size", [1 << 20, 1000])
def test_ends_of_lines_become_lf_and_copies_are_found(tmp_path: Path, suffix: str, size: int) -> None:
    """The same text, whatever ends its lines, is in one split, and once."""
    for name, content in {"a": LINES, "b": AS_CRLF, "c": AS_CR}.items():
        (tmp_path / f"train-{name}.txt{suffix}").write_bytes(COMPRESS[suffix](content))
    assert joined(documents(source("text", tmp_path, newlines="lf"), size), "train") == LINES
    for name in "abc":
        (tmp_path / f"train-{name}.txt{suffix}").rename(tmp_path / f"{name}.txt{suffix}")
    made = source("text", tmp_path, newlines="lf", valid_percent=0)
    assert joined(documents(made, size), "train") == LINES
    assert len(made.record.left_out["repeated"]) == 2
    kept = documents(source("text", tmp_path, valid_percent=0), size)
    assert joined(kept, "train") == LINES + AS_CRLF + AS_CR


@pytest.mark.parametrize("suffix", ["", ".gz"])
@pytest.mark.parametrize("lines", range(25, 36))
@pytest.mark.parametrize("head", ["word\r\n" * 40, "word\r\n" * 41 + "a", "\r\n" * 7], ids=brief)
def test_no_cut_makes_two_line_ends_of_one(head: str, lines: int, suffix: str, tmp_path: Path) -> None:
    """Wherever it falls, also if nothing but blanks is left behind it."""
    content = (head + "\r\n" * lines).encode()
    (tmp_path / f"one.txt{suffix}").write_bytes(COMPRESS[suffix](content))
    found = documents(source("text", tmp_path, newlines="lf"))
    assert b"".join(joined(found, split) for split in ("train", "valid", "test")) == content.replace(b"\r\n", b"\n")


@pytest.mark.parametrize("kind", ["fixed", "words"])
def test_ends_of_lines_change_no_chunk(tmp_path: Path, kind: str) -> None:
    """Also where chunks have a fixed size, and where a file is cut into many ranges."""
    found = []
    for name, content in {"lf": LINES, "crlf": AS_CRLF}.items():
        folder = tmp_path / name
        folder.mkdir()
        (folder / "train.txt").write_bytes(content * 60)
        corpus = shard_source(folder, tmp_path / f"shards-{name}", chunker=kind, megabytes=1, newlines="lf")
        found.append([(tokens.tobytes(), lengths.tobytes()) for tokens, lengths in corpus.iterate_documents("train")])
    assert found[0] == found[1] and found[0][0][0] == LINES * 60


def test_ends_of_lines_are_said_with_the_option_that_makes_them_alike(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name, content in {"a": AS_CRLF, "b": AS_CRLF + b"one more", "c": LINES}.items():
        (folder / f"{name}.txt").write_bytes(content)
    caplog.set_level("INFO")
    keep, lf = (shard_source(folder, tmp_path / "shards", newlines=newlines) for newlines in ("keep", "lf"))
    (note,) = keep.manifest["splits"]["notes"]
    assert note.startswith("a.txt, b.txt: of 3,087 lines, 2,058 end in CRLF (Windows)") and note in caplog.text
    assert "source.newlines=lf" in note
    assert lf.manifest["splits"]["notes"] == ["line ends (CRLF or CR) became LF: 2,058"]
    assert lf.folder != keep.folder and b"\r" not in b"".join(lf.iterate_originals("train"))
