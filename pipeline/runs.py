"""The run folder: configuration, environment, lock, and where everything lies. See the README for its layout."""

import fcntl
import json
import os
import platform
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import IO, Any

from data.chunkers import Chunker, make_chunker
from data.corpus import Corpus
from pipeline.config import dump, load
from pipeline.files import read_json, write_atomically
from pipeline.options import Options

PHASES = ("finetune", "train", "pretrain")  # the order in which a finished model is looked for
FLOW_RUN = "HAED_FLOW_RUN"


class RunFolder:
    """Paths of a run, and the files that say what it is."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def create(cls, options: Options) -> "RunFolder":
        """Makes the folder of a run, if need be, and writes its complete configuration and environment into it.

        Raises:
            OSError: the folder cannot be written.
        """
        run = cls(Path(options.runs_dir) / options.name)
        run.path.mkdir(parents=True, exist_ok=True)
        write_atomically(run.path / "config.yaml", dump(options).encode())
        write_atomically(run.path / "environment.json", json.dumps(environment(options), indent=2).encode())
        return run

    @classmethod
    def find(cls, run: str | Path, runs_dir: str = "runs") -> "RunFolder":
        """Opens the folder of an existing run by path, or by name under `runs_dir`.

        Raises:
            FileNotFoundError: there is none, or it is not a run.
        """
        for path in (Path(run), Path(runs_dir) / run):
            if (path / "config.yaml").is_file():
                return cls(path)
        if Path(run).exists():
            raise FileNotFoundError(f"{run} is not a run: it has no config.yaml")
        known = sorted(path.parent.name for path in Path(runs_dir).glob("*/config.yaml"))
        hint = f"runs there: {', '.join(known[:10])}" if known else f"there are no runs in {runs_dir}/"
        raise FileNotFoundError(f"no run {str(run)!r}, neither a folder nor a name under {runs_dir}/; {hint}")

    def options(self, overrides: list[str] | tuple[str, ...] = ()) -> Options:
        """The run's configuration with some options changed, and names that lead back to this folder.

        Raises:
            ConfigError: it is not one of this version, or an override is wrong.
        """
        options = load(self.path / "config.yaml", overrides)
        options.name, options.runs_dir = self.path.resolve().name, str(self.path.parent)
        return options

    def corpus(self) -> Corpus:
        """The sharded corpus the run was trained on, found without its source.

        Raises:
            FileNotFoundError: it is not there any more, or nothing was trained yet.
        """
        return Corpus.open(self._corpus()["location"], self.options().loader)

    def chunker(self) -> Chunker:
        """The chunker of that corpus, without the corpus.

        Raises:
            FileNotFoundError: nothing was trained yet.
        """
        return make_chunker(self.options().chunker, self._corpus()["fitted"])

    def remember(self, corpus: Corpus) -> None:
        """Notes the corpus the run is trained on, and what its chunker learned from it."""
        location = corpus.location if corpus.is_remote else str(corpus.folder.resolve())
        self.write_json(
            "corpus.json",
            {
                "location": location,
                "digest": corpus.digest,
                "fitted": corpus.fitted,
                "statistics": corpus.manifest.get("statistics"),
            },
        )

    def _corpus(self) -> dict[str, Any]:
        try:
            found = read_json(self.path / "corpus.json", ("location", "digest", "fitted"))
        except FileNotFoundError:
            raise FileNotFoundError(
                f"{self.path} was not trained yet: run `haed pretrain` or `haed train` first"
            ) from None
        if not isinstance(found["location"], str):
            raise ValueError(f"{self.path}/corpus.json is damaged: location is not a text")
        return found

    def phase(self, name: str) -> Path:
        """Folder of a training phase: pretrain, finetune or train."""
        return self.path / name

    def trained_phase(self, wanted: str | None = None) -> str:
        """The wanted phase, or the last one that has a checkpoint: finetune, else train, else pretrain.

        Raises:
            FileNotFoundError: it, or anything, was not trained yet.
        """
        for name in (wanted,) if wanted else PHASES:
            if (self.phase(name) / "checkpoints" / "latest").is_file():
                return name
        stage = wanted or "pretrain` or `haed train"
        raise FileNotFoundError(
            f"{self.path} has no checkpoint{f' of {wanted}' if wanted else ''} yet: train it with `haed {stage}` first"
        )

    def digest(self, wanted: str | None = None) -> str:
        """Of the checkpoint that is evaluated, sampled from and indexed: what was made from it carries the same.

        Raises:
            FileNotFoundError: nothing was trained yet.
        """
        checkpoints = self.phase(self.trained_phase(wanted)) / "checkpoints"
        pointer = next(path for name in ("best", "latest") if (path := checkpoints / name).is_file())
        state = read_json(checkpoints / Path(pointer.read_text().strip()).name / "state.json", ("digest",))
        return str(state["digest"])

    def is_made(self, name: str, options: Options, **settings: Any) -> bool:
        """Whether a JSON file of the run was made from its present checkpoint, with these settings."""
        try:
            found = read_json(self.path / name, ("checkpoint", *settings))
            return found["checkpoint"] == self.digest(options.evaluate.stage) and settings.items() <= found.items()
        except (OSError, ValueError, TypeError):
            return False

    def write_json(self, name: str, value: Any) -> Path:
        """Writes `value` as a JSON file of the run, whole or not at all."""
        path = self.path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode())
        return path

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Holds the run for this process; freed by the end of the process, however it ends.

        The environment's HAED_FLOW_RUN, if set, names the Prefect flow run on whose behalf it is held.

        Raises:
            BlockingIOError: another process holds it; the message names it.
        """
        with open(self.path / "lock", "a+") as file:
            try:
                _take(file)
            except BlockingIOError:
                file.seek(0)
                holder = file.read().strip() or "another process"
                raise BlockingIOError(f"{self.path} is in use by {holder}; wait for it or stop it") from None
            file.seek(0)
            file.truncate()
            flow_run = f", flow run '{name}'" if (name := os.environ.get(FLOW_RUN)) else ""
            file.write(f"process {os.getpid()} on {socket.gethostname()}{flow_run}")
            file.flush()
            yield


def _take(file: IO[str], patience: float = 1.0) -> None:
    """Locks a file; a holder that is just being killed gets a moment to be gone."""
    end = time.monotonic() + patience
    while True:
        try:
            return fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > end:
                raise
        time.sleep(0.05)


def environment(options: Options) -> dict[str, Any]:
    """What a result depends on beside the configuration: versions, commit, machine, seed, device."""
    packages = ("torch", "numpy", "webdataset", "faiss-cpu", "omegaconf", "pydantic")
    try:
        commit = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=12"],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        commit = None
    return {
        "versions": {"python": platform.python_version()} | {name: version(name) for name in packages},
        "commit": commit,
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
        "seed": options.seed,
        "device": options.device,
        "threads": options.threads or os.cpu_count(),
    }
