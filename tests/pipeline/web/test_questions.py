"""What a person types on the pages of questions: proposals, several queries, cut texts, missing indexes, maps, nonsense."""

import html
import re
import shutil
import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlencode

import pytest

from data.filesystem import read_json
from pipeline.cli import main
from pipeline.console import unescape_query
from pipeline.run.checkpoints import Checkpoints
from pipeline.run.run_directory import RunFolder
from pipeline.web import app
from tests.pipeline.web.test_app import Site


@pytest.fixture(scope="module")
def asked(whole: Path, tmp_path_factory: pytest.TempPathFactory) -> Site:
    """Pages of a run with both indexes, which tests only read."""
    run = tmp_path_factory.mktemp("asked") / "runs" / "run"
    shutil.copytree(whole / "runs" / "run", run)
    assert main(["index", str(run), "--space", "contexts", "threads=1"]) == 0
    return Site(run.parent)


@pytest.mark.parametrize(
    "address", ["neighbours?quer=zebra", "next?prompt=a&temperature=2", "samples?bogus=1", "score?text=a"]
)
def test_a_parameter_that_does_not_exist_is_refused(address: str, asked: Site) -> None:
    """Instead of an answer to another question."""
    name = re.search(r"[?&](quer|temperature|bogus|text)=", address)
    for form in ("", "&format=json"):
        assert name and f"there is no parameter {name[1]}" in asked.get(f"/runs/run/{address}{form}", 400).text


def test_a_chunk_that_is_missing_proposes_those_that_begin_with_it(asked: Site) -> None:
    index = asked.ask("neighbours?query=retur&query=return␣&count=1")["value"]["asked"]
    proposed = index[0]["longer"]
    assert index[0]["count"] is None and proposed and index[1]["longer"] == []
    assert all(each["text"].startswith("retur") for each in proposed)
    counts = [each["count"] for each in proposed]
    assert counts == sorted(counts, reverse=True) and asked.ask(f"neighbours?hex={proposed[0]['hex']}")["value"]
    text = asked.get("/runs/run/neighbours?query=retur").text
    assert "Chunks of the index that begin with it" in text
    assert f"return␣</code></a> {proposed[0]['count']}" in text


def test_what_is_typed_is_completed_as_it_was_typed(asked: Site) -> None:
    def complete(typed: str) -> list[dict[str, Any]]:
        return asked.get(f"/runs/run/chunks?{urlencode({'begin': typed})}").json()

    count = asked.ask("neighbours?query=return␣")["value"]["asked"][0]["count"]
    assert {"text": "return␣", "count": count} in complete("ret")
    assert all(each["text"].startswith("  ") for each in complete("  ")) and complete("  ")
    assert complete("") == complete("\0") == complete("x" * 500) == []


def test_passages_are_places_and_the_chance_level_stands_beside_scores(asked: Site, whole: Path) -> None:
    chance = asked.ask("neighbours?query=a")["value"]["chance"]
    assert chance == read_json(whole / "runs" / "run" / "index" / "chunks" / "meta.json")["chance"]
    assert chance["mean"] < chance["rare"] and f"beyond {chance['rare']:.3f}" in asked.get("/runs/run/neighbours").text
    places = asked.ask("passages?prompt=import&count=3")["value"]
    assert len(places["neighbours"]) == 3 and places["neighbours"][0]["name"].endswith(".py")
    page = asked.get("/runs/run/passages?prompt=import&count=3").text
    assert places["neighbours"][0]["name"] in page
    assert f"by chance {places['chance']['mean']:.3f}" in page and "two random places" in page


@pytest.mark.parametrize("page", ["next?count=2", "samples?chunks=2", "passages?count=2"])
def test_a_text_beyond_the_window_says_from_where_it_is_read(page: str, asked: Site) -> None:
    text = "".join(f"chunk{number} " for number in range(40))
    found = asked.ask(f"{page}&{urlencode({'prompt': text})}")
    (said,) = found["warnings"]
    assert "The main model reads the last" in said and re.search(r"from chunk2\d␣", said)
    assert asked.get(f"/runs/run/{page}&{urlencode({'prompt': text})}").text.count("The main model reads") == 1
    assert asked.ask(f"{page}&prompt=short")["warnings"] == []


