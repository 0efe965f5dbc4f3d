"""The pages of runs in a browser: the list with its script, curves, narrow and dark, and what axe-core says of each page."""

import csv
import re
import shutil
from collections.abc import Iterator
from dataclasses import asdict
from importlib.resources import files
from itertools import product
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from data.filesystem import write_json
from pipeline.analysis.stage import draw_map
from pipeline.run.files import RunNotes, read_notes
from pipeline.run.metrics import encode_record, read_metrics
from pipeline.run.opened import open_run
from pipeline.run.run_directory import RunFolder
from tests.conftest import mostly_nightly
from tests.pipeline.web.test_app import Site
from tests.pipeline.web.test_host_check import serve

pytestmark = pytest.mark.slow
LONG = "long-" + "x" * 60 + " wörter <b> 'and' \"quotes\" & " + "y" * 55


@pytest.fixture
def address(run: Path) -> Iterator[str]:
    """Pages of four runs: one with a long name, and two that differ in their seed."""
    for name, seed in (("seed-1", 1), ("seed-2", 2), (LONG, 0)):
        shutil.copytree(run, run.with_name(name))
        path = run.with_name(name) / "config.yaml"
        path.write_text(path.read_text().replace("\nseed: 0\n", f"\nseed: {seed}\n"))
    site = Site(run.parent)
    with serve(site.guarded) as port:
        yield f"http://127.0.0.1:{port}"
    site.warm.close(10)


@pytest.fixture
def page(browser: Any, address: str) -> Iterator[Any]:
    """A page whose scripts must not fail, and which must not try what its policy forbids; it ends before its server."""
    page, wrong = browser.new_page(viewport={"width": 1280, "height": 900}), list[str]()
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("console", lambda line: wrong.append(line.text) if line.type in ("error", "warning") else None)
    page.set_default_timeout(120_000)
    yield page
    page.close()
    assert not [line for line in wrong if "409 (Conflict)" not in line]


def names(page: Any) -> list[str]:
    return page.locator("a[data-run]").all_inner_texts()


def open_list(page: Any, address: str) -> None:
    page.goto(f"{address}/runs/")
    page.get_by_text("4 of 4 runs, 0 ticked").wait_for()


def test_the_list_is_searched_filtered_sorted_and_grouped(page: Any, address: str) -> None:
    open_list(page, address)
    page.get_by_label("search").fill("SEED-")
    page.get_by_text("2 of 4 runs").wait_for()
    page.get_by_role("button", name="run", exact=True).press("Enter")
    page.wait_for_function("document.querySelector('a[data-run]').textContent === 'seed-1'")
    page.get_by_role("button", name="run", exact=True).press("Enter")
    page.wait_for_function("document.querySelector('a[data-run]').textContent === 'seed-2'")
    page.get_by_label("search").fill("")
    step = page.get_by_label("filter step", exact=True)
    for text, count in (("<4", 0), (">=4", 4), ("=4", 4), ("<", 4), ("<1e999", 4), ("'\"<b>ä", 0), ("", 4)):
        step.fill(text)
        page.get_by_text(f"{count} of 4 runs").wait_for()
    step.fill("<abc")
    page.get_by_text("<abc compares with no number. Use one such as <2.1.").wait_for()
    assert len(names(page)) == 4
    step.fill("")
    page.get_by_text("columns", exact=True).click()
    page.get_by_label("seed", exact=True).check()
    page.get_by_label("filter option seed").fill(">0")
    page.get_by_text("2 of 4 runs").wait_for()
    page.get_by_label("filter option seed").fill("")
    page.get_by_label("group by").select_option("all options but the seed")
    group = page.locator(".tabulator-group")
    group.get_by_text("4 runs · validation").wait_for()
    assert "± 0.000 (4)" in group.inner_text()
    page.get_by_label("filter run").fill("seed")
    page.get_by_label("search").fill("seed-2")
    page.get_by_text("1 of 4 runs").wait_for()
    page.get_by_role("link", name="seed-2").click()
    page.get_by_role("heading", name="seed-2", exact=True).wait_for()
    page.go_back()  # search, grouping and filters come back, and columns are remembered
    page.get_by_text("1 of 4 runs").wait_for()
    group.get_by_text("1 run ·").wait_for()
    assert page.get_by_label("filter run").input_value() == "seed"
    assert page.url.endswith("/?search=seed-2&group=seeds&filter+run=seed")
    page.get_by_label("filter option seed").wait_for()


