"""Files that are read back: what is no file of ours ends in a line that names it, at once and in little memory."""

import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from data import filesystem
from data.filesystem import (
    DEEPEST,
    NODES,
    CorruptFileError,
    OpenedFile,
    encode_checked_json,
    file_lock,
    open_file,
    open_own,
    parse_json,
    read_bytes,
    read_json,
    read_lock_holder,
    read_yaml,
    remove_unlocked_files,
    write_json,
)
from tests.data.conftest import brief, file_size_limit


def link(target: str | Path) -> Callable[[Path], None]:
    return lambda path: path.symlink_to(target)


NO_FILES: dict[str, tuple[Callable[[Path], None], str]] = {
    "pipe": (lambda path: os.mkfifo(path), "is a named pipe"),
    "zero": (link("/dev/zero"), "is a device"),
    "log of the kernel": (link("/proc/kmsg"), "is made by the kernel"),
    "folder": (Path.mkdir, "is a folder"),
}


@pytest.mark.parametrize("kind", NO_FILES)
def test_what_is_no_file_is_refused_at_once(tmp_path: Path, kind: str) -> None:
    make, said = NO_FILES[kind]
    make(path := tmp_path / "state.json")
    with pytest.raises(CorruptFileError, match=f"state.json {said}, not a file"):
        read_bytes(path, 100)


def test_a_file_has_no_more_bytes_than_its_kind_may(tmp_path: Path) -> None:
    path = tmp_path / "latest"
    path.write_bytes(bytes(100))
    assert read_bytes(path, 100) == bytes(100)
    path.write_bytes(bytes(101))
    with pytest.raises(CorruptFileError, match="latest has more than 100 bytes"):
        read_bytes(path, 100)


