import json
import re
import shlex
import shutil
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from data.filesystem import write_json
from pipeline.config import Options, get_option, load_options, set_option
from pipeline.console import markdown_text
from pipeline.evaluation.evaluate import evaluate_run
from pipeline.reporting import comparison
from pipeline.reporting.comparison import Comparison, Row, compare_runs, format_comparison, format_markdown
from pipeline.reporting.rendering import Column
from pipeline.reporting.report import write_report
from pipeline.reporting.run_state import determine_state, phase_metrics
from pipeline.run.metrics import encode_record, read_metrics
from pipeline.run.run_directory import RunFolder
from pipeline.run.sharding import shard_source
from pipeline.training import stages
from tests.conftest import TINY, write_state
from tests.pipeline.conftest import CommandLine


def compare(options: Options, *names: str) -> Comparison:
    """A comparison without its page and picture."""
    folders = {name: RunFolder.find(name, options.runs_dir) for name in names}
    return comparison.make_comparison(folders)[0]


@pytest.mark.slow
def test_runs_are_compared_in_a_table_and_a_page(options: Options, haed: CommandLine) -> None:
    options.model.decoder.grams.rows = 0  # in so small a model more than the phases' other FLOPs
    options.evaluate.baselines = False
    other = replace(options, name="end <to> end")
    stages.pretrain(options)
    stages.finetune(options)
    stages.train(other)
    for each in (options, other):
        evaluate_run(each)
    arguments = ["compare", "tiny", f"{options.runs_dir}/end <to> end", "--runs-dir", options.runs_dir]
    found = haed.json(*arguments)
    rows = {row["run"].rpartition("/")[2]: row for row in found["rows"]}
    two, end = rows["tiny"], rows["end <to> end"]
    assert two["phases"] == ["pretrain", "finetune"] and end["phases"] == ["train"]
    assert (two["steps"], end["steps"]) == (10, 4) and two["flops"] > end["flops"] > 0
    bits = [row["evaluation"] for row in found["rows"]]
    assert bits == sorted(bits) and two["corpus"] == end["corpus"]
    assert two["likelihood"] == "mixture" and two["decoder"] > 0 and 0 < two["unknown"] < 1  # phase two of the preset
    assert end["likelihood"] == end["decoder"] == end["unknown"] is None
    page = Path(found["page"]).read_text()
    assert f"{two['decoder']:.4f}" in page and f"{two['unknown']:.2%}" in page
    assert "needs the fewest bits" not in page and "end &lt;to&gt; end" in page and "<to>" not in page
    assert found["verdict"] is None and "budgets differ by more than a tenth" in found["refused"]
    assert Path(found["picture"]).read_bytes().startswith(b"\x89PNG")
    state = next((Path(options.runs_dir) / "tiny" / "finetune" / "checkpoints").glob("*4/state.json"))
    write_state(state, json.loads(state.read_text()) | {"step": 7})  # stopped between two lines of metrics
    path = Path(options.runs_dir) / "tiny" / "evaluation.json"
    content = json.loads(path.read_text())
    write_json(path, content | {"likelihood": "decoder", "parts": None})
    steps = {row["run"].rpartition("/")[2]: row["steps"] for row in haed.json(*arguments)["rows"]}
    assert steps["tiny"] == 13
    assert "finetune, decoder alone" in haed.output("compare", "tiny", f"runs_dir={options.runs_dir}")
    shown = haed.output(*arguments)
    assert "(test, finetune, decoder alone, of an earlier checkpoint)" in shown
    assert "tiny: evaluated by the decoder alone" in shown


def test_what_cannot_be_compared_is_said(options: Options, haed: CommandLine) -> None:
    assert "no run 'nobody'" in haed.error("compare", "nobody", "--runs-dir", options.runs_dir)
    stages.RunFolder.create(options)
    assert "is not trained" in haed.error("compare", "tiny", "--runs-dir", options.runs_dir)
    said = haed.error("compare", "tiny", "seed=3", f"runs_dir={options.runs_dir}", status=2)
    assert "seed=3: haed compare takes no options but runs_dir=" in said


