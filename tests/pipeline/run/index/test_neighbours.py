"""Neighbours: cosines by brute force, what a query may be, and pictures of chunks of pixels."""

import csv
import io
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow.parquet as parquet
import pytest
import torch
from PIL import Image

from data.filesystem import read_json
from haed.chunk.packing import chunk_keys
from pipeline.cli import main
from pipeline.config import Options
from pipeline.console import escape_control_characters
from pipeline.reporting import plots
from pipeline.reporting.report import write_report
from pipeline.run.index.build import build_index
from pipeline.run.index.queries import display_chunk
from pipeline.run.opened import open_run
from pipeline.run.run_directory import RunFolder
from pipeline.training.stages import train
from tests.conftest import find_neighbours
from tests.pipeline.conftest import CommandLine


@pytest.mark.parametrize("encoder", ["linear", "transformer"])
def test_neighbours_are_those_of_the_highest_cosine(options: Options, encoder: str) -> None:
    options.model.encoder.kind = encoder  # type: ignore[assignment]
    options.model.encoder.rows = 50 if encoder == "linear" else 0
    train(options)
    build_index(options)
    folder = RunFolder.from_options(options)
    found = find_neighbours(options, count=5)
    assert len(found) == 6 and len({item.query for item in found}) == 6
    run, table = open_run(folder.path), parquet.read_table(folder.path / "index" / "chunks" / "table.parquet")
    rows = [row[:size] for row, size in zip(*(table[name].to_pylist() for name in ("tokens", "length")), strict=True)]
    numbers = table["count"].to_pylist()
    vectors = run.embed(rows).astype(np.float64)
    np.testing.assert_allclose(table["norm"], np.linalg.norm(vectors, axis=1), rtol=1e-5)
    meta = read_json(folder.path / "index" / "chunks" / "meta.json")
    known = np.array(numbers) >= meta["floor"]
    mean, noted = vectors[known].mean(0), []

    def row_of(chunk: str) -> object:
        """The row by PyTorch's hash of many chunks, which are the same 2,000 times; each its own without a table."""
        data = bytes.fromhex(chunk)
        tokens = torch.tensor([[*data, *[0] * (run.chunker.k - len(data))]]).expand(2000, -1)
        return int(chunk_keys(tokens, torch.full((2000,), len(data)))[0]) % 50 if encoder == "linear" else chunk

    assert meta["metric"] == "centred" and np.allclose(meta["mean"], mean, atol=1e-6)
    vectors -= mean
    np.testing.assert_allclose(table["from_mean"], np.linalg.norm(vectors, axis=1), rtol=1e-4)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    counts = [numbers[rows.index(bytes.fromhex(item.hex))] for item in found]
    assert sorted(counts, reverse=True) == counts and counts[-1] > 1
    words = [count for row, count in zip(rows, numbers, strict=True) if any(map(str.isalnum, row.decode()))]
    assert counts[0] == max(words)  # though blanks are more frequent
    for item in [*found, *find_neighbours(options, ["zq"], 5)]:
        query = bytes.fromhex(item.hex)
        vector = run.embed([query]).astype(np.float64)[0] - mean
        scores = vectors @ vector / np.linalg.norm(vector)
        if query in rows:
            scores[rows.index(query)] = -2
        best = np.sort(scores)[: -len(item.neighbours) - 1 : -1]
        np.testing.assert_allclose([n.score for n in item.neighbours], best, atol=1e-5)
        assert len(item.neighbours) == 5
        alike = [near.hex for near in item.neighbours if row_of(near.hex) == row_of(item.hex)]
        said = item.collisions or ""
        assert bool(alike) == ("shares its row of the encoder's table" in said) and (alike == [] or encoder == "linear")
        assert all(escape_control_characters(display_chunk(bytes.fromhex(each), "words")) in said for each in alike[:3])
        noted.append(bool(alike))
    assert any(noted) == (encoder == "linear")
    assert plots.draw_neighbours(find_neighbours(options, ["#if"])) is None  # text, though it looks like a colour


