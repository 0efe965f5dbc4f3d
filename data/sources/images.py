"""Pictures: PNG and JPEG in folders or tars, and batch files of ImageNet32 and CIFAR-10. A document is an RGB raster.

Its order is rows from top to bottom, pixels from left to right, red, green and blue of each (H·W·3 bytes).
"""

import io
import struct
import zipfile
from collections.abc import Iterator
from math import isqrt
from pathlib import PurePosixPath
from typing import IO, Any

import numpy as np

from data.sources.complete import TRUNCATED, check_jpeg, check_png
from data.sources.file_type import HEAD, TO_PNG, detect_foreign_format
from data.sources.files import FREE, File, bound_stream, is_tar, iterate_members, read_whole
from data.sources.safe_pickle import read_rows
from data.sources.source import Input, Piece, Source
from data.sources.splits import SPLITS, named_split

PICTURES = (".png", ".jpg", ".jpeg")
LARGEST_PICTURE = 1 << 26  # pixels
_MODES = ("1", "L", "LA", "P", "PA", "RGB", "RGBA", "CMYK")  # of Pillow, 8 bits a value at most
_PNG_DEPTH = 24  # offset in a PNG of the number of bits per value
_ORIENTATION = 274  # the tag of EXIF
_ROWS = 256
_LARGEST_ROW = 1 << 24


