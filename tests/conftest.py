"""Fixtures: a small real text, and a model small enough to train in seconds."""

import fcntl
import gc
import json
import os
import random
import select
import shutil
import socket
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from haed.options import SYSTEMS
from pipeline.config import Options, applies_to, list_presets
from tests.flows.api import PATIENCE, clean_environment, until

SHARED = Path(__file__).resolve().parents[2] / "shared" / "data"

TINY = [
    "model.encoder.token_width=4",
    "model.encoder.hidden=16",
    "model.encoder.width=16",
    "model.encoder.rows=32",
    "model.main.layers=1",
    "model.main.width=16",
    "model.main.heads=2",
    "model.main.head_width=8",
    "model.main.ffn=32",
    "model.decoder.width=16",
    "model.decoder.token_width=8",
    "model.decoder.ffn=32",
    "model.decoder.grams.rows=32",
    "model.decoder.heads=2",
    "batch.context=16",
    "batch.sequences=2",
    "optimizer.warmup_steps=2",
    "validation.windows=4",
    "validation.times=2",
    "pretrain.seconds=null",
    "pretrain.steps=6",
    "finetune.seconds=null",
    "finetune.steps=4",
    "train.seconds=null",
    "train.steps=4",
    "threads=1",
    "sample.chunks=4",
    "evaluate.memory=0",  # most tests are of the model alone; the run `whole` and tests of memory have one
]
# What makes a model of tokens as small, and more for some kinds of them.
TOKENS = ["model.token.width=16", "model.token.heads=4", "model.token.head_width=4", "model.token.ffn=32"]
MORE = {
    "hourglass": ["model.hourglass.hierarchy=1@1 1@2 1@1"],
    "top_down": ["model.multiscale.layers=1@2 1@1"],
    "bottom_up": ["model.multiscale.layers=1@2 1@1"],
    "retina": ["model.retina.layers=1", "model.retina.windows=8:32@4 0:8@1"],
    "spacebyte": [f"model.spacebyte.{size}" for size in ("before=1", "layers=1", "after=1", "width=24", "ffn=32")],
}
TOKEN_KINDS = [kind for kind, family in SYSTEMS.items() if not family.chunks]
# Presets that two cores train, one of each architecture: the others that they could train only have other sizes or losses.
_SAME_PARTS = {"audio", "flat", "images", "quickstart-no-iem", "wikitext2"}
ARCHITECTURES = [name for name in list_presets() if not name.startswith("paper-") and name not in _SAME_PARTS]


def mostly_nightly(cases: Iterable[Any], *quick: Any) -> list[Any]:
    """Parameters of a test, of which `make test` and `make test-ci` take `quick`, and `make test-all` takes all."""
    return [case if case in quick else pytest.param(case, marks=pytest.mark.nightly) for case in cases]


def find_neighbours(options: Options, queries: Sequence[str | bytes] = (), count: int | None = None) -> Any:
    """The answers of `haed neighbours` to chunks."""
    from pipeline.inference import query_index

    return query_index(options, queries=queries, count=count)


def of_kind(kind: str, words: list[str]) -> list[str]:
    """`TINY`, or what begins with it, for another kind of model: without what that has no use for."""
    own = [] if SYSTEMS[kind].chunks else [*TOKENS, *MORE.get(kind, [])]
    return [f"model.kind={kind}", *(word for word in [*own, *words] if applies_to(word.split("=")[0], kind))]


# A busy machine makes no example fail; `tmp_path` may be written over by each.
settings.register_profile(
    "haed", deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
)
settings.load_profile("haed")


