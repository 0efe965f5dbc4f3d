"""Addresses: what is opened, what is shown of them, and that nothing is contacted otherwise; netrc at a real server."""

import base64
import logging
import re
from pathlib import Path

import fsspec
import pytest

from data.corpus import Corpus
from data.options import LoaderOptions
from data.urls import check_folder, check_scheduler, check_url, guard_fsspec, redact_urls
from pipeline.cli import main
from tests.conftest import Listener
from tests.data.conftest import Files, serving, shard_source

# HOST is a port that listens.
REFUSED = [
    "dask://HOST::file:///any",
    "dask://HOST",
    "DASK://HOST/x",
    "dask::file:///any",
    "simplecache::http://HOST/x",
    "file::dask://HOST",
    "http://HOST/x::dask://HOST",
    "ftp://HOST/x",
    "sftp://HOST/x",
    "webhdfs://HOST/x",
    "reference://x",
    "memory://x",
    "github://org:repo@/x",
    " http://HOST/x",
    "http://HOST/\nx",
    "http://[::1]:1/x",
    "http://HOST\\@elsewhere/x",
    "http://",
    "http://name:99999/x",
    "://HOST",
]
SECRET = [
    "http://me:hunter2@HOST/x",
    "http://hunter2@HOST/x",
    "HTTPS://me:hunter2@HOST/x",
    "http://me:hunter2/3@HOST/x",
    "http://me:hun@ter2@HOST/x",
    "http://me:?hunter2@HOST/x",
    "http://me%3Ahunter2%40HOST/x",
    "s3://KEY:hunter2@bucket/x",
    "file://me:hunter2@HOST/x",
    "http://HOST/x?X-Amz-Credential=hunter2&X-Amz-Signature=hunter2",
    "https://HOST/x?sv=1&sig=hunter2",
    "http://HOST/x?token=hunter2",
    "http://HOST/x;token=hunter2",
    "az://container/x?sig=hunter2",
]


@pytest.mark.parametrize("url", [*REFUSED, *SECRET])
def test_nothing_is_contacted(url: str, listener: Listener, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    url = url.replace("HOST", listener.host)
    with pytest.raises(ValueError) as caught:
        Corpus.open(url)
    said = str(caught.value)
    if url in (REFUSED[0].replace("HOST", listener.host), SECRET[0].replace("HOST", listener.host)):
        for kind in ("shards", "text", "datasets"):
            assert main(["shard", f"source.kind={kind}", f"source.path={url}"]) == 2
    assert main(["cat", url]) == 1
    said += capsys.readouterr().err
    assert "%" in url or "hunter2" not in said, said
    assert "hunter2" not in url or re.search(r"netrc.*AWS_SECRET_ACCESS_KEY.*Prefect", said)  # to use instead
    assert listener.contacts == 0 and not list(here.iterdir())


@pytest.mark.parametrize(
    "url",
    ["http://h/x", "https://h:8000/x/y", "s3://bucket/x@y", "gs://b/x", "az://b/x", "HTTP://h/x/"]
    + ["http://h/a%20b%23c%3Fd%25é", "file:///x%20y%23%3F%2520", "file://localhost/x"]
    + ["s3://b/a b#c?d%20%zz\\", "gs://b/?a=b", "az://b/é ", "s3://b/a?b=c d"],
)
def test_plain_addresses_are_opened(url: str) -> None:
    assert check_url(url) == url.replace("HTTP", "http").rstrip("/")
    assert check_url(check_url(url)) == check_url(url)


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("http://h/a b", "has a blank. Write %20 instead, as in every URL"),
        ("file:///a b", "has a blank. Write %20 instead"),
        ("http://h/a#b", "has a #. Write %23"),
        ("file:///a#b", "has a #. Write %23"),
        ("file:///a?b", r"has a \?. Write %3F"),
        ("http://h/a?b", "Leave it out, and write %3F for a . in a name"),
        ("http://h/100%", "a % that begins no code. Write %25"),
        ("file:///%zz", "a % that begins no code. Write %25"),
        ("file:///a%00", "NUL byte"),
        ("file://host/a", "Use file:/// and the absolute path"),
        ("file://a/b", "Use file:///"),
        ("s3://b/x?versionId=1", "names a version"),
        ("s3://b/x?X-Amz-Signature=hunter2", "has a query or signature"),
        ("gs://b/x?a=1&x-goog-signature=hunter2", "has a query or signature"),
        ("s3://a b/x", "is not a URL"),
        ("s3://me:hun ter2@b/x", "is not a URL"),
    ],
)
def test_what_an_address_cannot_hold_has_advice(url: str, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        check_url(url)
    assert "hunter2" not in str(caught.value) and "ter2" not in str(caught.value)


def test_a_run_at_a_url_is_refused_without_its_password(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "finetune.start_from=http://me:hunter2@h/x?sig=hunter2"]) == 2
    said = capsys.readouterr().err
    assert "is a URL. Use a run" in said and "hunter2" not in said


