"""What comes next: with the probabilities that scores have, of a mixture and of a decoder alone."""

import json

import pytest

from pipeline.cli import main
from pipeline.config import ConfigError, load
from pipeline.options import Options
from pipeline.probe.sample import sample
from pipeline.run.files import pace
from pipeline.run.opened import Run, open_run
from pipeline.run.shards import shard
from pipeline.show.report import report
from pipeline.train.stages import train
from tests.conftest import of_kind


def probability(run: Run, text: str, before: str) -> float:
    """Of the chunk by which a text is longer, from the bits of both."""
    return 2.0 ** (run.score(before).bits - run.score(text).bits)


def test_next_chunks_have_the_probabilities_that_scores_have(
    options: Options, capsys: pytest.CaptureFixture[str]
) -> None:
    options.model.mixture.known, options.iem.correction, options.train.iem_weight = 300, "inclusion", 1.0
    options.precision, options.sample.prompts = "fp32", ["def ", "imp"]
    train(options)
    where = [f"{options.runs_dir}/{options.name}"]
    for given in ([], ["evaluate.likelihood=decoder"]):
        assert main(["next", *where, *given, "x def ", "x imp", "", "--count", "400", "--json"]) == 0
        closed, inside, nothing = json.loads(capsys.readouterr().out)
        mixed = not given
        run = Run(open_run(where[0]).folder, load(f"{where[0]}/config.yaml", given))
        assert (closed["before"], closed["opened"], inside["before"], inside["opened"]) == ("def ", None, "x ", "imp")
        assert nothing["before"] is nothing["opened"] is None
        for item, text in ((closed, "x def "), (nothing, "")):
            assert len(item["chunks"]) == 400 and (item["gate"] is not None) == mixed
            for chunk in [x for x in item["chunks"] if x["text"].isalpha()][:3]:
                assert chunk["probability"] == pytest.approx(probability(run, text + chunk["text"], text), rel=1e-3)
        one, two = (x for x in inside["chunks"] if x["text"] in ("import ", "imp"))
        ratio = probability(run, "x " + one["text"], "x ") / probability(run, "x " + two["text"], "x ")
        assert one["probability"] / two["probability"] == pytest.approx(ratio, rel=1e-3)
        for item in (closed, inside, nothing):
            assert sum(x["probability"] for x in item["chunks"]) + item["rest"] == pytest.approx(1)
            ranked = [x["probability"] for x in item["chunks"]]
            assert ranked == sorted(ranked, reverse=True)
            assert {x["count"] is not None for x in item["chunks"]} == ({True, False} if mixed else {False})
            assert all((x["summoned"] > 0) == (x["count"] is not None) for x in item["chunks"])
        assert all(x["text"].startswith("imp") for x in inside["chunks"])

    assert main(["next", *where, "x def ", "x imp", "--count=1"]) == 0
    shown = capsys.readouterr().out
    assert "x␣imp: the chunk after x␣, given that it begins with imp; summoned" in shown and "(all others)" in shown

    written = sample(options)
    assert all(item.summoned is not None and 0 < item.summoned <= 1 for item in written)
    assert "were summoned" in pace(written) and "characters/s" in report(options).read_text()
    options.evaluate.likelihood = "decoder"
    assert all(item.summoned is None and item.characters_per_second for item in sample(options))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["nowhere"], "no run 'nowhere'"), (["nowhere", "x", "--count", "0"], "must be at least 1")],
)
def test_errors_are_one_line(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["next", *arguments]) > 0
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_models_of_tokens_and_of_pictures_say_what_they_have(tiny: list[str], sharded, pictures: Options) -> None:  # noqa: ANN001
    made = load("flat", [*of_kind("hourglass", tiny), "name=tokens"])
    shard(made)
    train(made)
    with pytest.raises(ConfigError, match="predicts tokens, not chunks: `haed sample`"):
        open_run("tokens", made.runs_dir).next("x")
    run = open_run(pictures.name, pictures.runs_dir)
    assert run.next().chunks[0].hex == "00" * 12 and run.next().gate is None
    with pytest.raises(ValueError, match="takes no prompt"):
        run.next("x")
