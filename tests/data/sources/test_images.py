"""Pictures from every kind of file become the same rasters; nothing in them runs code or allocates without bound."""

import io
import lzma
import pickle
import resource
import tarfile
import zlib
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageCms

from data.corpus import Corpus
from data.options import ChunkerOptions, SourceOptions
from data.sources import safe_pickle
from data.sources.images import _read_batches
from data.sources.safe_pickle import read_rows
from data.sources.source import make_source
from tests.data.conftest import shard_source, shared_data, tar_of

GENERATOR = np.random.default_rng(0)
PICTURES = GENERATOR.integers(0, 256, (300, 32, 32, 3), dtype=np.uint8)
PLANES = PICTURES.transpose(0, 3, 1, 2).reshape(300, 3072)


sharded = partial(shard_source, kind="images", chunker="pixels")


def rasters(corpus: Corpus) -> np.ndarray:
    found = b"".join(b"".join(corpus.iterate_originals(split)) for split in ("train", "valid", "test"))
    return np.frombuffer(found, np.uint8).reshape(-1, 32, 32, 3)


def png(picture: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(picture).save(buffer, "PNG")
    return buffer.getvalue()


def test_npz_batches(folder: Path, tmp_path: Path) -> None:
    np.savez(folder / "train_data_batch_1.npz", data=PLANES[:297], labels=np.ones(300))
    np.savez_compressed(folder / "val_data.npz", data=PLANES[297:])
    corpus = sharded(folder, tmp_path / "shards")
    train = corpus.split_counts("train").documents
    assert 270 < train < 297 and corpus.split_counts("test").documents == 3  # val is test, valid is hashed out of train
    assert sorted(map(bytes, rasters(corpus))) == sorted(map(bytes, PICTURES))
    assert [bytes(picture) for picture in rasters(corpus)[-3:]] == [bytes(picture) for picture in PICTURES[297:]]
    assert corpus.chunks_per_raster("train") == 256


@pytest.mark.parametrize("protocol", range(2, 6))
@pytest.mark.parametrize("bytes_keys", [False, True])
def test_pickled_batches(tmp_path: Path, protocol: int, bytes_keys: bool) -> None:
    batch = {"data": PLANES, "labels": list(range(300)), "filenames": ["a.png"] * 300, "batch_label": "batch 1 of 5"}
    if bytes_keys:
        batch = {key.encode(): value for key, value in batch.items()}  # type: ignore[misc]
    (tmp_path / "data_batch_1").write_bytes(pickle.dumps(batch, protocol))
    assert np.array_equal(np.concatenate(list(_read_batches(str(tmp_path / "data_batch_1")))), PLANES)


def test_batches_of_python_2(tmp_path: Path) -> None:
    """As CIFAR-10's own: protocol 2, byte strings, and an array whose bytes are a Python 2 string."""
    content = PLANES.tobytes()
    shape = b"M,\x01M\x00\x0c\x86"
    dtype = b"cnumpy\ndtype\nU\x02u1K\x00K\x01\x87R(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
    array = (
        b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85U\x01b\x87R(K\x01" + shape + dtype + b"\x89T"
    )
    pickled = b"\x80\x02}q\x01(U\x04data" + array + len(content).to_bytes(4, "little") + content + b"tbu."
    assert np.array_equal(pickle.loads(pickled, encoding="bytes")[b"data"], PLANES)  # it is what NumPy reads, too
    (tmp_path / "data_batch_1").write_bytes(pickled)
    assert np.array_equal(np.concatenate(list(read_rows(str(tmp_path / "data_batch_1"), 256))), PLANES)


@pytest.mark.parametrize("protocol", [0, 2, 4, 5])
def test_batches_in_column_order(tmp_path: Path, protocol: int) -> None:
    (tmp_path / "data_batch_1").write_bytes(pickle.dumps({"data": np.asfortranarray(PLANES), "mean": MEAN}, protocol))
    assert np.array_equal(np.concatenate(list(read_rows(str(tmp_path / "data_batch_1"), 7))), PLANES)


MEAN = np.zeros((3, 4, 5)).transpose(2, 0, 1)  # contiguous in no order


class Called:
    def __init__(self, *arguments: object) -> None:
        self.arguments = arguments

    def __reduce__(self) -> tuple[object, ...]:
        return np.ndarray, self.arguments


@pytest.mark.parametrize("offset", [-(1 << 19), -24, 0])
def test_no_function_of_numpy_is_called_by_a_pickle(tmp_path: Path, offset: int) -> None:
    """`ndarray` takes an offset before its buffer, and a buffer for pointers to objects."""
    memory = Called((4, 3072), np.dtype("u1"), bytearray(32), offset)
    (tmp_path / "data_batch_1").write_bytes(pickle.dumps({"data": memory}, 5))
    with pytest.raises(ValueError, match="expected an array 'data'"):
        list(read_rows(str(tmp_path / "data_batch_1"), 256))
    pointers = pickle.dumps(Called((1,), np.dtype("O"), bytearray(b"A" * 8)), 5)[11:-1]
    (tmp_path / "data_batch_1").write_bytes(b"\x80\x05" + 2 * pointers + b"K\0K\0s.")
    with pytest.raises(ValueError, match="does not support item assignment"):
        list(read_rows(str(tmp_path / "data_batch_1"), 256))


def test_a_pickled_batch_is_read_where_the_system_limits_no_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    def refuse(kind: int, _: tuple[int, int]) -> None:
        if kind == resource.RLIMIT_AS:
            raise ValueError("current limit exceeds maximum limit")

    monkeypatch.setattr("resource.setrlimit", refuse)
    (tmp_path / "data_batch_1").write_bytes(pickle.dumps({"data": PLANES}))
    safe_pickle._main(str(tmp_path / "data_batch_1"), 60)
    assert capsysbinary.readouterr().out.endswith(PLANES.tobytes())


class Malicious:
    def __reduce__(self) -> tuple[object, ...]:
        import os

        return os.system, ("touch /tmp/haed-was-here",)


@pytest.mark.parametrize("where", ["data", "labels"])
def test_a_pickle_runs_nothing(tmp_path: Path, where: str) -> None:
    (tmp_path / "data_batch_1").write_bytes(pickle.dumps({"data": PLANES, where: Malicious()}))
    with pytest.raises(ValueError, match="data_batch_1 is not a batch file of pictures: .* it needs posix.system"):
        sharded(tmp_path / "data_batch_1", tmp_path / "shards")
    assert not Path("/tmp/haed-was-here").exists()


@pytest.mark.parametrize("suffix", [None, ".tar", ".tar.xz"])
def test_png_files(folder: Path, tmp_path: Path, suffix: str | None) -> None:
    files = {f"{'test' if number >= 30 else 'train'}/{number:03d}.png": png(PICTURES[number]) for number in range(40)}
    if suffix:
        whole = {split: tar_of(*(each for each in files.items() if split in each[0])) for split in ("train", "test")}
        files = {f"{split}{suffix}": lzma.compress(tar) if suffix == ".tar.xz" else tar for split, tar in whole.items()}
    for name, content in {**files, "readme.txt": b"not a picture"}.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content)
    corpus = sharded(folder, tmp_path / "shards", valid_percent=0)
    assert corpus.split_counts("train").documents == 30 and corpus.split_counts("test").documents == 10
    assert np.array_equal(rasters(corpus), PICTURES[:40])
    assert corpus.manifest["form"] == {"height": 32, "width": 32, "channels": 3}


def test_pictures_of_other_sizes_and_modes(folder: Path, tmp_path: Path) -> None:
    (folder / "train-a.png").write_bytes(png(PICTURES[0]))
    (folder / "train-b.png").write_bytes(png(PICTURES[1][:, :, 0]))
    (folder / "train-c.png").write_bytes(png(np.repeat(np.repeat(PICTURES[2], 3, 0), 3, 1)))
    said = "train-c.png has height 96, width 96, channels 3. To fix it, set source.image_size="
    with pytest.raises(ValueError, match=said):
        sharded(folder, tmp_path / "shards")
    found = rasters(sharded(folder, tmp_path / "shards", image_size=32))
    grey = np.repeat(PICTURES[1][:, :, :1], 3, 2)
    assert np.array_equal(found, np.stack([PICTURES[0], grey, PICTURES[2]]))


@pytest.mark.parametrize(("k", "better"), [(12, 0), (11, 9), (2, 3)])
def test_chunks_that_begin_within_pixels_are_said(k: int, better: int, tmp_path: Path) -> None:
    (tmp_path / "train-a.png").write_bytes(png(PICTURES[0]))
    corpus = shard_source(tmp_path, tmp_path / "shards", "images", ChunkerOptions(kind="pixels", k=k))
    notes = [each for each in corpus.manifest["splits"]["notes"] if "within pixels" in each]
    assert len(notes) == bool(better) and all(each.endswith(f"Use chunker.k={better}") for each in notes)


def test_what_is_converted_is_said(tmp_path: Path) -> None:
    folder = tmp_path / "train"
    folder.mkdir()
    whole = Image.fromarray(PICTURES[0])
    turned = Image.Exif()
    turned[274] = 6
    whole.convert("L").save(folder / "grey.png")
    whole.convert("RGBA").save(folder / "transparent.png")
    whole.convert("CMYK").save(folder / "cmyk.jpg")
    whole.save(folder / "turned.jpg", exif=turned)
    whole.save(folder / "profiled.png", icc_profile=ImageCms.ImageCmsProfile(ImageCms.createProfile("XYZ")).tobytes())
    whole.resize((64, 64)).save(folder / "large.png")
    whole.save(folder / "moving.png", save_all=True, append_images=[Image.fromarray(PICTURES[1])])
    notes = sharded(tmp_path, tmp_path / "shards", image_size=32, pattern="train/*").manifest["splits"]["notes"]
    assert notes == [
        "CMYK pictures became RGB: 1",
        "grey pictures became RGB: 1",
        "only the first frame of animations was read: 1",
        "pictures lost their transparency: 1",
        "pictures were read as stored, without their EXIF rotation: 1",
        "pictures were read as stored, without their colour profile: 1",
        "pictures were resampled to 32 × 32: 1",
        "valid is empty",
        "test is empty",
    ]


def test_batches_are_resampled_too(tmp_path: Path) -> None:
    np.savez(tmp_path / "train.npz", data=PLANES[:2])
    corpus = sharded(tmp_path / "train.npz", tmp_path / "shards", image_size=16)
    means = PLANES[:2].reshape(2, 3, 16, 2, 16, 2).mean((3, 5)).transpose(0, 2, 3, 1)  # of four pixels each
    found = np.frombuffer(b"".join(corpus.iterate_originals("train")), np.uint8).reshape(means.shape)
    assert np.abs(found - means).max() <= 1  # Pillow rounds rows, then columns
    assert "pictures were resampled to 16 × 16: 2" in corpus.manifest["splits"]["notes"]


def test_pictures_of_other_shapes_are_refused_also_across_parts(tmp_path: Path) -> None:
    np.savez(tmp_path / "train-a.npz", data=np.tile(PLANES, (2, 1)))
    (tmp_path / "train-b.png").write_bytes(png(PICTURES[0][:, :16]))
    with pytest.raises(ValueError, match="train-a.npz@0 has height 32, width 32.*train-b.png has height 32, width 16"):
        sharded(tmp_path, tmp_path / "shards", megabytes=1)
    assert not list((tmp_path / "shards").glob("*/manifest.json"))
    np.savez(tmp_path / "train-a.npz", data=PLANES[:, :3000])
    with pytest.raises(ValueError, match="rows of 3000 values are not square RGB pictures"):
        sharded(tmp_path / "train-a.npz", tmp_path / "shards")


def test_a_picture_that_claims_to_be_huge_is_refused(tmp_path: Path) -> None:
    content = bytearray(png(PICTURES[0]))
    content[16:24] = (60_000).to_bytes(4, "big") * 2
    content[29:33] = zlib.crc32(content[12:29]).to_bytes(4, "big")
    (tmp_path / "train.png").write_bytes(content)
    with pytest.raises(ValueError, match="train.png cannot be read as a picture"):
        sharded(tmp_path / "train.png", tmp_path / "shards")


def test_a_tar_cannot_write_anywhere(tmp_path: Path) -> None:
    outside = [(name, png(PICTURES[0])) for name in ("../../outside.png", "/tmp/haed-absolute.png")]
    (tmp_path / "train.tar").write_bytes(tar_of(*outside))
    with tarfile.open(tmp_path / "train.tar", "a") as tar:
        link = tarfile.TarInfo("link.png")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        tar.addfile(link)
    corpus = sharded(tmp_path / "train.tar", tmp_path / "shards")
    assert corpus.split_counts("train").documents == 2 and not (tmp_path.parent / "outside.png").exists()
    assert not Path("/tmp/haed-absolute.png").exists()


def test_real_pictures(tmp_path: Path) -> None:
    path = shared_data("imagenette32/val_data.npz")
    corpus = sharded(path, tmp_path, valid_pattern="(?!)")
    planes = np.load(path)["data"]
    found = b"".join(corpus.iterate_originals("train"))
    wanted = planes.reshape(-1, 3, 1024).transpose(0, 2, 1).tobytes()
    assert found == wanted


def test_real_jpegs_in_a_compressed_tar(tmp_path: Path) -> None:
    path = shared_data("tiny-imagenet-32-jpeg/val.tar.xz")
    options = SourceOptions(kind="images", path=str(path), valid_pattern="val")
    source = make_source(options)
    (item,) = source.inputs(1 << 24, 1)
    found = [piece for piece, _ in zip(source.read(item), range(200), strict=False)]
    with tarfile.open(path) as tar:
        members = [member for member, _ in zip((m for m in tar if m.isfile()), range(200), strict=False)]
        for piece, member in zip(found, members, strict=True):
            content = tar.extractfile(member)
            assert content is not None and piece.name == f"val.tar.xz/{member.name}" and piece.split == "valid"
            assert piece.data == Image.open(content).convert("RGB").tobytes()
