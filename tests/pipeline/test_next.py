"""What comes next: with the probabilities that scores have, of a mixture and of a decoder alone."""

from pathlib import Path
from typing import Any

import pytest

from pipeline.arguments import load_run_options
from pipeline.config import SampleOptions
from pipeline.inference import sample
from pipeline.reporting.report import write_report
from pipeline.run.files import describe_speed
from pipeline.run.opened import Run, open_run
from pipeline.run.run_directory import RunFolder
from tests.pipeline.conftest import CommandLine

PARTS = ["known", "copied", "repeated", "recalled", "spelled"]


def probabilities(run: Run, item: dict[str, Any], before: str) -> tuple[list[float], list[float]]:
    """Of three listed chunks, as they are listed, and from the bits of texts that they end."""
    texts = [(each, before.encode() + bytes.fromhex(each["hex"])) for each in item["chunks"]]
    cut = len(run.chunker.split(before.encode())[1]) + 1
    some = [(each, text) for each, text in texts if len(run.chunker.split(text)[1]) == cut][:3]  # one chunk there too
    assert len(some) == 3
    return (
        [each["probability"] for each, _ in some],
        [2.0 ** (run.score(before).bits - run.score(text).bits) for _, text in some],
    )


def test_next_chunks_have_the_probabilities_that_scores_have(run: Path, haed: CommandLine) -> None:
    where = str(run)
    for given in ([], ["evaluate.likelihood=decoder"]):
        closed, inside, nothing = haed.json("next", where, *given, "x def ", "x imp", "", "--count", "30")
        opened, mixed = Run(RunFolder(run), load_run_options(where, given, "next")), not given
        assert (closed["before"], closed["opened"], inside["before"], inside["opened"]) == ("def ", None, "x ", "imp")
        assert nothing["before"] is nothing["opened"] is None
        for item, text in ((closed, "x def "), (nothing, "")):
            listed, scored = probabilities(opened, item, text)
            assert listed == pytest.approx(scored, rel=1e-3)
        listed, scored = probabilities(opened, inside, "x ")
        assert listed[0] / listed[1] == pytest.approx(scored[0] / scored[1], rel=1e-3) and sum(listed) > sum(scored)
        for item in (closed, inside, nothing):
            ranked = [each["probability"] for each in item["chunks"]]
            assert len(ranked) == 30 and ranked == sorted(ranked, reverse=True)
            assert sum(ranked) + item["rest"] == pytest.approx(1) and (item["gate"] is not None) == mixed
            assert all(sum(each["parts"].values()) == pytest.approx(1) for each in item["chunks"])
            assert all((each["parts"].get("known", 0) > 0) == (each["count"] is not None) for each in item["chunks"])
        if mixed:
            there = opened.next("x def ")
            of_parts = [there.gate, *(each.parts for each in there.chunks)]
            assert all(list(parts) == PARTS and sum(parts.values()) == pytest.approx(1) for parts in of_parts)
        known = [each["text"] for each in inside["chunks"] if each["count"]]
        assert ("import " in known) == mixed and all(each["text"].startswith("imp") for each in inside["chunks"])

    shown = haed.output("next", where, "x def ", "x imp", "--count=1")
    assert "x␣imp: the chunk after x␣, if it begins with imp; by part: known" in shown and "(all others)" in shown

    options = RunFolder(run).load_options(["sample.prompts=['def ', imp]"])
    written = sample(options)
    assert all(list(item.parts) == PARTS and sum(item.parts.values()) == pytest.approx(1) for item in written)
    assert "recalled" in describe_speed(written) and "recalled" in write_report(options).read_text()


@pytest.mark.parametrize("prompt", ["x def ", "x imp"])
def test_samples_of_one_chunk_have_the_probabilities_of_next(prompt: str, run: Path) -> None:
    opened, draws = open_run(run), 400
    begun = b"" if prompt.endswith(" ") else b"imp"
    texts = opened.sample(prompt, draws, SampleOptions(chunks=1, temperature=1.0, top_p=1.0))
    assert all(begun + text for text in texts)
    for likely in opened.next(prompt, 3).chunks:
        expected = draws * likely.probability
        drawn = sum(begun + text == bytes.fromhex(likely.hex) for text in texts)
        assert abs(drawn - expected) < 5 * max(1, expected) ** 0.5
