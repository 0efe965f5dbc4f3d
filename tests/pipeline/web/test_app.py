"""The pages by their addresses: what they show, what they refuse, and what they never tell apart from text."""

import asyncio
import gc
import json
import re
import shutil
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlencode

import pytest
from starlette.testclient import TestClient

from data.filesystem import write_json
from pipeline.cli import main
from pipeline.config import Options
from pipeline.run.checkpoints import Checkpoints
from pipeline.run.metrics import encode_record
from pipeline.run.opened import open_run
from pipeline.run.run_directory import RunFolder
from pipeline.web.app import make_application
from pipeline.web.host_check import LOOPBACK, AllowedHosts, HostCheckMiddleware
from pipeline.web.model_cache import ModelCache
from pipeline.web.runs import ServedRuns
from tests.flows.api import COMMAND

HOSTILE = "<script>alert(1)</script>'\"&\x1b[2J"


class Site:
    """Pages of the runs beside a run, and somebody who asks for them."""

    def __init__(self, place: Path, single: bool = False) -> None:
        self.warm = ModelCache(keep=2, overrides=("threads=1", "device=cpu"))
        self.runs = ServedRuns(place, single)
        self.guarded = HostCheckMiddleware(make_application(self.runs, self.warm), AllowedHosts(LOOPBACK))
        self.client = TestClient(self.guarded, "http://127.0.0.1:7300", follow_redirects=False)

    def get(self, address: str, status: int = 200, **headers: str) -> Any:
        """The answer to a request, which has this status."""
        found = self.client.get(address, headers=headers)
        assert found.status_code == status, found.text
        return found

    def verbatim(self, path: str) -> tuple[int, bytes]:
        """The answer to a path that no client tidies up first: what a server makes of it."""
        sent: list[Any] = []

        async def receive() -> Any:
            return {"type": "http.request"}

        async def send(message: Any) -> None:
            sent.append(message)

        headers = [(b"host", b"127.0.0.1:7300")]
        scope = {"type": "http", "method": "GET", "path": unquote(path), "raw_path": path.encode(), "headers": headers}
        asyncio.run(self.guarded(scope | {"query_string": b"", "scheme": "http"}, receive, send))
        return sent[0]["status"], b"".join(message.get("body", b"") for message in sent)

    def beside_prefect(self) -> TestClient:
        """The same pages as `haed serve` shows them."""
        return TestClient(make_application(self.runs, self.warm, {"Prefect UI": "/v2/"}))

    def ask(self, question: str, status: int = 200) -> Any:
        """The answer to a question to the run, for programs."""
        return self.get(f"/runs/run/{question}{'&' if '?' in question else '?'}format=json", status).json()


@pytest.fixture
def site(run: Path) -> Iterator[Site]:
    yield Site(run.parent)


def test_a_run_has_its_page_its_downloads_and_its_place_in_the_list(site: Site, run: Path) -> None:
    assert main(["report", str(run)]) == 0
    listed = site.get("/runs/").text
    assert 'href="../runs/run/"' in listed and "finished" in listed and "bits/char" in listed
    (row,) = site.get("/runs/?format=json").json()
    assert (row["run"], row["word"], row["phase"], row["step"], row["share"]) == ("run", "finished", "finetune", 4, 1.0)

    page = site.get("/runs/run/").text
    digest = RunFolder(run).select_checkpoint().digest
    words = ("nearest preset is <code>quickstart</code>", "finetune.steps", "<svg", "in use", "neighbours")
    assert all(expected in page for expected in (digest, *words))
    files = {"report.html": "<!doctype html>", "config.yaml": "# All options", "evaluation.json": "{"}
    for name, start in files.items():
        found = site.get(f"/runs/run/files/{name}")
        assert found.text.startswith(start) and "sandbox" in found.headers["content-security-policy"]
    table = site.get("/runs/run/files/finetune/metrics.csv").text.splitlines()
    assert table[0].startswith("step,") and table[1].startswith("1,")
    assert site.get("/runs/run", 307).headers["location"].endswith("/runs/run/")


