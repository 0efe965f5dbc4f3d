import io
import struct
import tarfile
import wave
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import soundfile

from data.options import ChunkerOptions
from data.sources import audio
from data.sources.audio import decode_pcm16, encode_mulaw, encode_pcm16
from tests.data.conftest import brief, shard_source, shared_data, tar_of

SAMPLES = np.random.default_rng(0).integers(-32768, 32768, 20_000).astype(np.int16)


def wav(samples: np.ndarray, width: int = 2, channels: int = 1, rate: int = 8000) -> bytes:
    buffer = io.BytesIO()
    with wave.open(buffer, "wb") as file:
        file.setnchannels(channels)
        file.setsampwidth(width)
        file.setframerate(rate)
        file.writeframes(samples.tobytes())
    return buffer.getvalue()


sharded = partial(shard_source, kind="audio", chunker=ChunkerOptions(kind="fixed", k=16), megabytes=1)


def decode_mulaw(codes: np.ndarray) -> np.ndarray:
    """Samples int16 of codes uint8, which `encode_mulaw` maps back to the same codes."""
    compressed = codes.astype(np.float64) / 255 * 2 - 1
    x = np.sign(compressed) * (256 ** np.abs(compressed) - 1) / 255
    return np.clip(np.round(x * 32768), -32768, 32767).astype(np.int16)


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
def test_recordings(folder: Path, tmp_path: Path, packed: bool, channels: int) -> None:
    long, short = wav(SAMPLES, channels=channels), wav(SAMPLES[:4000], channels=channels)
    files = {"train-a.wav": long, "train-b.wave": short, "notes.txt": b"no", "._train-a.wav": b"of macOS"}
    put(folder, files, packed)
    whole = sharded(folder, tmp_path / "shards", encoding="pcm16")
    samples = [np.frombuffer(each, "<i2").tolist() for each in whole.iterate_originals("train")]
    assert samples == [SAMPLES.tolist(), SAMPLES[:4000].tolist()]
    assert whole.manifest["form"] == {"rate": 8000, "channels": channels}
    said = str(whole.manifest["splits"])
    assert ("left out: they are hidden, or not recordings: 2" if packed else "notes.txt") in said
    codes = list(sharded(folder, tmp_path / "shards").iterate_originals("train"))
    assert codes == [encode_mulaw(SAMPLES).tobytes(), encode_mulaw(SAMPLES[:4000]).tobytes()]


def put(folder: Path, files: dict[str, bytes], packed: bool = False) -> None:
    """Writes files into a folder, or into a tar there."""
    if packed:
        members = [(f"recordings/{name}", content) for name, content in files.items()]
        files = {"train.tar.gz": tar_of(*members, mode="w:gz")}
    for name, content in files.items():
        (folder / name).write_bytes(content)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("other", [{"channels": 2}, {"rate": 16000}], ids=["channels", "rates"])
def test_recordings_of_several_rates_or_channels_are_refused(
    folder: Path, tmp_path: Path, packed: bool, other: dict[str, int]
) -> None:
    """Also when another process read the other one."""
    put(folder, {"train-a.wav": wav(np.tile(SAMPLES, 30)), "train-b.wav": wav(SAMPLES, **other)}, packed)
    said = "train-a.wav has rate 8,000, channels 1; .*train-b.wav has rate .*convert them"
    with pytest.raises(ValueError, match=said):
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
    ids=brief,
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
    assert "recordings lost incomplete frames at their end: 1" in corpus.manifest["splits"]["notes"]
    assert corpus.split_counts("train").source_bytes == len(SAMPLES) + 50


def test_eight_bits_are_unsigned(tmp_path: Path) -> None:
    (tmp_path / "train.wav").write_bytes(wav(np.array([0, 128, 255], np.uint8), width=1))
    (data,) = sharded(tmp_path / "train.wav", tmp_path / "shards", encoding="pcm16").iterate_originals("train")
    assert np.frombuffer(data, "<i2").tolist() == [-32768, 0, 127 << 8]


EXTENSIBLE = struct.pack("<H14s", 1, bytes.fromhex("000000001000800000aa00389b71"))


