"""Sound: WAV and FLAC files in folders or tars, as 16 bits a sample, channels interleaved. A document is a recording.

Headers are parsed here and compared with the file, since libraries read what is there without a warning. Anything but
plain PCM of 8 or 16 bits is decoded by libsndfile. Only codings are read that are exact to the bit, or rounded once.

`mulaw` gives one token per sample: µ-law companding of the sample x in [−1, 1) with µ = 255. It has the curve of ITU-T
G.711, with codes in order of the amplitude as in WaveNet (van den Oord et al. 2016, section 2.2). `pcm16` gives two
tokens per sample, the high byte first, offset by 2^15 so that codes are in order of the amplitude. It loses nothing.
"""

import hashlib
import io
import struct
from collections.abc import Iterator
from typing import IO, NamedTuple

import numpy as np

from data.sources.file_type import detect_foreign_format
from data.sources.files import BLOCK, FREE, is_tar, read_whole
from data.sources.source import FormatMismatchError, Input, MediaSource, Piece

_FRAMES = 1 << 18
_PCM, _FLOAT, _ALAW, _MULAW, _EXTENSIBLE = 1, 3, 6, 7, 0xFFFE  # tags of WAV
_GUID = bytes.fromhex("000000001000800000aa00389b71")  # behind the tag, in an extensible format
_CODINGS = {  # by tag and bytes of a sample
    (_PCM, 1): "PCM_U8",
    (_PCM, 2): "PCM_16",
    (_PCM, 3): "PCM_24",
    (_PCM, 4): "PCM_32",
    (_FLOAT, 4): "FLOAT",
    (_FLOAT, 8): "DOUBLE",
    (_ALAW, 1): "ALAW",
    (_MULAW, 1): "ULAW",
}
_CONVERTED = {
    "PCM_U8": "recordings of 8 bits were widened to 16",
    "PCM_24": "recordings of 24 bits were rounded to 16",
    "PCM_32": "recordings of 32 bits were rounded to 16",
    "FLOAT": "recordings of floats were rounded to 16 bits",
    "DOUBLE": "recordings of floats were rounded to 16 bits",
    "ALAW": "recordings in A-law were decoded to 16 bits",
    "ULAW": "recordings in µ-law were decoded to 16 bits",
}
_ADVICE = "convert it into plain PCM of 16 bits, for example with `ffmpeg -i OLD.wav -c:a pcm_s16le NEW.wav`"
_LONG = 0xFFFFFFFF  # marks a size that RF64 stores elsewhere
_LONGEST_FORMAT = 256
_FLAC_HEADER = 42
_SMALL = 1024  # maximum bytes of a recording without sound, for its metadata


def encode_mulaw(samples: np.ndarray) -> np.ndarray:
    """Return codes uint8 of samples int16, any shape."""
    x = samples.astype(np.float64) / 32768
    compressed = np.sign(x) * np.log1p(255 * np.abs(x)) / np.log(256)
    return ((compressed + 1) / 2 * 255 + 0.5).astype(np.uint8)


def encode_pcm16(samples: np.ndarray) -> np.ndarray:
    """Return tokens (2n,) uint8 of samples (n,) int16."""
    return (samples.astype(np.int32) + 32768).astype(">u2").view(np.uint8)


def decode_pcm16(tokens: np.ndarray) -> np.ndarray:
    """Return samples (n,) int16 of tokens (2n,) uint8."""
    return (np.frombuffer(tokens.tobytes(), ">u2").astype(np.int32) - 32768).astype(np.int16)


