"""The report of a run: `report.html`, self-contained, and `report.md` with its pictures beside it.

Both are made from the run's own files and from nothing else, so a report can be made again at any time; parts that were
not run are left out.
"""

import base64
import html
import json
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from pipeline.files import read_json, write_atomically
from pipeline.metrics import read
from pipeline.neighbours import neighbours, picture, printable, visible
from pipeline.options import Options
from pipeline.runs import RunFolder

STYLE = """
body { font: 15px/1.55 system-ui, sans-serif; color: #22272e; background: #fafafa; margin: 0; }
main { max-width: 62rem; margin: 2rem auto; padding: 0 1.5rem; }
h1 { font-size: 1.7rem; margin-bottom: 0; } h2 { font-size: 1.15rem; margin-top: 2.2rem; border-bottom: 1px solid #ddd; }
.lead { color: #57606a; margin-top: .2rem; } .figure { font-size: 2.4rem; font-weight: 600; color: #c8553d; }
img { max-width: 100%; background: white; border: 1px solid #e3e5e8; border-radius: 6px; padding: .5rem; box-sizing: border-box; }
pre, code { font: 13px/1.45 ui-monospace, monospace; }
pre { background: white; border: 1px solid #e3e5e8; border-radius: 6px; padding: .7rem 1rem; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; }
pre b { color: #2a6f97; } table { border-collapse: collapse; } td, th { padding: .15rem .9rem .15rem 0; text-align: left; }
.number { text-align: right; font-variant-numeric: tabular-nums; }
.grid { display: grid; grid-template-columns: repeat(auto-fill, minmax(17rem, 1fr)); gap: 1rem 2rem; }
summary { cursor: pointer; color: #57606a; }
"""


EVALUATED = tuple(
    "split stage step characters context bits_per_char bits_per_dim standard_error yardsticks not_beaten".split()
)


def report(options: Options) -> Path:
    """Writes report.html, report.md and the pictures of a run; returns the path of report.html.

    Raises:
        FileNotFoundError: there is no such run.
    """
    folder = RunFolder.find(Path(options.runs_dir) / options.name)
    found = _gather(folder, options)
    for name, content in found["pictures"].items():
        write_atomically(folder.path / name, content)
    write_atomically(folder.path / "report.md", markdown(found).encode())
    write_atomically(folder.path / "report.html", _html(found).encode())
    return folder.path / "report.html"


def inline_markdown(folder: RunFolder) -> str:
    """report.md with its pictures inside, for places that have no folder beside them."""
    text = (folder.path / "report.md").read_text(encoding="utf-8")
    for path in folder.path.glob("*.png"):
        text = text.replace(f"]({path.name})", f"]({data_uri(path.read_bytes())})")
    return text


def _gather(folder: RunFolder, options: Options) -> dict[str, Any]:
    """Everything the report shows, as far as it is there."""
    from pipeline import plots

    phases = {name: read(folder.phase(name) / "metrics.jsonl") for name in ("pretrain", "finetune", "train")}
    phases = {name: records for name, records in phases.items() if records}
    path = folder.path / "evaluation.json"
    evaluation = read_json(path, EVALUATED) if path.is_file() else None
    pictures = {}
    if phases:
        pictures["curves.png"] = plots.curves(phases)
    if evaluation and evaluation["yardsticks"]:
        pictures["yardsticks.png"] = plots.yardsticks(evaluation, options.name)
    path = folder.path / "corpus.json"
    statistics = ((read_json(path).get("statistics") if path.is_file() else None) or {}).get("train")
    if statistics:
        pictures["corpus.png"] = plots.corpus(statistics)
    if (folder.path / "samples.png").is_file():
        pictures["samples.png"] = (folder.path / "samples.png").read_bytes()
    near = []
    if (folder.path / "index" / "meta.json").is_file():
        near = neighbours(folder, options.index.queries, options.index.neighbours, strict=False)
    if near and (drawn := picture(near)):
        pictures["neighbours.png"], near = drawn, []
    return {
        "name": options.name,
        "phases": phases,
        "evaluation": evaluation,
        "pictures": pictures,
        "neighbours": near,
        "samples": _samples(folder.path / "samples.json"),
        "environment": read_json(folder.path / "environment.json"),
        "configuration": (folder.path / "config.yaml").read_text(encoding="utf-8"),
    }


def _samples(path: Path) -> list[dict[str, str]]:
    try:
        return TypeAdapter(list[dict[str, str]]).validate_json(path.read_bytes()) if path.is_file() else []
    except ValidationError as error:
        raise ValueError(f"{path} is damaged ({error.errors()[0]['msg']}): run `haed sample` again") from error


def data_uri(png: bytes) -> str:
    """A picture for the inside of a page."""
    return f"data:image/png;base64,{base64.b64encode(png).decode()}"


def _trained(found: dict[str, Any]) -> str:
    """One sentence: phases, steps, seconds."""
    parts = [
        f"{phase} {records[-1]['step']:,} steps in {max(r['seconds'] for r in records):,.0f} s"
        for phase, records in found["phases"].items()
    ]
    return ", ".join(parts) or "not trained yet"


