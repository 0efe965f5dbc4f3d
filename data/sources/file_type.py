"""Checks that files and members of tars are text: by their first bytes, and, while they are read, piece by piece.

What is no text would teach a model headers and compressed bytes. It is refused by its first bytes. What is odd about a
text (NUL bytes, another encoding, a byte order mark, line endings) is noted, and its bytes are read as they are.
"""

import codecs
import os
import re
import shlex
import tarfile
import unicodedata
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath

from data.sources.files import SUFFIXES, is_compressed
from data.sources.source import Piece
from data.sources.splits import some_of

_UNPACK = "unpack it and give the texts"
_NAME = f"rename it with the suffix of its compression ({', '.join(SUFFIXES)}), so that it is decompressed"
_PICTURES, _ROWS = "source.kind=images reads pictures", "source.kind=datasets"
_SOUND = "source.kind=audio reads WAV and FLAC"
TO_PNG, _TO_WAV = "convert it into PNG for source.kind=images", "convert it into WAV for source.kind=audio"
_OWN, LEAVE_OUT = "write a source of your own (docs/how-to/write-a-source.md)", "leave it out with source.pattern="
HEAD = 8192  # bytes of a file or member that are checked
_MARKS = {  # the longer mark begins as the shorter one
    codecs.BOM_UTF32_LE: ("UTF-32LE", "UTF-32"),
    codecs.BOM_UTF32_BE: ("UTF-32BE", "UTF-32"),
    codecs.BOM_UTF16_LE: ("UTF-16LE", "UTF-16"),
    codecs.BOM_UTF16_BE: ("UTF-16BE", "UTF-16"),
}
_WIDE = {"utf_16_le": "UTF-16LE", "utf_16_be": "UTF-16BE", "utf_32_le": "UTF-32LE", "utf_32_be": "UTF-32BE"}
_ODD = 0.01  # maximum share of controls and unassigned characters in a text
_FEWEST = 3  # minimum characters to detect a wide encoding
_BINARY = 0.03  # maximum share of controls in a text of a legacy encoding
_CONTROLS = bytes({*range(32)} - {*b"\t\n\v\f\r\x1b"})  # that UTF-8 text does not have
_COMMON = re.compile(r"[\t\n\r -~\u3000-\u30ff]")  # among ideographs: their bytes are rare in other encodings
_ENOUGH = 64  # characters that are enough to detect an encoding by frequencies
_LETTERS = 0.75  # minimum share of characters in alphabets or beyond the first plane
_LEGACY = {  # encodings to guess, by Python's names, with their names for `iconv`
    **{f"cp{number}": f"CP{number}" for number in (1252, 1250, 1251, 1253, 1254, 1255, 1256, 1257, 866, 932, 949)},
    **{"koi8_r": "KOI8-R", "koi8_u": "KOI8-U", "iso8859_2": "ISO8859-2", "tis_620": "TIS-620"},
    **{"gb18030": "GB18030", "big5": "BIG5", "euc_jp": "EUC-JP"},
}
_ALIKE = ("cp1250", "cp1254", "cp1257", "iso8859_2")  # Latin encodings that mostly agree with CP1252
_DECOMPRESS = {".gz": "gzip", ".tgz": "gzip", ".xz": "xz", ".txz": "xz", ".bz2": "bzip2", ".zst": "zstd"}
_FORMATS = [  # beginnings of files; those of plain letters may begin a text as well, so the patterns go on
    (rb"PK\x03\x04", "a zip", _UNPACK),
    (rb"PK\x05\x06", "an empty zip", _UNPACK),
    (rb"7z\xbc\xaf\x27\x1c", "a 7z archive", _UNPACK),
    (rb"Rar!\x1a\x07", "a rar archive", _UNPACK),
    (rb"MSCF\x00", "a cabinet", _UNPACK),
    (rb"!<arch>\n", "an archive", _UNPACK),
    (rb"\x1f\x8b\x08", "compressed by gzip", _NAME),
    (rb"\xfd7zXZ\x00", "compressed by xz", _NAME),
    (rb"BZh[1-9](1AY&SY|\x17rE8P\x90)", "compressed by bzip2", _NAME),
    (rb"\x28\xb5\x2f\xfd", "compressed by zstd", _NAME),
    (rb"\x04\x22\x4d\x18", "compressed by lz4", "decompress it"),
    (rb"\x1f\x9d", "compressed by compress", "decompress it"),
    (rb"LZIP\x01", "compressed by lzip", "decompress it"),
    (rb"%PDF-\d", "a PDF", "convert it into text"),
    (rb"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1", "a document of an office program", "convert it into text"),
    (rb"\{\\rtf1[\\\s]", "rich text", "convert it into text"),
    (rb"PAR1[^\x20-\x7e]", "Parquet", f"{_ROWS} reads it from a folder"),
    (rb"ARROW1\x00", "Arrow", f"{_ROWS} reads it from a folder"),
    (rb"SQLite format 3\x00", "an SQLite database", _OWN),
    (rb"\x89HDF\r\n\x1a\n", "HDF5", _OWN),
    (rb"Obj\x01", "Avro", _OWN),
    (rb"\x80[\x02-\x05]", "a pickle", _OWN),
    (rb"\x93NUMPY", "a NumPy array", "source.kind=images reads .npz of pictures"),
    (rb"\x89PNG\r\n\x1a\n", "a PNG", _PICTURES),
    (rb"\xff\xd8\xff", "a JPEG", _PICTURES),
    (rb"GIF8[79]a[\x00-\xff]{0,6}\x00", "a GIF", TO_PNG),
    (rb"II[*+]\x00|MM\x00[*+]", "a TIFF", TO_PNG),
    (rb"RIFF....WEBP", "a WebP picture", TO_PNG),
    (rb"\0...ftyp(hei[cx]|mif1|avif)", "a HEIF or AVIF picture", TO_PNG),
    (rb"BM.{4}\0{4}.{4}[\x28\x6c\x7c]\0{3}", "a BMP picture", TO_PNG),
    (rb"\0\0\0\x0cJXL ", "a JPEG XL", TO_PNG),
    (rb"\0\0\0\x0cjP  |\xff\x4f\xff\x51", "a JPEG 2000", TO_PNG),
    (rb"v/1\x01", "an OpenEXR picture", TO_PNG),
    (rb"qoif\x00", "a QOI picture", TO_PNG),
    (rb"8BPS\x00", "a Photoshop picture", TO_PNG),
    (rb"\0\0\x01\0", "an icon", TO_PNG),
    (rb"RIFF....WAVE", "a WAV", _SOUND),
    (rb"fLaC[^\x20-\x7e]", "FLAC", _SOUND),
    (rb"OggS\x00", "Ogg", _TO_WAV),
    (rb"ID3[\x02-\x04]|\xff[\xfb\xfa\xf3\xf2]", "MP3", _TO_WAV),
    (rb"\xff\xf1", "AAC", _TO_WAV),
    (rb"#!AMR", "AMR", _TO_WAV),
    (rb"caff\x00", "an Apple recording (CAF)", _TO_WAV),
    (rb"FORM....AIF[FC]", "AIFF", _TO_WAV),
    (rb"\.snd\x00", "a Sun recording", _TO_WAV),
    (rb"MThd\x00", "MIDI", LEAVE_OUT),
    (rb"\x1a\x45\xdf\xa3|FLV\x01|RIFF....AVI ", "a film", LEAVE_OUT),
    (rb"\0...ftyp", "a film or a recording", LEAVE_OUT),
    (rb"wOF[F2][\x00\x01OT]", "a font", LEAVE_OUT),
    (rb"GGUF[\x01-\x09]\x00", "a model", LEAVE_OUT),
    (rb"\x7fELF|\xca\xfe\xba\xbe|\xcf\xfa\xed\xfe|\x00asm", "a program", LEAVE_OUT),
]
_ANY_BEGINNING = re.compile(b"|".join(pattern for pattern, _, _ in _FORMATS), re.DOTALL)
_CHECKSUM = slice(148, 156)  # in the header of a tar
_KEPT = 100  # maximum names of a kind that a part keeps
_LF, _CRLF, _CR, _ENDS = "LF", "CRLF", "CR", "ends"
_CUT = re.compile(r"@\d+$")
CONTINUATION_BYTES = bytes(range(0x80, 0xC0))  # bytes of UTF-8 that begin no character
_NOTES = {
    "NUL": "NUL bytes, so it is probably no text; the bytes are read as they are",
    "encoding": "bytes that are not UTF-8 (another encoding, or binary); the bytes are read as they are",
    "mark": "a UTF-8 byte order mark, which is read as text",
}


