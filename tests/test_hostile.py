"""Each file of a run and of a corpus is replaced by what is no file of ours, and everything that reads them is asked.

A process of its own asks, in little memory and with a clock: what hangs, grows or dies would take the tests with it.
"""

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pipeline.cli import main

KINDS: dict[str, Callable[[Path], object]] = {
    "pipe": lambda path: os.mkfifo(path),
    "zero": lambda path: path.symlink_to("/dev/zero"),
    "folder": lambda path: path.mkdir(),
    "deep": lambda path: path.write_bytes(b"[" * 10**6),
    "empty": lambda path: path.write_bytes(b""),
}
# Pages, and commands in the words of `ASK`; those that write what they have read come last.
PAGES = ["/runs/", "/runs/run/", "/runs/run/live"]
ALL = [
    *PAGES,
    *("/runs/run/neighbours?query=def%20", "/runs/run/next?prompt=def", "/runs/run/samples?prompt=a"),
    *("/runs/run/files/evaluation.json", "/runs/run/files/pretrain/metrics.csv"),
    *("open", "compare", "neighbours", "next", "cat", "profile", "report", "sample", "evaluate", "index", "finetune"),
]
ASK = """
import asyncio, contextlib, gc, io, json, logging, os, resource, shutil, signal, sys
from pathlib import Path
from starlette.testclient import TestClient
import torch, faiss, pyarrow.parquet, matplotlib.pyplot
from pipeline import open_run
from pipeline.cli import main
from pipeline.web.app import make_application
from pipeline.web.runs import ServedRuns
from pipeline.web.model_cache import ModelCache

SECONDS = 60  # which only what waits for a named pipe takes
resource.setrlimit(resource.RLIMIT_DATA, (4 << 30,) * 2)
signal.signal(signal.SIGALRM, lambda *_: (_ for _ in ()).throw(AssertionError("it hangs")))
logging.basicConfig(level="WARNING")
gc.freeze()  # what is imported: collections, one after each stage, need not look at it
COMMANDS = {
    "compare": ["compare", "run", "other", "runs_dir=runs"],
    "next": ["next", "runs/run", "def"],
    "neighbours": ["neighbours", "runs/run", "def "],
    "shard": ["shard", "runs/run"],
    "cat": ["cat", "corpus"],
    "profile": ["profile", "runs/run", "--steps", "1"],
    "finetune": ["finetune", "runs/run"],
}


def asked(reader, client):
    said = io.StringIO()
    handler = logging.StreamHandler(said)
    logging.getLogger().addHandler(handler)
    signal.alarm(SECONDS)
    try:
        if reader.startswith("/"):
            found = client.get(reader)
            return found.status_code, found.text
        if reader == "open":
            try:
                open_run("runs/run").score("def ")
            except (ValueError, OSError) as error:
                return 1, f"error: {error}"
            return 0, ""
        words = COMMANDS.get(reader, [reader, "runs/run"])
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.TextIOWrapper(io.BytesIO())):
            return main(words), said.getvalue()
    finally:
        signal.alarm(0)
        logging.getLogger().removeHandler(handler)


opened = set()
sys.addaudithook(lambda event, given: opened.add(given[0]) if event == "open" else None)

for line in sys.stdin:
    place, readers = json.loads(line)
    os.chdir(place)
    opened.clear()
    warm = ModelCache(1, ("threads=1", "device=cpu"))
    client = TestClient(make_application(ServedRuns(Path("runs")), warm), raise_server_exceptions=False)
    found = {}
    for reader in readers:
        try:
            found[reader] = asked(reader, client)
        except BaseException as error:
            found[reader] = (-1, f"{type(error).__name__}: {error}")
    warm.close(SECONDS)
    names = {os.path.realpath(os.fsdecode(each)) for each in opened if not isinstance(each, (int, type(None)))}
    print(json.dumps([found, [os.path.relpath(each, os.path.realpath(place)) for each in names]]), flush=True)
"""


