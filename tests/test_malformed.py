"""Files from strangers: whatever is wrong with them ends in a line or two of error, never in a traceback, a hang or code."""

import contextlib
import hashlib
import io
import json
import math
import pickle
import re
import shutil
import struct
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

import data.remote
from data.corpus import Corpus
from data.filesystem import CorruptFileError, write_json
from pipeline.cli import main
from pipeline.config import ConfigError, load_options
from pipeline.run.checkpoints import CorruptCheckpointError, load_checkpoint
from pipeline.run.metrics import encode_record, read_metrics
from tests.conftest import Listener, flip_bit, write_state
from tests.data.conftest import tar_of
from tests.data.test_filesystem import LAUGHS

PWNED = Path("pwned")


class Exploit:
    def __reduce__(self) -> tuple[Any, ...]:
        return PWNED.touch, ()


def replaced(content: bytes) -> Callable[[Path], None]:
    return lambda path: path.write_bytes(content) and None


@pytest.fixture
def copied(handed: Path, here: Path) -> None:
    """A copy of these, to change, in the working folder."""
    shutil.copytree(handed, here, dirs_exist_ok=True)


def cut(share: float) -> Callable[[Path], None]:
    return lambda path: path.write_bytes(path.read_bytes()[: int(path.stat().st_size * share)]) and None


def with_key(value: Any, *keys: Any) -> Callable[[Path], None]:
    """A JSON file in which `keys` lead to another value."""

    def change(path: Path) -> None:
        tree = json.loads(path.read_text())
        branch = tree
        for key in keys[:-1]:
            branch = branch[key]
        branch[keys[-1]] = value
        write_json(path, tree)  # with its checksum: a stranger can make one

    return change


def pickled_array() -> bytes:
    file = io.BytesIO()
    np.save(file, np.array([Exploit()], dtype=object), allow_pickle=True)
    return file.getvalue()


def safetensors(header: bytes, body: bytes = b"") -> Callable[[Path], None]:
    return replaced(struct.pack("<Q", len(header)) + header + body)


def resummed(path: Path) -> None:
    """The state.json beside a changed model has its sum: a stranger can make one."""
    state = json.loads((path.parent / "state.json").read_text())
    state["sha256"][path.name] = hashlib.sha256(path.read_bytes()).hexdigest()
    write_state(path.parent / "state.json", state)


def of_half_bytes(path: Path) -> None:
    content = path.read_bytes()
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    name = next(name for name, each in header.items() if name != "__metadata__" and len(each["shape"]) == 2)
    header[name] |= {"dtype": "F4", "shape": [header[name]["shape"][0], header[name]["shape"][1] * 8]}
    made = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(made)) + made + content[8 + size :])
    resummed(path)


def with_many_names(path: Path) -> None:
    tensors = load_file(path) | {f"no.parameter.{number}": torch.zeros(0) for number in range(20_000)}
    save_file(tensors, path)
    resummed(path)