def test_a_query_longer_than_a_chunk_says_so_once_without_flags(asked: Site) -> None:
    found = asked.ask("neighbours?query=for+i+in+range(n)")
    assert "17 bytes" in found["warnings"][0]
    assert {"text": "for ", "hex": "666f7220"} in found["value"]["asked"][0]["pieces"]
    page = asked.get("/runs/run/neighbours?query=for+i+in+range(n)").text
    page = re.sub(r'<div class="example">.*?</div>', "", page, flags=re.DOTALL)  # any text of the corpus
    assert page.count("the first of its") == 1 and "--" not in page.replace("<!--", "")
    (said,) = asked.ask("neighbours?query=for␣")["warnings"]  # the table has 32 rows for all chunks
    assert "shares its row of the encoder's table with" in said


@pytest.mark.parametrize(("page", "least"), [("next?count=2", 2), ("passages?count=2", 2), ("samples?chunks=2", 2)])
def test_each_line_is_a_text_of_its_own(page: str, least: int, asked: Site) -> None:
    question = f"{page}&" + urlencode({"prompt": "import␣\r\ndef \n\n", "lines": "on"})
    value = asked.ask(question)["value"]
    found = value["samples"] if "samples" in page else value
    assert [each.get("prompt", each.get("query")) for each in found] == ["import ", "def "]
    text = asked.get(f"/runs/run/{question}").text
    assert text.count("<pre>" if "samples" in page else "<table") == least and " checked" in text


LINES = urlencode({"prompt": "\n".join("abcdefghijklmnopq"), "lines": "on"})


@pytest.mark.parametrize(
    ("question", "said"),
    [
        ("neighbours?hex=6g", "hex=6g: this is no chunk in hexadecimal. Give pairs of digits, such as 6465662a"),
        ("neighbours?hex=656", "Give pairs of digits"),
        ("neighbours?hex=65%E2%80%8366", "Give pairs of digits"),
        ("neighbours?" + "query=a&" * 17, "17 chunks were given. Ask for at most 16"),
        (f"next?{LINES}", "17 lines were given. Ask at most 16 at once"),
        (f"samples?{LINES}", "17 lines were given"),
        ("samples?prompt=a&samples=16&chunks=126", "prompts × samples × chunks is 2,016. A page draws at most 2,000"),
    ],
)
def test_what_is_asked_too_much_or_wrong_is_refused_before_the_run_is_opened(
    question: str, said: str, run: Path
) -> None:
    shutil.rmtree(run / "finetune")
    shutil.rmtree(run / "pretrain")
    site = Site(run.parent)
    assert said in site.ask(question, 400)["error"]
    page = html.unescape(site.get(f"/runs/run/{question}", 400).text)
    assert said in page and all(value[0] in page for value in parse_qs(question.partition("?")[2]).values())


def test_a_missing_index_leads_to_the_form_that_builds_it(run: Path) -> None:
    site = Site(run.parent)
    served = site.beside_prefect()
    for question in ("", "?prompt=import"):
        alone = site.get(f"/runs/run/passages{question}", 409).text
        page = served.get(f"/runs/run/passages{question}").text
        assert "<code>haed index" in alone and "form/" not in alone
        assert 'href="../../runs/run/form/index?space=contexts"' in page and "haed index" not in page
    checkpoints = run / "finetune" / "checkpoints"
    Checkpoints(checkpoints).set_pointer("best", checkpoints / "step-00000002")
    page = served.get("/runs/run/neighbours?query=a").text
    assert 'href="../../runs/run/form/index"' in page and "haed index" not in page


def wait_for_map(site: Site) -> str:
    """The map that is being made, once it is there."""
    while (found := site.client.head("/runs/run/map")).status_code == 202:
        time.sleep(0.05)
    assert found.status_code == 303, found
    return site.get(found.headers["location"].removeprefix("../..")).text


def test_the_map_is_made_once_for_a_checkpoint(run: Path) -> None:
    site = Site(run.parent)
    for _ in range(3):
        assert "is being made" in site.get("/runs/run/map", 202).text
    page, digest = wait_for_map(site), RunFolder(run).select_checkpoint().digest
    assert site.warm.begun == 1 and digest in page and "finetune step 4" in page and time.strftime("%Y-%m-%d") in page
    assert site.get("/runs/run/map", 303).headers["location"] == "../../runs/run/files/analysis/map.html"
    checkpoints = run / "finetune" / "checkpoints"
    Checkpoints(checkpoints).set_pointer("best", checkpoints / "step-00000002")
    site.get("/runs/run/map", 202)
    assert "finetune step 2" in wait_for_map(site) and site.warm.begun == 2


