"""Safe output: printable text, logs, Markdown, and the standard streams.

Names, chunks, samples and messages may hold any character. Some are replaced by visible escapes in terminals, logs and
pages: control characters other than newline and tab, bytes that are not UTF-8, and marks of writing direction. The
standard streams may be closed, or their disk full.
"""

import errno
import html
import logging
import os
import pwd
import re
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

from data.urls import redact_urls

log = logging.getLogger(__name__)
# C0 and C1 except tab and newline; marks, overrides and isolates of direction; the zero-width space; line separators;
# invisible operators; the byte order mark; interlinear marks; bytes from surrogateescape; language tags.
STEERING = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\ud800-\udfff"
    "\U000e0000-\U000e007f]"
)
# Characters with a meaning anywhere in Markdown: emphasis, code, links, tables, formulas, addresses and mentions.
_MARKS = re.compile(r"[\\`*\[\]#|~$@]|(?<![^\W_])_|_(?![^\W_])|:(?=\S)|(?<=[Ww]{3})\.")
_LONGEST_WORD = 300  # characters
_LONG_WORD = re.compile(rf"\S{{{_LONGEST_WORD + 1},}}")
_SIGNS = str.maketrans({" ": "␣", "\n": "↵", "\t": "⇥", "\r": "␍"})
_MEANT = {ord(sign): chr(code) for code, sign in _SIGNS.items()}


def make_printable(text: str) -> str:
    """Return text with control characters as escapes, except newline and tab."""
    return STEERING.sub(_escape_match, text)


def _escape_match(match: re.Match[str]) -> str:
    code = ord(match[0])
    if 0xDC80 <= code <= 0xDCFF:  # a byte that is not UTF-8
        code -= 0xDC00
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def escape_control_characters(text: str) -> str:
    """Return a chunk as `make_printable` does, with signs for white space as well."""
    return make_printable(show_white_space(text))


def show_white_space(text: str) -> str:
    """Return text with signs for white space, which `unescape_query` takes back."""
    return text.translate(_SIGNS)


def unescape_query(text: str) -> str:
    """Return the chunk that a user typed, with the signs that `escape_control_characters` writes replaced by white space."""
    return text.translate(_MEANT)


def cut_middle(text: str, most: int) -> str:
    """Return text without its middle, so that about `most` characters are left."""
    text = text if len(text) <= most else redact_urls(text)  # a half of a URL would not be recognised
    return text if len(text) <= most else f"{text[: most // 2]}…{text[-most // 2 :]}"


def _clean_message(text: str) -> str:
    """Return a message that is printable, holds no passwords of URLs, and quotes no long path as a whole."""
    return _LONG_WORD.sub(lambda word: cut_middle(word[0], _LONGEST_WORD), make_printable(redact_urls(text)))


class _PrintableLogRecord(logging.LogRecord):
    """A log record whose message went through `_clean_message`."""

    def getMessage(self) -> str:  # noqa: D102
        return _clean_message(super().getMessage())


def format_probability(probability: float) -> str:
    """Return a probability with four decimals, a small one with two digits."""
    return f"{probability:.4f}" if probability >= 0.001 else f"{probability:.2g}"


def format_duration(seconds: float) -> str:
    """Format seconds for people: `34 s`, `5 min`, `2 h 10 min`."""
    minutes = round(seconds / 60)
    if seconds < 119.5:
        return f"{seconds:.0f} s"
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60:,} h {minutes % 60} min"


def format_error(error: BaseException, command: str = "") -> str:
    """Return an error's message as one line without passwords, with advice if a path or a limit is at fault.

    Args:
        error: the error.
        command: the command that it ended, for the advice.
    """
    message = _clean_message(" ".join(str(error).split()))
    if isinstance(error, OSError) and error.errno:
        named = isinstance(error.filename, str | bytes | os.PathLike)
        path = os.fsdecode(error.filename) if named else ""
        if advice := _SYSTEM_ADVICE.get(error.errno):
            return f"{_clean_message(path) or message}: {advice}"
        if path and isinstance(error, PermissionError):
            return f"{_clean_message(path)}: permission denied. {_advise_on_permission(path)}"
        if error.errno in (errno.ENOTDIR, errno.EEXIST) and (file := _find_file_in_path(path)):
            return f"{_clean_message(file)} is a file, not a folder. Choose another path, or move it away"
    if is_out_of_memory(error):
        message, _, more = message.partition("Including non-PyTorch memory")  # what follows is of PyTorch's allocator
        limit = " of the GPU" if more or message.startswith("CU") else _memory_limit()
        reason = f": {message.rstrip(' .')}" if message else ""
        return f"out of memory{limit}{reason}. {_MEMORY_ADVICE.get(command, 'Use smaller inputs')}"
    return message or type(error).__name__