def test_validations_of_other_windows_or_phases_are_not_compared(two: tuple[Options, Options]) -> None:
    first, second = two

    def verdict() -> str:
        return format_comparison(compare(first, first.name, second.name)).splitlines()[-1]

    for number, each in enumerate(two):
        run = Path(each.runs_dir) / each.name
        (run / "evaluation.json").unlink()
        with (run / "train" / "metrics.jsonl").open("ab") as file:
            file.write(encode_record({"step": each.train.steps, "validation/bits_per_token": 5.0 + number}))
    assert "needs the fewest bits" in verdict()
    path = Path(second.runs_dir) / second.name / "config.yaml"
    text = path.read_text()
    path.write_text(text.replace("  processes: 1\n", "  processes: 2\n"))
    assert any("launcher.processes" in line for line in compare(first, "tiny", "other").difference_lines)
    path.write_text(re.sub(r"(validation:\n(?:  .*\n)*?  windows: )\d+", r"\g<1>1", text))
    assert "The runs were not validated in the same way" in verdict() and "1 windows of" in verdict()
    path.write_text(text)
    with (path.parent / "train" / "metrics.jsonl").open("wb") as file:
        file.write(encode_record({"step": second.train.steps, "loss": 5.0}))
    assert "other: not validated in its last phase" in verdict()


@pytest.mark.slow
def test_runs_with_other_chunkers_are_compared_on_the_same_bytes(options: Options) -> None:
    """Patches beside words; not where one has no digest of its text, nor on another split."""
    options.evaluate.baselines = False
    patches = replace(options, name="patches", chunker=replace(options.chunker, kind="fixed", k=4))
    patches.train = replace(options.train, steps=6)  # of smaller steps: about as many FLOPs
    shard_source(patches)
    for each in (options, patches):
        stages.train(each)
        evaluate_run(each)

    def remark() -> str:
        return format_comparison(compare(options, "tiny", "patches")).splitlines()[-1]

    rows = compare(options, "tiny", "patches").rows
    assert rows[0].corpus != rows[1].corpus and rows[0].text == rows[1].text
    assert "needs the fewest bits" in remark() and remark().endswith("So validations are not comparable.")
    patches.evaluate = replace(patches.evaluate, split="valid")
    evaluate_run(patches)
    assert "were not evaluated on the same bytes. Their bits are not comparable" in remark()
    for run in ("tiny", "patches"):
        path = Path(options.runs_dir) / run / "evaluation.json"
        write_json(path, json.loads(path.read_text()) | {"text": None})
    assert "were not evaluated on the same bytes. Their bits are not comparable" in remark()


@pytest.mark.slow
def test_a_phase_one_of_another_run_counts_as_the_model_s_own(
    options: Options, caplog: pytest.LogCaptureFixture
) -> None:
    stages.pretrain(options)
    stages.finetune(options)
    other = replace(options, name="other", finetune=replace(options.finetune, start_from="tiny"))
    other.pretrain = replace(options.pretrain, steps=1)
    stages.pretrain(other)  # which its phase two knows nothing of
    stages.finetune(other)
    output = Path(options.runs_dir) / "compared"
    options.evaluate.baselines = False
    evaluate_run(options)
    rows = {row.run: row for row in compare_runs(["tiny", "other"], options.runs_dir, output).rows}
    assert rows["other"].phases == ["pretrain of tiny", "finetune"] and rows["other"].steps == rows["tiny"].steps == 10
    page = (output / "comparison.html").read_text()
    assert f"not evaluated. Run <code>haed evaluate {options.runs_dir}/other</code>, or compare the validation" in page
    assert "pretrain of tiny 6 steps" in write_report(other).read_text()
    options.pretrain.steps = 9
    stages.pretrain(options)  # which no phase two knows
    assert {row.steps for row in compare_runs(["tiny", "other"], options.runs_dir, output).rows} == {10}
    seconds, flops = rows["other"].seconds, rows["other"].flops
    shutil.rmtree(Path(options.runs_dir) / "tiny")
    (row,) = compare(options, "other").rows
    assert (row.phases, row.steps) == (["pretrain of tiny", "finetune"], 10)
    assert (row.seconds, row.flops) == (seconds, flops)
    assert "other started from phase one of tiny, which is missing. Its curves are not shown" in caplog.text


