"""A map as one HTML file that needs no network: zoom, search, neighbours on hover, colours by frequency, length or cluster.

The page is `map.html` with the points as JSON inside; labels reach the screen as text, never as markup.

Embeddings in two dimensions: PCA always, UMAP or t-SNE where they are installed (`pip install haed[maps]`).

PCA is a shadow: what is far apart on it is far apart, what is near may not be. UMAP (McInnes et al. 2018) and t-SNE (van der
Maaten & Hinton 2008) keep neighbours together; distances between groups, and their sizes, mean little.

An export for TensorBoard's projector: vectors, labels and counts, and sprites of chunks of pixels.

`tensorboard --logdir RUN/analysis/projector` opens it, and so does the TensorBoard of `haed serve`. `vectors.bytes` is float32,
row after row, which `numpy.fromfile` reads too; `projector_config.pbtxt` says its shape; `metadata.tsv` has a line for each row.
"""

import io
import json
import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

import numpy as np
from PIL import Image
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from data.durable import make_folders, write_atomically
from pipeline.config import ConfigError
from pipeline.probe.analyse.geometry import unit
from pipeline.show.page import escape
from pipeline.shown import visible

SPRITE = 16  # pixels of a side
VECTORS, METADATA, SPRITES, CONFIG = "vectors.bytes", "metadata.tsv", "sprites.png", "projector_config.pbtxt"


def export(
    folder: Path, name: str, vectors: np.ndarray, labels: list[str], columns: dict[str, np.ndarray], chunks: list[bytes]
) -> None:
    """Writes the export; the configuration last, so that TensorBoard meets a whole one.

    Args:
        folder: where.
        name: of the embedding.
        vectors: (n, E), which are normalised; given less their mean, the projector's cosines are centred ones.
        labels: of the rows.
        columns: further ones of the table, (n,) each.
        chunks: of pixels, each drawn as a sprite; empty: none are drawn.
    """
    make_folders(folder, within=folder.parent)
    write_atomically(folder / VECTORS, unit(vectors).astype("<f4").tobytes())
    rows = zip(labels, *(column.tolist() for column in columns.values()), strict=True)
    lines = ["\t".join(("chunk", *columns)), *("\t".join((visible(first), *map(str, rest))) for first, *rest in rows)]
    write_atomically(folder / METADATA, ("\n".join(lines) + "\n").encode())
    shown = [f'metadata_path: "{METADATA}"']
    if chunks:
        write_atomically(folder / SPRITES, sprites(chunks))
        sides = f"single_image_dim: {SPRITE} single_image_dim: {SPRITE}"
        shown.append(f'sprite {{ image_path: "{SPRITES}" {sides} }}')
    shape = f"tensor_shape: {vectors.shape[0]} tensor_shape: {vectors.shape[1]}"
    if not any(folder.glob("events.out.tfevents.*")):
        EventFileWriter(str(folder)).close()  # empty; with it TensorBoard lists the folder if it is told one further up
    safe = "".join(character if character.isalnum() or character in "-_. " else "_" for character in name)
    config = f'embeddings {{ tensor_name: "{safe}" tensor_path: "{VECTORS}" {shape} {" ".join(shown)} }}\n'
    write_atomically(folder / CONFIG, config.encode())


