"""WebDataset tars of a user: texts and pictures by extension, and what is wrong with them."""

import gzip
import json
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import webdataset as wds

from data.corpus import Corpus
from tests.data.conftest import brief, picture, shard_source, tar_of
from tests.data.sources.test_audio import wav
from tests.data.sources.test_images import png
from tests.data.sources.test_text import COMPRESS


def tars(folder: Path, samples: list[dict[str, Any]], number: int = 3, encoder: bool = True) -> Path:
    """Written by webdataset itself, shared out over so many tars; `encoder` compresses what is called .gz."""
    folder.mkdir()
    for at in range(number):
        with wds.TarWriter(str(folder / f"part-{at}.tar"), encoder=encoder) as writer:
            for index in range(at, len(samples), number):
                writer.write({"__key__": f"deep/{index:06d}", **samples[index]})
    return folder


def sharded(folder: Path, kind: str = "words", **given: Any) -> Corpus:
    return shard_source(folder, folder.parent / "shards", "webdataset", kind, **given)


def texts(corpus: Corpus) -> list[bytes]:
    return sorted(text for split in ("train", "valid", "test") for text in corpus.iterate_originals(split))


SAMPLES = [{"txt": f"é {i}", "json": {"caption": f"caption {i}", "n": i}, "cls": i % 3} for i in range(90)]


def test_texts_by_extension_and_fields_of_json(tmp_path: Path) -> None:
    folder = tars(tmp_path / "mine", SAMPLES)
    corpus = sharded(folder)
    assert texts(corpus) == sorted(each["txt"].encode() for each in SAMPLES)
    assert corpus.split_counts("valid").documents and corpus.split_counts("test").documents
    assert "members .cls of samples were left out: 90" in corpus.manifest["splits"]["notes"]
    assert texts(sharded(folder, field="TXT")) == texts(corpus)
    assert texts(sharded(folder, field="json.caption")) == sorted(each["json"]["caption"].encode() for each in SAMPLES)
    assert texts(sharded(folder, field="cls")) == sorted(str(each["cls"]).encode() for each in SAMPLES)


def test_texts_are_not_cut_as_pictures(tmp_path: Path) -> None:
    folder = tars(tmp_path / "mine", SAMPLES)
    with pytest.raises(ValueError, match="source.kind=webdataset gives text, but chunker.kind=pixels cuts pictures"):
        sharded(folder, "pixels")


def test_pictures(tmp_path: Path) -> None:
    rasters = np.random.default_rng(0).integers(0, 256, (40, 4, 4, 3), np.uint8)
    samples = [{"png": png(raster), "cls": 1} for raster in rasters]
    corpus = sharded(tars(tmp_path / "mine", samples), "pixels")
    assert texts(corpus) == sorted(raster.tobytes() for raster in rasters)
    with pytest.raises(ValueError, match="source.kind=webdataset gives no text, .* Set chunker.kind=pixels"):
        sharded(tmp_path / "mine")
    assert corpus.chunks_per_raster("train") == 4
    assert corpus.manifest["form"] == {"height": 4, "width": 4, "channels": 3}


def test_names_of_tars_state_splits(folder: Path, tmp_path: Path) -> None:
    for split in ("train", "val", "test"):
        (tars(tmp_path / split, [{"txt": split}], 1) / "part-0.tar").rename(folder / f"{split}-000.tar")
    corpus = sharded(folder)
    found = [list(corpus.iterate_originals(split)) for split in ("train", "valid", "test")]
    assert found == [[b"train"], [b"val"], [b"test"]]


