"""A flow's process that is ready before the flow: who gets it, and when it begins again."""

import asyncio
import importlib
import io
import os
import sys
from pathlib import Path

import pytest
from prefect.utilities import processutils

from flows.serving import engine
from flows.serving.engine import ENGINE, SpareProcess
from tests.flows.api import PATIENCE

ANEW = "print('begun anew', flush=True)"


def ran(environments: list[dict[str, str]]) -> list[tuple[bool, str]]:
    """What Prefect's engine says with each, one after another: whether it was the process that was ready, and its output.

    Without the id of a flow run it ends at once, and says so.
    """

    async def all_of_them() -> list[tuple[bool, str]]:
        found, spare = [], SpareProcess()
        async with spare.keep_ready():
            for environment in environments:
                for _ in range(PATIENCE * 10):
                    if spare._ready is not None:
                        break
                    await asyncio.sleep(0.1)
                assert spare._ready is not None
                ready, said = spare._ready[1].pid, io.StringIO()
                process = await processutils.run_process(ENGINE, stream_output=(said, said), env=environment)
                assert process.returncode == 1
                found.append((process.pid == ready, said.getvalue()))
        return found

    return asyncio.run(all_of_them())


@pytest.fixture
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "CALM_SECONDS", 0.0)


@pytest.mark.slow
@pytest.mark.usefixtures("fast")
def test_a_flow_gets_the_process_that_is_ready_which_begins_again_in_another_environment(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(ANEW)
    own = dict(os.environ)
    other = own | {"PYTHONPATH": os.pathsep.join([str(tmp_path), own.get("PYTHONPATH", "")])}
    for (was_ready, said), anew in zip(ran([own, other]), (False, True), strict=True):
        assert was_ready and "Invalid flow run id" in said
        assert ("begun anew" in said) == anew


@pytest.mark.usefixtures("fast")
def test_other_commands_and_a_process_that_died_are_left_to_prefect() -> None:
    async def both() -> tuple[bool, str]:
        spare, said = SpareProcess(), io.StringIO()
        async with spare.keep_ready():
            while spare._ready is None:
                await asyncio.sleep(0.1)
            ready = spare._ready[1]
            await processutils.run_process([sys.executable, "-c", "print('other')"], stream_output=(said, said))
            ready.kill()
            await ready.wait()
            process = await processutils.run_process(ENGINE, stream_output=(said, said), env=dict(os.environ))
            return process.pid != ready.pid, said.getvalue()

    fresh, said = asyncio.run(both())
    assert fresh and said.startswith("other\n") and "Invalid flow run id" in said


def test_a_module_that_is_newer_than_the_process_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    path = tmp_path / "of_a_user.py"
    path.write_text("")
    os.utime(path, (1e9, 1e9))
    importlib.import_module("of_a_user")
    newest = max(os.stat(m.__file__).st_mtime for m in list(sys.modules.values()) if _has_file(m))
    assert not engine._changed_since(newest)
    os.utime(path, (newest + 1, newest + 1))
    assert engine._changed_since(newest)


def _has_file(module: object) -> bool:
    file = getattr(module, "__file__", None)
    return isinstance(file, str) and Path(file).is_file()
