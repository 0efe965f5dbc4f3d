"""Pictures: PNG and JPEG in folders or tars, and batch files of ImageNet32 and CIFAR-10. A document is an RGB raster.

Its order is rows from top to bottom, pixels from left to right, red, green and blue of each (H·W·3 bytes).

Decoders are made for browsers: they fill a missing part with black or grey without a warning. Here it is an error. The
data of a PNG are counted. The entropy-coded data of a JPEG cannot be counted without decoding them. So `check_jpeg`
returns the same file with other bytes behind each stretch of such data. A decoder that needs these bytes returns
another raster.
"""

import io
import re
import struct
import zipfile
import zlib
from collections.abc import Iterator
from math import isqrt
from pathlib import PurePosixPath
from typing import Any, ClassVar, NamedTuple

import numpy as np

from data.sources.file_type import HEAD, TO_PNG, detect_foreign_format
from data.sources.files import FREE, File, bound_stream, is_tar, read_npy_header, read_whole
from data.sources.safe_pickle import read_rows
from data.sources.source import Input, MediaSource, Piece
from data.sources.splits import named_split

PICTURES = (".png", ".jpg", ".jpeg")
LARGEST_PICTURE = 1 << 26  # pixels
_MODES = ("1", "L", "LA", "P", "PA", "RGB", "RGBA", "CMYK")  # of Pillow, 8 bits a value at most
_PNG_DEPTH = 24  # offset in a PNG of the number of bits per value
_ORIENTATION = 274  # the tag of EXIF
_ROWS = 256
_LARGEST_ROW = 1 << 24
_PNG_HEAD = b"\x89PNG\r\n\x1a\n"
_CHANNELS = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}  # by the colour type of a PNG
_INDEXED = 3
# First column and row, and their steps, of the seven passes of an interlaced PNG (ISO/IEC 15948, section 8.2).
_PASSES = ((0, 0, 8, 8), (4, 0, 8, 8), (0, 4, 4, 8), (2, 0, 4, 4), (0, 2, 2, 4), (1, 0, 2, 2), (0, 1, 1, 2))
_SEQUENTIAL, _PROGRESSIVE = (0xC0, 0xC1), 0xC2  # supported frames, all Huffman-coded
_FRAMES = {*range(0xC0, 0xD0)} - {0xC4, 0xC8, 0xCC}
_SOI, _EOI, _SOS, _DRI = 0xD8, 0xD9, 0xDA, 0xDD
_BARE = {0x01, *range(0xD0, 0xD8)}  # markers without a length: TEM and RST0 to RST7
_COEFFICIENTS = 64
_MOST_SCANS = 100  # encoders write about ten, and each is a pass over the whole picture
_MARKER = re.compile(rb"\xff+([^\x00\xff])")
# A decoder that has no data left goes on with zeros. What begins with a one mostly decodes otherwise: of 9,000 small pictures that
# lacked one to six bytes, 12 passed with one of these, and one with three. None has 0xff, which begins a marker.
_OTHER = tuple(bytes(first ^ 37 * number % 89 for number in range(64)) for first in (0xA5, 0x5A, 0x93))
TRUNCATED = "it was truncated, or its program broke off: it ends before its last pixel"