def test_groups_are_sorted_by_the_means_of_their_runs(page: Any, address: str, run: Path) -> None:
    for name, value in (("run", 1), (LONG, 9), ("seed-1", 4), ("seed-2", 6)):  # the first two are a group
        path = run.with_name(name) / "config.yaml"
        path.write_text(re.sub(r"\nlog_steps: \d+\n", f"\nlog_steps: {value}\n", path.read_text()))
    open_list(page, address)
    page.get_by_text("columns", exact=True).click()
    page.get_by_label("log_steps", exact=True).check()
    page.keyboard.press("Escape")
    page.get_by_label("group by").select_option("seed")
    for first in ("seed 1 ", "seed 2 "):  # up, then down
        page.get_by_role("button", name="log_steps", exact=True).press("Enter")
        group = page.locator(".tabulator-group").first
        group.get_by_text(first).wait_for()
    assert [each[:6] for each in page.locator(".tabulator-group").all_inner_texts()] == ["seed 2", "seed 0", "seed 1"]
    page.get_by_label("filter run").fill("run")
    page.get_by_text("1 of 4 runs").wait_for()


def test_runs_of_two_phases_and_end_to_end_are_no_seeds_of_each_other(page: Any, address: str, run: Path) -> None:
    """All their options may be the same."""
    for name in ("run", LONG):
        shutil.rmtree(run.with_name(name) / "pretrain")
        (run.with_name(name) / "finetune").rename(run.with_name(name) / "train")
    open_list(page, address)
    page.get_by_label("group by").select_option("all options but the seed")
    groups = page.locator(".tabulator-group")
    for phase in ("train", "finetune"):
        groups.get_by_text(f"phase={phase} · 2 runs").wait_for()
    assert groups.count() == 2


def test_ticked_runs_are_compared_archived_and_deleted(page: Any, address: str, run: Path) -> None:
    open_list(page, address)
    row = page.locator(".tabulator-row")
    row.filter(has_text="seed-1").get_by_label("Select Row").check()
    row.filter(has_text=LONG).get_by_label("Select Row").press("Space")
    page.get_by_text("2 ticked").wait_for()
    page.get_by_role("button", name="Compare").click()
    page.get_by_role("heading", name="Comparison of 2 runs").wait_for()
    page.locator(".u-legend").get_by_text("seed-1 finetune validation").wait_for()
    page.go_back()
    page.get_by_text("2 ticked").wait_for()  # as it was left
    row.filter(has_text=LONG).get_by_label("Select Row").uncheck()
    page.get_by_role("button", name="Archive").click()
    page.get_by_text("3 of 4 runs").wait_for()
    assert read_notes(run.with_name("seed-1")).archived
    page.get_by_label("archived runs").check()
    row.filter(has_text="seed-1").get_by_label("Select Row").check()
    page.get_by_role("button", name="Delete…").click()
    page.get_by_role("heading", name="Delete 1 run").wait_for()
    page.get_by_role("button", name="Delete ").click()
    page.get_by_text("3 of 3 runs").wait_for()
    assert not run.with_name("seed-1").exists()


def test_the_list_follows_its_runs_and_keeps_focus_texts_and_place(page: Any, address: str, run: Path) -> None:
    open_list(page, address)
    page.get_by_label("search").fill("s")
    page.locator('a[data-run="seed-1"]').focus()
    page.evaluate("window.stays = true")
    path = run.with_name("seed-1") / "finetune" / "metrics.jsonl"
    records = read_metrics(path)
    records[-1]["validation/bits_per_token"] = 1.2345
    path.write_bytes(b"".join(encode_record(record) for record in records))
    shutil.copytree(run, run.with_name("new"))
    page.locator("[tabulator-field=validation]").get_by_text("1.23").wait_for()
    page.get_by_text("5 of 5 runs").wait_for()
    with RunFolder(run).lock():
        page.locator(".tabulator-row").get_by_text("training").wait_for()
    assert page.evaluate("document.activeElement.dataset.run") == "seed-1"
    assert page.get_by_label("search").input_value() == "s" and page.evaluate("window.stays")
    shutil.rmtree(run.with_name("new"))
    page.get_by_text("4 of 4 runs").wait_for()


def test_an_empty_list_shows_the_first_run_once_there_is_one(page: Any, address: str, run: Path) -> None:
    run.parent.rename(away := run.parent.with_name("away"))
    run.parent.mkdir()
    page.goto(f"{address}/runs/")
    page.get_by_text("There are no runs.").wait_for()
    shutil.copytree(away / "seed-1", run.with_name("seed-1"))
    page.locator(".tabulator-row").filter(has_text="seed-1").wait_for()


