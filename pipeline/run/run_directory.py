"""The run folder: configuration, environment, lock, and paths of all files. docs/reference/file-formats.md has its layout.

Every reader of a run calls `RunFolder.check_unchanged` first: configuration and corpus must be those its checkpoint was trained
with. Every writer holds `RunFolder.lock`, and has checked before everything that could be refused.
"""

import difflib
import hashlib
import logging
import os
import platform
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from copy import deepcopy
from dataclasses import asdict, replace
from functools import lru_cache, wraps
from importlib.metadata import version
from pathlib import Path
from typing import IO, Any, Concatenate, ParamSpec, Self, TypeVar

from data.chunkers import Chunker, make_chunker
from data.corpus import MANIFEST, Corpus
from data.filesystem import (
    CorruptFileError,
    Guard,
    acquire_lock,
    check_guards,
    guard_folder,
    hold_lock_file,
    make_folders,
    open_file,
    read_lock_holder,
    remove_unlocked_files,
    stamp_file,
    write_atomically,
    write_json,
    write_lock_holder,
)
from data.urls import is_remote, redact_urls
from data.vocabulary import frequent_words
from pipeline.config import ConfigError, Options, Phase, dump_options, list_presets, load_options
from pipeline.console import warn_once
from pipeline.run.checkpoints import (
    Checkpoint,
    choose_checkpoint,
    has_checkpoint,
    identity_differences,
    load_chosen,
    make_identity,
)
from pipeline.run.files import CorpusRecord, Environment, read_as
from pipeline.suggestions import format_command

log = logging.getLogger(__name__)
P = ParamSpec("P")
T = TypeVar("T")
LATEST_FIRST: tuple[Phase, ...] = ("finetune", "train", "pretrain")  # the order in which a finished model is looked for
_LISTED = 10  # runs that an error names
CONFIG, ENVIRONMENT, CORPUS = "config.yaml", "environment.json", "corpus.json"
FREQUENT = 3  # chunks that are noted as prompts
_EVERY = ("runs_dir", "device", "threads", "deterministic", "evaluate.precision", "loader")
_LIKELIHOOD = ("evaluate.stage", "evaluate.likelihood", "evaluate.memory", "evaluate.parts", "batch.context")
_TRAINED_IN = ". precision= applies to training. Use evaluate.precision=bf16 to read in another precision"
READS = {  # what can be given to a stage that reads a trained run: options, and whole sections
    "evaluate": (*_EVERY, "tracking", "evaluate", "batch.context"),
    "sample": (*_EVERY, *_LIKELIHOOD, "tracking", "sample"),
    "next": (*_EVERY, *_LIKELIHOOD),
    "index": (*_EVERY, "evaluate.stage", "index", "batch.context"),
    "neighbours": (*_EVERY, "evaluate.stage", "batch.context"),
    "analyse": (*_EVERY, "seed", "evaluate.stage", "analyse"),
    "report": (*_EVERY, "tracking", "evaluate.stage", "index"),
    "profile": (*_EVERY, "precision", "seed", "compile", "batch", "model", "iem", "optimizer", *reversed(LATEST_FIRST)),
}


