"""Files that are no text, known by how they begin: read as text, a model would learn headers and compressed bytes."""

import codecs
import tarfile
from pathlib import PurePosixPath

from data.sources.files import SUFFIXES, open_stream

_UNPACK = "unpack it, and give the texts"
_NAME = f"name it by its compression ({', '.join(SUFFIXES)}), and it is read through it"
_PICTURES, _SOUND, _ROWS = (
    "source.kind=images reads pictures",
    "source.kind=audio reads WAV and FLAC",
    "source.kind=datasets",
)
_HEAD = 8192
_WIDE = {  # the longer mark begins as the shorter one
    "UTF-32": (codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE),
    "UTF-16": (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE),
}
_MAGIC = (
    (b"PK\x03\x04", "a zip", _UNPACK),
    (b"PK\x05\x06", "an empty zip", _UNPACK),
    (b"7z\xbc\xaf\x27\x1c", "a 7z archive", _UNPACK),
    (b"Rar!\x1a\x07", "a rar archive", _UNPACK),
    (b"\x1f\x8b\x08", "compressed by gzip", _NAME),
    (b"\xfd7zXZ\x00", "compressed by xz", _NAME),
    (b"BZh", "compressed by bzip2", _NAME),
    (b"\x28\xb5\x2f\xfd", "compressed by zstd", _NAME),
    (b"\x04\x22\x4d\x18", "compressed by lz4", "decompress it"),
    (b"%PDF-", "a PDF", "convert it into text"),
    (b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1", "a document of an office program", "convert it into text"),
    (b"{\\rtf1", "rich text", "convert it into text"),
    (b"PAR1", "Parquet", f"{_ROWS} reads it, in a folder"),
    (b"ARROW1", "Arrow", f"{_ROWS} reads it, in a folder"),
    (b"SQLite format 3\x00", "an SQLite database", "write a source of your own (docs/data.md)"),
    (b"\x89HDF\r\n\x1a\n", "HDF5", "write a source of your own (docs/data.md)"),
    (b"\x93NUMPY", "an array of NumPy", "source.kind=images reads .npz of pictures"),
    (b"\x89PNG\r\n\x1a\n", "a PNG", _PICTURES),
    (b"\xff\xd8\xff", "a JPEG", _PICTURES),
    (b"GIF8", "a GIF", "convert it into PNG for source.kind=images"),
    (b"II*\x00", "a TIFF", "convert it into PNG for source.kind=images"),
    (b"MM\x00*", "a TIFF", "convert it into PNG for source.kind=images"),
    (b"OggS", "Ogg", "convert it into WAV for source.kind=audio"),
    (b"fLaC", "FLAC", _SOUND),
    (b"ID3\x03", "MP3", "convert it into WAV for source.kind=audio"),
    (b"ID3\x04", "MP3", "convert it into WAV for source.kind=audio"),
    (b"\x7fELF", "a program", "leave it out by source.pattern="),
)
_RIFF = {b"WAVE": ("a WAV", _SOUND), b"WEBP": ("a WebP picture", "convert it into PNG for source.kind=images")}


def foreign(head: bytes) -> tuple[str, str] | None:
    """What a file is that begins so, and what to do with it; None: it may be a text."""
    for magic, what, advice in _MAGIC:
        if head.startswith(magic) and (magic != b"BZh" or head[4:10] == b"1AY&SY"):
            return what, advice
    if head[:4] == b"RIFF" and head[8:12] in _RIFF:
        return _RIFF[head[8:12]]
    try:
        tarfile.TarInfo.frombuf(head[: tarfile.BLOCKSIZE], "utf-8", "surrogateescape")
    except tarfile.HeaderError:
        return None
    return "a tar", f"{_UNPACK}; {_PICTURES} and {_SOUND} in tars"


def doubtful(head: bytes) -> str | None:
    """What a file that begins so is, if it is text in no UTF-8; None: it may be."""
    wide = next((name for name, marks in _WIDE.items() if head.startswith(marks)), None)
    few, many = sorted((head[::2].count(0), head[1::2].count(0)))
    if wide or many > len(head) // 5 > few:  # without a mark: every second byte of Latin letters is 0
        name = wide or "UTF-16"
        return f"text in {name}, which `iconv -f {name} -t UTF-8` converts"
    if many:
        return "no text (NUL bytes), which source.pattern= leaves out"
    try:
        codecs.getincrementaldecoder("utf-8")().decode(head)  # a character may be cut at the end
    except UnicodeDecodeError:
        return "no text in UTF-8: another encoding, which `iconv -f … -t UTF-8` converts, or binary"
    return None


def check_text(path: str, expansion: int) -> str | None:
    """Looks whether a file is something else than text, inside of its compression.

    Returns:
        what is odd about its first bytes, which can be read as they are nevertheless; None: they are UTF-8.

    Raises:
        ValueError: it is no text; the message says what, and what to do.
    """
    with open_stream(path, expansion) as stream:
        head = stream.read(_HEAD)
    if found := foreign(head):
        what, advice = found
        inside = " inside of its compression" if PurePosixPath(path.lower()).suffix in SUFFIXES else ""
        name = "standard input" if PurePosixPath(path).parent.name.startswith(".stdin-") else path
        raise ValueError(f"{name} is {what}{inside}, not text: {advice}")
    return doubtful(head)
