"""Evaluation: where the bits are spent, beside the exact likelihood of documents scored by hand."""

import gzip
import json
import wave
from collections import Counter, defaultdict
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from pipeline.config import Options, load_options
from pipeline.evaluation.evaluate import evaluate_run, format_evaluation
from pipeline.reporting.comparison import compare_runs
from pipeline.run.files import Evaluation, RememberedParts, format_number, read_as
from pipeline.run.opened import Run, count_words
from pipeline.run.run_directory import RunFolder
from pipeline.run.sharding import shard_source
from pipeline.training.stages import train


def test_partitions_of_the_bits(options: Options) -> None:
    train(options)
    options.evaluate.baselines = False
    found = evaluate_run(options)
    assert found.breakdown is not None
    run = Run(RunFolder.find(options.name, options.runs_dir))
    corpus = run.folder.open_corpus()
    seen = Counter[bytes]()
    for tokens, lengths in corpus.iterate_documents("train"):
        seen.update(chunk.tobytes() for chunk in np.split(tokens, np.cumsum(lengths)[:-1]))
    by_length, unseen = defaultdict[str, float](float), 0.0
    for scored in run.score_documents(corpus.iterate_documents("test")):
        new, windows = scored.part.new, scored.part.windows
        chunks = windows.tokens[new].numpy(), windows.lengths[new].tolist(), scored.bits.tolist()
        for row, length, bits in zip(*chunks, strict=True):
            by_length[str(length)] += bits
            unseen += bits * (seen[row[:length].astype(np.uint8).tobytes()] == 0)
    assert {part.of: part.bits for part in found.breakdown.by_length} == pytest.approx(by_length, rel=1e-4)
    assert found.breakdown.by_frequency[0].of == "0"
    assert found.breakdown.by_frequency[0].bits == pytest.approx(unseen, rel=1e-4)
    chunks = corpus.split_counts("test").chunks
    assert not found.breakdown.decoder_by_frequency and found.parts is None and found.likelihood is None
    for parts in list(vars(found.breakdown).values())[:3]:
        assert sum(part.bits for part in parts) == pytest.approx(found.bits, rel=1e-5)
        assert sum(part.tokens for part in parts) == found.tokens
    assert found.breakdown.by_position[0].chunks == sum(part.chunks for part in found.breakdown.by_length) == chunks
    path = run.folder.path / "evaluation.json"
    content = json.loads(path.read_text())
    assert read_as(Evaluation, path) == found and found.likelihood_note == "" and found.decoder_metric is None
    words = sum(map(count_words, corpus.iterate_originals("test")))
    assert found.word_perplexity == content["word_perplexity"] == pytest.approx(2 ** (found.bits / words))
    assert f"perplexity of words {format_number(found.word_perplexity)}\n" in format_evaluation(found)
    for times, alone in ((1.01, format_number(found.word_perplexity**1.01)), (30, "–")):  # 30: no float holds it
        parts = RememberedParts(times * found.bits, {}, {})
        assert f", {alone} by the model alone" in replace(found, remembered=parts).perplexity_note


@pytest.mark.parametrize(
    ("value", "shown"), [(1.23456, "1.235"), (-999.96, "-1,000"), (15249.7, "15,250"), (1e15, "1e+15"), (0.0, "0")]
)
def test_numbers_are_shown_with_all_digits_before_the_point(value: float, shown: str) -> None:
    assert format_number(value) == shown


def test_each_value_of_pictures_and_sound_counts_as_one(tiny: list[str], tmp_path: Path) -> None:
    """Whatever bytes they make together: these are é again and again."""
    pictures, sound = tmp_path / "pictures", tmp_path / "sound"
    for place in (pictures, sound):
        place.mkdir()
    for split in ("train", "valid", "test"):
        raster = np.tile(np.array([195, 169], np.uint8), (5, 24))
        np.savez(pictures / f"{split}.npz", data=raster.reshape(5, 16, 3).transpose(0, 2, 1).reshape(5, -1))
        with wave.open(str(sound / f"{split}.wav"), "wb") as file:
            file.setparams((1, 2, 8000, 0, "NONE", ""))
            file.writeframes(
                (np.random.default_rng(0).normal(0, 9000, 3000)).clip(-32768, 32767).astype("<i2").tobytes()
            )
    flat = [*tiny, "chunker.kind=fixed", "chunker.k=6", "evaluate.baselines=true"]
    flat += ["train.steps=2", "validation.times=0"]
    for kind, place, baselines in (("images", pictures, 0), ("audio", sound, 8)):
        words = [f"source.kind={kind}", f"source.path={place}", "source.pattern=*", f"name={kind}"]
        made = load_options("quickstart", [*flat, *words])
        shard_source(made)
        train(made)
        found = evaluate_run(made)
        assert found.word_perplexity is None and found.perplexity_note == ""
        assert found.characters == found.bytes == found.tokens and len(found.baselines) == baselines
        assert found.bits_per_dim == found.bits_per_token == found.headline.value
        assert "bits/dim" in format_evaluation(found)
        assert all(each.bits_per_char == pytest.approx(each.bits_per_byte) for each in found.baselines)
        (row,) = compare_runs([kind], made.runs_dir, tmp_path / "comparison").rows
        assert row.unit == "bits/dim"
        run = Run(RunFolder.from_options(made))
        assert run.score("éé".encode()).characters == 4
        with pytest.raises(ValueError, match="not of text. Give the values as bytes"):
            run.score("éé")


