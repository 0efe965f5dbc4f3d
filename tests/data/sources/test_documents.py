"""Many documents a file: JSON lines and WikiText give their bytes back, wherever ranges and blocks end."""

import gzip
import io
import json
import lzma
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.sources.source import hashed_split
from data.sources.text import WikiTextSource, split_at_headings
from tests.data.conftest import brief
from tests.data.sources.test_text import COMPRESS, TEXTS, documents, source


@pytest.mark.parametrize("suffix", ["", ".zst"])
@pytest.mark.parametrize("size", [1 << 20, 500])
def test_json_lines(tmp_path: Path, suffix: str, size: int) -> None:
    lines = b"\n".join(json.dumps({"id": i, "body": text}).encode() for i, text in enumerate(TEXTS)) + b"\n\n"
    (tmp_path / f"data.jsonl{suffix}").write_bytes(COMPRESS[suffix](lines))
    found = documents(source("jsonl", tmp_path, field="body", valid_percent=20), size)
    for split in ("train", "valid", "test"):
        wanted = [text.encode() for text in TEXTS if hashed_split(text.encode(), 20) == split]
        assert [data for _, data in found[split]] == wanted and wanted
    names = [name for each in found.values() for name, _ in each]
    assert len(set(names)) == len(TEXTS)


def test_lone_surrogates_of_json_survive(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_bytes(b'{"text": "a\\ud800b"}')  # no newline at the end either
    ((_, data),) = documents(source("jsonl", tmp_path))["train"]
    assert data.decode("utf-8", "surrogatepass") == "a\ud800b"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"text": ', "the line at byte 13 is not JSON"),
        (b'{"txt": "a"}', "no field 'text' .it has 'txt'.: set source.field="),
        (b"[1]", "no field 'text', because it is not an object"),
        (b'{"text": 3}', "no text in the field 'text', but 3: set source.field=, or write texts there"),
        (b'{"text": 3, "body": "x"}', "no text in the field 'text', but 3: set source.field= to 'body'"),
        (b"[" * 100_000, "is nested too deeply"),
    ],
    ids=brief,
)
def test_a_wrong_line_is_named(tmp_path: Path, line: bytes, message: str) -> None:
    (tmp_path / "train.jsonl").write_bytes(b'{"text":"x"}\n' + line)
    with pytest.raises(ValueError, match=message):
        documents(source("jsonl", tmp_path))


def test_a_line_without_end_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("data.sources.text.LARGEST_DOCUMENT", 1000)
    (tmp_path / "train.jsonl").write_bytes(b'{"text": "' + b"x" * 5000)
    with pytest.raises(ValueError, match="longer than 1,000 bytes"):
        documents(source("jsonl", tmp_path))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"text,id\nhello,1\n", "is not JSON: it begins with 'text,id'. .*source.pattern=.*CSV, source.kind=datasets"),
        (b"<html>", "is not JSON: it begins with '<html>'"),
        (b"[\n]\n", "is an empty JSON array"),
    ],
)
def test_a_file_that_is_no_json_is_named_beside_others(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "x"}\n')
    (tmp_path / "b.csv").write_bytes(content)
    with pytest.raises(ValueError, match=f"b.csv {message}"):
        documents(source("jsonl", tmp_path))


RECORDS = [{"id": number, "text": f"record {number} says é"} for number in range(60)]
TEXTS_ALONE = [record["text"] for record in RECORDS]
LINES = [json.dumps(record) for record in RECORDS]
PRETTY = "\n".join(json.dumps(record, indent=1) for record in RECORDS)
NO_LINES: dict[str, tuple[str | bytes, str]] = {
    "an array": (json.dumps(RECORDS), "is one JSON array instead of one object per line"),
    "an array in lines": (json.dumps(RECORDS, indent=2), "is one JSON array instead of one object per line"),
    "an array of strings": (json.dumps(TEXTS_ALONE), "is one JSON array"),
    "an array of lists": (json.dumps([[text] for text in TEXTS_ALONE]), "is one JSON array"),
    "commas between": (",\n".join(LINES), "has commas between its JSON objects"),
    "a separator before": ("".join(f"\x1e{line}\n" for line in LINES), "has a separator .0x1E. before"),
    "objects over lines": (PRETTY, "has a JSON object over several lines instead of one per line"),
    "one behind the other": ("".join(LINES), "is not JSON: Extra data"),
    "old Mac": ("\r".join(LINES), "is not JSON: Extra data"),
    "in a field": (json.dumps({"version": 1, "my data": RECORDS}), "make a line of each in 'my data'"),
    "strings": ("\n".join(map(json.dumps, TEXTS_ALONE)), "has no field 'text', because it is not an object"),
    "UTF-16": ("\n".join(LINES).encode("utf-16"), "is text in UTF-16LE with a byte order mark"),
    "UTF-16 without a byte order mark": ("\n".join(LINES).encode("utf-16-be"), "is text in UTF-16BE without a"),
}


