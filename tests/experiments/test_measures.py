"""Measures of a run beside its bits: against brute force, and what is shown of them."""

import math
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from experiments import measures
from experiments.activation_memory import SavedBytes, compute_saved_bytes, measure_saved_bytes
from experiments.measures import measure_memory
from haed.base import ChunkingSpec, SequenceModel, TokenBatch
from haed.options import HourglassOptions, IEMOptions, ModelOptions, MultiscaleOptions, TokenOptions
from haed.registry import make_system
from pipeline.run.opened import Continuations, Run, open_run
from pipeline.run.system import SavedActivations
from tests.experiments.conftest import train_tokens


def test_examples_are_of_the_text_and_bits_of_frequencies(text: Path, sharded: Path, tmp_path: Path) -> None:
    bag = ["model.multiscale.layers=1@4", "model.multiscale.upsampling=repeat", "train.steps=60"]
    run = train_tokens("top-down", text, sharded, tmp_path, *bag, "optimizer.learning_rate=0.02")
    found = measures.measure_bags(run)
    assert 0.5 < found.metrics["share of a unigram model's bits"] < 1.1
    valid = b"".join(run.folder.open_corpus().iterate_original_blocks("valid")).decode()
    assert len(found.examples) == 1 + measures.BAG_EXAMPLES
    for before, after, likeliest in found.examples[1:]:
        assert before + after in valid and len(after) == 4
        shares = [float(each.split()[-1]) for each in likeliest.split(" · ")]
        assert shares == sorted(shares, reverse=True) and sum(shares) <= 1.05


def test_a_model_without_training_is_no_better_than_chance(scaled: Run) -> None:
    assert measures.measure_bags(scaled).metrics["share of a unigram model's bits"] == pytest.approx(1.6, abs=0.5)


def some(run: Run, count: int = 3) -> TokenBatch:
    return measures.require_subset(run.folder.open_corpus(), run.options.batch.context, count)


@torch.no_grad()
def test_it_is_what_scoring_each_chunk_finds(scaled: Run) -> None:
    windows = some(scaled)
    other = measures.shuffle_first_half(windows)
    half = windows.lengths.shape[1] // 2

    def score_nats(batch: TokenBatch, row: int, end: int) -> float:
        kept = TokenBatch(*(x[row : row + 1, :end] for x in (batch.tokens, batch.lengths, batch.starts)))
        return -float(scaled.system.log_likelihood(kept).sum())

    found = measures.score_places(scaled, other, half) - measures.score_places(scaled, windows, half)
    for row in range(len(windows)):
        for place in range(found.shape[1]):
            end = half + place
            plain, shuffled = (score_nats(each, row, end + 1) - score_nats(each, row, end) for each in (windows, other))
            assert float(found[row, place]) == pytest.approx((shuffled - plain) / math.log(2), abs=1e-3)


def test_a_second_half_alone_is_scored_as_a_document_that_begins_there(scaled: Run) -> None:
    windows = some(scaled)
    alone = measures.cut_first_half(windows)
    found = measures.score_places(scaled, alone, 0).sum(1) * math.log(2)
    assert torch.allclose(found.float(), -scaled.system.log_likelihood(alone).sum(1).float(), atol=1e-3)


def test_only_the_first_half_is_shuffled_and_nothing_is_lost(scaled: Run) -> None:
    windows = some(scaled)
    other = measures.shuffle_first_half(windows)
    half = windows.lengths.shape[1] // 2
    assert not torch.equal(windows.tokens[:, :half], other.tokens[:, :half])
    assert torch.equal(windows.tokens[:, half:], other.tokens[:, half:])
    for before, after in zip(windows.tokens[:, :half], other.tokens[:, :half], strict=True):
        assert sorted(before.tolist()) == sorted(after.tolist())
    again = measures.shuffle_first_half(windows)
    assert torch.equal(again.tokens, other.tokens) and torch.equal(again.lengths, other.lengths)


@pytest.mark.parametrize("length", [1, 2, 5, 64])
def test_a_line_of_means_has_every_distance_once(length: int) -> None:
    line = measures.average_doubling(torch.arange(1.0, length + 1))
    assert line[0] == (1, 1) and all(at == pytest.approx(mean) for at, mean in line)  # a distance's mean is its middle
    assert line[-1][0] <= length


def test_a_model_of_chunks_has_figures_and_a_line(run: Path) -> None:
    found = measures.measure_distance(open_run(run))
    assert set(found.metrics) <= {"bits more, 1 to 4 chunks away", "bits more, beyond 32 chunks"}
    assert [at for at, _ in found.line] == [1, 2, 3.5, 6.5]


