"""The stage `shard`, and opening the corpora it made; only `shard` reads the source."""

import logging
import os
import pickle
import time
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from data.build import check_chunker, open_built_corpus
from data.build import shard as shard_corpus
from data.corpora import Corpora, EmptyInputError, is_piped
from data.corpus import Corpus, Counts
from data.filesystem import FolderLostError
from data.options import SourceOptions
from data.parts import Listener, Mapper, Part, ShardingProgress, write_persistently
from data.sources.source import SPLITS, make_source
from data.urls import is_remote
from pipeline.config import Options, diff_trees
from pipeline.console import warn_on_first_rank
from pipeline.run.metrics import StatusLine
from pipeline.run.run_directory import RunFolder

log = logging.getLogger(__name__)


def shard_source(options: Options, mapper: Mapper | None = None, listener: Listener = lambda status: None) -> Corpus:
    """Cut the source into shards under `shards_dir`, or open them if they are finished.

    Args:
        options: the run's options.
        mapper: maps the work over parts, see `data.build.shard`; None uses local processes, or
            `launcher.dask`.
        listener: called with the progress twice a second.

    Raises:
        FileNotFoundError: the source does not exist.
        ValueError: the source is empty, or not of the kind that `source.kind` says.
    """
    if options.source.kind == "shards":
        return open_shards(options)
    source, shards_dir = options.source, Path(options.shards_dir)
    if options.launcher.dask:  # whose workers may have another working directory
        shards_dir, path = shards_dir.resolve(), source.path
        if path and not is_remote(path) and (os.path.exists(path) or set("*?[{") & set(path)):
            source = replace(source, path=os.path.abspath(path))
        mapper = mapper or partial(_map_on_dask, options.launcher.dask, options.shard.workers)
    status, is_done = StatusLine(time.monotonic()), False

    def show_progress(progress: ShardingProgress) -> None:
        nonlocal is_done
        listener(progress)
        ends = progress.done == progress.parts and not is_done
        is_done = progress.done == progress.parts
        status.show(lambda: progress.format_line("shard"), progress.share, now=ends)

    try:
        with closing(status):
            return shard_corpus(source, options.chunker, options.shard, shards_dir, mapper, show_progress)
    except (EmptyInputError, FileNotFoundError) as error:
        if (run_corpus := _find_run_corpus(options)) is None:
            raise
        if isinstance(error, EmptyInputError):
            log.info("%s was empty, so the corpus that was piped in before is taken", error.source)
        else:
            log.info("source.path=%s is not there, seen from here, so the run's own corpus is taken", source.path)
        return run_corpus


@contextmanager
def open_dask_client(address: str, workers: int) -> Iterator[Any]:
    """Yield a client of a Dask cluster, or of a local one of `workers` processes if the address is `local`."""
    try:
        from distributed import Client, LocalCluster
    except ImportError as error:
        raise ValueError("launcher.dask needs Dask. Install it with pip install 'haed[dask]'") from error
    # Each start and end of a process is a line, and each lost connection a traceback.
    for name in ("distributed", "distributed.client"):  # the latter has a level and a handler of its own
        logging.getLogger(name).setLevel(logging.CRITICAL)
    logging.getLogger("asyncio").addFilter(_is_not_of_dask)  # what a client that is stopped leaves
    with ExitStack() as held:
        where: Any = address
        if address == "local":
            try:
                where = LocalCluster(
                    n_workers=workers, threads_per_worker=1, host="127.0.0.1", dashboard_address="127.0.0.1:0"
                )
            except RuntimeError as error:
                raise OSError(f"Dask could not start its workers: {str(error).rstrip('.')}. Try again") from error
            held.enter_context(where)
        else:
            _check_scheduler_answers(address)
        try:
            client = held.enter_context(Client(where))
        except OSError as error:
            raise OSError(f"launcher.dask={address}: no scheduler of Dask answers there ({error})") from error
        if not client.scheduler_info()["workers"]:
            log.warning("launcher.dask=%s has no workers yet. Sharding begins as soon as one comes", address)
        with explain_dask_errors(address):
            yield client


def _check_scheduler_answers(address: str) -> None:
    """Raise OSError unless a scheduler is at an address. A client would wait for ever for the answer of a web server."""
    import dask
    from dask.utils import parse_timedelta
    from distributed import Security, rpc
    from distributed.utils import LoopRunner

    async def ask_kind() -> str:
        async with rpc(address, connection_args=Security().get_connection_args("client")) as there:
            return str((await there.identity())["type"])

    seconds = parse_timedelta(dask.config.get("distributed.comm.timeouts.connect"))
    try:  # a little later than the time-out of the connection itself, which says more
        kind = LoopRunner().run_sync(ask_kind, callback_timeout=seconds + 1)
    except Exception as error:  # whatever a stranger answers
        why = str(error).rstrip(".") or f"no answer in {seconds:g} s"
        raise OSError(f"launcher.dask={address}: no scheduler of Dask answers there ({why})") from error
    if kind != "Scheduler":
        raise OSError(f"launcher.dask={address} is a {kind.lower()} of Dask. Give the address of its scheduler")