class ImageSource(MediaSource):
    """A source of pictures of one shape: files, members of tars, and rows of batch files.

    If paths name train and val but no test, val is test, and a hash takes valid out of train.
    """

    suffixes: ClassVar[tuple[str, ...]] = PICTURES
    noun = "pictures"
    missing = (
        "no PNG, JPEG, tar, .npz or pickled batch file. Convert other pictures, for example with `magick "
        "OLD.webp NEW.png`"
    )
    unlike = "set source.image_size= to resample them"
    needs = (
        "chunker.kind=pixels (chunker.k=12 is four pixels), and batch.context= to the chunks of a picture, or use the "
        "preset images"
    )

    def is_chosen(self, file: File) -> bool:
        """Return if the file is a picture, a tar or a batch file."""
        return super().is_chosen(file) or _is_batch(file)

    def decoder_versions(self) -> dict[str, str]:
        """Return the versions of Pillow and its JPEG decoder, if there are pictures to decode."""
        if not any(self.is_single_file(file) or is_tar(file.path) for file in self.files):
            return {}
        from PIL import __version__, features

        turbo = " turbo " + str(features.version("libjpeg_turbo")) if features.check("libjpeg_turbo") else ""
        return {"pillow": __version__, "jpeg": f"{features.version('jpg')}{turbo}"}

    def stated_split(self, name: str) -> str | None:
        """Return the split that a path states. The batches of CIFAR-10 are its train split."""
        batch = PurePosixPath(name).name.startswith("data_batch")
        return named_split(name) or ("train" if batch else None)

    def read(self, item: Input) -> Iterator[Piece]:
        """Yield the rasters of a picture, a batch file or a tar."""
        for name, (height, width), raster in self._read_rasters(item):
            self.check_consistent_format(name, height=height, width=width, channels=3)
            yield Piece(name, self.split_of(name, self.places_in(item, name), raster), raster)

    def _read_rasters(self, item: Input) -> Iterator[tuple[str, tuple[int, int], bytes]]:
        """Yield name, height and width, and raster of each picture."""
        from PIL import Image

        if is_tar(item.path) or PurePosixPath(item.path.lower()).suffix in PICTURES:
            for name, content, size, where in self.iterate_documents(item):
                yield name, *self._decode_picture(read_whole(content, size, where), where)
        else:
            row = 0
            for planes in _read_batches(item.path, self.options.expansion):
                side = isqrt(planes.shape[1] // 3)
                if 3 * side * side != planes.shape[1]:
                    raise ValueError(f"{item.path}: rows of {planes.shape[1]} values are not square RGB pictures")
                for raster in np.ascontiguousarray(planes.reshape(-1, 3, side, side).transpose(0, 2, 3, 1)):
                    if self.options.image_size not in (None, side):
                        raster = np.asarray(self._resample_picture(Image.fromarray(raster)))
                    yield f"{item.name}@{row}", raster.shape[:2], raster.tobytes()
                    row += 1

    def _decode_picture(self, content: bytes, name: str) -> tuple[tuple[int, int], bytes]:
        """Return height, width and raster of a PNG or JPEG. Conversions are counted in `remarks`."""
        from PIL import Image, UnidentifiedImageError

        try:
            with Image.open(io.BytesIO(content), formats=("PNG", "JPEG")) as picture:
                if picture.width * picture.height > LARGEST_PICTURE:
                    raise ValueError(f"{picture.width} × {picture.height} pixels exceed the limit of a picture")
                if 3 * picture.width * picture.height > FREE + self.options.expansion * len(content):
                    raise ValueError(
                        f"{picture.width} × {picture.height} pixels in {len(content):,} bytes may be a decompression "
                        "bomb. If this is intended, raise source.expansion"
                    )
                if picture.format == "PNG" and content[_PNG_DEPTH] > 8:  # Pillow would clip it, or cut it to 8 bits
                    raise ValueError(f"it has {content[_PNG_DEPTH]} bits per value, expected 8. Convert it first")
                if picture.mode not in _MODES:
                    raise ValueError(f"its pixels are {picture.mode}, expected grey or RGB. Convert it first")
                behind = self._check_whole(picture, content)
                colours = picture.convert("RGB")
                self._count_conversions(picture)
                self.remarks["bytes after the end of pictures were left out, in"] += behind
                colours = self._resample_picture(colours)
                return (colours.height, colours.width), colours.tobytes()
        except UnidentifiedImageError as error:
            format_name, advice = detect_foreign_format(content[:HEAD]) or ("", "")
            is_other = f": it is {format_name}. Convert it into PNG" if advice == TO_PNG else ""
            raise ValueError(
                f"{name} cannot be read as a picture: it is neither PNG nor JPEG, whatever its name{is_other}"
            ) from error
        except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
            raise ValueError(f"{name} cannot be read as a picture: {error}") from error

    def _resample_picture(self, picture: Any) -> Any:
        """Resample a Pillow picture to `image_size`, as ImageNet32 was made."""
        from PIL import Image

        side = self.options.image_size
        if side is None or picture.size == (side, side):
            return picture
        self.remarks[f"pictures were resampled to {side} × {side}"] += 1
        return picture.resize((side, side), Image.Resampling.BOX)

    def _check_whole(self, picture: Any, content: bytes) -> bool:
        """Decode a picture, unless a part is missing, and return whether there are bytes behind its end."""
        if picture.format == "PNG":
            colours, behind = check_png(content)
            picture.load()
            if colours is not None and (most := int(np.asarray(picture).max(initial=0))) >= colours:
                raise ValueError(f"a pixel has colour {most} of a palette with {colours} colours")
            return behind > 0
        from PIL import Image

        copies, behind = check_jpeg(content)
        raster = picture.tobytes()
        for each in copies:
            with Image.open(io.BytesIO(each), formats=("JPEG",)) as padded:
                if padded.tobytes() != raster:
                    raise ValueError(TRUNCATED)
        return behind > 0

    def _count_conversions(self, picture: Any) -> None:
        """Count conversions that make the raster differ from the picture that people see."""
        turned = unreadable = False
        if "exif" in picture.info:
            try:
                turned = picture.getexif().get(_ORIENTATION, 1) != 1
            except (SyntaxError, ValueError, OSError):  # the raster is whole
                unreadable = True
        for note, holds in {
            "pictures have EXIF data that cannot be read": unreadable,
            "grey pictures became RGB": picture.mode in ("1", "L", "LA"),
            "CMYK pictures became RGB": picture.mode == "CMYK",
            "pictures lost their transparency": picture.mode in ("LA", "PA", "RGBA") or "transparency" in picture.info,
            "pictures were read as stored, without their EXIF rotation": turned,
            "pictures were read as stored, without their colour profile": "icc_profile" in picture.info,
            "only the first frame of animations was read": getattr(picture, "n_frames", 1) > 1,
        }.items():
            self.remarks[note] += holds


def _is_batch(file: File) -> bool:
    """Return if a file is a .npz or a pickle, which is known by its first byte, since CIFAR's files have no suffix."""
    if file.path.endswith(".npz"):
        return True
    if PurePosixPath(file.name).suffix not in ("", ".pkl", ".pickle"):
        return False
    with open(file.path, "rb") as content:
        return content.read(1) == b"\x80"


def _read_batches(path: str, expansion: int = 250) -> Iterator[np.ndarray]:
    """Yield planes (n, D) uint8 of a batch file, a few hundred at a time. D is red, green, blue."""
    try:
        yield from _npz_rows(path, expansion) if path.endswith(".npz") else read_rows(path, _ROWS)
    except (ValueError, KeyError, OSError, RuntimeError, zipfile.BadZipFile, struct.error, EOFError) as error:
        raise ValueError(f"{path} is not a batch file of pictures: {error}") from error


def _npz_rows(path: str, expansion: int) -> Iterator[np.ndarray]:
    """Yield rows of the array `data` of a .npz, read as a stream, so that a false header allocates no memory."""
    with open(path, "rb") as file, zipfile.ZipFile(file) as archive:
        member = archive.getinfo("data.npy")
        if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):  # others allocate without a bound
            raise ValueError("its compression is not NumPy's")
        with bound_stream(archive.open(member), file, path, expansion, member.file_size) as stream:
            shape, dtype = read_npy_header(stream)
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
                raise ValueError(f"it continues after its {shape[0]:,} rows")