def test_what_is_shown_is_downloaded(page: Any, address: str) -> None:
    open_list(page, address)
    page.get_by_label("search").fill("seed-1")
    page.get_by_text("1 of 4 runs").wait_for()
    with page.expect_download() as downloading:
        page.get_by_role("link", name="CSV").click()
    (row,) = csv.DictReader(downloading.value.path().read_text(encoding="utf-8-sig").splitlines())
    assert (row["run"], row["state"], row["step"]) == ("seed-1", "finished", "4")


def test_without_scripts_the_list_is_a_table_with_forms(browser: Any, address: str, run: Path) -> None:
    context = browser.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto(f"{address}/runs/")
    page.get_by_label("tick seed-2").check()
    page.get_by_label("tick run").check()
    page.get_by_role("button", name="Compare").click()
    page.get_by_role("heading", name="Comparison of 2 runs").wait_for()
    page.go_back()
    page.get_by_role("link", name="seed-2").click()
    page.locator("svg[aria-label='bits per token']").wait_for()
    context.close()


def test_a_tag_that_is_html_is_shown_as_it_is_written(page: Any, address: str, run: Path) -> None:
    written = RunNotes("if a<b then", ["<b>bold</b>", "<button>more"])
    write_json(run / "notes.json", asdict(written))
    page.goto(f"{address}/runs/")
    row = page.locator(".tabulator-row", has=page.locator("a[data-run=run]"))
    row.get_by_text("<b>bold</b> <button>more").wait_for()
    assert page.locator("#table .tabulator-cell b, #table .tabulator-cell button").count() == 0


def test_a_zoom_stays_while_values_are_added(page: Any, address: str) -> None:
    page.goto(f"{address}/runs/run/")
    page.locator(".u-legend").get_by_text("pretrain validation").wait_for()
    drawn = "document.querySelector('#chart canvas').toDataURL()"
    whole, box = page.evaluate(drawn), page.locator(".u-over").bounding_box()
    for share, move in ((0.3, page.mouse.down), (0.7, page.mouse.up)):
        page.mouse.move(box["x"] + share * box["width"], box["y"] + box["height"] / 2)
        move()
    page.wait_for_timeout(500)
    zoomed = page.evaluate(drawn)
    page.evaluate("fetch = (original => (...asked) => original(asked[0]))(fetch); 0")  # as if values had been added
    with page.expect_response("**/.curves?*"):
        page.evaluate("document.dispatchEvent(new Event('progress'))")
    page.wait_for_timeout(500)
    assert page.evaluate(drawn) == zoomed != whole
    page.locator(".u-over").dblclick()
    page.wait_for_timeout(500)
    assert page.evaluate(drawn) == whole


def test_curves_have_a_choice_of_axes_and_show_values(page: Any, address: str) -> None:
    page.goto(f"{address}/runs/run/")
    legend = page.locator(".u-legend")
    legend.get_by_text("pretrain validation").wait_for()
    box = page.locator(".u-over").bounding_box()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    page.wait_for_function(
        "[...document.querySelectorAll('.u-value')].filter(each => each.textContent !== '–').length > 1"
    )
    for name, value in (("x", "model FLOPs"), ("x", "seconds of training"), ("metric", "iem")):
        page.locator(f"select[name={name}]").select_option(label=value)
    page.get_by_label("log axis").check()
    for nonsense in ("", "-5", "1e9", "50"):
        page.get_by_label("skip first %").fill(nonsense)
        legend.get_by_text("pretrain", exact=True).wait_for()
    assert page.locator("#chart .curves").is_hidden()


def test_a_phone_shows_next_chunks_at_once_and_long_names_beside_their_colours(page: Any, address: str) -> None:
    page.set_viewport_size({"width": 390, "height": 900})
    page.goto(f"{address}/runs/run/next?prompt=a")
    ends = page.locator("td a").evaluate_all("links => links.map(link => link.getBoundingClientRect().right)")
    assert ends and max(ends) <= 390
    texts, lines = (page.locator(box).bounding_box() for box in ("textarea", "[name=lines]"))
    assert texts["y"] + texts["height"] < lines["y"]
    page.goto(f"{address}/runs/.compare?run=seed-1&run={quote(LONG)}")
    page.locator(".u-legend").get_by_text("finetune validation").last.wait_for()
    beside = "row => row.querySelector('.u-label').getClientRects()[0].top < row.querySelector('.u-marker').getBoundingClientRect().bottom"
    assert all(page.locator(".u-series").evaluate_all(f"rows => rows.map({beside})"))