class Asker:
    """The process that asks.

    Attributes:
        opened: files that the last readers opened, relative to the folder.
    """

    def __init__(self) -> None:
        self.opened = set[str]()
        command, environment = [sys.executable, "-c", ASK], {"OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "2"}
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=os.environ | environment
        )

    def ask(self, place: Path, readers: list[str]) -> dict[str, tuple[int, str]]:
        """What each reader ends with, and says."""
        assert self._process.stdin is not None and self._process.stdout is not None
        print(json.dumps([str(place), readers]), file=self._process.stdin, flush=True)
        line = self._process.stdout.readline()
        assert line, f"the process is gone: {self._process.wait()}"
        told, opened = json.loads(line)
        self.opened = set(opened)
        return {name: (found[0], found[1]) for name, found in told.items()}

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


@pytest.fixture(scope="module")
def asker() -> Iterator[Asker]:
    made = Asker()
    yield made
    made.close()


@pytest.fixture(scope="module")
def readers(handed: Path, asker: Asker, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list[str]]:
    """Who opens a file: each reader is asked in a folder of its own, so that nothing is known from another."""
    opened = dict[str, set[str]]()
    for reader in ALL:
        place = Path(shutil.copytree(handed, tmp_path_factory.mktemp("whole") / "place"))
        ((status, said),) = asker.ask(place, [reader]).values()
        assert status in (0, 200), (reader, said)
        opened[reader] = asker.opened
        shutil.rmtree(place)
    return lambda file: [reader for reader in ALL if file in opened[reader]]


def check(file: str, kind: str, found: dict[str, tuple[int, str]]) -> None:
    """Every reader ended by itself, in a line that names the file wherever it could not go on."""
    name = Path(file).name
    for reader, (status, said) in found.items():
        case = f"{file}: {kind}: {reader}: {status} {said[-700:]}"
        assert status >= 0 and "Traceback" not in said and "--debug prints the traceback" not in said, case
        if reader == "/runs/":
            assert status == 200 and 'href="../runs/other/"' in said and 'href="../runs/run/"' in said, case
        elif reader.startswith("/"):
            assert status in (200, 400, 404, 409, 500), case
            assert status in (200, 404) or name in said, case
        else:
            # A result that is shown, and cannot be written as well, is said by a line of the log.
            unwritten = f"{name} could not be written: " if reader == "evaluate" else "error: "
            lines = [line for line in said.splitlines() if line.startswith("error: ") or unwritten in line]
            lines = [line for line in lines if not line.endswith("It is made again each time")]  # a cache
            assert (status == 0) == (not lines) and status in (0, 1, 2), case
            assert status == 0 or name in said, case


def copy(source: str, target: str) -> None:
    """A file of its own, or the same again if it is large: such are written anew, and none is added to."""
    (os.link if os.path.getsize(source) > 1 << 16 else shutil.copy2)(source, target)


def damage(handed: Path, place: Path, file: str, kind: str) -> Path:
    """A copy in which a file is replaced."""
    shutil.copytree(handed, place, copy_function=copy)
    path = place / file
    path.unlink()
    KINDS[kind](path)
    return place


def files_of(handed: Path) -> list[str]:
    """All files of the run and of the corpus, but those that nobody reads back."""
    found = sorted(path for part in ("runs/run", "corpus") for path in (handed / part).rglob("*") if path.is_file())
    return [str(path.relative_to(handed)) for path in found if "tensorboard" not in path.parts]


@pytest.mark.nightly
def test_what_is_whole_is_taken_by_those_who_open_it(readers: Callable[[str], list[str]]) -> None:
    assert {"open", "evaluate", "finetune"} <= set(readers("runs/run/config.yaml"))
    assert readers("corpus/test-00000.tar") == ["evaluate"]
    assert "neighbours" in readers("runs/run/index/chunks/vectors.faiss")


