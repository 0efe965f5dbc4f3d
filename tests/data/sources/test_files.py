"""Files as sources read them: links, compressed files of several streams, tars that are not whole, and what is no text."""

import bz2
import gzip
import io
import lzma
import os
import pickle
import sqlite3
import subprocess
import tarfile
import zipfile
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from data.options import SourceOptions
from data.sources.files import BLOCK, LINKS, LeftOut, is_tar, iterate_members, list_files, open_stream, zstd
from data.sources.source import make_source
from tests.data.conftest import brief, picture, tar_of
from tests.data.sources.test_audio import wav
from tests.data.sources.test_text import COMPRESS

LONG, SHORT = np.random.default_rng(0).bytes(90_000), b"\0" * 9000 + b"end" * 3000


def read(path: Path, content: bytes) -> bytes:
    path.write_bytes(content)
    with open_stream(str(path), 250) as stream:
        return stream.read()


@pytest.mark.parametrize("suffix", [".gz", ".xz", ".bz2", ".zst"])
def test_streams_one_after_the_other_lose_no_byte(tmp_path: Path, suffix: str) -> None:
    compress = COMPRESS[suffix]
    whole = compress(LONG) + compress(SHORT) + compress(SHORT)
    assert read(tmp_path / f"a{suffix}", whole) == LONG + SHORT + SHORT
    for garbage in (b"g", b"garbage behind the end of it all"):
        with pytest.raises(ValueError, match=f"a{suffix} cannot be read"):
            read(tmp_path / f"a{suffix}", whole + garbage)


FIRST = lzma.compress(LONG)


@pytest.mark.parametrize(
    "zeros", [0, 4, 400, 3, BLOCK - len(FIRST) % BLOCK, 2 * BLOCK + 4 - len(FIRST) % 4, 2 * BLOCK + 5]
)
@pytest.mark.parametrize("after", [0, 8, 6])
def test_padding_of_xz_is_what_the_tool_says(tmp_path: Path, zeros: int, after: int) -> None:
    """Between streams and at the end, also where a block is nothing but padding."""
    content = FIRST + bytes(zeros) + lzma.compress(SHORT) + bytes(after)
    tool = subprocess.run(["xz", "-dc"], input=content, capture_output=True) if Path("/usr/bin/xz").exists() else None
    good = zeros % 4 == after % 4 == 0
    assert tool is None or (tool.returncode == 0) == good
    if good:
        assert read(tmp_path / "a.xz", content) == LONG + SHORT
    else:
        with pytest.raises(ValueError, match="zeros after a stream are not padding, which is a multiple of four"):
            read(tmp_path / "a.xz", content)


ONE, MEMBER = tar_of(("a", b"x" * 700), ("b", b"x" * 700)), 512 + 1024
FLIPPED = ONE[:MEMBER] + b"!" + ONE[MEMBER + 1 :]


@pytest.mark.parametrize("kind", ["images", "audio", "webdataset"])
@pytest.mark.parametrize("content", [b"no tar " * 200, tar_of(("a.png", b"x" * 700))[:700]], ids=brief)
def test_a_damaged_tar_is_named_when_its_members_are_listed(tmp_path: Path, kind: str, content: bytes) -> None:
    (tmp_path / "a.tar").write_bytes(content)
    with pytest.raises(ValueError, match="a.tar cannot be read: (invalid header|unexpected end of data)"):
        made = make_source(SourceOptions(kind=kind, path=str(tmp_path)))
        for item in made.inputs(1 << 20, 1):
            list(made.read(item))


def test_a_tar_with_holes_is_refused(tmp_path: Path) -> None:
    """Ten kilobytes would be a gigabyte of silence."""
    member = tarfile.TarInfo("train.wav")
    member.type, member.size = tarfile.GNUTYPE_SPARSE, 512
    header = bytearray(member.tobuf(tarfile.GNU_FORMAT))
    header[386:410] = b"00000000000\0" + b"00000001000\0"  # 512 bytes at 0
    header[483:495] = b"10000000000\0"  # and a gigabyte in all
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    (tmp_path / "a.tar").write_bytes(bytes(header) + b"RIFF".ljust(512) + bytes(8192))
    with pytest.raises(ValueError, match="a.tar: train.wav is sparse"):
        list(iterate_members(str(tmp_path / "a.tar"), 250))