class RunFolder:
    """Paths of a run, and the files that say what it is."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def from_options(cls, options: Options) -> Self:
        """Return the folder of the run with these options, whether it exists or not."""
        return cls(Path(options.runs_dir) / options.name)

    @classmethod
    def create(cls, options: Options) -> Self:
        """Create the folder of a run if needed, and write its full configuration and environment.

        Raises:
            OSError: the folder cannot be written.
        """
        run = cls.from_options(options)
        check_guards(run.path)
        run.path.mkdir(parents=True, exist_ok=True)
        remove_unlocked_files(run.path.rglob(".*.partial"))  # files of processes that were killed
        write_atomically(run.path / CONFIG, dump_options(options).encode())
        run.write_json(ENVIRONMENT, asdict(describe_environment(options)))
        return run

    def restore_missing_files(self, options: Options, corpus: Corpus) -> None:
        """Write a run's own files again if they were removed during training, for example by a cleaner of old files.

        Raises:
            OSError: a file cannot be written.
        """
        missing = [name for name in (CONFIG, ENVIRONMENT, CORPUS) if not os.path.lexists(self.path / name)]
        for name in missing:
            log.warning("%s was removed during training. It is written again", self.path / name)
            if name == CONFIG:
                write_atomically(self.path / CONFIG, dump_options(options).encode())
            elif name == ENVIRONMENT:
                self.write_json(ENVIRONMENT, asdict(describe_environment(options)))
            else:
                self.write_corpus_record(corpus)

    @classmethod
    def find(cls, run: str | Path, runs_dir: str = "runs") -> Self:
        """Open the folder of an existing run by path, or by name under `runs_dir`.

        Raises:
            FileNotFoundError: it does not exist, or is not a run.
        """
        if not str(run):
            raise FileNotFoundError(f"a run has no empty name; {describe_runs(runs_dir)}")
        run, runs_dir = Path(run).expanduser(), os.path.expanduser(runs_dir)
        for path in (run, Path(runs_dir) / run):
            if os.path.lexists(path / "config.yaml"):
                return cls(path)
        for path in (run, Path(runs_dir) / run):
            if any((path / phase / "checkpoints").is_dir() for phase in LATEST_FIRST):
                advice = "The command with all of its options, and not with its name, writes it again"
                raise FileNotFoundError(f"{path} has checkpoints, but no config.yaml. {advice}")
        hint = describe_runs(runs_dir, str(run)) + _suggest_instead(str(run))
        if run.exists():
            raise FileNotFoundError(f"{run} is not a run: it has no config.yaml; {hint}")
        raise FileNotFoundError(f"no run {str(run)!r}: it is neither a folder nor a name under {runs_dir}/; {hint}")

    def load_options(
        self, overrides: list[str] | tuple[str, ...] = (), reader: str | None = None, *, log_changes: bool = False
    ) -> Options:
        """Load the run's configuration with some options changed; `name` and `runs_dir` are set to this folder.

        Args:
            overrides: `key=value` pairs.
            reader: the stage that reads the run, which accepts the options in `READS`; None if the run is to be
                trained.
            log_changes: log which of the overrides have no effect.

        Raises:
            ConfigError: the configuration is not of this version, or an override is wrong or does not apply.
        """
        path = self.path / CONFIG
        open_file(path, self.path).close()  # no link that leads out of the run
        options = (
            load_options(path, overrides, log_changes=log_changes)
            if overrides
            else deepcopy(_load_stamped_options(path.absolute(), tuple(stamp_file(path))))
        )
        keys = [override.split("=", 1)[0] for override in overrides]
        takes = READS.get(reader or "", ())
        for key in keys:
            readers = [name for name, those in READS.items() if any(f"{key}.".startswith(f"{each}.") for each in those)]
            if reader and reader not in readers:
                also = f". {key}= is for {', '.join(map(format_command, readers))}" if readers else ""
                also = _TRAINED_IN if key == "precision" else also
                raise ConfigError(
                    f"{key}= cannot be changed in an existing run. {format_command(reader)} takes {', '.join(takes)}{also}"
                )
        if "name" in keys:
            raise ConfigError(f"name= and {self.path} both name a run. Leave one of them out")
        # A link has its own name.
        named = self.path if self.path.name not in ("", "..") else Path(os.path.abspath(self.path))
        options.name, options.runs_dir = named.name, str(named.parent)
        return options

    def open_corpus(self) -> Corpus:
        """Open the sharded corpus that the run was trained on, without its source.

        Raises:
            FileNotFoundError: the shards are missing, or nothing was trained yet.
            ValueError: another corpus is in its place.
        """
        remembered, options = self.read_corpus_record(), self.load_options()
        location = remembered.location
        if is_remote(location):
            log.warning("%s/corpus.json says where the shards are: %s", self.path, redact_urls(location))
            places = [location]
        else:  # where it lies from the run, with which it may have been moved; where it lay; where such are kept
            beside = os.path.normpath(self.path.resolve() / (remembered.beside or location))
            kept = Path(options.shards_dir) / Path(location).name
            places = [beside, location, str(kept), str(self.path.parent.parent / kept)]
            places = [place for place in dict.fromkeys(places) if os.path.lexists(Path(place) / MANIFEST)]
        corpora = [Corpus.open(place, options.loader) for place in places]
        if not corpora:
            advice = f"make them again: {format_command('shard', '--config', self.path / 'config.yaml')}"
            if options.source.kind == "shards" and self.is_trained():
                again = format_command(self.trained_phase(), self.path, "source.path=FOLDER")
                advice = f"name their new place: {again}"
            raise FileNotFoundError(f"the shards of {self.path} are not at {location}. Put them back, or {advice}")
        for corpus in corpora:
            same = (corpus.digest, corpus.fitted) == (remembered.digest, remembered.fitted)
            if same and corpus.options == options.chunker:
                return corpus
        raise ValueError(
            f"{corpora[0].location} is not the corpus that {self.path} was trained on: {corpora[0].digest}"
        )

    def load_chunker(self) -> Chunker:
        """Return the chunker of the run's corpus, without opening the corpus.

        Raises:
            FileNotFoundError: nothing was trained yet.
        """
        record = self.read_corpus_record()
        return make_chunker(self.load_options().chunker, record.fitted, record.chunker_version)

    def write_corpus_record(self, corpus: Corpus) -> None:
        """Write corpus.json: the corpus that the run is trained on, and the state its chunker learned from it.

        Frequent words are counted once, so that a run whose shards were damaged since can be resumed.
        """
        place, frequent = corpus.folder.resolve(), None
        with suppress(FileNotFoundError, CorruptFileError):
            before = read_as(CorpusRecord, self.path / CORPUS)
            frequent = before.frequent if before.digest == corpus.digest else None
        remembered = CorpusRecord(
            location=corpus.location if corpus.is_remote else str(place),
            beside=None if corpus.is_remote else os.path.relpath(place, self.path.resolve()),
            digest=corpus.digest,
            fitted=corpus.fitted,
            chunker_version=corpus.chunker_version,
            frequent=frequent_words(corpus, FREQUENT) if frequent is None else frequent,
            statistics=corpus.statistics,
            form=corpus.form,
        )
        self.write_json(CORPUS, asdict(remembered))

    def read_corpus_record(self) -> CorpusRecord:
        """Return the contents of corpus.json, without opening the corpus.

        Raises:
            FileNotFoundError: nothing was trained yet, or the file is missing.
        """
        try:
            return read_as(CorpusRecord, self.path / CORPUS)
        except FileNotFoundError:
            if self.is_trained():
                raise FileNotFoundError(
                    f"{self.path / CORPUS} is missing, which says what the run was trained on. Run "
                    f"{format_command(self.trained_phase(), self.path)}, which writes it again"
                ) from None
            raise FileNotFoundError(
                f"{self.path} is not trained. Run {format_command('pretrain', self.path)} or "
                f"{format_command('train', self.path)} first"
            ) from None

    def phase_folder(self, name: str) -> Path:
        """Return the folder of a training phase: pretrain, finetune or train."""
        return self.path / name

    def find_first_run(self, options: Options) -> "RunFolder":
        """Return the run whose phase one phase two starts from: this one, or that of `finetune.start_from`.

        Raises:
            FileNotFoundError: there is no such run.
        """
        start = options.finetune.start_from
        return RunFolder.find(start, options.runs_dir) if start else self

    def phase_history(self, options: Options) -> dict[str, Path]:
        """Return the folders of the phases behind the model by name, existing or not.

        With `finetune.start_from`, phase one is named `pretrain of OTHER`.
        """
        folders = {name: self.phase_folder(name) for name in ("train", "pretrain", "finetune")}
        if not folders["finetune"].is_dir() or not (start := options.finetune.start_from):
            return folders
        try:
            folders["pretrain"] = self.find_first_run(options).phase_folder("pretrain")
        except FileNotFoundError:
            folders["pretrain"] = self.path / "gone"
            log.warning("%s started from phase one of %s, which is missing. Its curves are not shown", self.path, start)
        return {f"pretrain of {start}" if name == "pretrain" else name: path for name, path in folders.items()}

    def is_trained(self) -> bool:
        """Return whether any phase has a checkpoint."""
        return any(has_checkpoint(self.phase_folder(name) / "checkpoints") for name in LATEST_FIRST)

    def trained_phase(self, wanted: Phase | None = None) -> Phase:
        """Return the wanted phase, or the last one that has a checkpoint: finetune, else train, else pretrain.

        Raises:
            FileNotFoundError: the wanted phase, or every phase, has no checkpoint.
        """
        for name in (wanted,) if wanted else LATEST_FIRST:
            if has_checkpoint(self.phase_folder(name) / "checkpoints"):
                return name
        stages = (wanted,) if wanted else ("pretrain", "train")
        commands = " or ".join(format_command(stage, self.path) for stage in stages)
        raise FileNotFoundError(
            f"{self.path} has no checkpoint{f' of {wanted}' if wanted else ''}. Train it with {commands} first"
        )

    def select_checkpoint(self, wanted: Phase | None = None, load: bool = False) -> Checkpoint:
        """Return the checkpoint that is evaluated, sampled from, indexed and shown; see `choose_checkpoint`.

        Warn, once a command, if a later phase than the one used has begun and has no checkpoint. With `load`, the model
        is loaded.

        Raises:
            FileNotFoundError: nothing was trained yet.
            ValueError: no checkpoint is whole.
        """
        phase = self.trained_phase(wanted)
        checkpoint = (load_chosen if load else choose_checkpoint)(self.phase_folder(phase) / "checkpoints")
        for later in LATEST_FIRST[: LATEST_FIRST.index(phase)] if wanted is None else ():
            folder = self.phase_folder(later)
            if os.path.isfile(path := folder / "metrics.jsonl") and os.path.getsize(path):
                reason = warn_once(f"{folder} has metrics but no checkpoint; using that of {phase} instead")
                return replace(checkpoint, fallback="; ".join(filter(None, [reason, checkpoint.fallback])))
        return checkpoint

    def check_unchanged(self, options: Options | None = None, checkpoint: Checkpoint | None = None) -> None:
        """Check that configuration and corpus are those of the checkpoint; every reader of a run does so first.

        Args:
            options: the configuration that the run is read with; None is the run's own.
            checkpoint: the checkpoint; None is the present one.

        Raises:
            FileNotFoundError: nothing was trained yet.
            ValueError: config.yaml or corpus.json was changed since, or `options` describe another model.
        """
        checkpoint = checkpoint or self.select_checkpoint(options.evaluate.stage if options else None)
        corpus = self.read_corpus_record().digest
        if differences := identity_differences(checkpoint.identity, make_identity(self.load_options(), corpus)):
            place = "corpus.json" if differences[0].startswith("corpus=") else "config.yaml"
            raise ValueError(
                f"{checkpoint.path} was trained with {differences[0]}, but {self.path / place} says {differences[1]}. Set it back"
            )
        if options is None:
            return
        wanted = make_identity(options, corpus)
        wanted["batch"] = checkpoint.identity["batch"]  # evaluation may take other windows
        if differences := identity_differences(checkpoint.identity, wanted):
            raise ValueError(
                f"{checkpoint.path} was trained with {differences[0]}. {differences[1]} cannot change that"
            )

    def is_current(self, name: str, options: Options, section: str) -> bool:
        """Return whether a JSON file of the run was made from its present checkpoint, with the options of this section."""
        try:
            content = read_as(dict[str, Any], self.path / name)
            present = self.select_checkpoint(options.evaluate.stage).digest
            return (content["checkpoint"], content["options"]) == (present, asdict(getattr(options, section)))
        except (OSError, ValueError, TypeError, KeyError):
            return False

    def write_json(self, name: str, value: Any) -> Path:
        """Write `value` atomically as a JSON file of the run, with its checksum."""
        path = self.path / name
        make_folders(path.parent, within=self.path)
        write_json(path, value)
        return path

    @contextmanager
    def lock(self) -> Iterator[Guard]:
        """Lock the run for this process and guard its folder; the lock ends with the process, however it ends.

        The folder is created if needed, and removed again if nothing was written into it. The environment variable
        HAED_FLOW_RUN names the Prefect flow run that holds the lock.

        Raises:
            BlockingIOError: another process holds the lock; the message names it.
            OSError: the folder cannot be written.
        """
        new_folders = [folder for folder in (self.path, *self.path.parents) if not folder.exists()]
        with self._open_lock() as file:
            write_lock_holder(self.path / "lock", file)
            try:
                with guard_folder(self.path, (self.path / "lock", file)) as guard:
                    try:
                        yield guard
                    finally:
                        with suppress(OSError):
                            guard.check_unchanged()  # else what is there is another process's
                            if new_folders and [path.name for path in self.path.iterdir()] == ["lock"]:
                                (self.path / "lock").unlink()
                                for folder in new_folders:
                                    folder.rmdir()
            finally:
                file.truncate(0)

    def lock_holder(self) -> str | None:
        """Return a description of the process that holds the run's lock, such as a training; None if it is free."""
        return read_lock_holder(self.path / "lock")

    @contextmanager
    def reserve(self) -> Iterator[None]:
        """Keep the run from being renamed, archived or deleted while no stage holds its lock, such as between two stages.

        The file that is locked lies beside the run's folder, which need not exist yet. The reservation ends with the
        process, however it ends.

        Raises:
            BlockingIOError: another process has reserved the run; the message names it.
            OSError: the folder of runs cannot be written.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with hold_lock_file(self._reservation, self._refuse, patience=1.0):
            yield

    def user(self) -> str | None:
        """Return a description of the process that works on the run or has reserved it; None if nobody has."""
        return self.lock_holder() or read_lock_holder(self._reservation)

    @property
    def _reservation(self) -> Path:
        digest = hashlib.sha256(os.fsencode(self.path.name)).hexdigest()  # a name may be as long as a file's can be
        return self.path.with_name(f".{digest[:16]}.reserved")

    def _refuse(self, holder: str) -> None:
        raise BlockingIOError(f"{self.path} is in use by {holder}. Wait for it or stop it")

    def _open_lock(self) -> IO[bytes]:
        while True:
            self.path.mkdir(parents=True, exist_ok=True)
            with suppress(FileNotFoundError):  # another, which had made the folder, has taken it away again
                return acquire_lock(self.path / "lock", self._refuse, patience=1.0)


@lru_cache(4096)
def _load_stamped_options(path: Path, stamp: tuple[int, ...]) -> Options:
    """Load the options in a config.yaml, which takes long; another stamp makes a changed file load again."""
    if not path.stat().st_size:
        raise ConfigError(f"{path} is empty")
    return load_options(path)


def stage_overrides(stage: Phase | None) -> list[str]:
    """Return the override that selects the checkpoint of a phase; an empty list selects the last phase."""
    return [f"evaluate.stage={stage}"] if stage else []


def guard_results(stage: Callable[Concatenate[Options, P], T]) -> Callable[Concatenate[Options, P], T]:
    """Decorate a stage that reads a run: its results go into the folder it began with, or are not written."""

    @wraps(stage)
    def execute(options: Options, /, *more: P.args, **named: P.kwargs) -> T:
        path = RunFolder.from_options(options).path
        with guard_folder(path) if path.is_dir() else nullcontext() as guard:
            try:
                return stage(options, *more, **named)
            except (OSError, ValueError):
                if guard is not None:
                    guard.check_unchanged()  # else a run that was renamed meanwhile would be said not to be trained
                raise

    return execute


def list_runs(runs_dir: str | Path) -> list[str]:
    """Return the names of the runs in a folder, the one that was written last first."""
    written = dict[str, float]()
    for path in Path(runs_dir).glob("[!.]*/config.yaml"):  # a run that is being deleted has a hidden name
        with suppress(OSError):  # it was renamed or deleted meanwhile
            written[path.parent.name] = path.stat().st_mtime
    return sorted(written, key=lambda name: -written[name])


def describe_runs(runs_dir: str = "runs", near: str = "") -> str:
    """Return a sentence that lists the runs in a folder, or says how to make one.

    Those with a name like `near` come first, then the newest.
    """
    names = list_runs(runs_dir)
    if not names:
        return f"there are no runs in {runs_dir}/. Make one with `haed run --config quickstart`"
    alike = difflib.get_close_matches(near, names, _LISTED)
    listed = [*alike, *(name for name in names if name not in alike)][:_LISTED]
    return f"runs in {runs_dir}/: {', '.join(listed)}{f', … ({len(names)} in all)' if len(names) > _LISTED else ''}"


def _suggest_instead(name: str) -> str:
    """Suggest what to type if there is no run of that name."""
    if name in list_presets():
        return f". {name} is a preset: `haed run --config {name}` makes a run of it"
    if Path(name).suffix in (".yaml", ".yml", ".json") and os.path.isfile(name):
        return f". Give a configuration as `--config {name}`"
    return f". To train on it, use source.path={name}" if os.path.exists(name) else ""


def describe_environment(options: Options) -> Environment:
    """Return everything besides the configuration that a result depends on: versions, commit, machine, device."""
    import torch  # whose own version tells the build for CUDA, unlike that of the package

    from pipeline.run.device import describe_compute

    processor, precision = describe_compute(options)
    packages = ("numpy", "faiss-cpu", "pydantic")
    root, commit = Path(__file__).resolve().parents[2], None
    if (root / ".git").exists():  # else it is installed, maybe within somebody else's repository
        command = ["git", "describe", "--always", "--dirty", "--abbrev=12"]
        with suppress(OSError, subprocess.CalledProcessError):
            commit = subprocess.check_output(command, cwd=root, text=True, stderr=subprocess.DEVNULL).strip()
    return Environment(
        versions={"python": platform.python_version(), "torch": str(torch.__version__)}
        | {name: version(name) for name in packages},
        commit=commit,
        machine=f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
        seed=options.seed,
        device=options.device,
        processor=processor,
        precision=precision,
        threads=torch.get_num_threads(),  # `compute` has set it
        processes=torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1,
    )
