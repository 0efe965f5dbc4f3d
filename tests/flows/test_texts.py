"""Texts of the UI: flows in place of commands, runs in lists, and steps that a kill took."""

import ast
import logging
import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from data.filesystem import write_json
from flows.artifacts import name_flows_in_logs
from flows.deployments import build_deployments
from flows.flows import FLOWS
from flows.forms import PLAIN, list_recent_runs, load_tagged_options, read_form, unlabel_run
from flows.lifecycle import RUN, describe_saved_progress, finish_flow_run
from pipeline import config
from pipeline.console import prepare_logs
from pipeline.run.files import NOTES, RunNotes
from pipeline.run.run_directory import RunFolder
from pipeline.suggestions import name_flows, read_suggestion
from tests.flows.api import COMMAND, check_texts, python
from tests.test_rooms import MODULES

# Modules whose messages are read in a terminal alone.
OF_TERMINALS = (
    *("pipeline.arguments", "pipeline.commands", "pipeline.cli", "pipeline.config.messages"),
    *("pipeline.config.reference", "pipeline.web.explore", "flows.commands", "flows.deployments"),
    *("flows.serve", "flows.server", "flows.cli"),
)


def test_our_logs_name_flows_and_those_of_others_stay(caplog: pytest.LogCaptureFixture) -> None:
    name_flows_in_logs()
    try:
        for name in ("pipeline.run", "elsewhere"):
            logging.getLogger(name).warning("run `haed %s`", "report")
    finally:
        prepare_logs()
    assert [record.message for record in caplog.records] == ["run the flow report", "run `haed report`"]


def read_messages() -> Iterator[tuple[str, str]]:
    """All texts of our code that may be a message, with their places, except of modules that speak to terminals alone."""
    for name, path in MODULES.items():
        tree = ast.parse(path.read_text())
        owners = [each for each in ast.walk(tree) if isinstance(each, ast.Module | ast.ClassDef | ast.FunctionDef)]
        skipped = {id(each.body[0].value) for each in owners if each.body and isinstance(each.body[0], ast.Expr)}
        for node in ast.walk(tree) if not name.startswith(OF_TERMINALS) else ():
            text = node.value if isinstance(node, ast.Constant) else None
            if isinstance(node, ast.JoinedStr):
                skipped |= {id(part) for part in node.values}
                text = "".join(str(part.value) if isinstance(part, ast.Constant) else "NAME" for part in node.values)
            if isinstance(text, str) and id(node) not in skipped:
                yield f"{name}:{node.lineno}", text


def test_messages_name_commands_and_flags_in_backticks_alone_and_all_of_them_have_forms() -> None:
    forms = {flow.name: flow.parameters.properties for flow in FLOWS}
    found = 0
    for place, text in read_messages():
        assert not COMMAND.search(name_flows(re.sub("^--[a-z].*", "", text))), f"{place}: {text}"
        for code in re.findall("`(.+?)`", text):
            if (suggestion := read_suggestion(code)) and suggestion.flow:
                assert {*suggestion.fields} <= {*forms[suggestion.flow]}, f"{place}: {text}"
                found += 1
    assert found > 15


def test_no_form_speaks_of_a_command_line() -> None:
    for deployment in build_deployments("here"):
        text = (deployment.description or "") + str(deployment._parameter_openapi_schema.model_dump())
        assert "command line" not in text and not COMMAND.search(text), deployment.name


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_no_artifact_or_state_names_a_command(whole: Path, tmp_path: Path, api: str) -> None:
    shutil.copytree(whole / "runs", tmp_path / "runs")
    shutil.copytree(tmp_path / "runs/run", tmp_path / "runs/other")
    (tmp_path / "runs/other/evaluation.json").unlink()
    lines = [
        "from flows.flows import *",
        "neighbours('run', min_count=2), index('run', 'contexts'), analyse('other', ['evaluate.stage=pretrain'])",
        "next_chunks('run', ['import ']), compare(['run', 'other']), report('run')",
        "neighbours('other', [], 'contexts', return_state=True), index('none', return_state=True)",
    ]
    done = python(tmp_path, "-c", "\n".join(lines), PREFECT_API_URL=api)
    assert done.returncode == 0, done.stderr
    assert check_texts(api.removesuffix("/api")) > 20


@pytest.mark.usefixtures("here")
def test_runs_are_listed_with_state_and_date_finished_first(run: Path) -> None:
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
    write_json(run.with_name("older") / NOTES, asdict(RunNotes(archived=True)))
    assert [*map(unlabel_run, list_recent_runs())] == [name for name in map(unlabel_run, listed) if name != "older"]
    assert unlabel_run(" typed (v2) ") == "typed (v2)"


@pytest.mark.usefixtures("here")
def test_a_phase_may_have_seconds_of_its_own() -> None:
    def limits(**given: Any) -> dict[str, float | None]:
        fields = {name: each.default for name, each in PLAIN.items()} | given
        options = config.load_options(*read_form("haed", fields))
        return {phase: getattr(options, phase).seconds for phase in ("pretrain", "finetune", "train")}

    usual = limits()
    assert limits(pretrain_seconds=30) == usual | {"pretrain": 30}
    assert limits(finetune_seconds=5, overrides=["finetune.seconds=7"]) == usual | {"finetune": 7}
    assert limits(seconds=90, pretrain_seconds=30) == usual | {"pretrain": 30, "finetune": 30}
    started = limits(seconds=90, overrides=["finetune.start_from=other"])
    assert started == usual | {"finetune": 90}  # phase one is another run's
    Path("mine.yaml").write_text("pretrain: {seconds: 60}\nfinetune: {seconds: null, steps: 100}\n")
    assert limits(preset="mine.yaml", seconds=30) | {"train": None} == {"pretrain": 30, "finetune": None, "train": None}
    with pytest.raises(config.ConfigError, match="pretrain_seconds: model.kind=hourglass is trained in one phase"):
        limits(preset="hourglass", pretrain_seconds=30)


@pytest.mark.usefixtures("here")
def test_a_form_without_a_run_and_one_with_far_too_much_get_a_sentence() -> None:
    with pytest.raises(config.ConfigError, match="no run is named. Choose one of the list.*the flow|there are no runs"):
        load_tagged_options("   ", [], "evaluate")
    state = finish_flow_run("haed", lambda: config.load_options("quickstart", ["x" * 70_000]), str)
    assert state.is_failed() and len(state.message or "") < 2100 and "key=value" in str(state.message)


def test_what_a_kill_took_is_counted(run: Path) -> None:
    labels = {RUN: str(run)}
    said = "saved step 4 of finetune; any steps after it are lost; Retry resumes from there"
    assert describe_saved_progress("haed", labels) == said
    os.utime(run / "pretrain/metrics.jsonl")  # as Retry does, which looks at it again
    assert "saved step 4 of finetune" in describe_saved_progress("haed", labels)
    (run / "finetune/checkpoints/latest").write_text("step-00000002")
    assert "saved step 2 of finetune; at least 2 steps after it are lost" in describe_saved_progress("haed", labels)
    shutil.rmtree(run / "finetune/checkpoints")
    assert "its steps are lost, at least 4; Retry starts it again" in describe_saved_progress("haed", labels)