def test_an_index_of_the_most_frequent_chunks_says_how_many_it_leaves_out(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = RunFolder(run)
    tables = []
    for most in ("null", "20"):
        assert main(["index", str(folder.path), f"index.max_chunks={most}"]) == 0
        tables.append(parquet.read_table(folder.path / "index" / "chunks" / "table.parquet"))
    rest = len(tables[0]) - 20
    every, few = (table.drop_columns("from_mean") for table in tables)  # means of others are others
    assert rest > 100 and few.equals(every.slice(0, 20))
    meta = read_json(folder.path / "index" / "chunks" / "meta.json")
    assert (meta["chunks"], meta["left_out"]) == (20, rest)
    shown = capsys.readouterr()
    assert f"20 chunks ({rest:,} rarer chunks left out by index.max_chunks)" in shown.out
    assert f": {rest:,} of the rarest" in shown.err
    assert len(find_neighbours(folder.load_options(), ["zq"], 5)[0].neighbours) == 5  # what is not in it is embedded


def test_rare_chunks_are_no_answers_if_enough_are_frequent(
    options: Options, monkeypatch: pytest.MonkeyPatch, haed: CommandLine
) -> None:
    train(options)
    where, found = str(RunFolder.from_options(options).path), {}
    for enough, asked in ((5, []), (5, ["--min-count", "1"]), (10**6, [])):
        monkeypatch.setattr("pipeline.run.index.chunk_index.ENOUGH", enough)
        assert ("answers occur at least 10 times" in haed.output("index", where)) == (enough == 5)
        said, _, *lines = haed.output("neighbours", where, "zq", "--count", "9", *asked).splitlines()
        counts = [int(line.split()[1]) for line in lines]
        assert ("that occur at least 10 times" in said) == (min(counts) >= 10) == (enough == 5 and not asked)
        found[enough, bool(asked)] = counts
    assert found[5, True] == found[10**6, False] and len(found[5, False]) == 9


def test_chunks_of_pixels_are_asked_for_by_colour_and_drawn(pictures: Options, haed: CommandLine) -> None:
    build_index(pictures)
    folder = RunFolder.from_options(pictures)
    (item,) = find_neighbours(pictures, ["#3c3c3c"], 2)  # a chunk of the corpus: all its values are 60
    assert item.hex == "3c" * 12 and item.query == ",".join(["#3c3c3c"] * 4) and len(item.neighbours) == 2
    assert {n.hex[:2] for n in item.neighbours} < {"00", "78", "b4"}
    assert find_neighbours(pictures, [item.hex], 2) == [item]
    assert "neighbours.png" in haed.output("neighbours", folder.path)  # the four chunks that there are
    drawn = np.asarray(Image.open(io.BytesIO((folder.path / "neighbours.png").read_bytes())).convert("RGB"))
    assert all((drawn == value).all(-1).any() for value in (0, 60, 120, 180))
    said = haed.error("neighbours", folder.path, "def ")
    assert "Give a colour such as #4080c0, or all 12 values of a chunk in hexadecimal" in said
    page = Path(write_report(pictures)).read_text()  # whose queries are meant for text
    assert 'fill="#3c3c3c"' in page and "def " not in page.split("Configuration and versions")[0]


@pytest.mark.parametrize("metric", ["centred", "cosine"])
def test_sums_and_predictions_are_asked_for_as_vectors(metric: str, run: Path, haed: CommandLine) -> None:
    haed.output("index", run, f"index.metric={metric}")
    opened = open_run(run)
    index = opened.probe.index
    every = [index.chunk_at(row) for row in range(len(index))]
    embedded = opened.embed(every).astype(np.float64)
    mean = embedded[: index.count_known()].mean(0) if metric == "centred" else np.zeros(embedded.shape[1])

    def units(vectors: np.ndarray) -> np.ndarray:
        return vectors / np.linalg.norm(vectors, axis=-1, keepdims=True)

    def best(vector: np.ndarray, without: list[str], mean: np.ndarray = mean) -> list[float]:
        kept = [row for row, chunk in enumerate(every) if chunk.decode(errors="replace") not in without]
        return sorted(units(embedded - mean)[kept] @ units(vector), reverse=True)[:4]

    def unit(text: str) -> np.ndarray:
        (found,) = opened.embed([text.encode()]).astype(np.float64)
        return units(found - mean)

    ask = ["--count", "4", "--min-count", "1"]
    words = ["for ", "zq", "import ", "in "]
    (item,) = haed.json("neighbours", run, "--like", words[0], "--minus", words[1], "--plus", words[2], *ask)
    assert item["query"] == "for  - zq + import " and not {n["text"] for n in item["neighbours"]} & set(words[:3])
    summed = unit("for ") - unit("zq") + unit("import ")
    np.testing.assert_allclose([n["score"] for n in item["neighbours"]], best(summed, words[:3]), atol=1e-5)
    assert opened.probe.analogy("for ", minus=["zq"], plus="import ", count=4, min_count=1)[0].hex == item["hex"]

    with pytest.raises(ValueError, match="nothing is left to look for"):
        opened.probe.analogy("for ", minus="for ")

    (item,) = haed.json("neighbours", run, "--after", "import ", *ask)
    expected = opened.expected(b"import ").astype(np.float64)
    np.testing.assert_allclose([n["score"] for n in item["neighbours"]], best(expected, [], 0 * mean), atol=1e-5)
    asked = ["neighbours", str(run), "--after", "import "]  # with the mean, whatever the metric of chunks
    told = haed.output(*asked).partition("\n")[0]
    # Random pairs are of chunks with each other.
    assert told.startswith("cosine, count, chunk") and "random pairs have" not in told
    assert haed.output(*asked[:2], "for ").startswith("centred cosine," if metric == "centred" else "cosine,")
    assert "`--minus` needs" in haed.error("neighbours", run, "--minus", "for ")


def test_passages_have_no_centred_cosine(run: Path, haed: CommandLine) -> None:
    said = haed.error("index", run, "--space", "contexts", "index.metric=centred", status=2)
    assert "index.metric=centred applies to chunks, not to contexts" in said


def test_queries_from_files_and_answers_as_values(
    run: Path, tmp_path: Path, haed: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "queries").write_bytes(b"def \n\nzq\n\xff\xfe\n")
    said = haed.output("neighbours", run, "return ", "--file", tmp_path / "queries", "--csv", "--count", "2")
    rows = list(csv.DictReader(said.splitlines()))
    asked = ["return ", "def ", "zq", "\\xff\\xfe"]
    assert [row["query"] for row in rows] == [query for query in asked for _ in range(2)]
    assert list(rows[0]) == ["query", "text", "hex", "score", "count"]
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"def \n")))
    (item,) = haed.json("neighbours", run, "--file", "-", "--count", "1")
    assert set(item) - {"collisions"} == {"query", "hex", "neighbours"}
    assert set(item["neighbours"][0]) == {"text", "hex", "score", "count"}
    found = open_run(run).probe.neighbours("def ", count=2)
    assert "cosine, count, chunk" in str(found).splitlines()[0] and len(found.rows()) == 2 and repr(found) == str(found)
    pandas = pytest.importorskip("pandas")
    assert found.to_frame().equals(pandas.DataFrame(found.rows()))


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        ([""], 1, "the query '' is empty"),
        (["def ", "--count", "0"], 2, "--count 0: must be at least 1"),
        (["def ", "--min-count", "0"], 2, "--min-count 0: must be at least 1"),
        (["def ", "--min-count", "99999"], 1, "no chunk of the index occurs 99,999 times: the most frequent occurs"),
        (["--file", "nowhere"], 1, "--file nowhere: no such file"),
        (["--file", "."], 1, "--file .: a folder, not a file"),
        (["--file", "/dev/null"], 2, "the file has no query"),
        (["--file", sys.executable], 2, "so the file is not text"),
        (["--context-file", sys.executable], 2, "so the file is not text"),
        (["--context-file", "nowhere"], 1, "--context-file nowhere: no such file"),
        (["--context", "x"], 1, "Run `haed index"),
        (["--context", "x", "--min-count", "2"], 2, "`--min-count` applies to chunks"),
        (["x", "--after", "y"], 2, "only one kind of query"),
        (["x", "--like", "y"], 2, "only one kind of query"),
        (["x", "--csv", "--json"], 2, "exclude each other"),
    ],
)
def test_what_is_no_question(arguments: list[str], status: int, message: str, run: Path, haed: CommandLine) -> None:
    (line,) = haed.error("neighbours", run, *arguments, status=status).splitlines()
    assert message in line and line.startswith("error: ")