@pytest.mark.skipif(not (shutil.which("jq") and shutil.which("iconv")), reason="there is no jq or no iconv")
@pytest.mark.parametrize("suffix", ["", ".gz"])
@pytest.mark.parametrize("case", NO_LINES)
def test_json_that_is_not_in_lines_is_named_and_the_advice_makes_lines(tmp_path: Path, case: str, suffix: str) -> None:
    content, message = NO_LINES[case]
    path = tmp_path / f"my data.json{suffix}"
    path.write_bytes(COMPRESS[suffix](content.encode() if isinstance(content, str) else content))
    with pytest.raises(ValueError, match=f"my data.json{suffix}.* {message}") as error:
        documents(source("jsonl", path))
    (command,) = re.findall("`(.*)`", str(error.value))
    subprocess.run(["bash", "-ec", command], cwd=tmp_path, check=True)
    found = documents(source("jsonl", tmp_path / "NEW"))
    assert sorted(text.decode() for each in found.values() for _, text in each) == sorted(TEXTS_ALONE)


@pytest.mark.parametrize(
    ("line", "text"),
    [
        (b'{"id": %s, "text": "a"}' % (b"7" * 5000), b"a"),
        (b'{"id": [-%s], "more": {"n": NaN, "i": -Infinity}, "text": "a"}' % (b"7" * 5000), b"a"),
        (b'\xef\xbb\xbf{"text": "a"}\r', b"a"),
        (b'{"text": "a", "text": "b"}', b"b"),
    ],
    ids=brief,
)
def test_all_that_is_json_is_read(tmp_path: Path, line: bytes, text: bytes) -> None:
    (tmp_path / "train.json").write_bytes(line)
    read = source("jsonl", tmp_path)
    assert [data for _, data in documents(read)["train"]] == [text]
    twice = {"lines have the field twice; the last value was used": 1}
    assert +read.remarks == (twice if text == b"b" else {})


@pytest.mark.parametrize("late", [0, 2000])
def test_json_in_another_encoding_is_refused(tmp_path: Path, late: int) -> None:
    content = b'{"text": "a"}\n' * late + '{"text": "né à côté"}\n'.encode("latin-1") * 9
    (tmp_path / "train.jsonl").write_bytes(content)
    with pytest.raises(ValueError, match="train.jsonl.* is not (UTF-8, as JSON must be|text in UTF-8: it is binary)"):
        documents(source("jsonl", tmp_path))


@pytest.mark.parametrize("kind", ["jsonl", "wikitext"])
def test_documents_that_differ_in_ends_of_lines_alone_are_in_one_split(tmp_path: Path, kind: str) -> None:
    texts = [b" \n = Title %d = \n \n a line \n of text %d \n" % (number, number) * 3 for number in range(200)]
    # In another order: files that are alike are read once.
    for name, end, step in (("a", b"\n", 1), ("b", b"\r\n", -1)):
        made = [text.replace(b"\n", end) for text in texts[::step]]
        lines = [json.dumps({"text": text.decode()}).encode() + b"\n" for text in made]
        (tmp_path / name).write_bytes(b"".join(lines if kind == "jsonl" else made))
    found = documents(source(kind, tmp_path, newlines="lf", valid_percent=20), 5000)
    for each in found.values():
        data = [text for _, text in each]
        assert all(b"\r" not in text for text in data) and all(data.count(text) % 2 == 0 for text in data)


WIKI = b" \n = First = \n \n text \n = = Section = = \n \n more \n \n = Second = \n \n end \n"


