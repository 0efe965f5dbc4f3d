"""One checkpoint for every reader, what is said where it is not the best, and advice that is gone once it was taken."""

import html
import json
import os
import re
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline import open_run
from pipeline.cli import main
from pipeline.console import warn_once
from pipeline.reporting.report import evaluation_status
from pipeline.run.checkpoints import choose_checkpoint, load_chosen, read_verified_state
from pipeline.run.files import ChecksumCache
from pipeline.run.run_directory import RunFolder
from tests.conftest import flip_bit, mostly_nightly
from tests.pipeline.conftest import CommandLine


@pytest.fixture
def best_first(run: Path) -> Path:
    """The run, whose best checkpoint of phase two is not its newest: step 2 of 4."""
    (run / "finetune" / "checkpoints" / "best").write_text("step-00000002\n")
    return run


def flip(name: str) -> Callable[[Path], None]:
    """One bit of a file of the best checkpoint, by someone who sets its time back."""

    def change(folder: Path) -> None:
        path = folder / "step-00000002" / name
        status = path.stat()
        flip_bit(path, status.st_size // 2)
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))

    return change


def write(content: bytes) -> Callable[[Path], None]:
    return lambda folder: (folder / "best").write_bytes(content) and None


WRONG: dict[str, tuple[Callable[[Path], object], str]] = {
    "weights": (flip("model.safetensors"), "the checksum of model.safetensors does not match"),
    "state": (flip("state.json"), "step-00000002.* is damaged"),
    "weights gone": (lambda folder: (folder / "step-00000002" / "model.safetensors").unlink(), "is damaged"),
    "garbled": (write(b"\xff\x00st"), "best is damaged: it does not name a checkpoint"),
    "empty": (write(b""), "best is damaged: it does not name a checkpoint"),
    "missing": (lambda folder: (folder / "best").unlink(), "best is missing, although the phase was validated"),
    "another": (write(b"step-00000099\n"), "step-00000099 is missing, but .*best names it"),
    "elsewhere": (write(b"../../pretrain/checkpoints/step-00000006"), "best is damaged: it does not name a checkpoint"),
    "a folder": (
        lambda folder: ((folder / "best").unlink(), (folder / "best").mkdir()),
        "best is damaged: it does not name a checkpoint",
    ),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_best_checkpoint_that_cannot_be_taken_is_replaced_by_the_newest(wrong: str, best_first: Path) -> None:
    place, (spoil, expected) = best_first / "finetune" / "checkpoints", WRONG[wrong]
    spoil(place)
    copy = shutil.copytree(best_first, best_first.with_name("copy"))  # whose sums nobody knows
    for run in (best_first, copy):
        chosen = choose_checkpoint(run / "finetune" / "checkpoints")
        assert chosen.step == 4 and re.search(expected, chosen.fallback or "")
        assert RunFolder(run).select_checkpoint().digest == open_run(run).digest == chosen.digest
        assert load_chosen(place).digest == chosen.digest


@pytest.mark.slow
@pytest.mark.parametrize("wrong", mostly_nightly(["weights", "missing"], "weights"))
def test_all_readers_use_one_checkpoint_and_say_which(
    wrong: str, best_first: Path, capsys: pytest.CaptureFixture[str], haed: CommandLine
) -> None:
    run, (spoil, expected) = best_first, WRONG[wrong]
    place = run / "finetune" / "checkpoints"
    assert choose_checkpoint(place).step == 2 and choose_checkpoint(place).fallback is None
    for command in ("index", "evaluate"):  # of the best
        assert main([command, str(run)]) == 0
    spoil(place)

    def told(*words: str) -> str:
        """Of a command that succeeds, what it says on standard error: the fall-back once."""
        capsys.readouterr()
        assert main([words[0], str(run), *words[1:]]) == 0
        found = capsys.readouterr()
        assert len(re.findall(f"{expected}.*; using the newest checkpoint instead, step-00000004", found.err)) == 1, (
            found.err
        )
        return found.out

    digest = choose_checkpoint(place).digest
    advice = re.search(r"Run `(haed index .*?)` again", haed.error("neighbours", run, "def "))  # of the one before
    assert advice is not None
    told(*[word for word in shlex.split(advice[1])[1:] if word != str(run)])
    told("neighbours", "def ")
    assert "step 4" in told("evaluate", "evaluate.baselines=false")
    for command in ("sample", "next", "report"):
        told(command)
    kept = [json.loads((run / name).read_text()) for name in ("evaluation.json", "index/chunks/meta.json")]
    kept += json.loads((run / "samples.json").read_text())
    assert all(each["checkpoint"] == digest for each in kept)
    assert all(re.search(expected, each["fallback"]) for each in kept)
    assert re.search(expected, html.unescape((run / "report.html").read_text()))
    assert re.search(expected, " ".join(evaluation_status(RunFolder(run)).warnings))
    assert re.search(expected, haed.json("compare", "run", f"runs_dir={run.parent}")["rows"][0]["fallback"])


def test_a_phase_whose_checkpoints_are_all_gone_is_named(run: Path, haed: CommandLine) -> None:
    """Another phase is used instead, which is said and kept."""
    shutil.rmtree(run / "finetune" / "checkpoints")
    (run / "evaluation.json").unlink()
    expected = "finetune has metrics but no checkpoint; using that of pretrain instead"
    assert expected in haed.error("evaluate", run, status=0)
    found = json.loads((run / "evaluation.json").read_text())
    assert found["stage"] == "pretrain" and expected in found["fallback"]


def test_a_wrong_latest_changes_nothing(best_first: Path, haed: CommandLine) -> None:
    """Resuming and reading go by the checkpoints that are there."""
    place = best_first / "finetune" / "checkpoints"
    for content in (b"", b"\xff\x00", b"step-00000099\n"):
        (place / "latest").write_bytes(content)
        assert open_run(best_first).step == 2
        assert haed.json("finetune", best_first)["resumed_from"] == 4
        assert (place / "latest").read_text() == "step-00000004\n"


def test_a_sum_is_noted_with_its_file(best_first: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is worked out once, and again if the file changes in whatever way."""
    place = best_first / "finetune" / "checkpoints"
    monkeypatch.setattr(ChecksumCache, "_hashed", hashed := {})
    assert choose_checkpoint(place).step == 2
    assert [path.name for path in hashed] == ["model.safetensors"]  # of the best alone, in a copy
    hashed.clear()
    assert choose_checkpoint(place).step == 2 and not hashed  # `.checked` has it
    flip("model.safetensors")(place)
    assert choose_checkpoint(place).step == 4


def advised(text: str, stage: str) -> list[str]:
    """The words of the command that a text advises, as they can be typed."""
    found = re.findall(rf"`(haed {stage} [^`]*)`", text)
    assert found, text
    return shlex.split(found[0])[1:]


def _no_index(run: Path) -> None:
    shutil.rmtree(run / "index")


def _no_phase(*phases: str) -> Callable[[Path], object]:
    return lambda run: [shutil.rmtree(run / phase) for phase in phases]


def _other_checkpoint(run: Path) -> None:
    (run / "finetune" / "checkpoints" / "best").write_text("step-00000002\n")


ADVICE: dict[str, tuple[Callable[[Path], object], list[str], str]] = {
    "no index": (_no_index, ["neighbours", "RUN", "def "], "index"),
    "stale index": (_other_checkpoint, ["neighbours", "RUN", "def "], "index"),
    "index of another phase": (_other_checkpoint, ["neighbours", "RUN", "def ", "evaluate.stage=pretrain"], "index"),
    "no contexts": (_no_index, ["neighbours", "RUN", "--context", "def f"], "index"),
    "damaged index": (
        lambda run: (run / "index" / "chunks" / "vectors.faiss").write_bytes(b"x"),
        ["neighbours", "RUN", "def "],
        "index",
    ),
    "stale evaluation": (_other_checkpoint, ["report", "RUN"], "evaluate"),
    "stale evaluation of a phase": (_other_checkpoint, ["report", "RUN", "evaluate.stage=pretrain"], "evaluate"),
    "stale samples": (_other_checkpoint, ["report", "RUN"], "sample"),
    "no phase": (_no_phase("pretrain"), ["evaluate", "RUN", "evaluate.stage=pretrain"], "pretrain"),
    "not trained": (_no_phase("pretrain", "finetune"), ["sample", "RUN"], "pretrain"),
    "loss by frequency": (
        _other_checkpoint,
        ["analyse", "RUN", "analyse.map=pca", "analyse.skip_gram=false"],
        "evaluate",
    ),
}


@pytest.mark.parametrize("case", mostly_nightly(ADVICE, "stale evaluation"))
def test_advice_is_gone_once_it_was_taken(
    case: str, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command is run as it stands in the message, from a folder that is not that of the runs."""
    named = run.rename(run.with_name("my run"))  # a name that a shell would take apart
    spoil, words, stage = ADVICE[case]
    spoil(named)
    words = [str(named) if word == "RUN" else word for word in words]

    def said() -> str:
        capsys.readouterr()
        main(words)
        found = capsys.readouterr()
        page = named / "report.html"
        report = html.unescape(page.read_text()) if words[0] == "report" and page.is_file() else ""
        report = re.sub("</?code>", "`", report)
        return found.err + found.out + report

    before = said()
    command = advised(before.replace("\\", ""), stage)
    assert main(command) == 0, command
    warn_once.cache_clear()
    assert f"haed {stage} " not in said()


def test_a_terabyte_behind_the_weights_is_not_read(best_first: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = best_first / "finetune" / "checkpoints" / "step-00000002" / "model.safetensors"
    os.truncate(model, 1 << 40)
    monkeypatch.setattr("hashlib.file_digest", lambda *_: pytest.fail("it is summed"))
    with pytest.raises(ValueError, match=r"model\.safetensors is damaged") as found:
        read_verified_state(model.parent, fresh=True)
    assert str(found.value).count("damaged") == 1