class AudioSource(MediaSource):
    """A source of recordings of one rate and number of channels.

    If paths do not name a split, a hash of the file decides, and in tars a hash of the recording's first frames.
    """

    suffixes, noun = (".wav", ".wave", ".flac"), "recordings"
    missing = "no .wav or .flac file and no tar. Convert other recordings, for example with `ffmpeg -i OLD.mp3 NEW.wav`"
    needs = (
        "chunker.kind=fixed, and chunker.k= to the samples of a chunk (twice as many with source.encoding=pcm16), or use "
        "the preset audio"
    )
    gives = "sound"
    unlike = "convert them to one rate and number of channels, or select files of one kind with source.pattern="

    def read(self, item: Input) -> Iterator[Piece]:
        """Yield the encoded recordings of a file or a tar, in pieces."""
        for name, content, size, where in self.iterate_documents(item):
            if is_tar(item.path) and _is_flac(name):  # its decoder seeks, and a member of a tar cannot
                content = io.BytesIO(read_whole(content, size, where))
            yield from self._read_recording(content, size, name, item)

    def _read_recording(self, file: IO[bytes], size: int, name: str, item: Input) -> Iterator[Piece]:
        """Yield a recording in pieces. Unless names decide, a hash of its first frames decides its split."""
        split, encode = "", encode_mulaw if self.options.encoding == "mulaw" else encode_pcm16
        try:
            for frames, samples in (self._read_flac if _is_flac(name) else self._read_wav)(file, size, name):
                continues = bool(split)
                split = split or self.split_of(name, self.places_in(item, name), frames)
                yield Piece(name, split, encode(samples).tobytes(), continues)
        except FormatMismatchError:
            raise
        except ValueError as error:
            kind = "FLAC" if _is_flac(name) else "WAV"
            raise ValueError(f"{item.path}: {name} cannot be read as {kind}: {error}") from error

    def _read_wav(self, file: IO[bytes], size: int, name: str) -> Iterator[tuple[bytes, np.ndarray]]:
        """Yield frames of a WAV as they are stored, and their samples int16."""
        sound = read_wav_header(file)
        self.check_consistent_format(name, rate=sound.rate, channels=sound.channels)
        if not sound.bytes and size > _SMALL:
            raise ValueError(
                f"its header says that its {size:,} bytes hold no sound. It may have been written to a pipe"
            )
        width = sound.frame
        left = sound.bytes // width * width
        self.remarks["empty recordings were left out"] += not left
        self.remarks["recordings lost incomplete frames at their end"] += sound.bytes > left
        notes = {_CONVERTED[sound.coding]} if sound.coding in _CONVERTED else set()
        while frames := file.read(min(left, max(1, _FRAMES // sound.channels) * width)):
            left -= len(frames)
            frames = frames[: len(frames) // width * width]
            yield frames, _convert_samples(frames, sound.coding, notes)
        _check_end(file, size, sound, left)
        self.remarks.update(notes)

    def _read_flac(self, file: IO[bytes], size: int, name: str) -> Iterator[tuple[bytes, np.ndarray]]:
        """Yield blocks of a FLAC as bytes, and their samples int16."""
        head = file.read(_FLAC_HEADER)
        file.seek(0)
        if len(head) < _FLAC_HEADER or head[:4] != b"fLaC":
            tagged = " but with an MP3 tag (ID3), which must be removed" if head[:3] == b"ID3" else ""
            raise ValueError(f"it does not begin as FLAC does{tagged}. Encode it again, for example with `flac`")
        bits = 1 + (int.from_bytes(head[20:22], "big") >> 4 & 31)
        if bits not in (8, 16, 24):
            raise ValueError(f"it has {bits} bits per sample, expected 8, 16 or 24. Convert it first")
        import soundfile

        digest, passed = hashlib.md5(usedforsecurity=False), 0
        try:
            with soundfile.SoundFile(file) as sound:
                self.check_consistent_format(name, rate=sound.samplerate, channels=sound.channels)
                if not int.from_bytes(head[21:26], "big") & (1 << 36) - 1:
                    raise ValueError(
                        "its header does not give its length. It may have been written to a pipe. Encode it again"
                    )
                limit = FREE + self.options.expansion * size
                if 2 * sound.frames * sound.channels > limit:
                    raise ValueError(
                        f"its {size:,} bytes hold {sound.frames:,} samples, which may be a decompression bomb. If this "
                        "is intended, raise source.expansion"
                    )
                while len(block := sound.read(max(1, _FRAMES // sound.channels), "int32", always_2d=True)):
                    passed += len(block)
                    stored = (block >> (32 - bits)).astype("<i4")
                    digest.update(stored.view(np.uint8).reshape(-1, 4)[:, : bits // 8].tobytes())
                    samples = _round_to_int16(block.reshape(-1))
                    yield samples.tobytes(), samples
                if passed != sound.frames:
                    raise ValueError(
                        f"it was truncated or damaged: only {passed:,} of its {sound.frames:,} samples can be read"
                    )
        except soundfile.SoundFileError as error:
            raise ValueError(f"it was truncated or damaged: {error}") from error
        if any(head[26:42]) and digest.digest() != head[26:42]:
            raise ValueError("it is damaged: the checksum of its samples does not match")
        if bits != 16:
            self.remarks[_CONVERTED["PCM_U8" if bits == 8 else "PCM_24"]] += 1

    @property
    def value_bytes(self) -> int:
        """Number of bytes of a sample."""
        return 1 if self.options.encoding == "mulaw" else 2

    def restore_original(self, data: bytes) -> bytes:
        """Return samples as WAV files store them: 16 bits little-endian for pcm16; µ-law codes are unchanged."""
        if self.options.encoding == "mulaw":
            return data
        return decode_pcm16(np.frombuffer(data, np.uint8)).astype("<i2").tobytes()


def _is_flac(name: str) -> bool:
    return name.lower().endswith(".flac")


class WavHeader(NamedTuple):
    """The header of a WAV.

    Attributes:
        coding: of a sample, as libsndfile names it.
        frame: bytes of a sample of all channels.
        bytes: of the sound.
        stated: bytes of the whole file according to the header.
    """

    coding: str
    rate: int
    channels: int
    frame: int
    bytes: int = 0
    stated: int = 0


def read_wav_header(file: IO[bytes]) -> WavHeader:
    """Read a WAV (RIFF or RF64, plain or extensible) up to its sound. The stream need not be seekable.

    Raises:
        ValueError: it is no WAV, or its coding is not supported.
    """
    head = _read_exactly(file, 12)
    if head[:4] not in (b"RIFF", b"RF64") or head[8:] != b"WAVE":
        format_name, _ = detect_foreign_format(head) or ("", "")
        raise ValueError(
            f"it {f'is {format_name}, and ' if format_name else ''}does not begin with RIFF and WAVE: {_ADVICE}"
        )
    stated, long = int.from_bytes(head[4:8], "little"), head[:4] == b"RF64"
    sound = 0
    header: WavHeader | None = None
    while True:
        kind, size = struct.unpack("<4sI", _read_exactly(file, 8))
        if kind == b"data":
            if header is None:
                raise ValueError("its sound comes before its format chunk")
            return header._replace(bytes=sound if long and size == _LONG else size, stated=stated + 8)
        body = _read_exactly(file, min(size, _LONGEST_FORMAT))
        if kind == b"ds64" and long and len(body) >= 16:
            stated, sound = struct.unpack_from("<QQ", body)
        elif kind == b"fmt ":
            header = _read_format(body)
        left = size + size % 2 - len(body)
        while left > 0:
            left -= len(_read_exactly(file, min(left, BLOCK)))


def _read_format(body: bytes) -> WavHeader:
    """Return the header without its numbers of bytes."""
    if len(body) < 16:
        raise ValueError("its format chunk is incomplete")
    tag, channels, rate, _, frame, bits = struct.unpack_from("<HHIIHH", body)
    if tag == _EXTENSIBLE:
        if len(body) < 40 or body[26:40] != _GUID:
            raise ValueError(f"its extended format is not supported: {_ADVICE}")
        tag = int.from_bytes(body[24:26], "little")
    width = (bits + 7) // 8
    coding = _CODINGS.get((tag, width))
    if coding is None:
        problem = f"{bits} bits per sample" if tag in (_PCM, _FLOAT) else f"an unsupported coding (tag 0x{tag:04x})"
        raise ValueError(f"it has {problem}: {_ADVICE}")
    if not channels or not rate or frame != channels * width:
        raise ValueError(
            f"its header contradicts itself: {channels} channels of {width} bytes in frames of {frame}, "
            f"{rate:,} samples per second"
        )
    return WavHeader(coding, rate, channels, frame)


def _read_exactly(file: IO[bytes], size: int) -> bytes:
    content = file.read(size)
    if len(content) != size:
        raise ValueError("it was truncated: it ends inside its header")
    return content


def _check_end(file: IO[bytes], size: int, sound: WavHeader, left: int) -> None:
    """Refuse a WAV of another size than its header says, with `left` bytes of sound missing, or with more sound behind."""
    said = f"its header says {sound.stated:,} bytes, but it has {size:,}"
    if left > 0 or sound.stated > size + 8:  # 8: some writers count the header twice
        raise ValueError(f"it was truncated, or written to a pipe: {said}")
    if size > sound.stated + 1:  # an odd size is padded
        raise ValueError(f"{said}: it has more than one recording, or is incomplete")
    file.read(sound.bytes % 2)
    while len(head := file.read(8)) == 8:
        kind, left = struct.unpack("<4sI", head)
        if kind == b"data":
            raise ValueError(f"its sound is in several parts (data chunks): {_ADVICE}")
        left += left % 2
        while left > 0 and (block := file.read(min(left, BLOCK))):
            left -= len(block)


def _convert_samples(frames: bytes, coding: str, notes: set[str]) -> np.ndarray:
    """Return samples int16 of frames, and add notes on conversions; refuse floats that are not finite numbers."""
    if coding == "PCM_16":
        return np.frombuffer(frames, "<i2").astype(np.int16)
    if coding == "PCM_U8":
        return ((np.frombuffer(frames, np.uint8).astype(np.int16) - 128) << 8).astype(np.int16)
    import soundfile

    floats = coding in ("FLOAT", "DOUBLE")
    raw = {"samplerate": 8000, "channels": 1, "format": "RAW", "subtype": coding, "endian": "LITTLE"}
    decoded = soundfile.read(io.BytesIO(frames), dtype="float64" if floats else "int32", **raw)[0]
    if not floats:
        return _round_to_int16(decoded)
    if not np.isfinite(decoded).all():
        raise ValueError("some of its samples are NaN or infinite")
    if np.abs(decoded).max(initial=0) > 1:
        notes.add("recordings of floats had samples outside -1 to 1, which were clipped")
    return np.clip(np.round(decoded * 32768), -32768, 32767).astype(np.int16)


def _round_to_int16(samples: np.ndarray) -> np.ndarray:
    """Return samples int16 of samples int32 by rounding to their high 16 bits, halves up."""
    return np.minimum((samples.astype(np.int64) + (1 << 15)) >> 16, 32767).astype(np.int16)
