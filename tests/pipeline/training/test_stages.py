"""Training: exact resumption, phase two from phase one, and what is refused."""

import errno
import json
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from data.loader import Loader
from haed import options as haed_options
from pipeline.config import Options, load_options
from pipeline.run import checkpoints
from pipeline.run.checkpoints import Checkpoints, CorruptCheckpointError
from pipeline.run.device import setup_compute
from pipeline.run.metrics import read_metrics
from pipeline.run.run_directory import RunFolder
from pipeline.run.sharding import open_shards, shard_source
from pipeline.run.system import build_system
from pipeline.signals import TrainingInterrupted
from pipeline.suggestions import name_flows
from pipeline.training import trainer
from pipeline.training.stages import build_trainer, finetune, pretrain, train
from pipeline.training.trainer import NonFiniteLossError
from tests.conftest import flip_bit, of_kind


def weights(options: Options, phase: str) -> dict[str, torch.Tensor]:
    return load_file(newest(options, phase) / "model.safetensors")


def newest(options: Options, phase: str) -> Path:
    folder = Path(options.runs_dir) / options.name / phase / "checkpoints"
    return folder / (folder / "latest").read_text().strip()


def stripped(options: Options, phase: str) -> list[dict[str, float]]:
    """Metrics without what depends on the clock."""
    path = Path(options.runs_dir) / options.name / phase / "metrics.jsonl"
    timed = ("seconds", "steps_per_second", "chunks_per_second")
    return [{k: v for k, v in record.items() if k not in timed} for record in read_metrics(path)]


def assert_same(ours: Options, theirs: Options, phase: str) -> None:
    """Two trainings of a phase have the same metrics, and end in the same bits."""
    assert stripped(ours, phase) == stripped(theirs, phase) != []
    for file in ("model", "training", *(["average"] if theirs.optimizer.ema else [])):
        one, other = (load_file(newest(each, phase) / f"{file}.safetensors") for each in (ours, theirs))
        assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def interrupt(stage: Callable[..., object], options: Options, steps: int) -> None:
    """Trains until it is told to stop, after so many steps of its own."""
    calls = iter(range(steps - 1))
    with pytest.raises(TrainingInterrupted, match="saved step"):
        stage(options, lambda: next(calls, None) is None)


@contextmanager
def at_update(step: int, act: Callable[..., torch.Tensor]) -> Iterator[None]:
    """Something else is done at a step in place of the update of the weights, which it is given beside the trainer."""
    update = trainer.Trainer.update

    def update_or_act(self: trainer.Trainer) -> torch.Tensor:
        return act(self, update) if self.position.step == step else update(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer.Trainer, "update", update_or_act)
        yield


DROPOUT = ["model.main.dropout=0.2", "model.decoder.dropout=0.3"]


