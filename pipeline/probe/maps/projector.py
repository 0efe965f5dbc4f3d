"""An export for TensorBoard's projector: vectors, labels and counts, and sprites of chunks of pixels.

`tensorboard --logdir RUN/analysis/projector` opens it, and so does the TensorBoard of `haed serve`. `vectors.bytes` is float32,
row after row, which `numpy.fromfile` reads too; `projector_config.pbtxt` says its shape; `metadata.tsv` has a line for each row.
"""

import io
import math
from pathlib import Path

import numpy as np
from PIL import Image
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from data.durable import make_folders, write_atomically
from pipeline.probe.analyse.geometry import unit
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
