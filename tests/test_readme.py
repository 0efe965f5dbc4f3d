"""Commands of the README and the tutorial, as they stand there, with small budgets; links, figures, the Python example."""

import re
import shlex
import shutil
import sysconfig
from pathlib import Path

import pytest

from flows.cli import main
from haed.options import SYSTEMS
from pipeline.config import load_options
from tests.conftest import TINY, of_kind
from tests.flows.api import haed

ROOT = Path(__file__).resolve().parents[1]
README, TUTORIAL = ((ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "docs/tutorial/first-run.md"))
BLOCKS = re.findall(r"```(bash|python)\n(.*?)```", README + TUTORIAL, re.DOTALL)
COMMANDS = list(dict.fromkeys(line for language, block in BLOCKS if language == "bash" for line in block.splitlines()))
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
TRAINS = ("run", "shard", "pretrain", "finetune", "train")
BY_HAND = ("make ", "source ")  # a clean clone, logged in dev/LOG.md
ELSEWHERE = {"haed serve"}  # tests/flows/test_serve.py


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as the README supposes it: a text of one's own, and WikiText-2; and a few sources of Python, for all of them."""
    folder = tmp_path_factory.mktemp("a folder with a space")
    (folder / "my-texts").mkdir()
    for name in ("letter", "diary", "notes"):
        paragraphs = [f"{name} paragraph {i}\nwith two lines of text.\n\n" for i in range(400)]
        (folder / "my-texts" / f"{name}.txt").write_text("".join(paragraphs))
    for page in (ROOT / "docs").rglob("*.md"):  # all, since the name of one alone may state a split
        copied = folder / page.relative_to(ROOT)
        copied.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(page, copied)
    (folder / "new-letter.txt").write_text("A paragraph that no training has seen.\n")
    (folder / "python").mkdir()
    for path in Path(sysconfig.get_paths()["stdlib"]).glob("*.py"):
        if path.stat().st_size < 30_000:
            shutil.copy(path, folder / "python")
    (folder / "wikitext-2").mkdir()
    for split in ("train", "valid", "test"):
        articles = [f" \n = Title {i} = \n \n Some words of {split} article {i} . \n" * 20 for i in range(10)]
        (folder / "wikitext-2" / f"{split}.txt").write_text("".join(articles))
    return folder


def small(command: str) -> list[str]:
    """The command's arguments, with a tiny model and a few steps where it trains."""
    program, *arguments = shlex.split(command)
    assert program == "haed"
    if arguments[0] not in TRAINS:
        return arguments
    limits = "seconds=120", "seconds=60", "seconds=90", "seconds=30"
    given = [word for word in arguments if "=" in word and not word.endswith(limits)]
    rest = [word for word in arguments if "=" not in word]
    budget = ["finetune.steps=6"] if "seconds=90" in command else []
    preset = rest[rest.index("--config") + 1] if "--config" in rest else None
    options = load_options(preset)
    kind = next((word.split("=")[1] for word in given if word.startswith("model.kind=")), options.model.kind)
    words = TINY if SYSTEMS[kind].chunks else of_kind(kind, TINY)
    of_stdlib = preset and options.source.kind == "stdlib" and "source." not in command
    source = ["source.path=python"] if of_stdlib else []
    return [*rest, *words, *source, *given, *budget]


def test_the_readme_has_commands() -> None:
    assert len(COMMANDS) > 12 and "haed serve" in COMMANDS and any(line.startswith("make setup") for line in COMMANDS)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    "command", [line for line in COMMANDS if line not in ELSEWHERE and not line.startswith(BY_HAND)]
)
def test_every_command(
    command: str, place: Path, api: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In their order, each in the folder that those before have left; with one server for all."""
    monkeypatch.chdir(place)
    arguments = small(command)
    if arguments[0] == "run":  # in a process of its own, as Prefect's client leaves threads behind
        done = haed(place, *arguments, PREFECT_API_URL=api)
        assert done.returncode == 0 and "bits/char" in done.stdout, done.stderr[-2000:]
    else:
        assert main(arguments) == 0, capsys.readouterr().err[-2000:]


@pytest.mark.slow
def test_the_example_and_what_is_left(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)
    assert (place / "runs" / "quickstart" / "report.html").is_file()
    assert (place / "runs" / "steps" / "finetune" / "checkpoints" / "latest").read_text().strip() == "step-00000006"
    (example,) = [block for language, block in BLOCKS if language == "python"]
    exec(compile(example, "README.md", "exec"), {})


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files_and_headings(page: Path) -> None:
    text = re.sub(r"```.*?```|`[^`\n]*`", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    links = [link for link in re.findall(r"\]\(([^)\s]+)\)", text) if not link.startswith(("http", "mailto:"))]
    dead = []
    for link in links:
        name, _, heading = link.partition("#")
        target = page.parent / name if name else page
        if not target.exists() or (heading and heading not in list_anchors(target)):
            dead.append(link)
    assert dead == []


def list_anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub and MkDocs make them."""
    headings = re.findall(r"^#+ +(.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def test_figures_of_the_readme_are_in_the_log_or_a_result() -> None:
    tables = "\n".join(line for line in README.splitlines() if line.startswith("|") or "bits/char" in line)
    figures = set(re.findall(r"(?<![\w.])\d\.\d{2,4}(?![\d.])", tables))
    logged = (ROOT / "dev" / "LOG.md").read_text(encoding="utf-8")
    results = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "docs" / "results").glob("*.json"))
    numbers = {float(number) for number in re.findall(r"(?<![\w.])\d\.\d{2,}", logged + results)}
    rounded = {f"{number:.{places}f}" for number in numbers for places in (2, 3, 4)}
    assert len(figures) > 15 and figures <= rounded
