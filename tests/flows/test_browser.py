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
NO_GRAPH = "--disable-3d-apis"  # Prefect draws a run's graph 60 times a second; without a GPU that takes a core


class Person:
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
        self.page.locator(self.label("runs" if flow == "compare" else "overrides")).first.wait_for()
        self.page.wait_for_timeout(1500)  # fields are drawn before what they hold is there
        if "run" in fields:  # a box, beside the list of runs
            self.page.get_by_text("another folder", exact=True).click()
        for name, value in fields.items():
            box = self.page.locator(f"{self.label(name)}/following::*[self::input or self::textarea][1]")
            box.fill(value)
        self.page.get_by_role("button", name="Submit").click()
        self.page.wait_for_timeout(500)
        return until(120, lambda: next((run for run in self.runs() if run["id"] not in known), None))

    @staticmethod
    def label(name: str) -> str:
        return f"xpath=//label[starts-with(concat(normalize-space(.), ' '), '{name} ')]"

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

    def kept(self, run: dict[str, Any]) -> Any:
        """What the server has of a flow run now: its state, tags, lines of its log, and keys of its artifacts."""
        now, of_it = call(self.address, f"/flow_runs/{run['id']}"), {"flow_run_id": {"any_": [run["id"]]}}
        now["lines"] = [line["message"] for line in call(self.address, "/logs/filter", {"logs": of_it})]
        now["keys"] = {item["key"] for item in call(self.address, "/artifacts/filter", {"artifacts": of_it})}
        return now

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
        browser = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", NO_GRAPH])
        page = browser.new_page(viewport={"width": 1280, "height": 1100})
        page.set_default_timeout(60_000)
        person, asked = Person(page, address), set[str]()
        page.on("request", lambda request: asked.add(urllib.parse.urlsplit(request.url).netloc))

        run = person.fill_in("haed", [], source="nowhere")
        person.watch(run, "Failed")
        message = "shard: source.path=nowhere: no such file or folder"  # its line comes in a later batch than others
        said = until(PATIENCE, lambda: message in str((now := person.kept(run))["lines"]) and now)
        assert said["state"]["message"] == message and sum(message in line for line in said["lines"]) == 1
        assert not any("Traceback" in line for line in said["lines"])

        run = person.fill_in("haed", settings, name="seen", source="text")
        person.watch(run, "Completed")
        assert (tmp_path / "runs/seen/report.html").is_file()
        until(PATIENCE, lambda: call(address, f"/flow_runs/{run['id']}")["name"] == "haed seen · 10 steps")
        told = person.kept(run)
        assert " bits/char, test, finetune step 4; pretrain has taken 6 steps" in told["state"]["message"]
        assert "run:seen" in told["tags"]
        assert {"live-seen", "report-seen", "places-seen"} <= told["keys"]
        stages = ("shard: ", "pretrain step 3: validation bits/token ", "pretrain: 6 steps", "evaluate: ", "index: ")
        assert all(any(line.startswith(stage) for line in told["lines"]) for stage in stages)
        page.get_by_text("pretrain step 3: validation").first.wait_for()
        until(PATIENCE, lambda: f"haed: {told['state']['message']}" in person.kept(run)["lines"])

        long = [*settings, "validation.times=0", "train.steps=600", "source.path=text"]
        run = person.fill_in("train", long, name="long")
        until(PATIENCE, lambda: (tmp_path / "runs/long/train/checkpoints/latest").is_file())
        person.choose(run, "Cancel")
        until(PATIENCE, lambda: call(address, f"/flow_runs/{run['id']}")["state_type"] == "CANCELLED")
        person.watch(run, "Cancelled")
        latest = (tmp_path / "runs/long/train/checkpoints/latest").read_text().strip()
        assert 0 < (step := int(latest.removeprefix("step-"))) < 600
        assert person.kept(run)["state"]["message"] == f"saved step {step} of train; Retry resumes from there"
        person.choose(run, "Retry")
        person.watch(run, "Completed")
        assert (tmp_path / "runs/long/train/checkpoints/latest").read_text().strip() == "step-00000600"
        assert "train · step" in person.artifact("live-long-train")

        summary = person.artifact("report-seen")
        assert "bits/char on the test split" in summary and "n-gram, 5 bytes of context" in summary

        page.get_by_role("link", name="page of the run").click()
        page.get_by_role("heading", name="seen", exact=True).wait_for()
        assert page.url == f"{address}/runs/seen/" and "finetune step" in page.inner_text("main")
        page.get_by_role("link", name="haed seen · 10 steps").wait_for()  # the page's script asks Prefect
        place = page.get_by_role("link", name="TensorBoard of this run").get_attribute("href")
        assert place == f"http://127.0.0.1:{served.board}/?runFilter=%5Eseen%2F"
        page.get_by_role("link", name="haed seen · 10 steps").click()
        page.get_by_text("Logs", exact=True).first.wait_for()
        page.go_back()
        with page.expect_download() as downloading:
            page.get_by_role("link", name="report.html", exact=True).click()
        assert downloading.value.path().read_bytes() == (tmp_path / "runs/seen/report.html").read_bytes()
        page.get_by_role("link", name="haed, with finetune.steps=8").click()  # the form that extends it
        page.get_by_role("button", name="Submit").wait_for()
        page.wait_for_function(
            "[...document.querySelectorAll('textarea')].some(each => each.value === 'finetune.steps=8')"
        )
        page.goto(f"{address}/runs/seen/")
        page.get_by_role("link", name="next chunks").click()
        page.get_by_role("textbox").fill("import ")
        page.get_by_role("button", name="Ask").click()
        page.get_by_text("all others").wait_for()
        page.get_by_role("link", name="runs", exact=True).click()
        row = page.locator(".tabulator-row").filter(has_text="seen")
        row.wait_for()  # the page's script draws it
        cells = row.locator(".tabulator-cell").all_inner_texts()
        assert [cell.strip() for cell in cells if cell.strip()][:2] == ["seen", "finished"]

        run = person.fill_in("neighbours", [], run="seen")
        person.watch(run, "Completed")
        table = person.artifact("neighbours-seen")
        assert "cosine" in table and "␣" in table and "run seen · finetune step 4 · checkpoint" in table
        assert "times in train" in table

        run = person.fill_in("compare", [])  # the newest two
        person.watch(run, "Completed")
        (key,) = person.kept(run)["keys"]
        table = person.artifact(key)
        table_right, column_left = (
            page.locator(where).first.evaluate(f"each => each.getBoundingClientRect().{side}")
            for where, side in (("table", "right"), ("text=Created", "left"))
        )
        assert table_right <= column_left and table.index("Run the flow evaluate") < table.index("parameters")
        assert "Run the flow evaluate (run " in person.kept(run)["state"]["message"]
        assert key.startswith("comparison-long-seen-") and table.count(" · checkpoint ") == 2

        run = person.fill_in("finetune", ["finetune.steps=6"], name="seen")  # by its own configuration
        person.watch(run, "Completed")
        assert person.kept(run)["state"]["message"].startswith("6 steps in ")
        assert asked == {urllib.parse.urlsplit(address).netloc, ""}
        browser.close()