def _is_of_dask(kind: type[BaseException]) -> bool:
    return kind.__module__.partition(".")[0] == "distributed"


def _is_not_of_dask(record: logging.LogRecord) -> bool:
    return not (record.exc_info and record.exc_info[0] and _is_of_dask(record.exc_info[0]))


class ClusterError(ChildProcessError):
    """An error: a Dask cluster was lost, or its workers die. To try a part again does not help."""


@contextmanager
def explain_dask_errors(address: str, part: Part | None = None) -> Iterator[None]:
    """Raise errors of Dask itself as `ClusterError`, and those of workers that lack what is here; others pass.

    Args:
        address: `launcher.dask`.
        part: what a worker writes, or one of the parts; None: no worker is asked.
    """
    try:
        yield
    except (ImportError, FileNotFoundError, FolderLostError) as error:
        if part is None:
            raise
        why = f"a worker has other packages than this machine: {error}. Install the same there"
        if not isinstance(error, ImportError):
            path = part.folder.parent if isinstance(error, FolderLostError) else error.filename
            if path is None or not os.path.exists(path):
                raise
            why = f"a worker does not find {path}, which is here. The cluster must see the source and shards_dir"
        raise ClusterError(f"launcher.dask={address}: {why}") from error
    except Exception as error:
        if not _is_of_dask(type(error)) and not isinstance(error, CancelledError):
            raise
        why = f"the cluster was lost ({type(error).__name__})"
        if type(error).__name__ == "KilledWorker":
            why = "its workers died of the same part again and again, perhaps because memory ran out"
        raise ClusterError(
            f"launcher.dask={address}: {why}. Finished parts stay. Run the same command again"
        ) from error


@dataclass(frozen=True)
class RemoteWrite:
    """A call of `write_remotely` that a worker of Dask makes when it unpickles this: `pickle.loads` is the task.

    Dask itself unpickles tasks outside of them. A worker that cannot import their modules ends there, as all do in turn.
    """

    versions: dict[str, str]
    write: Callable[[Part], None]
    part: Part

    def __reduce__(self) -> tuple[Callable[..., None], tuple[Any, ...]]:
        return write_remotely, (self.versions, self.write, self.part)


def find_versions(source: SourceOptions) -> dict[str, str]:
    """Return the versions of the packages that decide which bytes a worker writes, as far as they are installed."""
    versions = dict[str, str]()
    for name in ("haed", *make_source(source).decoder_versions()):
        with suppress(PackageNotFoundError):
            versions[name] = version(name)
    return versions


def write_remotely(versions: dict[str, str], write: Callable[[Part], None], part: Part) -> None:
    """Write a part on a worker of Dask.

    Raises:
        ImportError: a package is missing or of another version.
    """
    for name, wanted in versions.items():
        if (installed := version(name)) != wanted:
            raise ImportError(f"{name} is {installed}, not {wanted}")
    write(part)


def _map_on_dask(address: str, workers: int, write: Any, parts: tuple[Part, ...]) -> None:
    versions = find_versions(parts[0].source)
    calls = [pickle.dumps(RemoteWrite(versions, write_persistently, part)) for part in parts]
    with open_dask_client(address, workers) as client, explain_dask_errors(address, parts[0]):
        client.gather(client.map(pickle.loads, calls, pure=False, key="write_part"))


def check_source(options: Options) -> None:
    """Raise early the errors that the first look at the source would raise.

    Raises:
        FileNotFoundError: the source does not exist.
        ValueError: the source is empty or not of its kind.
    """
    source = options.source
    if source.kind == "shards" or is_piped(source):
        return
    check_chunker(source, options.chunker)
    try:
        next(iter(make_source(source).inputs(1 << 24, 1)), None)
    except FileNotFoundError:
        # `shard` goes on with the last corpus of this path, or with the run's own.
        if _find_corpora(options).find_last_corpus() is None and _find_run_corpus(options) is None:
            raise


def check_corpus(options: Options) -> str | None:
    """Compare the corpus of the run of this name with the present content of the source, before anything is cut.

    The source's contents are hashed for this. `shard_source` does the same and caches the hashes.

    Returns:
        The digest of the corpus; None if it is not known yet.

    Raises:
        ValueError: the run was trained on another corpus.
    """
    run, now = RunFolder.from_options(options), options.source
    trained_on = None
    try:
        if any(run.path.glob("*/checkpoints/step-*")):
            trained_on = run.read_corpus_record().digest
            then = run.load_options()
            if all(getattr(options, each) == getattr(then, each) for each in ("source", "chunker", "shard")):
                return trained_on
        if now.kind == "shards":
            present = None if now.path is None or is_remote(now.path) else Corpus.open(now.path).digest
        else:
            corpora = _find_corpora(options)
            last = corpora.find_last_corpus()
            if trained_on is None:
                return None if last is None else last.name.rpartition("-")[2]
            present = None if corpora.piped else corpora.folder.name.rpartition("-")[2]
    except (OSError, ValueError) as error:  # who needs it says so
        log.debug("the corpora are not compared: %s", error)
        return None
    if trained_on is None or present is None or present == trained_on:
        return present
    before, after = (
        {"source": asdict(x.source), "chunker": asdict(x.chunker), "shard": {"megabytes": x.shard.megabytes}}
        for x in (then, options)
    )
    changed = list(diff_trees(before, after))[:3]
    was, differs = (" ".join(x) for x in ([x.given_before for x in changed], [x.given_now for x in changed]))
    if not changed:
        was = f"source.kind={now.kind}" + (f" source.path={now.path}" if now.path else "")
        differs = "the same source with other contents"
    raise ValueError(
        f"{run.path} was trained on another corpus: {was}, not {differs}. Use another name= for a new run, or restore that"
    )


