"""Pictures: PNG and JPEG in folders or tars, and batch files of ImageNet32 and CIFAR-10. A document is an RGB raster.

Rows from top to bottom, pixels from left to right, red, green, blue of each (H·W·3 bytes).
"""

import io
import struct
import zipfile
from collections.abc import Iterator
from pathlib import PurePosixPath
from typing import IO

import numpy as np

from data.files import File, is_tar, members, read_whole
from data.options import SourceOptions
from data.sources import SPLITS, Input, Piece, Source, named_split
from data.unpickle import read_batch

PICTURES = (".png", ".jpg", ".jpeg")
LARGEST_PICTURE = 1 << 26  # pixels
_ROWS = 256
_LARGEST_ROW = 1 << 24


class ImageSource(Source):
    """Pictures of one size. Where paths name train and val but no test, val is test, and a hash takes valid out of train."""

    def __init__(self, options: SourceOptions) -> None:
        super().__init__(options)
        self._first: tuple[str, int] | None = None

    def inputs(self, size: int, align: int) -> Iterator[Input]:
        """See `Source.inputs`. A batch file or tar is read by one worker; other files are not pictures, and left out."""
        files = [file for file in self.files if _is_picture(file) or _is_batch(file) or is_tar(file.path)]
        if not files:
            raise ValueError(f"source.path={self.options.path} has no PNG, JPEG, tar, .npz or pickled batch file")
        stated = {file.name: named_split(file.name) for file in files}
        if any(_is_batch(file) and not split for file, split in zip(files, stated.values(), strict=True)):
            stated |= {f.name: "train" for f in files if _is_batch(f) and not stated[f.name]}  # data_batch_1
        no_test = "train" in stated.values() and "valid" in stated.values() and "test" not in stated.values()
        for file in files:
            split = stated[file.name]
            splits: tuple[str, ...] = (split,) if split else SPLITS
            if no_test and split:
                splits = ("test",) if split == "valid" else ("train", "valid")
            yield Input(file.name, file.path, file.size, splits)

    def read(self, item: Input) -> Iterator[Piece]:
        """See `Source.read`."""
        for name, raster in self._rasters(item):
            if self._first is None:
                self._first = (name, len(raster))
            elif self._first[1] != len(raster):
                raise ValueError(
                    f"pictures differ in size: {self._first[0]} gives {self._first[1]:,} values, {name} {len(raster):,}: "
                    "set source.image_size="
                )
            yield Piece(name, self.split_of(name, item.splits), raster)

    def _rasters(self, item: Input) -> Iterator[tuple[str, bytes]]:
        if is_tar(item.path):
            for name, content, size in members(item.path, self.options.expansion):
                if PurePosixPath(name.lower()).suffix in PICTURES:
                    whole = read_whole(content, size, f"{item.path}: {name}")
                    yield f"{item.name}/{name}", self._picture(whole, f"{item.path}: {name}")
        elif PurePosixPath(item.path.lower()).suffix in PICTURES:
            with open(item.path, "rb") as file:
                whole = read_whole(file, item.size, item.path)
            yield item.name, self._picture(whole, item.path)
        else:
            row = 0
            for planes in _batches(item.path):
                if planes.shape[1] % 3 or self.options.image_size not in (None, round((planes.shape[1] / 3) ** 0.5)):
                    raise ValueError(
                        f"{item.path}: rows of {planes.shape[1]} values are no square RGB pictures of that size"
                    )
                rasters = planes.reshape(len(planes), 3, -1).transpose(0, 2, 1).reshape(len(planes), -1)
                for raster in rasters:
                    yield f"{item.name}@{row}", raster.tobytes()
                    row += 1

    def _picture(self, content: bytes, name: str) -> bytes:
        """Decodes a PNG or JPEG; grey becomes RGB, transparency is dropped."""
        from PIL import Image

        try:
            with Image.open(io.BytesIO(content), formats=("PNG", "JPEG")) as picture:
                if picture.width * picture.height > LARGEST_PICTURE:
                    raise ValueError(f"{picture.width} × {picture.height} pixels are more than one picture may have")
                colours = picture.convert("RGB")
                side = self.options.image_size
                if side and colours.size != (side, side):
                    colours = colours.resize((side, side), Image.Resampling.BOX)  # as ImageNet32 was made
                return colours.tobytes()
        except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
            raise ValueError(f"{name} cannot be read as a picture: {error}") from error


def _is_picture(file: File) -> bool:
    return file.path.lower().endswith(PICTURES)


def _is_batch(file: File) -> bool:
    """A .npz, or a pickle: by its first byte, since CIFAR's files have no suffix."""
    if file.path.endswith(".npz"):
        return True
    if PurePosixPath(file.name).suffix not in ("", ".pkl", ".pickle"):
        return False
    with open(file.path, "rb") as content:
        return content.read(1) == b"\x80"


def _batches(path: str) -> Iterator[np.ndarray]:
    """Planes (n, D) uint8 of a batch file, D = red, green, blue, a few hundred at a time."""
    try:
        if path.endswith(".npz"):
            yield from _npz_rows(path)
            return
        with open(path, "rb") as file:
            size = file.seek(0, 2)
            file.seek(0)
            data = read_batch(file, size).get("data")
        if not isinstance(data, np.ndarray):
            raise ValueError("it has no array 'data'")
        for row in range(0, len(data), _ROWS):
            yield data[row : row + _ROWS]
    except (ValueError, KeyError, OSError, zipfile.BadZipFile, struct.error, EOFError) as error:
        raise ValueError(f"{path} is not a batch file of pictures: {error}") from error


def _npz_rows(path: str) -> Iterator[np.ndarray]:
    """Rows of the array `data` of a .npz, read as a stream: a claim of its header allocates nothing."""
    with zipfile.ZipFile(path) as archive, archive.open("data.npy") as file:
        shape, dtype = _npy_header(file)
        if len(shape) == 4 and shape[-1] == 3:
            raise ValueError(f"expected planes (N, 3·pixels), got pictures {shape}")
        if len(shape) != 2 or dtype != np.uint8 or not 0 < shape[1] <= _LARGEST_ROW:
            raise ValueError(f"expected uint8 data of shape (N, 3·pixels), got {dtype} {shape}")
        for row in range(0, shape[0], _ROWS):
            wanted = min(_ROWS, shape[0] - row) * shape[1]
            content = file.read(wanted)
            if len(content) != wanted:
                raise ValueError(f"it ends in row {row + len(content) // shape[1]:,} of {shape[0]:,}")
            yield np.frombuffer(content, np.uint8).reshape(-1, shape[1])


def _npy_header(file: IO[bytes]) -> tuple[tuple[int, ...], np.dtype]:
    version = np.lib.format.read_magic(file)
    reader = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, fortran, dtype = reader(file)
    if fortran:
        raise ValueError("its array is in Fortran's order")
    return shape, dtype