@given(st.lists(st.integers(1, 40), min_size=1))
def test_headings_are_found_wherever_blocks_end(sizes: list[int]) -> None:
    text = WIKI * 60
    wanted = [text[a:b] for a, b in _wanted(text)]

    def stream():  # type: ignore[no-untyped-def]
        at = number = 0
        while at < len(text):
            yield text[at : at + sizes[number % len(sizes)] * 7]
            at, number = at + sizes[number % len(sizes)] * 7, number + 1

    found: list[bytes] = []
    for begin, first, data in split_at_headings(stream(), 0):
        if first:
            assert begin == sum(map(len, found))
            found.append(data)
        else:
            found[-1] += data
    assert found == wanted


def _wanted(text: bytes) -> list[tuple[int, int]]:
    """Line by line, as a person would."""
    lines = text.splitlines(keepends=True)
    starts, at = [0], 0
    for number, line in enumerate(lines):
        title = line.startswith(b" = ") and line.endswith(b" = \n") and not line.startswith(b" = =")
        blank = 0 < number < len(lines) - 1 and not lines[number - 1].strip() and not lines[number + 1].strip()
        if title and blank and at - len(lines[number - 1]) > 0:
            starts.append(at - len(lines[number - 1]))
        at += len(line)
    return list(zip(starts, [*starts[1:], len(text)], strict=True))


def test_wikitext_with_ends_of_lines_as_in_windows_and_files_without_headings(tmp_path: Path) -> None:
    text = (WIKI * 30).replace(b"\n", b"\r\n")
    (tmp_path / "wiki.train.raw").write_bytes(text)
    read = source("wikitext", tmp_path)
    assert b"".join(data for _, data in documents(read, 500)["train"]) == text
    assert len(documents(read)["train"]) == 60 and not +read.remarks
    (tmp_path / "wiki.train.raw").write_bytes(b"= One article =\n\nand no other\n")
    read = source("wikitext", tmp_path)
    assert len(documents(read)["train"]) == 1 and not +read.remarks
    (tmp_path / "wiki.valid.raw.gz").write_bytes(gzip.compress(b"no heading\n" * 300))
    (tmp_path / "wiki.test.raw").write_bytes(b"none here\n" * 300)
    read = source("wikitext", tmp_path)
    documents(read, 500)
    assert +read.remarks == {"files have no heading such as ` = Title = `, so each is one document": 2}


def test_a_line_of_wikitext_as_long_as_the_file_is_never_held(tmp_path: Path) -> None:
    class Limited(io.BytesIO):
        def readline(self, size: int | None = -1, /) -> bytes:
            assert size is not None and 0 <= size <= 1 << 20
            return super().readline(size)

    text = b"x" * (5 << 20) + b"\nmore\n\n = Title = \n\ntext\n"
    (tmp_path / "wiki.train.raw").write_bytes(text)
    read = source("wikitext", tmp_path)
    assert isinstance(read, WikiTextSource)
    assert read.next_document(Limited(text), 100) == text.index(b"\n = Title")


@settings(max_examples=20)
@given(size=st.integers(30, 2000))
def test_wikitext_is_the_same_in_any_ranges(tmp_path: Path, size: int) -> None:
    (tmp_path / "wiki.train.raw").write_bytes(WIKI * 30)
    found = documents(source("wikitext", tmp_path), size)
    assert [data for _, data in found["train"]] == [(WIKI * 30)[a:b] for a, b in _wanted(WIKI * 30)]


def test_wikitext_without_names_is_split_by_document(tmp_path: Path) -> None:
    """By how each begins, so under any name, beside any others, and however large the blocks are."""
    texts = [b" \n = Title %d = \n \n" % number + b" a line of text \n" * (number % 200) for number in range(400)]
    (tmp_path / "dump.txt.xz").write_bytes(lzma.compress(b"".join(texts)))
    found = documents(source("wikitext", tmp_path, valid_percent=10))
    assert sum(len(each) for each in found.values()) == 400 and all(len(found[s]) > 10 for s in ("valid", "test"))
    (tmp_path / "dump.txt.xz").unlink()
    (tmp_path / "another.txt").write_bytes(b"".join(reversed(texts)))
    again = documents(source("wikitext", tmp_path, valid_percent=10), 5000)
    for split in ("train", "valid", "test"):
        assert {data for _, data in again[split]} == {data for _, data in found[split]}