def test_a_chunk_of_the_corpus_is_looked_up_without_torch(run: Path) -> None:
    code = (
        "import sys; from pipeline.cli import main\n"
        f"assert main(['neighbours', {str(run)!r}, 'def ', '--count', '2']) == 0\n"
        "assert not {'torch', 'pandas', 'matplotlib'} & set(sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_a_chunk_may_be_typed_as_it_is_shown(run: Path, caplog: pytest.LogCaptureFixture) -> None:
    """`for␣` is what an answer has for `for `."""
    options = RunFolder(run).load_options()
    with caplog.at_level("INFO"):
        assert find_neighbours(options, ["for␣"], 3) == find_neighbours(options, ["for "], 3)
        assert "for␣ is read as 'for '" in caplog.text
        assert find_neighbours(options, ["zq␣"], 3) == find_neighbours(options, ["zq "], 3)
        find_neighbours(options, ["for"], 3)
    for line in ("zq␣ is read as 'zq '", "for is not in the index, so its own embedding is used; the index has for␣"):
        assert line in caplog.text


def test_fewer_neighbours_than_were_asked_for_are_all_that_there_are_and_this_is_said(
    run: Path, haed: CommandLine, caplog: pytest.LogCaptureFixture
) -> None:
    """A query of the index is no answer to itself, so of N chunks there are N - 1; what the index has not gets all N."""
    probe = open_run(run).probe
    every = len(probe.index)
    ask = {"count": every, "min_count": 1}
    own, strange = probe.neighbours("def ", "zqzq", **ask)
    assert (len(own.neighbours), len(strange.neighbours)) == (every - 1, every) and strange.note is None
    assert own.note == f"only {every - 1:,} of {every:,} neighbours: the index has {every:,} chunks, without the query"
    assert own.note in caplog.messages
    (summed,) = probe.analogy("for ", minus="in ", plus="if ", **ask)
    assert len(summed.neighbours) == every - 3 and summed.note
    (after,) = probe.expected("import ", **ask)
    assert len(after.neighbours) == every and after.note is None
    (most,) = probe.neighbours("zqzq", count=10**12, min_count=1)
    assert len(most.neighbours) == every and most.note
    caplog.clear()
    assert probe.neighbours("def ", count=every - 1, min_count=1)[0].note is None
    assert all("shares its row of the encoder's table" in message for message in caplog.messages)
    (few,) = probe.neighbours("zqzq", count=every, min_count=20)
    assert 0 < len(few.neighbours) == probe.index.count_known(20) and few.note
    assert "that occur at least 20 times" in few.note and "a minimum count of 1 searches all" in few.note
    for asked in ([], ["--json"], ["--csv"]):
        said = haed.error("neighbours", run, "def ", "--count", every, "--min-count", "1", *asked, status=0)
        assert f"{every - 1:,} of {every:,} neighbours" in said
    first, second = haed.json("neighbours", run, "def ", "zqzq", "--count", every, "--min-count", "1")
    assert first["note"] == own.note and "note" not in second


def test_an_approximate_index_that_proposes_too_few_gives_way_to_exact_search() -> None:
    from pipeline.run.index.faiss_search import Vectors

    class Few:
        d, nlist = 8, 4

        def search(self, queries: np.ndarray, count: int, params: object) -> tuple[np.ndarray, np.ndarray]:
            return np.zeros((len(queries), count), np.float32), np.full((len(queries), count), -1)

    vectors = np.random.default_rng(0).standard_normal((200, 8)).astype(np.float32)
    found = Vectors(vectors, "ip", "hnsw", Few(), 4).find_nearest(vectors[:3], 10)
    exact = Vectors(vectors, "ip").find_nearest(vectors[:3], 10)
    assert (found[1] >= 0).all() and (found[1] == exact[1]).all() and (found[0] == exact[0]).all()


def test_notes_of_many_queries_are_cut_short_and_the_rest_is_counted(
    run: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO"):
        find_neighbours(RunFolder(run).load_options(), [f"qqx{i} is cut" for i in range(30)], 1)
    for note in ("is not in the index", "is 3 chunks of this run"):
        assert len([each for each in caplog.messages if note in each]) == 20
    assert caplog.messages.count("… the same of 10 more queries") == 2
