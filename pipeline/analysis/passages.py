"""Most similar passages by layer of the main model, and the agreement of the layers.

A place is a position in a text, and stands for the text that the model has read before it. Its neighbours are places
of other windows, so its own surroundings do not count. They are ranked by the cosine of a layer's states after
subtracting the mean over all places, so a common component does not count either. Three shares describe the
neighbours of a layer, each beside the share of random places:

- The same chunk before them shows how far the layer encodes the chunk it has just read.
- The same chunk after them shows how far it encodes the next chunk.
- The same document shows how far it encodes the subject of the text.

Legend: P places, Q queries among them, W width of a state.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from haed.base import TokenBatch
from haed.chunk.model import HAED
from pipeline.analysis.geometry import highest_columns, normalise_rows
from pipeline.console import escape_control_characters
from pipeline.run.analysis_results import ByLayer, Layer, SimilarPassages
from pipeline.run.index.queries import PIXELS, display_chunk
from pipeline.run.opened import Run
from pipeline.run.windows import Window, cut_windows, stack_windows

OF_WINDOW, QUERIES, NEAREST = 4, 500, 10  # places per window; queries; neighbours of each
_AT_ONCE, _SHOWN, _EXAMPLES, _BYTES = 16, 2, 5, 96  # windows; neighbours and passages shown, and bytes of each
_CHUNKS = 3  # chunks of pixels shown before a place


@dataclass
class Places:
    """States, positions and surroundings of P places of a text.

    Attributes:
        states: (P, W) states of each layer, ŷ last.
        window: (P,) window of each place.
        document: (P,) document of each place.
        last: (P) chunk before each place.
        following: (P) chunk after each place.
        texts: (P) displayed text before each place.
    """

    states: list[np.ndarray]
    window: np.ndarray
    document: np.ndarray
    last: list[bytes]
    following: list[bytes]
    texts: list[str]


def sample_places(run: Run, split: str, most: int, seed: int) -> Places | None:
    """Draw places from the second halves of windows that do not overlap.

    The windows are a uniform sample of all that the split has, whatever the lengths of its documents.

    Args:
        run: run of a chunk model.
        split: split to draw from.
        most: maximum number of places.
        seed: seed of the draw.

    Returns:
        The places, or None if fewer than two windows have any.
    """
    system, corpus, context = run.system, run.folder.open_corpus(), run.options.batch.context
    assert isinstance(system, HAED)

    def iterate_windows() -> Iterator[Window]:
        apart = cut_windows(corpus.iterate_documents(split), context, stride=context)
        return (each for each in apart if each.size > 1)

    # The windows are counted first: how many there are depends on the lengths of the documents.
    total, number = sum(1 for _ in iterate_windows()), itertools.count()
    if (size := min(-(-most // OF_WINDOW), total)) < 2:
        return None
    picked = set(np.random.default_rng(seed).choice(total, size, replace=False).tolist())
    drawn = itertools.islice((each for place, each in enumerate(iterate_windows()) if place in picked), size)
    places: list[tuple[int, int, bytes, bytes, str]] = []
    states: list[list[np.ndarray]] = []
    while batch := list(itertools.islice(drawn, _AT_ONCE)):
        chosen = [np.unique(np.linspace(-(-each.size // 2), each.size - 1, OF_WINDOW).astype(int)) for each in batch]
        for each, chunks, window_number in zip(batch, chosen, number, strict=False):
            places += [
                (window_number, each.document, *_read_surroundings(each, each.begin + chunk, run))
                for chunk in chunks.tolist()
            ]
        before = np.cumsum([0, *(each.size for each in batch)])
        rows = np.concatenate([begin + chunks for begin, chunks in zip(before, chosen, strict=False)])
        stacked = stack_windows(batch, run.chunker.k)
        with torch.no_grad(), run.compute.use_precision():
            layers_of_batch = system.layer_states(TokenBatch.from_chunks(stacked.tokens, stacked.lengths))
        states.append([layer.float().cpu().numpy()[rows] for layer in layers_of_batch])
    window, document, last, following, texts = zip(*places, strict=True)
    layers = [np.concatenate(parts) for parts in zip(*states, strict=True)]
    return Places(layers, np.array(window), np.array(document), list(last), list(following), list(texts))


def _read_surroundings(window: Window, chunk: int, run: Run) -> tuple[bytes, bytes, str]:
    """Return the chunk before a place, the chunk after it, and displayed whole chunks of the text before it."""
    before, at, after = window.ends[chunk - 1 : chunk + 2].tolist()
    shown = window.ends[max(0, chunk - _CHUNKS)] if run.chunker.name == PIXELS else at - _BYTES
    begin = int(window.ends[np.searchsorted(window.ends, shown)])
    text = display_chunk(window.tokens[min(begin, before) : at].tobytes(), run.chunker.name)
    return window.tokens[before:at].tobytes(), window.tokens[at:after].tobytes(), escape_control_characters(text)


def compare_layers(places: Places, seed: int) -> ByLayer:
    """Compare the neighbours of some places, drawn by the seed, between layers and with chance."""
    size = len(places.window)
    queries = np.sort(np.random.default_rng(seed).permutation(size)[:QUERIES])
    elsewhere = places.window[queries, None] != places.window
    others = elsewhere.sum(1)
    count = min(NEAREST, int(others.min()))
    chunks = {"last": places.last, "following": places.following}
    groups = {name: np.unique(np.array(each, object), return_inverse=True)[1] for name, each in chunks.items()}
    groups["document"] = places.document
    same = {name: (values[queries, None] == values) & elsewhere for name, values in groups.items()}
    units = [normalise_rows(states - states.mean(0)) for states in places.states]
    near = [highest_columns(each[queries] @ each.T, ~elsewhere, count) for each in units]
    names = [*(f"layer {number}" for number in range(len(near) - 1)), "ŷ"]
    layers = []
    for name, nearest, below in zip(names, near, [None, *near], strict=False):
        overlap = None if below is None else float((nearest[:, :, None] == below[:, None]).any(2).mean())
        shares = {group: float(np.take_along_axis(values, nearest, 1).mean()) for group, values in same.items()}
        layers.append(Layer(name, overlap, **shares))
    by_chance = {group: float((values.sum(1) / others).mean()) for group, values in same.items()}
    shown = np.linspace(0, len(queries) - 1, min(_EXAMPLES, len(queries))).astype(int).tolist()

    def list_nearest(row: int) -> dict[str, list[str]]:
        columns = zip(names, near, strict=True)
        return {name: [places.texts[place] for place in nearest[row, :_SHOWN]] for name, nearest in columns}

    return ByLayer(
        places=size,
        windows=len(np.unique(places.window)),
        queries=len(queries),
        neighbours=count,
        chance=Layer("chance", float((count / others).mean()), **by_chance),
        layers=layers,
        examples=[SimilarPassages(places.texts[queries[row]], list_nearest(row)) for row in shown],
    )
