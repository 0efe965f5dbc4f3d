import io
import tarfile
import wave
from pathlib import Path

import numpy as np
import pytest

from data.audio import decode_mulaw, decode_pcm16, encode_mulaw, encode_pcm16
from data.corpus import Corpus
from data.options import ChunkerOptions, ShardOptions, SourceOptions
from data.sharding import shard
from tests.conftest import SHARED

SAMPLES = np.random.default_rng(0).integers(-32768, 32768, 20_000).astype(np.int16)


def wav(samples: np.ndarray, width: int = 2, channels: int = 1) -> bytes:
    buffer = io.BytesIO()
    with wave.open(buffer, "wb") as file:
        file.setnchannels(channels)
        file.setsampwidth(width)
        file.setframerate(8000)
        file.writeframes(samples.tobytes())
    return buffer.getvalue()


def sharded(path: Path, into: Path, **options: object) -> Corpus:
    source = SourceOptions(kind="audio", path=str(path), **options)  # type: ignore[arg-type]
    return shard(source, ChunkerOptions(kind="fixed", k=16), ShardOptions(), into)


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
def test_recordings(tmp_path: Path, packed: bool) -> None:
    folder = tmp_path / "source"
    folder.mkdir()
    files = {"train-mono.wav": wav(SAMPLES), "train-stereo.wav": wav(SAMPLES[:4000], channels=2), "notes.txt": b"no"}
    if packed:
        with tarfile.open(folder / "train.tar.gz", "w:gz") as tar:
            for name, content in files.items():
                member = tarfile.TarInfo(f"recordings/{name}")
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))
    else:
        for name, content in files.items():
            (folder / name).write_bytes(content)
    whole = sharded(folder, tmp_path / "shards", encoding="pcm16")
    assert [np.frombuffer(each, "<i2").tolist() for each in whole.originals("train")] == [
        SAMPLES.tolist(),
        SAMPLES[:4000].tolist(),
    ]
    codes = list(sharded(folder, tmp_path / "shards").originals("train"))
    assert codes == [encode_mulaw(SAMPLES).tobytes(), encode_mulaw(SAMPLES[:4000]).tobytes()]


def test_eight_bits_are_unsigned(tmp_path: Path) -> None:
    (tmp_path / "train.wav").write_bytes(wav(np.array([0, 128, 255], np.uint8), width=1))
    (data,) = sharded(tmp_path / "train.wav", tmp_path / "shards", encoding="pcm16").originals("train")
    assert np.frombuffer(data, "<i2").tolist() == [-32768, 0, 127 << 8]


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
