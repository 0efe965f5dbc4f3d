"""Shards: whatever goes in comes out, in any pieces; whatever is changed on the way is noticed and located."""

import tarfile
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from data import shards
from data.chunkers import make_chunker
from data.options import ChunkerOptions
from data.shards import CorruptShardError, Shard, ShardWriter, read_shard
from data.sources.source import Piece
from tests.data.conftest import tar_of


@given(
    documents=st.lists(st.text("ab .\n é", min_size=1, max_size=120).map(str.encode), min_size=1, max_size=12),
    cuts=st.lists(st.integers(1, 30), min_size=1),
    kind=st.sampled_from(["words", "fixed"]),
    sample_bytes=st.integers(1, 200),
    limit=st.integers(1, 300),
)
def test_documents_in_any_pieces(
    documents: list[bytes], cuts: list[int], kind: str, sample_bytes: int, limit: int
) -> None:
    chunker = make_chunker(ChunkerOptions(kind=kind, k=5))
    before, shards.SAMPLE_BYTES = shards.SAMPLE_BYTES, sample_bytes
    try:
        with TemporaryDirectory() as folder:
            writer = ShardWriter(Path(folder), "train", chunker, limit)
            turn = 0
            for number, document in enumerate(documents):
                at = 0
                while at < len(document):
                    end = at + cuts[turn % len(cuts)]
                    writer.add_piece(Piece(str(number), "train", document[at:end], at > 0))
                    at, turn = end, turn + 1
            made = writer.close()
            read = [read_shard(Path(folder) / s.file, (Path(folder) / s.file).read_bytes(), s) for s in made]
    finally:
        shards.SAMPLE_BYTES = before
    found = [sample for samples in read for sample in samples]
    assert b"".join(sample.tokens.tobytes() for sample in found) == b"".join(documents)
    whole = [chunker.split(document)[1] for document in documents]
    assert np.array_equal(np.concatenate([sample.lengths for sample in found]), np.concatenate(whole))
    counts, names = [0] * len(documents), []
    for sample in found:
        for number, (name, count) in enumerate(zip(sample.names, sample.documents.tolist(), strict=True)):
            if number or not sample.continues:
                names.append(name)
            counts[int(name)] += count
    assert counts == [len(lengths) for lengths in whole] and names == [str(n) for n in range(len(documents))]
    assert sum(shard.documents for shard in made) == len(documents)
    assert sum(shard.source_bytes for shard in made) == len(b"".join(documents))
    summary = writer.statistics.make_summary().tokens_per_document
    assert (summary.shortest, summary.longest) == (min(map(len, documents)), max(map(len, documents)))
    assert sum(summary.documents_from.values()) == len(documents)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, bytes, Shard]:
    folder = tmp_path_factory.mktemp("shards")
    writer = ShardWriter(folder, "train", make_chunker(ChunkerOptions()), 1 << 30)
    for number in range(3):
        writer.add_piece(Piece(f"document {number}", "train", b"some text " * 80_000))
    (shard,) = writer.close()
    return folder / shard.file, (folder / shard.file).read_bytes(), shard


def test_a_changed_array_is_located(written: tuple[Path, bytes, Shard]) -> None:
    path, content, shard = written
    with tarfile.open(path) as tar:
        infos = tar.getmembers()
    assert len(infos) == 12
    for at, sample in ((0, 3), (5, 7), (10, 11)):
        changed = bytearray(content)
        changed[infos[at].offset_data + infos[at].size - 3] ^= 4
        with pytest.raises(
            CorruptShardError, match=rf"train-00000.tar is damaged at byte {infos[sample].offset:,}: the .* changed"
        ):
            read_shard(path, bytes(changed), shard)


@settings(max_examples=60)
@given(where=st.floats(0, 1, exclude_max=True, allow_subnormal=False), bit=st.integers(0, 7))
def test_any_flipped_bit_is_noticed(written: tuple[Path, bytes, Shard], where: float, bit: int) -> None:
    path, content, shard = written
    changed = bytearray(content)
    changed[int(where * len(content))] ^= 1 << bit
    with pytest.raises(CorruptShardError, match="train-00000.tar is damaged at byte"):
        read_shard(path, bytes(changed), shard)


@settings(max_examples=60)
@given(where=st.floats(0, 1, exclude_max=True, allow_subnormal=False))
@example(where=0.9989109239341515)  # in what fills up the block behind a member
def test_a_truncated_or_longer_shard_is_noticed(written: tuple[Path, bytes, Shard], where: float) -> None:
    path, content, shard = written
    with pytest.raises(CorruptShardError, match="train-00000.tar is damaged at byte") as caught:
        read_shard(path, content[: int(where * len(content))], shard)
    assert caught.value.offset is not None and caught.value.offset <= int(where * len(content))
    with pytest.raises(CorruptShardError, match="it has .* bytes, not"):
        read_shard(path, content + b"x", shard)


@pytest.mark.parametrize(
    "header",
    [
        "{'descr': '|u1', 'fortran_order': False, 'shape': (1000000000000,)}",
        "{'descr': '|O', 'fortran_order': False, 'shape': (1,)}",
        "{'descr': '<i8', 'fortran_order': False, 'shape': (1,)}",
    ],
)
def test_a_forged_array_allocates_nothing(header: str) -> None:
    text = header.encode().ljust(117) + b"\n"
    body = b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text + bytes(8)
    with pytest.raises(CorruptShardError, match="its header says|damaged at byte 0"):
        read_shard("x.tar", tar_of(("000000.tokens.npy", body)))


@pytest.mark.parametrize("kind", [tarfile.XHDTYPE, tarfile.GNUTYPE_LONGNAME, tarfile.SYMTYPE, tarfile.GNUTYPE_SPARSE])
def test_a_shard_has_regular_files_alone(kind: bytes) -> None:
    """Headers that describe others may take a time to read that grows with their square."""
    head = tarfile.TarInfo("000000.tokens.npy")
    head.type, head.size = kind, 1 << 20
    with pytest.raises(CorruptShardError, match="is damaged at byte 0: .* no regular file"):
        read_shard("x.tar", head.tobuf() + (1 << 20) * b"1" + bytes(1024))
