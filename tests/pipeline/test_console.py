"""What a person is shown: nothing that steers a terminal."""

import errno
import logging
from html.parser import HTMLParser

import pytest
from hypothesis import given
from hypothesis import strategies as st
from markdown_it import MarkdownIt
from markdown_it.token import Token

from pipeline.console import (
    code_fence,
    cut_middle,
    escape_control_characters,
    format_error,
    format_probability,
    make_printable,
    markdown_code,
    markdown_text,
    prepare_logs,
)
from pipeline.reporting.comparison import Comparison, RunDifference
from pipeline.reporting.plots import drawable_label, encode_png
from pipeline.reporting.rendering import Table, render_file


def test_what_steers_a_terminal_is_escaped_and_what_is_text_stays() -> None:
    assert make_printable("a\tb\nä 中 🙂 \u200d\u0301") == "a\tb\nä 中 🙂 \u200d\u0301"
    shown = make_printable("\x1b[2J \0 \r \x7f \x85 \u202e \u2066 \u2028 \ufeff \U000e0041 \udcff")
    assert shown == r"\x1b[2J \x00 \x0d \x7f \x85 \u202e \u2066 \u2028 \ufeff \U000e0041 \xff"
    assert make_printable("\ud800") == r"\ud800" and shown.encode().isascii()
    assert escape_control_characters("a \r\n\t\x1b") == "a␣␍↵⇥\\x1b"


def test_no_backticks_end_a_block_of_markdown() -> None:
    assert code_fence("a`b") == "```\na`b\n```"
    assert code_fence("````\n# out\x1b") == "`````\n````\n# out\\x1b\n`````"


def test_pages_and_messages_have_nothing_of_it(caplog: pytest.LogCaptureFixture) -> None:
    shown = render_file("comparison.html", comparison=Comparison([], "", "", verdict="a\x1b\u202e"))
    assert "\x1b" not in shown and "\\u202e" in shown
    factory = logging.getLogRecordFactory()
    try:
        prepare_logs()
        logging.getLogger("prefect").warning("no file %s", "a\x1b]0;title\x07")
        logging.getLogger("fsspec").warning("403 of %s", "https://me:hunter2@host/x?sig=hunter2")
    finally:
        logging.setLogRecordFactory(factory)
    assert caplog.messages == [r"no file a\x1b]0;title\x07", "403 of https://***@host/x?sig=***"]
    assert "hunter2" not in format_error(OSError("https://me:hunter2@host/x?sig=hunter2"))
    assert format_error(ValueError("no run \x1b[31m\n\u202e")) == r"no run \x1b[31m \u202e"


HOSTILE = [
    "# <img src=x onerror=alert(1)>|[a](javascript:b)",
    "`code` ``two`` ```",
    "a`b|c\\|d\\",
    "**bold** __bold__ _it_ snake_case ~~gone~~",
    "<script>alert(1)</script>&amp;&lt;",
    "![x](http://evil/x.png) [x]: http://evil",
    "1. one",
    "- one",
    "+ one",
    "=== ",
    "--- | ---",
    "    indented",
    "a\n\n# b\n",
    "$x^{2}$ $$",
    "https://evil.example www.evil.example me@evil.example <https://evil>",
    "'; DROP \"x\" onload='y'",
    "\x1b[31m\u202e\u200b\x00\ud800",
    "_$\\frac{1}{0",
    "</details></pre></title>",
    "é 中 🙂 \\",
]
SIGNS = st.text(st.sampled_from("`|\\*_[]()<>!#&;$~:/@w.-+=1 a\n\t\"'é\x1b\u202e"), max_size=40)
HOSTILE_TEXT = st.one_of(st.sampled_from(HOSTILE), SIGNS, st.text(max_size=40))


def inline(token: Token) -> list[tuple[str, str]]:
    """What a line of Markdown is made of: kinds, and texts put together."""
    found: list[tuple[str, str]] = []
    for each in token.children or []:
        kind = "text" if each.type == "text_special" else each.type
        if found and found[-1][0] == kind == "text":
            found[-1] = (kind, found[-1][1] + each.content)
        else:
            found.append((kind, each.content))
    return [(kind, content) for kind, content in found if content or kind != "text"]


@given(HOSTILE_TEXT)
def test_a_text_in_markdown_is_shown_as_it_stands(text: str) -> None:
    shown = " ".join(make_printable(text).split())
    for before, tag in (("", "paragraph_open"), ("# ", "heading_open"), ("- ", "bullet_list_open")):
        tokens = MarkdownIt("commonmark").enable(["table", "strikethrough"]).parse(f"{before}{markdown_text(text)}\n")
        lines = [token for token in tokens if token.type == "inline"]
        assert [inline(line) for line in lines if line.content] == ([[("text", shown)]] if shown else [])
        assert not shown or tokens[0].type == tag


