import io
import tarfile
import wave
from pathlib import Path

import numpy as np
import pytest

from data.corpus import Corpus
from data.options import ChunkerOptions, ShardOptions, SourceOptions
from data.sharding.build import shard
from data.sources.audio import decode_mulaw, decode_pcm16, encode_mulaw, encode_pcm16
from tests.conftest import SHARED

SAMPLES = np.random.default_rng(0).integers(-32768, 32768, 20_000).astype(np.int16)


def wav(samples: np.ndarray, width: int = 2, channels: int = 1, rate: int = 8000) -> bytes:
    buffer = io.BytesIO()
    with wave.open(buffer, "wb") as file:
        file.setnchannels(channels)
        file.setsampwidth(width)
        file.setframerate(rate)
        file.writeframes(samples.tobytes())
    return buffer.getvalue()


def sharded(path: Path, into: Path, **options: object) -> Corpus:
    source = SourceOptions(kind="audio", path=str(path), **options)  # type: ignore[arg-type]
    return shard(source, ChunkerOptions(kind="fixed", k=16), ShardOptions(megabytes=1), into)


def test_mulaw_is_the_formula_and_every_code_comes_back() -> None:
    every = np.arange(-32768, 32768).astype(np.int16)
    x = every.astype(np.float64) / 32768
    wanted = np.floor((np.sign(x) * np.log1p(255 * np.abs(x)) / np.log1p(255.0) + 1) / 2 * 255 + 0.5)
    assert np.array_equal(encode_mulaw(every), wanted) and (np.diff(encode_mulaw(every).astype(int)) >= 0).all()
    codes = np.arange(256).astype(np.uint8)
    assert np.array_equal(encode_mulaw(decode_mulaw(codes)), codes)
    error = np.abs(decode_mulaw(encode_mulaw(every)).astype(int) - every.astype(int))
    assert error.max() < 800 and error[np.abs(every.astype(int)) < 256].max() < 16


def test_pcm16_loses_nothing_and_keeps_the_order() -> None:
    every = np.arange(-32768, 32768).astype(np.int16)
    tokens = encode_pcm16(every)
    assert np.array_equal(decode_pcm16(tokens), every)
    high, low = tokens[::2].astype(int), tokens[1::2].astype(int)
    assert np.array_equal(high * 256 + low, np.arange(65536))


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("channels", [1, 2])
def test_recordings(tmp_path: Path, packed: bool, channels: int) -> None:
    folder = tmp_path / "source"
    folder.mkdir()
    long, short = wav(SAMPLES, channels=channels), wav(SAMPLES[:4000], channels=channels)
    files = {"train-a.wav": long, "train-b.wav": short, "notes.txt": b"no", "._train-a.wav": b"of macOS"}
    put(folder, files, packed)
    whole = sharded(folder, tmp_path / "shards", encoding="pcm16")
    assert [np.frombuffer(each, "<i2").tolist() for each in whole.originals("train")] == [
        SAMPLES.tolist(),
        SAMPLES[:4000].tolist(),
    ]
    assert whole.manifest["form"] == {"rate": 8000, "channels": channels}
    said = str(whole.manifest["splits"])
    assert ("left out: hidden, or no recordings: 2" if packed else "notes.txt") in said
    codes = list(sharded(folder, tmp_path / "shards").originals("train"))
    assert codes == [encode_mulaw(SAMPLES).tobytes(), encode_mulaw(SAMPLES[:4000]).tobytes()]


def put(folder: Path, files: dict[str, bytes], packed: bool = False) -> None:
    """Writes files into a folder, or into a tar there."""
    if not packed:
        for name, content in files.items():
            (folder / name).write_bytes(content)
        return
    with tarfile.open(folder / "train.tar.gz", "w:gz") as tar:
        for name, content in files.items():
            member = tarfile.TarInfo(f"recordings/{name}")
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))


@pytest.mark.parametrize("packed", [False, True])
def test_recordings_of_several_rates_or_channels_are_refused(tmp_path: Path, packed: bool) -> None:
    """Also when another process read the other one."""
    for number, other in enumerate((wav(SAMPLES, channels=2), wav(SAMPLES, rate=16000))):
        folder = tmp_path / str(number)
        folder.mkdir()
        put(folder, {"train-a.wav": wav(np.tile(SAMPLES, 30)), "train-b.wav": other}, packed)
        with pytest.raises(
            ValueError, match="train-a.wav has rate 8,000, channels 1; .*train-b.wav has rate .*convert them"
        ):
            sharded(folder, tmp_path / "shards")
    assert not list((tmp_path / "shards").glob("*/manifest.json"))


