"""Sharding as tasks of a flow run, on a real Prefect server: over processes here, and over a Dask cluster."""

import json
import re
from pathlib import Path

import pytest

from pipeline.run.sharding import open_dask_client
from tests.flows.api import python

SCRIPT = """
import json, sys
from flows.environment import prepare
prepare()
from prefect.client.orchestration import get_client
from flows.flows import shard

if __name__ == "__main__":
    base = sys.argv[1:]
    made = {}
    for name, more in (("pool", []), ("dask", ["launcher.dask=local"])):
        found = shard("quickstart", overrides=[*base, f"shards_dir={name}", *more])
        made[name] = found.folder
    with get_client(sync_client=True) as client:
        made["tasks"] = sorted(f"{run.name} {run.state_name}" for run in client.read_task_runs())
        made["live"] = [item.description for item in client.read_artifacts() if item.type == "progress"]
    print(json.dumps(made))
"""


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_parts_are_mapped_over_processes_and_over_dask(tmp_path: Path, api: str) -> None:
    pytest.importorskip("distributed")
    (tmp_path / "texts").mkdir()
    for number in range(3):
        (tmp_path / "texts" / f"train-{number}.txt").write_bytes(b"some text of number %d\n" % number * 30_000)
    (tmp_path / "script.py").write_text(SCRIPT)
    settings = ["source.kind=text", f"source.path={tmp_path / 'texts'}", "shard.workers=2", "shard.megabytes=1"]
    done = python(tmp_path, "script.py", *settings, PREFECT_API_URL=api)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stderr.count("shard: ") == 2 and "Finished in state Completed" not in done.stderr
    made = json.loads(done.stdout.splitlines()[-1])
    parts = [{path.name: path.read_bytes() for path in (tmp_path / made[n]).glob("*.tar")} for n in ("pool", "dask")]
    assert parts[0] == parts[1] and len(parts[0]) == 3
    assert made["tasks"] == sorted(2 * [f"part 0000{n} Completed" for n in range(3)])
    assert len(made["live"]) == 2
    assert all(re.fullmatch(r"100% · texts: shard · part 3 of 3 · 2 MB · [\d.]+ MB/s", line) for line in made["live"])


def test_workers_of_dask_that_do_not_start_are_an_error_of_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    distributed = pytest.importorskip("distributed")

    def fail(**_: object) -> None:
        raise RuntimeError("Nanny failed to start.")

    monkeypatch.setattr(distributed, "LocalCluster", fail)
    with (
        pytest.raises(OSError, match="^Dask could not start its workers: Nanny failed to start"),
        open_dask_client("local", 2),
    ):
        pass