def test_forms_and_flow_runs_of_prefect_are_offered_beside_prefect_alone(
    site: Site, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HAED_TENSORBOARD_URL", "http://127.0.0.1:6006")
    Checkpoints(run / "finetune/checkpoints").set_pointer("best", run / "finetune/checkpoints/step-00000002")
    (run / "samples.json").write_text("[]")  # no data that looks like a command
    alone = site.get("/runs/run/").text
    assert "<code>haed report run</code>" in alone and "<code>haed evaluate " in alone
    assert not any(word in alone for word in ("/runs/run/form/", "Flow runs", "flow-runs", "TensorBoard"))
    beside = site.beside_prefect()
    page = beside.get("/runs/run/").text
    assert not COMMAND.search(page) and "the form report" in page and "the form evaluate" in page
    assert "the flow haed (preset=quickstart)" in Site(run).beside_prefect().get("/runs/").text
    assert "/runs/run/form/haed?overrides=finetune.steps%3D8" in page  # twice its steps
    assert "/runs/run/form/evaluate" in page and 'data-flow-runs="../../runs/run/flow-runs"' in page
    assert 'href="http://127.0.0.1:6006/?runFilter=%5Erun%2F"' in page
    monkeypatch.delenv("HAED_TENSORBOARD_URL")
    assert "TensorBoard" not in beside.get("/runs/run/").text
    assert "/runs/.form/sweep" in beside.get("/runs/").text and ".form" not in site.get("/runs/").text


@pytest.mark.parametrize(("phase", "doubled"), [("pretrain", 12), ("train", 8)])
def test_a_phase_that_haed_does_not_end_with_is_extended_by_its_own_form(
    phase: str, doubled: int, site: Site, run: Path
) -> None:
    if phase == "train":
        shutil.copytree(run / "finetune", run / "train")
    shutil.rmtree(run / "finetune")
    page = site.beside_prefect().get("/runs/run/").text
    assert f"/runs/run/form/{phase}?overrides={phase}.steps%3D{doubled}" in page and "haed?overrides" not in page


def test_answers_say_whose_they_are_and_the_second_opens_nothing(site: Site, run: Path) -> None:
    present = RunFolder(run).select_checkpoint()
    first = site.ask("neighbours?query=def␣&query=return&count=3")
    assert first["opening"] > 0
    assert [first[name] for name in ("run", "phase", "step", "checkpoint")] == ["run", "finetune", 4, present.digest]
    asked = first["value"]["asked"]
    assert [(item["query"], len(item["neighbours"])) for item in asked] == [("def ", 3), ("return", 3)]
    near = asked[0]["neighbours"][0]
    assert near["count"] > 0 and near["examples"] and near["text"].encode().hex() == near["hex"]
    for question in (
        "neighbours?hex=72657475726e",
        "next?prompt=import+&count=5",
        "samples?prompt=import+&chunks=3&samples=2",
    ):
        found = site.ask(question)
        assert found["opening"] == 0 and found["checkpoint"] == present.digest
    assert len(found["value"]["samples"]) == 2 and site.warm.opened == 1
    text = site.get("/runs/run/neighbours?query=def%20").text
    assert "finetune step 4" in text and present.digest in text and "def␣" in text


def test_a_text_is_scored_chunk_by_chunk_with_the_part_that_each_came_from(site: Site, run: Path) -> None:
    text = "import os\nimport sys\nimport os\nimport sys\n"
    found = site.ask(f"score?{urlencode({'prompt': text})}")["value"]
    assert "".join(each["text"] for each in found["chunks"]) == text
    expected = open_run(run).score(text)
    assert found["bits_per_char"] == pytest.approx(expected.bits_per_char)
    assert sum(each["bits"] for each in found["chunks"]) == pytest.approx(expected.bits)
    assert expected.remembered is not None and found["alone"] > found["bits_per_char"]
    assert sum(each["alone"] for each in found["chunks"]) == pytest.approx(expected.remembered.bits_without)
    for each in found["chunks"]:
        assert set(each["parts"]) == {"known", "spelled", "copied", "repeated", "recalled"}
        assert sum(each["parts"].values()) == pytest.approx(1)
    assert found["chunks"][0]["parts"]["copied"] == 0 and found["shares"]["copied"] > 0
    page = site.get(f"/runs/run/score?{urlencode({'prompt': text})}").text
    assert page.count('<span class="part ') == len(found["chunks"]) + len(found["shares"]) + 5 and "part copied" in page
    assert found["uniform"] == 8 and "if all bytes were equally likely" in page
    assert "the text is empty" in site.ask("score?prompt=", 400)["error"]


def test_what_changes_is_opened_again_and_only_the_last_few_are_kept(site: Site, run: Path) -> None:
    def ask() -> Any:
        return site.ask("next?prompt=a&count=1")

    before = ask()
    checkpoints = Checkpoints(run / "finetune" / "checkpoints")
    checkpoints.set_pointer("best", run / "finetune" / "checkpoints" / "step-00000002")
    after = ask()
    assert (before["step"], after["step"]) == (4, 2) and before["checkpoint"] != after["checkpoint"]
    assert site.warm.opened == 2 and ask()["opening"] == 0
    stale = site.ask("neighbours?query=a", 400)
    assert "haed index" in stale["error"] and stale["error"].count("\n") == 0
    (run / "index" / "meta.json").write_text("{}")
    ask()
    assert site.warm.opened == 3
    for name in ("b", "c"):
        shutil.copytree(run, run.with_name(name))
        site.get(f"/runs/{name}/next?prompt=a")
    site.get("/runs/b/next?prompt=a")
    assert site.warm.opened == 5
    ask()
    assert site.warm.opened == 6
    gone = [weakref.ref(each.run) for each in site.warm._kept.values() if each.run.folder.path.name == "b"]
    shutil.rmtree(run.with_name("b"))
    ask()
    gc.collect()
    assert [each() for each in gone] == [None]


ELSEWHERE = [
    "/runs/../",
    "/runs/%2e%2e/",
    "/runs/..%2frun/",
    "/runs/.pages/app.py",
    "/runs/.pages/..%2fapp.py",
    "/runs/%2fetc/",
    "/runs/elsewhere/",
    "/runs/.hidden/",
    "/runs/run/files/",
    "/runs/run/files/lock",
    "/runs/run/files/../run/config.yaml",
    "/runs/run/files/..%2f..%2fsecret",
    "/runs/run/files//etc/passwd",
    "/runs/run/files/finetune/checkpoints/latest",
    "/runs/run/files/finetune/../config.yaml",
    "/runs/run/files/report.md",
    "/runs/run/files/analysis/leads-out.json",
    "/runs/run/files/secret/metrics.csv",
    "/runs/run/%00",
    "/runs/missing/neighbours?query=a",
]


def test_nothing_else_is_served(site: Site, run: Path, whole: Path) -> None:
    secret = run.parent.parent / "secret"
    secret.write_text("SECRET")
    (run.parent / "elsewhere").symlink_to(whole / "runs" / "run")
    shutil.copytree(run, run.parent / ".hidden")
    (run / "report.md").symlink_to(secret)
    (run / "analysis").mkdir()
    (run / "analysis" / "leads-out.json").symlink_to(secret)
    for path in ELSEWHERE:
        status, content = site.verbatim(path)
        assert status == 404 and b"SECRET" not in content, path
    assert "elsewhere" in site.get("/runs/").text and 'href="../runs/elsewhere/"' not in site.get("/runs/").text


def test_what_lies_in_analysis_is_served_apart_from_our_pages(site: Site, run: Path) -> None:
    (run / "analysis").mkdir()
    (run / "analysis" / "map.html").write_text("<script>1</script>")
    assert 'href="../../runs/run/files/analysis/map.html"' in site.get("/runs/run/").text
    assert "/runs/run/map#def%E2%90%A3" in site.get("/runs/run/neighbours?query=def%20").text
    policy = site.get("/runs/run/files/analysis/map.html").headers["content-security-policy"]
    assert "sandbox allow-scripts;" in policy and "allow-same-origin" not in policy


def test_texts_of_strangers_stay_texts(site: Site, run: Path) -> None:
    folder = run.with_name(HOSTILE.replace("/", "|").replace("\x1b", ""))
    run.rename(folder)
    evaluation = json.loads((folder / "evaluation.json").read_text())
    evaluation |= {"split": HOSTILE, "stage": HOSTILE}
    write_json(folder / "evaluation.json", evaluation)
    (sample, *_) = json.loads((folder / "samples.json").read_text())
    write_json(folder / "samples.json", [sample | {"prompt": HOSTILE, "text": HOSTILE}])
    write_json(folder / "environment.json", {HOSTILE: HOSTILE})
    records = [{"step": 1, "seconds": 1, "iem": value, HOSTILE: 1} for value in (float("nan"), None, 1.5)]
    (folder / "pretrain" / "metrics.jsonl").write_bytes(b"".join(encode_record(record) for record in records))
    (folder / "lock").write_text(HOSTILE)
    (folder / "finetune" / "checkpoints" / f"step-{HOSTILE.replace('/', '|')}").mkdir()
    where = site.get("/runs/").text.split('href="../runs/%3C')[1].split('"')[0]
    place = f"/runs/%3C{where}"
    attack = "<script>alert(1)</script>"
    for page, box in {"neighbours": "query", "next": "prompt", "samples": "chunks=2&prompt", "score": "prompt"}.items():
        assert "<script>" not in site.get(f"{place}{page}?{box}={attack}").text
        assert "<script>" not in site.get(f"{place}{page}?{attack}={attack}", 400).text
    for path in ("/runs/", place, *(f"{place}{page}" for page in ("live", "neighbours", "next", "samples", "score"))):
        tool = path.removeprefix(place) in ("neighbours", "next", "samples", "score")
        for question in ("",) if tool else ("", f"?prompt={attack}&query=<script>&count=4&chunks=2"):
            found = site.get(path + question)
            shown = found.json()["html"] if path.endswith("live") else found.text
            assert "<script>" not in shown and "\x1b" not in shown
    assert main(["report", str(folder)]) == 0
    assert "<script>" not in (folder / "report.html").read_text()
    table = site.get(f"{place}files/pretrain/metrics.csv").text
    assert table.splitlines()[-1] == "1,1,1,1.5"


def test_pages_change_nothing_but_caches(site: Site, run: Path) -> None:
    def contents() -> dict[str, bytes]:
        files = [path for path in run.parent.rglob("*") if path.is_file() and path.name != ".checked"]
        return {str(path): path.read_bytes() for path in files if path.parent.name != "known"}

    before = contents()
    for path in ("", "run/", "run/live", "run/edit", "run/files/evaluation.json", "run/files/pretrain/metrics.csv"):
        site.get(f"/runs/{path}")
    site.get("/runs/.curves?run=run")
    for question in ("neighbours?query=def%20", "next?prompt=def", "samples?prompt=a&chunks=2", "score?prompt=a"):
        site.get(f"/runs/run/{question}")
    assert contents() == before
    site.get("/runs/.change?run=run&action=archive", 405)
    site.get("/runs/.delete?run=run", 405)
    for method in ("POST", "PUT", "PATCH", "DELETE"):
        for page in ("run/", "run/samples?prompt=a"):
            assert site.client.request(method, f"/runs/{page}").status_code == 405


def test_pages_have_a_policy_and_name_no_other_host(site: Site) -> None:
    found = site.get("/runs/")
    policies = found.headers.get_list("content-security-policy")
    assert any("default-src 'self'" in policy and "unsafe" not in policy for policy in policies)
    assert "http" not in found.text.replace("http-equiv", "")


@pytest.mark.parametrize(
    ("config", "said"), [("model: 3", "model is a section of options"), ("", "config.yaml is empty")]
)
def test_a_damaged_run_is_a_line_and_the_others_are_shown(config: str, said: str, site: Site, run: Path) -> None:
    shutil.copytree(run, run.with_name("whole"))
    (run / "config.yaml").write_text(config)
    (run / "evaluation.json").write_text("{")
    for path in ("/runs/", "/runs/run/", "/runs/whole/"):
        site.get(path)
    page = site.get("/runs/run/").text
    assert "evaluation.json is damaged" in page and said in page
    assert said in site.ask("next?prompt=a", 400)["error"]
    shutil.rmtree(run.with_name("whole") / "finetune")
    shutil.rmtree(run.with_name("whole") / "pretrain")
    assert "has no checkpoint" in site.get("/runs/whole/next?prompt=a", 409).text


def test_a_question_that_is_no_utf8_is_refused_and_not_answered_for_others(site: Site) -> None:
    assert site.ask("neighbours?query=%ff%fe", 400)["error"].endswith("no UTF-8. Write a chunk of other bytes as hex=")
    assert site.ask("next?prompt=%ff", 400)["error"].endswith("no UTF-8. Write the text in UTF-8")  # it takes no hex=
    assert "no UTF-8" not in site.ask("neighbours?query=%ef%bf%bd")


def test_a_format_that_a_page_has_not_and_a_form_that_is_no_utf8_are_refused(site: Site) -> None:
    for page in ("", "run/", "run/score?prompt=x"):
        said = site.get(f"/runs/{page}{'&' if '?' in page else '?'}format=xml", 400).text
        assert "no such format" in said or "/runs/run/live for JSON" in said
    form = {"Content-Type": "application/x-www-form-urlencoded", "Origin": "http://127.0.0.1:7300"}
    assert site.client.post("/runs/run/edit", content=b"name=%ff&tags=&note=&seen=", headers=form).status_code == 400


def test_a_run_with_a_damaged_line_of_metrics_is_shown_without_them(site: Site, run: Path) -> None:
    path = run / "finetune" / "metrics.jsonl"
    path.write_bytes(path.read_bytes().replace(b'"step": ', b'"step":  ', 1))
    page = site.get("/runs/run/").text
    assert page.count("metrics.jsonl, line 1 is damaged") == 1
    assert "bits/char" in page and "damaged" in site.get("/runs/").text


@pytest.mark.parametrize(
    ("option", "value"),
    [("stage", "5"), ("stage", "[a]"), ("seed", "2024-01-01"), ("seed", "!!set {a}"), ("seed", ".nan")],
)
def test_an_odd_option_of_one_run_leaves_the_list_whole(option: str, value: str, site: Site, run: Path) -> None:
    shutil.copytree(run, run.with_name("whole"))
    config = run / "config.yaml"
    config.write_text(re.sub(rf"^( *{option}:).*$", rf"\1 {value}", config.read_text(), flags=re.M))
    for path in ("/runs/", "/runs/?format=csv"):
        assert "whole" in site.get(path).text
    listed = json.loads(site.get("/runs/?format=json").text, parse_constant=lambda name: pytest.fail(name))
    assert {each["run"] for each in listed} == {"run", "whole"}


def test_what_a_browser_keeps_is_asked_for_again_only_if_it_changed(site: Site) -> None:
    first = site.get("/runs/.pages/style.css")
    again = site.get("/runs/.pages/style.css", 304, **{"if-none-match": first.headers["etag"]})
    assert first.headers["cache-control"] == again.headers["cache-control"] == "no-cache"


def test_a_run_whose_last_phase_has_lost_its_checkpoint_warns_at_each_answer(site: Site, run: Path) -> None:
    shutil.rmtree(run / "finetune/checkpoints")
    assert all("finetune has metrics but no checkpoint" in str(site.ask("next?prompt=a")["warnings"]) for _ in range(2))


# Pages of a model of pictures.


def test_neighbours_of_colours_are_drawn(pictures: Options) -> None:
    run = Path(pictures.runs_dir) / "pictures"
    assert main(["index", str(run)]) == 0
    site = Site(run.parent)
    page = site.get("/runs/pictures/neighbours?query=%23505050&count=2").text
    assert 'fill="#505050"' in page and 'class="swatch"' in page and "not of pictures" in page
    found = site.get("/runs/pictures/neighbours?count=2&format=json").json()["value"]["asked"][0]
    chunk = found["neighbours"][0]["hex"]
    assert f"hex={chunk}" in site.get(f"/runs/pictures/neighbours?hex={found['hex']}&count=2").text
    found = site.get(f"/runs/pictures/neighbours?hex={chunk}&count=1&format=json").json()["value"]["asked"][0]
    assert found["hex"] == chunk
    beside = site.beside_prefect()
    for tool, said, flow in (("samples", "samples.png", "sample"), ("score", "haed evaluate", "evaluate")):
        assert said in site.get(f"/runs/pictures/{tool}?prompt=", 400).text
        page = beside.get(f"/runs/pictures/{tool}?prompt=").text
        assert f"/runs/pictures/form/{flow}" in page and "haed " not in page
    assert "all others" in site.get("/runs/pictures/next?prompt=").text


def test_a_run_that_is_moved_while_it_is_explored_is_said_to_be_gone(run: Path) -> None:
    site = Site(run, single=True)
    site.get("/runs/run/next")
    run.rename(run.with_name("elsewhere"))
    for address in ("/", "/runs/run/", "/runs/run/next?prompt=a&format=json", "/runs/run/neighbours"):
        assert "run was moved, renamed or removed" in site.get(address, 404).text
    assert "no run" in (said := site.get("/runs/other/next", 404).text) and "moved" not in said