# Files whose tests take minutes, the longest first.
LONGEST = [
    *("experiments/test_run.py", "flows/test_ends.py", "flows/test_serve.py", "pipeline/training/test_same_bits.py"),
    *("test_hostile.py", "flows/test_operator.py", "flows/test_browser.py", "pipeline/run/test_trackers.py"),
    *("haed/test_compile.py", "flows/test_cli.py", "flows/test_bounds.py", "test_readme.py", "flows/test_pictures.py"),
    *("pipeline/training/test_stages.py", "pipeline/config/test_presets.py", "pipeline/web/test_browser.py"),
]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Order files by how long they take: with several workers, none of them is then left alone at the end."""
    slow = {item.path for item in items if item.get_closest_marker("slow") or item.get_closest_marker("nightly")}
    places = {Path(__file__).parent / name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: (item.path not in slow, places.get(item.path, len(places))))


_imported = 0  # modules, when what is imported was frozen


def pytest_runtest_setup() -> None:
    """What is imported stays: collections, one after each stage, need not look at it."""
    global _imported
    if len(sys.modules) > _imported + 50:
        gc.collect()
        gc.freeze()
        _imported = len(sys.modules)


def made_once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], None]) -> Path:
    """A folder that the first worker of pytest that needs it makes, for all of them; tests leave it as it is."""
    place = factory.getbasetemp()
    place = place.parent if "PYTEST_XDIST_WORKER" in os.environ else place
    folder = place / name
    with open(place / f"{name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (place / f"{name}.made").exists():
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            make(folder)
            (place / f"{name}.made").touch()
    return folder


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Some files of the standard library, named by split."""

    def make(folder: Path) -> None:
        stdlib = Path(sysconfig.get_paths()["stdlib"])
        names = {"train": "textwrap.py", "train2": "bisect.py", "valid": "heapq.py", "test": "queue.py"}
        for split, name in names.items():
            (folder / f"{split.rstrip('2')}-{name}").write_bytes((stdlib / name).read_bytes())

    return made_once(tmp_path_factory, "text", make)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder to work in."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def tiny(text: Path, tmp_path: Path) -> list[str]:
    """Overrides that make any preset tiny, reading `text` and writing under tmp_path."""
    return [
        *TINY,
        "source.kind=text",
        f"source.path={text}",
        f"runs_dir={tmp_path / 'runs'}",
        f"shards_dir={tmp_path / 'shards'}",
    ]


