"""Passages by layer: places stand where they are said to, and shares are those of brute force."""

from pathlib import Path

import numpy as np
import pytest

from data.corpus import Corpus
from pipeline.analysis import passages
from pipeline.analysis.passages import Places, compare_layers, sample_places
from pipeline.cli import main
from pipeline.run.opened import open_run


@pytest.mark.parametrize("main_kind", ["transformer", "lstm"])
def test_states_are_those_of_each_layer_after_the_text(main_kind: str, run: Path, tiny: list[str]) -> None:
    where = run
    if main_kind == "lstm":
        words = [*tiny, "name=recurrent", "model.main.kind=lstm", "model.main.units=40", "precision=fp32"]
        for stage in ("shard", "train"):
            assert main([stage, *words]) == 0
        where = run.parent / "recurrent"
    config = where / "config.yaml"
    config.write_text(config.read_text().replace("precision: auto", "precision: fp32"))
    opened = open_run(where)
    found = sample_places(opened, "train", 10**6, 0)  # all windows
    assert found is not None and len(found.states) == opened.options.model.main.layers + 1
    documents = [tokens.tobytes() for tokens, _ in opened.folder.open_corpus().iterate_documents("train")]
    of_first = [row for row in range(4) if "\\" not in found.texts[row]]
    for row in of_first:
        assert found.document[row] == found.window[row] == 0
        text = found.texts[row].replace("␣", " ").replace("↵", "\n").encode()
        assert documents[0].count(text) == 1 and text.endswith(found.last[row])
        read = documents[0][: documents[0].index(text) + len(text)]
        assert documents[0][len(read) :].startswith(found.following[row])
        for layer, states in enumerate(found.states[:-1]):
            np.testing.assert_allclose(states[row], opened.context(read, layer), rtol=1e-3, atol=2e-3)
        np.testing.assert_allclose(found.states[-1][row], opened.context(read), rtol=1e-3, atol=2e-3)
    assert of_first
    found = sample_places(opened, "train", 100, 0)
    assert found is not None and 10 < len(found.window) <= 100
    again = sample_places(opened, "train", 100, 0)
    other = sample_places(opened, "train", 100, 1)
    assert again is not None and other is not None
    assert again.texts == found.texts != other.texts


def test_places_are_drawn_from_all_of_a_split_of_short_documents(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened, (tokens, lengths) = open_run(run), next(open_run(run).folder.open_corpus().iterate_documents("train"))
    short = tokens[: lengths[:5].sum()], lengths[:5]
    monkeypatch.setattr(Corpus, "iterate_documents", lambda corpus, split: iter([short] * 200))
    found = sample_places(opened, "train", 80, 0)
    assert found is not None and len(np.unique(found.document)) == len(np.unique(found.window)) == 20
    assert found.document.min() < 50 and found.document.max() > 150


def test_windows_of_an_odd_context_do_not_overlap(run: Path) -> None:
    opened = open_run(run)
    opened.options.batch.context = 5
    documents = [len(lengths) for _, lengths in opened.folder.open_corpus().iterate_documents("train")]
    found = sample_places(opened, "train", 10**6, 0)
    assert found is not None and found.window.max() + 1 == sum(size // 5 + (size % 5 > 1) for size in documents)


def test_shares_are_those_of_brute_force(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(passages, "QUERIES", 1000)
    chance, size = np.random.default_rng(0), 60
    first = chance.normal(size=(size, 5)) + 7
    states = [first, first + 0.5 * chance.normal(size=(size, 5)), first - first.mean(0)]
    window = np.repeat(np.arange(size // 4), 4)
    last = [b"abc"[each : each + 1] for each in chance.integers(0, 3, size)]
    following = [bytes([each]) for each in range(size)]
    found = compare_layers(Places(states, window, window // 5, last, following, [""] * size), 0)
    assert (found.places, found.windows, found.queries, found.neighbours) == (60, 15, 60, 10)
    near = []
    for vectors in states:
        centred = vectors - vectors.mean(0)
        centred /= np.linalg.norm(centred, axis=1, keepdims=True)
        cosines = centred @ centred.T
        cosines[window[:, None] == window] = -2
        near.append(np.argsort(-cosines, axis=1)[:, :10])
    for layer, own in zip(found.layers, near, strict=True):
        assert layer.last == pytest.approx(np.mean([last[i] == last[j] for i in range(size) for j in own[i]]))
        assert layer.following == 0
    overlap = np.mean([len(set(a) & set(b)) / 10 for a, b in zip(near[0], near[1], strict=True)])
    assert [layer.overlap for layer in found.layers][:2] == [None, pytest.approx(overlap)]
    assert [layer.name for layer in found.layers] == ["layer 0", "layer 1", "ŷ"]
    far = [j for j in range(size) if window[j] != window[0]]
    assert found.chance.overlap == pytest.approx(10 / 56) and len(far) == 56
    same = [np.mean([last[i] == last[j] for j in range(size) if window[j] != window[i]]) for i in range(size)]
    assert found.chance.last == pytest.approx(np.mean(same)) and found.chance.following == 0


def test_few_windows_have_no_passages_elsewhere(run: Path) -> None:
    assert sample_places(open_run(run), "train", 0, 0) is None
