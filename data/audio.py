"""Sound: WAV files in folders or tars, 8 or 16 bits, channels interleaved. A document is a recording.

`mulaw` gives a token per sample: µ-law companding of the sample x in [−1, 1) with µ = 255 (ITU-T G.711's curve, the codes
in order of the amplitude as in WaveNet, van den Oord et al. 2016, section 2.2). `pcm16` gives two tokens per sample, the
high byte first, offset by 2^15 so that codes are in order of the amplitude; nothing is lost.
"""

import wave
from collections.abc import Iterator
from types import SimpleNamespace
from typing import IO, Any

import numpy as np

from data.files import is_tar, members
from data.sources import SPLITS, Input, Piece, Source, named_split

_FRAMES = 1 << 18


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
    """Recordings. Where paths do not name a split, a hash of the name decides."""

    def inputs(self, size: int, align: int) -> Iterator[Input]:
        """See `Source.inputs`. A tar is read by one worker; files other than .wav are left out."""
        files = [file for file in self.files if file.path.lower().endswith(".wav") or is_tar(file.path)]
        if not files:
            raise ValueError(f"source.path={self.options.path} has no .wav file and no tar")
        for file in files:
            split = named_split(file.name)
            yield Input(file.name, file.path, file.size, (split,) if split else SPLITS)

    def read(self, item: Input) -> Iterator[Piece]:
        """See `Source.read`."""
        if is_tar(item.path):
            for name, content, _ in members(item.path, self.options.expansion):
                if name.lower().endswith(".wav"):
                    yield from self._recording(content, f"{item.name}/{name}", item)
        else:
            with open(item.path, "rb") as file:
                yield from self._recording(file, item.name, item)

    def _recording(self, file: IO[bytes], name: str, item: Input) -> Iterator[Piece]:
        split = self.split_of(name, item.splits)
        encode = encode_mulaw if self.options.encoding == "mulaw" else encode_pcm16
        try:
            stream: Any = SimpleNamespace(read=file.read)  # members of a compressed tar can only be read
            with wave.open(stream, "rb") as recording:
                width, continues = recording.getsampwidth(), False
                if width not in (1, 2):
                    raise ValueError(f"it has {8 * width} bits a sample, expected 8 or 16")
                while frames := recording.readframes(max(1, _FRAMES // recording.getnchannels())):
                    frames = frames[: len(frames) // width * width]
                    yield Piece(name, split, encode(_samples(frames, width)).tobytes(), continues)
                    continues = True
        except (wave.Error, EOFError, ValueError) as error:
            raise ValueError(f"{item.path}: {name} cannot be read as WAV: {error}") from error

    def original(self, data: bytes) -> bytes:
        """Samples as WAV files hold them: 16 bits little-endian for pcm16; µ-law codes stay."""
        if self.options.encoding == "mulaw":
            return data
        return decode_pcm16(np.frombuffer(data, np.uint8)).astype("<i2").tobytes()


def _samples(frames: bytes, width: int) -> np.ndarray:
    """Samples int16; those of 8 bits are unsigned in WAV."""
    if width == 2:
        return np.frombuffer(frames, "<i2").astype(np.int16)
    return ((np.frombuffer(frames, np.uint8).astype(np.int16) - 128) << 8).astype(np.int16)
