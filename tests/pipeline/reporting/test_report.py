"""The report and the page of a run: what they show, and that names in them are texts."""

import html
import json
import re
from pathlib import Path

import pytest
from markdown_it import MarkdownIt

from data.filesystem import write_json
from pipeline.cli import main
from pipeline.config import Options
from pipeline.console import markdown_text
from pipeline.evaluation.evaluate import evaluate_run
from pipeline.reporting.comparison import compare_runs
from pipeline.reporting.comparison import format_markdown as compared
from pipeline.reporting.report import find_nearest_preset, load_run_report, summarise_report, write_report
from pipeline.reporting.terms import TERMS
from pipeline.run.files import MIXTURE_COLUMNS
from pipeline.run.run_directory import RunFolder
from tests.conftest import write_state


def test_the_parts_of_a_mixture_are_shown(mixed: Options) -> None:
    found = evaluate_run(mixed)
    assert found.breakdown is not None and len(found.breakdown.mixture_rows()) > 3
    rows = [MIXTURE_COLUMNS, *found.breakdown.mixture_rows()]
    page, summary = html.unescape(write_report(mixed).read_text()), summarise_report(mixed)
    for text in (found.perplexity_note, found.likelihood_note, *(cell for row in rows for cell in row)):
        assert text in page and markdown_text(text) in summary


def test_every_marked_term_has_its_footnote(mixed: Options) -> None:
    evaluate_run(mixed)
    page = write_report(mixed).read_text()
    links, notes = (re.findall(pattern, page) for pattern in (r'href="#note-(\d+)"', r'<li id="note-(\d+)">'))
    assert set(links) == set(notes) and notes == [str(number) for number in range(1, len(notes) + 1)]
    for term in ("bits/char", "context", "known chunk", "gate", "mixture", "validation"):
        assert f"<b>{term}</b> {TERMS[term]}" in html.unescape(page)
    facts = page[page.index('class="facts"') : page.index("</ul>")]
    assert f"seed {mixed.seed}" in facts and "parameters" in facts and f"corpus: {mixed.source.kind}" in facts


def test_the_model_stands_among_its_baselines(run: Path) -> None:
    evaluation = json.loads((run / "evaluation.json").read_text())
    bits = evaluation["bits_per_char"]
    baselines = [
        {"name": name, "bits": 1.0, "bits_per_byte": 1.0, "bits_per_char": value}
        for name, value in (("worse", bits + 0.001), ("better", bits - 0.1))
    ]
    write_json(run / "evaluation.json", evaluation | {"baselines": baselines, "not_beaten": ["better"]})
    ranking = load_run_report(RunFolder(run)).ranking
    assert [(each.name, each.verdict) for each in ranking] == [
        ("better", "not beaten"),
        ("run", ""),
        ("worse", "beaten"),
        ("run, without memory", ""),
    ]
    options = RunFolder(run).load_options()
    page, summary = write_report(options).read_text(), summarise_report(options)
    assert page.index(">better<") < page.index(f">{bits:.4f}") < page.index(">worse<")
    assert "| better |" in summary


def test_a_report_refuses_what_a_page_warns_of(run: Path) -> None:
    (run / "samples.json").write_text("{}")
    report = load_run_report(RunFolder(run))
    assert not report.samples and report.evaluation and any("samples.json" in each for each in report.warnings)
    assert main(["report", str(run)]) == 1 and not (run / "report.html").exists()


def test_a_run_of_any_name_has_a_report_that_shows_it_as_text(run: Path) -> None:
    name = "_x_ <img src=x onerror=alert(1)>|[a](javascript:b) `c` ``d $\\frac{1}$ **e** ]('\"&amp; report"
    place = run.rename(run.with_name(name))
    assert main(["sample", str(place)]) == 0
    assert main(["report", str(place)]) == 0
    table = compared(compare_runs([place.name], str(place.parent), place.parent / "compared"))
    for text in (summarise_report(RunFolder(place).load_options()), table):
        tokens = MarkdownIt("commonmark").enable(["table", "strikethrough"]).parse(text)
        every = [token for line in tokens for token in [line, *(line.children or [])]]
        kinds = {token.type for token in every}
        assert not {"html_block", "html_inline", "link_open", "em_open", "s_open"} & kinds
        lines = [line.children or [] for line in tokens if line.type == "inline"]
        assert name in ["".join(token.content for token in line) for line in lines]
    page = (place / "report.html").read_text()
    assert "<img src=x" not in page and "alert(1)&gt;" in page


def test_checkpoints_have_the_scores_of_their_steps(run: Path) -> None:
    found = load_run_report(RunFolder(run)).checkpoints
    assert [(each.phase, each.step) for each in found][-2:] == [("finetune", 2), ("finetune", 4)]
    assert [each.notes for each in found if "in use" in each.notes] == [["best", "latest", "in use"]]
    records = [json.loads(line) for line in (run / "finetune" / "metrics.jsonl").read_text().splitlines()]
    score = next(r["validation/bits_per_token"] for r in records if r["step"] == 4 and "validation/bits_per_token" in r)
    assert found[-1].score == score and found[-1].unit == "bits per token"
    (run / "finetune" / "checkpoints" / "step-00000002" / "state.json").write_text("{")
    assert load_run_report(RunFolder(run)).checkpoints[-2].digest is None


def test_what_a_run_changes_of_its_preset(run: Path) -> None:
    preset, differences = find_nearest_preset(load_run_report(RunFolder(run)).options)
    assert preset == "quickstart"
    changed = {each.key: (each.was, each.now) for each in differences}
    assert changed["finetune.steps"] == (None, 4) and "name" not in changed and "seed" not in changed


def test_what_cannot_be_read_hides_nothing_else(run: Path) -> None:
    with open(run / "finetune" / "metrics.jsonl", "a") as file:
        file.write("{torn\n" + '{"step": 5}\n')
    found = load_run_report(RunFolder(run))
    assert list(found.phases) == ["pretrain"] and found.state.word == "damaged" and found.state.step == 4
    (run / "corpus.json").unlink()
    found = load_run_report(RunFolder(run))
    assert any("corpus.json is missing, which says what" in each for each in found.warnings)
    with pytest.raises(FileNotFoundError, match=r"corpus.json is missing.*Run `haed finetune"):
        RunFolder(run).read_corpus_record()


def test_a_checkpoint_in_place_of_a_damaged_one_is_not_said_to_be_the_best(run: Path) -> None:
    (run / "finetune" / "checkpoints" / "step-00000004" / "model.safetensors").unlink()
    warnings = load_run_report(RunFolder(run)).warnings
    assert any("step-00000004" in each for each in warnings)
    assert not any("The best validation" in each for each in warnings)


def test_a_stopped_phase_has_the_steps_that_were_saved(run: Path) -> None:
    latest = run / "finetune" / "checkpoints" / "step-00000004" / "state.json"
    state = json.loads(latest.read_text())
    write_state(latest, state | {"step": 6, "phase": state["phase"] | {"seconds": 1234.0}})
    assert "finetune 6 steps in 1,234 s" in load_run_report(RunFolder(run)).training
