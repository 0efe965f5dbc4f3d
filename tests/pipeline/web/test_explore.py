"""`haed explore` as a person uses it: a browser, a chunk that is typed, its neighbours, the next one, Ctrl-C."""

import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from pipeline.cli import main

PATIENCE = 300_000  # milliseconds, which only what hangs takes


def explore(run: Path) -> tuple[str, "subprocess.Popen[str]"]:
    """The address of the pages of a run, and the process that serves them."""
    command = [sys.executable, "-m", "pipeline", "explore", str(run), "threads=1", "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process.stdout.readline().split()[0], process


@pytest.fixture
def exploring(run: Path) -> Iterator[tuple[str, "subprocess.Popen[str]"]]:
    address, process = explore(run)
    yield address, process
    process.kill()
    process.communicate()


@pytest.mark.slow
def test_a_chunk_is_typed_and_a_neighbour_followed(
    browser: Any, exploring: tuple[str, "subprocess.Popen[str]"]
) -> None:
    address, process = exploring
    page = browser.new_page()
    page.set_default_timeout(PATIENCE)
    said: list[str] = []
    # A page that was typed into before it was whole makes Chromium say that it does not move the cursor: no error.
    page.on("console", lambda message: said.append(message.text) if message.type in ("error", "warning") else None)
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.goto(address)
    assert page.url.endswith("/runs/run/neighbours")
    page.get_by_role("combobox").first.fill("import␣")
    page.get_by_role("combobox").first.press("Enter")
    page.get_by_role("heading", name="import␣").wait_for()
    assert "finetune step 4" in page.inner_text("main")
    near = page.locator("table.near a")
    assert near.count() == 8 and page.locator(".example b").count() > 0
    text = near.first.inner_text()
    near.first.click()
    page.wait_for_url(lambda url: "query=import" not in url)
    assert page.get_by_role("heading", level=2).inner_text().startswith(text)
    page.get_by_role("link", name="next chunks").click()
    page.get_by_role("textbox").fill("import ")
    page.get_by_role("button", name="Ask").click()
    page.get_by_text("all others").wait_for()
    page.go_back()
    page.go_back()
    assert page.get_by_role("heading", level=2).inner_text().startswith(text)
    assert all(url.startswith(address) for url in asked) and said == []
    page.close()
    process.send_signal(signal.SIGINT)
    written, logged = process.communicate()
    assert written == "" and process.returncode == 130
    # A warning of an answer is on the page and in the log: here, that the 32 rows of the table are for all chunks.
    assert all("shares its row of the encoder's table" in line for line in logged.splitlines())


@pytest.mark.slow
def test_it_listens_on_this_machine_alone_and_refuses_other_hosts(
    exploring: tuple[str, "subprocess.Popen[str]"],
) -> None:
    address, process = exploring
    answers = [httpx.get(f"{address}runs/", headers=headers) for headers in ({}, {"Host": "elsewhere.example"})]
    assert [answer.is_success for answer in answers] == [True, False] and "Host elsewhere" in answers[1].text
    sockets = psutil.Process(process.pid).net_connections()
    listens = [each.laddr for each in sockets if each.status == psutil.CONN_LISTEN]
    assert listens == [("127.0.0.1", int(address.rstrip("/").rpartition(":")[2]))]


def test_what_is_wrong_is_said_before_anything_is_served(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        words = [["nowhere"], [str(run), "--port", str(taken.getsockname()[1])]]
        assert [main(["explore", *each]) for each in words] == [1, 1]
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 2 and all(line.startswith("error: ") for line in said) and "--port" in said[1]
    with pytest.raises(SystemExit):
        main(["explore", str(run), "--port", "70000"])
    assert "--port: 70000 is not a port" in capsys.readouterr().err
