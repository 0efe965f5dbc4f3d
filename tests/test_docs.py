"""The commands and examples of docs/how-to and docs/reference, as they stand there; tests that documents name."""

import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import tarfile
import tomllib
import urllib.request
import wave
from collections.abc import Iterable, Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import webdataset
import yaml
from PIL import Image

from data.build import shard
from data.corpus import Corpus
from data.options import ChunkerOptions, ShardOptions, SourceOptions
from data.shards import CorruptShardError
from pipeline.arguments import parse_arguments
from pipeline.cli import main
from pipeline.commands import COMMANDS
from tests.conftest import TINY
from tests.flows.api import PATIENCE, until

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
ENVIRONMENT = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
# Commands that do not end by themselves, or are programs of others, and the tests that start them.
ELSEWHERE = {
    "haed explore quickstart": "tests/pipeline/web/test_explore.py",
    "tensorboard --logdir runs/quickstart/analysis/projector": "tests/pipeline/analysis/test_map.py",
    "tensorboard --logdir runs": "tests/pipeline/run/test_trackers.py",
    "pip install 'haed[mlflow]'": "tests/pipeline/run/test_trackers.py",
    "haed run --config quickstart tracking=mlflow": "tests/pipeline/run/test_trackers.py",
    "pip install 'haed[wandb]'": "tests/pipeline/run/test_trackers.py",
    "haed run --config quickstart tracking=wandb": "tests/pipeline/run/test_trackers.py",
    "haed serve": "tests/flows/test_serve.py",
    "haed serve --no-server": "tests/flows/test_environment.py",
    "haed serve --trainings 2": "tests/flows/test_ends.py",
    'haed serve --cron "0 2 * * *" --config quickstart name="nightly-{date}"': "tests/flows/test_operator.py",
    "haed serve --host 0.0.0.0 --allowed-host haed.example.org": "tests/flows/test_private.py",
    "prefect deployment ls": "tests/flows/test_serve.py",
    "prefect deployment inspect report/report-haed-de67": "tests/flows/test_serve.py",
    "prefect deployment run report/report-haed-de67 -p run=quickstart --watch": "tests/flows/test_serve.py",
    "prefect work-pool create gpus --type process": "tests/flows/test_serve.py",
    "haed deploy --pool gpus --limit 4": "tests/flows/test_operator.py",
    "prefect worker start --pool gpus": "tests/flows/test_serve.py",
    "haed deploy --pool cluster --image registry.example.org/haed:1 --job-variable memory=16Gi": (
        "tests/flows/test_operator.py"
    ),
}


def read_blocks(page: str, language: str) -> list[str]:
    """The blocks of code of a page."""
    return re.findall(rf"```{language}\n(.*?)```", (DOCS / page).read_text(encoding="utf-8"), re.DOTALL)


def read_commands(page: str) -> list[str]:
    """The lines of the blocks of bash of a page, without what is set in the environment."""
    lines = [line for block in read_blocks(page, "bash") for line in block.splitlines()]
    return [line for line in lines if not line.startswith("export ")]


DATA, FORMATS = "how-to/use-your-own-data.md", "reference/file-formats.md"
SERVED = ("how-to/run-with-prefect.md", "how-to/deploy-for-a-team.md", "how-to/track-runs.md")
ASKED = ("how-to/explore-a-run.md", "how-to/vectors-in-faiss-and-pandas.md")


def python(page: str, part: str) -> str:
    """The one block of Python of a page with this in it."""
    (block,) = [each for each in read_blocks(page, "python") if part in each]
    return block


def bash(command: str, folder: Path, **environment: str) -> str:
    done = subprocess.run(
        ["bash", "-e", "-c", command], cwd=folder, env=ENVIRONMENT | environment, capture_output=True, text=True
    )
    assert done.returncode == 0, f"{command}: {done.stderr[-2000:]}"
    return done.stdout


def make_sources(place: Path) -> None:
    """A source of each kind that the page on data reads."""
    import datasets

    for name in ("my-texts", "pictures", "recordings", "tars"):
        (place / name).mkdir()
    for name in ("letter", "diary"):
        (place / "my-texts" / f"{name}.txt").write_text("A line of text.\n\n" * 2000)
    (place / "reviews.jsonl").write_text("".join(f'{{"body": "Review {i}. Good."}}\n' for i in range(100)))
    for number in range(40):
        Image.new("RGB", (40, 50), (5 * number, 0, 0)).save(place / "pictures" / f"{number}.png")
        with wave.open(str(place / "recordings" / f"{number}.wav"), "wb") as file:
            file.setparams((1, 2, 8000, 0, "NONE", ""))
            file.writeframes(np.full(1000, number, "<i2").tobytes())
    for split in ("train", "test"):
        with tarfile.open(place / "tars" / f"{split}-000.tar", "w") as tar:
            for number in range(20):
                member = tarfile.TarInfo(f"{number:04}.txt")
                member.size = len(content := f"Sample {number} of {split}. ".encode() * 20)
                tar.addfile(member, BytesIO(content))
    rows = datasets.Dataset.from_dict({"text": [f"Row {number}. " * 20 for number in range(100)]})
    datasets.DatasetDict(train=rows, test=rows.select(range(10))).save_to_disk(place / "saved-data-set")


