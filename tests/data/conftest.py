"""What several tests of data make: corpora, tars and servers of files."""

import io
import resource
import sys
import tarfile
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from data.build import shard
from data.corpus import Corpus
from data.options import ChunkerOptions, ShardOptions, SourceOptions
from data.parts import Mapper
from tests.conftest import SHARED


def brief(case: object) -> str:
    """An id of a case whose parameters are long."""
    return repr(case)[:40]


def shard_source(
    path: object,
    into: Path,
    kind: str = "text",
    chunker: str | ChunkerOptions = "words",
    workers: int = 1,
    megabytes: int = 16,
    mapper: Mapper | None = None,
    verify: bool = False,
    **source: Any,
) -> Corpus:
    """The corpus of what lies at a path."""
    chunker = ChunkerOptions(kind=chunker) if isinstance(chunker, str) else chunker
    options = SourceOptions(kind=kind, path=str(path), **source)
    return shard(options, chunker, ShardOptions(workers=workers, megabytes=megabytes, verify=verify), into, mapper)


def tar_of(*members: tuple[str, bytes], mode: str = "w") -> bytes:
    """A tar of files with these names and contents."""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode=mode) as tar:  # type: ignore[call-overload]
        for name, content in members:
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return file.getvalue()


def picture(kind: str) -> bytes:
    """A small picture in a format of Pillow."""
    file = io.BytesIO()
    Image.new("RGB", (4, 4)).save(file, kind)
    return file.getvalue()


def add_package(place: Path, name: str, entry_points: str, version: str = "1") -> None:
    """What an installed package says of itself."""
    info = place / f"{name}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (info / "entry_points.txt").write_text(entry_points)


class Files(SimpleHTTPRequestHandler):
    """Serves files, and counts how often each."""

    served: Counter[str] = Counter()
    lock = threading.Lock()

    def do_GET(self) -> None:
        with self.lock:
            self.served[self.path.rpartition("/")[2]] += 1
        super().do_GET()

    def log_message(self, *_: object) -> None:
        pass


class Server(ThreadingHTTPServer):
    """Says nothing of clients that leave, as they may."""

    def handle_error(self, *request: Any) -> None:
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(*request)


@contextmanager
def serving(folder: Path, handler: type[Files]) -> Iterator[str]:
    """Serves a folder, and gives its address."""
    handler.served.clear()
    httpd = Server(("127.0.0.1", 0), partial(handler, directory=str(folder)))
    thread = threading.Thread(target=httpd.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{httpd.server_port}"
    finally:
        httpd.shutdown()
        httpd.server_close()
        thread.join()


@contextmanager
def file_size_limit(size: int) -> Iterator[None]:
    """No file may grow beyond so many bytes: Python ignores the signal, so that it is an OSError."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """An empty folder for a source."""
    (tmp_path / "source").mkdir()
    return tmp_path / "source"


def shared_data(name: str) -> Path:
    """A file of real data, if it is there."""
    if not (SHARED / name).is_file():
        pytest.skip(f"{name} is not in ../shared/data")
    return SHARED / name


@pytest.fixture
def shared_wikitext() -> bytes:
    return shared_data("wikitext-2/valid.txt").read_bytes()