def test_bins_are_equal_in_order_and_all_and_their_rates_are_those_of_the_whole(scaled: Run) -> None:
    scored = measures.count_chunks(scaled)
    bins = measures.divide_bins(scored)
    assert len(bins) == 10 and max(map(len, bins)) - min(map(len, bins)) <= 1
    assert sorted(at for bin in bins for at in bin) == list(range(len(scored.chunks)))
    ends = [(scored.counts[bin].min(), scored.counts[bin].max()) for bin in bins]
    assert all(before[1] <= after[0] for before, after in zip(ends, ends[1:], strict=False))
    assert sum(scored.bits[bin].sum() for bin in bins) == pytest.approx(scored.bits.sum())
    found = measures.measure_frequency(scaled)
    sizes = [sum(len(scored.chunks[at]) for at in bin) for bin in bins]
    bits = sum(rate * size for (_, rate), size in zip(found.line, sizes, strict=True))
    assert bits == pytest.approx(scored.bits.sum()) and len(found.examples) == 11
    metrics = found.metrics
    rarest, most_frequent = metrics["bits a byte, rarest"], metrics["bits a byte, most frequent"]
    assert metrics["rarest less most frequent"] == rarest - most_frequent


def test_counts_are_those_of_training(scaled: Run) -> None:
    text = b"".join(scaled.folder.open_corpus().iterate_original_blocks("train"))
    tokens, lengths = scaled.chunker.split(text)
    ends = np.cumsum(lengths, dtype=np.int64)
    train = Counter(tokens[end - length : end].tobytes() for end, length in zip(ends, lengths.astype(int), strict=True))
    scored = measures.count_chunks(scaled)
    wrong = [chunk for chunk, count in zip(scored.chunks, scored.counts, strict=True) if train[chunk] != count]
    assert len(wrong) <= 0.01 * len(scored.chunks)  # two files are joined here


TOKEN = TokenOptions(width=24, heads=4, head_width=6, ffn=40)
MODELS = {
    "vanilla": ModelOptions(kind="hourglass", token=TOKEN, hourglass=HourglassOptions(hierarchy="6@1")),
    "top-down": ModelOptions(kind="top_down", token=TOKEN, multiscale=MultiscaleOptions(layers="1@16 2@4 3@1")),
    "bottom-up": ModelOptions(kind="bottom_up", token=TOKEN, multiscale=MultiscaleOptions(layers="1@16 2@4 3@1")),
}


def made(options: ModelOptions, context: int) -> tuple[SequenceModel, TokenBatch]:
    torch.manual_seed(0)
    system = make_system(options, IEMOptions(), ChunkingSpec(16, 50, True, context))
    tokens = torch.randint(50, (3, context, 16))
    return system, TokenBatch.from_chunks(tokens, torch.full((3, context), 16))


@pytest.mark.parametrize("context", [5, 20])  # of 128 positions, fewer and more
@pytest.mark.parametrize("name", MODELS)
def test_computed_is_measured(name: str, context: int) -> None:
    system, windows = made(MODELS[name], context)
    found = measure_saved_bytes(system, windows)
    wanted = compute_saved_bytes(MODELS[name], 50, 3, 16 * context)
    assert wanted is not None
    for key in found | wanted:
        assert found[key] == pytest.approx(wanted[key], rel=0.01, abs=64), key
    assert sum(found.values()) == pytest.approx(sum(wanted.values()), rel=0.001)


def test_kinds_make_up_what_a_profile_says_is_kept() -> None:
    system, windows = made(MODELS["top-down"], 5)
    found = measure_saved_bytes(system, windows)
    inputs = system.prepare_inputs(windows)
    with (kept := SavedActivations(system)):
        system.total_log_likelihood(inputs)
    assert sum(found.values()) == kept.total_bytes > 0


def test_a_system_on_another_device_is_measured_there() -> None:
    system, windows = made(MODELS["top-down"], 5)
    measure_saved_bytes(system.to("meta"), windows)  # raises where a tensor of the host meets one of the device


def test_a_run_has_its_table(scaled: Run) -> None:
    found = measure_memory(scaled)
    assert found.metrics["share that the computed is off"] < 0.01
    assert 0 < found.metrics["a layer at 2x, of one at 1x"] < 1
    head, *rows = found.examples
    parts = ["embedding", "scale_2", "scale_1", "output", "all"]
    assert [row[0] for row in rows] == [f"{part}, {how}" for part in parts for how in ("measured", "computed")]
    assert all(measured[1:] == computed[1:] for measured, computed in zip(rows[::2], rows[1::2], strict=True))
    assert all(len(row) == len(head) for row in rows)


def test_a_layer_saves_what_a_layer_of_its_scale_saves_in_a_step(scaled: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measures, "LENGTHS", (64, 128))
    found = measures.measure_layer(scaled)
    assert found.metrics["milliseconds at 128 tokens"] > 0
    assert [row[0] for row in found.examples] == ["tokens", "64", "128"]
    sequences, width = scaled.options.batch.sequences, scaled.options.model.token.width
    saved = SavedBytes(scaled.options.model.token, sequences)
    saved.add_scale(2, 64, 1, top_down=False, coarsest=True)
    expected = sum(saved.table.values()) - 4 * sequences * 64 * (width + 2)  # without the norm after all layers
    assert found.line[-1][1] == pytest.approx(expected / 1e6, rel=1e-3) and found.line[0][1] < found.line[1][1]