JSON = {
    "empty": replaced(b""),
    "half": cut(0.5),
    "bytes": replaced(b"\xff\xfe\x00\x01"),
    "list": replaced(b"[]"),
    "null": replaced(b"null"),
    "object": replaced(b"{}"),
    "number": replaced(b"17"),
    "deep": replaced(b"[" * 100_000),
    "pickle": replaced(pickle.dumps(Exploit())),
    "gone": Path.unlink,
}
CONFIG = {
    "empty value": b"batch:\n",
    "list": b"- 1\n",
    "tabs": b"batch:\n\tcontext: 3\n",
    "bytes": b"\xff\xfe\x00",
    "code": b"name: !!python/object/apply:pathlib.Path.touch [pwned]\n",
    "bomb": LAUGHS.encode(),
    "bomb in a list": (LAUGHS + "\nsample: {prompts: *a11}\n").encode(),
    "itself": b"batch: &a\n  more: *a\n",
    "deep": b"[" * 5000,
    "unknown key": b"batches: {}\n",
    "unknown nested": b"batch: {contexts: 3}\n",
    "wrong type": b"batch: {context: many}\n",
    "section as value": b"batch: 3\n",
    "value as section": b"seed: {a: 1}\n",
    "value as list": b"runs_dir: [a]\n",
    "text as section": b"source: {path: {a: 1}}\n",
    "choice as list": b"source: {kind: [a]}\n",
    "out of range": b"batch: {context: 0}\n",
    "infinite": b"optimizer: {learning_rate: .inf}\n",
    "not a number": b"optimizer: {learning_rate: .nan}\n",
    "path as name": b"name: ../../escaped\n",
    "unknown choice": b"model: {decoder: {kind: gru}}\n",
    "duplicate": b"seed: 1\nseed: 2\n",
    "two documents": b"seed: 1\n---\nseed: 2\n",
}
FINETUNE, EVALUATE, NEIGHBOURS = ["finetune", "runs/run"], ["evaluate", "runs/run"], ["neighbours", "runs/run", "def "]
CAT, REPORT = ["cat", "corpus"], ["report", "runs/run"]
CHECKPOINT = "runs/run/finetune/checkpoints/step-*/"
TRAIN_TAR = "corpus/train-*.tar"
CASES: dict[str, tuple[str, Callable[[Path], None], list[str]]] = {}
CASES |= {f"manifest: {name}": ("corpus/manifest.json", change, CAT) for name, change in JSON.items()}
# All JSON files are read by one function, which the manifest has met with everything; of the others, what is each one's own.
JSON_FILES = {
    "runs/run/corpus.json": EVALUATE,
    CHECKPOINT + "state.json": EVALUATE,
    "runs/run/index/chunks/meta.json": NEIGHBOURS,
    "runs/run/evaluation.json": REPORT,
    "runs/run/samples.json": REPORT,
}
CASES |= {
    f"{file}: {name}": (file, JSON[name], command)
    for file, command in JSON_FILES.items()
    for name in ("half", "number", "object", "gone")
    if (command, name) != (REPORT, "gone")
}
CASES |= {
    f"config: {name}": ("config.yaml", replaced(text), ["config", "config.yaml"]) for name, text in CONFIG.items()
}
CASES |= {
    "manifest: a path outside": ("corpus/manifest.json", with_key("../secret", "shards", 0, "file"), CAT),
    "manifest: an absolute path": ("corpus/manifest.json", with_key("/etc/passwd", "shards", 0, "file"), CAT),
    "manifest: a file that is not there": ("corpus/manifest.json", with_key("train-9.tar", "shards", 0, "file"), CAT),
    "manifest: text for a number": ("corpus/manifest.json", with_key("many", "shards", 0, "chunks"), CAT),
    "manifest: a negative number": ("corpus/manifest.json", with_key(-1, "shards", 0, "samples"), CAT),
    "manifest: a number for a sum": ("corpus/manifest.json", with_key(1, "shards", 0, "sha256"), CAT),
    "manifest: an unknown split": ("corpus/manifest.json", with_key("trian", "shards", 0, "split"), CAT),
    "manifest: an unknown chunker": ("corpus/manifest.json", with_key("os", "chunker", "kind"), CAT),
    "manifest: chunks that are too long": ("corpus/manifest.json", with_key(256, "chunker", "k"), CAT),
    "manifest: another option": ("corpus/manifest.json", with_key(1, "chunker", "q"), CAT),
    "manifest: no files": ("corpus/manifest.json", with_key(math.inf, "splits", "files"), CAT),
    "manifest: names that are none": ("corpus/manifest.json", with_key([1], "splits", "files", "train"), CAT),
    "tar: empty": (TRAIN_TAR, replaced(b""), CAT),
    "tar: half": (TRAIN_TAR, cut(0.5), CAT),
    "tar: a bit": (TRAIN_TAR, partial(flip_bit, place=700), CAT),
    "tar: a path outside": (TRAIN_TAR, replaced(tar_of(("../../escaped.tokens.npy", b"x"))), CAT),
    "tar: a pickle": (TRAIN_TAR, replaced(tar_of(("0.tokens.npy", pickled_array()))), CAT),
    "model: empty": (CHECKPOINT + "model.safetensors", replaced(b""), EVALUATE),
    "model: half": (CHECKPOINT + "model.safetensors", cut(0.5), EVALUATE),
    "model: a bit": (CHECKPOINT + "model.safetensors", partial(flip_bit, place=-1), EVALUATE),
    "model: gone": (CHECKPOINT + "model.safetensors", Path.unlink, EVALUATE),
    "model: a pickle": (CHECKPOINT + "model.safetensors", replaced(pickle.dumps(Exploit())), EVALUATE),
    "model: a long header": (CHECKPOINT + "model.safetensors", replaced(struct.pack("<Q", 1 << 62)), EVALUATE),
    "model: no header": (CHECKPOINT + "model.safetensors", safetensors(b"{"), EVALUATE),
    "model: half bytes": (CHECKPOINT + "model.safetensors", of_half_bytes, EVALUATE),
    "model: many names": (CHECKPOINT + "model.safetensors", with_many_names, EVALUATE),
    "training: half": (CHECKPOINT + "training.safetensors", cut(0.5), FINETUNE),
    "training: gone": (CHECKPOINT + "training.safetensors", Path.unlink, FINETUNE),
    "latest: outside": ("runs/run/finetune/checkpoints/latest", replaced(b"../../../../etc"), ["compare", "runs/none"]),
    "index: empty": ("runs/run/index/chunks/vectors.faiss", replaced(b""), NEIGHBOURS),
    "index: half": ("runs/run/index/chunks/vectors.faiss", cut(0.5), NEIGHBOURS),
    "index: a bit": ("runs/run/index/chunks/vectors.faiss", partial(flip_bit, place=100), NEIGHBOURS),
    "index: gone": ("runs/run/index/chunks/vectors.faiss", Path.unlink, NEIGHBOURS),
    "table: half": ("runs/run/index/chunks/table.parquet", cut(0.5), NEIGHBOURS),
    "table: pickle": ("runs/run/index/chunks/table.parquet", replaced(pickle.dumps(Exploit())), NEIGHBOURS),
    "run config: another model": (
        "runs/run/config.yaml",
        lambda p: p.write_text(p.read_text().replace("ffn: 32", "ffn: 64")) and None,
        EVALUATE,
    ),
    "run config: bytes": ("runs/run/config.yaml", replaced(b"\xff\x00"), EVALUATE),
    "run config: gone": ("runs/run/config.yaml", Path.unlink, EVALUATE),
}