def altered(at: int, value: int) -> bytes:
    """A recording with another number in its header: 4 is the size of the file, 40 that of the sound."""
    content = bytearray(wav(SAMPLES))
    content[at : at + 4] = value.to_bytes(4, "little")
    return bytes(content)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    ("content", "message"),
    [
        (wav(SAMPLES)[:-1000], "it was truncated"),
        (wav(SAMPLES)[:-1], "it was truncated"),
        (altered(4, 0xFFFFFFFF), "it was truncated, or written to a pipe"),
        (altered(40, 0xFFFFFFFF), "truncated, or written to a pipe"),
        (altered(4, 1036), "truncated|more than one recording"),
        (altered(40, 0), "hold no sound"),
        (wav(SAMPLES) + wav(SAMPLES), "more than one recording"),
    ],
)
def test_a_recording_that_is_not_what_its_header_says_is_refused(
    tmp_path: Path, packed: bool, content: bytes, message: str
) -> None:
    put(tmp_path, {"train.wav": content}, packed)
    with pytest.raises(ValueError, match=f"train.wav cannot be read as WAV: .*({message})"):
        sharded(tmp_path, tmp_path / "shards")


@pytest.mark.parametrize("packed", [False, True])
def test_the_end_of_a_frame_that_is_not_whole_is_noted(tmp_path: Path, packed: bool) -> None:
    content = wav(SAMPLES) + b"x"
    content = content[:4] + (len(content) - 8).to_bytes(4, "little") + content[8:40] + b"\x41\x9c\0\0" + content[44:]
    put(tmp_path, {"train-a.wav": content, "train-b.wav": wav(SAMPLES[:50])}, packed)
    corpus = sharded(tmp_path, tmp_path / "shards")
    assert "recordings lost bytes at their end, of a frame that is not whole: 1" in corpus.manifest["splits"]["notes"]
    assert corpus.counts("train").source_bytes == len(SAMPLES) + 50


def test_eight_bits_are_unsigned(tmp_path: Path) -> None:
    (tmp_path / "train.wav").write_bytes(wav(np.array([0, 128, 255], np.uint8), width=1))
    (data,) = sharded(tmp_path / "train.wav", tmp_path / "shards", encoding="pcm16").originals("train")
    assert np.frombuffer(data, "<i2").tolist() == [-32768, 0, 127 << 8]


def test_a_format_that_is_not_read_has_advice(tmp_path: Path) -> None:
    content = bytearray(wav(SAMPLES))
    content[20:22] = b"\x03\x00"  # floats
    (tmp_path / "train.wav").write_bytes(content)
    with pytest.raises(ValueError, match="unknown format: 3; convert it into plain PCM of 16 bits"):
        sharded(tmp_path, tmp_path / "shards")


@pytest.mark.parametrize("content", [b"RIFF", b"not sound", wav(SAMPLES[:999].astype(np.int32), width=4)])
def test_what_cannot_be_read_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "train.wav").write_bytes(content)
    with pytest.raises(ValueError, match="train.wav: train.wav cannot be read as WAV"):
        sharded(tmp_path / "train.wav", tmp_path / "shards")


def test_real_recordings(tmp_path: Path) -> None:
    path = SHARED / "fsdd-8khz" / "recordings.tar.xz"
    if not path.is_file():
        pytest.skip("fsdd-8khz is not in ../shared/data")
    corpus = sharded(path, tmp_path, test_pattern=r"_[0-4]\.wav$", valid_pattern=r"_[5-9]\.wav$", encoding="pcm16")
    assert [corpus.counts(split).documents for split in ("train", "valid", "test")] == [2400, 300, 300]
    assert corpus.counts("test").tokens == 2 * 1_034_030
    found = list(corpus.originals("test"))
    wanted = []
    with tarfile.open(path) as tar:
        for member in tar:
            content = tar.extractfile(member) if member.name.endswith(tuple(f"_{n}.wav" for n in range(5))) else None
            if content is not None:
                with wave.open(io.BytesIO(content.read())) as recording:
                    wanted.append(recording.readframes(recording.getnframes()))
    assert found == wanted
