"""A spare process that has loaded the modules of flows before a flow run starts, so that runs begin within seconds.

Prefect's runner starts a process for each flow run, which then spends seconds on imports. Here the next process has
done its imports and waits for what Prefect would pass to `python -m prefect.engine`. It restarts from scratch if its
environment, or the file of a loaded module, has changed. So a run always uses the current code.

The process of a flow always ends with the one that serves it.
"""

import asyncio
import importlib
import json
import os
import runpy
import signal
import sys
import time
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from pathlib import Path
from subprocess import PIPE
from typing import Any

from flows.states.heartbeat import serving_process_id
from pipeline.signals import end_with_parent

ENGINE = [sys.executable, "-m", "prefect.engine"]
_ANEW = [sys.executable, "-m", "flows.serving.engine", "anew"]
_LOADED = ["prefect._internal.metrics", "prefect.engine", "prefect.flow_engine", "flows.flows"]
_LOADED += [
    "faiss",
    "pipeline.probe.neighbours",
    "pipeline.probe.next",
    "pipeline.run.opened",
    "pipeline.reporting.plots",
]
CALM_SECONDS = 5.0  # the next one is loaded when a flow has begun, not beside its beginning


class SpareProcess:
    """A manager of one spare process, which the next flow run uses in place of a new process."""

    def __init__(self) -> None:
        from prefect.utilities import processutils

        self._processes, self._open = processutils, processutils.open_process
        self._ready: tuple[AbstractAsyncContextManager[Any], Any] | None = None
        self._loading: asyncio.Task[None] | None = None

    @asynccontextmanager
    async def keep_ready(self) -> AsyncIterator[None]:
        """Keep a spare process ready for the runner of this process, within this context."""
        self._processes.open_process = self.provide_process
        self._load_next()
        try:
            yield
        finally:
            self._processes.open_process = self._open
            if self._loading is not None:
                self._loading.cancel()
            if self._ready is not None:
                await self._ready[0].__aexit__(None, None, None)

    @asynccontextmanager
    async def provide_process(self, command: list[str], **settings: Any) -> AsyncIterator[Any]:
        """Replace Prefect's `open_process`: a flow run gets the spare process if one is ready."""
        ready = self._ready if command == ENGINE and set(settings) <= {"env", "cwd", "stdout", "stderr"} else None
        if ready is None or ready[1].returncode is not None:
            async with self._open(_ANEW if command == ENGINE else command, **settings) as process:
                yield process
            return
        self._ready = None
        self._load_next()
        opened, process = ready
        given = {"environment": settings["env"], "folder": str(settings.get("cwd") or Path.cwd())}
        try:
            await process.stdin.send(json.dumps(given).encode() + b"\n")
            yield process
        except BaseException as error:
            if not await opened.__aexit__(type(error), error, error.__traceback__):
                raise
        else:
            await opened.__aexit__(None, None, None)

    def _load_next(self) -> None:
        async def load() -> None:
            from prefect.settings import get_current_settings

            await asyncio.sleep(CALM_SECONDS)
            environment = os.environ | get_current_settings().to_environment_variables(exclude_unset=True)
            command = [sys.executable, "-m", __name__]
            opened = self._open(command, env=environment, stdin=PIPE, stdout=PIPE, stderr=PIPE)
            self._ready = opened, await opened.__aenter__()

        self._loading = asyncio.ensure_future(load())


def main() -> None:
    """Load the modules, wait for a flow run on standard input, and run it. End if none comes.

    With the argument `anew`, run the flow run of the environment at once.
    """
    end_with_parent(serving_process_id())
    if sys.argv[1:] == ["anew"]:
        return _run_engine()
    begun, environment = time.time(), _drop_run_variables(os.environ)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to all that serve
    for name in _LOADED:
        importlib.import_module(name)

    if not (line := sys.stdin.buffer.readline()):
        return
    given = json.loads(line)
    os.chdir(given["folder"])
    os.environ.clear()
    os.environ.update(given["environment"])
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if _drop_run_variables(os.environ) != environment or _changed_since(begun):
        os.execv(_ANEW[0], _ANEW)
    _run_engine()


def _run_engine() -> None:
    sys.argv = [importlib.import_module("prefect.engine").__file__ or ""]
    runpy.run_path(sys.argv[0], run_name="__main__")


def _drop_run_variables(environment: Any) -> dict[str, str]:
    """Return the environment without the variables that Prefect sets for a single run."""
    return {key: value for key, value in environment.items() if not key.startswith("PREFECT__")}


def _changed_since(moment: float) -> bool:
    for module in list(sys.modules.values()):
        with suppress(AttributeError, TypeError, OSError):  # it has no file of its own
            if os.stat(module.__file__).st_mtime > moment:  # type: ignore[arg-type]
                return True
    return False


if __name__ == "__main__":
    main()
