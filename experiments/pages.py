"""Pages of the documentation about results: docs/results/NAME.md, beside NAME.json and NAME.png.

    python -m experiments.pages             write the pages of all committed results anew
    python -m experiments.pages FOLDER…     copy results first, such as experiments/results/haed-table1/hour

A page is computed from the JSON and the experiment's YAML file. So its verdicts are those of the present claims, and
the paper's figures are the present ones. Both are written into the JSON too. Pictures that need rows alone are drawn anew.
The table of all claims is a part of docs/results/index.md.
"""

import io
import re
import shutil
import sys
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path

from data.filesystem import write_json
from experiments.catalogue import OURS, Experiment, list_experiments, list_outdated, load_experiment
from experiments.results import Result, Verdict, judge_claims, list_notes, plot_rows, tabulate_rows
from pipeline.console import markdown_code, markdown_text
from pipeline.run.files import read_as

PLACE = Path(__file__).resolve().parents[1] / "docs" / "results"
BEGIN, END = "<!-- begin of the generated table -->", "<!-- end of the generated table -->"


def load_results(place: Path = PLACE) -> Iterator[tuple[Experiment, Result]]:
    """Yield the committed results with their experiments, in the order of `haed experiment`."""
    for name in list_experiments():
        if (path := place / f"{name}.json").is_file():
            yield load_experiment(name), read_as(Result, path)


def format_page(experiment: Experiment, result: Result) -> str:
    """Return the page of a result."""
    name, question = experiment.name, markdown_text(experiment.question)
    facts = {
        "command": markdown_code(result.command),
        "date": result.date,
        "machine": markdown_text(result.machine),
        "commit": markdown_text(result.commit),
    }
    notes = [part for note in list_notes(result) for part in note.split("; ")]
    page = "\n\n".join(
        [
            f"# {name}",
            f"<!-- Generated from {name}.json by `python -m experiments.pages`. Do not edit. -->",
            f"{_capitalize(markdown_text(experiment.source))}. It compares {question}.",
            *(_format_verdict(verdict) for verdict in result.verdicts),
            tabulate_rows(result.rows).to_markdown(),
            f"![{question}]({name}.png)",
            "## How it was made",
            "\n".join(["| | |", "| --- | --- |", *(f"| {key} | {text} |" for key, text in facts.items() if text)]),
            "\n".join(f"- {markdown_text(each)}" for each in notes) + "\n",
        ]
    )
    return _remove_escapes(page)


def _format_verdict(verdict: Verdict) -> str:
    findings = "\n".join(f"- {markdown_text(each)}" for each in verdict.findings)
    ends = verdict.word if verdict.word.startswith("cannot") else f"{verdict.word} with this claim"
    return f"{_capitalize(markdown_text(verdict.claim))}.\n\n**The result {ends}.**\n\n{findings}"


def _remove_escapes(markdown: str) -> str:
    """Remove the escapes that Python-Markdown, unlike GitHub, shows as backslashes."""
    return re.sub(r"\\([@:])", r"\1", markdown)


def _capitalize(text: str) -> str:
    return text[:1].upper() + text[1:]


def format_overview(results: Iterable[tuple[Experiment, Result]]) -> str:
    """Return the table of all claims, as a part of the index."""

    def read_budget(result: Result) -> str:
        budget, *_ = Path(result.folder).name.split("-")
        seconds = re.search(r"([\d,]+) s of training in all", " ".join(result.notes))
        seeds = max(row.seeds for row in result.rows)
        return f"{f'{seconds[1]} s' if seconds else budget}, {seeds} seed{'s' * (seeds > 1)}"

    lines = []
    for experiment, result in results:
        source = "" if experiment.source == OURS else markdown_text(experiment.source)
        place = [f"[{experiment.name}]({experiment.name}.md)", source, read_budget(result)]
        for claim, verdict in zip(experiment.claims, result.verdicts, strict=True):
            lines.append([*place, markdown_text(claim.text), verdict.word])
            place = [""] * len(place)
    table = [["result", "table or figure", "training in all", "claim", "verdict"], ["---"] * 5, *lines]
    return _remove_escapes("\n".join([BEGIN, "", *(f"| {' | '.join(line)} |" for line in table), "", END]))


def _keep_picture(name: str, png: bytes) -> None:
    """Write a picture into the documentation without transparency and with few colours."""
    from PIL import Image

    with Image.open(io.BytesIO(png)) as image:
        image.convert("RGB").quantize(128).save(PLACE / f"{name}.png", optimize=True)


def main(folders: list[str]) -> None:
    """Copy results into the documentation, and write all pages and the overview anew."""
    for folder in map(Path, folders):
        name = folder.resolve().parent.name
        if not (folder / f"{name}.json").is_file():
            sys.exit(f"{folder} has no {name}.json. Name the folder of a result, such as haed-table1/hour")
        shutil.copy(folder / f"{name}.json", PLACE)
        _keep_picture(name, (folder / f"{name}.png").read_bytes())
    results = list(load_results())
    for experiment, result in results:
        if outdated := list_outdated(experiment, {row.variant: row.options for row in result.rows}):
            sys.exit(
                f"{experiment.name}: {', '.join(outdated)} had other options than {experiment.name}.yaml has now. "
                f"Run `haed experiment {experiment.name}` again, and name the folder of its result"
            )
        result.verdicts = judge_claims(experiment, result.rows)
        papers = {variant.name: variant.paper for variant in experiment.variants}
        for row in result.rows:
            row.paper = papers.get(row.variant, row.paper)
        result.folder = "/".join(Path(result.folder).parts[-2:])  # without the place on somebody's machine
        write_json(PLACE / f"{experiment.name}.json", asdict(result))
        if experiment.across:
            _keep_picture(experiment.name, plot_rows(experiment, result.rows, {}))
        (PLACE / f"{experiment.name}.md").write_text(format_page(experiment, result), encoding="utf-8")
    index = PLACE / "index.md"
    before, _, rest = index.read_text(encoding="utf-8").partition(BEGIN)
    index.write_text(before + format_overview(results) + rest.partition(END)[2], encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
