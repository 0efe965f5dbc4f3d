"""Maps of embeddings in two dimensions: projection, HTML page, and export for TensorBoard's projector.

The projection is always PCA, and also UMAP or t-SNE if installed (`pip install haed[maps]`). Points far apart in PCA
are far apart in all dimensions, but near points need not be near. UMAP (McInnes et al. 2018) and t-SNE (van der
Maaten & Hinton 2008) keep neighbours together; distances between groups and sizes of groups mean little.

The page is one HTML file that needs no network, with zoom, search, neighbours on hover, and colours by frequency,
length or cluster. It is `map.html` with the points embedded as JSON. Labels are shown as text, never as markup.

The export holds vectors, labels and counts, and sprites for chunks of pixels.
`tensorboard --logdir RUN/analysis/projector` opens it, and so does the TensorBoard of `haed serve`. `vectors.bytes` is
float32, row by row, readable by `numpy.fromfile`. `projector_config.pbtxt` gives its shape, and `metadata.tsv` has a
line for each row.
"""

import io
import json
import logging
import math
import re
from collections.abc import Callable, Sequence
from html import escape
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import numpy as np
from PIL import Image
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from data.filesystem import make_folders, write_atomically
from pipeline.analysis.geometry import normalise_rows
from pipeline.config import ConfigError
from pipeline.console import escape_control_characters

SPRITE = 16  # pixels of a side
VECTORS, METADATA, SPRITES, CONFIG = "vectors.bytes", "metadata.tsv", "sprites.png", "projector_config.pbtxt"


def export_projector(
    folder: Path, name: str, vectors: np.ndarray, labels: list[str], columns: dict[str, np.ndarray], chunks: list[bytes]
) -> None:
    """Write the export. The configuration is written last, so that TensorBoard never reads an incomplete export.

    Args:
        folder: folder to write to.
        name: name of the embedding.
        vectors: (n, E) vectors, normalised here. Subtract their mean first to have centred cosines in the projector.
        labels: label of each row.
        columns: further columns of the table, (n,) each.
        chunks: chunks of pixels to draw as sprites, or an empty list.
    """
    make_folders(folder, within=folder.parent)
    write_atomically(folder / VECTORS, normalise_rows(vectors).astype("<f4").tobytes())
    values = (map(str, column.tolist()) for column in columns.values())
    rows = zip(map(escape_control_characters, labels), *values, strict=True)
    lines = map("\t".join, [("chunk", *columns), *rows])
    write_atomically(folder / METADATA, ("\n".join(lines) + "\n").encode())
    shown = [f'metadata_path: "{METADATA}"']
    if chunks:
        write_atomically(folder / SPRITES, draw_sprites(chunks))
        sides = f"single_image_dim: {SPRITE} single_image_dim: {SPRITE}"
        shown.append(f'sprite {{ image_path: "{SPRITES}" {sides} }}')
    shape = f"tensor_shape: {vectors.shape[0]} tensor_shape: {vectors.shape[1]}"
    if not any(folder.glob("events.out.tfevents.*")):
        EventFileWriter(str(folder)).close()  # empty; lets TensorBoard find this folder from a parent folder
    safe = "".join(character if character.isalnum() or character in "-_. " else "_" for character in name)
    config = f'embeddings {{ tensor_name: "{safe}" tensor_path: "{VECTORS}" {shape} {" ".join(shown)} }}\n'
    write_atomically(folder / CONFIG, config.encode())


def draw_sprites(chunks: list[bytes]) -> bytes:
    """Draw all chunks of RGB pixels into one square PNG, row by row, each as vertical strips of its colours."""
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
_FEWEST = 32  # minimum number of points for UMAP and t-SNE


def select_projections(wanted: Kind) -> list[str]:
    """Return the projections to compute, the best first: the requested one, then PCA. `auto` takes an installed one.

    Of fewer than 32 chunks only PCA is computed, see `project_chunks`.

    Raises:
        ConfigError: the package of the requested projection is not installed.
    """
    there = [kind for kind, (module, _) in _PACKAGES.items() if find_spec(module)]
    if wanted in _PACKAGES and wanted not in there:
        raise ConfigError(
            f"analyse.map={wanted} needs {_PACKAGES[wanted][1]}, which is not installed. Run pip install "
            "'haed[maps]', or use analyse.map=pca"
        )
    chosen = there[:1] if wanted == "auto" else [wanted] if wanted in there else []
    return [*chosen, "pca"]