@pytest.mark.parametrize(
    ("samples", "given", "message"),
    [
        (
            SAMPLES,
            {"field": "json.title"},
            "its .json has no field 'title' .it has 'caption', 'n'.: .*field=json.FIELD",
        ),
        (SAMPLES, {"field": "jpg"}, "sample deep/000000 has no .jpg .it has .*.cls.*. Set source.field="),
        ([{"cls": 1}], {}, "has no .txt .it has .cls.. Set source.field= to the one to read"),
        ([{"txt": "a"}, {"cls": 1}], {}, "sample deep/000001 has no .txt"),
        ([{"json": b"{"}], {}, "its .json is not JSON"),
        ([{"png": b"II*\0"}], {}, "it is neither PNG nor JPEG, whatever its name: it is a TIFF. Convert it into PNG"),
        ([{"png": b"no picture"}], {}, "cannot be read as a picture: it is neither PNG nor JPEG, whatever its name$"),
    ],
)
def test_what_is_no_document(
    samples: list[dict[str, Any]], given: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        sharded(tars(tmp_path / "mine", samples, 1), **given)


@pytest.mark.parametrize("suffix", [".gz", ".xz", ".bz2", ".zst"])
def test_compressed_members_are_read_through_their_compression(suffix: str, tmp_path: Path) -> None:
    compress = COMPRESS[suffix]
    packed = [
        {f"txt{suffix}": compress(each["txt"].encode()), f"json{suffix}": compress(json.dumps(each["json"]).encode())}
        for each in SAMPLES
    ]
    folder = tars(tmp_path / "mine", packed, encoder=False)
    wanted = sorted(each["txt"].encode() for each in SAMPLES)
    assert texts(sharded(folder)) == texts(sharded(folder, field=f"txt{suffix}")) == wanted
    captions = sorted(each["json"]["caption"].encode() for each in SAMPLES)
    assert texts(sharded(folder, field=f"json{suffix}.caption")) == captions
    with pytest.raises(ValueError, match=f"no .txt .it has .json{suffix}, .txt{suffix}.. Set source.field="):
        sharded(folder, field="txt")


def test_members_that_were_compressed_twice_are_refused(tmp_path: Path) -> None:
    """The writer of webdataset compresses what is called .gz, also what is compressed already."""
    folder = tars(tmp_path / "mine", [{"txt.gz": gzip.compress(b"words")}])
    with pytest.raises(ValueError, match="txt.gz is compressed by gzip inside its compression.*: decompress it once"):
        sharded(folder)


def test_bombs_in_members_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One alone, and many that together are out of proportion to their tar."""
    monkeypatch.setattr("data.sources.webdataset.FREE", 1 << 20)
    bomb = gzip.compress(bytes(3 << 20) + b"end")
    for name, samples in {"one": [{"txt.gz": bomb}], "many": [{"txt.gz": gzip.compress(bytes(800_000))}] * 9}.items():
        with pytest.raises(ValueError, match="txt.gz expands to more than .* a decompression bomb.*source.expansion"):
            sharded(tars(tmp_path / name, samples, 1, encoder=False), expansion=1)


@pytest.mark.parametrize(
    ("extension", "content", "message"),
    [
        ("png.gz", gzip.compress(picture("PNG"), mtime=0), "its .png.gz is a PNG inside its compression, not text"),
        ("wav", wav(np.zeros(3, np.int16)), "its .wav is a WAV, not text"),
        (
            "bin",
            np.random.default_rng(0).bytes(999),
            "its .bin is binary, not text .*Name the member .* in source.field=",
        ),
        ("z", zlib.compress(b"a text " * 99), "its .z is binary, not text"),
        ("mp", b"\x82\xa4text\xc4\x03\0\1\2", "its .mp is binary, not text"),
        ("txt", "Привет, мир\n".encode("utf-16-le"), "its .txt is text in UTF-16LE without a byte .*, not UTF-8"),
        ("json", '{"text": "Привет"}'.encode("utf-32"), "its .json is text in UTF-32LE with a byte .*, not UTF-8"),
    ],
    ids=brief,
)
def test_members_that_are_no_text(extension: str, content: bytes, message: str, tmp_path: Path) -> None:
    folder = tars(tmp_path / "mine", [{extension: content}], 1, encoder=False)
    with pytest.raises(ValueError, match=message):
        sharded(folder, field="json.text" if extension == "json" else extension)


def test_odd_members_are_said(tmp_path: Path) -> None:
    samples = [{"txt": b"a\0b %d" % number} for number in range(50)] + [{"txt": "né".encode("latin-1")}]
    notes = sharded(tars(tmp_path / "mine", samples)).manifest["splits"]["notes"]
    assert "members .txt are not text (NUL bytes); the bytes are read as they are: 50" in notes
    assert any("members .txt are not text in UTF-8: it is binary" in note and note.endswith(": 1") for note in notes)


def test_a_member_twice(folder: Path) -> None:
    (folder / "a.tar").write_bytes(tar_of(("0.txt", b"one"), ("0.txt", b"two")))
    with pytest.raises(ValueError, match="two members have the name 0.txt"):
        sharded(folder)


def test_the_first_sample_decides_for_all_tars(tmp_path: Path) -> None:
    """Also for those that another worker reads, which would else decide anew, and mix texts with pictures."""
    folder = tars(tmp_path / "mine", [{"txt": "long " * 300_000}, {"png": picture("PNG")}], 2)
    with pytest.raises(ValueError, match="part-1.tar: sample deep/000001 has no .txt .it has .png"):
        sharded(folder, "fixed", megabytes=1)
