"""What the pages of runs change: notes, tags, the archive, names, and that runs exist; and what they refuse."""

import csv
import html
import os
import shutil
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from pipeline.run.files import RunNotes, read_notes
from pipeline.run.run_directory import RunFolder, list_runs
from tests.pipeline.web.test_app import Site


@pytest.fixture
def site(run: Path) -> Site:
    return Site(run.parent)


def edit(site: Site, run: str = "run", status: int = 303, **fields: str) -> str:
    answer = site.client.post(f"/runs/{quote(run)}/edit", data={"name": run, "tags": "", "note": ""} | fields)
    assert answer.status_code == status, answer.text
    return answer.headers.get("location") or answer.text


def change(site: Site, action: str, *runs: str, status: int = 303) -> str:
    answer = site.client.post("/runs/.change", data={"action": action, "run": list(runs)})
    assert answer.status_code == status, answer.text
    return str(answer.text)


def test_a_note_and_tags_are_kept_in_the_folder_of_the_run(site: Site, run: Path) -> None:
    assert edit(site, tags="baseline, wörter  baseline", note="<b>one</b>\r\ntwo") == "../../runs/run/"
    assert read_notes(run) == RunNotes("<b>one</b>\ntwo", ["baseline", "wörter"])
    page = site.get("/runs/run/").text
    assert "&lt;b&gt;one&lt;/b&gt;\ntwo" in page and "wörter" in page and "wörter" in site.get("/runs/").text
    form = site.get("/runs/run/edit").text
    assert 'value="baseline wörter"' in form and "&lt;b&gt;one&lt;/b&gt;\ntwo</textarea>" in form


def test_what_a_request_does_not_send_stays_as_it_is(site: Site, run: Path) -> None:
    edit(site, tags="x y", note="hello")
    assert site.client.head("/runs/run/edit").status_code == 200
    assert site.client.post("/runs/run/edit", data={"note": "new"}).status_code == 303
    assert read_notes(run) == RunNotes("new", ["x", "y"])
    refused = site.client.post("/runs/run/edit", files={"note": ("name", b"other")})
    assert refused.status_code == 415 and read_notes(run) == RunNotes("new", ["x", "y"])


def test_of_two_people_the_second_is_told_what_the_first_wrote(site: Site, run: Path) -> None:
    def seen(page: str) -> str:
        return page.partition('name="seen" value="')[2].partition('"')[0]

    before = seen(site.get("/runs/run/edit").text)
    edit(site, note="of the first", seen=before)
    told = edit(site, note="of the second", seen=before, status=409)
    assert "of the first" in told and "of the second</textarea>" in told
    assert read_notes(run).note == "of the first"
    edit(site, note="of the second", seen=seen(told))
    assert read_notes(run).note == "of the second"


def test_invisible_characters_come_back_from_the_form(site: Site, run: Path) -> None:
    edit(site, note="left\u200fright \ufeff end")
    assert "left\u200fright \ufeff end</textarea>" in html.unescape(site.get("/runs/run/edit").text)


def test_an_archived_run_is_left_out_until_it_is_restored(site: Site, run: Path) -> None:
    edit(site, tags="kept")
    change(site, "archive", "run")
    link = 'href="../runs/run/"'
    assert link not in site.get("/runs/").text and link in site.get("/runs/?archived").text
    assert site.get("/runs/?format=json").json()[0]["archived"] and read_notes(run).tags == ["kept"]
    change(site, "restore", "run")
    assert link in site.get("/runs/").text
    searched = "/runs/?search=a%26b"
    for came, place in ((searched, searched), ("/elsewhere?x", "/runs/")):
        headers = {"referer": f"http://testserver{came}"}
        answer = site.client.post("/runs/.change", data={"action": "archive", "run": "run"}, headers=headers)
        assert answer.headers["location"] == f"..{place}"


def test_a_run_is_renamed_and_works_under_its_new_name(site: Site, run: Path) -> None:
    site.ask("next?prompt=a&count=1")
    name = "wörter 'and' \"quotes\" & <tags>"
    assert edit(site, name=f" {name} ", note="kept") == f"../../runs/{quote(name, safe='')}/"
    assert not run.exists() and read_notes(run.with_name(name)).note == "kept"
    assert RunFolder(run.with_name(name)).load_options().name == name
    assert site.get(f"/runs/{quote(name)}/next?prompt=a&count=1&format=json").json()["run"] == name
    site.get("/runs/run/", 404)


WRONG_NAMES = ["", " ", ".", "..", "../run2", "a/b", "/etc/x", ".hidden", "taken"]
WRONG_NAMES += ["x" * 201, "ä" * 101, "a\0b", "a\nb", "\u200b"]


@pytest.mark.parametrize("name", WRONG_NAMES)
def test_a_name_that_is_not_one_of_a_folder_here_is_refused_at_its_box(name: str, site: Site, run: Path) -> None:
    (run.parent / "taken").mkdir()
    text = edit(site, status=409, name=name, tags="typed", note="typed too")
    assert 'id="trouble-name"' in text and 'value="typed"' in text and "typed too</textarea>" in text
    assert run.is_dir() and not (run / "notes.json").exists() and sorted(run.parent.parent.iterdir())


