"""Shards behind URLs: a real HTTP server that cuts connections, and moto's S3 server, both on this machine."""

import errno
import hashlib
import json
import multiprocessing
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import pytest

import data.remote
from data.corpus import Corpus
from data.loader import Loader
from data.options import LoaderOptions
from data.shards import CorruptShardError
from pipeline.cli import main
from pipeline.console import format_error
from pipeline.run.run_directory import RunFolder
from tests.conftest import TINY, mostly_nightly
from tests.data.conftest import Files, file_size_limit, serving, shard_source


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    folder = tmp_path_factory.mktemp("source")
    generator = np.random.default_rng(0)
    for number in range(8):
        words = generator.choice(np.frombuffer(b"abcdef  \n", np.uint8), 600_000)
        (folder / f"train-{number:02d}.txt").write_bytes(words.tobytes())
    return shard_source(folder, folder / "shards", megabytes=1)


class Unreliable(Files):
    """Breaks off every third answer with a tar half-way."""

    def do_GET(self) -> None:
        if self.path.endswith(".tar") and self.served.total() % 3 == 2:
            self.served["broken"] += 1
            send_half(self)
        else:
            super().do_GET()


def redirect(handler: Files, address: str) -> None:
    handler.send_response(302)
    handler.send_header("Location", address)
    handler.send_header("Content-Length", "0")
    handler.end_headers()


