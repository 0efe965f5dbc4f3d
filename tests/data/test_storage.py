"""Shards behind URLs: a real HTTP server that cuts connections, and moto's S3 server, both on this machine."""

import hashlib
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from data import storage
from data.corpus import Corpus
from data.loader import Loader
from data.options import ChunkerOptions, LoaderOptions, ShardOptions, SourceOptions
from data.sharding import shard
from data.shards import Damaged


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    folder = tmp_path_factory.mktemp("source")
    generator = np.random.default_rng(0)
    for number in range(12):
        words = generator.choice(np.frombuffer(b"abcdef  \n", np.uint8), 600_000)
        (folder / f"train-{number:02d}.txt").write_bytes(words.tobytes())
    return shard(
        SourceOptions(kind="text", path=str(folder)), ChunkerOptions(), ShardOptions(megabytes=1), folder / "shards"
    )


class Unreliable(SimpleHTTPRequestHandler):
    """Serves files, and breaks off every third answer with a tar half-way."""

    served = 0
    lock = threading.Lock()

    def do_GET(self) -> None:
        with self.lock:
            Unreliable.served += 1
            number = Unreliable.served
        if number % 3 == 0 and self.path.endswith(".tar"):
            content = Path(self.translate_path(self.path)).read_bytes()
            self.send_response(200)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content[: len(content) // 2])
            self.close_connection = True
            return
        super().do_GET()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server(corpus: Corpus) -> Iterator[str]:
    httpd = ThreadingHTTPServer(("127.0.0.1", 0), partial(Unreliable, directory=str(corpus.folder)))
    thread = threading.Thread(target=httpd.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{httpd.server_port}"
    httpd.shutdown()
    httpd.server_close()
    thread.join()


def options(tmp_path: Path, **more: object) -> LoaderOptions:
    return LoaderOptions(cache_dir=str(tmp_path / "cache"), **more)  # type: ignore[arg-type]


def windows(corpus: Corpus, count: int, **more: object) -> list[bytes]:
    loader = Loader(corpus, "train", context=64, sequences=2, seed=3, **more)  # type: ignore[arg-type]
    stream = iter(loader)
    found = [batch.tokens.tobytes() for batch in islice(stream, count)]
    stream.close()  # type: ignore[attr-defined]
    return found


@pytest.mark.parametrize("workers", [0, 2])
def test_http_with_broken_connections(corpus: Corpus, server: str, tmp_path: Path, workers: int) -> None:
    remote = Corpus.open(server, options(tmp_path))
    assert remote.digest == corpus.digest and remote.location == server
    total = Loader(corpus, "train", context=64, sequences=2, seed=3).windows_per_epoch // 2
    assert windows(remote, total, options=options(tmp_path, workers=workers)) == windows(corpus, total)
    assert Unreliable.served > len(corpus.shards)
    assert list(remote.originals("train")) == list(corpus.originals("train"))


def test_the_cache_is_bounded_and_used(corpus: Corpus, server: str, tmp_path: Path) -> None:
    small = max(shard.file_bytes for shard in corpus.shards) * 3 / 1e9
    remote = Corpus.open(server, options(tmp_path, cache_gigabytes=small))
    for shard_ in remote.of("train"):
        remote.read(shard_)
        held = [path.stat().st_size for path in (tmp_path / "cache").rglob("*.tar")]
        assert sum(held) <= small * 1e9
    served = Unreliable.served
    remote.read(remote.of("train")[-1])
    assert Unreliable.served == served  # it was in the cache
    assert not list((tmp_path / "cache").rglob("*.partial"))


def test_a_damaged_file_in_the_cache_is_fetched_again(corpus: Corpus, server: str, tmp_path: Path) -> None:
    remote = Corpus.open(server, options(tmp_path))
    first = remote.of("train")[0]
    remote.read(first)
    path = remote.folder / first.file
    path.write_bytes(path.read_bytes()[:-600])
    again = Corpus.open(server, options(tmp_path))
    with pytest.raises(Damaged, match="train-00000.tar"):
        again.read(first)
    assert again.read(first)[0].tokens.tobytes() == corpus.read(first)[0].tokens.tobytes()


def test_what_is_not_there_is_said_at_once(server: str, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=f"{server}/nowhere/manifest.json"):
        Corpus.open(f"{server}/nowhere", options(tmp_path))
    with pytest.raises(ValueError, match="cannot be opened"):
        Corpus.open("nonsense://somewhere", options(tmp_path))


def test_a_server_that_serves_something_else(corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "ATTEMPTS", 2)
    folder = tmp_path / "served"
    folder.mkdir()
    for path in corpus.folder.iterdir():
        (folder / path.name).write_bytes(path.read_bytes()[:-1] + b"x" if path.suffix == ".tar" else path.read_bytes())
    remote = Corpus.open(f"file://{folder}", options(tmp_path))
    with pytest.raises(Damaged, match="train-00000.tar is damaged: .*others than the manifest says"):
        remote.read(remote.of("train")[0])


def test_s3(corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("s3fs")
    server = pytest.importorskip("moto.server").ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "testing")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    try:
        import boto3

        client = boto3.client("s3")
        client.create_bucket(Bucket="corpora")
        for path in corpus.folder.iterdir():
            client.upload_file(str(path), "corpora", f"books/{path.name}")
        remote = Corpus.open("s3://corpora/books", options(tmp_path))
        assert windows(remote, 50, options=options(tmp_path, workers=1)) == windows(corpus, 50)
        file = remote.folder / remote.of("train")[0].file
        remote.read(remote.of("train")[0])
        assert hashlib.sha256(file.read_bytes()).hexdigest() == corpus.of("train")[0].sha256
    finally:
        server.stop()
