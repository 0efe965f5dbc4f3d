"""Sound: WAV files in folders or tars, 8 or 16 bits, channels interleaved. A document is a recording.

`mulaw` gives a token per sample: µ-law companding of the sample x in [−1, 1) with µ = 255 (ITU-T G.711's curve, the codes
in order of the amplitude as in WaveNet, van den Oord et al. 2016, section 2.2). `pcm16` gives two tokens per sample, the
high byte first, offset by 2^15 so that codes are in order of the amplitude; nothing is lost.
"""

import wave
from collections.abc import Iterator
from pathlib import PurePosixPath
from typing import IO, Any

import numpy as np

from data.sources.files import File, is_tar, members
from data.sources.source import Input, Piece, Source, Unlike
from data.sources.splits import SPLITS

_FRAMES = 1 << 18
_RIFF_HEADER = 8
_SMALL = 1024  # bytes that a recording of no sound may have, for its notes


def encode_mulaw(samples: np.ndarray) -> np.ndarray:
    """Codes uint8 of samples int16, any shape."""
    x = samples.astype(np.float64) / 32768
    compressed = np.sign(x) * np.log1p(255 * np.abs(x)) / np.log(256)
    return ((compressed + 1) / 2 * 255 + 0.5).astype(np.uint8)


def decode_mulaw(codes: np.ndarray) -> np.ndarray:
    """Samples int16 of codes uint8; `encode_mulaw` gives the same codes again."""
    compressed = codes.astype(np.float64) / 255 * 2 - 1
    x = np.sign(compressed) * (256 ** np.abs(compressed) - 1) / 255
    return np.clip(np.round(x * 32768), -32768, 32767).astype(np.int16)


def encode_pcm16(samples: np.ndarray) -> np.ndarray:
    """Tokens (2n,) uint8 of samples (n,) int16."""
    return (samples.astype(np.int32) + 32768).astype(">u2").view(np.uint8)


def decode_pcm16(tokens: np.ndarray) -> np.ndarray:
    """Samples (n,) int16 of tokens (2n,) uint8."""
    return (np.frombuffer(tokens.tobytes(), ">u2").astype(np.int32) - 32768).astype(np.int16)


class AudioSource(Source):
    """Recordings of one rate and number of channels.

    Where paths do not name a split, a hash of the file decides, in tars one of its first frames.
    """

    needs = "chunker.kind=fixed, and chunker.k= to the samples of a chunk (twice as many with source.encoding=pcm16)"
    unlike = "convert them to one rate and number of channels, or pick those of one kind by source.pattern="

    def inputs(self, size: int, align: int) -> Iterator[Input]:
        """Every file; a tar is read by one worker, and files other than .wav are left out."""
        files = [file for file in self.files if file.path.lower().endswith(".wav") or is_tar(file.path)]
        if not files:
            raise ValueError(f"source.path={self.options.path} has no .wav file and no tar")
        self.leave_out_others(files, "no recordings")
        for file, splits in self.places(files).items():
            yield Input(file.name, file.path, file.size, splits or SPLITS, stated=None if splits else self.stated)

    def single(self, file: File) -> bool:
        """A recording, other than a tar."""
        return not is_tar(file.path)

    def holds(self, name: str) -> bool:
        """Recordings in a tar, but for hidden files, such as the notes that macOS adds."""
        path = PurePosixPath(name)
        return path.suffix.lower() == ".wav" and not path.name.startswith(".")

    def read(self, item: Input) -> Iterator[Piece]:
        """Recordings of a file or a tar, encoded, in pieces."""
        if is_tar(item.path):
            for name, content, size in members(item.path, self.options.expansion, self.remarks):
                if not self.holds(name):
                    self.remarks["members of tars were left out: hidden, or no recordings"] += 1
                else:
                    yield from self._recording(content, size, f"{item.name}/{name}", item)
        else:
            with open(item.path, "rb") as file:
                yield from self._recording(file, item.size, item.name, item)

    def _recording(self, file: IO[bytes], size: int, name: str, item: Input) -> Iterator[Piece]:
        split = ""  # a hash of the first frames says it: the same recording has the same, under any name
        encode = encode_mulaw if self.options.encoding == "mulaw" else encode_pcm16
        try:
            stream = _Headed(file)
            whole: Any = stream
            with wave.open(whole, "rb") as recording:
                width, channels, continues = recording.getsampwidth(), recording.getnchannels(), False
                if width not in (1, 2):
                    raise ValueError(f"it has {8 * width} bits a sample, expected 8 or 16")
                self.same(name, rate=recording.getframerate(), channels=channels)
                self.remarks["recordings of 8 bits were widened to 16"] += width == 1
                left = recording.getnframes() * width * channels
                if not left and size > _SMALL:
                    raise ValueError(
                        f"its header says that its {size:,} bytes hold no sound: was it written to a pipe?"
                    )
                self.remarks["empty recordings were left out"] += not left
                chunk: Any = getattr(recording, "_data_chunk", None)  # what `wave` makes of it is rounded down
                cut = chunk is not None and chunk.chunksize > left
                self.remarks["recordings lost bytes at their end, of a frame that is not whole"] += cut
                while frames := recording.readframes(max(1, _FRAMES // channels)):
                    left -= len(frames)
                    split = split or self.split_of(name, self.places_in(item, name), frames)
                    frames = frames[: len(frames) // width * width]
                    yield Piece(name, split, encode(_samples(frames, width)).tobytes(), continues)
                    continues = True
            _check_length(stream.head, size, left)
        except Unlike:
            raise
        except (wave.Error, EOFError, ValueError) as error:
            advice = "; convert it into plain PCM of 16 bits" if "unknown format" in str(error) else ""
            raise ValueError(f"{item.path}: {name} cannot be read as WAV: {error}{advice}") from error

    def original(self, data: bytes) -> bytes:
        """Samples as WAV files hold them: 16 bits little-endian for pcm16; µ-law codes stay."""
        if self.options.encoding == "mulaw":
            return data
        return decode_pcm16(np.frombuffer(data, np.uint8)).astype("<i2").tobytes()


class _Headed:
    """A stream that remembers its first bytes; members of a compressed tar can only be read."""

    def __init__(self, file: IO[bytes]) -> None:
        self.file, self.head = file, b""

    def read(self, size: int = -1) -> bytes:
        content = self.file.read(size)
        if len(self.head) < _RIFF_HEADER:
            self.head += content[:_RIFF_HEADER]
        return content


def _check_length(head: bytes, size: int, left: int) -> None:
    """Compares what a WAV's header says with the file's `size`; `left`: bytes of sound that were not there.

    Raises:
        ValueError: there is less, or more.
    """
    said = int.from_bytes(head[4:_RIFF_HEADER], "little") + 8
    if left > 0 or said > size + 8:  # 8: some writers count the header twice
        raise ValueError(f"it was truncated, or written to a pipe: its header says {said:,} bytes, it has {size:,}")
    if size > said + 1:  # an odd one is padded
        raise ValueError(f"its header says {said:,} bytes, it has {size:,}: more than one recording, or not whole")


def _samples(frames: bytes, width: int) -> np.ndarray:
    """Samples int16; those of 8 bits are unsigned in WAV."""
    if width == 2:
        return np.frombuffer(frames, "<i2").astype(np.int16)
    return ((np.frombuffer(frames, np.uint8).astype(np.int16) - 128) << 8).astype(np.int16)