@contextmanager
def exit_on_error() -> Iterator[None]:
    """End the process with status 1 and an error's message instead of a traceback, as scripts do for wrong input."""
    try:
        yield
    except (OSError, ValueError) as error:
        sys.exit(f"error: {format_error(error)}")


def _advise_on_permission(path: str) -> str:
    """Return advice on a path that may not be used: the nearest part of it that refuses, and whom to ask."""
    try:
        parts = [each for each in (Path(path), *Path(path).absolute().parents) if each.exists()]
        refusing = [each for each in parts if not os.access(each, os.R_OK | os.W_OK)] or parts
        nearest, owner = _clean_message(str(refusing[0])), refusing[0].stat().st_uid
    except (OSError, ValueError, IndexError):
        return "Ask its owner"
    if owner == os.geteuid():
        return f"{nearest} is yours: allow it with chmod"
    try:
        name = pwd.getpwuid(owner).pw_name
    except KeyError:
        name = f"user {owner}"
    return f"Ask {name}, who owns {nearest}, or copy what you need"


def _find_file_in_path(path: str) -> str:
    """Return the first part of a path that exists and is no folder; empty: there is none."""
    parts = [*reversed(Path(path).parents), Path(path)] if path else []
    return next((str(part) for part in parts if os.path.lexists(part) and not part.is_dir()), "")


_OTHER_DISK = "or choose another disk with runs_dir=, shards_dir=, loader.cache_dir= or TMPDIR"
_SYSTEM_ADVICE = {
    errno.ENOSPC: f"no space left on the disk. Free some, {_OTHER_DISK}",
    errno.EDQUOT: f"the disk quota is used up. Free some space, {_OTHER_DISK}",
    errno.EFBIG: "the file exceeds a size limit (of ulimit -f or the file system). Raise the limit",
    errno.EMFILE: "too many files are open. Raise the limit of open files (ulimit -n)",
    errno.EAGAIN: (
        "no further process may be started. Lower launcher.processes, shard.workers or loader.workers, or raise the limit of "
        "processes (ulimit -u, or that of the container)"
    ),
    errno.EROFS: (
        "the disk is read-only. Choose another one: with runs_dir=, shards_dir= or loader.cache_dir=, with PREFECT_HOME "
        "in the environment if this is a file of Prefect, with `--output` if it is a comparison"
    ),
}
_MEMORY_WORDS = (
    *("can't allocate memory", "cannot allocate memory", "bad_alloc", "can't start new thread"),
    "could not create a primitive",  # oneDNN
    *("out of memory", "_alloc_failed"),  # of GPUs; the latter of cuBLAS and cuDNN
)
_LESS_TRAINING = "Lower batch.sequences or batch.context, raise batch.pieces (model.kind=haed), or use a smaller model"
_MEMORY_ADVICE = dict.fromkeys(("run", "pretrain", "finetune", "train", "profile"), _LESS_TRAINING) | {
    "shard": "Lower shard.workers or shard.megabytes",
    "evaluate": "Lower evaluate.sequences",
    "sample": "Lower `--samples` or sample.chunks",
    "index": "Lower index.max_chunks or index.max_contexts",
    "neighbours": "Give fewer queries at a time",
    "analyse": "Lower analyse.max_chunks or analyse.corpus_chunks",
}


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error says that memory is exhausted. Libraries report this in different ways."""
    if isinstance(error, MemoryError) or isinstance(error, OSError) and error.errno == errno.ENOMEM:
        return True
    return isinstance(error, RuntimeError) and any(each in str(error).lower() for each in _MEMORY_WORDS)


def _memory_limit() -> str:
    """Return the memory limit of this process or its container as text; empty: it has none."""
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    is_limited = limit != resource.RLIM_INFINITY  # -1, or a large number (macOS)
    with suppress(OSError, ValueError):
        group = int(Path("/sys/fs/cgroup/memory.max").read_text())
        if not is_limited or group < limit:
            return f" of {group / 2**30:.1f} GiB (memory.max of the container)"
    return f" of {limit / 2**30:.1f} GiB (ulimit -v)" if is_limited else ""


@lru_cache(1 << 14)
def warn_once(message: str) -> str:
    """Log a warning, once a command, and return it. `warn_once.cache_clear()` begins the next command."""
    log.warning("%s", message)
    return message


def is_first_rank() -> bool:
    """Return whether this process prints: under torchrun only the process of rank 0 does.

    Without torchrun, a RANK in the environment is ignored.
    """
    return "TORCHELASTIC_RUN_ID" not in os.environ or os.environ.get("RANK", "0") == "0"


def warn_on_first_rank(message: str, *values: object) -> None:
    """Log a warning that every process of torchrun would log alike, on the first one."""
    if is_first_rank():
        log.warning(message, *values)


def prepare_logs() -> None:
    """Make all log messages of this process printable and free of passwords, those of Prefect included."""
    logging.setLogRecordFactory(_PrintableLogRecord)


class StderrHandler(logging.StreamHandler[Any]):
    """A log handler that writes each message to standard error on a line of its own.

    Attributes:
        failed: whether an error was logged. One in the log of a Prefect flow is the flow's.
    """

    failed = False

    def __init__(self) -> None:
        super().__init__(sys.stderr)
        self.setFormatter(logging.Formatter(f"{_start_of_line()}%(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        """Write a message, and remember whether it is an error."""
        is_own = not record.name.startswith("prefect.")
        self.failed = self.failed or is_own and record.levelno >= logging.ERROR
        super().emit(record)


def prepare_streams() -> None:
    """Make the standard streams safe to write to.

    Characters that the encoding of standard output or error lacks are escaped. The file number of a closed stream
    would go to the next file that is opened, such as a checkpoint. A library would then print into that file. Such
    numbers are therefore opened on the null device.
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


