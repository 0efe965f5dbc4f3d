"""What a person is shown: texts of strangers without what would steer the terminal, on streams that may be missing or full.

Names, chunks, samples and messages may hold any character. Control characters other than newline and tab, bytes that are no
UTF-8, and marks that reverse the direction of writing become visible escapes, on terminals, in logs and on pages.
"""

import logging
import os
import re
import sys
from contextlib import suppress
from typing import Any

from data.locations import redact

# C0 and C1 but for tab and newline; marks, overrides and isolates of direction; the blank without a width; line separators,
# invisible operators; the mark of byte order; interlinear marks; what surrogateescape made of bytes; language tags.
_STEERS = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\ud800-\udfff"
    "\U000e0000-\U000e007f]"
)
# What means something in Markdown wherever it stands: emphasis, code, links, tables, formulas, addresses and mentions.
_MARKS = re.compile(r"[\\`*\[\]#|~$@]|(?<![^\W_])_|_(?![^\W_])|:(?=\S)|(?<=[Ww]{3})\.")
_SIGNS = str.maketrans({" ": "␣", "\n": "↵", "\t": "⇥", "\r": "␍"})
_MEANT = {ord(sign): chr(code) for code, sign in _SIGNS.items()}


def printable(text: str) -> str:
    """Text with control characters as escapes, all but newline and tab."""
    return _STEERS.sub(_escaped, text)


def _escaped(found: re.Match[str]) -> str:
    code = ord(found[0])
    if 0xDC80 <= code <= 0xDCFF:  # a byte that is no UTF-8
        code -= 0xDC00
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def visible(text: str) -> str:
    """A chunk with its white space made visible too."""
    return printable(text.translate(_SIGNS))


def meant(text: str) -> str:
    """A chunk as it is typed after `visible`: with its white space as signs, or as it is."""
    return text.translate(_MEANT)


class _Record(logging.LogRecord):
    """A record whose message is printable, whatever name of a file is in it, and holds no password of a URL."""

    def getMessage(self) -> str:  # noqa: D102
        return redact(printable(super().getMessage()))


def duration(seconds: float) -> str:
    """Seconds for people: `34 s`, `5 min`, `2 h 10 min`."""
    minutes = round(seconds / 60)
    if seconds < 119.5:
        return f"{seconds:.0f} s"
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60:,} h {minutes % 60} min"


def reason(error: BaseException) -> str:
    """What an error says, as one line and without passwords."""
    return printable(redact(" ".join(str(error).split()))) or type(error).__name__


def prepare_logs() -> None:
    """Has every message of this process, Prefect's too, made printable and without passwords before any handler sees it."""
    logging.setLogRecordFactory(_Record)


class Lines(logging.StreamHandler[Any]):
    """Messages on standard error, each on a line of its own; `failed` once one of them is an error of ours."""

    failed = False

    def __init__(self) -> None:
        super().__init__(sys.stderr)
        self.setFormatter(logging.Formatter("\r\x1b[2K%(message)s" if sys.stderr.isatty() else "%(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        """Writes a message, and remembers one that is an error."""
        self.failed = self.failed or record.levelno >= logging.ERROR
        super().emit(record)


def prepare_streams() -> None:
    """Makes standard output and error fit to be written to: signs that their encoding lacks are escaped.

    A closed one leaves its number to the next file that is opened, a checkpoint say, into which a library would then print:
    such numbers are given to the null device.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    if sys.stderr is None:
        sys.stderr = open(2, "w", closefd=False)
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")


def say(text: str) -> None:
    """Writes a line to standard error; where that is not possible, nobody is there to be told."""
    with suppress(OSError, ValueError):
        print(printable(text), file=sys.stderr, flush=True)


def markdown_text(text: str) -> str:
    """Text within a line of Markdown, which is shown as it stands: a name, a path, a message, a sentence with any of them."""
    line = " ".join(printable(text).split())
    line = re.sub(
        r"^([-+=]|\d+(?=[.)]))", lambda found: f"{found[0]}\0" if found[0].isdigit() else f"\0{found[0]}", line
    )
    return (
        _MARKS.sub(r"\\\g<0>", line).replace("\0", "\\").replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    )


def markdown_code(text: str) -> str:
    """Text as code within a line of Markdown, or of a table, which no backticks in it can end."""
    line = visible(text) if "\n" in text else printable(text)
    if not line.strip():
        return markdown_text(visible(text))
    if "|" in line:  # which would end a cell, and may not be escaped in code
        return markdown_text(line)
    fence = "`" * max([1, *(len(found) + 1 for found in re.findall("`+", line))])
    edge = " " if line[0] in "` " or line[-1] in "` " else ""
    return f"{fence}{edge}{line}{edge}{fence}"


def fenced(text: str, kind: str = "") -> str:
    """Text as a block of Markdown, which no backticks in it can end."""
    fence = "`" * max([3, *(len(found) + 1 for found in re.findall("`+", text))])
    return f"{fence}{kind}\n{printable(text)}\n{fence}"


class NobodyReads(BrokenPipeError):
    """Standard output was closed by its reader."""


def write(content: bytes | str) -> None:
    """Writes a part of the result to standard output: bytes as they are, text printable and as a line.

    Raises:
        NobodyReads: its reader has closed it.
        OSError: it is closed, or its disk is full.
    """
    stream: Any = sys.stdout
    if stream is None:
        raise OSError("standard output is closed: the result is not shown")
    try:
        if isinstance(content, bytes):
            stream.buffer.write(content)
        else:
            stream.write(printable(content) + "\n")
        stream.flush()
    except BrokenPipeError as error:
        raise NobodyReads from error
    except OSError as error:
        raise OSError(f"standard output does not take the result: {error.strerror or error}") from error


def end_streams() -> None:
    """Flushes what can be; what cannot is dropped here, or the interpreter would complain of it at its end."""
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None:
                stream.flush()
        except (OSError, ValueError):
            with suppress(OSError, ValueError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