class ImageSource(Source):
    """A source of pictures of one shape.

    If paths name train and val but no test, val is test, and a hash takes valid out of train.
    """

    unlike = "set source.image_size= to resample them"
    needs = "chunker.kind=pixels (chunker.k=12 are four pixels), and batch.context= to the chunks of a picture"

    def inputs(self, size: int, align: int) -> Iterator[Input]:
        """Yield every picture, batch file and tar.

        One worker reads a whole batch file or tar; other files are left out.
        """
        files = [file for file in self.files if _is_picture(file) or _is_batch(file) or is_tar(file.path)]
        if not files:
            raise ValueError(
                f"source.path={self.options.path} has no PNG, JPEG, tar, .npz or pickled batch file: convert other pictures, "
                "with `magick OLD.webp NEW.png` say"
            )
        self.leave_out_others(files, "no pictures")
        for file, splits in self.places(files).items():
            yield Input(file.name, file.path, file.size, splits or SPLITS, stated=None if splits else self.stated)

    def decoder_versions(self) -> dict[str, str]:
        """Return the versions of Pillow and its JPEG decoder, if there are pictures to decode."""
        if not any(_is_picture(file) or is_tar(file.path) for file in self.files):
            return {}
        from PIL import __version__, features

        turbo = " turbo " + str(features.version("libjpeg_turbo")) if features.check("libjpeg_turbo") else ""
        return {"pillow": __version__, "jpeg": f"{features.version('jpg')}{turbo}"}

    def stated_split(self, name: str) -> str | None:
        """Return the split that a path states. The batches of CIFAR-10 are its train split."""
        batch = PurePosixPath(name).name.startswith("data_batch")
        return named_split(name) or ("train" if batch else None)

    def is_single_file(self, file: File) -> bool:
        """Return if the file is a picture, and no batch file or tar."""
        return _is_picture(file)

    def accepts(self, name: str) -> bool:
        """Return if a member of a tar is a picture, and not hidden like the notes that macOS adds."""
        path = PurePosixPath(name)
        return path.suffix.lower() in PICTURES and not path.name.startswith(".")

    def read(self, item: Input) -> Iterator[Piece]:
        """Yield the rasters of a picture, a batch file or a tar."""
        for name, (height, width), raster in self._read_rasters(item):
            self.check_consistent_format(name, height=height, width=width, channels=3)
            yield Piece(name, self.split_of(name, self.places_in(item, name), raster), raster)

    def _read_rasters(self, item: Input) -> Iterator[tuple[str, tuple[int, int], bytes]]:
        """Yield name, height and width, and raster of each picture."""
        if is_tar(item.path):
            for name, content, size in iterate_members(item.path, self.options.expansion, self.remarks):
                if not self.accepts(name):
                    self.remarks["members of tars were left out: hidden, or no pictures"] += 1
                else:
                    whole = read_whole(content, size, f"{item.path}: {name}")
                    yield f"{item.name}/{name}", *self._decode_picture(whole, f"{item.path}: {name}")
        elif PurePosixPath(item.path.lower()).suffix in PICTURES:
            with open(item.path, "rb") as file:
                whole = read_whole(file, item.size, item.path)
            yield item.name, *self._decode_picture(whole, item.path)
        else:
            row = 0
            for planes in _read_batches(item.path, self.options.expansion):
                side = isqrt(planes.shape[1] // 3)
                if 3 * side * side != planes.shape[1] or self.options.image_size not in (None, side):
                    raise ValueError(
                        f"{item.path}: rows of {planes.shape[1]} values are no square RGB pictures of that size"
                    )
                rasters = planes.reshape(len(planes), 3, -1).transpose(0, 2, 1).reshape(len(planes), -1)
                for raster in rasters:
                    yield f"{item.name}@{row}", (side, side), raster.tobytes()
                    row += 1

    def _decode_picture(self, content: bytes, name: str) -> tuple[tuple[int, int], bytes]:
        """Return height, width and raster of a PNG or JPEG. Conversions are counted in `remarks`."""
        from PIL import Image, UnidentifiedImageError

        try:
            with Image.open(io.BytesIO(content), formats=("PNG", "JPEG")) as picture:
                if picture.width * picture.height > LARGEST_PICTURE:
                    raise ValueError(f"{picture.width} × {picture.height} pixels are more than one picture may have")
                if 3 * picture.width * picture.height > FREE + self.options.expansion * len(content):
                    raise ValueError(
                        f"{picture.width} × {picture.height} pixels in {len(content):,} bytes, out of proportion: a "
                        "decompression bomb? If it is meant, raise source.expansion"
                    )
                if picture.format == "PNG" and content[_PNG_DEPTH] > 8:  # Pillow would clip it, or cut it to 8 bits
                    raise ValueError(f"it has {content[_PNG_DEPTH]} bits a value, expected 8: convert it first")
                if picture.mode not in _MODES:
                    raise ValueError(f"its pixels are {picture.mode}, expected grey or RGB: convert it first")
                behind = self._check_whole(picture, content)
                colours = picture.convert("RGB")
                self._count_conversions(picture, colours.size)
                self.remarks["bytes behind the end of pictures were left out, in"] += behind
                side = self.options.image_size
                if side and colours.size != (side, side):
                    colours = colours.resize((side, side), Image.Resampling.BOX)  # as ImageNet32 was made
                return (colours.height, colours.width), colours.tobytes()
        except UnidentifiedImageError as error:
            what, how = detect_foreign_format(content[:HEAD]) or ("", "")
            is_other = f": it is {what}, convert it into PNG" if how == TO_PNG else ""
            raise ValueError(
                f"{name} cannot be read as a picture: it is no PNG and no JPEG, whatever its name{is_other}"
            ) from error
        except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
            raise ValueError(f"{name} cannot be read as a picture: {error}") from error

    def _check_whole(self, picture: Any, content: bytes) -> bool:
        """Decode a picture, and refuse it if a part is missing that the decoder would fill in.

        Returns:
            True if there are bytes behind its end.

        Raises:
            ValueError: it is not whole.
        """
        if picture.format == "PNG":
            palette = check_png(content)
            picture.load()
            if palette.colours is not None and (most := int(np.asarray(picture).max(initial=0))) >= palette.colours:
                raise ValueError(f"a pixel has the colour {most} of its palette, which has {palette.colours}")
            return palette.behind > 0
        from PIL import Image

        jpeg = check_jpeg(content)
        raster = picture.tobytes()
        for each in jpeg.padded:
            with Image.open(io.BytesIO(each), formats=("JPEG",)) as padded:
                if padded.tobytes() != raster:
                    raise ValueError(TRUNCATED)
        return jpeg.behind > 0

    def _count_conversions(self, picture: Any, size: tuple[int, int]) -> None:
        """Count conversions that make the raster differ from the picture that people see."""
        side = self.options.image_size
        turned = "exif" in picture.info and picture.getexif().get(_ORIENTATION, 1) != 1
        for note, holds in {
            "grey pictures became RGB": picture.mode in ("1", "L", "LA"),
            "CMYK pictures became RGB": picture.mode == "CMYK",
            "pictures lost their transparency": picture.mode in ("LA", "PA", "RGBA") or "transparency" in picture.info,
            "pictures were taken as stored, not as EXIF turns them": turned,
            "pictures were taken as stored, without their colour profile": "icc_profile" in picture.info,
            "animations gave their first frame only": getattr(picture, "n_frames", 1) > 1,
            f"pictures were resampled to {side} × {side}": side is not None and size != (side, side),
        }.items():
            self.remarks[note] += holds


def _is_picture(file: File) -> bool:
    return file.path.lower().endswith(PICTURES)


def _is_batch(file: File) -> bool:
    """Return if a file is a .npz or a pickle.

    A pickle is known by its first byte, since CIFAR's files have no suffix.
    """
    if file.path.endswith(".npz"):
        return True
    if PurePosixPath(file.name).suffix not in ("", ".pkl", ".pickle"):
        return False
    with open(file.path, "rb") as content:
        return content.read(1) == b"\x80"


def _read_batches(path: str, expansion: int = 250) -> Iterator[np.ndarray]:
    """Yield planes (n, D) uint8 of a batch file, a few hundred at a time. D is red, green, blue."""
    try:
        if path.endswith(".npz"):
            yield from _npz_rows(path, expansion)
            return
        yield from read_rows(path, _ROWS)
    except (ValueError, KeyError, OSError, RuntimeError, zipfile.BadZipFile, struct.error, EOFError) as error:
        raise ValueError(f"{path} is not a batch file of pictures: {error}") from error


def _npz_rows(path: str, expansion: int) -> Iterator[np.ndarray]:
    """Yield rows of the array `data` of a .npz, read as a stream, so that a false header allocates no memory."""
    with open(path, "rb") as file, zipfile.ZipFile(file) as archive:
        member = archive.getinfo("data.npy")
        if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):  # others allocate without a bound
            raise ValueError("it is compressed otherwise than NumPy does")
        with bound_stream(archive.open(member), file, path, expansion, member.file_size) as stream:
            shape, dtype = _npy_header(stream)
            if len(shape) == 4 and shape[-1] == 3:
                raise ValueError(f"expected planes (N, 3·pixels), got pictures {shape}")
            if len(shape) != 2 or dtype != np.uint8 or not 0 < shape[1] <= _LARGEST_ROW:
                raise ValueError(f"expected uint8 data of shape (N, 3·pixels), got {dtype} {shape}")
            rows = min(_ROWS, max(1, _LARGEST_ROW // shape[1]))
            for row in range(0, shape[0], rows):
                wanted = min(rows, shape[0] - row) * shape[1]
                content = stream.read(wanted)
                if len(content) != wanted:
                    raise ValueError(f"it ends in row {row + len(content) // shape[1]:,} of {shape[0]:,}")
                yield np.frombuffer(content, np.uint8).reshape(-1, shape[1])
            if stream.read(1):
                raise ValueError(f"it goes on after its {shape[0]:,} rows")


def _npy_header(file: IO[bytes]) -> tuple[tuple[int, ...], np.dtype]:
    try:
        version = np.lib.format.read_magic(file)
        reader = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, fortran, dtype = reader(file)
    except (OSError, zipfile.BadZipFile):
        raise
    except Exception as error:  # Python's parser reads the header, and may raise many kinds of errors
        raise ValueError(f"its header is none: {error or type(error).__name__}") from error
    if fortran:
        raise ValueError("its array is in Fortran's order")
    return shape, dtype
