"""Texts of the UI: flows in place of commands, runs in lists, and steps that a kill took."""

import logging
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from flows.artifacts import name_flows, name_flows_in_logs
from flows.flows import FLOWS
from flows.forms import PLAIN, list_recent_runs, load_tagged_options, read_form, unlabel_run
from flows.lifecycle import RUN, describe_saved_progress, finish_flow_run
from pipeline import config
from pipeline.console import markdown_text, prepare_logs
from pipeline.run.run_directory import RunFolder


@pytest.mark.parametrize(
    ("message", "shown"),
    [
        ("Run `haed evaluate` again to compare.", "Run the flow evaluate again to compare."),
        ("Run `haed pretrain runs/mine` first", "Run the flow pretrain (run mine) first"),
        ("Make one with `haed run --config quickstart`", "Make one with the flow haed (preset=quickstart)"),
        (
            "Use `haed index RUN --space contexts` and `haed neighbours RUN --context TEXT`",
            "Use the flow index (space=contexts) and the flow neighbours",
        ),
        ("saved. Run the same command to resume", "saved. Retry to resume"),
        ("Lower --samples or sample.chunks", "Lower samples or sample.chunks"),
        ("`haed serve` starts TensorBoard -- and more", "`haed serve` starts TensorBoard -- and more"),
    ],
)
def test_messages_of_the_ui_name_flows_in_place_of_commands(message: str, shown: str) -> None:
    assert name_flows(message) == shown
    assert name_flows(markdown_text(message)) == markdown_text(shown)


def test_our_logs_name_flows_and_those_of_others_stay(caplog: pytest.LogCaptureFixture) -> None:
    name_flows_in_logs()
    try:
        for name in ("pipeline.run", "elsewhere"):
            logging.getLogger(name).warning("run `haed %s`", "report")
    finally:
        prepare_logs()
    assert [record.message for record in caplog.records] == ["run the flow report", "run `haed report`"]


def test_no_form_speaks_of_a_command_line() -> None:
    for flow in FLOWS:
        text = (flow.description or "") + str(flow.parameters.model_dump())
        assert "command line" not in text and name_flows(text) == text, flow.name


def test_runs_are_listed_with_state_and_date_finished_first(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for number, name in enumerate(("older", "stopped", "busy", "bare")):
        shutil.copytree(run, run.with_name(name))
        os.utime(run.with_name(name) / "config.yaml", (1e9 + number, 1e9 + number))
        os.utime(run.with_name(name) / "finetune/metrics.jsonl", (1e9 + number, 1e9 + number))
    text = (run.with_name("stopped") / "config.yaml").read_text()
    (run.with_name("stopped") / "config.yaml").write_text(text.replace("steps: 4", "steps: 400"))
    for phase in ("pretrain", "finetune"):
        shutil.rmtree(run.with_name("bare") / phase)
    with RunFolder(run.with_name("busy")).lock():
        listed = list_recent_runs()
    words = [label.rpartition(" (")[2].split(", ")[0] for label in listed]
    assert [unlabel_run(label) for label in listed][:3] == ["run", "older", "busy"]
    assert words[:3] == ["finished", "finished", "training"] and {*words[3:]} == {"stopped", "not trained"}
    assert listed[1].startswith("older (finished, 2001-09-0")
    assert unlabel_run(" typed (v2) ") == "typed (v2)"


def test_a_phase_may_have_seconds_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    def limits(**given: Any) -> dict[str, float | None]:
        fields = {name: each.default for name, each in PLAIN.items()} | given
        options = config.load_options(*read_form("haed", fields))
        return {phase: getattr(options, phase).seconds for phase in ("pretrain", "finetune", "train")}

    usual = limits()
    assert limits(pretrain_seconds=30) == usual | {"pretrain": 30}
    assert limits(finetune_seconds=5, overrides=["finetune.seconds=7"]) == usual | {"finetune": 7}
    assert limits(seconds=90, pretrain_seconds=30) == usual | {"pretrain": 30, "finetune": 30}
    with pytest.raises(config.ConfigError, match="pretrain_seconds: model.kind=hourglass is trained in one phase"):
        limits(preset="hourglass", pretrain_seconds=30)


def test_a_form_without_a_run_and_one_with_far_too_much_get_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(config.ConfigError, match="no run is named. Choose one of the list.*the flow|there are no runs"):
        load_tagged_options("   ", [], "evaluate")
    state = finish_flow_run("haed", lambda: config.load_options("quickstart", ["x" * 70_000]), str)
    assert state.is_failed() and len(state.message or "") < 2100 and "key=value" in str(state.message)


def test_what_a_kill_took_is_counted(run: Path) -> None:
    labels = {RUN: str(run)}
    assert describe_saved_progress("haed", labels) == (
        "saved step 4 of finetune; the steps after it are lost; Retry resumes from there"
    )
    (run / "finetune/checkpoints/latest").write_text("step-00000002")
    assert "saved step 2 of finetune; at least 2 steps after it are lost" in describe_saved_progress("haed", labels)
    shutil.rmtree(run / "finetune/checkpoints")
    assert "its steps are lost, at least 4; Retry starts it again" in describe_saved_progress("haed", labels)
