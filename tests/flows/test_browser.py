"""The Prefect UI as a person uses it: forms, a run that is watched, cancelled and retried, a report, a look-up."""

import json
import shutil
import urllib.parse
from typing import Any

import pytest

from tests.conftest import TINY
from tests.flows.api import PATIENCE, call, until
from tests.flows.conftest import Served

playwright = pytest.importorskip("playwright.sync_api", reason="no Playwright: run `make setup-browser`")
CHROMIUM = shutil.which("chromium")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium: run `make setup-browser`")
DONE = ("COMPLETED", "FAILED", "CRASHED", "CANCELLED")


class Person:
    """Somebody at the browser."""

    def __init__(self, page: Any, address: str) -> None:
        self.page, self.address = page, address
        found = call(address, "/deployments/filter", {})
        self.deployments = {item["tags"][0]: item["id"] for item in found}

    def fill_in(self, flow: str, overrides: list[str], **fields: str) -> dict[str, Any]:
        """Opens a flow's form, changes fields, submits it, and returns the run."""
        known = {run["id"] for run in self.runs()}
        given = urllib.parse.quote(json.dumps({"overrides": overrides} if overrides else {}))
        self.page.goto(f"{self.address}/v2/deployments/deployment/{self.deployments[flow]}/run?parameters={given}")
        self.page.get_by_role("button", name="Submit").wait_for()
        self.page.wait_for_timeout(1500)  # the form is drawn before its schema is there
        for name, value in fields.items():
            label = f"xpath=//label[starts-with(normalize-space(.), '{name} ')]"
            box = self.page.locator(f"{label}/following::*[self::input or self::textarea][1]")
            box.fill(value)
        self.page.get_by_role("button", name="Submit").click()
        self.page.wait_for_timeout(500)
        return until(PATIENCE, lambda: next((run for run in self.runs() if run["id"] not in known), None))

    def runs(self) -> Any:
        found = call(self.address, "/flow_runs/filter", {"sort": "START_TIME_DESC"})
        return [run for run in found if run["parent_task_run_id"] is None]

    def watch(self, run: dict[str, Any], word: str, seconds: float = PATIENCE) -> None:
        """Looks at a run's page until it says so."""
        self.page.goto(f"{self.address}/v2/runs/flow-run/{run['id']}")
        self.page.get_by_text(word, exact=True).first.wait_for(timeout=1000 * seconds)

    def choose(self, run: dict[str, Any], action: str) -> None:
        """Takes an action from the menu of a run's page."""
        self.page.goto(f"{self.address}/v2/runs/flow-run/{run['id']}")
        self.page.get_by_text("Logs", exact=True).first.wait_for()
        self.page.locator("button[aria-haspopup=menu]").first.click()
        self.page.get_by_role("menuitem", name=action, exact=True).click()
        dialog = self.page.get_by_role("alertdialog").or_(self.page.get_by_role("dialog"))
        dialog.get_by_role("button", name=action).last.click()

    def artifact(self, key: str) -> str:
        """Opens the newest artifact of a key and returns what is to be read."""
        found = call(self.address, "/artifacts/filter", {"artifacts": {"key": {"any_": [key]}}})
        newest = max(found, key=lambda item: item["created"])
        self.page.goto(f"{self.address}/v2/artifacts/artifact/{newest['id']}")
        self.page.get_by_text(key).first.wait_for()
        self.page.wait_for_timeout(1500)
        return self.page.inner_text("body")


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_from_the_form_to_the_neighbours(served: Served) -> None:
    address, tmp_path = served.address, served.folder
    settings = [*TINY, "source.kind=text", "checkpoint.every_steps=20"]
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1280, "height": 1100})
        page.set_default_timeout(60_000)
        person = Person(page, address)

        run = person.fill_in("haed", settings, name="seen", source="text")
        person.watch(run, "Completed")
        assert (tmp_path / "runs/seen/report.html").is_file()
        until(PATIENCE, lambda: call(address, f"/flow_runs/{run['id']}")["name"] == "haed seen · 10 steps")

        long = [*settings, "validation.times=0", "train.steps=1500", "source.path=text"]
        run = person.fill_in("train", long, name="long")
        until(PATIENCE, lambda: (tmp_path / "runs/long/train/checkpoints/latest").is_file())
        person.choose(run, "Cancel")
        until(PATIENCE, lambda: call(address, f"/flow_runs/{run['id']}")["state_type"] == "CANCELLED")
        person.watch(run, "Cancelled")
        latest = (tmp_path / "runs/long/train/checkpoints/latest").read_text().strip()
        assert 0 < int(latest.removeprefix("step-")) < 1500
        person.choose(run, "Retry")
        person.watch(run, "Completed")
        assert (tmp_path / "runs/long/train/checkpoints/latest").read_text().strip() == "step-00001500"
        assert "train · step" in person.artifact("live-long-train")

        assert "Configuration and versions" in person.artifact("report-seen")
        pictures = page.evaluate("[...document.images].filter(i => i.alt.endsWith('.png')).map(i => i.naturalWidth)")
        assert len(pictures) >= 3 and min(pictures) > 100

        run = person.fill_in("neighbours", [], run="seen")
        person.watch(run, "Completed")
        table = person.artifact("neighbours-seen")
        assert "cosine" in table and "␣" in table
        browser.close()