@pytest.fixture(scope="session")
def whole(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A place with shards and a run with everything in it, to be copied: `shards` and `runs/run`."""
    from pipeline.cli import main

    def make(place: Path) -> None:
        where = ["source.kind=text", f"source.path={text}", f"runs_dir={place}/runs", f"shards_dir={place}/shards"]
        chosen = [
            *TINY,
            *where,
            "name=run",
            "checkpoint.every_steps=2",
            "evaluate.baselines=false",
            "evaluate.memory=256",
        ]
        for stage in ("shard", "pretrain", "finetune"):
            assert main([stage, "--config", "quickstart", *chosen]) == 0
        for stage in ("evaluate", "index", "sample"):
            assert main([stage, f"{place}/runs/run"]) == 0

    return made_once(tmp_path_factory, "whole", make)


@pytest.fixture
def run(whole: Path, tmp_path: Path) -> Path:
    """A copy of that run; its shards are where they were."""
    return Path(shutil.copytree(whole / "runs" / "run", tmp_path / "runs" / "run"))


@pytest.fixture(scope="module")
def handed(whole: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A corpus and two such runs on it, as somebody hands them over; tests leave it as it is."""
    from data.filesystem import write_json

    place = tmp_path_factory.mktemp("handed")
    shutil.copytree(whole / "runs" / "run", place / "runs" / "run")
    remembered = json.loads((place / "runs/run/corpus.json").read_text())
    shutil.copytree(remembered["location"], place / "corpus")  # other tests may have left other corpora beside it
    config = place / "runs/run/config.yaml"
    here = config.read_text().replace(f"{whole}/shards", "shards").replace(f"{whole}/runs", "runs")
    config.write_text(here.replace("kind: text", "kind: shards"))
    write_json(place / "runs/run/corpus.json", remembered | {"location": "corpus", "beside": "../../corpus"})
    shutil.copytree(place / "runs/run", place / "runs/other")
    return place


@pytest.fixture(scope="session")
def sharded(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the shards of `text`, to be copied."""
    from pipeline.config import load_options
    from pipeline.run.sharding import shard_source

    def make(folder: Path) -> None:
        shard_source(load_options("quickstart", ["source.kind=text", f"source.path={text}", f"shards_dir={folder}"]))

    return made_once(tmp_path_factory, "sharded", make)


@pytest.fixture
def options(tiny: list[str], sharded: Path, tmp_path: Path) -> Options:
    """The configuration of `tiny`, sharded."""
    from pipeline.config import load_options

    shutil.copytree(sharded, tmp_path / "shards")
    return load_options("quickstart", [*tiny, "name=tiny"])


@pytest.fixture(scope="session")
def mixing(text: Path, sharded: Path, tmp_path_factory: pytest.TempPathFactory) -> Options:
    """A run whose likelihood is a mixture with 100 known chunks; to be copied."""
    from pipeline.config import load_options
    from pipeline.training.stages import finetune, pretrain

    def load(place: Path) -> Options:
        chosen = ["model.mixture.known=100", "iem.correction=inclusion", "finetune.iem_weight=1", "precision=fp32"]
        where = ["source.kind=text", f"source.path={text}", f"runs_dir={place}/runs", f"shards_dir={place}/shards"]
        return load_options("quickstart", [*TINY, *where, *chosen, "name=mixed", "evaluate.baselines=false"])

    def make(place: Path) -> None:
        shutil.copytree(sharded, place / "shards")
        pretrain(load(place))
        finetune(load(place))

    return load(made_once(tmp_path_factory, "mixing", make))


@pytest.fixture
def mixed(mixing: Options, tmp_path: Path) -> Options:
    """A copy of that run, and of its shards."""
    runs, shards = tmp_path / "runs", tmp_path / "shards"
    shutil.copytree(mixing.runs_dir, runs)
    shutil.copytree(mixing.shards_dir, shards)
    return replace(deepcopy(mixing), runs_dir=str(runs), shards_dir=str(shards))


@pytest.fixture
def chance() -> random.Random:
    return random.Random(0)


@pytest.fixture(scope="session")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> Options:
    """A model of 4×4 pictures, a row a chunk, each row lighter than the one above; to be copied."""
    import numpy as np

    from pipeline.config import load_options
    from pipeline.run.sharding import shard_source
    from pipeline.training.stages import train

    def load(place: Path) -> Options:
        chosen = ["source.kind=images", f"source.path={place}", "source.pattern=*.npz", "chunker.kind=pixels"]
        chosen += ["chunker.k=12", "train.steps=120", "validation.times=0", "name=pictures"]
        chosen += ["optimizer.learning_rate=0.02", "optimizer.main_learning_rate=0.02"]
        return load_options("quickstart", [*TINY, *chosen, f"runs_dir={place}/runs", f"shards_dir={place}/shards"])

    def make(place: Path) -> None:
        raster = np.empty((60, 3, 4, 4), np.uint8)
        raster[:] = np.array([0, 60, 120, 180])[:, None]
        for split in ("train", "val"):
            np.savez(place / f"{split}_data.npz", data=raster.reshape(60, -1), labels=np.zeros(60, np.int64))
        shard_source(load(place))
        train(load(place))

    return load(made_once(tmp_path_factory, "pictures", make))


@pytest.fixture
def pictures(drawn: Options, tmp_path: Path) -> Options:
    """A copy of that model's run; its shards are where they were."""
    shutil.copytree(drawn.runs_dir, tmp_path / "runs")
    return replace(deepcopy(drawn), runs_dir=str(tmp_path / "runs"))


def write_state(path: Path, state: dict[str, Any]) -> None:
    """Writes a state.json of a checkpoint with the digest that it then has."""
    from data.filesystem import compute_checksum

    path.write_text(json.dumps(state | {"digest": compute_checksum(state, "digest")}))


def flip_bit(path: Path, place: int) -> None:
    """Flips a bit of the byte at a place of a file."""
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


class Listener:
    """A port of this machine, and how often somebody connected to it."""

    def __init__(self) -> None:
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.host = f"127.0.0.1:{self._socket.getsockname()[1]}"

    @property
    def contacts(self) -> int:
        """Connections so far; those that were just made wait in the socket's queue."""
        found = 0
        while select.select([self._socket], [], [], 0.05)[0]:
            self._socket.accept()[0].close()
            found += 1
        return found

    def close(self) -> None:
        self._socket.close()


@pytest.fixture
def listener() -> Iterator[Listener]:
    """Whoever is to contact nobody can be seen to."""
    made = Listener()
    yield made
    made.close()


@pytest.fixture(scope="session")
def database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An empty database of Prefect's server, which takes ten seconds to make: once for all workers of pytest."""

    def make(folder: Path) -> None:
        command = [sys.executable, "-m", "prefect", "server", "database", "upgrade", "-y"]
        environment = clean_environment(PREFECT_HOME=str(folder))
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert [file.name for file in folder.glob("prefect.db*")] == ["prefect.db"]  # no journal is left beside it

    return made_once(tmp_path_factory, "prefect", make) / "prefect.db"


def lay_database(database: Path, folder: Path) -> None:
    """Puts an empty database where `haed`, started in the folder, looks for one."""
    (folder / ".prefect").mkdir(mode=0o700)
    shutil.copy(database, folder / ".prefect/prefect.db")
    (folder / ".prefect/prefect.db").chmod(0o600)


@pytest.fixture(scope="module")
def api(database: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a server's API, for the tests of a module that need no UI and no deployments."""
    from flows.server import is_server_healthy

    folder = tmp_path_factory.mktemp("server")
    lay_database(database, folder)
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        port = bound.getsockname()[1]
    home = {"PREFECT_HOME": str(folder / ".prefect"), "PREFECT_SERVER_UI_ENABLED": "false", "DO_NOT_TRACK": "1"}
    command = [sys.executable, "-m", "flows.server", "prefect", "--port", str(port)]
    with (
        open(folder / "log", "wb") as log,
        subprocess.Popen(command, env=clean_environment(**home), stdout=log, stderr=log) as server,
    ):
        until(PATIENCE, lambda: is_server_healthy(f"http://127.0.0.1:{port}"))
        yield f"http://127.0.0.1:{port}/api"
        server.terminate()
