"""Places in the text: their vectors are the model's states there, and they stand where they are said to."""

import json
from pathlib import Path

import numpy as np
import pyarrow.parquet as parquet
import pytest

from data.build import shard
from data.options import ChunkerOptions, ShardOptions, SourceOptions
from pipeline.arguments import load_run_options
from pipeline.cli import main
from pipeline.config import Options, load_options
from pipeline.run.index.build import build_index, iterate_named_windows
from pipeline.run.index.context_index import AFTER, BEFORE, ContextIndex
from pipeline.run.opened import open_run
from pipeline.run.run_directory import RunFolder
from pipeline.training.stages import train
from tests.conftest import TINY, of_kind
from tests.pipeline.conftest import CommandLine


def check(where: Path, layer: int | None = None, scale: int | None = None) -> None:
    """An index of contexts against the model and the corpus."""
    folder, found = RunFolder(where), ContextIndex(RunFolder(where))
    run, corpus = open_run(where), folder.open_corpus()
    rows = parquet.read_table(where / "index" / "contexts" / "table.parquet").to_pylist()
    texts = [tokens.tobytes() for tokens, _ in corpus.iterate_documents("train")]
    lengths = [sizes for _, sizes in corpus.iterate_documents("train")]
    assert len(rows) == len(found) and len({(row["document"], row["chunk"]) for row in rows}) == len(rows)
    for number, row in enumerate(rows):
        text, at = texts[row["document"]], row["offset"]
        assert at == int(lengths[row["document"]][: row["chunk"]].sum())
        passage = found.passage_at(number, 0.0)
        assert passage.text == text[max(0, at - BEFORE) : at].decode()
        assert passage.after == text[at : at + AFTER].decode()
        assert bytes.fromhex(passage.hex).decode() == passage.text and passage.name.endswith(".py")
    seen = [n for n, row in enumerate(rows) if row["chunk"] and row["chunk"] < run.options.batch.context][:5]
    assert len(seen) > 2
    for number in seen:
        before = texts[rows[number]["document"]][: rows[number]["offset"]]
        state = run.context(before, layer, scale)
        np.testing.assert_allclose(found.search.exact[number], state / np.linalg.norm(state), atol=2e-3)


def test_contexts_are_states_at_places(run: Path, haed: CommandLine) -> None:
    where = str(run)
    said = haed.error("neighbours", where, "--context", "x")
    assert f"has no index of contexts (it has chunks). Run `haed index {where} --space" in said
    config = run / "config.yaml"
    config.write_text(config.read_text().replace("precision: auto", "precision: fp32"))
    total = RunFolder(run).open_corpus().split_counts("train").chunks
    for layer in (0, None):
        given = [] if layer is None else [f"index.layer={layer}"]
        told = haed.json("index", where, "--space", "contexts", *given)
        assert (told["space"], told["chunks"], told["left_out"]) == ("contexts", total, 0)  # each place once
        check(run, layer)

    corpus = RunFolder(run).open_corpus()
    text = next(iter(corpus.iterate_originals("train")))[:150].decode()
    cut = "".join(chunk for chunk in text.rpartition(" ")[:2])
    (item,) = haed.json("neighbours", where, "--context", cut, "--count", "3")
    assert set(item) == {"query", "hex", "neighbours"} and item["query"] == cut
    first = item["neighbours"][0]
    assert first["score"] == pytest.approx(1, abs=1e-3) and first["offset"] == len(cut) and first["document"] == 0
    assert {"text", "hex", "score", "count"} < set(first) and len(item["neighbours"]) == 3


def test_documents_may_be_called_what_is_no_utf_8(tmp_path: Path) -> None:
    for number in range(2):
        (tmp_path / f"caf\udce9 train {number}.txt").write_text(f"text {number} " * 30)
    source = SourceOptions(kind="text", path=str(tmp_path), valid_percent=0)
    corpus = shard(source, ChunkerOptions(), ShardOptions(), tmp_path / "shards")
    names = {name for name, _ in iterate_named_windows(corpus, "train", 8)}
    assert names == {f"caf\udce9 train {number}.txt".encode("utf-8", "surrogateescape") for number in range(2)}


def test_so_many_are_drawn_by_the_seed(run: Path, caplog: pytest.LogCaptureFixture) -> None:
    where, vectors, options = run, [], RunFolder(run).load_options(["index.space=contexts"])
    for seed, most in ((0, 100), (0, 100), (1, 100)):
        options.seed, options.index.max_contexts = seed, most
        found = build_index(options)
        total = RunFolder(where).open_corpus().split_counts("train").chunks
        assert found.chunks <= 100 and found.chunks + found.left_out == total
        assert f"of {total:,} places of train about this many are drawn" in caplog.text
        vectors.append(np.array(ContextIndex(RunFolder(where)).search.exact))
    assert vectors[0].shape == vectors[1].shape and (vectors[0] == vectors[1]).all()
    assert vectors[0].shape != vectors[2].shape or (vectors[0] != vectors[2]).any()