def check_png(content: bytes) -> tuple[int | None, int]:
    """Compare the contents of a PNG with its header: checksums, bytes of its rows, palette and end.

    Returns:
        the number of its palette's colours, beyond which a pixel may not point (None without a palette), and the number
            of bytes behind its end.

    Raises:
        ValueError: something is missing, damaged or too much.
    """
    header, palette, rows, behind = b"", None, list[bytes](), 0
    for kind, body, end in _png_chunks(content):
        if kind == b"IHDR":
            header = body
        elif kind == b"PLTE" and not rows:
            if not body or len(body) % 3 or len(body) > 3 * 256:
                raise ValueError(f"its palette has {len(body):,} bytes, expected 1 to 256 colours")
            palette = len(body) // 3
        elif kind == b"IDAT":
            rows.append(body)
        elif kind == b"IEND":
            behind = len(content) - end
    if len(header) != 13:
        raise ValueError("it has no header (IHDR)")
    width, height, depth, colour, _, _, interlaced = struct.unpack(">IIBBBBB", header)
    if colour not in _CHANNELS:
        raise ValueError(f"its colour type {colour} is not one of PNG")
    if colour == _INDEXED and palette is None:
        raise ValueError("its pixels need a palette, but it has none")
    _check_rows(b"".join(rows), _row_bytes(width, height, depth * _CHANNELS[colour], bool(interlaced)))
    return palette if colour == _INDEXED else None, behind