@pytest.mark.slow
def test_the_commands_on_data_and_the_loader(tmp_path: Path) -> None:
    make_sources(tmp_path)
    blocks = read_blocks(DATA, "bash")
    assert len(blocks) >= 5
    for block in blocks:
        bash(block, tmp_path)
    made = [Corpus.open(each) for each in sorted(tmp_path.glob("shards/*-*"))]
    kinds = ["text", "text", "jsonl", "stdin", "images", "audio", "webdataset", "datasets"]
    assert sorted(corpus.manifest["source"]["kind"] for corpus in made) == sorted(kinds)
    assert (tmp_path / "valid.bytes").stat().st_size > 1000
    (words,) = [each for each in tmp_path.glob("shards/my-texts-*") if Corpus.open(each).options.kind == "words"]
    example = python(DATA, "import Loader\n\ncorpus").replace("NAME-DIGEST", words.name)
    (tmp_path / "example.py").write_text(example)
    assert "(4, 128, 12) (4, 128) {'epoch': 0, 'windows': 4, 'began': 0}" in bash("python example.py", tmp_path)
    (tmp_path / "torch_example.py").write_text(python(DATA, "DataLoader").replace("NAME-DIGEST", words.name))
    assert bash("python torch_example.py", tmp_path) == "torch.Size([4, 128, 12])\n" * 2


