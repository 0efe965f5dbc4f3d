"""Pages of a model of pictures."""

from pathlib import Path

from pipeline.cli import main
from pipeline.config import Options
from tests.pipeline.web.test_app import Site


def test_neighbours_of_colours_are_drawn(pictures: Options) -> None:
    run = Path(pictures.runs_dir) / "pictures"
    assert main(["index", str(run)]) == 0
    site = Site(run.parent)
    page = site.get("/runs/pictures/neighbours?query=%23505050&count=2").text
    assert 'fill="#505050"' in page and 'class="swatch"' in page and "not of pictures" in page
    found = site.get("/runs/pictures/neighbours?count=2&format=json").json()["value"]["asked"][0]
    chunk = found["neighbours"][0]["hex"]
    assert f"hex={chunk}" in site.get(f"/runs/pictures/neighbours?hex={found['hex']}&count=2").text
    assert (
        site.get(f"/runs/pictures/neighbours?hex={chunk}&count=1&format=json").json()["value"]["asked"][0]["hex"]
        == chunk
    )
    assert "samples.png" in site.get("/runs/pictures/samples?prompt=", 400).text
    assert "all others" in site.get("/runs/pictures/next?prompt=").text