def test_a_model_trained_end_to_end_has_no_phase_one(options: Options) -> None:
    stages.pretrain(options)
    stages.train(options)
    (row,) = compare(options, "tiny").rows
    assert row.phases == ["train"] and row.steps == options.train.steps


@pytest.fixture(scope="module")
def trained(text: Path, sharded: Path, tmp_path_factory: pytest.TempPathFactory) -> Options:
    """Two runs of one model, end to end, of equal steps; the second, `other`, has another seed."""
    where = [f"source.path={text}", f"runs_dir={tmp_path_factory.mktemp('two')}", f"shards_dir={sharded}", "name=tiny"]
    chosen = ["source.kind=text", *where, "evaluate.baselines=false", "validation.times=0"]
    options = load_options("quickstart", [*TINY, *chosen])
    for each in (options, replace(options, name="other", seed=1)):
        stages.train(each)
        evaluate_run(each)
    return options


@pytest.fixture
def two(trained: Options, tmp_path: Path) -> tuple[Options, Options]:
    """Copies of these runs."""
    shutil.copytree(trained.runs_dir, tmp_path / "runs")
    copied = replace(deepcopy(trained), runs_dir=str(tmp_path / "runs"))
    return copied, replace(deepcopy(copied), name="other", seed=1)


def compared(options: Options, haed: CommandLine) -> tuple[dict[str, Any], str, str]:
    """A comparison for programs, for people, and its page."""
    words = ["compare", "tiny", "other", f"runs_dir={options.runs_dir}"]
    found = haed.json(*words)
    return found, haed.output(*words), Path(found["page"]).read_text()


@pytest.mark.slow
def test_no_run_wins_at_another_budget(two: tuple[Options, Options], haed: CommandLine) -> None:
    """What differs is told, in data, budgets and options."""
    found, text, page = compared(two[0], haed)
    assert found["refused"] is None and found["verdict"].startswith("At equal steps (within a tenth) ")
    assert "needs the fewest bits" in text and "needs the fewest bits" in page
    bits = sorted(row["evaluation"] for row in found["rows"])
    assert ("Two seeds may differ by as much as 0.08 bits" in text) == (0 < round(bits[1] - bits[0], 4) < 0.08)
    differing = {each["what"]: each["values"] for each in found["differing"]}
    assert differing["seed"] == {"tiny": 0, "other": 1} and not {"data", "steps"} & set(differing)
    spent = differing.get("model FLOPs", {"tiny": 1.0, "other": 1.0})  # of batches that are as long as their texts
    assert min(spent.values()) > 0.9 * max(spent.values())
    differences = page.partition("<h2>Differences</h2>")[2].partition("</table>")[0]
    heads, cells = re.findall(r"<th[^>]*>([^<\n]+)", differences), re.findall(r"<td[^>]*>([^<\n]+)", differences)
    seeds = dict(zip(cells[:: len(heads)], cells[heads.index("seed") :: len(heads)], strict=True))
    assert heads[0] == "run" and seeds == {"tiny": "0", "other": "1"}
    assert "seed: 0 (tiny); 1 (other)" in text or "seed: 1 (other); 0 (tiny)" in text
    stages.train(replace(two[1], train=replace(two[1].train, steps=5)))
    evaluate_run(two[1])
    found, text, page = compared(two[0], haed)
    for shown in (text, page):
        assert "needs the fewest bits" not in shown
        assert "No verdict: the budgets differ by more than a tenth. tiny has 4 steps, other has 5" in shown
    assert found["verdict"] is None and found["refused"].endswith("higher train.steps=, and evaluate them again.")
    differing = {each["what"]: each["values"] for each in found["differing"]}
    assert differing["steps"] == differing["train.steps"] == {"tiny": 4, "other": 5}
    assert differing["model FLOPs"]["other"] > differing["model FLOPs"]["tiny"]
    summary = format_markdown(compare(two[0], "tiny", "other"))
    assert summary.startswith("No verdict") and "- steps: " in summary
    widths = [line.count(" | ") for line in summary.splitlines() if line.startswith("| ")]
    assert widths and max(widths) == 5  # a wider table would lie on the column beside it


