"""Sharding as Prefect tasks, one per part. Each waits in a thread for a local process, or a Dask cluster, to write it."""

import multiprocessing
import pickle
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from functools import partial
from typing import Any
from uuid import uuid4

from prefect import task
from prefect.task_runners import ThreadPoolTaskRunner

from data.parts import KILLED, PAUSES, Mapper, Part, is_passing
from data.processes import process_pool
from pipeline.config import Options
from pipeline.run.sharding import ClusterError, RemoteWrite, explain_dask_errors, find_versions, open_dask_client

_SMALL_BYTES = 1 << 24  # written within seconds
_MOST_ON_DASK = 100  # parts that wait for a cluster at a time


def as_tasks(options: Options) -> Mapper:
    """Return a mapper for `pipeline.run.sharding.shard_source` that submits tasks in this flow run, with retries."""

    def map_parts(write: Any, parts: tuple[Part, ...]) -> None:
        stopped = threading.Event()
        by_name = {part.folder.name: part for part in parts}

        @task(
            name="write shards",
            task_run_name="part {name}",
            retries=len(PAUSES),
            retry_delay_seconds=list(PAUSES),
            retry_condition_fn=lambda _, __, state: (
                not stopped.is_set() and is_passing(state.data) and not isinstance(state.data, ClusterError)
            ),
        )
        def write_shards(name: str) -> None:
            if stopped.is_set():
                return
            try:
                call(write, by_name[name])
            except (ChildProcessError, CancelledError) as error:
                if not stopped.is_set():
                    raise
                raise ChildProcessError("the sharding was stopped, and this part with it") from error

        with (
            _open_pool(options, parts) as (call, threads, stop),
            ThreadPoolTaskRunner[Any](max_workers=threads) as runner,
        ):
            futures = [runner.submit(write_shards, {"name": name}) for name in by_name]
            try:
                for future in futures:
                    future.result()
            except BaseException:  # Cancel does not wait for the parts that are being written
                stopped.set()
                stop()
                raise

    return map_parts


@contextmanager
def _open_pool(
    options: Options, parts: tuple[Part, ...]
) -> Iterator[tuple[Callable[[Any, Part], object], int, Callable[[], None]]]:
    """Yield a function that calls another for a part and waits, how many such calls at a time, and what ends them."""
    workers = min(options.shard.workers, len(parts))
    if options.launcher.dask:
        address = options.launcher.dask
        with open_dask_client(address, options.shard.workers) as client:
            executor, versions = client.get_executor(pure=False), find_versions(options.source)

            def write_on_dask(write: Any, part: Part) -> None:
                with explain_dask_errors(address, part):
                    call, key = pickle.dumps(RemoteWrite(versions, write, part)), f"write_part-{uuid4().hex}"
                    executor.submit(pickle.loads, call, key=key).result()

            yield write_on_dask, min(len(parts), _MOST_ON_DASK), partial(executor.shutdown, wait=False)
    elif workers == 1 and sum(part.size for part in parts) < _SMALL_BYTES:
        yield lambda write, part: write(part), 1, lambda: None  # nobody can end a thread
    else:
        pool, lock = process_pool(workers), threading.Lock()

        def write_in_process(write: Any, part: Part) -> None:
            nonlocal pool
            used = pool
            try:
                used.submit(write, part).result()
            except BrokenProcessPool as error:  # a process was killed, so later parts use a new pool
                with lock:
                    pool = process_pool(workers) if pool is used else pool
                raise ChildProcessError(KILLED) from error

        try:
            yield write_in_process, workers, _terminate_children
        finally:
            pool.shutdown()


def _terminate_children() -> None:
    for process in multiprocessing.active_children():
        process.terminate()
