"""The run folder: what is refused changes nothing in it, and what reads it finds what its checkpoint was trained with."""

import hashlib
import html
import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from data.filesystem import write_json
from pipeline.cli import main
from pipeline.config import ConfigError, Options, load_options
from pipeline.console import format_error
from pipeline.evaluation.evaluate import evaluate_run
from pipeline.reporting.report import write_report
from pipeline.run.checkpoints import Checkpoints, list_checkpoints, load_chosen
from pipeline.run.index.build import build_index
from pipeline.run.opened import open_run
from pipeline.run.run_directory import RunFolder
from pipeline.run.sharding import shard_source
from pipeline.training.stages import finetune, pretrain, train
from tests.conftest import find_neighbours
from tests.pipeline.conftest import CommandLine
from tests.pipeline.web.test_app import Site


def digest(folder: Path) -> dict[str, str]:
    """Of everything in a folder, with its times."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "folder"
        for path in sorted(folder.rglob("*"))
        if path.name != ".checked"  # sums that a reader worked out
    }


def test_what_was_made_from_the_present_checkpoint(options: Options) -> None:
    options.validation.times = 0  # else an older checkpoint may stay the best
    train(options)
    options.evaluate.baselines = False
    folder = RunFolder.find(options.name, options.runs_dir)
    assert folder.select_checkpoint().digest == open_run(folder.path).digest
    made = {"evaluation.json": "evaluate", "index/chunks/meta.json": "index"}
    assert not any(folder.is_current(name, options, section) for name, section in made.items())
    evaluate_run(options)
    build_index(options)
    assert all(folder.is_current(name, options, section) for name, section in made.items())
    for section, name, value in (
        *(("evaluate", "split", "valid"), ("evaluate", "stride", 1), ("evaluate", "breakdown", False)),
        *(("index", "kind", "hnsw"), ("index", "recall", 0.9), ("index", "max_chunks", 7)),
    ):
        changed = replace(options, **{section: replace(getattr(options, section), **{name: value})})
        for each, of in made.items():
            assert folder.is_current(each, changed, of) == (of != section), (each, name)
    options.train.steps = 6
    train(options)
    assert not any(folder.is_current(name, options, section) for name, section in made.items())
    (Path(folder.path) / "evaluation.json").write_text("[")
    assert not folder.is_current("evaluation.json", options, "evaluate")


REFUSED = {
    "another model": ("finetune", ["model.main.layers=2"], r"step-\d+ was trained with model.main.layers=1"),
    "another model, in a new phase": ("train", ["model.main.layers=2"], "was trained with model.main.layers=1"),
    "another context": ("pretrain", ["batch.context=8"], "this run has batch.context=8: set it back, or use another"),
    "heads that do not fit": ("pretrain", ["model.decoder.kind=transformer", "model.decoder.heads=3"], "decoder"),
    "another corpus": (
        "pretrain",
        ["source.path={more}"],
        "changed. Resume with its own corpus by source.kind=shards source.path=/.*, or",
    ),
    "no shards": (
        "pretrain",
        ["chunker.k=7"],
        "was trained on another corpus: chunker.k=12, not chunker.k=7. Use another name=",
    ),
    "never": ("finetune", ["resume=never"], "resume=never, but"),
    "required": ("train", ["resume=required"], "resume=required, but"),
    "no such device": ("finetune", ["device=foo"], "device"),
    "no such device here": ("finetune", ["device=cuda:99"], "device=cuda:99 is not available"),
    "another phase one": ("finetune", ["finetune.start_from={runs}/run", "name=new", "model.main.ffn=64"], "ffn=32"),
    "no phase one": ("finetune", ["name=new"], "has no phase one. Run `haed pretrain` with the same options first"),
    "another start": (
        "finetune",
        ["finetune.steps=99", "finetune.start_from={runs}/run"],
        "finetune.start_from cannot change within a phase, in which it was null so far. Set finetune.start_from=null,",
    ),
    "another part": (
        "pretrain",
        ["pretrain.steps=99", "pretrain.part_to=0.5"],
        "pretrain.part_to cannot change within a phase, in which it was 1.0 so far. Set pretrain.part_to=1.0,",
    ),
    "two names": ("finetune", ["RUN", "name=new"], "both name a run"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused_changes_no_byte(
    case: str, run: Path, whole: Path, text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if case == "another corpus":
        shutil.copytree(text, run.parent.parent / "more")
        (run.parent.parent / "more" / "train-more.py").write_text("more = 1\n" * 99)
    stage, given, message = REFUSED[case]
    given = [item.format(more=run.parent.parent / "more", runs=run.parent) for item in given]
    config = ["--config", str(run / "config.yaml"), f"runs_dir={run.parent}", f"shards_dir={whole}/shards"]
    if case == "another corpus":
        assert main(["shard", *config, *given]) == 0
    words = [str(run), *given[1:]] if given[0] == "RUN" else [*config, *given]
    before = digest(run.parent)
    assert main([stage, *words]) in (1, 2)
    error = capsys.readouterr().err.splitlines()[-1]
    assert digest(run.parent) == before
    assert re.search(message, error), error


def test_a_second_process_is_refused_before_it_writes(run: Path, haed: CommandLine) -> None:
    config = ["--config", run / "config.yaml", f"runs_dir={run.parent}"]
    with RunFolder(run).lock():
        before = digest(run)
        said = haed.error("pretrain", *config, "pretrain.steps=9", "optimizer.learning_rate=1")
        assert digest(run) == before
    assert f"is in use by process {os.getpid()}" in said
    assert (run / "lock").read_text() == ""


@pytest.mark.nightly
def test_a_refused_command_changes_no_byte_in_many_processes(run: Path, haed: CommandLine) -> None:
    config = ["--config", str(run / "config.yaml"), f"runs_dir={run.parent}", "launcher.processes=2"]
    before = digest(run)
    said = haed.error("finetune", *config, "model.main.layers=2")
    assert "was trained with model.main.layers=1, but this run has model.main.layers=2" in said
    assert digest(run) == before


def test_a_new_run_that_is_refused_leaves_no_folder_above_it_either(whole: Path, tmp_path: Path) -> None:
    options = load_options(whole / "runs/run/config.yaml", [f"runs_dir={tmp_path}/a/b", "name=new", "device=cuda:99"])
    with pytest.raises(ValueError, match="not available"):
        train(options)
    assert not list(tmp_path.iterdir())


def remembers(**changes: Any) -> Callable[[Path], None]:
    """corpus.json with other entries."""

    def change(run: Path) -> None:
        path = run / "corpus.json"
        write_json(path, json.loads(path.read_text()) | changes)

    return change


def configured(before: str, after: str) -> Callable[[Path], None]:
    """config.yaml with another line."""

    def change(run: Path) -> None:
        path = run / "config.yaml"
        assert before in path.read_text()
        path.write_text(path.read_text().replace(before, after))

    return change


SPOILT = {
    "heads": (configured("heads: 2\n    head_width: 8", "heads: 1\n    head_width: 16"), "heads=2, .* but .* says .*heads=1"),
    "similarity": (configured("similarity: cosine", "similarity: dot"), "iem.similarity=cosine, but .*iem.similarity=dot"),
    "context": (configured("context: 16", "context: 8"), "batch.context=16, but .* says batch.context=8"),
    "chunker": (configured("k: 12", "k: 11"), "chunker.k=12, but .* says chunker.k=11. Set it back"),
    "corpus": (remembers(digest="0" * 64), "corpus.json says corpus=000"),
}  # fmt: skip
READERS = ["evaluate", "sample", "next", "index", "analyse", "report", "profile", "neighbours", "compare"]


@pytest.mark.parametrize("reader", READERS)
def test_all_that_read_a_run_ask_whether_it_is_what_was_trained(reader: str, run: Path, haed: CommandLine) -> None:
    for case, (spoil, message) in SPOILT.items():
        other = run.with_name(case)
        shutil.copytree(run, other)
        spoil(other)
        before = digest(other)
        more = {"neighbours": ["def "], "compare": [f"--output={other}/comparison"]}.get(reader, [])
        assert re.search(message, haed.error(reader, other, *more).splitlines()[-1]), case
        assert digest(other) == before


def test_no_page_answers_for_a_run_that_is_not_what_was_trained(run: Path) -> None:
    site = Site(run, single=True)
    for case, (spoil, message) in SPOILT.items():
        before = {name: (run / name).read_bytes() for name in ("config.yaml", "corpus.json")}
        spoil(run)
        assert re.search(message, site.ask("next?prompt=def", 400)["error"]), case
        for name, content in before.items():
            (run / name).write_bytes(content)
    site.ask("next?prompt=def")


def test_a_run_is_opened_from_python_only_as_what_was_trained(run: Path, whole: Path) -> None:
    options = RunFolder(run).load_options()
    options.model.main.heads, options.model.main.head_width = 1, 16
    with pytest.raises(ValueError, match=r"with model\.main\.heads=2.*\. model\.main\.heads=1.* cannot change"):
        evaluate_run(options)
    configured("similarity: cosine", "similarity: dot")(run)
    with pytest.raises(ValueError, match="iem.similarity=cosine, but"):
        open_run(run)
    pretrain(load_options(whole / "runs/run/config.yaml", [f"runs_dir={run.parent}"]))  # writes config.yaml anew
    assert open_run(run).phase == "finetune"


def test_an_index_that_is_refused_leaves_nothing_but_its_folder_and_lock(run: Path, haed: CommandLine) -> None:
    shutil.rmtree(run / "index")
    before = digest(run)
    assert "Lower index.min_count" in haed.error("index", run, "index.min_count=100000", status=2)
    after = digest(run)
    assert after.items() >= before.items()
    assert {*after} - {*before} <= {"index", "index/chunks", "index/chunks.lock"}


def test_a_run_is_its_folder_by_whatever_path(
    options: Options, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = RunFolder.create(options).path
    (tmp_path / "link").symlink_to(made)
    (made / "pretrain").mkdir()
    for folder, name in ((tmp_path, "link"), (made, "."), (made / "pretrain", ".."), (made.parent, made.name)):
        monkeypatch.chdir(folder)
        found = RunFolder.find(name).load_options()
        assert (Path(found.runs_dir) / found.name).samefile(made)


@pytest.mark.slow
def test_another_corpus_at_the_place_of_the_run_s_own(run: Path, tmp_path: Path) -> None:
    options = RunFolder(run).load_options(["source.kind=stdlib", "source.pattern=bisect.py"])
    options.shards_dir, options.source.path = str(tmp_path / "shards"), None
    remembers(location=shard_source(options).location)(run)
    with pytest.raises(ValueError, match="is not the corpus that .* was trained on"):
        evaluate_run(RunFolder(run).load_options())


@pytest.mark.parametrize(
    ("reader", "given"),
    [
        ("evaluate", "source.path=x"), ("evaluate", "chunker.k=4"), ("evaluate", "name=other"), ("evaluate", "seed=1"),
        ("evaluate", "sample.seed=1"), ("sample", "evaluate.split=test"), ("index", "model.main.layers=2"),
        ("report", "source.path=x"), ("profile", "chunker.k=4"), ("neighbours", "index.split=test"),
    ],
)  # fmt: skip
def test_what_cannot_apply_is_refused(reader: str, given: str, run: Path) -> None:
    refusal = rf"{given.split('=')[0]}= cannot be changed .*\. `haed {reader}` takes .*device"
    with pytest.raises(ConfigError, match=refusal):
        RunFolder(run).load_options([given], reader)


def test_an_index_of_another_run_or_checkpoint_is_not_asked(run: Path, whole: Path, tmp_path: Path) -> None:
    folder, options = RunFolder(run), RunFolder(run).load_options(["finetune.steps=8", "validation.times=0"])
    options.shards_dir = str(whole / "shards")
    other = RunFolder(run).load_options(["seed=1", "train.steps=2"])
    other.name, other.shards_dir = "other", options.shards_dir
    train(other)
    shutil.copytree(run / "index", run.parent / "other" / "index")
    advice = f"Run `haed index {run.parent}/"
    with pytest.raises(ValueError, match=f"belongs to another checkpoint .*{advice}other` again"):
        find_neighbours(other, ["def "])
    (best := run / "finetune" / "checkpoints" / "best").unlink()
    finetune(options)
    assert best.read_text() == "step-00000004\n"  # which had the best validation
    best.write_text("step-00000008\n")
    with pytest.raises(ValueError, match=rf"\(finetune step 4\) .*step-00000008.*\)\. .*{advice}run` again"):
        find_neighbours(options, ["def "])
    with pytest.raises(ValueError, match="belongs to another checkpoint"):
        open_run(run).neighbours("def ")
    page = html.unescape(write_report(options).read_text())
    assert "finetune step 4). The run's present checkpoint is " in page
    assert "No neighbours are shown: the index in" in page
    options.evaluate.stage = "pretrain"  # an index that was asked for of another phase
    build_index(options)
    assert len(find_neighbours(folder.load_options(), ["zq"])) == len(find_neighbours(options, ["zq"])) == 1


def test_an_opened_run_reads_its_index_once(run: Path) -> None:
    opened = open_run(run)
    first = opened.neighbours("def ", "zq")
    shutil.rmtree(run / "index")
    assert opened.neighbours("def ", "zq") == first
    with pytest.raises(FileNotFoundError, match="has no index"):
        open_run(run).neighbours("def ")


def lost(pattern: str) -> Callable[[Path], None]:
    """Without what is there under a pattern."""

    def change(run: Path) -> None:
        for path in run.glob(pattern):
            shutil.rmtree(path) if path.is_dir() else path.unlink()

    return change


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lost("finetune/checkpoints/step-*/state.json"), "all checkpoints in .* are damaged. Move this folder away to"),
        (lost("finetune/checkpoints/step-*"), "is missing, but .*latest names it. Restore it, or delete latest"),
    ],
)
def test_a_phase_whose_checkpoints_are_lost_does_not_start_over(
    spoil: Callable[[Path], None], message: str, run: Path, whole: Path
) -> None:
    spoil(run)
    options = RunFolder(run).load_options()
    before = digest(run)
    for stage in (finetune, evaluate_run):
        with pytest.raises(ValueError, match=message):
            stage(options)
    assert digest(run) == before


def test_what_is_there_suffices(run: Path, caplog: pytest.LogCaptureFixture) -> None:
    (run / "finetune" / "checkpoints" / "latest").unlink()
    lost("pretrain")(run)
    options = RunFolder(run).load_options()
    assert evaluate_run(options).stage == "finetune" and finetune(options).resumed_from == 4
    (run / "finetune" / "checkpoints" / "best").write_text("step-00000077\n")
    assert open_run(run).step == 4 and "using the newest checkpoint instead" in caplog.text
    renamed = run.rename(run.with_name("renamed"))
    assert finetune(RunFolder(renamed).load_options()).run == str(renamed)


def test_checkpoints_are_written_as_the_umask_says(whole: Path, tmp_path: Path) -> None:
    options = load_options(whole / "runs" / "run" / "config.yaml", [f"runs_dir={tmp_path}", "train.steps=1"])
    before = os.umask(0o027)
    try:
        train(options)
    finally:
        os.umask(before)
    (checkpoint,) = list_checkpoints(tmp_path / "run" / "train" / "checkpoints")
    assert {path.name: oct(path.stat().st_mode & 0o777) for path in checkpoint.iterdir()} == {
        name: "0o640" for name in ("model.safetensors", "training.safetensors", "state.json")
    }


@pytest.mark.parametrize("place", ["step-*/model.safetensors", "step-*/state.json", "step-*", "."])
def test_what_may_not_be_read_is_not_called_damaged(place: str, run: Path, caplog: pytest.LogCaptureFixture) -> None:
    with tempfile.TemporaryDirectory() as open_to_all:
        Path(open_to_all).chmod(0o755)
        folder = Path(shutil.copytree(run / "finetune" / "checkpoints", f"{open_to_all}/checkpoints"))
        for path in folder.glob(place) if place != "." else [folder]:
            path.chmod(0)
        me = os.geteuid()
        if me == 0:
            os.seteuid(65534)
        try:
            for read in (lambda folder: Checkpoints(folder).load_newest(), load_chosen):
                with pytest.raises(PermissionError) as told:
                    read(folder)
                assert format_error(told.value).startswith(f"{folder}")
                assert "permission denied. Ask " in format_error(told.value)
        finally:
            os.seteuid(me)
        for path in (folder, *folder.rglob("*")):
            path.chmod(0o755)
    assert "damaged" not in caplog.text


def test_a_checkpoint_that_goes_while_it_is_looked_for(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from pipeline.run import checkpoints

    folder, load_it = run / "finetune" / "checkpoints", checkpoints.load_checkpoint

    def replaced(path: Path, training: bool = True) -> checkpoints.Checkpoint:
        if path.name == "step-00000004":  # training goes on, and removes what is old
            path.rename(folder / "step-00000006")
            lost("step-00000002")(folder)
        return load_it(path, training)

    monkeypatch.setattr(checkpoints, "load_checkpoint", replaced)
    found = Checkpoints(folder).load_newest()
    assert found is not None and found.path.name == "step-00000006"


def test_one_process_reserves_a_run_and_leaves_nothing_whatever_its_name(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "runs" / f"{'ö' * 127}.")
    with run.reserve():
        assert run.user() is not None
        with pytest.raises(BlockingIOError, match=r"in use by process \d+ on .*Wait for it or stop it"), run.reserve():
            pass
    assert run.user() is None and not list((tmp_path / "runs").iterdir())
