"""Sharding as Prefect tasks: parts are mapped over a pool of processes here, or over a Dask cluster."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from prefect import task
from prefect.task_runners import TaskRunner, ThreadPoolTaskRunner

from data.processes import process_pool
from data.sharding import Mapper, Part
from pipeline.options import Options

TASKS = 64  # at most: a task costs Prefect about a tenth of a second, and a line in the UI


def as_tasks(options: Options) -> Mapper:
    """A mapper for `pipeline.sharding.shard` that makes tasks of the flow run it is called in."""

    def map_parts(write: Any, parts: tuple[Part, ...]) -> None:
        size = -(-len(parts) // TASKS)
        with _runner(options, len(parts)) as (runner, call):

            @task(name="write shards", task_run_name="parts {first} to {last}")
            def write_shards(first: int, last: int) -> None:
                for part in parts[first - 1 : last]:
                    call(write, part)

            ranges = [(at + 1, min(at + size, len(parts))) for at in range(0, len(parts), size)]
            futures = [runner.submit(write_shards, {"first": first, "last": last}) for first, last in ranges]
            for future in futures:
                future.result()

    return map_parts


@contextmanager
def _runner(options: Options, parts: int) -> Iterator[tuple[TaskRunner[Any], Any]]:
    """A task runner, and how its tasks call a function: there, or in a process of a pool that knows nothing of Prefect."""
    workers = min(options.shard.workers, parts)
    if options.launcher.dask:
        with _dask_runner(options.launcher.dask, options.shard.workers) as runner:
            yield runner, _here
        return
    threads: TaskRunner[Any] = ThreadPoolTaskRunner(max_workers=workers)
    if workers == 1:
        with threads as runner:
            yield runner, _here
    else:
        with process_pool(workers) as pool, threads as runner:
            yield runner, lambda function, part: pool.submit(function, part).result()


def _here(function: Any, part: Part) -> None:
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
            "dashboard_address": None,
        }
    )
