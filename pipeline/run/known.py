"""The known chunks of a mixture: which there are, and as a checkpoint embeds them; the folder `known/` of a run.

`chunks.safetensors` has the most frequent chunks of the train split and their counts; it is also kept beside the shards, since
all runs have it from there. `keys.safetensors` has what the IEM score needs of them, in bfloat16, and the digest of the
checkpoint that embedded them. All are caches: one that is damaged, of another corpus or of another checkpoint is not used but
made anew, and the log says so. Nothing of any other split is in them.
"""

import hashlib
import logging
from pathlib import Path

import torch
from safetensors.torch import save
from torch import Tensor

from data.corpus import Corpus
from data.distinct import distinct_chunks, documents_with
from data.durable import make_folders, write_atomically
from haed.chunk.known import Known, Lexicon
from haed.chunk.model import HAED
from haed.chunk.packing import Chunks
from pipeline.run.checkpoints import Saved
from pipeline.run.folder import RunFolder
from pipeline.run.tensors import read_metadata, read_tensors

log = logging.getLogger(__name__)
CHUNKS, KEYS = "known/chunks.safetensors", "known/keys.safetensors"


def lexicon(corpus: Corpus, most: int) -> Lexicon:
    """The known chunks: the most frequent ones of a corpus's train split, so many at most, and their counts there."""
    return _lexicon(_chunks(corpus, most))


def remember(folder: RunFolder, corpus: Corpus, most: int) -> None:
    """Keeps them in the folder of a run, which is then asked what its model knows wherever it is moved."""
    _keep(folder, CHUNKS, _chunks(corpus, most), _told(corpus.digest, most))


def known(folder: RunFolder, system: HAED, most: int, checkpoint: Saved, precision: str) -> Known:
    """The known chunks as a checkpoint embeds them.

    Args:
        folder: of the run.
        system: the checkpoint's, in evaluation mode.
        most: so many at most.
        checkpoint: where it says what it is.
        precision: of the products by which the system embeds them.

    Raises:
        FileNotFoundError: nothing tells the known chunks: neither the run, nor its shards are there.
    """
    told = _told(checkpoint.identity["corpus"], most)
    chunks = _read(folder.path / CHUNKS, told)
    if chunks is None:
        chunks = _chunks(folder.corpus(), most)
        _keep(folder, CHUNKS, chunks, told)
    found = _lexicon(chunks)
    told = {"checkpoint": checkpoint.digest, "chunks": str(len(found)), "precision": precision}
    kept = _read(folder.path / KEYS, told)
    if kept is None:
        log.info("embedding %s known chunks", f"{len(found):,}")
        made = system.embedded(found, torch.bfloat16)
        kept = {"keys": made.keys.to(torch.bfloat16).cpu(), "bias": made.bias.cpu()}
        _keep(folder, KEYS, kept, told)
    return Known(found, kept["keys"].to(system.device), kept["bias"].to(system.device))


def _told(corpus: str, most: int) -> dict[str, str]:
    return {"corpus": corpus, "most": str(most), "holds": "counts documents lengths tokens, whole"}


def _chunks(corpus: Corpus, most: int) -> dict[str, Tensor]:
    path, told = corpus.folder / f"known-{most}.safetensors", _told(corpus.digest, most)
    found = _read(path, told)
    if found is None:
        log.info("finding the known chunks: the %s most frequent of the train split at most", f"{most:,}")
        every = distinct_chunks(corpus, "train", most=most)
        if every.left_out:
            log.info("known chunks: %s rarer ones are left to the decoder (model.mixture.known)", f"{every.left_out:,}")
        columns = {name: getattr(every, name) for name in ("tokens", "lengths", "counts")}
        columns["documents"] = documents_with(corpus, "train", every)
        # The decoder of chunks of a fixed size ends none early, so the rest at the end of a document is no outcome.
        whole = every.lengths == corpus.chunker().k if corpus.chunker().fixed else slice(None)
        found = {name: torch.from_numpy(column[whole]).contiguous() for name, column in columns.items()}
        _write(path, found, told)
    return found


def _lexicon(found: dict[str, Tensor]) -> Lexicon:
    return Lexicon(Chunks(found["tokens"].long(), found["lengths"].long()), found["counts"], found["documents"])


def _read(path: Path, told: dict[str, str]) -> dict[str, Tensor] | None:
    """The tensors of a cache, if it says of itself what is asked for and is whole; else None."""
    try:
        said, found = read_metadata(path), read_tensors(path)
    except FileNotFoundError:
        return None
    except (ValueError, OSError) as error:
        log.warning("%s; it is made anew", error)
        return None
    if others := [f"{name} {said.get(name)}, now {now}" for name, now in told.items() if said.get(name) != now]:
        log.info("%s is stale: %s", path, "; ".join(others))
        return None
    if said.get("sha256") != _sha256(found):
        log.warning("%s is damaged (its sha256 is another): it is made anew", path)
        return None
    return found


def _keep(folder: RunFolder, name: str, tensors: dict[str, Tensor], told: dict[str, str]) -> None:
    """Writes a cache into a run; one that was removed is not made anew."""
    path = folder.path / name
    try:
        make_folders(path.parent, within=folder.path)
    except OSError as error:
        _say_unkept(path, error)
        return
    _write(path, tensors, told)


def _write(path: Path, tensors: dict[str, Tensor], told: dict[str, str]) -> None:
    try:
        write_atomically(path, save(tensors, told | {"sha256": _sha256(tensors)}))
    except OSError as error:
        _say_unkept(path, error)


def _say_unkept(path: Path, error: OSError) -> None:
    """Warns: what is asked is answered all the same, so it is no error."""
    log.warning("%s could not be written: %s; it is made anew each time", path, error.strerror or error)


def _sha256(tensors: dict[str, Tensor]) -> str:
    found = hashlib.sha256()
    for name in sorted(tensors):
        found.update(f"{name} {tensors[name].dtype} {tuple(tensors[name].shape)} ".encode())
        found.update(tensors[name].contiguous().view(torch.uint8).numpy().data)
    return found.hexdigest()
