"""The pictures of docs/images are taken from today's pages, and a page whose words have changed needs a new picture.

    HAED_PICTURES=RUN[:OTHER…] .venv/bin/pytest tests/flows/test_pictures.py

writes them anew. RUN is a run that `make demo` trained. Other runs are shown in the list of runs. They are copied, so nothing of them
changes. The shards of RUN must lie beside `runs`. Each picture keeps the words of its page that no run changes: headings, labels,
buttons, heads of tables. Without HAED_PICTURES the same pictures are taken of a tiny run, and their words are compared.
"""

import contextlib
import io
import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from pipeline.cli import main
from tests.conftest import TINY
from tests.flows.api import PATIENCE, call, until
from tests.flows.conftest import Served
from tests.flows.test_browser import CHROMIUM, NO_GRAPH, Person, playwright

IMAGES = Path(__file__).parents[2] / "docs" / "images"
RUNS = [Path(each).resolve() for each in os.environ.get("HAED_PICTURES", "").split(":") if each]
TRAINED = [*TINY, "source.kind=text", "source.path=text"]
OF_OURS = "h1, nav a, label, button, th"
LIST = "h1, nav a, button:not(.tabulator *), .tabulator-col:nth-child(-n+8) .tabulator-col-title"
pytestmark = [
    pytest.mark.nightly,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium: run `make setup-browser`"),
]


class Camera:
    """Takes pictures of a page into a folder.

    Attributes:
        words: by the picture's name, the words of its page that no run changes.
    """

    def __init__(self, page: Any, folder: Path, run: str) -> None:
        self.page, self.folder, self.run = page, folder, run
        self.words: dict[str, list[str]] = {}

    def take(self, picture: str, words: str, height: int, width: int = 1080) -> None:
        """`words` is the selector of the elements whose words are kept."""
        self.page.set_viewport_size({"width": width, "height": height})
        self.page.wait_for_timeout(2000)  # what moves comes to rest
        found = [each.replace(self.run, "RUN") for each in self.page.locator(words).all_inner_texts()]
        self.words[picture] = sorted({re.sub(r"-?[\d.]*\d", "#", " ".join(each.split())) for each in found} - {""})
        kept = PngInfo()
        kept.add_itxt("words", json.dumps(self.words[picture]))
        with Image.open(io.BytesIO(self.page.screenshot())) as pixels:
            pixels.quantize(128).save(self.folder / picture, optimize=True, pnginfo=kept)


def train(served: Served) -> None:
    for command in ("shard", "pretrain", "finetune"):
        served.work(command, *TRAINED)
    with contextlib.chdir(served.folder):
        for command in ("evaluate", "index", "sample", "report"):
            assert main([command, "quickstart"]) == 0


def photograph(camera: Camera, person: Person, run: Path, settings: list[str]) -> None:
    """Photographs a run's report and pages, then those of the Prefect UI, and a training with `settings`."""
    page, name = camera.page, run.name
    page.goto(f"{person.address}/runs/")
    page.locator(".tabulator-row").first.wait_for()
    camera.take("runs.png", LIST, 560, 1200)
    page.goto((run / "report.html").as_uri())
    camera.take("report.png", "h1, h2", 1000)
    page.goto(f"{person.address}/runs/{name}/neighbours?query=return%E2%90%A3&query=self.")
    camera.take("explore-neighbours.png", OF_OURS, 900)
    text = "import+os%0Aimport+sys%0A%0Adef+main%28%29%3A%0A++++return+sys.argv%0A"
    page.goto(f"{person.address}/runs/{name}/score?prompt={text}")
    camera.take("explore-score.png", OF_OURS, 700)

    page.goto(f"{person.address}/v2/deployments/deployment/{person.deployments['pretrain']}/run")
    page.get_by_role("button", name="Submit").wait_for()
    page.locator(person.label("overrides")).first.wait_for()
    camera.take("form.png", "form label", 1180, 1200)

    asked = person.fill_in("neighbours", [], run=name)
    person.watch(asked, "Completed")
    person.artifact(f"neighbours-{name}")
    camera.take("neighbours.png", "th", 600, 1200)

    watched = person.fill_in("haed", settings, name="watched", seconds="120")
    until(PATIENCE, lambda: "live-watched" in person.kept(watched)["keys"])
    page.wait_for_timeout(40_000 if RUNS else 0)  # for a graph with something in it
    page.goto(f"{person.address}/v2/runs/flow-run/{watched['id']}")
    page.get_by_text("stage 2 of 7: pretrain").first.wait_for()
    page.wait_for_timeout(10_000 if RUNS else 0)  # the graph moves
    camera.take("training.png", "[role=tab]", 860, 1200)
    person.artifact("live-watched-pretrain")
    camera.take("live.png", "button", 300, 1200)
    path = f"/flow_runs/{watched['id']}"
    call(person.address, f"{path}/set_state", {"state": {"type": "CANCELLING", "name": "Cancelling"}})
    until(PATIENCE, lambda: call(person.address, path)["state_type"] == "CANCELLED")


def test_pictures_of_the_documents_show_todays_pages(served: Served, tmp_path: Path) -> None:
    runs = served.folder / "runs"
    for each in RUNS:
        shutil.copytree(each, runs / each.name)
    if RUNS:
        (served.folder / "shards").symlink_to(RUNS[0].parents[1] / "shards")
    else:
        train(served)
    run = runs / (RUNS[0].name if RUNS else "quickstart")
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox", *([] if RUNS else [NO_GRAPH])]
        )
        page = browser.new_page()
        page.set_default_timeout(120_000)
        camera = Camera(page, IMAGES if RUNS else tmp_path, run.name)
        unending = [*TRAINED, "validation.times=0", "pretrain.steps=100000"]
        photograph(camera, Person(page, served.address), run, [] if RUNS else unending)
        browser.close()
    for picture, words in camera.words.items():
        with Image.open(IMAGES / picture) as kept:
            assert words and json.loads(kept.info["words"]) == words, f"{picture} is old, see above"