@given(HOSTILE_TEXT)
def test_a_text_in_a_cell_or_as_code_is_shown_as_it_stands(text: str) -> None:
    shown = escape_control_characters(text) if "\n" in text else make_printable(text)
    for render in (markdown_code, markdown_text):
        cell = render(text)
        source = f"| {cell} | {cell} |\n| --- | --- |\n| {cell} | 1 |\n"
        if render is markdown_text:
            source = Table([text, text], [[text, "1"]], [False, True]).to_markdown()
        tokens = MarkdownIt("commonmark").enable(["table", "strikethrough"]).parse(source)
        kinds = [token.type for token in tokens]
        assert kinds.count("td_open") == kinds.count("th_open") == 2 and "html_block" not in kinds
        for token in [token for token in tokens if token.type == "inline" and token.content != "1"]:
            (*_, (kind, content)) = inline(token) or [("text", "")]
            assert len(inline(token)) <= 1 and kind in ("text", "code_inline")
            if render is markdown_code and text.strip():
                assert content.split() == shown.split()


@given(HOSTILE_TEXT, HOSTILE_TEXT)
def test_a_text_in_a_page_is_text(text: str, source: str) -> None:
    def find_tags(text: str, source: str) -> list[tuple[str, dict[str, str | None]]]:
        seen: list[tuple[str, dict[str, str | None]]] = []

        class Tags(HTMLParser):
            def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
                seen.append((tag, dict(attrs)))

        compared = Comparison([], "", "", verdict=text, differing=[RunDifference(text, {text: text})])
        Tags(convert_charrefs=True).feed(
            render_file("comparison.html", comparison=compared, picture=f"picture{source}")
        )
        return seen

    seen = find_tags(text, source)
    assert [tag for tag, _ in seen if tag != "code"] == [tag for tag, _ in find_tags("text", "source")]
    assert not any(attributes for tag, attributes in seen if tag == "code")  # a command between grave accents
    assert all(set(attributes) == {"alt", "src"} for tag, attributes in seen if tag == "img")


@given(HOSTILE_TEXT)
def test_a_text_in_a_picture_is_no_formula(text: str) -> None:
    from matplotlib.cbook import is_math_text
    from matplotlib.figure import Figure

    label = drawable_label(text)
    assert not is_math_text(label) and not label.startswith("_") and "\n" not in label
    if len(text) > 30:  # drawing takes long
        figure = Figure()
        figure.add_subplot().set_title(label)
        encode_png(figure)


def test_addresses_in_a_text_are_no_links() -> None:
    """As GitHub's Markdown and others make links of plain addresses."""
    shown = markdown_text("see https://evil.example and www.evil.example, mailto:me@evil.example, a: b")
    assert "://" not in shown.replace("\\://", "") and "www." not in shown and "\\@" in shown and "a: b" in shown


def test_limits_of_the_system_come_with_what_to_do() -> None:
    assert "ulimit -n" in format_error(OSError(errno.EMFILE, "Too many open files"))
    assert "loader.workers" in format_error(OSError(errno.EAGAIN, "Resource temporarily unavailable"))


def test_messages_quote_no_long_path_as_a_whole(caplog: pytest.LogCaptureFixture) -> None:
    path = f"/begin/{'x' * 4096}/end"
    for error in (FileNotFoundError(f"there is no {path}. Give another"), OSError(errno.ENOSPC, "full", path)):
        said = format_error(error)
        assert "/begin/xxx" in said and "xxx/end" in said and len(said) < 500
    url = f"https://host/{'x' * 400}?X-Amz-Signature={'secret' * 9}"
    assert "secret" not in cut_middle(url, 60)
    prepare_logs()
    logging.getLogger("pipeline").warning("no %s", path)
    assert len(caplog.messages[-1]) < 400 and caplog.messages[-1].endswith("/end")


@pytest.mark.parametrize(("value", "shown"), [(1, "1.0000"), (0.00123, "0.0012"), (2.7e-6, "2.7e-06"), (0, "0")])
def test_a_small_probability_has_digits(value: float, shown: str) -> None:
    assert format_probability(value) == shown


@pytest.mark.parametrize("infinity", [-1, 2**63 - 1], ids=["Linux", "macOS"])
def test_no_limit_of_memory_is_named_where_there_is_none(infinity: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("resource.RLIM_INFINITY", infinity)
    monkeypatch.setattr("resource.getrlimit", lambda _: (infinity, infinity))
    assert "ulimit" not in format_error(MemoryError("too much"))
    monkeypatch.setattr("resource.getrlimit", lambda _: (1 << 20, infinity))
    assert format_error(MemoryError("too much")).startswith("out of memory of 0.0 GiB (ulimit -v): too much")
