"""Sharding as Prefect tasks, one per part: on a local process pool, or on a Dask cluster."""

import multiprocessing
import threading
from collections.abc import Callable, Iterator
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from typing import Any

from prefect import task
from prefect.task_runners import TaskRunner, ThreadPoolTaskRunner

from data.filesystem import process_pool
from data.sharding.parts import KILLED, PAUSES, Mapper, Part, is_passing
from pipeline.config import Options

_SMALL_BYTES = 1 << 24  # written within seconds


def as_tasks(options: Options) -> Mapper:
    """Return a mapper for `pipeline.run.shards.shard_source` that submits tasks in this flow run, with retries."""

    def map_parts(write: Any, parts: tuple[Part, ...]) -> None:
        ended: list[bool] = []  # no event, which Dask could not send about with a task
        with _open_task_runner(options, parts) as (runner, call):

            def one(
                part: Part,
            ) -> Any:  # a task of its own, so that no part is a parameter, which is searched and sent about
                @task(
                    name="write shards",
                    task_run_name="part {name}",
                    retries=len(PAUSES),
                    retry_delay_seconds=list(PAUSES),
                    retry_condition_fn=lambda _, __, state: not ended and is_passing(state.data),
                )
                def write_shards(name: str) -> None:
                    if ended:
                        return
                    try:
                        call(write, part)
                    except ChildProcessError as error:
                        if not ended:
                            raise
                        raise ChildProcessError("the sharding was stopped, and this part with it") from error

                return write_shards

            futures = [runner.submit(one(part), {"name": part.folder.name}) for part in parts]
            try:
                for future in futures:
                    future.result()
            except BaseException:  # Cancel does not wait for the parts that are being written
                ended.append(True)
                for process in [] if options.launcher.dask else multiprocessing.active_children():
                    process.terminate()
                raise

    return map_parts


@contextmanager
def _open_task_runner(options: Options, parts: tuple[Part, ...]) -> Iterator[tuple[TaskRunner[Any], Any]]:
    """Yield a task runner and a function with which its tasks call another.

    The call happens in the task itself, or in a pool process that does not use Prefect.
    """
    workers = min(options.shard.workers, len(parts))
    if options.launcher.dask:
        with _dask_runner(options.launcher.dask, options.shard.workers) as runner:
            yield runner, _call_directly
        return
    threads: TaskRunner[Any] = ThreadPoolTaskRunner(max_workers=workers)
    if workers == 1 and sum(part.size for part in parts) < _SMALL_BYTES:  # nobody can end a thread
        with threads as runner:
            yield runner, _call_directly
    else:
        with _ProcessPool(workers) as pool, threads as runner:
            yield runner, pool


class _ProcessPool:
    """A pool of processes that call functions. If a process is killed, later calls use a new pool."""

    def __init__(self, workers: int) -> None:
        self._workers, self._lock, self._pool = workers, threading.Lock(), process_pool(workers)

    def __enter__(self) -> "_ProcessPool":
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown()

    def __call__(self, function: Callable[[Part], None], part: Part) -> None:
        """Call `function` in a process and wait for it."""
        pool = self._pool
        try:
            pool.submit(function, part).result()
        except BrokenProcessPool as error:
            with self._lock:
                if self._pool is pool:
                    self._pool = process_pool(self._workers)
            raise ChildProcessError(KILLED) from error


def _call_directly(function: Any, part: Part) -> None:
    function(part)


def _dask_runner(address: str, workers: int) -> Any:
    try:
        from prefect_dask import DaskTaskRunner
    except ImportError as error:
        raise ValueError("launcher.dask needs prefect-dask: pip install 'haed[dask]'") from error
    if address != "local":
        return DaskTaskRunner(address=address)
    return DaskTaskRunner(
        cluster_kwargs={
            "n_workers": workers,
            "threads_per_worker": 1,
            "host": "127.0.0.1",
            "dashboard_address": "127.0.0.1:0",
        }
    )
