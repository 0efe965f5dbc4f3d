"""A picture with a part missing is refused, however valid its file is otherwise: decoders would fill the part."""

import io
import struct
import zlib
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from data.options import SourceOptions
from data.sources.images import ImageSource, _row_bytes, check_jpeg
from tests.data.sources.test_images import sharded

GENERATOR = np.random.default_rng(0)
NOISE = GENERATOR.integers(0, 256, (19, 21, 3), dtype=np.uint8)
EOI = b"\xff\xd9"
FORMS = [(depth, 0) for depth in (1, 2, 4, 8)] + [(8, 2), (1, 3), (2, 3), (4, 3), (8, 3), (8, 4), (8, 6)]


def part(kind: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def png(
    rows: bytes,
    width: int,
    height: int,
    depth: int = 8,
    colour: int = 2,
    palette: int | None = None,
    laced: bool = False,
) -> bytes:
    """A valid PNG but for what `rows` (with the bytes of their filters) and the palette may lack."""
    header = struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, laced)
    colours = b"" if palette is None else part(b"PLTE", bytes(range(50, 50 + 3 * palette)))
    return (
        b"\x89PNG\r\n\x1a\n" + part(b"IHDR", header) + colours + part(b"IDAT", zlib.compress(rows)) + part(b"IEND", b"")
    )


def read(content: bytes) -> tuple[bytes, Counter[str]]:
    source = ImageSource(SourceOptions(kind="images", path="."))
    return source._decode_picture(content, "a.png")[1], +source.remarks


