"""Commands as a user types them, and what they say; a browser."""

import json
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from pipeline.cli import main


def exit_status(program: Callable[[list[str]], int], words: list[str]) -> int:
    """The exit status of a command, also of one that cannot be parsed."""
    try:
        return program(words)
    except SystemExit as error:
        assert isinstance(error.code, int)
        return error.code


class CommandLine:
    """Runs commands in this process; each call tells what its own command said."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def _run(self, words: tuple[object, ...], status: int) -> tuple[str, str]:
        self._capsys.readouterr()
        ended = exit_status(main, [str(word) for word in words])
        out, err = self._capsys.readouterr()
        assert ended == status, err
        return out, err

    def output(self, *words: object) -> str:
        """What a command prints that succeeds."""
        return self._run(words, 0)[0]

    def json(self, name: str, *words: object) -> Any:
        """The result of a command that succeeds, as programs read it."""
        return json.loads(self.output(name, "--json", *words).splitlines()[-1])

    def error(self, *words: object, status: int = 1) -> str:
        """What a command says on standard error that ends with a status."""
        return self._run(words, status)[1]


@pytest.fixture
def haed(capsys: pytest.CaptureFixture[str]) -> CommandLine:
    return CommandLine(capsys)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Chromium; where there is none, whoever asks for it is skipped."""
    playwright = pytest.importorskip("playwright.sync_api", reason="no Playwright: run `make setup-browser`")
    if (chromium := shutil.which("chromium")) is None:
        pytest.skip("no Chromium: run `make setup-browser`")
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        yield browser
        browser.close()