@pytest.mark.slow
@pytest.mark.usefixtures("here")
def test_the_commands_that_ask_a_run(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run.rename(run.with_name("quickstart"))
    commands = [line for page in ASKED for line in read_commands(page) if line not in ELSEWHERE]
    addresses = [shlex.split(line)[1] for line in commands if line.startswith("curl ")]
    assert len(commands) > 15 and len(addresses) == 5
    for command in commands:
        if not command.startswith("curl "):
            program, *words = shlex.split(command)
            assert program == "haed" and main(words) == 0, f"{command}: {capsys.readouterr().err[-2000:]}"
    explore = [sys.executable, "-m", "pipeline", "explore", "quickstart", "threads=1", "--port", "0"]
    with subprocess.Popen(explore, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        served = process.stdout.readline().split()[0].rstrip("/")
        for address in addresses:
            with urllib.request.urlopen(address.replace("http://127.0.0.1:7300", served), timeout=PATIENCE) as answer:
                assert answer.headers["Content-Type"] == "application/json" and b"error" not in answer.read()[:10]
        process.kill()


@pytest.mark.slow
def test_the_commands_that_resume(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With steps in place of seconds."""
    (here / "my-texts").mkdir()
    (here / "my-texts" / "diary.txt").write_text("A line of text.\n\n" * 2000)
    steps = {"pretrain.seconds=30": "pretrain.steps=3", "pretrain.seconds=35": "pretrain.steps=5"}
    commands = read_commands("how-to/resume-and-recover.md")
    assert len(commands) == 5
    for command in commands:
        _, *words = shlex.split(command)
        begins = TINY if words[:2] == ["pretrain", "--config"] else []
        assert main([*words[:1], *begins, *(steps.get(word, word) for word in words[1:])]) == 0, capsys.readouterr().err
    latest = here / "runs/mine/pretrain/checkpoints/latest"
    assert latest.read_text().strip() == "step-00000005"


@pytest.mark.slow
def test_the_commands_that_read_shards_elsewhere(
    text: Path, sharded: Path, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From moto's S3 server, and from the HTTP server that the page starts, on another port."""
    pytest.importorskip("s3fs")
    boto3 = pytest.importorskip("boto3")
    server = pytest.importorskip("moto.server").ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    (corpus,) = sharded.glob("*-*")
    shutil.copytree(corpus, here / "shards" / "NAME-DIGEST")
    keys = {"AWS_ACCESS_KEY_ID": "testing", "AWS_SECRET_ACCESS_KEY": "testing", "AWS_DEFAULT_REGION": "us-east-1"}
    keys["AWS_ENDPOINT_URL"] = "http://{}:{}".format(*server.get_host_and_port())
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        port = str(bound.getsockname()[1])
    upload, from_s3, trains, serves, from_http = read_commands("how-to/read-shards-from-s3.md")
    for name, value in keys.items():
        monkeypatch.setenv(name, value)
    serving = subprocess.Popen(shlex.split(serves.replace("8000", port)), stderr=subprocess.DEVNULL)
    try:
        client = boto3.client("s3")
        client.create_bucket(Bucket="my-bucket")
        assert upload == "aws s3 cp --recursive shards/NAME-DIGEST s3://my-bucket/NAME-DIGEST"
        for path in corpus.iterdir():
            client.upload_file(str(path), "my-bucket", f"NAME-DIGEST/{path.name}", {"ACL": "public-read"})
        original = (text / "test-queue.py").read_text()
        assert bash(from_s3, here, **keys) == original
        without = f"unset AWS_ACCESS_KEY_ID AWS_SECRET_ACCESS_KEY; export FSSPEC_S3_ANON=true; {from_s3}"
        assert "export FSSPEC_S3_ANON=true\n" in read_blocks("how-to/read-shards-from-s3.md", "bash")
        assert bash(without, here, **keys) == original
        program, stage, *words = shlex.split(trains)
        assert (program, stage) == ("haed", "run")  # of whose stages the first that trains is enough here
        assert main(["pretrain", *words, *TINY]) == 0
        until(PATIENCE, lambda: urllib.request.urlopen(f"http://127.0.0.1:{port}/").status == 200)
        assert bash(from_http.replace("8000", port), here) == original
        (example,) = read_blocks("how-to/read-shards-from-s3.md", "python")
        exec(example.replace("8000", port), scope := dict[str, Any]())
        assert scope["corpus"].split_counts("train").documents == 2
    finally:
        server.stop()
        serving.kill()
        serving.wait()


@pytest.mark.parametrize("page", SERVED)
def test_the_commands_that_serve_are_started_by_other_tests_and_parsed(page: str) -> None:
    from flows.commands import COMMANDS as OF_FLOWS

    commands = read_commands(page)
    assert len(commands) >= 3 and all((ROOT / ELSEWHERE[command]).is_file() for command in commands)
    for command in commands:
        program, *words = shlex.split(command)
        if program == "haed":
            assert parse_arguments(words, "haed", (*COMMANDS, *OF_FLOWS)).command == words[0]


@pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning"
)  # webdataset leaves files to the collector
@pytest.mark.filterwarnings("ignore:This DataLoader will create")  # two workers on one core
def test_documents_are_read_with_webdataset_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = {"train-a.txt": "é" * 1_200_000, "train-b.txt": "some words\n", "train-c.txt": "more of them " * 90_000}
    for name, text in (texts | {"valid.txt": "v", "test.txt": "t"}).items():
        (tmp_path / name).write_text(text)
    chosen = SourceOptions(kind="text", path=str(tmp_path))
    corpus = shard(chosen, ChunkerOptions(), ShardOptions(megabytes=1), tmp_path / "shards")
    assert len(corpus.shards_of("train")) > 2
    example, found = python(FORMATS, "webdataset").replace("shards/NAME-DIGEST", str(corpus.folder)), dict[str, Any]()
    exec(example.replace('print(name, len(text), "bytes")', "found[name] = text.decode()"), {"found": found})
    assert found == texts

    paths = sorted(map(str, corpus.folder.glob("train-*.tar")))
    samples = list(webdataset.WebDataset(paths, shardshuffle=False).decode())
    ours = list(corpus.webdataset("train"))
    assert len(ours) == len(samples) > 2 and len({sample["__key__"] for sample in ours}) == len(ours)
    for one, other in zip(ours, samples, strict=True):
        for name in ("tokens.npy", "lengths.npy", "documents.npy"):
            assert np.array_equal(one[name], other[name])
        assert one["sample.json"] == {key: other["sample.json"][key] for key in ("names", "continues")}
    shared = torch.utils.data.DataLoader(corpus.webdataset("train").compose(_take_key), batch_size=None, num_workers=2)
    assert sorted(shared) == sorted(sample["__key__"] for sample in ours)
    os.truncate(corpus.folder / corpus.shards_of("train")[1].file, 5000)
    with pytest.raises(CorruptShardError):
        list(Corpus.open(corpus.folder).webdataset("train"))


def _take_key(samples: Iterable[dict[str, Any]]) -> Iterator[str]:
    yield from (sample["__key__"] for sample in samples)


DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md"))]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_test_that_a_document_names_is_there(document: Path) -> None:
    named = re.findall(r"(?<!# )\btests/[\w/]+\.py", document.read_text(encoding="utf-8"))
    assert [name for name in named if not (ROOT / name).is_file()] == []


def test_every_claim_of_the_page_on_security_names_the_tests_that_hold_it() -> None:
    blocks = (DOCS / "reference" / "security.md").read_text(encoding="utf-8").split("\n\n")
    rows = [row for block in blocks if block.startswith("|") for row in block.splitlines()[2:]]
    claims = [*rows, *(block for block in blocks if not block.startswith(("#", "|")))]
    assert len(rows) > 10 and len(claims) > 30
    assert [claim for claim in claims if not re.search(r"`tests/[\w/]+\.py`", claim)] == []


def test_the_citation_is_of_this_version_and_licence() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert (citation["version"], citation["license"]) == (project["version"], project["license"])
    assert all(reference["title"] and reference["authors"] for reference in citation["references"])