@pytest.mark.nightly
def test_no_page_waits_for_a_pipe_or_reads_a_device(handed: Path, asker: Asker, tmp_path: Path) -> None:
    for number, file in enumerate(each for each in files_of(handed) if each.startswith("runs/")):
        kind = ("pipe", "zero")[number % 2]
        place = damage(handed, tmp_path / str(number), file, kind)
        check(file, kind, asker.ask(place, PAGES[:2]))
        shutil.rmtree(place)


def move_and_link(path: Path, to: Path) -> None:
    """A file or folder elsewhere, and a link to it where it was."""
    shutil.move(path, to / path.name)
    path.symlink_to(to / path.name)


SHOWN = {
    "config.yaml": "evaluate",
    "corpus.json": "evaluate",
    "environment.json": "report",
    "evaluation.json": "report",
    "samples.json": "report",
    "samples.png": "report",
    "finetune/metrics.jsonl": "compare",
    "index/chunks/meta.json": "neighbours",
}


@pytest.mark.parametrize("name", SHOWN)
def test_a_link_out_of_the_run_is_not_followed(
    name: str, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Though the file there is the right one."""
    (tmp_path / "elsewhere").mkdir()
    (run / "samples.png").touch()  # as of a model of pictures
    move_and_link(run / name, tmp_path / "elsewhere")
    words = {"neighbours": [str(run), "def "], "compare": ["run", f"runs_dir={run.parent}"]}
    assert main([SHOWN[name], *words.get(SHOWN[name], [str(run)])]) == 1
    assert re.search(rf"{Path(name).name} is a link to .*, outside ", capsys.readouterr().err)


def test_folders_of_a_run_and_what_is_summed_may_lie_elsewhere(handed: Path, tmp_path: Path) -> None:
    place, disk = Path(shutil.copytree(handed, tmp_path / "place")), tmp_path / "disk"
    disk.mkdir()
    (checkpoint,) = (place / "runs/run/finetune/checkpoints").glob("*4")
    (shard, *_) = (place / "corpus").glob("test-*.tar")
    folders = [place / "runs/run/finetune/checkpoints", place / "runs/run/index", place / "runs/run"]
    for path in (checkpoint / "model.safetensors", shard, *folders):
        move_and_link(path, disk)
    asked = [["evaluate", "evaluate.baselines=false"], ["neighbours", "def "], ["next", "def"], ["report"]]
    with contextlib.chdir(place):
        assert [main([command, "runs/run", *words]) for command, *words in asked] == [0] * len(asked)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_looked_at_first_is_named(handed: Path, asker: Asker, tmp_path: Path, kind: str) -> None:
    """Each by the reader that cannot do without it."""
    wanted = {
        "runs/run/config.yaml": "open",
        "runs/run/corpus.json": "open",
        "runs/run/pretrain/metrics.jsonl": "compare",
        "runs/run/evaluation.json": "/runs/run/",
        "corpus/manifest.json": "cat",
    }
    for number, (file, reader) in enumerate(wanted.items()):
        if (file, kind) == ("runs/run/pretrain/metrics.jsonl", "empty"):
            continue  # a phase that has just begun
        found = asker.ask(damage(handed, tmp_path / str(number), file, kind), [reader, "/runs/"])
        check(file, kind, found)
        assert Path(file).name in found[reader][1], (file, kind, found[reader])


@pytest.mark.nightly
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("kind", KINDS)
def test_every_reader_of_every_file(
    handed: Path, asker: Asker, readers: Callable[[str], list[str]], tmp_path: Path, kind: str
) -> None:
    """Each file is of one kind, in turn: to try every kind of each takes five times as long."""
    wrong = list[str]()
    for number, file in enumerate(files_of(handed)[list(KINDS).index(kind) :: len(KINDS)]):
        place = damage(handed, tmp_path / str(number), file, kind)
        found = asker.ask(place, readers(file) or PAGES)
        try:
            check(file, kind, found)
        except AssertionError as error:
            wrong.append(str(error))
        shutil.rmtree(place)
    assert not wrong, "\n".join(wrong)