def _verdict(evaluation: dict[str, Any]) -> str:
    """Which yardsticks the model beats and which not, plainly."""
    worse = evaluation["not_beaten"]
    beaten = [item["name"] for item in evaluation["yardsticks"] if item["name"] not in worse]
    if not evaluation["yardsticks"]:
        return ""
    return f"Beaten: {', '.join(beaten) or 'none'}. Not beaten: {', '.join(worse) or 'none'}."


def headline(evaluation: dict[str, Any]) -> tuple[float, str]:
    """The main figure of an evaluation.json and its unit: bits/dim of pictures, else bits/char."""
    dim = evaluation["bits_per_dim"]
    return (evaluation["bits_per_char"], "bits/char") if dim is None else (dim, "bits/dim")


def _html(found: dict[str, Any]) -> str:
    escape = html.escape
    parts = [f"<h1>{escape(found['name'])}</h1><p class=lead>{escape(_trained(found))}</p>"]
    evaluation = found["evaluation"]
    if evaluation:
        figure, unit = headline(evaluation)
        error, counted = evaluation["standard_error"], "values" if unit == "bits/dim" else "characters"
        parts.append(
            f"<h2>Exact likelihood</h2><p><span class=figure>{figure:.3f}</span> {unit} on the {escape(evaluation['split'])} "
            f"split{f', standard error {error:.3f} over documents' if error else ''}: {evaluation['characters']:,} {counted}, "
            f"{evaluation['stage']} step {evaluation['step']:,}, context {evaluation['context']} chunks.</p>"
            f"<p>{escape(_verdict(evaluation))}</p>"
        )
    captions = {"yardsticks.png": "", "curves.png": "<h2>Training</h2>", "corpus.png": "<h2>The training split</h2>"}
    captions["samples.png"] = "<h2>Held-out pictures, their lower halves completed</h2>"
    captions["neighbours.png"] = "<h2>Neighbours of chunks, by cosine of their embeddings</h2>"
    for name, caption in captions.items():
        if name in found["pictures"]:
            parts.append(f"{caption}<img alt='{name}' src='{data_uri(found['pictures'][name])}'>")
    if found["neighbours"]:
        parts.append("<h2>Neighbours of chunks, by cosine of their embeddings</h2><div class=grid>")
        for item in found["neighbours"]:
            rows = "".join(
                f"<tr><td><code>{escape(visible(n['text']))}</code><td class=number>{n['score']:.3f}"
                f"<td class=number>{n['count']:,}"
                for n in item["neighbours"]
            )
            head = f"<tr><th><code>{escape(visible(item['query']))}</code><th class=number>cosine<th class=number>count"
            parts.append(f"<table>{head}{rows}</table>")
        parts.append("</div>")
    if found["samples"]:
        parts.append("<h2>Samples</h2>")
        parts += [f"<pre><b>{escape(s['prompt'])}</b>{escape(s['text'])}</pre>" for s in found["samples"]]
    environment = json.dumps(found["environment"], indent=2)
    parts.append(
        f"<h2>Configuration and versions</h2><details><summary>versions, commit, machine</summary><pre>{escape(environment)}"
        f"</pre></details><details><summary>complete configuration</summary><pre>{escape(found['configuration'])}</pre></details>"
    )
    return page(found["name"], "".join(parts))


def page(title: str, body: str) -> str:
    """A self-contained page."""
    head = f"<!doctype html><html lang=en><meta charset=utf-8><title>{html.escape(title)}</title><style>{STYLE}</style>"
    return f"{head}<main>{body}</main></html>\n"


def markdown(found: dict[str, Any]) -> str:
    """The report as Markdown; pictures are files beside it."""
    lines = [f"# {found['name']}", "", _trained(found), ""]
    evaluation = found["evaluation"]
    if evaluation:
        figure, unit = headline(evaluation)
        lines += [f"**{figure:.3f} {unit}** on the {evaluation['split']} split. {_verdict(evaluation)}", ""]
    lines += [f"![{name}]({name})\n" for name in found["pictures"]]
    for item in found["neighbours"]:
        lines += [f"| {_cell(item['query'])} | cosine | count |", "|---|---:|---:|"]
        lines += [f"| {_cell(n['text'])} | {n['score']:.3f} | {n['count']:,} |" for n in item["neighbours"]]
        lines.append("")
    for sample in found["samples"]:
        fence = "````" if "```" in sample["prompt"] + sample["text"] else "```"
        lines += [fence, printable(sample["prompt"] + sample["text"]), fence, ""]
    environment = json.dumps(found["environment"], indent=2)
    lines += [
        "<details><summary>Configuration and versions</summary>",
        "",
        "```yaml",
        found["configuration"],
        "```",
        "",
    ]
    lines += ["```json", environment, "```", "</details>", ""]
    return "\n".join(lines)


def _cell(chunk: str) -> str:
    """A chunk in a cell of a Markdown table."""
    shown = visible(chunk).replace("|", "\\|").replace("`", "'")
    return f"`{shown}`"