def test_the_page_of_a_run_shows_the_evaluation_that_comes_while_it_is_open(page: Any, address: str, run: Path) -> None:
    """As after a training, which one watches there."""
    found = (run / "evaluation.json").rename(run / "later")
    page.goto(f"{address}/runs/run/")
    page.locator(".u-legend").get_by_text("pretrain validation").wait_for()
    assert page.locator(".headline").count() == 0
    found.rename(run / "evaluation.json")
    page.locator(".headline").wait_for()


def test_pages_work_below_the_path_of_a_proxy(browser: Any, run: Path) -> None:
    site, outside = Site(run.parent), list[str]()

    async def proxy(scope: Any, receive: Any, send: Any) -> None:
        if not scope["path"].startswith("/lab/"):
            outside.append(scope["path"])
        await site.guarded(scope | {"path": scope["path"].removeprefix("/lab")}, receive, send)

    with serve(proxy) as port:
        page = browser.new_page()
        page.set_default_timeout(120_000)
        page.goto(f"http://127.0.0.1:{port}/lab/")
        page.get_by_label("search").fill("run")
        page.wait_for_url("**/lab/runs/?search=run")
        page.get_by_role("link", name="run", exact=True).click()
        page.locator(".u-legend").wait_for()
        page.get_by_role("link", name="next chunks").click()
        page.get_by_role("textbox").fill("import ")
        page.get_by_role("button", name="Ask").click()
        page.locator("td a").first.click()
        page.get_by_role("link", name="show on the map").click()
        page.wait_for_url("**/lab/runs/run/files/analysis/map.html#*")
        page.goto(f"http://127.0.0.1:{port}/lab/runs/run/edit")
        page.get_by_label("tags").fill("x")
        page.get_by_role("button", name="Save").click()
        page.wait_for_url("**/lab/runs/run/")
        page.get_by_role("link", name="runs", exact=True).click()
        page.locator(".tabulator-row input").check()
        page.get_by_role("button", name="Archive").click()
        page.get_by_text("0 of 1 runs").or_(page.get_by_text("archived")).first.wait_for()
        page.close()
    site.warm.close(10)
    assert page.url.startswith(f"http://127.0.0.1:{port}/lab/runs/") and not set(outside) - {"/favicon.ico"}


def test_a_refused_name_is_told_at_its_box(page: Any, address: str) -> None:
    page.goto(f"{address}/runs/run/edit")
    page.get_by_label("note").fill("line one\nline two")
    page.get_by_label("name").fill("seed-1")
    page.get_by_role("button", name="Save").press("Enter")
    page.get_by_text("seed-1 exists already. Choose another name.").wait_for()
    assert page.get_by_label("note").input_value() == "line one\nline two"
    page.get_by_label("name").fill("renamed")
    page.get_by_role("button", name="Save").click()
    page.get_by_role("heading", name="renamed", exact=True).wait_for()


def test_chunks_are_completed_and_several_are_asked(page: Any, address: str) -> None:
    page.goto(f"{address}/runs/run/neighbours")
    boxes = page.locator("[name=query]")
    boxes.first.press_sequentially("retur")
    page.locator("datalist option[value='return␣']").wait_for(state="attached")
    assert boxes.count() == 2
    boxes.nth(1).fill("def ")
    assert boxes.count() == 3
    boxes.nth(2).focus()
    page.evaluate(
        "const data = new DataTransfer(); data.setData('text', 'import\\nself.\\n');"
        "document.activeElement.dispatchEvent(new ClipboardEvent('paste', {clipboardData: data, bubbles: true, cancelable: true}))"
    )
    assert [box.input_value() for box in boxes.all()][:4] == ["retur", "def ", "import", "self."]
    boxes.first.press("Enter")
    page.get_by_role("heading", level=2).nth(3).wait_for()
    assert [box.input_value() for box in boxes.all()] == ["retur", "def␣", "import", "self.", ""]
    page.get_by_role("link", name="return␣").first.click()
    page.get_by_role("heading", name="return␣").wait_for()


