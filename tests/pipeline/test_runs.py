"""The run folder: what was made from the present checkpoint is recognised."""

from pathlib import Path

from pipeline.evaluate import evaluate
from pipeline.index import index
from pipeline.inference import open_run
from pipeline.options import Options
from pipeline.runs import RunFolder
from pipeline.training import train


def test_what_was_made_from_the_present_checkpoint(options: Options) -> None:
    options.validation.times = 0  # else an older checkpoint may stay the best
    train(options)
    options.evaluate.yardsticks = False
    folder = RunFolder.find(options.name, options.runs_dir)
    assert folder.digest() == open_run(folder.path).digest
    assert not folder.is_made("evaluation.json", options) and not folder.is_made("index/meta.json", options)
    evaluate(options)
    index(options)
    assert folder.is_made("evaluation.json", options, split="test") and folder.is_made("index/meta.json", options)
    assert not folder.is_made("evaluation.json", options, split="valid")
    options.train.steps = 6
    train(options)
    assert not folder.is_made("evaluation.json", options, split="test")
    (Path(folder.path) / "evaluation.json").write_text("[")
    assert not folder.is_made("evaluation.json", options)