def detect_foreign_format(head: bytes) -> tuple[str, str] | None:
    """Return the type of a file that begins so, and what to do with it; None: it may be a text."""
    if _ANY_BEGINNING.match(head):  # of most files none does
        return next(
            (format_name, advice) for pattern, format_name, advice in _FORMATS if re.match(pattern, head, re.DOTALL)
        )
    if not head[_CHECKSUM].strip(b" \0").isdigit():
        return None
    try:
        tarfile.TarInfo.frombuf(head[: tarfile.BLOCKSIZE], "utf-8", "surrogateescape")
    except tarfile.HeaderError:
        return None
    return "a tar", f"{_UNPACK}; {_PICTURES} and {_SOUND} in tars"


def wide_encoding(head: bytes, closely: bool = True) -> tuple[str, str] | None:
    """Return the encoding of a text with two or four bytes per character.

    Args:
        head: its first bytes.
        closely: also guess without a byte order mark, which takes milliseconds.

    Returns:
        its name, such as `UTF-16LE`, and the name for `iconv`. With a mark that is `UTF-16` or `UTF-32`, which removes
            the mark. None: it is in no such encoding.
    """
    for mark, names in _MARKS.items():
        if head.startswith(mark):
            return names
    if not closely or (_is_utf8(head) and not (head.isascii() and _has_controls(head))):
        return None  # it may have controls, but non-ASCII text in a wide encoding is not UTF-8
    codec = next((each for each in _WIDE if _is_alphabetic(head, each)), None) or _guess_ideographs(head)
    return (_WIDE[codec], _WIDE[codec]) if codec else None