def test_a_link_may_not_lead_out_but_the_folder_may_be_one(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("SECRET")
    run = tmp_path / "disk" / "run"
    run.mkdir(parents=True)
    (run / "own").write_text("own")
    (run / "alias").symlink_to("own")
    (run / "out").symlink_to("../../secret")
    (tmp_path / "runs").symlink_to("disk")
    through = tmp_path / "runs" / "run"
    assert read_bytes(through / "own", 9, through) == read_bytes(through / "alias", 9, through) == b"own"
    with pytest.raises(CorruptFileError, match="out is a link to .*secret, outside"):
        read_bytes(through / "out", 9, through)


def test_an_error_of_the_disk_names_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    path = Path("/proc/self/mem")  # a bad sector is read like that
    monkeypatch.setattr(filesystem, "_kernel_devices", set)
    with pytest.raises(OSError, match="Input/output error: '/proc/self/mem'"):
        read_bytes(path, 100)
    with open_file(path) as file, pytest.raises(OSError, match="Input/output error: 'shard.tar'"):
        OpenedFile("shard.tar", file).read_range(0, 10)


def test_a_lock_that_the_disk_has_no_room_for_is_named(tmp_path: Path) -> None:
    with file_size_limit(0), pytest.raises(OSError) as raised, file_lock(tmp_path / "lock"):
        pass
    assert raised.value.filename == str(tmp_path / "lock") and not list(tmp_path.iterdir())


def test_a_file_that_is_cut_while_it_is_open_is_damaged(tmp_path: Path) -> None:
    path = tmp_path / "vectors"
    path.write_bytes(bytes(range(100)))
    with open_file(path) as file:
        opened = OpenedFile(path, file)
    assert opened.read_range(90, 10) == bytes(range(90, 100))
    os.truncate(path, 95)
    with pytest.raises(CorruptFileError, match="vectors was truncated while it was open: it ends at byte 95"):
        opened.read_range(90, 10)


def test_what_is_written_is_no_link(tmp_path: Path) -> None:
    """The lock of a run that leads to a file of its owner would have it overwritten."""
    (tmp_path / "precious").write_text("mine")
    (tmp_path / "lock").symlink_to("precious")
    with pytest.raises(CorruptFileError, match="lock is a link"), file_lock(tmp_path / "lock"):
        raise AssertionError
    os.mkfifo(tmp_path / "metrics.jsonl")
    with pytest.raises(CorruptFileError, match="metrics.jsonl is not a file"):
        open_own(tmp_path / "metrics.jsonl", os.O_WRONLY | os.O_CREAT)
    assert (tmp_path / "precious").read_text() == "mine"


@pytest.mark.parametrize("kind", NO_FILES)
def test_locks_and_leftovers_that_are_no_files_are_waited_for_by_nobody(tmp_path: Path, kind: str) -> None:
    NO_FILES[kind][0](path := tmp_path / ".x.partial")
    assert read_lock_holder(path) is None
    remove_unlocked_files([path])
    assert os.path.lexists(path)
    with pytest.raises((CorruptFileError, OSError), match="partial"), file_lock(path):
        raise AssertionError


@pytest.mark.parametrize(
    "content",
    [b"[" * 10**6, b'{"a":' * 10**6, b'["' + b"[" * 100 + b'",' + b"[" * 10**5, b'"\\"' + b"[" * 10**6],
    ids=brief,
)
def test_deep_json_never_meets_the_parser(content: bytes) -> None:
    with pytest.raises(CorruptFileError, match="x.json is damaged"):
        parse_json(content, "x.json")


def test_brackets_in_texts_of_json_count_for_nothing() -> None:
    value = {"text": "[" * 1000 + '"{' * 1000, "more": [["]"]]}
    assert parse_json(json.dumps(value).encode(), "x") == value
    assert parse_json("[" * DEEPEST + "]" * DEEPEST, "x")


LAUGHS = "\n".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9) if i else 'x'}]" for i in range(12))


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("[" * 500, "levels deep"),
        ("[" * 10**5, "levels deep"),  # newer versions of libyaml refuse 1,000 themselves
        ("{a: " * 10**5, "levels deep"),
        ("- " * 10**5, "levels deep"),
        ("\n".join(" " * i + "a:" for i in range(1000)), "levels deep"),
        ("[" * 10**5 + "]" * 10**5, "levels deep"),
        (LAUGHS, f"more than {NODES:,} values"),
        ("&a [*a]", f"more than {NODES:,} values"),
        ("[x]\n---\n" * 20_000, f"more than {NODES:,} values"),
    ],
    ids=brief,
)
def test_no_yaml_chokes_a_parser(content: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(content)
    with pytest.raises(CorruptFileError, match=f"config.yaml.*{said}"):
        read_yaml(tmp_path / "config.yaml")


@pytest.mark.parametrize("content", ["a: [1, 2", "\0", "a:\n\tb", "a: &x [1, 2]\nb: *x\nc: &y z\nd: *y\n", ""])
def test_yaml_with_anchors_is_taken_and_what_is_none_is_left_to_its_reader(content: str, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(content)
    assert read_yaml(tmp_path / "config.yaml") == content


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_subnormal=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=10,
)


@given(st.dictionaries(st.text(max_size=8), VALUES, max_size=5), st.randoms(use_true_random=False))
def test_what_was_written_is_read_and_what_was_changed_is_not(
    tmp_path: Path, value: dict[str, Any], chance: random.Random
) -> None:
    path, wanted = tmp_path / "evaluation.json", {name: each for name, each in value.items() if name != "checksum"}
    content = bytearray(encode_checked_json(value))
    path.write_bytes(content)
    assert read_json(path) == wanted
    content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
    path.write_bytes(content)
    try:
        assert read_json(path) == wanted  # a blank is another
    except CorruptFileError as error:
        assert "evaluation.json" in str(error)


def test_names_that_are_no_utf8_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "manifest.json"
    write_json(path, {"\udc80": ["\udcff", "é"], "3": (1, 2)})
    assert read_json(path) == {"\udc80": ["\udcff", "é"], "3": [1, 2]} and "é".encode() in path.read_bytes()