def test_what_is_shown_of_an_address() -> None:
    text = "403, url='https://me:pw@host/a?X-Amz-Signature=abc&part=2', then s3://k:s@b and a@b.c and http://h:1/x"
    shown = "403, url='https://***@host/a?X-Amz-Signature=***&part=2', then s3://***@b and a@b.c and http://h:1/x"
    assert redact_urls(text) == shown
    assert redact_urls(str(Path("https://me:pw@host/data"))) == "https:/***@host/data"  # as a path


@pytest.mark.parametrize("folder", ["s3://b/x", "s3:/b/x", "S3://u:pw@b", "file:///tmp/x", "./s3://b", "dask://h::x"])
def test_a_url_is_no_folder_to_write_to(folder: str, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for option in ("shards_dir", "runs_dir", "loader.cache_dir"):
        assert main(["shard", f"{option}={folder}"]) == 2
        said = capsys.readouterr().err
        assert all(words in said for words in (option, "a folder of this machine", "source.kind=shards"))
        assert "pw" not in said
    for command in (["compare", "a", "--runs-dir", folder], ["compare", "a", "--output", folder]):
        assert main(command) == 2 and "a folder of this machine" in capsys.readouterr().err
    with pytest.raises(ValueError, match="a folder of this machine"):
        shard_source(".", Path(folder))
    assert not list(here.iterdir())
    check_folder("C:x/y:z", "shards_dir")


@pytest.mark.parametrize(
    "address", ["dask://h:1", "inproc://x", "tcp://u:pw@h:1", "ws://h:1", "h", "http://h:1", "a::b:1"]
)
def test_a_scheduler_is_a_host_and_a_port(address: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", f"launcher.dask={address}"]) == 2
    said = capsys.readouterr().err
    assert "tcp://HOST:PORT" in said and "pw" not in said
    for good in ("local", "tcp://h.example:8786", "tls://h:1", "127.0.0.1:8786", "tcp://[::1]:8786"):
        assert check_scheduler(good) == good


def test_a_data_set_does_not_lead_elsewhere(listener: Listener, tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    (tmp_path / "beside.jsonl").write_text('{"text": "of somebody else"}\n')
    addresses = (f"dask://{listener.host}::file:///any.txt", f"http://{listener.host}/x.jsonl")
    for number, place in enumerate((*addresses, "../beside.jsonl", str(tmp_path / "beside.jsonl"))):
        folder = tmp_path / str(number)
        folder.mkdir()
        files = f'data_files:\n  - split: train\n    path: "{place}"'
        (folder / "README.md").write_text(f"---\nconfigs:\n- config_name: default\n  {files}\n---\n")
        with pytest.raises(ValueError, match="README.md names .*, which is outside of its folder"):
            shard_source(folder, tmp_path / "shards", "datasets")
    guard_fsspec()
    for protocol in ("dask", "ftp"):
        with pytest.raises(ValueError, match="other schemes than http, https"):
            fsspec.filesystem(protocol)
    assert listener.contacts == 0


class Guarded(Files):
    """Serves files to me with my password."""

    def do_GET(self) -> None:
        if self.headers.get("Authorization") == "Basic " + base64.b64encode(b"me:hunter2").decode():
            super().do_GET()
        else:
            self.send_error(401)

    do_HEAD = do_GET


def test_netrc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    (tmp_path / "train.txt").write_text("some words\n" * 100)
    options = LoaderOptions(cache_dir=str(tmp_path / "cache"))
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    with serving(shard_source(tmp_path / "train.txt", tmp_path / "shards").folder, Guarded) as address:
        with pytest.raises(PermissionError, match="cannot be read.*401.*netrc"):
            Corpus.open(address, options)
        (tmp_path / "netrc").write_text("machine 127.0.0.1 login me password hunter2\n")
        (tmp_path / "netrc").chmod(0o600)
        remote = Corpus.open(address, options)
        assert b"".join(remote.iterate_originals("train")) == b"some words\n" * 100
        (tmp_path / "netrc").write_text("default login me password hunter2\n")
        assert Corpus.open(address, options).digest == remote.digest
    assert f"reading shards from {address}" in caplog.text and "hunter2" not in caplog.text