def _is_alphabetic(head: bytes, encoding: str) -> bool:
    """Return if the bytes are text of letters in this wide encoding, which even a few other bytes do not look like."""
    text = _decode_head(head, encoding)
    letters = sum(not 0x2000 <= ord(each) < 0x10000 for each in text)
    enough = letters >= _LETTERS * len(text) or encoding.startswith("utf_32")  # where one character is enough
    return len(text) >= _FEWEST and enough and _is_plausible(text)


def _guess_ideographs(head: bytes) -> str | None:
    """Return Python's name of the wide encoding of a Chinese, Japanese or Korean text; None: it is in none.

    A few bytes of other encodings look alike, unless there are line endings, digits, kana or full stops.
    """
    if head.isascii() or (guess := _guess_encoding(head)) not in _WIDE:
        return None
    text = _decode_head(head, guess)
    is_known = len(text) >= _ENOUGH or (len(text) >= _FEWEST and _COMMON.search(text) is not None)
    return guess if is_known and _is_plausible(text) else None


def _decode_head(head: bytes, encoding: str) -> str:
    """Decode the first bytes of a text, whose last character may be cut."""
    return codecs.getincrementaldecoder(encoding)("replace").decode(head)


def _is_utf8(head: bytes) -> bool:
    try:
        codecs.getincrementaldecoder("utf-8")().decode(head, final=len(head) < HEAD)  # a longer text is cut here
    except UnicodeDecodeError:
        return False
    return True


def _has_controls(head: bytes) -> bool:
    return len(head.translate(None, _CONTROLS)) < len(head)


def _guess_encoding(head: bytes) -> str | None:
    """Return Python's name of the likely encoding of a text; None: it looks like no text."""
    from charset_normalizer import from_bytes

    for cut in range(min(4, len(head))):  # a character may be cut at the end
        part = head[: len(head) - cut]
        if best := from_bytes(part, cp_isolation=[*_WIDE, *_LEGACY]).best():
            codec = best.encoding
            alike = codec in _ALIKE and part.decode(codec) == part.decode("cp1252", "replace")
            return "cp1252" if alike else codec
    return None


