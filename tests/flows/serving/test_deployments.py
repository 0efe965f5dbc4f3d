"""Deployments of an earlier version, and those of now."""

import os
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


def check() -> None:
    """What was set for a deployment of the earlier name is that of the new one."""
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.actions import DeploymentScheduleCreate, DeploymentUpdate
    from prefect.client.schemas.objects import ConcurrencyOptions
    from prefect.client.schemas.schedules import IntervalSchedule
    from prefect.exceptions import ObjectNotFound
    from prefect.testing.utilities import prefect_test_harness

    from flows.serving.deployments import adopt, deployments

    with prefect_test_harness(server_startup_timeout=120), get_client(sync_client=True) as client:
        old = next(each for each in deployments("place") if each.flow_name == "shard")
        old.name = "place"
        set_there = DeploymentUpdate(
            tags=["own"],
            paused=True,
            parameters={"preset": "wikitext2"},
            concurrency_limit=3,
            concurrency_options=ConcurrencyOptions(collision_strategy="CANCEL_NEW"),
        )
        id = old.apply()
        client.update_deployment(id, set_there)
        schedule = IntervalSchedule(interval=timedelta(hours=7))
        client.create_deployment_schedules(id, [DeploymentScheduleCreate(schedule=schedule, active=False)])
        assert adopt("place", deployments("place"), lambda each: each.apply()) == ["shard/place"]
        new = client.read_deployment_by_name("shard/shard-place")
        assert (new.tags, new.paused, new.parameters) == (["own"], True, {"preset": "wikitext2"})
        assert new.global_concurrency_limit is not None and new.global_concurrency_limit.limit == 3
        assert new.concurrency_options is not None and new.concurrency_options.collision_strategy == "CANCEL_NEW"
        assert [(each.schedule.interval, each.active) for each in new.schedules] == [(timedelta(hours=7), False)]
        with pytest.raises(ObjectNotFound):
            client.read_deployment_by_name("shard/place")
        assert adopt("place", deployments("place"), lambda each: each.apply()) == []


@pytest.mark.slow
def test_what_was_set_for_a_deployment_of_the_earlier_name_is_that_of_the_new_one(tmp_path: Path) -> None:
    # Prefect's harness leaves threads behind, which workers that are forked from this process later would trip over.
    script = "from tests.flows.serving.test_deployments import check; check()"
    environment = os.environ | {"PREFECT_HOME": str(tmp_path), "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
