"""Small files that ask for much: pickles, .npz and pictures end in an error, soon and in little memory."""

import pickle
import struct
import tracemalloc
import zipfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from data.options import SourceOptions
from data.sources import files, images, safe_pickle
from data.sources.images import ImageSource, _read_batches
from data.sources.safe_pickle import read_rows

NESTED = b"X\x01\0\0\0a" + b"q\0h\0\x86" * 60  # a pair of the same pair twice, sixty deep: 2^60 to whoever walks it
LONG = b"X\0\0\x10\0" + b"x" * (1 << 20) + b"q\0"
ARRAY = b"}X\x04\0\0\0datacnumpy.core.multiarray\n_reconstruct\n)R(K\x01%s%s\x89%stbs"
DTYPE, SHAPE, FOUR = b"cnumpy\ndtype\nX\x02\0\0\0u1\x85R", b"K\x02K\x02\x86", b"C\x04abcd"
PRIME = (1 << 61) - 1  # whose multiples all have the hash 0
BOMBS = {
    "a key": b"}" + NESTED + b"Ns",
    "the top": NESTED,
    "a value": b"}X\x04\0\0\0data" + NESTED + b"s",
    "a name": NESTED + NESTED + b"\x93",
    "a function": NESTED + b")R",
    "a state": b"cnumpy\ndtype\n)R" + NESTED + b"b",
    "a shape": ARRAY % (NESTED, DTYPE, FOUR),
    "a shape below zero": ARRAY % (b"J\xff\xff\xff\xffJ\xfc\xff\xff\xff\x86", DTYPE, FOUR),
    "a shape without end": ARRAY % (b"\x8a\x08" + b"\x7f" * 8 + b"K\0\x86", DTYPE, b"C\0"),
    "a length for bytes": b"}X\x04\0\0\0datacnumpy.core.numeric\n_frombuffer\n(\x8a\x05\0\0\0\0\x7f%s%sX\x01\0\0\0CtRs"
    % (DTYPE, SHAPE),
    "the same encoded again": LONG + b"c_codecs\nencode\nq\x01" + b"h\1h\0\x85R" * 20_000,
    "long names": LONG + b"h\0h\0\x93" * 20_000,
    "marks under marks": b"N" * 20_000 + b"(t" * 20_000,
    "keys of one hash": b"}(" + b"".join(b"\x8a\x0a%sN" % (i * PRIME).to_bytes(10, "little") for i in range(9_000)) + b"u",
    "a deep tuple": b")" + b"\x85" * 20_000,
    "a list in itself": b"]q\0h\0a",
    "two gigabytes, it says": b"B\xff\xff\xff\x7f" + b"x" * 10,
    "a memo of four billion entries": b"}r\xff\xff\xff\xff",
    "no array": pickle.dumps([1, 2], 4)[2:-1],
    "a truncated array": pickle.dumps({"data": np.zeros((3, 3072), np.uint8)}, 4)[2:-50],
    "nothing": b"",
    "a call of a list": b"]R",
}  # fmt: skip


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", BOMBS)
def test_a_bomb_in_a_pickle_or_a_bad_one(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It ends in an error, by a limit on time or memory at the latest, in a process of its own."""
    monkeypatch.setattr(safe_pickle, "SECONDS", 1)
    (tmp_path / "data_batch_1").write_bytes(b"\x80\x04" + BOMBS[name] + b".")
    with pytest.raises(ValueError, match="not a pickled batch") as raised:
        list(read_rows(str(tmp_path / "data_batch_1"), 256))
    assert len(str(raised.value)) < 400


def npy(header: bytes, body: bytes = b"", version: int = 1) -> bytes:
    return b"\x93NUMPY" + bytes([version, 0]) + struct.pack("<H" if version == 1 else "<I", len(header)) + header + body


def of_shape(shape: object) -> bytes:
    return f"{{'descr': '|u1', 'fortran_order': False, 'shape': {shape}, }}".encode()


NPZ = {
    "zeros": npy(of_shape((10_000, 3072)), bytes(10_000 * 3072)),
    "a header of zeros": b"\x93NUMPY\2\0\xff\xff\xff\xff" + bytes(30_000_000),
    "wide rows": npy(of_shape((1 << 40, 1 << 24)), b"x"),
    "a deep header": npy(b"-" * 9000),
    "an open header": npy(b"(" * 2000),
    "more than it says": npy(of_shape((10, 3)), bytes(31)),
    "less than nothing": npy(of_shape((-1, 3)), bytes(3)),
    "more rows than there are": npy(of_shape((10**12, 3072)), bytes(100)),
    "objects": npy(of_shape((1, 3072)).replace(b"|u1", b"|O"), bytes(100)),
    "floats": npy(of_shape((1, 3072)).replace(b"|u1", b"<f4"), bytes(100)),
    "code": npy(b"__import__('os').system('touch /tmp/haed-was-here')"),
}


@pytest.mark.parametrize("name", NPZ)
def test_a_bomb_in_an_npz(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert files.FREE == 64 << 20
    monkeypatch.setattr(files, "FREE", 1 << 20)
    path = tmp_path / "train.npz"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("data.npy", NPZ[name])
    whole = path.read_bytes()
    for claimed in (None, 30_000):  # what the zip itself claims may be a lie
        if claimed:
            at = whole.rindex(b"PK\1\2") + 24
            path.write_bytes(whole[:at] + struct.pack("<I", claimed) + whole[at + 4 :])
        tracemalloc.start()
        with pytest.raises(ValueError, match="train.npz") as caught:
            for _ in _read_batches(str(path)):
                pass
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 40 << 20 and not Path("/tmp/haed-was-here").exists()
        assert "zeros" not in name or claimed or "decompression bomb. If" in str(caught.value)


def test_a_bomb_of_a_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(images, "FREE", 1 << 20)
    Image.fromarray(np.zeros((1000, 1000, 3), np.uint8)).save(tmp_path / "train.png")

    def read(expansion: int) -> bytes:
        source = ImageSource(SourceOptions(kind="images", path=str(tmp_path / "train.png"), expansion=expansion))
        (item,) = source.inputs(1 << 24, 1)
        return next(iter(source.read(item))).data

    with pytest.raises(ValueError, match="may be a decompression bomb"):
        read(250)
    assert len(read(5000)) == 3_000_000