def _is_plausible(text: str) -> bool:
    """Return if few of the characters are ones that no text has."""
    odd = sum(each not in "\t\n\r\f" and unicodedata.category(each) in ("Cc", "Cn", "Co", "Cs") for each in text)
    return odd + text.count("\ufffd") <= _ODD * len(text)


def _is_spooled(path: str) -> bool:
    """Return if the file is a copy of standard input."""
    return PurePosixPath(path).parent.name.startswith(".stdin-")


def display_path(path: str) -> str:
    """Return the name of a file for people."""
    return "standard input" if _is_spooled(path) else path


def convert_by(command: str, path: str) -> str:
    """Return a shell command that passes a file, decompressed, through a command into a new file."""
    if _is_spooled(path):
        return f"… | {command} | haed …"
    if tool := _DECOMPRESS.get(PurePosixPath(path.lower()).suffix):
        return f"{tool} -dc {shlex.quote(path)} | {command} > NEW"
    return f"{command} < {shlex.quote(path)} > NEW"


def describe_doubt(head: bytes, is_file: bool = True) -> str | None:
    """Return a description of what is odd about a text that begins so, if it is not UTF-8; None: nothing.

    Args:
        head: its first bytes.
        is_file: it is a file of its own, not a member of a tar; then the description says what to do.
    """
    if b"\0" in head:
        return f"not text (NUL bytes){f'; {LEAVE_OUT}' if is_file else ''}"
    if _is_utf8(head):
        return None
    if not is_file:
        return "not text in UTF-8: it is binary, or another encoding that `iconv -f … -t UTF-8` converts"
    name = _LEGACY.get(_guess_encoding(head) or "", "…")
    perhaps = "" if name == "…" else f" (perhaps {name})"
    return f"not text in UTF-8: it is binary, or another encoding{perhaps} that `iconv -f {name} -t UTF-8` converts"


def check_head(head: bytes, name: str, path: str, closely: bool = True) -> str | None:
    """Check that a file or a member of a tar is text.

    Args:
        head: its first bytes, decompressed.
        name: of the file or member, for errors; its suffix tells if it was compressed.
        path: of the file to convert; empty for a member.
        closely: also look for UTF-16 and UTF-32 without a mark.

    Returns:
        what is odd about it, though it can be read as it is; None: it is UTF-8.

    Raises:
        ValueError: it is no text, a binary member, or text in UTF-16 or UTF-32. The message says which, and what to do.
    """
    if foreign := detect_foreign_format(head):
        format_name, advice = foreign
        inside = " inside its compression" if is_compressed(name) else ""
        if inside and advice is _NAME:
            advice = "decompress it once, because it may be compressed twice"
        elif advice is _NAME and _is_spooled(path):
            advice = f"decompress it in the pipe: `… | {format_name.rpartition(' ')[2]} -dc | haed …`"
        raise ValueError(f"{name} is {format_name}{inside}, not text: {advice}")
    if _is_utf8(head) and not _has_controls(head):
        return None
    if wide := wide_encoding(head, closely):
        encoding, by = wide
        command = f"iconv -f {by} -t UTF-8"
        remedy = f"`{convert_by(command, path)}`" if path else f"`{command}`, and make the tar again"
        raise ValueError(
            f"{name} is text in {encoding} {'with' if by != encoding else 'without'} a byte order mark, "
            f"not UTF-8: convert it with {remedy}"
        )
    if not path and not _is_utf8(head) and len(head.translate(None, _CONTROLS)) < (1 - _BINARY) * len(head):
        raise ValueError(
            f"{name} is binary, not text (not UTF-8, with NUL bytes or other control characters). Name "
            "the member that holds the text in source.field="
        )
    return describe_doubt(head, bool(path))


@dataclass
class OddTexts:
    """The number of texts with an oddity, and the first of their names."""

    count: int = 0
    names: list[str] = field(default_factory=list)


