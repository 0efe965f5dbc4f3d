"""Addresses: which ones may be opened, which folders may be written to, and how they are shown.

An address may come from a stranger's run, manifest or configuration, and fsspec obeys it.
`dask://HOST:PORT::file:///any` connects to a scheduler and works there; `reference://` renders templates. So it is
checked here before any library sees it. An address must hold no name or password: addresses appear in names of runs,
logs, configurations, checkpoints and reports.
"""

import os
import re
from pathlib import Path
from urllib.parse import unquote_to_bytes, urlsplit

SCHEMES = ("http", "https", "s3", "gs", "az", "file")
_LITERAL = ("s3", "gs", "az")  # keys are literal; in other schemes paths are encoded
_CODES = {" ": "%20", "#": "%23", "?": "%3F", "\\": "%5C"}  # characters that a path must encode
CREDENTIALS = (
    "http and https take credentials from ~/.netrc (or NETRC=FILE). s3 takes them from the environment "
    "(AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY) or ~/.aws. FSSPEC_S3_ANON=true reads a public bucket without. "
    "gs takes them from GOOGLE_APPLICATION_CREDENTIALS, "
    "az from AZURE_STORAGE_CONNECTION_STRING. In a deployment of Prefect, a block can set these"
)
# For forms: a URL with a name, password or signature is refused before the server stores it.
NO_SECRET = (
    r"^(?![\s\S]*://[^/\s]*@)(?![\s\S]*://[^\s/?#@]*:(?![0-9]+[/?#])\S*@)"  # a password may contain a slash
    r"(?![\s\S]*://\S*\?\S*([Ss]ig|[Tt]oken|[Kk]ey|[Cc]redential|[Pp]assw)[^\s=]*=)"
)
_HARMLESS = ("local", "memory", "hf", "zip", "tar", "gzip", "bz2", "xz", "zstd", "lz4")  # also, for data sets
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://(.*)")
_FOLDER_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")  # pathlib makes one slash of two
_SCHEDULER = re.compile(r"(?:(?:tcp|tls)://)?(?:[A-Za-z0-9_.-]+|\[[0-9A-Fa-f:.]+\]):[0-9]{1,5}")
# A password may contain a slash; pathlib makes one slash of two.
_USER = re.compile(r'(?<=:/)(/?)(?:[^\s/?#"<>]{0,2000}@|[^\s/?#@"<>]{0,2000}:[^\s"<>]{0,2000}@)')
_PARAMETER = re.compile(r"([?&;])([\w.%-]{1,100})=([^&;\s\"'<>]+)")
_SECRET = re.compile(r"sig|token|secret|pass|pwd|key|cred|auth|code|session", re.IGNORECASE)


def is_remote(location: str | Path) -> bool:
    """Return if a location is a URL."""
    return "://" in str(location)


def redact_urls(text: str) -> str:
    """Return the text with names, passwords and signatures in its URLs replaced by stars."""

    def hidden(match: re.Match[str]) -> str:
        return f"{match[1]}{match[2]}=***" if _SECRET.search(match[2]) else match[0]

    return _PARAMETER.sub(hidden, _USER.sub(r"\1***@", text))


def show_url(url: str) -> str:
    """Return a URL for a message, without name and password, whatever they contain, and without the query after `?`."""
    scheme, mark, rest = url.partition("://")
    path, query, _ = rest.partition("?")
    if "@" in rest and ("@" in re.split("[/?#]", rest)[0] or ":" in path.split("/")[0]):
        path = "***@" + rest.rpartition("@")[2].partition("?")[0]
    return redact_urls(f"{scheme}{mark}{path}") + ("?***" if query else "")