def describing(kind: bytes, content: bytes) -> bytes:
    """A header that describes the next one."""
    head = tarfile.TarInfo("long")
    head.type, head.size = kind, len(content)
    return head.tobuf(tarfile.GNU_FORMAT) + content + bytes(-len(content) % tarfile.BLOCKSIZE)


def test_a_tar_is_known_by_its_suffix() -> None:
    tars = ["a.tar", "a.TAR.GZ", "a.tgz", "a.tar.zst"]
    assert [name for name in (*tars, "a.tar.txt", "tar.gz") if is_tar(name)] == tars


@pytest.mark.parametrize("kind", [tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.GNUTYPE_LONGNAME])
@pytest.mark.parametrize(
    ("content", "times"), [(b"1" * 100_000, 1), (b"13 path=name\n", 3000)], ids=["a large one", "many"]
)
def test_headers_that_take_long_to_read_are_refused(kind: bytes, content: bytes, times: int, tmp_path: Path) -> None:
    (tmp_path / "a.tar").write_bytes(times * describing(kind, content) + tar_of(("a.txt", b"a")))
    with pytest.raises(ValueError, match="a.tar cannot be read: headers without a member"):
        list(iterate_members(str(tmp_path / "a.tar"), 250))


def test_the_size_that_a_header_claims_allows_no_more_headers(tmp_path: Path) -> None:
    claim = b" GNU.sparse.realsize=1000000000000\n"
    lying = describing(tarfile.XHDTYPE, b"%d%s" % (len(claim) + 2, claim)) + tar_of(("a.txt", b""))[: tarfile.BLOCKSIZE]
    long = describing(tarfile.GNUTYPE_LONGNAME, b"1" * 100_000) + tar_of(("b.txt", b"b"))
    (tmp_path / "a.tar").write_bytes(lying + long)
    with pytest.raises(ValueError, match="a.tar cannot be read: headers without a member"):
        list(iterate_members(str(tmp_path / "a.tar"), 250))


def test_long_names_are_read_in_every_format(tmp_path: Path) -> None:
    for form in (tarfile.PAX_FORMAT, tarfile.GNU_FORMAT):
        with tarfile.open(tmp_path / "a.tar", "w", format=form) as tar:
            member = tarfile.TarInfo(name := "é" * 2000)
            tar.addfile(member)
        assert [there for there, _, _ in iterate_members(str(tmp_path / "a.tar"), 250)] == [name]


@pytest.mark.parametrize("suffix", [".tar", ".tar.gz"])
@pytest.mark.parametrize(
    ("content", "message"),
    [(ONE[:MEMBER], "truncated"), (ONE[: 2 * MEMBER], "truncated"), (ONE + ONE, "more than one"), (FLIPPED, "damaged")],
    ids=brief,
)
def test_a_tar_that_is_not_one_whole_tar(tmp_path: Path, suffix: str, content: bytes, message: str) -> None:
    path = tmp_path / f"a{suffix}"
    path.write_bytes(gzip.compress(content) if suffix.endswith("gz") else content)
    with pytest.raises(ValueError, match=message):
        list(iterate_members(str(path), 250))
    path.write_bytes(gzip.compress(ONE) if suffix.endswith("gz") else ONE)
    assert [(name, size) for name, _, size in iterate_members(str(path), 250)] == [("a", 700), ("b", 700)]


def a_zip(*names: str) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for name in names:
            archive.writestr(name, "text")
    return file.getvalue()


def a_database(path: Path) -> bytes:
    with sqlite3.connect(path) as database:
        database.execute("CREATE TABLE notes (body TEXT)")
    database.close()
    return path.read_bytes()