@pytest.mark.slow
def test_one_run_under_two_names_is_no_comparison(two: tuple[Options, Options], tmp_path: Path) -> None:
    runs = two[0].runs_dir
    for names in (["tiny"], ["tiny", "tiny"], ["tiny", f"{runs}/tiny", f"{runs}/../{Path(runs).name}/tiny"]):
        found = comparison.compare_runs(names, runs, tmp_path / "page")
        assert len(found.rows) == 1 and found.verdict is None
        assert found.refused == "tiny is the only run. Name another one beside it."


def test_no_run_wins_by_nothing(two: tuple[Options, Options]) -> None:
    runs = Path(two[0].runs_dir)
    shutil.copytree(runs / "tiny", runs / "copy")
    found = compare(two[0], "tiny", "copy", "./tiny")
    assert found.verdict is not None and "fewest" not in found.verdict_summary
    assert found.verdict.endswith("need the same bits, to four decimals.")


@pytest.mark.parametrize(
    ("changed", "spent", "expected"),
    [
        ("train.seconds", {"steps": 5, "seconds": 1000}, "steps"),  # the same work: a busy machine learns no more
        ("model.main.layers", {"steps": 100, "seconds": 905}, "seconds"),
        ("model.main.layers", {"seconds": 890}, "seconds"),
    ],
)
def test_by_what_runs_are_compared(changed: str, spent: dict[str, int], expected: str) -> None:
    """By steps, if these do the same work, else by what limited them all."""
    one, other = (load_options("quickstart", ["train.seconds=1000"]) for _ in range(2))
    rows = [Row(name, ["train"], None, 10, 1000, 1e9, corpus="c", text="t") for name in ("one", "other")]
    rows[1] = replace(rows[1], **spent)
    set_option(other, changed, get_option(other, changed) + 1)
    options = {"one": one, "other": other}
    by = comparison.choose_budget(rows, options, comparison.find_differences(rows, options))
    assert by == expected
    least = min(getattr(row, by) for row in rows)
    enough = least >= 0.9 * max(getattr(row, by) for row in rows)
    said = comparison.explain_unequal_budgets(rows, options, by)
    assert (said is None) == enough
    assert said is None or "with a higher train.seconds=, and" in said  # the limit that they have


def test_each_reason_for_no_verdict_comes_with_commands_for_the_runs_that_it_is_about(
    two: tuple[Options, Options],
) -> None:
    path = Path(two[1].runs_dir) / "other" / "evaluation.json"
    known = json.loads(path.read_text()) | {"bits_per_char": 99.0, "remembered": None}
    stride, context = known["stride"], known["context"]

    def advise(**changes: object) -> list[str]:
        write_json(path, known | changes)
        return re.findall("`haed (.+?)`", compare(two[0], "tiny", "other").refused or "")

    command = f"evaluate {path.parent}"
    assert advise() == []
    assert advise(checkpoint="0" * 64) == [command]
    assert advise(likelihood="decoder") == [f"{command} evaluate.likelihood=mixture"]
    assert advise(split="valid", text="other") == [f"{command} evaluate.split={known['split']}"]
    again = f"{command} evaluate.stride={stride} batch.context={context} evaluate.precision={known['precision']}"
    assert advise(stride=1) == advise(stride=2 * stride, context=2 * context) == [again]
    path.unlink()
    assert f"other: not evaluated. Run `haed {command}`, or" in (compare(two[0], "tiny", "other").refused or "")