def riff(fmt: bytes, data: bytes, kind: bytes = b"RIFF", before: bytes = b"", size: int | None = None) -> bytes:
    """A WAV of these chunks; in RF64 the sizes stand in a chunk of their own."""
    said = len(data) if size is None else size
    body = b"WAVE" + before + b"fmt " + struct.pack("<I", len(fmt)) + fmt
    body += b"data" + struct.pack("<I", 0xFFFFFFFF if kind == b"RF64" else said) + data
    return kind + struct.pack("<I", 0xFFFFFFFF if kind == b"RF64" else len(body)) + body


def fmt(tag: int = 1, channels: int = 1, bits: int = 16, rate: int = 8000, more: bytes = b"") -> bytes:
    frame = channels * ((bits + 7) // 8)
    return struct.pack("<HHIIHH", tag, channels, rate, rate * frame, frame, bits) + more


def extensible(sub: bytes = EXTENSIBLE, bits: int = 16, channels: int = 1) -> bytes:
    return fmt(0xFFFE, channels, bits, more=struct.pack("<HHI", 22, bits, 3) + sub)


def encoded(samples: np.ndarray, subtype: str, kind: str = "WAV", channels: int = 1) -> bytes:
    buffer = io.BytesIO()
    soundfile.write(buffer, samples.reshape(-1, channels), 8000, subtype, format=kind)
    return buffer.getvalue()


def read(folder: Path, content: bytes, packed: bool = False, name: str = "train.wav") -> tuple[np.ndarray, list[str]]:
    """The samples of a recording as they are sharded, and what was noted."""
    (folder / "source").mkdir(parents=True)
    put(folder / "source", {name: content}, packed)
    corpus = sharded(folder / "source", folder / "shards", encoding="pcm16")
    notes = [note for note in corpus.manifest["splits"]["notes"] if "is empty" not in note]
    return np.frombuffer(b"".join(corpus.iterate_originals("train")), "<i2"), notes


SIZES = b"ds64" + struct.pack("<IQQQI", 28, 40_000 + 72, 40_000, 20_000, 0)
SIXTEEN_BITS = {
    "extensible": riff(extensible(), SAMPLES.tobytes()),
    "extensible, stereo": riff(extensible(channels=2), SAMPLES.tobytes()),
    "more in its header": riff(fmt(more=b"\0\0"), SAMPLES.tobytes(), before=b"LIST\x03\0\0\0abc\0"),
    "RF64": riff(fmt(), SAMPLES.tobytes(), b"RF64", SIZES),
    "WAV of libsndfile": encoded(SAMPLES, "PCM_16"),
    "WAVEX of libsndfile": encoded(SAMPLES, "PCM_16", "WAVEX", 2),
    "RF64 of libsndfile": encoded(SAMPLES, "PCM_16", "RF64"),
    "FLAC": encoded(SAMPLES, "PCM_16", "FLAC"),
    "FLAC, stereo": encoded(SAMPLES, "PCM_16", "FLAC", 2),
}


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("kind", SIXTEEN_BITS)
def test_sixteen_bits_are_the_same_in_every_kind_of_file(tmp_path: Path, packed: bool, kind: str) -> None:
    name = "train.flac" if "FLAC" in kind else "train.wav"
    samples, notes = read(tmp_path, SIXTEEN_BITS[kind], packed, name)
    assert np.array_equal(samples, SAMPLES) and notes == []


WIDE = np.concatenate(
    [SAMPLES.astype(np.int32) << 16, np.array([0x7FFFFFFF, -0x80000000, 0x8000, 0x7F00, -0x8000], np.int32)]
)
ROUNDED = [*SAMPLES.tolist(), 32767, -32768, 1, 0, 0]


@pytest.mark.parametrize(("bits", "kind"), [(24, "WAV"), (24, "WAVEX"), (24, "FLAC"), (32, "WAV")])
def test_more_bits_are_rounded_and_that_is_said(tmp_path: Path, bits: int, kind: str) -> None:
    content = encoded(WIDE, f"PCM_{bits}", kind)
    samples, notes = read(tmp_path, content, name="train.flac" if kind == "FLAC" else "train.wav")
    assert samples.tolist() == ROUNDED and notes == [f"recordings of {bits} bits were rounded to 16: 1"]


@pytest.mark.parametrize(("kind", "type_"), [("FLOAT", np.float32), ("DOUBLE", np.float64)])
def test_floats_are_rounded_clipped_and_never_nan(tmp_path: Path, kind: str, type_: type) -> None:
    floats = np.array([0, 1, -1, 0.5, 2, -3, 0.6 / 32768], type_)
    header = fmt(3, bits=8 * np.dtype(type_).itemsize)
    samples, notes = read(tmp_path, riff(header, floats.tobytes()))
    assert samples.tolist() == [0, 32767, -32768, 16384, 32767, -32768, 1]
    assert notes == [
        "recordings of floats had samples outside -1 to 1, which were clipped: 1",
        "recordings of floats were rounded to 16 bits: 1",
    ]
    exact = (SAMPLES / 32768).astype(type_)
    assert np.array_equal(read(tmp_path / "exact", riff(header, exact.tobytes()))[0], SAMPLES)
    for odd in (np.nan, np.inf):
        with pytest.raises(ValueError, match="train.wav cannot be read as WAV: some of its samples are NaN"):
            read(tmp_path / str(odd), riff(header, np.array([0, odd], type_).tobytes()))


@pytest.mark.parametrize(("subtype", "law"), [("ULAW", "µ"), ("ALAW", "A")])
def test_companded_recordings_are_decoded(tmp_path: Path, subtype: str, law: str) -> None:
    content = encoded(SAMPLES, subtype)
    samples, notes = read(tmp_path, content)
    assert np.array_equal(samples, soundfile.read(io.BytesIO(content), dtype="int16")[0])
    assert notes == [f"recordings in {law}-law were decoded to 16 bits: 1"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (riff(fmt(2, bits=4), bytes(100)), r"an unsupported coding \(tag 0x0002\): convert it into plain PCM"),
        (riff(fmt(bits=64), bytes(800)), "it has 64 bits per sample: convert it into plain PCM"),
        (riff(fmt(3, bits=16), bytes(800)), "it has 16 bits per sample: convert"),
        (riff(extensible(b"\1\0" + bytes(14)), bytes(800)), "its extended format is not supported"),
        (riff(fmt(0xFFFE), bytes(800)), "its extended format is not supported"),
        (riff(fmt(channels=0), bytes(800)), "its header contradicts itself"),
        (riff(fmt(rate=0), bytes(800)), "its header contradicts itself"),
        (riff(b"\1\0", bytes(800)), "its format chunk is incomplete"),
        (b"RIFX" + wav(SAMPLES)[4:], "does not begin with RIFF"),
        (wav(SAMPLES)[:30], "it was truncated: it ends inside its header"),
        (b"RIFF\x28\0\0\0WAVEdata\x04\0\0\0abcd", "its sound comes before its format"),
        (b"RIFF\xff\xff\xff\xffWAVELIST\xff\xff\xff\xffabcd", "it ends inside its header"),
        (b"RIFF", "it ends inside its header"),
        (b"not sound, whatever its name", "does not begin with RIFF"),
        (b"fLaC" + bytes(100), "does not begin with RIFF"),
    ],
    ids=brief,
)
def test_what_cannot_be_read_is_named_and_has_advice(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "train.wav").write_bytes(content)
    with pytest.raises(ValueError, match=f"train.wav: train.wav cannot be read as WAV: .*{message}"):
        sharded(tmp_path / "train.wav", tmp_path / "shards")