@pytest.mark.parametrize("laced", [False, True])
@pytest.mark.parametrize(("depth", "colour"), FORMS)
def test_a_png_of_fewer_rows_than_it_says_is_refused(depth: int, colour: int, laced: bool) -> None:
    channels = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}[colour]
    for width, height in ((1, 1), (3, 2), (5, 9), (16, 8)):
        size = _row_bytes(width, height, depth * channels, laced)
        whole = bytes(size)  # filters and pixels of 0
        palette = 1 if colour == 3 else None
        assert len(read(png(whole, width, height, depth, colour, palette, laced))[0]) == 3 * width * height
        for rows, said in (
            (whole[: size // 2], "truncated"),
            (whole[:-1], "truncated"),
            (whole + b"\0", "data continue after"),
        ):
            with pytest.raises(ValueError, match=said):
                read(png(rows, width, height, depth, colour, palette, laced))


@pytest.mark.parametrize(("colour", "channels"), [(0, 1), (2, 3), (6, 4)])
def test_pictures_of_16_bits_are_refused(colour: int, channels: int) -> None:
    content = png((b"\0" + bytes(2 * 4 * channels)) * 4, 4, 4, 16, colour)
    assert Image.open(io.BytesIO(content)).size == (4, 4)
    with pytest.raises(ValueError, match="a.png cannot be read as a picture: it has 16 bits per value, expected 8"):
        read(content)


def test_a_picture_without_its_palette_is_refused(tmp_path: Path) -> None:
    (tmp_path / "train.png").write_bytes(png(b"\0\1\1" * 2, 2, 2, 8, 3))
    with pytest.raises(ValueError, match="train.png cannot be read as a picture: .* a palette, but it has none"):
        sharded(tmp_path, tmp_path / "shards")
    good = png(b"\0\1\1" * 2, 2, 2, 8, 3, palette=2)
    assert read(good)[0] == bytes([53, 54, 55] * 4)
    with pytest.raises(ValueError, match="a pixel has colour 9 of a palette with 9 colours"):
        read(png(b"\0" + bytes(range(10)), 10, 1, 8, 3, palette=9))
    with pytest.raises(ValueError, match="its palette has 4 bytes"):
        read(good.replace(part(b"PLTE", bytes(range(50, 56))), part(b"PLTE", bytes(4))))


def test_a_damaged_png_is_refused() -> None:
    good = png(b"".join(b"\0" + row.tobytes() for row in NOISE), 21, 19)
    assert read(good)[0] == NOISE.tobytes()
    for at in range(8, len(good), 97):
        bad = bytearray(good)
        bad[at] ^= 1
        with pytest.raises(ValueError):
            read(bytes(bad))
    for cut in range(1, len(good), 101):
        with pytest.raises(ValueError):
            read(good[:-cut])


def test_bytes_behind_a_picture_are_noted() -> None:
    good = png(b"\0\1\2\3", 1, 1)
    assert read(good)[1] == {}
    assert read(good + good) == (b"\1\2\3", {"bytes after the end of pictures were left out, in": 1})


def jpeg(mode: str = "RGB", **options: object) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(NOISE).convert(mode).save(buffer, "JPEG", quality=80, **options)  # type: ignore[arg-type]
    return buffer.getvalue()


@pytest.mark.parametrize("mode", ["RGB", "L", "CMYK"])
@pytest.mark.parametrize("progressive", [False, True])
@pytest.mark.parametrize("subsampling", [0, 2])
@pytest.mark.parametrize("restarts", [{}, {"restart_marker_blocks": 2}, {"restart_marker_rows": 1}])
def test_a_jpeg_that_breaks_off_and_still_ends_validly_is_refused(
    mode: str, progressive: bool, subsampling: int, restarts: dict[str, int]
) -> None:
    whole = jpeg(mode, progressive=progressive, subsampling=subsampling, **restarts)
    picture, remarks = read(whole)
    assert picture == Image.open(io.BytesIO(whole)).convert("RGB").tobytes()
    assert not remarks or mode != "RGB"
    for cut in (*range(3, 20), *range(20, len(whole) - 4, 37)):
        for tail in (b"", EOI):
            try:
                assert read(whole[:-cut] + tail)[0] == picture  # an end of padding only
            except ValueError as error:
                assert "cannot be read as a picture" in str(error)
            else:
                assert cut < 5, "the data of a quarter of the picture were missing"


def test_a_jpeg_that_repeats_a_scan_or_has_very_many_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is a pass over the whole picture, so a small file would take long."""
    for progressive in (False, True):
        whole = jpeg(progressive=progressive)
        scan, end = whole.rindex(b"\xff\xda"), whole.rindex(b"\xff\xd9")
        with pytest.raises(ValueError, match="a scan repeats another one"):
            check_jpeg(whole[:end] + whole[scan:])
    monkeypatch.setattr("data.sources.images._MOST_SCANS", 3)
    with pytest.raises(ValueError, match="more than 3 scans"):
        check_jpeg(whole)


def test_a_progressive_jpeg_without_its_last_scans_is_refused() -> None:
    whole = jpeg(progressive=True)
    scans = [at for at in range(len(whole) - 1) if whole[at : at + 2] == b"\xff\xda"]
    assert len(scans) > 3
    for at in scans:
        with pytest.raises(ValueError, match="it was truncated.*it lacks scans"):
            read(whole[:at] + EOI)


def test_a_jpeg_without_some_of_its_stretches_is_refused() -> None:
    whole = jpeg(restart_marker_blocks=1)
    marks = [at for at in range(len(whole) - 1) if whole[at] == 0xFF and 0xD0 <= whole[at + 1] <= 0xD7]
    for first, last in ((marks[0], marks[1]), (marks[-2], len(whole) - 2), (marks[-1], len(whole) - 2)):
        with pytest.raises(ValueError, match="restart markers"):
            read(whole[:first] + whole[last:])


def test_a_jpeg_taller_than_its_data_is_refused() -> None:
    whole = bytearray(jpeg())
    at = whole.index(b"\xff\xc0") + 5
    whole[at : at + 2] = (100).to_bytes(2, "big")
    with pytest.raises(ValueError, match="truncated"):
        read(bytes(whole))