def test_models_whose_sizes_are_not_told_have_no_count() -> None:
    assert compute_saved_bytes(ModelOptions(kind="retina", token=TOKEN), 50, 3, 64) is None
    assert compute_saved_bytes(replace(MODELS["vanilla"], token=TokenOptions(dropout=0.1)), 50, 3, 64) is None


def test_a_passage_is_nearest_to_itself_and_not_by_where_all_lie() -> None:
    found = torch.randn(20, 8, generator=torch.Generator().manual_seed(0)) + 100
    assert measures.nearest_passages(found[:5], found)[:, 0].tolist() == [0, 1, 2, 3, 4]
    assert measures.nearest_passages(found[:5], found).shape == (5, measures.NEAREST)


def test_topics_agree_by_rare_words() -> None:
    found = measures.topic_agreement(["the cat sat"], ["the CAT sat", "the cat ran", "the dog ran", "the fox"])[0]
    assert float(found[0]) == pytest.approx(1) and found[0] > found[1] > found[2] == found[3] == 0


def test_vectors_are_of_each_window_by_itself(scaled: Run) -> None:
    windows = some(scaled, 20)
    found = measures.passage_vectors(scaled, windows)
    longest = int(windows.lengths[:16].sum(1).argmax())
    alone = measures.passage_vectors(scaled, windows[longest : longest + 1])
    for scale in (2, 1):
        assert found[scale].shape == (len(windows), scaled.options.model.token.width)
        torch.testing.assert_close(found[scale][longest], alone[scale][0], rtol=1e-3, atol=1e-4)


def test_a_run_has_figures_by_scale(scaled: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measures, "CANDIDATES", 16)
    found = measures.measure_passages(scaled)
    assert {f"distance of topics at {scale}x, of random" for scale in (1, 2)} == set(found.metrics)
    assert all(0 < value < 2 for value in found.metrics.values()) and len(found.examples) == 1 + 2 * 2


def test_a_model_of_chunks_has_no_scales(run: Path) -> None:
    with pytest.raises(ValueError, match="model.kind=haed has no scales"):
        measures.measure_passages(open_run(run))


def test_repeats_are_the_share_of_grams_that_were_there() -> None:
    assert measures.share_repeated("a b a b a", 1) == pytest.approx(3 / 5)
    assert measures.share_repeated("a b a b a", 2) == pytest.approx(2 / 4)
    assert measures.share_repeated("a b c", 1) == measures.share_repeated("a", 2) == measures.share_repeated("", 1) == 0


def test_prompts_are_whole_words_and_what_follows_them() -> None:
    text = b" ".join(b"w%d" % number for number in range(300)) + b"\n"
    prompts, truths = measures.spread_prompts(text)
    assert len(prompts) == len(truths) == measures.PROMPTS
    for prompt, truth in zip(prompts, truths, strict=True):
        assert len(prompt.split()) == len(truth.split()) == 64 and prompt + truth.encode() in text
    with pytest.raises(ValueError, match="has 100 words"):
        measures.spread_prompts(b"a " * 100)


def test_bleu_is_highest_where_a_sample_is_the_text() -> None:
    pytest.importorskip("sacrebleu")
    truth = "the cat sat on the mat and looked around"
    assert measures.compute_bleu([truth], [[truth, "no", "no"]]) == pytest.approx(100)
    assert measures.compute_bleu([truth], [["dogs bark", "no", "no"]]) < 5


def test_a_run_has_figures_and_examples(scaled: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measures, "PROMPTS", 2)
    monkeypatch.setattr(measures, "SAMPLE_BYTES", 24)

    def missing(*given: object) -> float:
        raise ImportError

    monkeypatch.setattr(measures, "compute_bleu", missing)
    found = measures.measure_samples(scaled)
    assert "BLEU" not in found.metrics and "haed[experiments]" in found.notes[1]
    text = float(found.notes[0].split("bits/char of n-grams ")[1].split(",")[0])
    assert found.metrics["bits/char of n-grams"] > text > 0
    assert found.metrics["seconds a sample"] > 0 and len(found.examples) == 3


def test_the_best_turn_counts_but_not_the_first(scaled: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measures, "SPEED_BYTES", 24)
    seconds, rates, ask = iter([0.01, 2.0, 1.0, 4.0]), [], scaled.continued

    def slow(*given: object) -> Continuations:
        found = ask(*given)  # type: ignore[arg-type]
        found.seconds = next(seconds)
        rates.append(len(found.texts[0].decode(errors="replace")) / found.seconds)
        return found

    monkeypatch.setattr(scaled, "continued", slow)
    assert measures.measure_speed(scaled).metrics == {"characters/s, sampled": max(rates[1:])} and len(rates) == 4