@pytest.mark.parametrize("odd", [False, True])
def test_a_wav_whose_sound_is_in_parts_is_refused(odd: bool, tmp_path: Path) -> None:
    """The second part would be lost. Other chunks behind the sound are passed over."""
    whole = bytearray(wav(np.zeros(1001 if odd else 1000, np.uint8), width=1)) + bytes(odd)
    for extra, message in (
        (b"LIST\x03\0\0\0abc\0", None),
        (b"LIST\x03\0\0\0abc\0data\x02\0\0\0ab", "in several parts"),
    ):
        content = whole + extra
        content[4:8] = (len(content) - 8).to_bytes(4, "little")
        (tmp_path / "train.wav").write_bytes(content)
        with pytest.raises(ValueError, match=message) if message else nullcontext():
            corpus = sharded(tmp_path / "train.wav", tmp_path / "shards", valid_percent=0)
            assert corpus.split_counts("train").tokens == len(whole) - 44 - odd


@pytest.mark.parametrize("packed", [False, True])
def test_a_damaged_flac_is_refused(tmp_path: Path, packed: bool) -> None:
    good = encoded(SAMPLES, "PCM_16", "FLAC")
    flipped = bytearray(good)
    flipped[len(good) // 2] ^= 1
    other = good[:26] + bytes(15) + b"\1" + good[42:]
    unknown = good[:21] + bytes([good[21] & 0xF0]) + bytes(4) + good[26:]
    cut = (good[:-100], good[:-1], good[:50], good[:20])
    for number, content in enumerate((*cut, bytes(flipped), other, unknown, b"x" * 99)):
        with pytest.raises(ValueError, match="train.flac cannot be read as FLAC: "):
            read(tmp_path / str(number), content, packed, "train.flac")


def test_a_flac_of_hours_of_silence_is_a_bomb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audio, "FREE", 1 << 18)
    content = encoded(np.zeros(5_000_000, np.int16), "PCM_16", "FLAC")
    assert len(content) < 20_000
    (tmp_path / "train.flac").write_bytes(content)
    with pytest.raises(ValueError, match="train.flac cannot be read as FLAC: .* a decompression bomb"):
        sharded(tmp_path / "train.flac", tmp_path / "shards")
    corpus = sharded(tmp_path / "train.flac", tmp_path / "shards", expansion=5000)
    assert corpus.split_counts("train").source_bytes == 5_000_000