@pytest.mark.usefixtures("copied")
def test_what_is_whole_is_taken() -> None:
    for command in (FINETUNE, EVALUATE, NEIGHBOURS, CAT, REPORT):
        assert main(command) == 0


@pytest.mark.parametrize("case", CASES)
@pytest.mark.usefixtures("copied")
def test_a_line_or_two_of_error(case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pattern, change, command = CASES[case]
    for path in list(tmp_path.glob(pattern)) or [tmp_path / pattern]:
        change(path)
    before = set(tmp_path.parent.glob("*"))
    assert main(command) in (1, 2)
    said = capsys.readouterr().err.splitlines()
    lines = [line for line in said if not line.endswith("The checkpoint before it is tried")]
    assert 1 <= len(lines) <= 2 and lines[-1].startswith("error: ") and len(lines[-1]) < 600, lines
    assert "--debug prints the traceback" not in lines[-1] and not PWNED.exists()
    assert pattern != "config.yaml" or pattern in lines[-1] or case == "config: path as name"
    assert set(tmp_path.parent.glob("*")) == before


@pytest.mark.parametrize(
    ("keys", "value"),
    [
        (["step"], ""),
        (["step"], 1e400),
        (["phase"], {"seconds": math.inf}),
        (["phase", "seconds"], math.inf),
        (["phase", "flops"], [1]),
        (["first", "step"], "many"),
        (["first", "flops"], 10**400),
        (["validated_at"], [[]]),
        (["validated_at", "step"], [1]),
        (["best"], "low"),
        (["identity"], 1),
        (["options"], []),
    ],
)
@pytest.mark.usefixtures("copied")
def test_a_state_of_other_types_is_a_damaged_checkpoint(
    keys: list[str], value: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for path in tmp_path.glob("runs/*/*/checkpoints/*/state.json"):
        with_key(value, *keys)(path)
        write_state(path, json.loads(path.read_text()))
    for command in (EVALUATE, FINETUNE, REPORT, ["compare", "runs/run", "runs/other"], ["profile", "runs/run"]):
        status, said = main(command), capsys.readouterr().err
        assert "--debug prints the traceback" not in said
        assert (status, "is damaged: " in said) == (1, True) or command[0] in ("report", "compare", "profile")


@pytest.mark.parametrize(("name", "value"), [("step", None), ("step", math.inf), ("bits", 10**400), ("bits", "low")])
def test_figures_that_no_float_holds_are_a_damaged_line(name: str, value: Any, tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_bytes(encode_record({"step": 1, "bits": 1.0} | {name: value}))
    with pytest.raises(CorruptFileError, match="metrics.jsonl, line 1 is damaged"):
        read_metrics(tmp_path / "metrics.jsonl")


@pytest.mark.parametrize("address", ["dask://HOST::file:///any", "http://me:pw@HOST/x"])
def test_addresses_in_a_strangers_run_are_not_opened(
    handed: Path, address: str, listener: Listener, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(handed / "runs", here / "runs")
    url = address.replace("HOST", listener.host)
    config = here / "runs/run/config.yaml"
    with_key(url, "location")(here / "runs/run/corpus.json")
    assert main(EVALUATE) == 1
    config.write_text(re.sub("path: .*", f"path: '{url}'", config.read_text()))
    assert main(["shard", "runs/run"]) == 2
    assert main(EVALUATE) == 2
    assert "pw" not in capsys.readouterr().err and listener.contacts == 0


def test_an_address_in_a_run_is_said_before_it_is_opened(
    handed: Path, listener: Listener, here: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(data.remote, "ATTEMPTS", 1)
    shutil.copytree(handed / "runs", here / "runs")
    url = "http://127.0.0.1:1/x"
    with_key(url, "location")(here / "runs/run/corpus.json")
    assert main(EVALUATE) == 1
    assert f"corpus.json says where the shards are: {url}" in caplog.text
    assert main(["shard", "runs/run", "source.kind=shards", f"source.path={url}"]) == 1
    assert f"reading shards from {url}" in caplog.text


@pytest.mark.parametrize(
    ("name", "most", "command"),
    [
        ("runs/run/config.yaml", 1 << 20, EVALUATE),
        ("runs/run/evaluation.json", 64 << 20, REPORT),
        ("runs/run/finetune/metrics.jsonl", 256 << 20, REPORT),
        ("corpus/manifest.json", 256 << 20, CAT),
    ],
)
@pytest.mark.usefixtures("copied")
def test_a_file_that_is_larger_than_its_kind_may_be_is_not_parsed(
    name: str, most: int, command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with open(name, "r+b") as file:
        file.truncate(most + 1)
    assert main(command) != 0
    assert f"{Path(name).name} has more than {most:,} bytes" in capsys.readouterr().err


@pytest.mark.usefixtures("copied")
def test_no_other_file_is_opened_than_those_of_a_checkpoint(tmp_path: Path) -> None:
    """A file that is opened is summed, and refused for its sum."""
    (tmp_path / "secret").write_text("SECRET")
    for path in tmp_path.glob(CHECKPOINT + "state.json"):
        state = json.loads(path.read_text())
        outside = dict.fromkeys(("../../../../../secret", str(tmp_path / "secret"), "state.json"), "0" * 64)
        write_state(path, state | {"sha256": state["sha256"] | outside})
    for command in (FINETUNE, EVALUATE):
        assert main(command) == 0


KEYS = st.sampled_from(["batch", "batch.context", "model.decoder.kind", "seed", "pretrain", "name", "x", "iem.bank"])
YAML = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_subnormal=False)  # torch flushes them in this process
    | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS | st.text(max_size=5), inner, max_size=3),
    max_leaves=12,
)


@given(
    (st.dictionaries(KEYS, YAML, max_size=4) | YAML).map(lambda tree: json.dumps(tree).encode())
    | st.binary(max_size=200)
)
def test_any_yaml_and_any_bytes_are_a_configuration_or_a_short_error(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "any.yaml"
    path.write_bytes(content)
    try:
        load_options(path)
    except ConfigError as error:
        assert 0 < len(" ".join(str(error).split())) < 1000


@given(st.lists(st.tuples(KEYS, st.text(max_size=12)), max_size=3))
def test_any_override_is_taken_or_refused(pairs: list[tuple[str, str]]) -> None:
    try:
        load_options(None, [f"{key}={value}" for key, value in pairs])
    except ConfigError as error:
        assert str(error)


FIELDS = st.sampled_from(["digest", "chunker", "shards", "fitted", "kind", "k", "file", "split", "sha256", "chunks"])
MANIFESTS = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(FIELDS, inner, max_size=5),
    max_leaves=15,
)


@given(st.dictionaries(FIELDS, MANIFESTS, max_size=5), st.dictionaries(FIELDS, MANIFESTS, max_size=9))
def test_any_tree_is_a_manifest_or_an_error(tree: dict[str, Any], shard: dict[str, Any]) -> None:
    for manifest in (tree, {"digest": "x", "chunker": {"kind": "words", "k": 4}, "shards": [shard]}):
        with contextlib.suppress(ValueError):
            Corpus(Path("nowhere"), manifest).split_counts("train")


@given(st.binary(max_size=300), st.binary(max_size=300))
def test_any_bytes_are_a_checkpoint_or_damaged(tmp_path: Path, state: bytes, model: bytes) -> None:
    (tmp_path / "state.json").write_bytes(state)
    (tmp_path / "model.safetensors").write_bytes(model)
    with pytest.raises(CorruptCheckpointError):
        load_checkpoint(tmp_path, training=False)