@pytest.mark.parametrize(
    ("decoder", "more"),
    [
        pytest.param(
            "lstm",
            ["optimizer.ema=0.9", "model.encoder.rows=64", "model.decoder.grams.rows=64", *DROPOUT],
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "lstm",
            ["model.encoder.kind=lstm", "model.main.kind=lstm", "model.mixture.known=0", *DROPOUT],
            marks=pytest.mark.nightly,
        ),
        pytest.param("transformer", ["batch.pieces=2", *DROPOUT], marks=pytest.mark.nightly),
    ],
)
def test_an_interrupted_run_ends_in_the_same_bits(
    tiny: list[str], decoder: str, more: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the preset's mixture."""
    batch = Loader.batch  # some windows as of a damaged shard: they are counted over all of a run
    monkeypatch.setattr(Loader, "batch", lambda self, position: replace(batch(self, position), skipped=1))
    limits = ["pretrain.steps=10", "finetune.steps=8", "iem.extra_batches=2"]
    chosen = [*tiny, *limits, "log_steps=4", f"model.decoder.kind={decoder}", *more]
    whole, cut = load_options("quickstart", [*chosen, "name=whole"]), load_options("quickstart", [*chosen, "name=cut"])
    shard_source(whole)
    for phase, stage in (("pretrain", pretrain), ("finetune", finetune)):
        stage(whole)
        for steps in (3, 5):
            interrupt(stage, cut, steps)
        stage(cut)
        assert_same(cut, whole, phase)
        lines, has_mixture = stripped(whole, phase), whole.model.mixture.known != 0
        assert all(("gate" in line) == has_mixture for line in lines if "loss" in line)
        assert any(line.get("skipped_windows") == 8 for line in lines)


def test_phase_two_reads_on_where_phase_one_stopped(
    options: Options, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """In another order it begins anew, and says so; its epochs are its own."""
    read_at, batch = [], Loader.batch
    monkeypatch.setattr(Loader, "batch", lambda self, position: read_at.append(position) or batch(self, position))
    options.pretrain.steps, options.finetune.steps, options.validation.times = 3, 4, 0
    pretrain(options)
    interrupt(finetune, options, 2)
    caplog.clear()
    with caplog.at_level("INFO"):
        trained = finetune(options)
    assert read_at == [step * options.batch.sequences for step in range(7)]
    epoch = 3 / pretrain(options).epochs
    assert trained.epochs == pytest.approx(4 / epoch) and "continues reading" not in caplog.text
    again = replace(options, name="again", seed=1, finetune=replace(options.finetune, start_from=options.name))
    caplog.clear()
    with caplog.at_level("INFO"):
        finetune(again)
    assert read_at[7:] == read_at[:4]
    assert "finetune reads its data from the beginning: seed" in caplog.text and "continues reading" not in caplog.text


@pytest.mark.slow
def test_phase_two_lowers_the_exact_bits(options: Options) -> None:
    options.pretrain.steps, options.finetune.steps, options.optimizer.learning_rate = 6, 30, 0.01
    pretrain(options)
    finetune(options)
    bits = [r["validation/bits_per_token"] for r in stripped(options, "finetune") if "validation/bits_per_token" in r]
    assert bits[-1] < bits[0] < 9


def test_phase_one_as_in_the_paper_trains_no_decoder(options: Options) -> None:
    options.pretrain.decode_fraction, options.iem.correction, options.iem.extra_batches = 0.0, "none", 3
    options.model.mixture.known = 0
    fresh = build_system(options, open_shards(options).build_chunker()).state_dict()
    pretrain(options)
    trained = weights(options, "pretrain")
    same = {name for name in fresh if torch.equal(fresh[name], trained[name])}
    assert {name for name in fresh if name.startswith("decoder.")} <= same
    assert not any(name.startswith("main.blocks") for name in same)


def test_near_values_of_pictures_begin_alike_and_bytes_of_text_do_not(drawn: Options, options: Options) -> None:
    def largest_step(made: Options) -> float:
        unused = Checkpoints(Path("unused"))
        trainer = build_trainer(made.train, made, open_shards(made), unused, setup_compute(made), lambda: False)
        (rows,) = (
            each for name, each in trainer.objective.named_parameters() if name.endswith("encoder.tokens.weight")
        )
        return float(rows[:256].detach().diff(dim=0).abs().max())

    assert largest_step(drawn) < 0.5 and largest_step(options) > 2


def test_a_limit_in_epochs(options: Options) -> None:
    options.train.steps, options.train.epochs = None, 0.1
    assert 0.1 <= train(options).epochs < 0.2


@pytest.mark.parametrize("threads", [1, 2])
def test_a_second_is_one_of_the_clock_whatever_the_threads(
    threads: int, options: Options, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step that waits computes nothing; by the time of a process there would be no end of such steps."""
    take = trainer.Trainer.step

    def step(self: trainer.Trainer, batch: object) -> None:
        time.sleep(0.1)
        take(self, batch)

    monkeypatch.setattr(trainer.Trainer, "step", step)
    options.train.steps, options.train.seconds, options.threads = None, 0.4, threads
    done = train(options)
    assert done.steps <= 4 and done.seconds >= max(0.4, 0.1 * done.steps)
    records = read_metrics(Path(options.runs_dir) / options.name / "train" / "metrics.jsonl")
    assert all(record["seconds"] >= 0.1 * record["step"] for record in records)


def test_a_damaged_newest_checkpoint_falls_back(options: Options, caplog: pytest.LogCaptureFixture) -> None:
    options.checkpoint.every_steps = 2
    train(options)
    path = newest(options, "train") / "model.safetensors"
    flip_bit(path, -1)
    saved = Checkpoints(path.parent.parent)
    found = saved.load_newest()
    assert found is not None and found.state["step"] == 2 and "The checkpoint before it is tried" in caplog.text
    for other in path.parent.parent.glob("step-*/model.safetensors"):
        other.write_bytes(b"")
    with pytest.raises(CorruptCheckpointError, match="are damaged"):
        saved.load_newest()
    caplog.clear()
    with pytest.raises(CorruptCheckpointError, match="are damaged"):
        train(options)
    assert "are damaged" not in caplog.text


def test_old_checkpoints_go_and_the_best_stays(options: Options) -> None:
    options.train.steps, options.checkpoint.every_steps, options.validation.times = 12, 1, 1
    train(options)
    folder = newest(options, "train").parent
    assert sorted(path.name for path in folder.glob("step-*")) == ["step-00000011", "step-00000012"]
    assert (folder / "best").read_text().strip() == "step-00000012"


def test_windows_behind_the_text_are_said_once(tiny: list[str], caplog: pytest.LogCaptureFixture) -> None:
    few = ["model.token.heads=3", "model.token.width=24", "model.token.ffn=24", "model.retina.heads="]
    far = load_options("retina", [*of_kind("retina", tiny), *few, "model.retina.windows=8:400@4 0:8@1 400:999@8"])
    shard_source(far)
    train(far)
    (said,) = [line for line in caplog.messages if "model.retina.windows" in line]
    assert said.startswith("model.retina.windows: 400:999@8 begins beyond windows of at most")


def test_a_loss_that_is_not_finite_stops_the_run(options: Options) -> None:
    options.optimizer.learning_rate, options.optimizer.main_learning_rate = 1e30, 1e30
    said = r"not finite at step 2: .*loss.*bits_per_token \(learning rate 8.6e\+29\).* Lower optimizer"
    with pytest.raises(NonFiniteLossError, match=said) as refused:
        train(options)
    assert name_flows(str(refused.value)) == str(refused.value)  # Retry in Prefect would take the same options


@pytest.mark.parametrize("log_every", [100, 1])
def test_no_checkpoint_is_written_of_what_is_not_finite(
    options: Options, monkeypatch: pytest.MonkeyPatch, log_every: int
) -> None:
    monkeypatch.setattr(trainer, "EARLY_RECORDS", ())
    options.log_steps = log_every
    options.train.steps, options.checkpoint.every_steps, options.validation.times = 6, 1, 0

    def spoil(self: trainer.Trainer, update: Callable[..., torch.Tensor]) -> torch.Tensor:
        self.training_state.optimizer.param_groups[0]["params"][0].grad[:] = torch.nan
        return update(self)

    with at_update(3, spoil), pytest.raises(NonFiniteLossError, match="at step 4: .*gradient_norm"):
        train(options)
    assert newest(options, "train").name == "step-00000003"
    assert train(options).resumed_from == 3


@pytest.mark.parametrize("part", ["", "decoder.output"])  # from NaN, or from infinite scores of one part
@pytest.mark.parametrize(
    ("begin", "advice"),
    [(3, "continues from .*step-00000003. If it ends like this again"), (0, "has no checkpoint yet")],
)
def test_a_validation_that_is_not_finite_ends_the_run_before_its_checkpoint(
    options: Options, begin: int, advice: str, part: str
) -> None:
    """The weights and the losses so far are finite; what the model computes next is not."""
    options.train.steps, options.validation.times = 6, 6

    def enlarge(self: trainer.Trainer, update: Callable[..., torch.Tensor]) -> torch.Tensor:
        norm = update(self)
        for name, parameter in self.objective.system.named_parameters():
            if name.startswith(part):
                parameter.data.mul_(1e38 if part else 1e30)
        return norm

    said = f"at step {begin + 1}: validation/bits_per_token .*{advice}"
    with at_update(begin, enlarge), pytest.raises(NonFiniteLossError, match=said):
        train(options)
    run = RunFolder.find(options.name, options.runs_dir)
    recorded = (run.path / "train" / "metrics.jsonl").read_text()
    assert "NaN" not in recorded and "Infinity" not in recorded
    if begin:
        assert newest(options, "train").name == f"step-{begin:08}"


def test_configuration_and_environment_are_written(options: Options) -> None:
    train(options)
    run = RunFolder.find(options.name, options.runs_dir)
    assert run.load_options() == options
    environment = json.loads((run.path / "environment.json").read_text())
    assert environment["versions"]["torch"] == torch.__version__ and environment["seed"] == 0
    trained = setup_compute(options)
    assert environment["processor"] == trained.processor_name
    assert environment["precision"] == {"weights": "fp32", "training": trained.precision_name, "scoring": "fp32"}


def test_counts_have_a_cell_for_each_distinct_chunk_unless_said_otherwise(
    options: Options, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(haed_options, "CELLS", 16)
    pretrain(options)
    distinct = open_shards(options).statistics["train"].distinct_chunks
    cells = 1 << int(load_file(newest(options, "pretrain") / "training.safetensors")["candidates/bits"])
    assert distinct > 16 and distinct <= cells < 2 * distinct
    given = replace(options, iem=replace(options.iem, cells=4096), pretrain=replace(options.pretrain, steps=9))
    with pytest.raises(ValueError, match=f"Set iem.cells={cells}"):
        pretrain(given)
    with pytest.raises(ValueError, match=f"Set iem.cells={cells}"):
        finetune(given)
    assert RunFolder.from_options(options).load_options() == options


def test_a_step_without_other_windows_is_refused_before_anything_is_written(options: Options) -> None:
    few = replace(options, batch=replace(options.batch, sequences=1))
    with pytest.raises(ValueError, match="with one window per step, a mixture"):
        pretrain(few)
    run = RunFolder.from_options(few).path
    assert not [path for path in run.rglob("*") if path.is_file() and path.name != "lock"]
    pretrain(options)
    config = run / "config.yaml"
    before = config.read_bytes()
    with pytest.raises(ValueError, match="with one window per step, a mixture"):
        pretrain(replace(few, pretrain=replace(few.pretrain, steps=8)))
    assert config.read_bytes() == before


def test_nothing_is_written_any_more_when_a_run_has_failed(options: Options, monkeypatch: pytest.MonkeyPatch) -> None:
    failing, write = threading.Event(), checkpoints._write_tensors
    monkeypatch.setattr(checkpoints, "_write_tensors", lambda *given: failing.wait() and write(*given))
    options.train.steps, options.checkpoint.every_steps, options.validation.times = 6, 1, 0

    def fail(*_: object) -> torch.Tensor:
        threading.Timer(0.1, failing.set).start()
        raise NonFiniteLossError

    with at_update(1, fail), pytest.raises(NonFiniteLossError):
        train(options)
    assert failing.is_set() and newest(options, "train").name == "step-00000001"


@pytest.mark.parametrize("part", ["backward", "update"])
def test_memory_that_runs_out_in_a_step_loses_no_step_before(part: str, options: Options) -> None:
    """It goes on with a smaller batch; a half-done update of the weights is not saved."""
    options.train.steps, options.checkpoint.every_steps, options.validation.times = 6, 2, 0

    def exhaust(self: trainer.Trainer, update: Callable[..., torch.Tensor]) -> torch.Tensor:
        if part == "update":
            update(self)
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    with at_update(3, exhaust), pytest.raises(torch.OutOfMemoryError):
        train(options)
    saved = 3 if part == "backward" else 2
    assert newest(options, "train").name == f"step-{saved:08}"
    options.batch.sequences, options.batch.pieces = 1, 2
    result = train(options)
    assert (result.resumed_from, result.steps) == (saved, 6)


def test_a_kill_between_a_checkpoint_and_its_pointers_loses_no_best_one(options: Options) -> None:
    options.pretrain.steps, options.validation.times, options.checkpoint.keep = 8, 2, 2
    pretrain(options)
    last = newest(options, "pretrain")
    assert json.loads((last / "state.json").read_text())["stale"] == 0  # the best by its validation
    before, best, latest = (last.with_name(name) for name in ("step-00000004", "best", "latest"))
    for pointer in (best, latest):
        pointer.write_text(before.name)
    pretrain(options)
    assert best.read_text() == latest.read_text() == f"{last.name}\n"
    best.write_text(before.name)  # somebody's choice
    pretrain(options)
    assert best.read_text() == before.name


@pytest.mark.parametrize("how", ["removed", "damaged"])
def test_best_names_no_checkpoint_that_is_made_again(how: str, options: Options) -> None:
    """The one that had the best validation before is kept, and is the best until a validation is better."""
    options.pretrain.steps, options.validation.times, options.checkpoint.keep = 4, 2, 2
    pretrain(options)
    last = newest(options, "pretrain")
    best = last.with_name("best")
    assert best.read_text() == "step-00000004\n"
    shutil.rmtree(last) if how == "removed" else flip_bit(last / "model.safetensors", -1)
    options.pretrain.steps, options.validation.times = 16, 8
    options.optimizer.learning_rate = options.optimizer.main_learning_rate = 3.0
    options.optimizer.warmup_steps = 0  # so training goes on, but worse
    pretrain(options)
    assert best.read_text() == "step-00000002\n" and (last.parent / "step-00000002").is_dir()


def test_without_the_best_checkpoint_the_next_validation_counts(options: Options) -> None:
    options.pretrain.steps, options.validation.times, options.checkpoint.keep = 4, 2, 1
    pretrain(options)
    options.optimizer.learning_rate = options.optimizer.main_learning_rate = 3.0
    options.optimizer.warmup_steps, options.pretrain.steps, options.validation.times = 0, 8, 4
    pretrain(options)
    last = newest(options, "pretrain")
    best = last.with_name("best")
    shutil.rmtree(last.parent / best.read_text().strip())
    options.pretrain.steps, options.validation.times = 16, 8
    pretrain(options)
    assert int(best.read_text().strip().removeprefix("step-")) > 8


@pytest.mark.parametrize("error", [errno.ESTALE, errno.EMFILE, "memory"])
def test_an_error_that_may_pass_is_no_damage(
    error: int | str, options: Options, monkeypatch: pytest.MonkeyPatch
) -> None:
    options.pretrain.steps, options.checkpoint.every_steps = 4, 2
    pretrain(options)
    read = checkpoints.read_tensors

    def fail(path: Path) -> dict[str, torch.Tensor]:
        if isinstance(error, int):
            raise OSError(error, "for a moment", str(path))
        monkeypatch.setattr(checkpoints, "free_memory", lambda: 1000.0)
        return read(path)

    options.pretrain.steps = 6
    with monkeypatch.context() as context:
        context.setattr(checkpoints, "read_tensors", fail)
        with pytest.raises((OSError, MemoryError), match="for a moment|of memory are free"):
            pretrain(options)
    monkeypatch.undo()
    assert pretrain(options).resumed_from == 4


def test_a_validation_that_no_checkpoint_knows_is_not_written_twice(
    options: Options, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was interrupted, was made when training resumed, and then the process was killed."""
    options.pretrain.steps, options.validation.times, options.log_steps = 8, 2, 100
    interrupt(pretrain, options, 4)
    assert newest(options, "pretrain").name == "step-00000004"

    def kill(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as context:
        context.setattr(Checkpoints, "save", kill)
        with pytest.raises(KeyboardInterrupt):
            pretrain(options)
    pretrain(options)
    path = newest(options, "pretrain").parent.parent / "metrics.jsonl"
    assert [x["step"] for x in read_metrics(path) if "validation/bits_per_token" in x] == [4, 8]


def test_a_record_after_resuming_has_the_learning_rate_of_its_steps(options: Options) -> None:
    options.pretrain.steps, options.pretrain.patience, options.validation.times, options.log_steps = 60, 1, 20, 100
    options.optimizer.learning_rate = options.optimizer.main_learning_rate = 3.0
    options.optimizer.warmup_steps, options.optimizer.schedule = 0, "linear"  # it gets worse, and soon
    last = pretrain(options).steps
    assert last < 60  # patience ended it
    whole, heard = stripped(options, "pretrain"), [0.0]
    options.name = "again"
    with pytest.raises(TrainingInterrupted, match=f"saved step {last}"):
        pretrain(options, lambda: heard[-1] == last - 1, lambda record: heard.append(record["step"]))
    pretrain(options)
    assert stripped(options, "pretrain") == whole


def test_a_damaged_checkpoint_does_not_take_the_place_of_earlier_steps(options: Options) -> None:
    options.pretrain.steps, options.checkpoint.keep, options.validation.times = 4, 1, 1
    pretrain(options)
    options.pretrain.steps, options.validation.times = 12, 0
    pretrain(options)
    flip_bit(damaged := newest(options, "pretrain") / "model.safetensors", -1)
    options.pretrain.steps, options.checkpoint.every_steps = 40, 2
    interrupt(pretrain, options, 4)
    saved = newest(options, "pretrain")
    assert saved.is_dir() and saved.name < damaged.parent.name and not damaged.parent.exists()
    options.pretrain.steps = 10
    assert pretrain(options).resumed_from == int(saved.name.removeprefix("step-"))


def test_what_a_power_cut_leaves_of_metrics_does_not_stop_a_resumed_training(options: Options) -> None:
    pretrain(options)
    path = Path(options.runs_dir) / options.name / "pretrain" / "metrics.jsonl"
    known = read_metrics(path)
    with path.open("ab") as file:
        file.write(b"\0" * 300)
    options.pretrain.steps += 2
    assert pretrain(options).steps == options.pretrain.steps
    assert [record["step"] for record in read_metrics(path)][: len(known)] == [record["step"] for record in known]