@pytest.mark.nightly
def test_no_run_wins_by_the_bits_of_an_earlier_checkpoint(two: tuple[Options, Options], haed: CommandLine) -> None:
    for each in two:
        stages.train(replace(each, train=replace(each.train, steps=5)))
    evaluate_run(two[0])
    found, text, page = compared(two[0], haed)
    assert {row["run"]: row["stale"] for row in found["rows"]} == {"tiny": False, "other": True}
    assert found["verdict"] is None
    for shown in (text, page):
        assert "(test, train, of an earlier checkpoint)" in shown
        assert "other: the evaluation is of another checkpoint than the present one. Run " in shown
    evaluate_run(two[1])  # the advice is taken
    assert compared(two[0], haed)[0]["verdict"]


@pytest.mark.nightly
def test_no_run_wins_by_another_way_of_being_scored(two: tuple[Options, Options], haed: CommandLine) -> None:
    evaluate_run(two[0])
    evaluate_run(replace(two[1], evaluate=replace(two[1].evaluate, stride=1)))
    found, text, page = compared(two[0], haed)
    assert found["verdict"] is None
    for shown in (text, page):
        assert "The runs were not evaluated in the same way (" in shown
        assert "other: 0.0625 of a window at a time" in shown
    advice = shlex.split(re.findall("`haed (.+?)`", found["refused"])[0])
    haed.output(*advice)
    assert compared(two[0], haed)[0]["verdict"]


def test_a_run_that_was_killed_counts_as_far_as_its_checkpoint(two: tuple[Options, Options]) -> None:
    """Its metrics go on; the same command begins at the checkpoint."""
    path = Path(two[0].runs_dir) / "tiny" / "train" / "metrics.jsonl"

    def row() -> Row:
        return next(row for row in compare(two[0], "tiny", "other").rows if row.run == "tiny")

    before = row()
    last = read_metrics(path)[-1]
    later = {**last, "step": 7, "seconds": last["seconds"] + 9, "flops": 9e15}
    path.write_bytes(path.read_bytes() + encode_record(later))
    assert row() == before and before.steps == 4
    assert determine_state(RunFolder.from_options(two[0])).step == 4
    assert phase_metrics(RunFolder.from_options(two[0]))["train"][-1]["step"] == 4
    with RunFolder.from_options(two[0]).lock():
        assert determine_state(RunFolder.from_options(two[0])).step == 7
        assert phase_metrics(RunFolder.from_options(two[0]))["train"][-1]["step"] == 7


def test_a_column_is_one_line_of_the_list(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is in the page, in the terminal and in Markdown, as CONTRIBUTING.md says."""
    column = Column("steps a second", lambda row: row.steps / row.seconds if row.seconds else None, "{:.1f}/s")
    monkeypatch.setattr(comparison, "COLUMNS", (*comparison.COLUMNS, column))
    found = compare_runs([run.name], str(run.parent), run.parent / "compared")
    expected = column.format_cell(found.rows[0])
    assert expected.endswith("/s")
    assert f'<td class="number">{expected}' in Path(found.page).read_text()
    for text, cell in ((format_comparison(found), expected), (format_markdown(found), markdown_text(expected))):
        assert "steps a second" in text and cell in text
    assert column.format_cell(replace(found.rows[0], seconds=0.0)) == "–"


def test_a_validation_that_the_metrics_lack_is_said(run: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As after a power cut, which leaves a part of the last line."""
    options, path = RunFolder(run).load_options(), run / "finetune" / "metrics.jsonl"
    options.runs_dir = str(run.parent)
    (before,) = compare(options, "run").rows
    assert before.validation is not None and "metrics.jsonl ends before" not in caplog.text
    content = path.read_bytes()
    path.write_bytes(content[: content.rindex(b"validation/")])
    (after,) = compare(options, "run").rows
    assert after.validation != before.validation
    assert f"{path} ends before the validation of step 4, so an older one is compared" in caplog.text