def _find_corpora(options: Options) -> Corpora:
    return Corpora(options.source, options.chunker, options.shard, Path(options.shards_dir))


def open_shards(options: Options) -> Corpus:
    """Open the corpus to train on, without reading its source.

    If a run of this name was trained on the same source and chunker, its corpus is opened. Else it is the last one that
    `haed shard` made with these options, or, with `source.kind=shards`, the one at `source.path`.

    Raises:
        FileNotFoundError: the source was not sharded yet.
        ValueError: the corpus was cut with another chunker, or its manifest is of another corpus.
    """
    run_corpus = _find_run_corpus(options)
    if run_corpus is not None:
        return run_corpus
    if options.source.kind == "shards":
        if not options.source.path:
            example = "the folder or URL of a sharded corpus, such as source.path=shards/NAME"
            raise ValueError(f"source.kind=shards needs source.path=, {example}")
        corpus = Corpus.open(options.source.path, options.loader)
        if corpus.options != options.chunker:
            wanted, cut = asdict(options.chunker), asdict(corpus.options)
            key = next(key for key in wanted if wanted[key] != cut[key])
            raise ValueError(
                f"{corpus.location} was cut with chunker.{key}={cut[key]}, not {wanted[key]}. Set chunker.{key}={cut[key]}"
            )
    else:
        corpora = _find_corpora(options)
        folder = corpora.find_last_corpus()
        if folder is None and corpora.piped:
            raise FileNotFoundError("standard input was not sharded with these options. Pipe it to `haed shard` first")
        if folder is None:
            check_corpus(options)  # a run of another corpus could not go on with these either
            raise FileNotFoundError(
                f"{options.shards_dir} has no shards of this source and chunker. Run `haed shard` with the same options first"
            )
        corpus = open_built_corpus(folder, options.chunker)
        if corpora.has_changed():
            warn_on_first_rank(
                "%s was changed or copied after %s was made from it. Run `haed shard` to check",
                corpora.source_name,
                folder,
            )
    log.info("corpus: %s", corpus.location)
    return corpus


def _find_run_corpus(options: Options) -> Corpus | None:
    """Return the corpus of the run of this name, if it was trained on this source and chunker; else None."""
    run = RunFolder.from_options(options)
    if not any(run.path.glob("*/checkpoints/step-*")):
        return None
    try:
        now, was = ((each.source, each.chunker, each.shard.megabytes) for each in (options, run.load_options()))
        if now != was:
            return None
        corpus = run.open_corpus()
    except (OSError, ValueError) as error:
        warn_on_first_rank("%s", error)
        return None
    if options.source.kind != "shards":
        corpora = _find_corpora(options)
        last = corpora.find_last_corpus()
        if last is not None and last.name.rpartition("-")[2] != corpus.digest:
            warn_on_first_rank(
                "%s keeps its corpus %s. Use another name= to train on %s", run.path, corpus.location, last
            )
        elif corpora.has_changed():
            warn_on_first_rank("%s was changed or copied. %s keeps its corpus", corpora.source_name, run.path)
    log.info("corpus of %s: %s", run.path, corpus.location)
    return corpus


@dataclass
class SplitSize(Counts):
    """Size of a split, with its number of distinct chunks if known, and whether that was counted or estimated."""

    distinct_chunks: int | None = None
    distinct_chunks_exact: bool | None = None


def split_sizes(corpus: Corpus) -> dict[str, SplitSize]:
    """Return the sizes of all splits of a corpus."""
    sizes = {split: SplitSize(**asdict(corpus.split_counts(split))) for split in SPLITS}
    for split, known in corpus.statistics.items():
        sizes[split].distinct_chunks = known.distinct_chunks
        sizes[split].distinct_chunks_exact = known.distinct_chunks_exact
    return sizes


def check_split(chunks: int, corpus: str, option: str, split: str) -> None:
    """Raise ValueError, before any training, if a split that an option such as `index.split` selects has no chunks."""
    if not chunks:
        raise ValueError(
            f"the {split} split of {corpus} is empty, so {option}={split} cannot be read. Add documents "
            f"(files named {split}…, or source.valid_percent), or set {option}= to another split"
        )
