"""Results of experiments for docs/experiments.md: pictures and rows go to docs/experiments, and the page shows all that is there.

    python benchmarks/gallery.py FOLDER…             results, such as experiments/hourglass-table5/minutes

Results of an experiment that were there before are replaced; without a folder the page is written anew. Verdicts are those of
what is claimed now, and pictures that need rows alone are drawn as they are drawn now.
"""

import io
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[0] = str(ROOT)  # else `data` would be the script beside this one

from PIL import Image

from pipeline.experiments.catalogue import EXPERIMENTS
from pipeline.experiments.page import drawn, markdown
from pipeline.experiments.result import Result, verdict
from pipeline.run.files import read_as

PLACE, PAGE = ROOT / "docs/experiments", ROOT / "docs/experiments.md"
MARK = "<!-- benchmarks/gallery.py -->\n"


def keep(name: str, picture: bytes) -> None:
    """A picture, which needs no transparency, and few colours."""
    with Image.open(io.BytesIO(picture)) as read:
        read.convert("RGB").quantize(128).save(PLACE / f"{name}.png", optimize=True)


def main() -> None:
    for folder in map(Path, sys.argv[1:]):
        name = folder.parent.name
        shutil.copy(folder / f"{name}.json", PLACE)
        keep(name, (folder / f"{name}.png").read_bytes())
    found = [read_as(Result, path) for name in EXPERIMENTS if (path := PLACE / f"{name}.json").is_file()]
    for each in found:
        each.verdict = verdict(EXPERIMENTS[each.name], each.rows)
        if EXPERIMENTS[each.name].across:
            keep(each.name, drawn(EXPERIMENTS[each.name], each.rows, {}))
    glance = [
        [f"[{each.name}](#{each.name})", Path(each.folder).name.split("-")[0], each.verdict.split(":")[0]]
        for each in found
    ]
    before = PAGE.read_text().split(MARK)[0]
    rows = [["experiment", "budget", "what is claimed"], ["---"] * 3, *glance]
    table = "\n".join(f"| {' | '.join(row)} |" for row in rows)
    pages = [
        f"### {each.name}\n\n{markdown(EXPERIMENTS[each.name], each, f'experiments/{each.name}.png')}" for each in found
    ]
    PAGE.write_text("\n".join([f"{before}{MARK}", table, "", *pages]))
    print(
        f"{len(found)} of {len(EXPERIMENTS)}; not run: {', '.join(EXPERIMENTS.keys() - {each.name for each in found})}"
    )


if __name__ == "__main__":
    main()
