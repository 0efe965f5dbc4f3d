"""docs/data.md: its commands, its example of the loader, and its source and chunker of one's own, as they stand there."""

import os
import re
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from data.corpus import Corpus

ROOT = Path(__file__).resolve().parents[1]
BLOCKS = dict[str, list[str]]()
for language, block in re.findall(
    r"```(\w+)\n(.*?)```", (ROOT / "docs" / "data.md").read_text(encoding="utf-8"), re.DOTALL
):
    BLOCKS.setdefault(language, []).append(block)
ENVIRONMENT = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}


def bash(command: str, folder: Path, **environment: str) -> str:
    done = subprocess.run(
        ["bash", "-e", "-c", command], cwd=folder, env=ENVIRONMENT | environment, capture_output=True, text=True
    )
    assert done.returncode == 0, f"{command}: {done.stderr[-2000:]}"
    return done.stdout


def test_the_commands_and_the_loader(tmp_path: Path) -> None:
    (tmp_path / "my-texts").mkdir()
    for name in ("letter", "diary"):
        (tmp_path / "my-texts" / f"{name}.txt").write_text("A line of text.\n\n" * 2000)
    (commands,) = BLOCKS["bash"]
    bash(commands, tmp_path)
    (words,) = [each for each in tmp_path.glob("shards/my-texts-*") if Corpus.open(each).options.kind == "words"]
    example = BLOCKS["python"][0].replace("NAME-DIGEST", words.name)
    (tmp_path / "example.py").write_text(example)
    assert "(4, 128, 12) (4, 128) {'epoch': 0, 'windows': 4}" in bash("python example.py", tmp_path)


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
    (info.parent / "my_haed.py").write_text(BLOCKS["python"][1])
    points = re.sub(r'project\.entry-points\."(.*)"', r"\1", BLOCKS["toml"][0]).replace('"', "")
    (info / "entry_points.txt").write_text(points)
    command = "haed shard source.kind=sqlite source.path=notes.db chunker.kind=camel shard.megabytes=1"
    bash(f"{command} shard.workers={workers}", tmp_path, PYTHONPATH=str(info.parent))
    (folder,) = tmp_path.glob("shards/notes.db-*")
    corpus = Corpus.open(folder)
    found = [tokens.tobytes().decode() for split in ("train", "valid", "test") for tokens, _ in corpus.documents(split)]
    assert sorted(found) == sorted(bodies)
    lengths = corpus.manifest["statistics"]["train"]["chunk_lengths"]
    assert len(lengths) == 13 and lengths[4] == 0 < lengths[3]  # "The", and what follows capped at 12