def print_stderr(text: str) -> None:
    """Write a line to standard error, in place of a status line there. Errors of the stream are ignored."""
    with suppress(OSError, ValueError):
        sys.stderr.write(f"{_start_of_line()}{make_printable(text)}\n")  # at once: ranks share the stream
        sys.stderr.flush()


def _start_of_line() -> str:
    """Return what removes a status line from a terminal."""
    return "\r\x1b[2K" if sys.stderr.isatty() else ""


def markdown_text(text: str) -> str:
    """Escape text for use within a line of Markdown, so that it is shown unchanged."""
    line = " ".join(make_printable(text).split())
    line = re.sub(r"^(?:(?=[-+=])|(\d+)(?=[.)]))", "\\g<1>\0", line)  # before a sign, or after a number
    return html.escape(_MARKS.sub(r"\\\g<0>", line).replace("\0", "\\"), quote=False)


def markdown_code(text: str) -> str:
    """Return text as inline code of Markdown, also within a table. Backticks in the text cannot end it."""
    line = escape_control_characters(text) if "\n" in text else make_printable(text)
    if not line.strip():
        return markdown_text(escape_control_characters(text))
    if "|" in line:  # it would end a cell, and code cannot escape it
        return markdown_text(line)
    fence = "`" * max([1, *(len(ticks) + 1 for ticks in re.findall("`+", line))])
    edge = " " if line[0] in "` " or line[-1] in "` " else ""
    return f"{fence}{edge}{line}{edge}{fence}"


def code_fence(text: str) -> str:
    """Return text as a code block of Markdown. Backticks in the text cannot end it."""
    fence = "`" * max([3, *(len(ticks) + 1 for ticks in re.findall("`+", text))])
    return f"{fence}\n{make_printable(text)}\n{fence}"


class StdoutClosedError(BrokenPipeError):
    """Raised when the reader of standard output has closed it."""


def print_stdout(content: bytes | str) -> None:
    """Write a part of the result to standard output: bytes unchanged, text made printable and as a line.

    Raises:
        StdoutClosedError: the reader has closed standard output.
        OSError: standard output is closed, or its disk is full.
    """
    stream: Any = sys.stdout
    if stream is None:
        raise OSError("standard output is closed, so the result is not printed")
    try:
        if isinstance(content, bytes):
            stream.buffer.write(content)
        else:
            stream.write(make_printable(content) + "\n")
        stream.flush()
    except BrokenPipeError as error:
        raise StdoutClosedError from error
    except OSError as error:
        raise OSError(f"standard output cannot be written: {error.strerror or error}") from error


def end_streams() -> None:
    """Flush the standard streams. Output that cannot be written is dropped, so that Python exits silently."""
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None:
                stream.flush()
        except (OSError, ValueError):
            with suppress(OSError, ValueError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