@dataclass
class TextFindings:
    """The findings in the texts of a part.

    Attributes:
        lines: number of lines by line ending.
        odd: texts by their oddity.
    """

    lines: Counter[str] = field(default_factory=Counter)
    odd: dict[str, OddTexts] = field(default_factory=dict)

    def add_text(self, reason: str, name: str) -> None:
        """Add a text, unless its name is known."""
        texts = self.odd.setdefault(reason, OddTexts())
        if name not in texts.names:
            texts.count += 1
            texts.names = [*texts.names, name][:_KEPT]


class TextInspector:
    """A checker of the texts of a part, piece by piece.

    Args:
        skip: bytes at the beginning of each text that were checked before; there only line endings are counted.
        whole_files: a text is a file, whose name may end in an offset.
    """

    def __init__(self, skip: int, whole_files: bool) -> None:
        self.findings, self.skip, self.whole_files = TextFindings(), skip, whole_files
        self._name: str | None = None

    def inspect_piece(self, piece: Piece, path: str) -> None:
        """Check the next piece, which is of the file at `path`."""
        if not piece.continues or self._name is None:
            is_part = self.whole_files and os.path.basename(piece.name) != os.path.basename(path)
            self._name = _CUT.sub("", piece.name) if is_part else piece.name
            self._goes_on = piece.continues  # it began in an earlier part
            self._decoder = codecs.getincrementaldecoder("utf-8")()
            self._known: set[str] = set()
            self._position, self._ends_in_cr = 0, False
        for reason in [*self._count_ends(piece.data), *self._find_oddities(piece.data)]:
            if reason not in self._known:
                self._known.add(reason)
                self.findings.add_text(reason, str(self._name))
        self._position += len(piece.data)

    def _find_oddities(self, data: bytes) -> Iterator[str]:
        """Yield the oddities of a piece, except for line endings."""
        seen = 0 if self._goes_on else max(0, self.skip - self._position)  # bytes checked and reported before
        if b"\0" in data:
            if b"\0" in data[:seen]:
                self._known.add("NUL")
            yield "NUL"
        if not self._position and not self._goes_on and data.startswith(codecs.BOM_UTF8):
            yield "mark"
        if "encoding" in self._known:
            return
        try:
            # A range of a file may begin inside of a character.
            self._decoder.decode(data.lstrip(CONTINUATION_BYTES) if self._goes_on and not self._position else data)
        except UnicodeDecodeError as error:
            if error.end <= seen:
                self._known.add("encoding")
            yield "encoding"

    def _count_ends(self, data: bytes) -> Iterator[str]:
        lines, feeds = self.findings.lines, data.count(b"\n")
        if self._ends_in_cr and data.startswith(b"\n"):  # the pair lies between two pieces
            lines[_CR] -= 1
            lines[_CRLF] += 1
            feeds -= 1
        if b"\r" in data:
            pairs = data.count(b"\r\n")
            lines[_CRLF] += pairs
            lines[_CR] += data.count(b"\r") - pairs
            feeds -= pairs
            yield _ENDS
        lines[_LF] += feeds
        self._ends_in_cr = data.endswith(b"\r")


def describe_findings(looks: Sequence[TextFindings]) -> Iterator[str]:
    """Yield a sentence for each oddity in the texts of all parts, in their order."""
    lines = sum((each.lines for each in looks), Counter[str]())
    for reason in dict.fromkeys(reason for each in looks for reason in each.odd):
        odd_texts = [each.odd[reason] for each in looks if reason in each.odd]
        names = list(dict.fromkeys(name for each in odd_texts for name in each.names))
        all_named = all(each.count == len(each.names) for each in odd_texts)
        count = len(names) if all_named else sum(each.count for each in odd_texts)
        texts = some_of(names, count, "texts")
        if reason != _ENDS:
            yield f"{texts}: {_NOTES[reason]}"
            continue
        total = lines.total()
        ends = [f"{lines[_CRLF]:,} end in CRLF (Windows)"] * bool(lines[_CRLF])
        ends += [f"{lines[_CR]:,} end in CR alone (old Mac)"] * bool(lines[_CR])
        yield (
            f"{texts}: of {total:,} lines, {' and '.join(ends)}. A word before such an end makes another "
            "chunk than before LF, and prompts have LF. Use source.newlines=lf to make all ends LF"
        )
