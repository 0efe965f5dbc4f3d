"""Take the pictures of docs/images from today's pages, with the browser tests' own hands.

    python -m dev.take_pictures RUN [OTHER…]

RUN is a run that `make demo` trained. Other runs are shown in the list of runs. They are copied, so nothing of them changes.
The shards of RUN must lie beside `runs`. Takes about five minutes. The picture of colours (`neighbours-drawn.png`) is of a run on
pictures and is not taken here.
"""

import io
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from PIL import Image
from playwright.sync_api import sync_playwright

from tests.flows.api import PATIENCE, call, until
from tests.flows.conftest import Served
from tests.flows.test_browser import CHROMIUM, Person

IMAGES = Path(__file__).parents[1] / "docs" / "images"
PAGES = {  # of the run, below /runs/NAME/: the address and the height in pixels
    "explore-neighbours.png": ("neighbours?query=return%E2%90%A3&query=self.", 900),
    "explore-score.png": ("score?prompt=import+os%0Aimport+sys%0A%0Adef+main%28%29%3A%0A++++return+sys.argv%0A", 700),
}


def take_pictures(runs: list[Path], folder: Path) -> None:
    """Serve copies of runs in a folder and photograph forms, runs, artifacts and pages.

    Args:
        runs: folders of trained runs, of which the first is opened.
        folder: an empty folder.
    """
    run = runs[0]
    for each in runs:
        shutil.copytree(each, folder / "runs" / each.name)
    (folder / "shards").symlink_to(run.resolve().parents[1] / "shards")
    served = Served(folder)
    served.start()
    try:
        with sync_playwright() as started:
            page = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"]).new_page()
            page.set_default_timeout(120_000)
            photograph(page, Person(page, served.address), folder / "runs" / run.name)
    finally:
        served.stop()


def photograph(page: Any, person: Person, run: Path) -> None:
    """Take the pictures of a run's report and pages, then those of the Prefect UI."""
    name = run.name

    def take(picture: str, height: int = 600, width: int = 1080) -> None:
        page.set_viewport_size({"width": width, "height": height})
        page.wait_for_timeout(2000)
        pixels = Image.open(io.BytesIO(page.screenshot()))
        pixels.quantize(128).save(IMAGES / picture, optimize=True)

    page.goto(f"{person.address}/runs/")
    take("runs.png", 560, 1200)
    page.goto((run / "report.html").as_uri())
    take("report.png", 1000)
    for picture, (address, height) in PAGES.items():
        page.goto(f"{person.address}/runs/{name}/{address}")
        take(picture, height)

    page.goto(f"{person.address}/v2/deployments/deployment/{person.deployments['pretrain']}/run")
    page.get_by_role("button", name="Submit").wait_for()
    take("form.png", 1180, 1200)

    run = person.fill_in("neighbours", [], run=name)
    person.watch(run, "Completed")
    person.artifact(f"neighbours-{name}")
    take("neighbours.png", 600, 1200)

    run = person.fill_in("haed", [], name="watched", seconds="120")
    until(PATIENCE, lambda: any(line.startswith("pretrain step") for line in person.kept(run)["lines"]))
    page.goto(f"{person.address}/v2/runs/flow-run/{run['id']}")
    page.get_by_text("pretrain step").first.wait_for()
    page.wait_for_timeout(10_000)  # the graph moves
    take("training.png", 860, 1200)
    person.artifact("live-watched-pretrain")
    take("live.png", 300, 1200)
    call(person.address, f"/flow_runs/{run['id']}/set_state", {"state": {"type": "CANCELLING", "name": "Cancelling"}})
    until(PATIENCE, lambda: call(person.address, f"/flow_runs/{run['id']}")["state_type"] == "CANCELLED")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        (folder := Path(temporary) / "work").mkdir()
        take_pictures([Path(each) for each in sys.argv[1:]], folder)