def check_url(url: str, option: str = "") -> str:
    """Return a URL in the form in which it is opened: scheme in lower case, no slash at the end.

    `http`, `https` and `file` take URLs as a browser does, with %20 for a blank and %25 for a percent sign. They are
    passed on unchanged, and the path of a file is decoded (RFC 8089). In `s3`, `gs` and `az` the key is taken
    literally, as by `aws s3`.

    Args:
        url: of a folder.
        option: option that gave the URL, for the message.

    Raises:
        ValueError: it is not a plain address of a known scheme; the message hides names and passwords.
    """
    shown = (f"{option}: " if option else "") + repr(show_url(url))
    match = _URL.fullmatch(url)
    if "::" in url:
        raise ValueError(f"{shown} is not opened: '::' chains file systems. Use a plain URL with a host name")
    if not match or not url.isprintable() or re.match(r"[^/]*[ \\]", match[2]):
        raise ValueError(f"{shown} is not a URL. Use {', '.join(SCHEMES[:-1])} or {SCHEMES[-1]}, :// and an address")
    scheme, rest = match[1].lower(), match[2]
    if scheme not in SCHEMES:
        raise ValueError(f"{shown} is not opened. Use a URL with {', '.join(SCHEMES[:-1])} or {SCHEMES[-1]}")
    host = re.split("[/?#]", rest)[0]
    if "@" in host or "%40" in host:
        raise ValueError(f"{shown} holds a name or password. Leave it out. {CREDENTIALS}")
    _check_rest(rest, shown, scheme)
    if scheme == "file":
        return f"file://{rest.rstrip('/')}"
    try:
        valid = bool(host) and urlsplit(f"//{host}").port != 0
    except ValueError:
        valid = False
    if not valid:
        raise ValueError(f"{shown} does not name a host, with a port if needed. If it holds a password: {CREDENTIALS}")
    return f"{scheme}://{rest.rstrip('/')}"


def _check_rest(rest: str, shown: str, scheme: str) -> None:
    """Raise ValueError if what follows the scheme has a query or signature, a version, or characters to be encoded."""
    is_literal = scheme in _LITERAL
    parameters = _PARAMETER.findall("?" + rest.partition("?")[2] if is_literal else rest)
    is_secret = any(_SECRET.search(name) for _, name, _ in parameters) or ("?" in rest and not is_literal)
    if is_secret and scheme != "file":
        advice = "" if is_literal else ", and write %3F for a ? in a name"
        raise ValueError(
            f"{shown} has a query or signature after its path, which would not stay secret. Leave it out{advice}. "
            f"{CREDENTIALS}"
        )
    if is_literal:
        if "?versionid=" in rest.lower():
            raise ValueError(f"{shown} names a version of an object, which is not supported. Leave out ?versionId=")
        return
    for sign, code in _CODES.items():
        if sign in rest:
            raise ValueError(f"{shown} has a {'blank' if sign == ' ' else sign}. Write {code} instead, as in every URL")
    if re.search("%(?![0-9A-Fa-f]{2})", rest):
        raise ValueError(f"{shown} has a % that begins no code. Write %25 for a % in a name, as in every URL")
    if "%00" in rest:
        raise ValueError(f"{shown} has a NUL byte (%00), which is not allowed in a name")
    if scheme == "file" and not re.match("/|localhost(/|$)", rest):
        raise ValueError(f"{shown} is not a file of this machine. Use file:/// and the absolute path")


def path_of_file_url(url: str) -> str:
    """Return the decoded path of a checked `file` URL."""
    return os.fsdecode(unquote_to_bytes(url.removeprefix("file://").removeprefix("localhost"))) or "/"


def check_scheduler(address: str) -> str:
    """Return the address of a Dask scheduler unchanged: `local`, or host:port with an optional tcp:// or tls://.

    Raises:
        ValueError: it is none of these.
    """
    if address != "local" and not _SCHEDULER.fullmatch(address):
        raise ValueError(
            f"launcher.dask={redact_urls(address)!r}: expected local, or the address of a scheduler, tcp://HOST:PORT, "
            "tls://HOST:PORT or HOST:PORT"
        )
    return address


def check_folder(folder: str | Path, option: str) -> None:
    """Raise ValueError if the name of a folder that will be written to is empty or a URL."""
    if not str(folder):
        raise ValueError(f"{option} is empty. Name a folder; . is the current one")
    if _FOLDER_URL.match(str(folder)) or is_remote(folder):
        raise ValueError(
            f"{option}={redact_urls(str(folder))} is a URL, but it is written to. Use a folder of this machine. To have "
            "shards elsewhere, copy the folder there, and read it with source.kind=shards source.path=URL"
        )


def guard_fsspec() -> None:
    """Restrict fsspec in this process to known protocols, for a library that takes addresses from the files it reads.

    The README.md of a data set may give `dask://…` as the place of its files, and `datasets` would connect there.
    """
    import fsspec

    class Refused(fsspec.AbstractFileSystem):
        def __init__(self, *_: object, **__: object) -> None:
            raise ValueError(f"it names files with other schemes than {', '.join(SCHEMES)}, so it is not opened")

    for protocol in fsspec.available_protocols():
        if protocol not in (*SCHEMES, *_HARMLESS):
            fsspec.register_implementation(protocol, Refused, clobber=True)