@pytest.mark.nightly
def test_real_recordings(tmp_path: Path) -> None:
    path = shared_data("fsdd-8khz/recordings.tar.xz")
    corpus = sharded(path, tmp_path, test_pattern=r"_[0-4]\.wav$", valid_pattern=r"_[5-9]\.wav$", encoding="pcm16")
    assert [corpus.split_counts(split).documents for split in ("train", "valid", "test")] == [2400, 300, 300]
    assert corpus.split_counts("test").tokens == 2 * 1_034_030
    found = list(corpus.iterate_originals("test"))
    wanted = []
    with tarfile.open(path) as tar:
        for member in tar:
            content = tar.extractfile(member) if member.name.endswith(tuple(f"_{n}.wav" for n in range(5))) else None
            if content is not None:
                with wave.open(io.BytesIO(content.read())) as recording:
                    wanted.append(recording.readframes(recording.getnframes()))
    assert found == wanted


@pytest.mark.parametrize(("kind", "what"), [("AIFF", "it is AIFF, and "), ("MP3", "it "), ("OGG", "it is Ogg, and ")])
def test_another_format_that_is_called_wav_is_named_with_advice(kind: str, what: str, tmp_path: Path) -> None:
    content = io.BytesIO()
    soundfile.write(content, np.zeros(2000), 8000, format=kind)
    (tmp_path / "train.wav").write_bytes(content.getvalue())
    with pytest.raises(ValueError, match=f"{what}.*does not begin with RIFF and WAVE: convert it .*ffmpeg"):
        sharded(tmp_path, tmp_path / "shards")


@pytest.mark.parametrize("k", [5, 16])
def test_blocks_of_samples_are_whole_wherever_chunks_end(k: int, tmp_path: Path) -> None:
    (tmp_path / "train.wav").write_bytes(wav(np.tile(SAMPLES, 40)))
    corpus = sharded(tmp_path, tmp_path / "made", encoding="pcm16", chunker=ChunkerOptions(kind="fixed", k=k))
    blocks = list(corpus.iterate_original_blocks("train"))
    assert len(blocks) > 1 and b"".join(blocks) == np.tile(SAMPLES, 40).astype("<i2").tobytes()
