"""An experiment of tiny models: what is made, what is not made again, what a failure leaves, and how it goes on."""

import csv
import io
import itertools
import json
import lzma
import tarfile
import wave
from collections.abc import Iterator
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Literal

import pytest
import torch
from torch import Tensor, nn

from data.corpus import Corpus
from experiments import catalogue, external_models, timing
from experiments.catalogue import BUDGETS, Budget, Claim, Experiment, Plan, Variant, load_experiment
from experiments.corpora import prepare_source
from experiments.external_models import PACKAGES, Package
from experiments.pages import format_page
from experiments.plots import PlottedModel, plot_experiment
from experiments.results import Result, VariantRun, describe_plan, make_row
from experiments.run import (
    PackageVariant,
    RunnableVariant,
    divide_budget,
    make_runs,
    prepare_variants,
    run_experiment,
    select_measured,
    select_own,
    shard_corpora,
    time_steps,
)
from pipeline.cli import main
from pipeline.config import ConfigError, load_options
from pipeline.run.checkpoints import read_position
from pipeline.run.device import setup_compute
from pipeline.run.files import read_as
from pipeline.run.sharding import open_shards, shard_source
from pipeline.signals import TrainingInterrupted
from tests.conftest import TINY, TOKENS

SMALL = tuple(word for word in TINY if word.split("=")[0].startswith(("model.", "batch.")))
WIDE = Variant("wide", "quickstart", (*SMALL, "model.decoder.width=24"), {"there": 1.5})
FLAT = Variant("flat", "flat", (*TOKENS, "batch.context=16", "batch.sequences=2"), {"there": 1.25})
SHORT = replace(WIDE, name="twin", options=(*WIDE.options, "batch.context=8"))
TWO = Experiment(
    name="two",
    source="nobody",
    question="two models",
    variants=(WIDE, FLAT),
    claims=(Claim(text="flat is better", better={"flat": ("wide",)}),),
)


@pytest.fixture
def plan(tmp_path: Path) -> Plan:
    corpus = tmp_path / "data" / "wikitext-2"
    corpus.mkdir(parents=True)
    for split, lines in (("train", 400), ("valid", 80), ("test", 80)):
        text = "".join(
            f" = Title {n} = \n of {split} the {n % 7} sat on {n % 5} mats , and so on .\n" for n in range(lines)
        )
        (corpus / f"{split}.txt").write_text(text)
    return Plan(
        folder=tmp_path / "out" / "two",
        runs_dir=tmp_path / "out" / "runs",
        seconds=0.5,
        parallel=2,
        data=tmp_path / "data",
        scored=2000,
        overrides=("validation.windows=4", "threads=1"),
    )


def of(variant: Variant, *words: str) -> RunnableVariant:
    return RunnableVariant(variant, Path("runs"), (*variant.options, *words))


def test_steps_are_of_equal_number_or_equal_seconds() -> None:
    clock = {"wide/pretrain": 0.1, "wide/finetune": 0.2, "flat/train": 0.4}
    variants = [of(variant) for variant in TWO.variants]
    found = divide_budget(TWO, variants, clock, 60.0)
    assert found["wide/pretrain"] + found["wide/finetune"] == pytest.approx(found["flat/train"], abs=2)
    assert sum(number * clock[name] for name, number in found.items()) == pytest.approx(60, abs=1)
    found = divide_budget(replace(TWO, equal="seconds"), variants, clock, 60.0)
    assert found["wide/pretrain"] * 0.1 + found["wide/finetune"] * 0.2 == pytest.approx(30, abs=0.5)
    assert found["flat/train"] == 75
    equal_data = [of(replace(variant, equal_data=True)) for variant in TWO.variants]
    for equal in ("seconds", "steps"):
        found = divide_budget(replace(TWO, equal=equal), equal_data, clock, 60.0)
        assert found["wide/pretrain"] == found["wide/finetune"]
        assert sum(number * clock[name] for name, number in found.items()) == pytest.approx(60, abs=1)