def test_a_model_of_tokens_has_contexts_only(tiny: list[str], options: Options, haed: CommandLine) -> None:
    where = [word for word in tiny if word.startswith(("source.", "runs_dir", "shards_dir"))]
    made = load_options("flat", [*of_kind("hourglass", TINY), "model.hourglass.hierarchy=1@1", *where, "name=tokens"])
    made.precision = "fp32"
    train(made)
    folder = RunFolder.from_options(made).path
    assert "--space contexts" in haed.error("index", folder, status=2)
    assert main(["index", str(folder), "--space", "contexts"]) == 0
    check(folder)
    assert main(["neighbours", str(folder), "def "]) == 2 and main(["neighbours", str(folder), "--after", "x"]) == 2
    assert main(["neighbours", str(folder), "--context", "def f("]) == 0
    said = haed.error("index", folder, "--space", "contexts", "index.layer=0", status=2)
    assert "index.layer belongs to model.kind=haed" in said


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "section", "scales"),
    [
        ("top_down", ["model.multiscale.layers=1@4 1@1"], (4, 1)),
        ("bottom_up", ["model.multiscale.layers=1@4 1@1"], (4,)),
        ("retina", ["model.retina.windows=4:64@4 0:8@1"], (4,)),
        ("hourglass", ["model.hourglass.hierarchy=1@1 1@4 1@1"], (4, 1)),
    ],
)
def test_contexts_of_a_scale(
    kind: str, section: list[str], scales: tuple[int, ...], tiny: list[str], haed: CommandLine
) -> None:
    words = [*of_kind(kind, tiny), *section, "name=tokens", "precision=fp32"]
    for stage in ("shard", "train"):
        assert main([stage, *words]) == 0
    folder = Path(next(word for word in tiny if word.startswith("runs_dir=")).split("=")[1]) / "tokens"
    for scale in scales:
        assert main(["index", str(folder), "--space", "contexts", f"index.scale={scale}"]) == 0
        check(folder, scale=scale)
        said = haed.output("neighbours", folder, "--context", "def f(x):", "--count", "2")
        assert said.startswith(f"cosine, scale {scale}, document at byte")
    haed.output("index", folder, "--space", "contexts", "index.scale=4")
    said = haed.error("neighbours", folder, "--context", "x", "--count", "2", status=0)
    assert "x has 1 bytes, fewer than one group of scale 4" in said
    said = haed.error("index", folder, "--space", "contexts", "index.scale=3", status=2)
    assert "index.scale=3: this model has no such scale. Set one of 1, 4" in said


@pytest.mark.slow
def test_places_in_pictures(pictures: Options, haed: CommandLine) -> None:
    where = str(RunFolder.from_options(pictures).path)
    assert main(["index", where]) == main(["index", where, "--space", "contexts"]) == 0
    (item,) = haed.json("neighbours", where, "7:2", "--count", "1")
    assert item["hex"] == "78" * 12  # the third row of any picture
    (item,) = haed.json("neighbours", where, "--context", "7:2", "--count", "2")
    assert {each["chunk"] for each in item["neighbours"]} == {2}  # after two rows
    for query, message in (
        ("60:0", "there is no picture 60. The train split has 60"),
        ("7:4", "has no chunk 4. It has 4"),
    ):
        assert message in haed.error("neighbours", where, query)
    assert "the query is empty" in haed.error("neighbours", where, "--context", "7:0")


def test_a_layer_that_is_not_there(run: Path, haed: CommandLine) -> None:
    (line,) = haed.error("index", run, "--space", "contexts", "index.layer=7").splitlines()
    assert "HAED has no layer 7 of contexts" in line
    assert load_run_options(str(run), ["index.layer=0"], "index").index.layer == 0
    said = haed.error("index", run, "--space", "contexts", "index.scale=4", status=2)
    assert "index.scale belongs to model.kind=hourglass" in said


def test_fewer_places_than_were_asked_for_are_all_that_there_are(run: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert main(["index", str(run), "--space", "contexts", "index.max_contexts=20"]) == 0
    probe = open_run(run).probe
    assert probe.contexts("import ", count=len(probe.places))[0].note is None
    (found,) = probe.contexts("import ", count=1000)
    left_out = json.loads((run / "index" / "contexts" / "meta.json").read_text())["left_out"]
    total = RunFolder(run).open_corpus().split_counts("train").chunks
    assert len(found.neighbours) == len(probe.places) == total - left_out
    assert 10 < len(probe.places) <= 20  # how many are drawn depends on the library of the Python that runs this
    assert found.note and found.note in caplog.messages and f"{len(probe.places)} of 1,000 places" in found.note


@pytest.mark.slow
def test_windows_are_chosen_at_the_command_line(run: Path, haed: CommandLine) -> None:
    """As from Python; an index remembers its own, and questions to it need not repeat them."""
    text, short = b"def a(b):\n    return b\n" * 9, ["batch.context=4"]
    opened = open_run(run)
    tokens, lengths = opened.chunker.split(text)
    tail = tokens.tobytes()[-int(lengths[-3:].sum()) :]
    np.testing.assert_allclose(opened.context(text, seen=4), opened.context(tail), atol=1e-5)
    assert np.abs(opened.context(text, seen=4) - opened.context(text)).max() > 1e-4
    assert main(["index", str(run), "--space", "contexts", *short]) == 0
    assert json.loads((run / "index" / "contexts" / "meta.json").read_text())["context"] == 4
    said = []
    for words in ([], short, ["batch.context=16"]):
        said.append(haed.json("neighbours", run, "--context", text.decode(), *words)[0]["neighbours"])
    assert said[0] == said[1] == said[2]
    for command in (["sample", "--prompt", "def ", "--samples", "1"], ["next", "def "]):
        assert main([command[0], str(run), *command[1:], *short]) == 0


def test_passages_of_pictures_begin_and_end_with_whole_pixels() -> None:
    """Else all their colours would be of other channels."""
    assert BEFORE % 3 == AFTER % 3 == 0
