"""What a person is shown: nothing that steers a terminal."""

import logging

import pytest

from pipeline.show.page import page
from pipeline.shown import fenced, prepare_logs, printable, visible


def test_what_steers_a_terminal_is_escaped_and_what_is_text_stays() -> None:
    assert printable("a\tb\nä 中 🙂 \u200d\u0301") == "a\tb\nä 中 🙂 \u200d\u0301"
    steering = "\x1b[2J \0 \r \x7f \x85 \u202e \u2066 \u2028 \ufeff \U000e0041 " + b"\xff".decode(
        errors="surrogateescape"
    )
    shown = printable(steering)
    assert shown == (
        r"\x1b[2J \x00 \x0d \x7f \x85 \u202e \u2066 \u2028 \ufeff \U000e0041 \xff"  # nothing of them is left
    )
    assert printable("\ud800") == r"\ud800" and shown.encode().isascii()
    assert visible("a \r\n\t\x1b") == "a␣␍↵⇥\\x1b"


def test_no_backticks_end_a_block_of_markdown() -> None:
    assert fenced("a`b") == "```\na`b\n```" and fenced("x: 1", "yaml") == "```yaml\nx: 1\n```"
    assert fenced("````\n# out\x1b") == "`````\n````\n# out\\x1b\n`````"


def test_pages_and_messages_have_nothing_of_it(caplog: pytest.LogCaptureFixture) -> None:
    assert "\x1b" not in (shown := page("a\x1b", "<p>\x1b\u202e</p>")) and "\\u202e" in shown
    factory = logging.getLogRecordFactory()
    try:
        prepare_logs()
        logging.getLogger("prefect").warning("no file %s", "a\x1b]0;title\x07")
    finally:
        logging.setLogRecordFactory(factory)
    assert caplog.messages == [r"no file a\x1b]0;title\x07"]