def test_runs_of_like_configuration_have_one_folder() -> None:
    same = {of(WIDE, *words).run_folder(0, {"train": 3}) for words in ((), ("threads=1",), ("runs_dir=x", "name=else"))}
    assert len(same) == 1
    others = [of(WIDE, "model.decoder.width=96").run_folder(0, {"train": 3}), of(WIDE).run_folder(1, {"train": 3})]
    others.append(replace(of(WIDE), corpus="text-1234").run_folder(0, {"train": 3}))
    assert len({*same, *others, of(WIDE).run_folder(0, {"train": 4})}) == 5


def test_a_run_is_named_by_what_its_text_holds_and_not_by_where_it_is(plan: Plan) -> None:
    def name_run() -> str:
        variants, _ = prepare_variants(replace(TWO, variants=(FLAT,)), plan)
        (corpus,) = shard_corpora(variants).values()
        return replace(variants[0], corpus=corpus.folder.name).run_folder(0, {"train": 3}).name

    text, place = plan.data / "wikitext-2", f"source.path={plan.data / 'wikitext-2'}"
    plan = replace(plan, overrides=("source.kind=wikitext", place, "threads=1"))
    before = name_run()
    plan = replace(plan, overrides=("source.kind=wikitext", f"{place}/../wikitext-2", "threads=1"))
    assert name_run() == before
    (text / "train.txt").write_text((text / "valid.txt").read_text() * 5)
    assert name_run() != before


@pytest.mark.slow
def test_what_differs_in_rates_and_limits_alone_does_the_same_work(plan: Plan) -> None:
    plain = of(WIDE)
    for words in ("optimizer.learning_rate=1e-4",), ("finetune.rate_to=0", "pretrain.seconds=9"), ("seed=3", "name=x"):
        for phase in WIDE.phases:
            assert of(WIDE, *words).step_identity(phase) == plain.step_identity(phase)
    for words in ("optimizer.ema=0.9",), ("pretrain.decode_fraction=0.9",), ("batch.sequences=3",):
        assert of(WIDE, *words).step_identity("pretrain") != plain.step_identity("pretrain")
    assert len({plain.step_identity("pretrain"), plain.step_identity("finetune"), of(FLAT).step_identity("train")}) == 3
    twin = replace(WIDE, name="twin", options=(*WIDE.options, "optimizer.beta2=0.9"))
    variants, _ = prepare_variants(replace(TWO, variants=(WIDE, twin, FLAT)), plan)
    corpora = shard_corpora(variants)
    found = time_steps(variants, corpora, plan, lambda: False).seconds
    assert found["wide/pretrain"] == found["twin/pretrain"] > 0 and len(set(found.values())) == 3
    elsewhere = replace(plan, folder=plan.folder / "three", seeds=3)
    # Read, not measured again, so that runs are reused.
    assert time_steps(variants, corpora, elsewhere, lambda: True).seconds == found


@pytest.mark.slow
def test_a_variant_that_cannot_be_built_leaves_the_others(plan: Plan) -> None:
    wrong = replace(FLAT, name="wrong/1", options=(*FLAT.options, "model.hourglass.hierarchy=1@1 1@9999 1@1"))
    twin = replace(wrong, name="twin", options=(*wrong.options, "optimizer.beta2=0.9"))  # does the same work
    variants, _ = prepare_variants(replace(TWO, variants=(WIDE, wrong, twin, FLAT)), plan)
    for _ in range(2):  # measured, and read
        found = time_steps(variants, shard_corpora(variants), plan, lambda: False)
        assert all("factor 9999 exceeds" in found.failures.pop(name) for name in ("wrong/1", "twin"))
        assert not found.failures and {name.split("/")[0] for name in found.seconds} == {"wide", "flat"}
    alone, _ = prepare_variants(replace(TWO, variants=(wrong,)), plan)
    with pytest.raises(ConfigError, match="factor 9999 exceeds"):
        time_steps(alone, shard_corpora(alone), plan, lambda: False)


@pytest.mark.parametrize(
    ("added", "overrides", "message"),
    [
        (Variant("x", package="y"), (), "package: y is not known. Use one of "),
        (replace(WIDE, name="twin"), ("threads=1",), "^variants 'wide' and 'twin' are the same"),  # no override's fault
        (SHORT, ("batch.context=16",), "makes 'wide' and 'twin' the same model"),
        (SHORT, ("source.kind=images", "source.path=x"), "no models of pictures"),
    ],
)
def test_what_cannot_be_compared_is_refused(
    added: Variant, overrides: tuple[str, ...], message: str, plan: Plan
) -> None:
    with pytest.raises(ConfigError, match=message):
        prepare_variants(replace(TWO, variants=(*TWO.variants, added)), replace(plan, overrides=overrides))


