"""The installed package: a wheel, made of a source distribution, in a fresh environment and an empty folder."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import urllib.request
import venv
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.conftest import TINY
from tests.flows.api import PATIENCE, call, until

ROOT = Path(__file__).resolve().parents[1]
BUILD = "import sys; from setuptools import build_meta; print(build_meta.build_sdist(sys.argv[1]))"
FEW = ["pretrain.steps=2", "pretrain.seconds=null", "finetune.steps=2", "finetune.seconds=null", "validation.times=1"]
pytestmark = pytest.mark.slow


def pip(*words: str | Path) -> None:
    subprocess.run([sys.executable, "-m", "pip", "-q", "--disable-pip-version-check", *words], check=True)


@pytest.fixture(scope="module")
def haed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The command of a fresh environment, which has the packages of this one beside it, but not the checkout."""
    place = tmp_path_factory.mktemp("wheel")
    left_out = ".*", "build", "*.egg-info", "tests", "docs", "site", "runs", "shards", "__pycache__"
    shutil.copytree(ROOT, place / "copy", symlinks=True, ignore=shutil.ignore_patterns(*left_out))
    subprocess.run([sys.executable, "-c", BUILD, str(place)], cwd=place / "copy", check=True, capture_output=True)
    (source,) = place.glob("haed-*.tar.gz")
    pip("wheel", "--no-deps", "--no-build-isolation", "--no-index", "-w", place, source)
    (wheel,) = place.glob("haed-*.whl")
    venv.create(place / "fresh", symlinks=True)
    pip("--python", place / "fresh" / "bin" / "python", "install", "--no-deps", "--no-index", wheel)
    (packages,) = (place / "fresh" / "lib").glob("python*/site-packages")
    (packages / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
    shutil.rmtree(place / "copy")
    return place / "fresh" / "bin" / "haed"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder to work in, with nothing of the checkout or of Prefect in the environment."""
    for name in [name for name in os.environ if name.startswith(("PYTHON", "PREFECT", "HAED"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    (work := tmp_path / "work").mkdir()
    monkeypatch.chdir(work)
    return work


def said_by(haed: Path, *words: str) -> str:
    done = subprocess.run([haed, *words], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@contextmanager
def running(haed: Path, *words: str) -> Iterator[Path]:
    """A command until it is interrupted, and the file of what it says."""
    log = Path(f"{words[0]}.log")
    with open(log, "wb") as file:
        process = subprocess.Popen([haed, *words], stdout=file, stderr=file, start_new_session=True)
    try:
        yield log
        assert process.poll() is None, log.read_text()
        process.send_signal(signal.SIGINT)
        process.wait(PATIENCE)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        print(log.read_text()[-5000:])


def page(address: str) -> str:
    with urllib.request.urlopen(address, timeout=PATIENCE) as answer:
        return str(answer.read().decode())


def test_presets_travel_with_the_wheel(haed: Path, folder: Path) -> None:
    from pipeline.config import list_presets

    code = "import haed, data, pipeline, flows, pipeline.config as c\nprint(c.list_presets())\n"
    code += "print([m.__file__ for m in (haed, data, pipeline, flows)])"
    names, files = said_by(haed.with_name("python"), "-c", code).splitlines()
    assert names == str(list_presets()) and files.count(str(haed.parents[1])) == 4 and str(ROOT) not in files
    for preset in ("quickstart", "paper-wikitext103"):
        assert f"name: {preset}\n" in said_by(haed, "config", preset)


def test_an_installed_haed_trains_and_shows_its_run(haed: Path, folder: Path, text: Path) -> None:
    small = [*TINY, "source.kind=text", f"source.path={text}", *FEW, "name=quickstart"]
    found = json.loads(said_by(haed, "run", "--config", "quickstart", *small, "--json").splitlines()[-1])
    assert found["evaluation"]["split"] == "test" and Path("runs/quickstart/report.html").is_file()
    assert json.loads(Path("runs/quickstart/environment.json").read_text())["commit"] is None
    done = subprocess.run([haed, "experiment"], capture_output=True, text=True)
    assert done.returncode == 2 and "experiments are not part of the installed package. Clone" in done.stderr

    with running(haed, "explore", "quickstart", "--port", "0", "--json") as log:
        line = until(PATIENCE, lambda: log.read_text().startswith("{") and log.read_text().splitlines()[0])
        assert "quickstart" in page(json.loads(line)["address"])

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with running(haed, "serve", "--port", str(port), "--tensorboard-port", "0") as log:
        address = f"http://127.0.0.1:{port}"
        until(PATIENCE, lambda: "To schedule: " in log.read_text())
        assert call(address, "/health") is True and "quickstart" in page(f"{address}/runs/")
        assert call(address, "/deployments/filter", {})