def test_a_map_that_is_ready_while_a_request_looks_for_it_is_not_made_again(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site, making = Site(run.parent), list[Future[Any]]()
    start, listed = site.warm.start_work, app.list_served_files

    def list_late(folder: RunFolder) -> Any:
        found = list(listed(folder))  # without the map
        making[0].result()
        return found

    monkeypatch.setattr(site.warm, "start_work", lambda *work: making.append(start(*work)) or making[-1])
    site.get("/runs/run/map", 202)

    monkeypatch.setattr(app, "list_served_files", list_late)
    site.client.head("/runs/run/map")
    monkeypatch.undo()
    wait_for_map(site)
    assert site.warm.begun == 1


def test_a_map_that_fails_is_told_and_tried_again(run: Path) -> None:
    site = Site(run.parent)
    (run / "analysis").write_text("")
    site.get("/runs/run/map", 202)
    while (status := site.client.head("/runs/run/map").status_code) == 202:
        time.sleep(0.05)
    assert status >= 400 and 'role="alert"' in site.client.get("/runs/run/map").text
    (run / "analysis").unlink()
    site.get("/runs/run/map", 202)
    wait_for_map(site)


# Nonsense in every box.

ODD = "wörter 漢字 😀 <b>'\"&amp;\u200f \x1b[2J"
NUMBERS = {
    "neighbours": ["count", "min_count"],
    "passages": ["count"],
    "next": ["count"],
    "samples": ["samples", "chunks", "temperature", "top_p", "seed"],
}
NO_NUMBERS = ["nonsense", "-1", "9" * 400, "1\n2", "1\x002", "/nowhere/x", "nan", "1e999", "١٢x", ODD]
NO_TEXTS = {"huge": "x" * 50_000, "nul": "a\0b", "control": "a\x85b"}
TEXTS = {"odd": ODD, "lines": "a\nb\n\nc", "path": "/nowhere/x", "quotes": "'\"", "blank": "  "}
WRONG = [(page, box, value) for page, boxes in NUMBERS.items() for box in boxes for value in NO_NUMBERS]
WRONG += [(page, "prompt", value) for page in ("passages", "next", "samples", "score") for value in NO_TEXTS.values()]
WRONG += [("neighbours", "query", value) for value in NO_TEXTS.values()]
WRONG += [("neighbours", "hex", value) for value in ("xyz", "abc", "-1", *NO_TEXTS.values(), ODD, "/nowhere/x")]
WRONG += [(page, "prompt", "") for page in ("passages", "score")]
WRONG += [(page, "lines", "nonsense") for page in ("passages", "next", "samples")]
WRONG += [("neighbours", "min_count", "999999"), ("samples", "chunks", "501"), ("next", "count", "1.5")]


def ask_typed(asked: Site, page: str, box: str, value: str) -> tuple[int, str, list[str]]:
    """The status and page of a question with a value in a box, and what the box then has."""
    given = {"query": "import"} if page == "neighbours" else {"prompt": "import ", "chunks": "1"}
    if page != "samples":
        given.pop("chunks", None)
    found = asked.client.get(f"/runs/run/{page}?{urlencode(given | {box: value})}")
    textarea = re.findall(rf'<textarea name="{box}"[^>]*>\n(.*?)</textarea>', found.text, re.DOTALL)
    typed = textarea or re.findall(rf'name="{box}" value="([^"]*)"', found.text)
    return found.status_code, found.text, [read_references(each) for each in typed]


def read_references(text: str) -> str:
    """The text that a browser shows in a box, but for the characters that it cannot have there."""
    return html.unescape(re.sub(r"&#(\d+);", lambda found: chr(int(found[1])), text))


@pytest.mark.parametrize(("page", "box", "value"), WRONG, ids=lambda each: ascii(each)[:24])
def test_nonsense_is_told_at_its_box_and_stays_there(page: str, box: str, value: str, asked: Site) -> None:
    status, text, typed = ask_typed(asked, page, box, value)
    assert status == 400 and f'id="trouble-{box}" class="trouble" role="alert"' in text
    assert f'aria-describedby="trouble-{box}"' in text
    if box != "lines":
        assert value in typed or value in map(unescape_query, typed)


@pytest.mark.parametrize("value", TEXTS.values(), ids=TEXTS)
@pytest.mark.parametrize("page", ["neighbours", "passages", "next", "samples", "score"])
def test_odd_texts_are_answered_and_stay_in_their_box(page: str, value: str, asked: Site) -> None:
    box = "query" if page == "neighbours" else "prompt"
    status, text, typed = ask_typed(asked, page, box, value)
    assert status == 200 and 'role="alert"' not in text and "answered in" in text
    assert value in typed or value in map(unescape_query, typed)
