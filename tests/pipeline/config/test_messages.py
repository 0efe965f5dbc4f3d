"""Mistakes at the command line: each is answered by what to type, and that is taken."""

import re
import shlex
from pathlib import Path

import pytest

from flows.cli import main
from flows.commands import COMMANDS as MORE
from pipeline.arguments import load_run_options, parse_arguments
from pipeline.commands import COMMANDS
from pipeline.config import ConfigError, list_presets, load_options, type_of
from pipeline.config.messages import _COMMANDS, _ELSEWHERE, _OPTIONS, _VALUES, find_similar_keys, suggest_option
from pipeline.config.schema import option_names
from tests.pipeline.conftest import CommandLine, exit_status

ALL = (*COMMANDS, *MORE)


@pytest.mark.parametrize(
    ("override", "advice"),
    [
        ("pretrain.lr=0.1", "use optimizer.learning_rate=0.1"),
        ("pretrain.learning_rate=1e-3", "use optimizer.learning_rate=1e-3"),
        ("learning-rate=3e-4", "use optimizer.learning_rate=3e-4"),
        ("batch_size=8", "use batch.sequences=8"),
        ("train.batch_size=8", "use batch.sequences=8"),
        ("model.n_layers=3", "use model.main.layers=3"),
        ("train.max_steps=10", "use train.steps=10"),
        ("epochs=3", "did you mean pretrain.epochs= or finetune.epochs= or train.epochs=?"),
        ("num_workers=2", "did you mean loader.workers= or shard.workers=?"),
        ("grad_clip=1", "use optimizer.clip_norm=1"),
        ("warmup_ratio=0.1", "use optimizer.warmup_steps=100"),
        ("output_dir=out", "use runs_dir=out"),
        ("data=my-texts", "use source.path=my-texts"),
        ("fp16=true", "use precision=bf16"),
        ("bf16=false", "use precision=fp32"),
        ("gpu=0", "use device=cuda:0"),
        ("num_gpus=2", "use launcher.processes=2"),
        ("context_length=256", "use batch.context=256"),
        ("save_every=100", "did you mean checkpoint.every_steps= or checkpoint.every_seconds=?"),
        ("eval_interval=100", "use validation.times=100"),
        ("logging_steps=10", "use log_steps=10"),
        ("resume_from_checkpoint=true", "use resume=required"),
        ("max_new_tokens=50", "use sample.chunks=50"),
        ("wandb=true", "`tracking=wandb` adds a tracker"),
        ("tokenizer=bpe", "there is no vocabulary"),
        ("optim=adamw", "the optimizer is AdamW"),
        ("model.encoder.widht=9", "did you mean model.encoder.width=9?"),
        ("model=haed", "model.kind=haed"),
        ("model.encoder=lstm", "model.encoder.kind=lstm"),
        ("chunker=fixed", "chunker.kind=fixed"),
        ("source=text", "source.kind=text"),
        ("optimizer=adam", "such as optimizer.learning_rate=0.002"),
        ("pretrain=100", "such as pretrain.steps=100"),
        ("device=gpu", "Write device=cuda"),
        ("device=0", "Write device=cuda:0"),
        ("device=gpu:1", "Write device=cuda:1"),
        ("device=gpu0", "Write device=cuda:0"),
        ("batch.size=8", "use batch.sequences=8"),
        ("model:haed", "model.kind=haed"),
        ("model:", "model is a section of options"),
        ("precision=fp16", "Write precision=bf16"),
        ("precision=float32", "Write precision=fp32"),
        ("evaluate.split=val", "Write evaluate.split=valid"),
        ("model.kind=hourglas", "Write model.kind=hourglass"),
        ("source.kind=json", "Write source.kind=jsonl"),
        ("chunker.kind=word", "Write chunker.kind=words"),
        ("resume=true", "Write resume=required"),
        ("pretrain.seconds=2m", "Write pretrain.seconds=120"),
        ("pretrain.seconds=2 min", "Write pretrain.seconds=120"),
        ("pretrain.seconds=1h30m", "Write pretrain.seconds=5400"),
        ("pretrain.seconds=90s", "Write pretrain.seconds=90"),
        ("pretrain.seconds=1:30", "Write pretrain.seconds=90"),
        ("checkpoint.every_seconds=1:00:05", "Write checkpoint.every_seconds=3605"),
        ("pretrain.steps=10k", "Write pretrain.steps=10000"),
        ("pretrain.steps=1e3", "Write pretrain.steps=1000"),
        ("pretrain.steps=1,000", "Write pretrain.steps=1000"),
        ("pretrain.steps=none", "Write pretrain.steps=null"),
        ("pretrain.steps=unlimited", "Write pretrain.steps=null"),
        ("seed=0x10", "Write seed=16"),
        ("optimizer.learning_rate=0,5", "Write optimizer.learning_rate=0.5"),
        ("optimizer.beta2=95%", "Write optimizer.beta2=0.95"),
        ("source.valid_percent=5%", "Write source.valid_percent=5"),
        ("loader.cache_gigabytes=50GB", "Write loader.cache_gigabytes=50"),
        ("shard.megabytes=16 MB", "Write shard.megabytes=16"),
        ("iem.duplicates=enabled", "Write iem.duplicates=true"),
        ("optimizer.learning_rate=nan", "must be a finite number"),
        ("optimizer.learning_rate=-inf", "must be a finite number"),
        ("sample.prompts=[echo ${HOME}]", 'Write a list as [1, 2] or ["a", "b"]'),
        ("source.include=*.py", "there is no option source.include: use source.pattern=*.py"),
        ("seed=*5", "seed=*5: is not a whole number"),
        ("sample.prompts=def", 'expected a list, such as [a, b]. Write \'sample.prompts=["def"]\''),
        ("source.offsets=5,9", "Write 'source.offsets=[5,9]'"),
        ("precision=16", "Write precision=bf16"),
        ("resume=1", "Write resume=required"),
        ("optimizer.learning_rate=0,001", "Write optimizer.learning_rate=0.001"),
        ("optimizer.learning_rate=0,0005", "Write optimizer.learning_rate=0.0005"),
        ("pretrain.minutes=2", "use pretrain.seconds=120"),
        ("train.hours=1.5", "use train.seconds=5400"),
        ("threads=auto", "Write threads=null"),
        ("trian.steps=10", "did you mean train.steps=10?"),
        ("TRAIN.STEPS=10", "did you mean train.steps=10?"),
        ("decoder.kind=lstm", "did you mean model.decoder.kind=lstm?"),
        ("hydra.run.dir=x", "there is no option hydra.run.dir"),
        ("model=hred", "or use the preset: `--config hred`"),
        ("model.kind=HAED", "Write model.kind=haed"),
        ("source=my-texts", "source.path=my-texts"),
        ("source.kind=csv", "Write source.kind=datasets"),
        ("source.kind=Text", "Write source.kind=text"),
        ("seed==5", "Write seed=5"),
        ("seed=5,", "Write seed=5"),
        ("source.valid_percent=0.05", "Write source.valid_percent=5"),
        ("batch.sequences=1__0", "batch.sequences=1__0: is not a whole number"),
        ("train.seconds=1_.5s", "train.seconds=1_.5s: is not a number"),
        (f"seed=0x{'f' * 400}", "is not a whole number"),
        (f"train.seconds={'9' * 5000}:00", "is not a number"),
    ],
)  # fmt: skip
def test_an_option_by_another_name_or_value(override: str, advice: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_options(None, [override])
    message = str(caught.value)
    assert advice in message and "\n" not in message and len(message) < 300
    advised = re.search(r"(?:use|Write) ([a-z_.]+=\S+)", message) or re.search(r"as ([a-z_.]+=\S+?);?(?: |$)", message)
    if advised:
        load_options(None, [advised[1], *(["iem.correction=none"] if "duplicates" in advised[1] else [])])


@pytest.mark.slow
def test_all_that_is_advised_is_there() -> None:
    for keys in _OPTIONS:
        assert all(type_of(key.replace("…", "train")) is not None for key in keys.split()), keys
    for name in (name for names in _OPTIONS.values() for name in names.split()):
        key = find_similar_keys(name)[0]
        value = "0.5" if type_of(key) is float else "local" if key == "launcher.dask" else "1"
        assert name not in option_names() and (hint := suggest_option(name, value)), name
        if advised := re.search(r"use (\S+)", hint):
            load_options(None, [advised[1], *(["model.kind=hourglass"] if "model of tokens" in hint else [])])
    names = {command.name for command in ALL}
    for said in _ELSEWHERE.values():
        for command in re.findall(r"`([^`]*)`", said):
            if command.removeprefix("haed ") in names:
                continue  # a command alone
            if command.startswith("haed "):
                parse_arguments(shlex.split(command)[1:], "haed", ALL)
            elif "=" in command:
                load_options(None, [command])
    for key, meant in _VALUES.items():
        option = key if "." in key else next(name for name in option_names() if f".{name}".endswith(f".{key}"))
        for value in meant.values():
            load_options(None, [f"{option}={value}"])
    assert set(_COMMANDS) <= names


@pytest.mark.parametrize(
    ("words", "status", "advice"),
    [
        ("run quickstart", 1, "`haed run --config quickstart`"),
        ("pretrain quickstart", 1, "`haed run --config quickstart`"),
        ("evaluate quickstart", 1, "quickstart is a preset"),
        ("compare quickstart hred", 1, "quickstart is a preset"),
        ("cat there seed=3", 2, "haed cat takes no key=value"),
        ("evaluate mine.yaml", 1, "Give a configuration as `--config mine.yaml`"),
        ("pretrain mine.yaml", 1, "Give a configuration as `--config mine.yaml`"),
        ("run texts", 1, "To train on it, use source.path=texts"),
        ("pretrain --config there", 2, "is a run, not a preset. Name it without `--config`"),
        ("pretrain --config runs/there", 2, "runs/there is a run. Name it without `--config`"),
        ("pretrain there --config quickstart", 2, "there is a run, which has its own options. Leave out `--config quickstart`"),
        ("pretrain --config quick-start", 2, "Did you mean quickstart?"),
        ("pretrain --config Quickstart", 2, "Did you mean quickstart?"),
        ("pretrain --config top_down", 2, "Did you mean top-down?"),
        ("config quickstart.yaml", 2, "quickstart is a preset: use `--config quickstart`"),
        ("config configs/quickstart.yaml", 2, "quickstart is a preset: use `--config quickstart`"),
        ("config mine.toml", 2, "Write one option per line, such as `seed: 1`"),
        ("config list.yaml", 2, "is not a mapping of options but a list"),
        ("config tabs.yaml", 2, "line 2, column 1: a tab is not allowed. Indent with spaces"),
        ("config model.yaml", 2, "model=haed: model is a section of options. Set one option of it: model.kind=haed"),
        ("config lr.yaml", 2, "lr.yaml: there is no option pretrain.learning_rate: use optimizer.learning_rate=0.01"),
        ("finetune", 2, "as in haed finetune RUN (runs in runs/: there)"),
        ("finetune finetune.seconds=3", 2, "as in haed finetune RUN (runs in runs/: there)"),
        ("evaluate", 2, "required: RUN; runs in runs/: there"),
        ("pretrain --config quickstart --source.path x", 2, "options have no dashes. Use source.path=x"),
        ("pretrain --config quickstart --source.path=x", 2, "options have no dashes. Use source.path=x"),
        ("pretrain --seed 3", 2, "options have no dashes. Use seed=3"),
        ("pretrain --steps 3", 2, "options have no dashes. Use pretrain.steps=3"),
        ("sample there --promt x", 2, "did you mean --prompt?"),
        ("sample there --zzz", 2, "unrecognized arguments: --zzz"),
        ("sample there --prompt -one:0", 2, "expected one argument; use --prompt=-one:0"),
        ("neighbours there -(x", 2, "unrecognized arguments: -(x; put -- before a text that begins with a dash"),
        ("neighbours", 2, "the following arguments are required: RUN"),
        ("pretrain --lr 3", 2, "use optimizer.learning_rate=3"),
        ("pretrain --batch-size=3", 2, "use batch.sequences=3"),
        ("evaluate there --batch-size 3", 2, "use batch.sequences=3"),
        ("pretrain source.path = x", 2, "remove the spaces around the equals sign. Use source.path=x"),
        ("pretrain source.path =x", 2, "remove the spaces around the equals sign. Use source.path=x"),
        ("pretrain lr = 3", 2, "remove the spaces around the equals sign. Use lr=3"),
        ("pretrain model = haed", 2, "remove the spaces around the equals sign. Use model=haed"),
        ("pretrain source.path= x", 2, "remove the space after the equals sign. Use source.path=x"),
        ("evaluate there evaluate.split = valid", 2, "the equals sign. Use evaluate.split=valid"),
        ("pretrain source.path:x", 1, "no run 'source.path:x'"),
        ("sample there -p def", 2, "did you mean --prompt?"),
        ("pretrain -c quickstart", 2, "did you mean --config?"),
        ("pretrain \u2014config quickstart", 2, "begins with a long dash. Use --config"),
        ("next run evaluate.stag=finetune", 2, "Use evaluate.stage=finetune, or -- evaluate.stag=finetune for this text"),
        ("pretrain --config quickstart --config hred", 2, "argument --config: it was given twice. Give it once"),
        ("evaluate there --text a --text b", 2, "argument --text: it was given twice. Give it once"),
        ("serve there", 2, "`haed explore there`"),
        ("list", 2, "`haed serve` shows them in a browser"),
        ("ls", 2, "runs are folders in runs/"),
        ("eval there", 2, "Did you mean haed evaluate?"),
        ("evalute there", 2, "Did you mean haed evaluate?"),
        ("generate there", 2, "Did you mean haed sample?"),
        ("fit", 2, "Did you mean haed run?"),
        ("ui", 2, "Did you mean haed serve?"),
        ("server", 2, "Did you mean haed serve?"),
        ("analyze there", 2, "Did you mean haed analyse?"),
        ("neighbors there", 2, "Did you mean haed neighbours?"),
        ("fine-tune there", 2, "Did you mean haed finetune?"),
        ("init", 2, "`haed run --config quickstart name=mine`"),
        ("sample there -n 3", 2, "did you mean --samples?"),
        ("sample there -t 0.5", 2, "use sample.temperature=0.5"),
        ("sample there --temperature 0.5", 2, "options have no dashes. Use sample.temperature=0.5"),
        ("neighbours there a -k 3", 2, "did you mean --count?"),
        ("next there a --top-k 3", 2, "did you mean --count?"),
        ("evaluate there --config quickstart", 2, "haed evaluate takes no preset and no file"),
        ("pretrain --config quickstart train/steps=3", 2, "Use train.steps=3"),
        ("serve --port 99999", 2, "99999 is not a port. Use a number up to 65535, such as 4300"),
        ("serve --port http", 2, "http is not a port"),
        ("explore there --port -1", 2, "-1 is not a port"),
        ("serve 8080", 2, "--port 8080"),
        ("serve port=8080", 2, "did you mean --port 8080?"),
        ("--config quickstart", 2, "the command comes first. Use haed run --config quickstart"),
        ("--version", 2, "`pip show haed` prints the version"),
        ("quickstart", 2, "It is a preset: haed run --config quickstart"),
        ("haed run", 2, "haed is written twice"),
        ("logs there", 2, "metrics are in runs/NAME"),
        ("pretrain -v", 2, "`--debug` prints tracebacks"),
        ("seed=3", 2, "seed=3 is an option, and the command comes first"),
        ("frobnicate", 2, "haed --help lists the commands"),
    ],
)  # fmt: skip
def test_a_command_that_is_none(
    words: str, status: int, advice: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "runs" / "there").mkdir(parents=True)
    (here / "runs" / "there" / "config.yaml").write_text("name: there\n")
    (here / "texts").mkdir()
    files = {"mine.yaml": "seed: 1\n", "mine.toml": "seed = 1\n", "list.yaml": "- seed\n"}
    files |= {"model.yaml": "model: haed\n", "tabs.yaml": "pretrain:\n\tseconds: 3\n"}
    files |= {"lr.yaml": "pretrain: {learning_rate: 0.01}\n"}
    for name, content in files.items():
        (here / name).write_text(content)
    assert exit_status(main, words.split()) == status
    said = capsys.readouterr().err
    assert advice in said and "Traceback" not in said


def test_flags_may_stand_before_the_command(haed: CommandLine) -> None:
    assert '"seed": 3' in haed.output("--json", "config", "seed=3")


@pytest.mark.usefixtures("here")
def test_every_preset_is_told_from_a_run() -> None:
    for preset in list_presets():
        with pytest.raises(FileNotFoundError, match=f"`haed run --config {preset}` makes a run of it"):
            load_run_options(preset, [])


@pytest.mark.parametrize("word", ["source.kind=database", "source.kind=dates", "chunker.kind=worlds_away"])
def test_a_value_that_is_like_none_is_not_guessed(word: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load_options(None, [word])
    assert "expected one of" in str(refused.value) and "Write" not in str(refused.value)


def test_a_boolean_is_no_number() -> None:
    for key in ("seed", "sample.temperature", "threads"):
        with pytest.raises(ConfigError, match=f"{key}=true: is not a "):
            load_options(None, (), {key: True})
    assert load_options(None, (), {"deterministic": False}).deterministic is False