def project_chunks(vectors: np.ndarray, kinds: Sequence[str], seed: int) -> dict[str, np.ndarray]:
    """Project embeddings (n, E), compared by cosine; return positions (n, 2) float32 by the name of each projection."""
    units, places = normalise_rows(vectors), {}
    others: dict[str, Callable[[np.ndarray, int], np.ndarray]] = {"umap": _project_umap, "tsne": _project_tsne}
    for kind in kinds:
        if kind not in others:
            places[NAMES[kind]] = principal_components(units)
        elif len(units) < _FEWEST:
            log.info("no %s of %d chunks, which are fewer than %d", NAMES[kind], len(units), _FEWEST)
        else:
            log.info("%s of %s chunks", NAMES[kind], f"{len(units):,}")
            places[NAMES[kind]] = others[kind](units, seed).astype(np.float32)
    return places


def principal_components(vectors: np.ndarray) -> np.ndarray:
    """Return the first two principal components (n, 2), signed so that the largest coordinate of each is positive."""
    centred = vectors.astype(np.float64) - vectors.mean(0, dtype=np.float64)
    _, directions = np.linalg.eigh(centred.T @ centred)
    components = centred @ np.pad(directions[:, ::-1][:, :2], ((0, 0), (0, max(0, 2 - vectors.shape[1]))))
    largest = np.abs(components).argmax(0)
    return np.asarray(components * np.where(components[largest, [0, 1]] < 0, -1, 1), np.float32)


def _project_umap(units: np.ndarray, seed: int) -> np.ndarray:
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # packages of UMAP warn about unused features
        from umap import UMAP

        projection = UMAP(n_neighbors=15, min_dist=0.1, metric="cosine", random_state=seed % (1 << 31), n_jobs=1)
        return np.asarray(projection.fit_transform(units))


def _project_tsne(units: np.ndarray, seed: int) -> np.ndarray:
    from openTSNE import TSNE

    perplexity = min(30, (len(units) - 1) // 3)
    projection = TSNE(perplexity=perplexity, metric="cosine", random_state=seed % (1 << 31), n_jobs=1)
    return np.asarray(projection.fit(units))


_STEPS = 20_000  # largest integer coordinate


def render_map_page(title: str, description: str, checkpoint: str, points: dict[str, Any]) -> str:
    """Return the map of n points, the most frequent chunk first, as an HTML page.

    Args:
        title: heading of the page.
        description: a sentence about the map.
        checkpoint: digest of the checkpoint that the embeddings are of.
        points: by name `labels` (n), `counts` (n,), `lengths` (n,) in bytes and `clusters` (n,) of the chunks; the rows
            (n, m) of the chunks that are `near` by embedding, and their `cosines` (n, m) in hundredths; `places`:
            positions (n, 2) by the name of a map, the one shown first before the others; `pixels`: labels are colours.
    """
    places = {name: _to_integer_coordinates(xy) for name, xy in points["places"].items()}
    content = json.dumps(points | {"places": places}, separators=(",", ":"), default=np.ndarray.tolist).replace(
        "<", "\\u003c"
    )
    before, rest = (Path(__file__).parent / "map.html").read_text(encoding="utf-8").split("@POINTS@")
    named = {"@CHECKPOINT@": checkpoint, "@ABOUT@": description, "@TITLE@": title}
    return re.sub("|".join(named), lambda match: escape(named[match[0]]), before) + content + rest


def _to_integer_coordinates(places: np.ndarray) -> list[int]:
    """Scale positions (n, 2) to integers x, y, x, y, …: the longer side has `_STEPS`, and y grows downwards."""
    low = places.min(0)
    scale = _STEPS / max(float((places.max(0) - low).max()), 1e-12)
    scaled = (places - low) * scale
    scaled[:, 1] = scaled[:, 1].max() - scaled[:, 1]
    return [int(value) for value in scaled.round().ravel()]
