"""Take the pictures of docs/images from today's pages, with the browser tests' own hands.

    python -m dev.take_pictures RUN

RUN is a run that `make demo` trained. It is copied, so nothing of it changes. Its shards must lie beside `runs`. Takes about
five minutes. The picture of colours (`neighbours-drawn.png`) is of a run on pictures and is not taken here.
"""

import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from playwright.sync_api import sync_playwright

from tests.flows.api import PATIENCE, call, until
from tests.flows.conftest import Served
from tests.flows.test_browser import CHROMIUM, Person

IMAGES = Path(__file__).parents[1] / "docs" / "images"
PAGES = {  # of the run, below /runs/NAME/: the address and the height in pixels
    "report.png": ("report.html", 1000),
    "explore-neighbours.png": ("neighbours?query=return%E2%90%A3&query=self.", 900),
    "explore-score.png": ("score?prompt=import+os%0Aimport+sys%0A%0Adef+main%28%29%3A%0A++++return+sys.argv%0A", 700),
}


def take_pictures(run: Path, folder: Path) -> None:
    """Serve a copy of a run in a folder and photograph forms, runs, artifacts and pages.

    Args:
        run: folder of a trained run.
        folder: an empty folder.
    """
    shutil.copytree(run, folder / "runs" / run.name)
    (folder / "shards").symlink_to(run.resolve().parents[1] / "shards")
    served = Served(folder)
    served.start()
    try:
        with sync_playwright() as started:
            page = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"]).new_page()
            page.set_default_timeout(120_000)
            photograph(page, Person(page, served.address), run.name)
    finally:
        served.stop()


def photograph(page: Any, person: Person, name: str) -> None:
    """Take the pictures of the Prefect UI, then those of the run's pages."""

    def take(picture: str, height: int = 600) -> None:
        page.set_viewport_size({"width": 1200 if picture not in PAGES else 1080, "height": height})
        page.wait_for_timeout(2000)
        page.screenshot(path=IMAGES / picture)

    for picture, (address, height) in PAGES.items():
        page.goto(f"{person.address}/runs/{name}/{address}")
        take(picture, height)

    page.goto(f"{person.address}/v2/deployments/deployment/{person.deployments['pretrain']}/run")
    page.get_by_role("button", name="Submit").wait_for()
    take("form.png", 1180)

    run = person.fill_in("neighbours", [], run=name)
    person.watch(run, "Completed")
    person.artifact(f"neighbours-{name}")
    take("neighbours.png")

    run = person.fill_in("haed", [], name="watched", seconds="120")
    until(PATIENCE, lambda: any(line.startswith("pretrain step") for line in person.kept(run)["lines"]))
    page.goto(f"{person.address}/v2/runs/flow-run/{run['id']}")
    page.get_by_text("pretrain step").first.wait_for()
    take("training.png", 860)
    person.artifact("live-watched-pretrain")
    take("live.png")
    call(person.address, f"/flow_runs/{run['id']}/set_state", {"state": {"type": "CANCELLING", "name": "Cancelling"}})
    until(PATIENCE, lambda: call(person.address, f"/flow_runs/{run['id']}")["state_type"] == "CANCELLED")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        take_pictures(Path(sys.argv[1]), Path(temporary))