def sprites(chunks: list[bytes]) -> bytes:
    """One PNG of all chunks of RGB pixels, row by row in a square, each as vertical strips of its colours."""
    side = math.ceil(math.sqrt(len(chunks)))
    raster = np.full((side * SPRITE, side * SPRITE, 3), 255, np.uint8)
    for number, chunk in enumerate(chunks):
        pixels = np.frombuffer(chunk[: len(chunk) // 3 * 3], np.uint8).reshape(-1, 3)
        if len(pixels):
            strip = pixels[np.arange(SPRITE) * len(pixels) // SPRITE]
            y, x = (SPRITE * at for at in divmod(number, side))
            raster[y : y + SPRITE, x : x + SPRITE] = strip
    buffer = io.BytesIO()
    Image.fromarray(raster).save(buffer, format="PNG")
    return buffer.getvalue()


log = logging.getLogger(__name__)
Kind = Literal["auto", "pca", "umap", "tsne"]
NAMES = {"pca": "PCA", "umap": "UMAP", "tsne": "t-SNE"}
_PACKAGES = {"umap": ("umap", "umap-learn"), "tsne": ("openTSNE", "openTSNE")}
_FEWEST = 32  # points of a map of neighbours


def kinds(asked: Kind) -> list[str]:
    """The maps that are made, the best one first: that asked for, and PCA. `auto` takes what is installed.

    Raises:
        ConfigError: the package of the one asked for is not installed.
    """
    there = [kind for kind, (module, _) in _PACKAGES.items() if find_spec(module)]
    if asked in _PACKAGES and asked not in there:
        raise ConfigError(
            f"analyse.map={asked} needs {_PACKAGES[asked][1]}, which is not installed: pip install 'haed[maps]', or "
            "analyse.map=pca"
        )
    chosen = there[:1] if asked == "auto" else [asked] if asked in there else []
    return [*chosen, "pca"]


def project(vectors: np.ndarray, kind: str, seed: int) -> np.ndarray:
    """Places (n, 2) float32 of embeddings (n, E), which are compared by cosine."""
    units = unit(vectors)
    others: dict[str, Callable[[np.ndarray, int], np.ndarray]] = {"umap": _umap, "tsne": _tsne}
    if kind in others and len(units) >= _FEWEST:
        log.info("%s of %s chunks", NAMES[kind], f"{len(units):,}")
        return others[kind](units, seed).astype(np.float32)
    return principal(units)


def principal(vectors: np.ndarray) -> np.ndarray:
    """The first two principal components (n, 2), signs chosen so that the largest coordinate of each is positive."""
    centred = vectors.astype(np.float64) - vectors.mean(0, dtype=np.float64)
    _, directions = np.linalg.eigh(centred.T @ centred)
    found = centred @ np.pad(directions[:, ::-1][:, :2], ((0, 0), (0, max(0, 2 - vectors.shape[1]))))
    largest = np.abs(found).argmax(0)
    return np.asarray(found * np.where(found[largest, [0, 1]] < 0, -1, 1), np.float32)


def _umap(units: np.ndarray, seed: int) -> np.ndarray:
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of its packages, of what it has no use for here
        from umap import UMAP

        made = UMAP(n_neighbors=15, min_dist=0.1, metric="cosine", random_state=seed % (1 << 31), n_jobs=1)
        return np.asarray(made.fit_transform(units))


def _tsne(units: np.ndarray, seed: int) -> np.ndarray:
    from openTSNE import TSNE

    perplexity = min(30, (len(units) - 1) // 3)
    made = TSNE(perplexity=perplexity, metric="cosine", random_state=seed % (1 << 31), n_jobs=1)
    return np.asarray(made.fit(units))


_STEPS = 20_000  # of a coordinate


@dataclass
class Points:
    """n chunks on maps, the most frequent first.

    Attributes:
        labels: for people.
        counts: (n,).
        lengths: (n,) in bytes.
        clusters: (n,).
        near: (n, m) rows of the nearest by embedding, with (n, m) cosines in hundredths.
        cosines: these.
        places: (n, 2) by the name of a map, the one to show first.
        pixels: labels are colours.
    """

    labels: list[str]
    counts: np.ndarray
    lengths: np.ndarray
    clusters: np.ndarray
    near: np.ndarray
    cosines: np.ndarray
    places: dict[str, np.ndarray]
    pixels: bool


def map_page(title: str, about: str, points: Points) -> str:
    """The page.

    Args:
        title: its heading.
        about: a sentence on what is shown.
        points: the points.
    """
    values = {
        "labels": points.labels,
        "counts": points.counts.tolist(),
        "lengths": points.lengths.tolist(),
        "clusters": points.clusters.tolist(),
        "near": points.near.tolist(),
        "cosines": points.cosines.tolist(),
        "places": {name: _whole(xy) for name, xy in points.places.items()},
        "pixels": points.pixels,
    }
    content = json.dumps(values, separators=(",", ":")).replace("<", "\\u003c")
    page = (Path(__file__).parent / "map.html").read_text(encoding="utf-8")
    before, rest = page.split("@POINTS@")
    return before.replace("@ABOUT@", escape(about)).replace("@TITLE@", escape(title)) + content + rest


def _whole(places: np.ndarray) -> list[int]:
    """Places (n, 2) as whole numbers x, y, x, y, … of which the longer side has `_STEPS`; y grows downwards."""
    low = places.min(0)
    scale = _STEPS / max(float((places.max(0) - low).max()), 1e-12)
    found = (places - low) * scale
    found[:, 1] = found[:, 1].max() - found[:, 1]
    return [int(value) for value in found.round().ravel()]
