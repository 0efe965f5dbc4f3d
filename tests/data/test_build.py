import hashlib
import json
import lzma
import random
import re
import shutil
import tarfile
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from data import build, shards
from data.build import Plan, finish_corpus, make_plan, shard
from data.chunkers import ONE, Chunker, WordChunker
from data.corpora import Corpora
from data.corpus import Corpus
from data.filesystem import FolderLostError
from data.options import CHUNKERS, ChunkerOptions, ShardOptions, SourceOptions
from data.parts import Part, write_part
from data.sources import files
from data.sources.source import Input, Piece, Source
from pipeline.config import ConfigError
from pipeline.config import load_options as load_config
from pipeline.run.sharding import check_source
from tests.conftest import mostly_nightly
from tests.data.conftest import add_package, shard_source
from tests.data.test_repair import child, contents

sharded = partial(shard_source, megabytes=1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three megabytes of text in files named by split."""
    generator = np.random.default_rng(0)
    place = tmp_path_factory.mktemp("source")
    for number in range(5):
        words = generator.integers(97, 123, 700_000).astype(np.uint8)
        words[generator.random(700_000) < 0.2] = ord(" ")
        (place / f"train-{number}.txt").write_bytes(words.tobytes())
    (place / "valid.txt").write_bytes(b"some text\n" * 100)
    (place / "test.txt").write_bytes("né\r\n\x00".encode() * 100)
    return place


@pytest.fixture(scope="module")
def whole(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    """Its corpus, whose manifest has the place of the folder as seen from there; tests leave it as it is."""
    return sharded(folder, tmp_path_factory.mktemp("whole") / "shards")


def plan(folder: Path, into: Path) -> Plan:
    """The work of `sharded(folder, into)`, of which nothing is done."""
    source = SourceOptions(kind="text", path=str(folder))
    work = make_plan(Corpora(source, ChunkerOptions(), ShardOptions(megabytes=1), into))
    (work.folder / "parts").mkdir(parents=True)
    return work


def test_round_trip_manifest_and_any_number_of_workers(folder: Path, whole: Corpus, tmp_path: Path) -> None:
    one, two = whole, sharded(folder, tmp_path / "shards", workers=2)
    assert contents(one.folder) == contents(two.folder)
    for split in ("train", "valid", "test"):
        files = sorted(folder.glob(f"{split}*"))
        assert b"".join(one.iterate_originals(split)) == b"".join(path.read_bytes() for path in files)
        assert one.split_counts(split).documents == len(files)
    assert len(one.shards_of("train")) > 2
    with tarfile.open(one.folder / one.shards_of("test")[0].file) as tar:
        assert {(member.mtime, member.uid, member.uname) for member in tar} == {(0, 0, "")}
    for entry in json.loads((one.folder / "manifest.json").read_text())["shards"]:
        content = (one.folder / entry["file"]).read_bytes()
        assert len(content) == entry["file_bytes"] and hashlib.sha256(content).hexdigest() == entry["sha256"]


def test_keys_are_unique_over_a_corpus(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "_SLACK", -(1 << 19))  # so that a part has several shards
    monkeypatch.setattr(shards, "SAMPLE_BYTES", 1 << 16)
    monkeypatch.setattr(files, "BLOCK", 1 << 15)
    corpus = sharded(folder, tmp_path / "shards")
    keys = []
    for entry in corpus.shards:
        with tarfile.open(corpus.folder / entry.file) as tar:
            keys += [member.name.removesuffix(".sample.json") for member in tar if member.name.endswith(".json")]
    assert len(corpus.shards_of("train")) > len({key.split("-")[1] for key in keys}) > 1
    assert len(keys) == len(set(keys)) == sum(entry.samples for entry in corpus.shards)
    assert keys[:2] == ["train-00000-000000", "train-00000-000001"]


@pytest.mark.parametrize(
    ("kind", "name", "needed"),
    [("audio", "a.wav", "Set chunker.kind=fixed, and chunker.k="), ("images", "a.png", "Set chunker.kind=pixels")],
)
def test_what_is_no_text_says_which_chunker_it_needs(kind: str, name: str, needed: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(b"looked at by nobody")
    with pytest.raises(ValueError, match=needed):
        check_source(load_config("quickstart", [f"source.kind={kind}", f"source.path={tmp_path}"]))
    with pytest.raises(ValueError, match=needed):
        sharded(tmp_path, tmp_path / "shards", kind=kind)
    assert not (tmp_path / "shards").exists()


@pytest.mark.parametrize(
    ("kind", "given"),
    [*((kind, "text") for kind in ("text", "jsonl", "wikitext", "enwik8", "datasets")), ("audio", "sound")],
)
def test_pixels_are_of_pictures_alone(kind: str, given: str, tmp_path: Path) -> None:
    words = [f"source.kind={kind}", f"source.path={tmp_path}", "chunker.kind=pixels"]
    said = f"source.kind={kind} gives {given}, but chunker.kind=pixels cuts pictures. Set "
    with pytest.raises(ValueError, match=said):
        check_source(load_config("quickstart", words))


RUSSIAN = ["достопримечательность", "слово", "и"]


@pytest.mark.parametrize(
    ("words", "said", "width"),
    [
        (RUSSIAN, r"33 % of the words .* 1.9 bytes per character. chunker.k=44 would", 1.9),
        (["中文字符，" * 9], "chunks are pieces of 4 characters. A larger", 3.0),
        (["a", "plain", "text"], None, 1.0),
    ],
)
def test_k_is_advised_where_words_are_longer(
    words: list[str], said: str | None, width: float, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    joint = "" if len(words) == 1 else " "
    for length, split in enumerate(("train", "valid", "test"), 300):
        (tmp_path / f"{split}.txt").write_text(joint.join(words * length))
    caplog.set_level("INFO", "data")
    for _ in range(2):  # says it again where it finds them finished
        caplog.clear()
        found = sharded(tmp_path, tmp_path / "shards").manifest["words"]
        assert ("of the words are longer" in caplog.text) == bool(said)
    assert found["bytes_per_character"] == pytest.approx(width, abs=0.1)
    assert ("advice" in found) == bool(said) and (not said or re.search(said, found["advice"]))


def test_an_interrupted_run_redoes_only_what_is_missing(folder: Path, whole: Corpus, tmp_path: Path) -> None:
    work = plan(folder, tmp_path / "shards")
    write_part(work.parts[0])
    made = work.parts[0].folder / "test-00000.tar"
    before = made.stat().st_mtime_ns
    (work.parts[1].folder).mkdir()
    (work.parts[1].folder / "train-00000.tar").write_bytes(b"half of a shard")
    corpus = sharded(folder, tmp_path / "shards")
    assert contents(corpus.folder) == contents(whole.folder)
    assert (corpus.folder / "test-00000.tar").stat().st_mtime_ns == before


def test_another_source_setting_or_version_of_a_chunker_is_another_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, shards_dir = tmp_path / "train.txt", tmp_path / "shards"
    source.write_bytes(b"some text\n")
    made = [sharded(source, shards_dir)]
    made += [sharded(source, shards_dir, chunker=ChunkerOptions(k=8))]
    source.write_bytes(b"changed")
    made += [sharded(source, shards_dir)]
    monkeypatch.setattr(WordChunker, "version", 7)
    made += [sharded(source, shards_dir)]
    assert len({corpus.folder for corpus in made}) == 4 and made[-1].build_chunker().version == 7


@pytest.mark.parametrize("when", mostly_nightly(["one moved", "all moved"], "one moved"))
def test_an_interruption_at_the_very_end_loses_nothing(folder: Path, whole: Corpus, tmp_path: Path, when: str) -> None:
    work = plan(folder, tmp_path / "shards")
    for part in work.parts:
        write_part(part)
    moved = finish_corpus(work)
    (moved.folder / "manifest.json").unlink()  # as if the manifest had not been written yet, and parts not been removed
    (work.folder / "parts").mkdir()
    for part in work.parts:
        write_part(part)
    if when == "one moved":
        (moved.folder / "train-00001.tar").unlink()
    else:
        for part in work.parts:
            for path in part.folder.glob("*.tar"):
                path.unlink()
    assert contents(sharded(folder, tmp_path / "shards").folder) == contents(whole.folder)


def test_what_a_run_left_that_was_killed_at_its_very_end_is_removed(folder: Path, whole: Corpus) -> None:
    before = contents(whole.folder)
    (whole.folder / "parts" / "00000").mkdir(parents=True)
    assert sharded(folder, whole.folder.parent).folder == whole.folder and contents(whole.folder) == before


def test_a_killed_run_continues_and_leaves_no_process(
    folder: Path, whole: Corpus, tmp_path: Path, chance: random.Random
) -> None:
    for _ in range(4):
        with child(tmp_path, "text", str(folder)) as started:
            time.sleep(0.25 + 0.35 * chance.random())
            children = psutil.Process(started.pid).children(recursive=True)
            started.kill()
        assert not psutil.wait_procs(children, timeout=120)[1]
    assert contents(sharded(folder, tmp_path / "shards", workers=2).folder) == contents(whole.folder)


@pytest.mark.parametrize("kind", mostly_nightly(["words", "fixed", "sentences", "entropy"], "words"))
@pytest.mark.parametrize("suffix", ["", ".xz"])
def test_a_document_larger_than_a_shard(tmp_path: Path, kind: str, suffix: str) -> None:
    text = np.random.default_rng(1).choice(np.frombuffer(b"abc de.\n\xc3\xa9", np.uint8), 3_500_001).tobytes()
    path = tmp_path / f"train.txt{suffix}"
    path.write_bytes(lzma.compress(text, preset=0) if suffix else text)
    corpus = sharded(path, tmp_path / "shards", chunker=ChunkerOptions(kind=kind, k=7))
    assert len(corpus.shards_of("train")) >= 2 and corpus.split_counts("train").documents == 1
    ((tokens, lengths),) = corpus.iterate_documents("train")
    assert corpus.build_chunker().join(tokens, lengths) == b"".join(corpus.iterate_original_blocks("train")) == text
    if kind in ("words", "fixed") and suffix:
        assert np.array_equal(lengths, corpus.build_chunker().split(text)[1])
    if kind == "fixed":
        assert (lengths[:-1] == 7).all()
    assert corpus.manifest["statistics"]["train"]["tokens_per_document"]["longest"] > 1 << 20


class Nibbles(Chunker):
    """A chunker of a user's own, whose tokens are not bytes: a byte is two tokens of four bits."""

    vocabulary, fixed = 16, False

    def begins(self, text: bytes, starts: np.ndarray) -> np.ndarray:
        raise NotImplementedError

    def split(self, text: bytes, starts: np.ndarray = ONE) -> tuple[np.ndarray, np.ndarray]:
        data = np.frombuffer(text, np.uint8)
        return np.stack([data >> 4, data & 15], 1).ravel(), np.full(len(data), 2, np.uint8)

    def join(self, tokens: np.ndarray, lengths: np.ndarray) -> bytes:
        return (tokens[::2] << 4 | tokens[1::2]).tobytes()


WRONG_BEGINS: dict[str, tuple[Callable[[np.ndarray], object], str]] = {
    "places": (np.flatnonzero, r"begins returned int64 \(\d+,\), expected bool \(\d+,\)"),
    "too few": (lambda mask: mask[:-1], r"begins returned bool \(\d+,\), expected bool"),
    "too many": (lambda mask: np.append(mask, True), r"begins returned bool \(\d+,\), expected bool"),
    "a column": (lambda mask: mask[:, None], r"begins returned bool \(\d+, 1\), expected bool"),
    "floats": (lambda mask: mask * 1.0, "begins returned float64"),
    "a list": (lambda mask: mask.tolist(), r"begins returned \[.*, expected bool"),
    "nothing": (lambda mask: None, "begins returned None, expected bool"),
}


class SevenBits(WordChunker):
    vocabulary = 128


@pytest.mark.parametrize("letter", ["e", "é"])
def test_a_token_beyond_the_vocabulary_of_a_chunker_is_named(
    letter: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(3):
        (tmp_path / f"{number}.txt").write_text(f"caf{letter} {number} " * 40)
    monkeypatch.setitem(CHUNKERS, "words", f"{__name__}:SevenBits")
    refusal = pytest.raises(ValueError, match="words: a token is 195, but vocabulary is 128")
    with nullcontext() if letter == "e" else refusal:
        shard_source(tmp_path, tmp_path / "shards")


class OfEight(WordChunker):
    def __init__(self, options: ChunkerOptions, fitted: dict[str, Any] | None = None) -> None:
        super().__init__(replace(options, k=8), fitted)


def test_a_corpus_says_that_its_chunker_does_not_read_k(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "one.txt").write_text("the words of a text " * 40)
    monkeypatch.setitem(CHUNKERS, "words", f"{__name__}:OfEight")
    notes = shard_source(tmp_path, tmp_path / "shards").manifest["splits"]["notes"]
    assert "chunker.k=12 has no effect: chunks of chunker.kind=words have at most 8 tokens" in notes


WRONG_SPLIT: dict[str, tuple[Callable[[np.ndarray, np.ndarray], object], str]] = {
    "a lost chunk": (lambda tokens, lengths: (tokens, lengths[:-1]), "expected 1 to 12 and a sum of"),
    "an empty chunk": (
        lambda tokens, lengths: (tokens, np.append(lengths, np.uint8(0))),
        "lengths from 0 to .*1 to 12",
    ),
    "long chunks": (lambda tokens, lengths: (tokens[:13], np.array([13], np.uint8)), "lengths from 13 to 13"),
    "wide lengths": (lambda tokens, lengths: (tokens, lengths.astype(int)), "and int64 .*expected .* both uint8"),
    "wide tokens": (lambda tokens, lengths: (tokens.astype(int), lengths), "split returned int64 .* both uint8"),
    "other bytes": (lambda tokens, lengths: (tokens ^ 1, lengths), "joined are not the document"),
}


@pytest.mark.parametrize(
    ("method", "case"), [*(("begins", case) for case in WRONG_BEGINS), *(("split", case) for case in WRONG_SPLIT)]
)
def test_a_chunker_of_ones_own_that_is_wrong_is_named(
    method: str, case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing else would tell: chunks in wrong places join to the same text."""
    for number in range(3):
        (tmp_path / f"{number}.txt").write_text("one two three, and four. " * 40)
    spoil, message = (WRONG_BEGINS if method == "begins" else WRONG_SPLIT)[case]  # type: ignore[index]
    right: Callable[..., Any] = getattr(WordChunker, method)

    def wrong(self: Chunker, text: bytes, starts: np.ndarray = ONE) -> object:
        found = right(self, text, starts)
        return spoil(*found) if method == "split" else spoil(found)  # type: ignore[operator]

    monkeypatch.setattr(WordChunker, method, wrong)
    with pytest.raises(ValueError, match=f"chunker.kind=words: .*{message}"):
        shard_source(tmp_path, tmp_path / "shards")


class Numbers(Source):
    """A source of a user's own."""

    files = []

    def inputs(self, size: int, align: int) -> Iterator[Input]:
        for number in range(0, 300, 10):
            yield Input(str(number), "", 100_000, start=number, stop=number + 10)

    def read(self, item: Input) -> Iterator[Piece]:
        for number in range(item.start, item.stop or 0):
            name = f"number {number}"
            yield Piece(name, self.split_of(name), b"%d " % number * 1000)


def test_sources_and_chunkers_of_others_are_entry_points(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    points = f"[haed.sources]\nnumbers = {__name__}:Numbers\n[haed.chunkers]\nnibbles = {__name__}:Nibbles\n"
    add_package(tmp_path, "plug_in", points)
    monkeypatch.syspath_prepend(str(tmp_path))
    options = load_config(None, ["source.kind=numbers", "chunker.kind=nibbles", "shard.megabytes=1"])
    corpus = shard(options.source, options.chunker, options.shard, tmp_path / "shards")
    found = [text for split in ("train", "valid", "test") for text in corpus.iterate_originals(split)]
    assert sorted(found) == sorted(b"%d " % number * 1000 for number in range(300))
    assert corpus.split_counts("train").tokens == 2 * corpus.split_counts("train").source_bytes
    with pytest.raises(ConfigError, match="kind=number: expected one of .*stdlib.*numbers"):
        load_config(None, ["source.kind=number"])


def test_statistics_of_the_manifest(tmp_path: Path) -> None:
    (tmp_path / "train-a.txt").write_bytes(b"one two two two\n")
    (tmp_path / "train-b.txt").write_bytes(b"two " * 1000)
    found = sharded(tmp_path, tmp_path / "shards").manifest["statistics"]["train"]
    assert found["distinct_chunks"] == 3 and found["distinct_chunks_exact"]
    assert found["chunk_lengths"] == [0, 0, 0, 0, 1004] and found["rank_frequency"] == [[1, 1002], [2, 1], [3, 1]]
    assert found["tokens_per_document"] == {"shortest": 16, "longest": 4000, "documents_from": {"16": 1, "2048": 1}}


@pytest.mark.parametrize("what", mostly_nightly(["the corpus", "its parts", "its lock", "all corpora"], "its parts"))
def test_a_corpus_that_is_removed_while_it_is_made_does_not_come_back_in_part(
    what: str, folder: Path, tmp_path: Path
) -> None:
    """Another process could take the lock, and make it too."""
    shards_dir = tmp_path / "shards"

    def removing(write: Callable[[Part], None], parts: tuple[Part, ...]) -> None:
        write(parts[0])
        corpus = parts[0].folder.parent.parent
        if what == "its lock":
            (shards_dir / f".{corpus.name}.lock").unlink()
        else:
            shutil.rmtree({"the corpus": corpus, "its parts": corpus / "parts", "all corpora": shards_dir}[what])
        for part in parts[1:]:
            write(part)

    with pytest.raises(FolderLostError):
        sharded(folder, shards_dir, mapper=removing)
    assert not list(shards_dir.glob("*/manifest.json")) and shards_dir.exists() == (what != "all corpora")
    assert sharded(folder, shards_dir).split_counts("train").documents == 5


def test_shards_are_not_made_among_the_texts(tmp_path: Path) -> None:
    (tmp_path / "train.txt").write_bytes(b"a text\n")
    with pytest.raises(ValueError, match="shards_dir=.* is the folder of the source itself. Choose another"):
        shard_source(tmp_path, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["train.txt"]