@pytest.mark.parametrize("place", mostly_nightly(["next", "samples?chunks=2", "score", "edit"], "next", "edit"))
def test_ctrl_enter_sends_and_says_so(place: str, page: Any, address: str, run: Path) -> None:
    page.goto(f"{address}/runs/run/{place}")
    page.get_by_text("Ctrl+Enter sends").wait_for()
    page.locator("textarea").fill("import os\nimport")
    page.locator("textarea").press("Control+Enter")
    if place == "edit":
        page.get_by_role("heading", name="run", exact=True).wait_for()
        assert read_notes(run).note == "import os\nimport"
    else:
        page.get_by_text("answered in").wait_for()
        assert page.locator("textarea").input_value() == "import os\nimport"


def test_a_text_that_is_too_long_is_not_sent(page: Any, address: str) -> None:
    page.goto(f"{address}/runs/run/score")
    box = page.locator("textarea")
    box.fill("x" * 4001)
    page.get_by_role("button", name="Ask").click()
    assert box.evaluate("box => box.validationMessage") == "4,001 characters. Give at most 4,000."
    assert page.url.endswith("/score") and len(box.input_value()) == 4001
    box.fill("\n" * 2000 + "é" * 2000)  # line ends are sent as two characters
    box.press("Control+Enter")
    page.get_by_text("answered in").wait_for()


def test_a_text_shows_parts_or_bits_and_their_figures(page: Any, address: str) -> None:
    page.goto(f"{address}/runs/run/score?prompt=import+os%0Aimport+sys%0Aqzx")
    part = page.locator("pre .part").last
    assert part.get_attribute("title").count("%") == 5

    def style(name: str, pseudo: str = "") -> str:
        return part.evaluate(f"part => getComputedStyle(part, '{pseudo}').{name}")

    before, line = style("backgroundColor"), style("textDecorationStyle")
    page.get_by_label("bits", exact=True).check()
    assert style("backgroundColor") != before and style("textDecorationStyle") == line != "solid"
    assert style("content", "::after") == "none"
    page.get_by_label("write both after each chunk").check()
    assert part.get_attribute("data-figures") in style("content", "::after")
    page.get_by_text("all figures as a table").press("Enter")
    assert page.locator("details tr").count() == 1 + page.locator("pre .part").count()


def test_a_map_is_shown_once_it_is_made_at_the_chunk_that_was_asked(page: Any, address: str) -> None:
    page.goto(f"{address}/runs/run/neighbours?query=def␣")
    page.get_by_role("link", name="show on the map").click()
    page.wait_for_url("**/files/analysis/map.html#def*")
    page.get_by_text("finetune step 4").wait_for()
    assert page.get_by_label("Search").input_value() == "def␣"


PAGES = ["", "{}/", "{}/edit", "{}/neighbours?query=a", "{}/next?prompt=a", "{}/samples?prompt=a&chunks=2"]
PAGES += ["{}/neighbours?query=retur&query=b&count=x", "{}/next?prompt=a&lines=on&count=2"]
PAGES += ["{}/samples?prompt=a&chunks=999", "{}/score?prompt=import", "{}/passages", "{}/map"]
PAGES += ["run/files/analysis/map.html", "missing/", ".compare?run=seed-1&run={}", "run/"]
SCREENS = [*product((1280, 400), ("light", "dark"))]


@pytest.mark.parametrize("screen", mostly_nightly(SCREENS, (1280, "light"), (400, "dark")), ids=str)
def test_every_page_is_accessible_and_fits(screen: tuple[int, str], browser: Any, address: str, run: Path) -> None:
    """Also with long names, and with a run in training."""
    width, scheme = screen
    pytest.importorskip("axe_playwright_python", reason="no axe-core: run `make setup-browser`")
    axe = (files("axe_playwright_python") / "axe.min.js").read_text(encoding="utf-8")
    page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
    page.set_default_timeout(120_000)
    page.route("**/questions.js", lambda route: route.abort())  # else a map that is being made is soon another page
    draw_map(open_run(run))
    with RunFolder(run).lock():
        for path in PAGES:
            page.goto(f"{address}/runs/{path.format(quote(LONG))}")
            if path == "":
                page.get_by_text("4 of 4 runs").wait_for()
                page.get_by_text("columns", exact=True).click()
            if path.endswith("/") or "compare" in path:
                page.locator(".u-legend").or_(page.get_by_role("alert")).first.wait_for()
            page.evaluate(axe)
            found = page.evaluate("axe.run().then(found => found.violations)")
            assert not [
                (path, each["id"], each["nodes"][0]["html"][:300], each["nodes"][0]["failureSummary"]) for each in found
            ]
            assert page.evaluate("document.documentElement.scrollWidth") <= width, path
    page.close()