@pytest.mark.parametrize(
    ("field", "value"), [("tags", "x" * 51), ("tags", " ".join(map(str, range(21)))), ("note", "x" * 10_001)]
)
def test_notes_have_bounds_and_lose_nothing(field: str, value: str, site: Site, run: Path) -> None:
    text = edit(site, status=409, **{field: value})
    assert f'id="trouble-{field}"' in text and value in text and not (run / "notes.json").exists()


@pytest.mark.parametrize("hold", [RunFolder.lock, RunFolder.reserve])
def test_a_run_in_use_is_neither_renamed_nor_archived_nor_deleted(
    hold: Callable[[RunFolder], AbstractContextManager[Any]], site: Site, run: Path
) -> None:
    with hold(RunFolder(run)):
        assert "in use by process" in edit(site, status=409, name="other")
        assert "in use by process" in change(site, "archive", "run", status=409)
        assert "in use by process" in change(site, "delete", "run", status=409)
        edit(site, note="while it trains")
    with RunFolder(run.with_name("n" * 200)).reserve():  # by a flow that has not made its folder yet
        assert "in use by process" in edit(site, status=409, name="n" * 200)
    assert run.is_dir() and read_notes(run) == RunNotes("while it trains")


def test_a_run_that_another_starts_from_stays(site: Site, run: Path) -> None:
    other = run.with_name("other")
    shutil.copytree(run, other)
    text = (other / "config.yaml").read_text()
    (other / "config.yaml").write_text(text.replace("start_from: null", "start_from: run"))
    assert "other starts from phase one of run" in change(site, "delete", "run", status=409)
    assert "other starts from phase one of run" in edit(site, status=409, name="new")
    change(site, "delete", "other")
    change(site, "delete", "run")
    assert not run.exists()


def test_runs_are_deleted_whole_after_their_size_was_shown(site: Site, run: Path) -> None:
    shutil.copytree(run, run.with_name("kept"))
    shown = site.client.post("/runs/.delete", data={"run": "run"}).text
    assert "Delete 1 run<" in shown and " MB</button>" in shown and run.is_dir()
    (run.parent / ".deleted-0123456789ab" / "finetune").mkdir(parents=True)  # left by a server that was killed
    (run.parent / ".deleted-0123456789ab" / "config.yaml").write_text("")
    os.utime(run.parent / ".deleted-0123456789ab", (0, 0))
    assert {*list_runs(run.parent)} == {"kept", "run"}
    change(site, "delete", "run")
    assert [path.name for path in run.parent.iterdir()] == ["kept"]


def test_a_link_is_not_followed(site: Site, run: Path) -> None:
    run.with_name("alias").symlink_to(run)
    assert "is a link" in change(site, "delete", "alias", status=409) and run.is_dir()


@pytest.mark.parametrize("data", [{}, {"run": "run"}, {"run": "run", "action": "burn"}, {"action": "delete"}])
def test_half_a_form_changes_nothing(data: dict[str, str], site: Site, run: Path) -> None:
    assert site.client.post("/runs/.change", data=data).status_code == 400 and run.is_dir()
    assert site.client.post("/runs/.change", data={"action": "delete", "run": "../run"}).status_code == 404
    assert site.client.post("/runs/.change", content=b"x" * (1 << 21)).status_code == 413
    assert site.client.post("/runs/.change", content=b"\xff=%ff&" * 9).status_code == 400


def test_pages_of_a_single_run_keep_its_name_and_folder(run: Path) -> None:
    site = Site(run, single=True)
    assert "haed serve" in edit(site, status=409, name="other")
    assert "haed serve" in change(site, "delete", "run", status=409)
    edit(site, note="noted")
    assert read_notes(run).note == "noted"


def test_damaged_notes_are_a_warning_and_can_be_written_again(site: Site, run: Path) -> None:
    (run / "notes.json").write_text("{")
    assert "notes.json is damaged" in site.get("/runs/?format=json").json()[0]["warnings"][0]
    assert "notes.json is damaged" in site.get("/runs/run/").text
    site.get("/runs/run/edit")
    edit(site, note="new")
    assert read_notes(run).note == "new"


def test_the_list_is_a_csv_without_formulas(site: Site, run: Path) -> None:
    edit(site, note='=HYPERLINK("x")', tags="a b")
    (row,) = csv.DictReader(site.get("/runs/?format=csv").text.splitlines())
    assert (row["run"], row["tags"]) == ("run", "a b")
    assert row["note"].startswith("'=") and float(row["metrics.seconds"]) > 0


def test_ticked_runs_are_compared(site: Site, run: Path) -> None:
    shutil.copytree(run, run.with_name("other"))
    page = site.get("/runs/.compare?run=run&run=other").text
    assert "Comparison of 2 runs" in page and "/runs/.curves?run=" in page and "need the same bits" in page
    series = site.get("/runs/.curves?run=run&run=other").json()
    assert {each["run"] for each in series} == {"run", "other"}
    assert {each["phase"] for each in series} == {"pretrain", "finetune"}
    for question, status in (("", 400), ("?run=run", 400), ("?run=run&run=missing", 404), ("?run=run&run=run", 400)):
        assert 'role="alert"' in site.get(f"/runs/.compare{question}", status).text


@pytest.mark.parametrize("page", ["0", "2", "-1", "abc", "9" * 400, "½"])
def test_a_page_of_the_list_that_is_not_there_is_a_sentence(page: str, site: Site) -> None:
    assert "there are pages 1 to 1" in site.get(f"/runs/?page={quote(page)}", 404).text
