"""docs/data.md: its commands, loader, source and chunker of one's own, as they stand there; tests that documents name."""

import os
import re
import sqlite3
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import webdataset
import yaml

from data.build import shard
from data.corpus import Corpus
from data.options import ChunkerOptions, ShardOptions, SourceOptions
from data.shards import CorruptShardError

ROOT = Path(__file__).resolve().parents[1]
BLOCKS = dict[str, list[str]]()
for language, block in re.findall(
    r"```(\w+)\n(.*?)```", (ROOT / "docs" / "data.md").read_text(encoding="utf-8"), re.DOTALL
):
    BLOCKS.setdefault(language, []).append(block)
ENVIRONMENT = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}


def python(part: str) -> str:
    """The one block of Python with this in it."""
    (block,) = [each for each in BLOCKS["python"] if part in each]
    return block


def bash(command: str, folder: Path, **environment: str) -> str:
    done = subprocess.run(
        ["bash", "-e", "-c", command], cwd=folder, env=ENVIRONMENT | environment, capture_output=True, text=True
    )
    assert done.returncode == 0, f"{command}: {done.stderr[-2000:]}"
    return done.stdout


@pytest.mark.slow
def test_the_commands_and_the_loader(tmp_path: Path) -> None:
    (tmp_path / "my-texts").mkdir()
    for name in ("letter", "diary"):
        (tmp_path / "my-texts" / f"{name}.txt").write_text("A line of text.\n\n" * 2000)
    (commands,) = BLOCKS["bash"]
    bash(commands, tmp_path)
    (words,) = [each for each in tmp_path.glob("shards/my-texts-*") if Corpus.open(each).options.kind == "words"]
    example = python("import Loader\n\ncorpus").replace("NAME-DIGEST", words.name)
    (tmp_path / "example.py").write_text(example)
    assert "(4, 128, 12) (4, 128) {'epoch': 0, 'windows': 4, 'began': 0}" in bash("python example.py", tmp_path)
    (tmp_path / "torch_example.py").write_text(python("DataLoader").replace("NAME-DIGEST", words.name))
    assert bash("python torch_example.py", tmp_path) == "torch.Size([4, 128, 12])\n" * 2


@pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning"
)  # webdataset leaves files to the collector
def test_documents_are_read_with_webdataset_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = {"train-a.txt": "é" * 1_200_000, "train-b.txt": "some words\n", "train-c.txt": "more of them " * 90_000}
    for name, text in (texts | {"valid.txt": "v", "test.txt": "t"}).items():
        (tmp_path / name).write_text(text)
    chosen = SourceOptions(kind="text", path=str(tmp_path))
    corpus = shard(chosen, ChunkerOptions(), ShardOptions(megabytes=1), tmp_path / "shards")
    assert len(corpus.shards_of("train")) > 2
    example, found = python("webdataset").replace("shards/NAME-DIGEST", str(corpus.folder)), dict[str, Any]()
    exec(example.replace('print(name, len(text), "bytes")', "found[name] = text.decode()"), {"found": found})
    assert found == texts

    samples = list(
        webdataset.WebDataset(sorted(map(str, corpus.folder.glob("train-*.tar"))), shardshuffle=False).decode()
    )
    ours = list(corpus.webdataset("train"))
    assert len(ours) == len(samples) > 2 and len({sample["__key__"] for sample in ours}) == len(ours)
    for one, other in zip(ours, samples, strict=True):
        assert all(
            np.array_equal(one[f"{name}.npy"], other[f"{name}.npy"]) for name in ("tokens", "lengths", "documents")
        )
        assert one["sample.json"] == {key: other["sample.json"][key] for key in ("names", "continues")}
    shared = torch.utils.data.DataLoader(corpus.webdataset("train").compose(_take_key), batch_size=None, num_workers=2)
    assert sorted(shared) == sorted(sample["__key__"] for sample in ours)
    os.truncate(corpus.folder / corpus.shards_of("train")[1].file, 5000)
    with pytest.raises(CorruptShardError):
        list(Corpus.open(corpus.folder).webdataset("train"))


def _take_key(samples: Iterable[dict[str, Any]]) -> Iterator[str]:
    yield from (sample["__key__"] for sample in samples)


@pytest.mark.parametrize("workers", [1, 2])
def test_a_source_and_a_chunker_of_ones_own(tmp_path: Path, workers: int) -> None:
    bodies = [f"TheText number{i}OfMany " * (i % 50 + 1) for i in range(2500)]
    with sqlite3.connect(tmp_path / "notes.db") as database:
        database.execute("CREATE TABLE notes (body TEXT)")
        database.executemany("INSERT INTO notes VALUES (?)", [(body,) for body in bodies])
    database.close()
    info = tmp_path / "packages" / "my_haed-1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: my-haed\nVersion: 1\n")
    (info.parent / "my_haed.py").write_text(python("class CamelChunker"))
    points = re.sub(r'project\.entry-points\."(.*)"', r"\1", BLOCKS["toml"][0]).replace('"', "")
    (info / "entry_points.txt").write_text(points)
    command = (
        "haed shard source.kind=sqlite source.path=notes.db source.table=notes chunker.kind=camel shard.megabytes=1"
    )
    bash(f"{command} shard.workers={workers}", tmp_path, PYTHONPATH=str(info.parent))
    (folder,) = tmp_path.glob("shards/notes.db-*")
    corpus = Corpus.open(folder)
    found = [
        tokens.tobytes().decode()
        for split in ("train", "valid", "test")
        for tokens, _ in corpus.iterate_documents(split)
    ]
    assert sorted(found) == sorted(bodies)
    lengths = corpus.manifest["statistics"]["train"]["chunk_lengths"]
    assert len(lengths) == 13 and lengths[4] == 0 < lengths[3]  # "The", and what follows capped at 12


DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_test_that_a_document_names_is_there(document: Path) -> None:
    named = re.findall(r"\btests/[\w/]+\.py", document.read_text(encoding="utf-8"))
    assert [name for name in named if not (ROOT / name).is_file()] == []


def test_every_claim_of_the_page_on_safety_names_the_tests_that_hold_it() -> None:
    blocks = (ROOT / "docs" / "safety.md").read_text(encoding="utf-8").split("\n\n")
    rows = [row for block in blocks if block.startswith("|") for row in block.splitlines()[2:]]
    claims = [*rows, *(block for block in blocks if not block.startswith(("#", "|")))]
    assert len(rows) > 10 and len(claims) > 30
    assert [claim for claim in claims if not re.search(r"`tests/[\w/]+\.py`", claim)] == []


def test_the_citation_is_of_this_version_and_licence() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert (citation["version"], citation["license"]) == (project["version"], project["license"])
    assert all(reference["title"] and reference["authors"] for reference in citation["references"])