def test_the_parts_of_a_mixture(mixed: Options) -> None:
    """By hand from the parts of each chunk; the decoder alone is what `evaluate.likelihood=decoder` gives."""
    found = evaluate_run(mixed)
    run = Run(RunFolder.from_options(mixed), mixed)
    rows = []
    for scored in run.score_documents(run.folder.open_corpus().iterate_documents("test")):
        lengths = scored.part.windows.lengths[scored.part.new]
        assert scored.known is not None and scored.gate is not None
        rows.append(torch.stack([lengths, scored.bits, scored.decisions.sum(1), scored.known, scored.gate], 1))
    lengths, bits, decoder, known, gate = torch.cat(rows).T
    hit = known.isfinite()
    assert 0 < int(hit.sum()) < len(hit)
    joint = -(gate * torch.exp2(-known) + (1 - gate) * torch.exp2(-decoder)).log2()
    torch.testing.assert_close(bits, joint, rtol=1e-5, atol=1e-5)
    assert found.likelihood == "mixture" and found.bits == pytest.approx(float(bits.sum()))
    assert found.parts is not None and vars(found.parts) == pytest.approx(
        {
            "known": 100,
            "unknown_share": 1 - float(hit.double().mean()),
            "gate": float(gate.mean()),
            "decoder_bits_per_token": float(decoder.sum() / lengths.sum()),
            "known_bits_per_token": float(known[hit].sum() / lengths[hit].sum()),
            "known_decoder_bits_per_token": float(decoder[hit].sum() / lengths[hit].sum()),
            "known_flops_per_token": 2 * 100 * 16 * int(hit.sum()) / float(lengths.sum()),
        },
        rel=1e-5,
    )
    assert found.breakdown is not None
    parts = vars(found.breakdown)
    totals = {name: sum(part.bits for part in parts) for name, parts in parts.items()}
    assert [totals["by_length"], totals["by_frequency"]] == pytest.approx([found.bits] * 2)
    assert [totals["by_position"], totals["decoder_by_frequency"]] == pytest.approx([float(decoder.sum())] * 2)
    assert totals["known_by_frequency"] == pytest.approx(float(known[hit].sum()))
    assert str(found.parts) in format_evaluation(found) and "the decoder's bits by position" in format_evaluation(found)
    path = run.folder.path / "evaluation.json"
    assert read_as(Evaluation, path) == found
    mixed.evaluate.likelihood = "decoder"
    alone = evaluate_run(mixed)
    assert alone.likelihood == "decoder" and alone.parts is None
    assert "These bits are of the decoder alone" in format_evaluation(alone)
    assert alone.bits == pytest.approx(float(decoder.sum()))
    assert found.decoder_metric == pytest.approx(alone.bits_per_char)


def test_pictures_in_bits_per_value(pictures: Options) -> None:
    found = evaluate_run(pictures)
    run = Run(RunFolder.find(pictures.name, pictures.runs_dir))
    each = [
        sum(float(scored.bits.sum()) for scored in run.score_documents([picture]))
        for picture in run.folder.open_corpus().iterate_documents("test")
    ]
    assert found.characters == 48 * len(each) and found.bits == pytest.approx(sum(each), rel=1e-5)
    assert found.bits_per_dim == found.bits_per_char == pytest.approx(np.mean(each) / 48, rel=1e-5)
    error = np.std(each, ddof=1) / 48 / np.sqrt(len(each))
    assert found.standard_error == pytest.approx(error, abs=1e-6)
    assert "bits/dim ± " in format_evaluation(found) and f"{found.characters:,} values" in format_evaluation(found)


def test_a_file_is_scored_as_the_source_would_read_it(run: Path, tmp_path: Path) -> None:
    lines, packed = tmp_path / "lines.txt", tmp_path / "packed.gz"
    options = RunFolder(run).load_options()
    lines.write_bytes(b"def f(x):\r\n    return x\r\n")
    kept = evaluate_run(options, lines)
    options.source.newlines = "lf"
    converted = evaluate_run(options, lines)
    assert (kept.bytes, converted.bytes) == (25, 23) and kept.text != converted.text
    packed.write_bytes(gzip.compress(b"def f(x):"))
    with pytest.raises(ValueError, match="packed.gz is .*, not a text"):
        evaluate_run(options, packed)
    lines.write_bytes("def f(x):\n    return x\n".encode("utf-16"))
    with pytest.raises(ValueError, match="lines.txt is text in UTF-16LE with a byte order mark.*iconv"):
        evaluate_run(options, lines)


def test_a_model_of_values_scores_no_files(pictures: Options, tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(b"\x89PNG")
    with pytest.raises(ValueError, match="this run's model is of pictures or sound, and `--text` reads text alone"):
        evaluate_run(pictures, tmp_path / "a.png")