def _png_chunks(content: bytes) -> Iterator[tuple[bytes, bytes, int]]:
    """Yield kind, body and end of each chunk of a PNG, up to its last."""
    at, kind = len(_PNG_HEAD), b""
    while kind != b"IEND":
        size, kind = struct.unpack_from(">I4s", content, at) if at + 8 <= len(content) else (0, b"")
        body, end = content[at + 8 : at + 8 + size], at + 12 + size
        if not kind or end > len(content):
            raise ValueError(f"{TRUNCATED} (it has no end, IEND)")
        if zlib.crc32(body, zlib.crc32(kind)) != int.from_bytes(content[end - 4 : end], "big"):
            raise ValueError(f"it is damaged: the checksum of its part {kind.decode('latin-1')!r} does not match")
        yield kind, body, end
        at = end


def _row_bytes(width: int, height: int, bits: int, interlaced: bool) -> int:
    """Return the bytes of all rows of a PNG, each with its filter byte; of its seven passes if it is interlaced."""
    total = 0
    for column, row, across, down in _PASSES if interlaced else ((0, 0, 1, 1),):
        wide, high = -(-(width - column) // across), -(-(height - row) // down)
        total += high * (1 + -(-wide * bits // 8)) if wide > 0 and high > 0 else 0
    return total


def _check_rows(compressed: bytes, size: int) -> None:
    """Raise ValueError if the zlib stream does not decompress to exactly `size` bytes."""
    inflater = zlib.decompressobj()
    try:
        size_there = len(inflater.decompress(compressed, size + 1))
        if size_there <= size:
            # This gives nothing, but checks the checksum of the stream.
            size_there += len(inflater.decompress(inflater.unconsumed_tail, 1))
    except zlib.error as error:
        raise ValueError(f"it is damaged: {error}") from error
    if size_there < size or (size_there == size and not inflater.eof):
        raise ValueError(f"{TRUNCATED} (its rows have {size_there:,} of {size:,} bytes)")
    if size_there > size or inflater.unused_data:
        raise ValueError(
            f"its data continue after the last row ({size:,} bytes in all). The header is damaged or belongs "
            "to another picture"
        )


class _Frame(NamedTuple):
    """The size of a JPEG in pixels, and the sampling factors of its components by number."""

    kind: int
    width: int
    height: int
    sampling: dict[int, tuple[int, int]]

    def count_units(self, components: list[int]) -> int:
        """Return the number of coded units (MCU) of a scan of these components (ITU-T T.81, section A.2)."""
        across, down = (max(each[axis] for each in self.sampling.values()) for axis in (0, 1))
        if len(components) == 1:
            factors = self.sampling[components[0]]
            wide, high = -(-self.width * factors[0] // across), -(-self.height * factors[1] // down)
            return -(-wide // 8) * -(-high // 8)
        return -(-self.width // (8 * across)) * -(-self.height // (8 * down))


def check_jpeg(content: bytes) -> tuple[list[bytes], int]:
    """Check that a JPEG has all scans, restart markers and its end.

    Returns:
        copies with other bytes behind each stretch of entropy-coded data, and the number of bytes behind its end. The
            picture is whole if all copies decode to the same raster as the original.

    Raises:
        ValueError: something is missing, or the kind of JPEG cannot be checked.
    """
    frame: _Frame | None = None
    left: dict[int, list[int | None]] = {}  # by component, missing bits of each coefficient
    parts: list[bytes | None] = [content[:2]]  # None: where other bytes go
    at, interval, scans = 2, 0, 0
    while True:
        match = _MARKER.search(content, at)
        marker = match[1][0] if match else _EOI
        if match is None or (marker != _EOI and marker not in _BARE and match.end() + 2 > len(content)):
            raise ValueError(f"{TRUNCATED} (it has no end, EOI)")
        if marker == _EOI:
            break
        end = match.end()
        if marker not in _BARE and marker != _SOI:
            end += int.from_bytes(content[end : end + 2], "big")
        body = content[match.end() + 2 : end]
        parts.append(content[match.start() : end])
        at = end
        try:
            if marker in _FRAMES:
                frame = _read_frame(marker, body)
                left = {component: [None] * _COEFFICIENTS for component in frame.sampling}
            elif marker == _DRI:
                interval = int.from_bytes(body[:2], "big")
            elif marker == _SOS and frame:
                components, scans = _read_scan(frame, body, left), scans + 1
                if scans > _MOST_SCANS:
                    raise ValueError(f"it has more than {_MOST_SCANS} scans. Convert it into PNG")
                stretches, at = _read_data(content, end)
                _check_restarts(stretches, frame.count_units(components), interval)
                parts += [part for data, restart in stretches for part in (data, None, restart)]
        except (IndexError, KeyError) as error:
            raise ValueError("it is damaged: the header of a frame or scan is incomplete") from error
    if not left or any(bits != 0 for each in left.values() for bits in each):
        raise ValueError(f"{TRUNCATED} (it lacks scans)")
    parts.append(content[match.start() : match.end()])
    padded = [b"".join(fill if part is None else part for part in parts) for fill in _OTHER]
    return padded, len(content) - match.end()


def _read_frame(marker: int, body: bytes) -> _Frame:
    if marker not in (*_SEQUENTIAL, _PROGRESSIVE):
        raise ValueError("it is neither a baseline nor a progressive JPEG. Convert it into one, or into PNG")
    sampling = {body[at]: (body[at + 1] >> 4, body[at + 1] & 15) for at in range(6, 6 + 3 * body[5], 3)}
    if not sampling or any(not 1 <= factor <= 4 for pair in sampling.values() for factor in pair):
        raise ValueError("it is damaged: the header of its frame is invalid")
    return _Frame(marker, int.from_bytes(body[3:5], "big"), int.from_bytes(body[1:3], "big"), sampling)


def _read_scan(frame: _Frame, body: bytes, left: dict[int, list[int | None]]) -> list[int]:
    """Return the components of a scan, and record in `left` the bits that are still missing after it."""
    count = body[0]
    components = [body[1 + 2 * number] for number in range(count)]
    first, last, precision = body[1 + 2 * count], body[2 + 2 * count], body[3 + 2 * count] & 15
    if frame.kind != _PROGRESSIVE:
        first, last, precision = 0, _COEFFICIENTS - 1, 0
    for component in components:
        for coefficient in range(first, last + 1):
            missing = left[component][coefficient]
            if missing is not None and precision >= missing:
                raise ValueError("it is damaged: a scan repeats another one")
            left[component][coefficient] = precision
    return components


def _read_data(content: bytes, at: int) -> tuple[list[tuple[bytes, bytes]], int]:
    """Return stretches of entropy-coded data, each with the restart marker behind it but the last, and their end."""
    stretches = []
    for match in _MARKER.finditer(content, at):
        restart = match[1][0] in range(0xD0, 0xD8)
        stretches.append((content[at : match.start()], match[0] if restart else b""))
        at = match.end() if restart else match.start()
        if not restart:
            break
    return stretches, at


def _check_restarts(stretches: list[tuple[bytes, bytes]], units: int, interval: int) -> None:
    """Raise ValueError if restart markers are missing, since a decoder fills in the data between them."""
    restarts = [restart[-1] - 0xD0 for _, restart in stretches if restart]
    wanted = -(-units // interval) - 1 if interval else 0
    if len(restarts) < wanted or restarts != [number % 8 for number in range(len(restarts))]:
        raise ValueError(f"{TRUNCATED} ({len(restarts):,} of {wanted:,} restart markers, or in the wrong order)")