def test_what_is_no_text_is_refused_with_advice(tmp_path: Path) -> None:
    npy = io.BytesIO()
    np.save(npy, np.zeros(3))
    cases = {
        "tar": (ONE, "is a tar.*, not text: unpack it.*source.kind=images.*source.kind=audio"),
        "zip": (a_zip("a.txt"), "is a zip"),
        "empty zip": (a_zip(), "is an empty zip.*, not text"),
        "gzip": (gzip.compress(SHORT), "compressed by gzip(, not text: rename it with .*.gz| inside.*: decompress it)"),
        "xz": (lzma.compress(SHORT), "compressed by xz"),
        "bzip2": (bz2.compress(SHORT), "compressed by bzip2"),
        "zstd": (zstd.compress(SHORT), "compressed by zstd"),
        "png": (picture("PNG"), "is a PNG.*, not text: source.kind=images"),
        "jpeg": (picture("JPEG"), "is a JPEG"),
        "gif": (picture("GIF"), "is a GIF"),
        "webp": (picture("WEBP"), "is a WebP"),
        "wav": (wav(np.zeros(3, np.int16)), "is a WAV.*, not text: source.kind=audio"),
        "pdf": (b"%PDF-1.7\n", "is a PDF"),
        "parquet": (b"PAR1\x15", "Parquet.*, not text: source.kind=datasets"),
        "sqlite": (a_database(tmp_path / "db"), "SQLite database"),
        "npy": (npy.getvalue(), "a NumPy array"),
        "pickle": (pickle.dumps({"a": 1}), "is a pickle"),
        "mp3": (b"\xff\xfa\x90\x64" + bytes(99), "is MP3"),
        "tif": (b"II+\0\x08\0\0\0" + bytes(99), "is a TIFF"),
    }
    for name, (content, message) in cases.items():
        for suffix, compress in {"": lambda content: content, ".txt.gz": gzip.compress}.items():
            path = tmp_path / f"{name}{suffix}"
            path.write_bytes(compress(content))
            with pytest.raises(ValueError, match=message):
                list(make_source(SourceOptions(kind="text", path=str(path))).inputs(1 << 20, 1))