def test_variants_of_other_data_than_the_overrides_give_are_left_out(plan: Plan) -> None:
    pictures = replace(FLAT, name="pictures", data="pictures")
    experiment = replace(TWO, variants=(*TWO.variants, pictures))
    variants, notes = prepare_variants(experiment, replace(plan, overrides=("source.kind=stdlib",)))
    assert [each.variant.name for each in variants] == ["wide", "flat"]
    assert notes[1] == "left out, because they do not take text: pictures"


@pytest.mark.slow
def test_from_the_command_to_the_page_and_not_twice(
    plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(catalogue, "load_experiment", lambda _: replace(TWO, measures=("profile",), across="MB kept"))
    monkeypatch.setitem(BUDGETS, "minutes", Budget("none", 0.5, 1, 2000, 1200))
    where = ["--data", str(plan.data), "--output", str(tmp_path / "out")]
    command = ["experiment", "two", *where, *plan.overrides, "--json"]
    assert main([*command, "--parallel", "2"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    folder = Path(found["folder"])
    assert found["name"] == "two" and [row["variant"] for row in found["rows"]] == ["wide", "flat"]
    wide, flat = found["rows"]
    assert 0 < wide["metrics"]["share of the decoder"]["mean"] < 1 < wide["bits"]
    assert set(flat["metrics"]) == {"milliseconds of a step", "MB kept", "linear cost"}
    assert flat["unit"] == "bits/char" and flat["word_perplexity"] > 1
    rows = list(csv.DictReader((folder / "two.csv").read_text().splitlines()))
    assert [row["paper: there"] for row in rows] == ["1.5", "1.25"] and float(rows[1]["MB kept"]) > 0
    assert (folder / "two.png").read_bytes().startswith(b"\x89PNG") and "nobody" in (folder / "report.html").read_text()
    made = {path: path.stat().st_mtime_ns for path in (tmp_path / "out" / "runs").rglob("model.safetensors")}
    for checkpoints in (tmp_path / "out" / "runs").rglob("checkpoints"):
        assert len(list(checkpoints.glob("step-*"))) <= 2  # the newest, and the best if it is another
    for config in (tmp_path / "out" / "runs").glob("*/config.yaml"):
        assert load_options(config).checkpoint.keep == 1
    assert main(command) == 0
    assert made == {path: path.stat().st_mtime_ns for path in (tmp_path / "out" / "runs").rglob("model.safetensors")}


@pytest.mark.nightly
def test_one_of_the_catalogue_is_run_whole_at_a_four_hundredth_of_minutes(
    plan: Plan, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = "hourglass-copy"
    where = ["--data", str(plan.data), "--output", str(tmp_path / "out")]
    assert main(["experiment", name, *where, "--seconds", "2.1", "--parallel", "2", "threads=1", "--json"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [row["variant"] for row in found["rows"]] == [each.name for each in load_experiment(name).variants]
    assert all(row["bits"] and row["steps"] and not row["failures"] for row in found["rows"])
    made = {path.name for path in Path(found["folder"]).iterdir()}
    assert made >= {"report.html", f"{name}.png", f"{name}.csv", f"{name}.json"}
    result = read_as(Result, Path(found["folder"]) / f"{name}.json")
    words = f"--seconds=2.1 --parallel=2 --data={plan.data} threads=1"
    assert result.command == f"haed experiment {name} --budget minutes {words}"
    assert result.date and "cores" in result.machine
    assert f"| command | `{result.command}` |" in format_page(load_experiment(name), result)


@pytest.mark.nightly
def test_a_failed_variant_leaves_the_others_and_a_stopped_one_goes_on(plan: Plan) -> None:
    wrong = replace(FLAT, name="wrong", options=(*FLAT.options, "resume=required"))
    experiment = replace(TWO, variants=(FLAT, wrong))
    long = replace(plan, seconds=600.0)
    with pytest.raises(TrainingInterrupted, match="saved"):
        make_runs(experiment, long, lambda: any(plan.runs_dir.glob("flat-*/train/metrics.jsonl")))
    done, notes = make_runs(replace(experiment, measures=("no such",)), plan)
    assert [each.failure is None for each in done] == [True, False] and "no such" in done[0].unmeasured
    found = make_row(done[0].variant, [done[0]])
    assert found.word_perplexity is not None and found.word_perplexity > 1
    assert found.bits is not None and found.failures[0].startswith("seed 0, no such: ")
    assert found.steps == read_position(done[0].folder / "train" / "checkpoints")["step"]
    assert "`train, evaluate` ended with 1" in str(done[1].failure) and "resume=required" in str(done[1].failure)
    assert done[0].folder.joinpath("evaluation.json").is_file()
    assert "wikitext-2, of whose valid and test splits" in notes[0]
    (done[0].folder / "evaluation.json").write_text("{")
    (damaged, _), _ = make_runs(experiment, plan)
    assert f"Delete {damaged.folder / 'evaluation.json'} to run it again" in str(damaged.failure)


def test_time_and_memory_are_of_one_run_of_a_variant() -> None:
    done = [VariantRun(variant, seed, Path()) for seed in range(3) for variant in (WIDE, FLAT)]
    done[0].failure = "lost"
    assert select_measured("samples", done) == done[1:]
    assert select_measured("profile", done) == [done[1], done[2]]


@pytest.mark.nightly
def test_without_a_corpus_the_embedded_one_serves_and_pictures_are_left_out(plan: Plan) -> None:
    variants, notes = prepare_variants(load_experiment("haed-table1"), replace(plan, data=Path("/nowhere")))
    assert [each.variant.data for each in variants] == ["text", "text"]
    (corpus,) = shard_corpora(variants).values()
    stdlib = load_options(None, ["source.kind=stdlib", f"shards_dir={plan.runs_dir}"])
    library = Corpus.open(shard_source(stdlib).location)
    assert corpus.split_counts("train") == library.split_counts("train")
    of_valid = b"".join(library.iterate_originals("valid"))
    read = list(corpus.iterate_originals("valid"))
    assert of_valid.startswith(b"".join(read)) and 2000 <= sum(map(len, read)) < 2000 + len(read[-1])
    for each in select_own(variants):  # none has another's model
        assert each.options.model == of(each.variant, "source.kind=stdlib").options.model
    assert "standard library" in notes[0] and "left out" in notes[1]


def test_articles_are_read_compressed_and_what_is_scored_is_cut_at_a_line(plan: Plan) -> None:
    folder = plan.data / "wikipedia-en-2015"
    folder.mkdir()
    lines = "".join(f" = Title {n} = \n and its article .\n" for n in range(200)).encode()
    for name in ("train-0", "train-1", "valid", "test"):
        (folder / f"{name}.txt.xz").write_bytes(lzma.compress(name.encode() + b"\n" + lines))
    where = prepare_source("articles", plan.data, 2000, plan.runs_dir / "corpora")
    corpus = Corpus.open(shard_source(load_options(None, [*where, f"shards_dir={plan.runs_dir}"])).location)
    train, valid = (b"".join(corpus.iterate_originals(split)) for split in ("train", "valid"))
    assert train.startswith(b"train-0") and b"train-1" not in train and len(train) > len(lines)
    assert valid.startswith(b"valid") and 1900 < len(valid) <= 2000 and valid.endswith(b"\n")


def test_recordings_of_the_held_out_splits_are_scored_until_there_are_enough(plan: Plan) -> None:
    (folder := plan.data / "fsdd-8khz").mkdir()
    with tarfile.open(folder / "recordings.tar.xz", "w:xz") as archive:
        for speaker, number in itertools.product("ab", range(12)):
            with wave.open(content := io.BytesIO(), "wb") as recording:
                recording.setparams((1, 2, 8000, 0, "NONE", ""))
                recording.writeframes(bytes(2 * 900))
            member = tarfile.TarInfo(f"recordings/7_{speaker}_{number}.wav")
            member.size = len(content.getvalue())
            archive.addfile(member, io.BytesIO(content.getvalue()))
    where = prepare_source("sound", plan.data, 2000, plan.runs_dir / "corpora")
    corpus = Corpus.open(shard_source(load_options(None, [*where, f"shards_dir={plan.runs_dir}"])).location)
    assert [corpus.split_counts(split).documents for split in ("train", "valid", "test")] == [4, 3, 3]
    assert sorted(path.name for path in Path(where[0].removeprefix("source.path=")).iterdir()) == [
        *("7_a_0.wav", "7_a_1.wav", "7_a_10.wav", "7_a_11.wav", "7_a_5.wav", "7_a_6.wav"),
        *("7_b_0.wav", "7_b_10.wav", "7_b_11.wav", "7_b_5.wav"),
    ]


def test_the_papers_sizes_have_the_papers_limits_and_the_corpus_that_is_given(plan: Plan) -> None:
    experiment = load_experiment("hourglass-table5")
    variants, notes = prepare_variants(experiment, replace(plan, seconds=None))
    assert [each.options.train.steps for each in select_own(variants)] == [200_000] * 4
    assert all(each.options.model.token.width == 512 for each in select_own(variants))
    assert "not the paper's corpus" in notes[-1]
    given = replace(plan, seconds=None, overrides=("source.kind=enwik8", "source.path=/data/enwik8"))
    variants, notes = prepare_variants(experiment, given)
    assert notes == ["data: as given"]
    assert {each.options.source.path for each in select_own(variants)} == {"/data/enwik8"}


@pytest.mark.parametrize("lines", [[], [(1.0, 2.0)], [(1.0, 2.0), (200.0, 1.0)]])
def test_any_number_of_points_is_drawn(lines: list[tuple[float, float]]) -> None:
    models = [PlottedModel("first", "bits", 1.5, line=lines), PlottedModel("second", "bits", paper=[None, 3.0])]
    assert plot_experiment(models, ["bits", "GB"], ("distance", "bits")).startswith(b"\x89PNG")
    models[1].place, models[0].paper = (2.0, 1.0), [1.0, 2.0]
    assert plot_experiment(models, ["bits", "GB"], ("GB", "bits")).startswith(b"\x89PNG")


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch.jit, in theirs
@pytest.mark.parametrize("name", PACKAGES)
def test_a_package_sees_no_later_byte_is_trained_and_scored_once(name: str, plan: Plan, tmp_path: Path) -> None:
    if not PACKAGES[name].is_installed:
        pytest.skip("pip install --no-deps -r benchmarks/peers.txt")
    variants, _ = prepare_variants(replace(TWO, variants=(Variant("theirs", package=name),)), plan)
    (corpus,) = shard_corpora(variants).values()
    compute = setup_compute(load_options(None, ["threads=1"]))
    _, found, evaluation = external_models.train_and_score(corpus, name, 2, 0, [1e-3], compute)
    assert evaluation.bytes == sum(map(len, corpus.iterate_originals("valid"))) > 1900
    assert 4 < evaluation.bits_per_byte < 10 and 2e6 < found["parameters"] < 3e6 and found["flops"] > 0


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_result_names_the_version_of_a_package(plan: Plan) -> None:
    if not PACKAGES["x-transformers"].is_installed:
        pytest.skip("pip install --no-deps -r benchmarks/peers.txt")
    theirs = Variant("theirs", package="x-transformers")
    result = run_experiment(replace(TWO, variants=(theirs, FLAT)), replace(plan, parallel=1))
    assert f"versions: x-transformers {version('x-transformers')}" in result.notes and ";" not in result.machine


def test_a_text_that_fills_no_window_of_a_package_is_refused() -> None:
    short, compute = torch.zeros(100, dtype=torch.uint8), setup_compute(load_options(None, []))
    with pytest.raises(ValueError, match="has 100 tokens, but this package needs 257"):
        external_models.score_bits(nn.Identity(), Package(nn.Identity, "torch"), short, compute)


def test_byte_pairs_are_learned_and_hold_every_byte() -> None:
    pytest.importorskip("tokenizers", reason="pip install --no-deps -r benchmarks/peers.txt")

    def as_tensor(content: bytes) -> Tensor:
        return torch.frombuffer(bytearray(content), dtype=torch.uint8)

    content = "the cat sat on the mat,\r\nthe other café \n".encode() * 9
    cut = external_models.learn_tokens(as_tensor(content), 300)
    tokens = cut(as_tensor(content))
    assert len(tokens) < len(content) / 2 and 256 < int(tokens.max()) < 300
    unseen = "QX\0\x7f§🙂\x85".encode()
    assert len(cut(as_tensor(unseen))) == len(unseen) and int(cut(as_tensor(unseen)).max()) < 256
    assert torch.equal(cut(as_tensor(content + b"\xc3")), tokens)  # half of a character
    with pytest.raises(UnicodeDecodeError):
        cut(as_tensor(b"\xc3 "))


@pytest.mark.slow
def test_packages_that_are_missing_are_said(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    experiment = replace(TWO, variants=(*TWO.variants, Variant("theirs", package="labml-nn")))
    monkeypatch.setitem(PACKAGES, "labml-nn", replace(PACKAGES["labml-nn"], module="no_such_module"))
    variants, notes = prepare_variants(experiment, plan)
    assert [each.variant.name for each in variants] == ["wide", "flat"]
    assert notes[-1].startswith("left out: labml-nn: not installed")
    monkeypatch.setitem(PACKAGES, "labml-nn", replace(PACKAGES["labml-nn"], module="torch"))
    assert len(prepare_variants(experiment, plan)[0]) == 3
    assert len(prepare_variants(experiment, replace(plan, data=Path("/nowhere")))[0]) == 3


def test_packages_read_the_bytes_of_any_text_that_ours_read(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Package(lambda: nn.Sequential(nn.Embedding(256, 8), nn.Linear(8, 256)), "torch", 8)
    monkeypatch.setitem(PACKAGES, "labml-nn", model)  # it may not be installed
    package = Variant("theirs", package="labml-nn")
    own = plan.data / "wikitext-2"
    given = replace(plan, overrides=("source.kind=text", f"source.path={own}", "source.pattern=*.txt", "threads=1"))
    variant = PackageVariant(package, plan.runs_dir, (*given.overrides[:3], f"shards_dir={plan.runs_dir}"))
    shard_corpora([variant])
    for split in ("train", "valid"):
        read = external_models.read_split(open_shards(variant.options), split)
        assert read.numpy().tobytes() == (own / f"{split}.txt").read_bytes()
    (found,), _ = prepare_variants(replace(TWO, variants=(package,), measures=("remembered",)), given)
    assert isinstance(found, PackageVariant) and found.remembers and not found.corpus
    torch.set_num_threads(2)
    next(found.train_steps("train", open_shards(variant.options), plan.runs_dir))
    assert torch.get_num_threads() == 1  # as ours, so that a clock counts what one core works
    others = [replace(variant, corpus="stdlib-1234"), replace(variant, words=(*variant.words, "precision=fp32"))]
    assert len({each.run_folder(0, {}) for each in (variant, *others)}) == 3 and "shards_dir" not in variant.identity


@pytest.mark.parametrize(("kind", "expected"), [("wall", 3.0), ("process", 0.5)])
@pytest.mark.parametrize("threads", [1, 2])
def test_a_second_is_one_of_wall_time_unless_asked_otherwise(
    kind: Literal["wall", "process"], expected: float, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the number of threads; by clocks that only the variant's steps advance."""
    passed = {"perf_counter": 0.0, "process_time": 0.0}

    def count_steps() -> Iterator[None]:
        while True:
            passed["perf_counter"] += 3.0
            passed["process_time"] += 0.5
            yield

    for name in passed:
        monkeypatch.setattr(timing.time, name, lambda name=name: passed[name])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        assert timing.measure_step_seconds({"variant": count_steps()}, clock=kind) == {"variant": expected}
    finally:
        torch.set_num_threads(before)


def test_the_clock_of_an_experiment_is_asked_for_and_said(tmp_path: Path) -> None:
    experiment, plan = catalogue.plan_experiment("hourglass-copy", "minutes", tmp_path)
    assert plan.clock == "wall" and "seconds of wall time" in describe_plan(experiment, plan)[0]
    other = catalogue.plan_experiment("hourglass-copy", "minutes", tmp_path, clock="process")[1]
    assert other.folder != plan.folder
    assert "seconds of what a core works (--clock process)" in describe_plan(experiment, other)[0]