def send_half(handler: Files) -> None:
    """Half of a file, and then nothing."""
    content = Path(handler.translate_path(handler.path)).read_bytes()
    handler.send_response(200)
    handler.send_header("Content-Length", str(len(content)))
    handler.end_headers()
    handler.wfile.write(content[: len(content) // 2])
    handler.close_connection = True


class Endless(Files):
    """Sends a tar again and again."""

    def do_GET(self) -> None:
        if not self.path.endswith(".tar"):
            return super().do_GET()
        self.send_response(200)
        self.end_headers()
        with suppress(OSError):
            while True:
                self.wfile.write(Path(self.translate_path(self.path)).read_bytes())


class Stalled(Files):
    """Sends half of the first shard, and waits."""

    half = threading.Event()

    def do_GET(self) -> None:
        if self.path.endswith("train-00000.tar") and not self.half.is_set():
            send_half(self)
            self.half.set()
            time.sleep(60)
        else:
            super().do_GET()


@pytest.fixture
def server(corpus: Corpus) -> Iterator[str]:
    with serving(corpus.folder, Unreliable) as address:
        yield address


def options(tmp_path: Path, **more: object) -> LoaderOptions:
    return LoaderOptions(cache_dir=str(tmp_path / "cache"), **more)  # type: ignore[arg-type]


@pytest.fixture
def remote(server: str, tmp_path: Path) -> Corpus:
    return Corpus.open(server, options(tmp_path))


def check_read(opened: Corpus, corpus: Corpus, *numbers: int) -> None:
    """Reads shards of `train` by their numbers, as they are in the corpus."""
    for number in numbers:
        found, wanted = (each.read(each.shards_of("train")[number]) for each in (opened, corpus))
        assert [sample.tokens.tobytes() for sample in found] == [sample.tokens.tobytes() for sample in wanted]


def windows(corpus: Corpus, count: int, **more: object) -> list[bytes]:
    loader = Loader(corpus, "train", context=64, sequences=2, seed=3, **more)  # type: ignore[arg-type]
    stream = iter(loader)
    found = [batch.tokens.tobytes() for batch in islice(stream, count)]
    stream.close()  # type: ignore[attr-defined]
    return found


@pytest.mark.parametrize("workers", mostly_nightly([0, 2], 0))
def test_http_with_broken_connections(
    corpus: Corpus, server: str, remote: Corpus, tmp_path: Path, workers: int
) -> None:
    assert remote.digest == corpus.digest and remote.location == server
    total = Loader(corpus, "train", context=64, sequences=2, seed=3).windows_per_epoch // 2
    assert windows(remote, total, options=options(tmp_path, workers=workers)) == windows(corpus, total)
    assert Unreliable.served["broken"]
    assert list(remote.iterate_originals("train")) == list(corpus.iterate_originals("train"))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_process_reads_on(corpus: Corpus, tmp_path: Path) -> None:
    """As workers of torch's DataLoader are, on Linux."""
    with serving(corpus.folder, Files) as address:
        remote = Corpus.open(address, options(tmp_path))
        remote.read(remote.shards_of("train")[0])
        (wanted,) = [each.file for each in remote.shards_of("train")][1:2]
        with multiprocessing.get_context("fork").Pool(1) as pool:
            found = pool.apply(_read_shard, (remote, 1))
    assert found == len(corpus.read(corpus.shards_of("train")[1])) > 0 and Files.served[wanted] == 1


def _read_shard(remote: Corpus, number: int) -> int:
    return len(remote.read(remote.shards_of("train")[number]))


def test_redirects_are_followed_and_one_to_another_server_is_logged_once_before_it_is_asked(
    corpus: Corpus, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    with serving(corpus.folder, Files) as other:

        class Away(Files):
            def do_GET(self) -> None:
                redirect(self, f"{other}{self.path}?signature=secret")

        with serving(corpus.folder, Away) as url:
            check_read(Corpus.open(url, options(tmp_path)), corpus, *range(8))
    lines = [line for line in caplog.messages if "redirects" in line]
    assert lines == [f"{url}/manifest.json redirects to {other}/manifest.json?***"]


@pytest.mark.parametrize(
    ("address", "said"),
    [("file:///etc/passwd", ""), ("http://", ""), ("/manifest.json", "TooManyRedirects")],
    ids=["another scheme", "nowhere", "in a circle"],
)
def test_a_redirect_that_leads_to_nothing_is_not_tried_again(
    address: str, said: str, corpus: Corpus, tmp_path: Path
) -> None:
    class Odd(Files):
        asked = 0

        def do_GET(self) -> None:
            Odd.asked += 1
            redirect(self, address)

    with serving(corpus.folder, Odd) as url, pytest.raises(OSError, match=rf"attempts: 1\): {said}"):
        Corpus.open(url, options(tmp_path))
    assert Odd.asked < 20


@pytest.fixture
def keys(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """Keys of S3, whose address is to be set."""
    s3fs = pytest.importorskip("s3fs")
    for name in ("ACCESS_KEY_ID", "SECRET_ACCESS_KEY"):
        monkeypatch.setenv(f"AWS_{name}", "testing")
    s3fs.S3FileSystem.clear_instance_cache()
    yield monkeypatch
    s3fs.S3FileSystem.clear_instance_cache()


@pytest.mark.parametrize("scheme", ["http", "s3"])
def test_a_server_that_drips_is_given_up(scheme: str, corpus: Corpus, tmp_path: Path, keys: pytest.MonkeyPatch) -> None:
    class Drip(Files):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            for _ in range(1000):
                self.wfile.write(b" ")
                time.sleep(0.05)

    keys.setattr("data.remote._SLOW_AFTER", 0.3)
    keys.setattr("data.remote.ATTEMPTS", 2)
    with serving(corpus.folder, Drip) as url, pytest.raises(OSError, match=r"attempts: 2\): .* bytes came in 0 s"):
        keys.setenv("AWS_ENDPOINT_URL", url)
        Corpus.open(url if scheme == "http" else "s3://corpora/books", options(tmp_path))


def test_a_shard_that_is_larger_than_the_cache_and_a_bound_is_not_fetched(
    server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    remote = Corpus.open(server, options(tmp_path, cache_gigabytes=1e-9))
    first = remote.shards_of("train")[0]
    assert data.remote._ANY_SHARD == 4 << 30
    monkeypatch.setattr(data.remote, "_ANY_SHARD", first.file_bytes - 1)
    served = Unreliable.served.total()
    with pytest.raises(
        ValueError, match="train-00000.tar has .* bytes.* than the cache may.*Raise loader.cache_gigabytes"
    ):
        remote.read(first)
    assert Unreliable.served.total() == served


def test_the_cache_is_bounded_and_used(corpus: Corpus, server: str, tmp_path: Path) -> None:
    small = max(shard.file_bytes for shard in corpus.shards) * 3 / 1e9
    remote = Corpus.open(server, options(tmp_path, cache_gigabytes=small))
    for shard_ in remote.shards_of("train"):
        remote.read(shard_)
        held = [path.stat().st_size for path in (tmp_path / "cache").rglob("*.tar")]
        assert sum(held) <= small * 1e9
    served = Unreliable.served.total()
    remote.read(remote.shards_of("train")[-1])
    assert Unreliable.served.total() == served  # it was in the cache
    assert not list((tmp_path / "cache").rglob("*.partial"))


def test_a_damaged_file_in_the_cache_is_fetched_again(
    corpus: Corpus, server: str, remote: Corpus, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    remote.read(remote.shards_of("train")[0])
    (path,) = (tmp_path / "cache").rglob("*.tar")
    path.write_bytes(path.read_bytes()[:-600])
    for opened in (remote, Corpus.open(server, options(tmp_path))):  # one has checked it before, and one has not
        check_read(opened, corpus, 0)
    assert "the cached copy is damaged" in caplog.text and "delete" not in caplog.text


def test_the_cache_removes_nothing_but_its_own(corpus: Corpus, server: str, tmp_path: Path) -> None:
    cache, sums = tmp_path / "cache", [shard_.sha256 for shard_ in corpus.shards_of("train")]
    with pytest.raises(FileExistsError, match="is not a cache of haed.*loader.cache_dir"):
        (tmp_path / "mine" / "haed-cache").mkdir(parents=True)
        (tmp_path / "mine" / "haed-cache" / f"{sums[0]}.tar").write_text("mine")
        Corpus.open(server, LoaderOptions(cache_dir=str(tmp_path / "mine")))
    remote = Corpus.open(server, options(tmp_path, cache_gigabytes=1e-9))
    names = ["a.tar", "mine/a.tar", "mine/train-00000.tar", f"mine/{sums[0]}.tar", f"{sums[0]}.tar"]
    names += ["haed-cache/a.tar", "haed-cache/train-00000.tar", "haed-cache/x.partial", "haed-cache/mine/b.tar"]
    names += [f"{remote.folder.relative_to(cache)}/train-00000.tar", f"haed-cache/mine/{sums[1]}.tar"]
    mine = [cache / name for name in names]
    for path in mine:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("mine")
    for shard_ in remote.shards_of("train"):
        remote.read(shard_)
    assert all(path.read_text() == "mine" for path in mine)
    assert len([path for path in (cache / "haed-cache").glob("*.tar") if path not in mine]) == 1


READER = """
import random, sys
from data.corpus import Corpus
from data.options import LoaderOptions

address, cache, limit, seed, rounds = sys.argv[1:]
corpus = Corpus.open(address, LoaderOptions(cache_dir=cache, cache_gigabytes=float(limit)))
shards = corpus.shards_of("train")
order = random.Random(int(seed))
for _ in range(int(rounds)):
    for shard in order.sample(shards, len(shards)):
        assert sum(len(sample.tokens) for sample in corpus.read(shard)) == shard.tokens
"""


def readers(address: str, tmp_path: Path, limit: float, rounds: int) -> None:
    """Four processes at once, which read all shards in an order of their own."""
    command = [sys.executable, "-c", READER, address, str(tmp_path / "cache"), str(limit)]
    running = [subprocess.Popen([*command, str(seed), str(rounds)], stderr=subprocess.PIPE) for seed in range(4)]
    said = [process.communicate()[1].decode() for process in running]
    assert not any(process.returncode for process in running), said


@pytest.mark.nightly
def test_a_cache_too_small_for_many_processes(corpus: Corpus, tmp_path: Path) -> None:
    with serving(corpus.folder, Files) as address:
        readers(address, tmp_path, 1.5 * max(shard.file_bytes for shard in corpus.shards) / 1e9, 3)
    assert len(list((tmp_path / "cache").rglob("*.tar"))) <= 4 and not list((tmp_path / "cache").rglob("*.partial"))


@pytest.mark.nightly
def test_a_shard_is_fetched_once_for_many_processes(corpus: Corpus, tmp_path: Path) -> None:
    with serving(corpus.folder, Files) as address:
        readers(address, tmp_path, 1, 1)
    assert {name: count for name, count in Files.served.items() if name.endswith(".tar")} == {
        shard_.file: 1 for shard_ in corpus.shards_of("train")
    }


def test_what_a_killed_process_left_is_removed(corpus: Corpus, tmp_path: Path) -> None:
    with serving(corpus.folder, Stalled) as address:
        command = [sys.executable, "-c", READER.replace("order.sample(shards, len(shards))", "shards")]
        with subprocess.Popen([*command, address, str(tmp_path / "cache"), "1", "0", "1"]) as process:
            assert Stalled.half.wait(60)
            process.kill()
        assert len(list((tmp_path / "cache").rglob("*.partial"))) == 1
        remote = Corpus.open(address, options(tmp_path))
        check_read(remote, corpus, 1)
        assert not list((tmp_path / "cache").rglob("*.partial"))
        check_read(remote, corpus, 0)


def test_what_is_not_there_is_said_at_once(server: str, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=f"{server}/nowhere/manifest.json"):
        Corpus.open(f"{server}/nowhere", options(tmp_path))
    with pytest.raises(ValueError, match="is not opened"):
        Corpus.open("nonsense://somewhere", options(tmp_path))


def test_a_pipe_in_place_of_a_manifest_is_an_error_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "manifest.json")
    with pytest.raises(ValueError, match="manifest.json is a named pipe, not a file"):
        Corpus.open(f"file://{tmp_path}", options(tmp_path))


def test_a_shard_without_end_is_an_error(corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data.remote, "ATTEMPTS", 2)
    with serving(corpus.folder, Endless) as address:
        endless = Corpus.open(address, options(tmp_path))
        with pytest.raises(CorruptShardError, match=r"got more than [\d,]+ bytes"):
            endless.read(endless.shards_of("train")[0])
    assert not list((tmp_path / "cache").rglob("*.partial"))


def test_a_shard_that_is_wrong_twice_alike_is_not_fetched_a_third_time(corpus: Corpus, tmp_path: Path) -> None:
    shutil.copytree(corpus.folder, folder := tmp_path / "served")
    wrong = folder / corpus.shards_of("train")[0].file
    wrong.write_bytes(wrong.read_bytes()[:-1] + b"x")
    with serving(folder, Files) as address:
        remote = Corpus.open(address, options(tmp_path))
        said = f"^shard {address}/train-00000.tar is damaged: its bytes are others than in the manifest"
        with pytest.raises(CorruptShardError, match=said) as caught:
            remote.read(remote.shards_of("train")[0])
        assert Files.served[wrong.name] == 2 and "delete" not in str(caught.value)
        (folder / "manifest.json").write_text("<html>log in</html>")
        with pytest.raises(ValueError, match="is not a manifest: it begins with b'<html>log in.*Check the address"):
            Corpus.open(address, options(tmp_path))


class Forbidden(Exception):
    """What Azure's and Google's packages raise."""

    def __init__(self, **more: int) -> None:
        super().__init__("no\nentry")
        self.__dict__.update(more)


@pytest.mark.parametrize(
    ("error", "expected", "message"),
    [
        (Forbidden(status_code=403), PermissionError, "Forbidden no entry. .*AZURE_STORAGE"),
        (Forbidden(code=401), PermissionError, "Forbidden no entry. .*GOOGLE_APPLICATION"),
        (OSError("Forbidden: b/o"), PermissionError, "OSError Forbidden: b/o. .*GOOGLE_APPLICATION"),
        (type("ProfileNotFound", (Exception,), {})("none"), PermissionError, "ProfileNotFound none. .*~/.aws"),
        (ValueError("Invalid endpoint"), ValueError, "Invalid endpoint. Check the bucket, and AWS_ENDPOINT_URL"),
        (type("ClientConnectorCertificateError", (OSError,), {})("no"), OSError, "attempts: 1.*Set SSL_CERT_FILE"),
        (FileNotFoundError(), FileNotFoundError, "does not exist. Check the bucket and the path"),
    ],
)
def test_what_another_attempt_does_not_mend_ends_the_first_with_advice(
    error: Exception, expected: type[Exception], message: str
) -> None:
    def once() -> None:
        raise error

    with pytest.raises(expected, match=message):
        data.remote._retry_with_pauses(once, "s3://bucket/key")


ODD = "a b#c?d=1&e%20f%25é+g"


def small(tmp_path: Path, name: str) -> Corpus:
    """A corpus of one document, its name again and again."""
    (tmp_path / f"{name}-train.txt").write_text(name * 99)
    return shard_source(tmp_path / f"{name}-train.txt", tmp_path / "shards")


@pytest.mark.parametrize("scheme", ["http", "file", "local"])
def test_odd_names_and_their_codes_are_two_places(
    scheme: str, here: Path, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    """A folder with every odd sign, beside one that is called as its URL: neither is taken for the other."""
    place = here / "served"
    for name, folder in (("odd", ODD), ("other", quote(ODD))):
        shutil.copytree(small(here, name).folder, place / folder)
    with serving(place, Files) as address:
        root = {"http": address, "file": f"file://{place}", "local": str(place)}[scheme]
        for name, folder in (("odd", ODD), ("other", quote(ODD))):
            path = f"{root}/{folder if scheme == 'local' else quote(folder)}"
            assert list(Corpus.open(path, options(here)).iterate_originals("train")) == [name.encode() * 99]
            assert main(["shard", "source.kind=shards", f"source.path={path}"]) == 0
            capfdbinary.readouterr()
            assert main(["cat", path]) == 0
            assert capfdbinary.readouterr().out == name.encode() * 99


def test_a_run_keeps_the_url_of_its_shards(corpus: Corpus, tmp_path: Path) -> None:
    shutil.copytree(corpus.folder, tmp_path / ODD)
    url = f"file://{quote(str(tmp_path / ODD))}"
    words = [*TINY, "source.kind=shards", f"source.path={url}", f"runs_dir={tmp_path}/runs", "name=odd"]
    words += ["batch.context=8", f"loader.cache_dir={tmp_path}/cache", "validation.times=0"]
    for steps in (2, 3):  # begins, and goes on from what it wrote
        assert main(["train", "--config", "quickstart", *words, f"train.steps={steps}"]) == 0
    kept = json.loads((tmp_path / "runs/odd/corpus.json").read_text())
    assert kept["location"] == url and kept["digest"] == corpus.digest
    assert RunFolder(tmp_path / "runs/odd").open_corpus().location == url
    assert RunFolder(tmp_path / "runs/odd").load_options().source.path == url


@pytest.mark.parametrize(
    ("status", "error", "message", "tries"),
    [
        (504, OSError, r"manifest\.json cannot be fetched \(attempts: 2\)", 2),  # as EIO by s3fs, like a broken disk
        (429, OSError, r"manifest\.json cannot be fetched \(attempts: 2\)", 2),
        (400, PermissionError, "AWS_ACCESS_KEY_ID", 1),
    ],
)
def test_an_answer_of_s3_is_no_error_of_the_disk(
    status: int, error: type[OSError], message: str, tries: int, tmp_path: Path, keys: pytest.MonkeyPatch
) -> None:
    class Refusing(Files):
        def do_GET(self) -> None:
            self.send_response(status)
            self.send_header("Content-Length", "0")
            self.end_headers()

        do_HEAD = do_GET

    called = []
    read = data.remote.RemoteFolder._read_blocks
    keys.setattr(data.remote, "ATTEMPTS", 2)
    keys.setattr(data.remote.RemoteFolder, "_read_blocks", lambda *a: called.append(a) or read(*a))
    with serving(tmp_path, Refusing) as address:
        keys.setenv("AWS_ENDPOINT_URL", address)
        with pytest.raises(error, match=message):
            Corpus.open("s3://corpora/books", options(tmp_path))
    assert len(called) == tries


@pytest.mark.slow
def test_s3(corpus: Corpus, tmp_path: Path, keys: pytest.MonkeyPatch) -> None:
    server = pytest.importorskip("moto.server").ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    keys.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
    keys.setenv("AWS_DEFAULT_REGION", "us-east-1")
    try:
        import boto3
        from s3fs import S3FileSystem

        client = boto3.client("s3")
        client.create_bucket(Bucket="corpora")
        for path in corpus.folder.iterdir():
            client.upload_file(str(path), "corpora", f"books/{path.name}")
        for name, prefix in (("odd", ODD), ("other", quote(ODD))):  # which are two keys
            for path in small(tmp_path, name).folder.iterdir():
                client.upload_file(str(path), "corpora", f"{prefix}/{path.name}")
        for name, prefix in (("odd", ODD), ("other", quote(ODD))):
            found = Corpus.open(f"s3://corpora/{prefix}", options(tmp_path / "odd"))
            assert found.location == f"s3://corpora/{prefix}"
            assert list(found.iterate_originals("train")) == [name.encode() * 99]
        with pytest.raises(FileNotFoundError):
            Corpus.open("s3://corpora/a%20b", options(tmp_path / "odd"))
        remote = Corpus.open("s3://corpora/books", options(tmp_path))
        assert windows(remote, 50, options=options(tmp_path, workers=1)) == windows(corpus, 50)
        sums = [hashlib.sha256(file.read_bytes()).hexdigest() for file in (tmp_path / "cache").rglob("*.tar")]
        assert sums and {*sums} <= {shard_.sha256 for shard_ in corpus.shards}
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            keys.delenv(name)
        keys.setenv("AWS_EC2_METADATA_DISABLED", "true")
        keys.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
        S3FileSystem.clear_instance_cache()
        with pytest.raises(PermissionError, match="FSSPEC_S3_ANON=true"):
            Corpus.open("s3://corpora/books", options(tmp_path / "no keys"))
    finally:
        server.stop()


@pytest.mark.parametrize("emptied", [False, True])
def test_a_cache_that_is_deleted_or_emptied_meanwhile_is_one_again(
    corpus: Corpus, server: str, remote: Corpus, tmp_path: Path, emptied: bool
) -> None:
    remote.read(remote.shards_of("train")[0])
    (folder,) = (tmp_path / "cache").iterdir()
    for path in folder.iterdir() if emptied else [folder]:
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    for opened in (remote, Corpus.open(server, options(tmp_path))):
        check_read(opened, corpus, 1, 0)


def test_a_cache_that_is_deleted_while_the_manifest_is_fetched_is_one_again(
    corpus: Corpus, server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = data.remote.RemoteFolder.read_manifest

    def read_and_delete(self: data.remote.RemoteFolder, name: str) -> bytes:
        shutil.rmtree(self.cache.folder.parent)
        return read(self, name)

    monkeypatch.setattr(data.remote.RemoteFolder, "read_manifest", read_and_delete)
    for _ in range(2):
        remote = Corpus.open(server, options(tmp_path))
    check_read(remote, corpus, 0)


@pytest.mark.parametrize("method", ["read_manifest", "_fetch_shard"])
def test_a_cache_that_is_deleted_while_something_is_fetched_is_one_again(
    method: str, corpus: Corpus, server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetch = getattr(data.remote.RemoteFolder, method)

    def fetch_and_delete(self: data.remote.RemoteFolder, *arguments: Any) -> Any:
        fetched = fetch(self, *arguments)
        shutil.rmtree(self.cache.folder.parent)
        return fetched

    monkeypatch.setattr(data.remote.RemoteFolder, method, fetch_and_delete)
    for _ in range(2):
        check_read(Corpus.open(server, options(tmp_path)), corpus, 0, 1)


def test_a_disk_that_does_not_take_a_shard_is_named_by_the_folder_of_the_cache(remote: Corpus) -> None:
    with file_size_limit(1000), pytest.raises(OSError, match="haed-cache"):
        remote.read(remote.shards[0])
    assert "loader.cache_dir=" in format_error(OSError(errno.ENOSPC, "No space left on device"))