@pytest.fixture
def linked(tmp_path: Path) -> Path:
    """A folder with links inside, out of it, to folders, in a loop and to nowhere; the path to it is a link as well."""
    real, outside = tmp_path / "real", tmp_path / "outside"
    for path in (real / "sub" / "a.txt", real / "b.txt", outside / "c.txt", outside / "deep" / "d.txt"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(str(path))
    for name, target in {
        "inside.txt": "sub/a.txt",
        "secret.txt": outside / "c.txt",
        "folder": outside,
        "sub/loop": "..",
        "sub/self": ".",
        "gone.txt": "nowhere",
    }.items():
        (real / name).symlink_to(target)
    (tmp_path / "given").symlink_to("real")
    return tmp_path / "given"


def test_links_that_lead_out_are_followed_only_when_asked(linked: Path) -> None:
    left = LeftOut(list)
    found = [file.name for file in list_files(str(linked), "**/*", "text", left_out=left)]
    assert found == ["b.txt", "inside.txt", "sub/a.txt"]
    assert {reason: sorted(names) for reason, names in left.items()} == {
        LINKS: ["folder/", "secret.txt", "sub/loop/", "sub/self/"],
        "links to nowhere": ["gone.txt"],
    }
    followed = [file.name for file in list_files(str(linked), "**/*", "text", follow_links=True)]
    assert followed == ["b.txt", "folder/c.txt", "folder/deep/d.txt", "inside.txt", "secret.txt", "sub/a.txt"]
    (linked.parent / "real" / "sub").rename(linked.parent / "sub")
    for name in ("b.txt", "inside.txt"):
        (linked / name).unlink()
    said = "has no data.*left out: 2 links to folders or out of the folder.*source.follow_links=true"
    with pytest.raises(ValueError, match=said):
        list_files(str(linked), "**/*", "text")


def test_runs_and_comparisons_in_the_folder_of_the_source_are_no_part_of_it(tmp_path: Path) -> None:
    """As after `haed run source.path=.`."""
    run = ("config.yaml", "corpus.json", "logs/log.txt")
    names = ["a.txt", *(f"runs/mine/{file}" for file in run), "runs/begun/config.yaml", "runs/begun/lock"]
    for name in (*names, "runs/comparison/comparison.html", "runs/comparison/comparison.png"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x")
    left = LeftOut(list)
    assert [file.name for file in list_files(str(tmp_path), "**/*", "text", left_out=left)] == ["a.txt"]
    assert sorted(left["made by haed"]) == ["runs/begun/", "runs/comparison/", "runs/mine/"]


def test_links_in_a_tar_are_counted(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        for name, kind in (("a.txt", tarfile.REGTYPE), ("b.txt", tarfile.LNKTYPE), ("c.txt", tarfile.SYMTYPE)):
            member = tarfile.TarInfo(name)
            member.type, member.linkname = kind, "a.txt" if kind != tarfile.REGTYPE else ""
            tar.addfile(member)
    remarks = Counter[str]()
    assert [name for name, _, _ in iterate_members(str(tmp_path / "a.tar"), 10, remarks)] == ["a.txt"]
    assert remarks == {"links in tars were left out, although they may stand for files": 2}


def test_globs(linked: Path) -> None:
    def names(path: object, pattern: str = "**/*") -> list[str]:
        return [file.name for file in list_files(str(path), pattern, "text")]

    assert names(linked, "*.txt") == ["b.txt", "inside.txt"] and names(linked, "sub/?.txt") == ["sub/a.txt"]
    assert names(linked, "**/a.txt") == ["sub/a.txt"] and names(linked / "*" / "*.txt") == ["sub/a.txt"]
    assert names(linked / "**" / "[ab].txt") == ["b.txt", "sub/a.txt"] and names(linked / "b.txt") == ["b.txt"]
    assert names(linked / "su*") == ["sub/a.txt"] == names(linked / "su*", "*.txt")  # of folders
    assert names(linked / "**" / "*.txt", "*.txt") == ["b.txt", "inside.txt"]  # both must match
    with pytest.raises(ValueError, match=r"no file there matches source.pattern=\*.md"):
        names(linked / "b.txt", "*.md")
    (linked / "[1].txt").write_text("a name like a glob")
    assert names(linked / "[1].txt") == ["[1].txt"]
    for pattern in ("/etc/*", "../outside/*", ""):
        with pytest.raises(ValueError, match="expected a glob relative to source.path"):
            names(linked, pattern)
    os.mkfifo(linked / "pipe")
    with pytest.raises(ValueError, match="neither a file nor a folder"):
        names(linked / "pipe")


def test_braces_stand_for_names_as_in_a_shell(tmp_path: Path) -> None:
    for name in ("part-000.txt", "part-001.txt", "part-002.txt", "a/x.txt", "b/x.txt", "b/y.md", "{a,b}.txt", "c.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)

    def names(path: str, pattern: str = "**/*") -> list[str]:
        return [file.name for file in list_files(f"{tmp_path}{path}", pattern, "text")]

    assert names("/part-{000..002}.txt") == ["part-000.txt", "part-001.txt", "part-002.txt"]
    assert names("/part-{002..000..2}.txt") == ["part-000.txt", "part-002.txt"]
    assert names("/{a,b}/x.txt") == ["a/x.txt", "b/x.txt"] and names("/{a,b}") == ["a/x.txt", "b/x.txt", "b/y.md"]
    assert names("/{part-00{0,1},c}.txt") == ["c.txt", "part-000.txt", "part-001.txt"]
    assert names("/{a,b}/*.md") == ["b/y.md"] and names("/*/{x,z}.txt") == ["a/x.txt", "b/x.txt"]
    assert names("", "{part-001,c}.txt") == ["c.txt", "part-001.txt"]
    assert names("/{a,b}.txt") == ["{a,b}.txt"]  # a file of just that name
    with pytest.raises(FileNotFoundError, match="2 of the 5 files or folders do not exist: .*part-003.txt, .*004"):
        names("/part-{000..004}.txt")
    for odd in ("/{a", "/a}", "/{}", "/{a}"):
        with pytest.raises(FileNotFoundError, match="no such file or folder"):
            names(odd)


@pytest.mark.parametrize(
    "braces",
    ["{0..999999999999}", "{0..9" + "9" * 5000 + "}", "{a,b}" * 17, "{a..z}" * 4, "{" + "{a,b}" * 40 + ",x}"],
    ids=["numbers", "digits", "names", "letters", "nested"],
)
def test_braces_that_stand_for_too_much_are_refused_before_anything_is_made(tmp_path: Path, braces: str) -> None:
    for path, pattern in ((f"{tmp_path}/{braces}.txt", "**/*"), (str(tmp_path), f"{braces}.txt")):
        with pytest.raises(ValueError, match="its braces expand to more than 100,000 names"):
            list_files(path, pattern, "text")


def test_what_is_empty_is_named(tmp_path: Path) -> None:
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).touch()
    with pytest.raises(ValueError, match=r"has no data: all 2 files are empty .0 bytes.: a.txt, b.txt"):
        list_files(str(tmp_path), "**/*", "text")
    with pytest.raises(ValueError, match=r"has no data: a.txt is empty .0 bytes."):
        list_files(str(tmp_path / "a.txt"), "**/*", "text")
    with pytest.raises(ValueError, match=r"has no data: no file there matches source.pattern=\*.md"):
        list_files(str(tmp_path), "*.md", "text")
