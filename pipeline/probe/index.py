"""The stage `index`: embeddings of the distinct chunks of a split, into an index as FAISS writes it; see `pipeline.run.index`."""

import hashlib
import io
import logging
from dataclasses import asdict

import numpy as np

from data.durable import write_atomically
from pipeline.options import Options
from pipeline.run.folder import RunFolder
from pipeline.run.index import INDEX, META, TABLE, Indexed, Meta, check_chunks, normalised

log = logging.getLogger(__name__)
_AT_ONCE = 8192
_FREQUENT, _ENOUGH = 10, 1000  # occurrences, chunks


def index(options: Options) -> Indexed:
    """Embeds the distinct chunks of a split of the run's corpus, the most frequent first, and writes the index.

    Raises:
        ConfigError: the model embeds no chunk by itself.
        FileNotFoundError: no such shards, or nothing was trained.
    """
    check_chunks(options)
    import faiss

    from data.distinct import distinct_chunks
    from pipeline.run.device import release_memory
    from pipeline.run.opened import Run

    folder = RunFolder.of(options)
    run, limits = Run(folder, options), options.index
    least = limits.min_count or 1
    found = distinct_chunks(folder.corpus(), limits.split, most=limits.max_chunks, at_least=least)
    tokens, lengths, counts = found.tokens, found.lengths, found.counts
    frequent = int((counts >= _FREQUENT).sum())
    if limits.min_count is None and run.options.model.encoder.rows and _ENOUGH <= frequent < len(counts):
        log.info(
            "%s chunks that occur less than %d times are left out, as they share rows of the encoder's table with frequent ones: "
            "index.min_count=1 has them too",
            f"{len(counts) - frequent + found.left_out:,}",
            _FREQUENT,
        )
        least, found.left_out = _FREQUENT, 0
        tokens, lengths, counts = tokens[:frequent], lengths[:frequent], counts[:frequent]
    if not len(counts):
        raise ValueError(f"no chunk of the {limits.split} split occurs {least} times: lower index.min_count")
    if found.left_out:
        rest = f"{found.left_out:,} rarer or equally rare ones are left out"
        log.warning("index.max_chunks=%d: of the distinct chunks %s", limits.max_chunks, rest)
    width = run.options.model.encoder.width
    built = faiss.IndexFlatIP(width)
    for begin in range(0, len(counts), _AT_ONCE):
        rows = slice(begin, begin + _AT_ONCE)
        built.add(normalised(run.embed_rows(tokens[rows], lengths[rows])))
    buffer = io.BytesIO()
    np.savez(buffer, tokens=tokens, lengths=lengths, counts=counts)
    files = {INDEX: faiss.serialize_index(built).tobytes(), TABLE: buffer.getvalue()}
    (folder.path / "index").mkdir(exist_ok=True)
    for name, content in files.items():
        write_atomically(folder.path / "index" / name, content)
    result = Indexed(
        folder=str(folder.path / "index"),
        chunks=len(counts),
        width=width,
        split=limits.split,
        stage=run.phase,
        step=run.step,
        left_out=found.left_out,
    )
    meta = Meta(
        **asdict(result),
        sha256={name: hashlib.sha256(content).hexdigest() for name, content in files.items()},
        checkpoint=run.digest,
        least=least,
        min_count=limits.min_count,
        max_chunks=limits.max_chunks,
        asked_stage=options.evaluate.stage,
        chunker=run.chunker.name,
    )
    folder.write_json(f"index/{META}", asdict(meta))
    del files, built, buffer
    release_memory()
    return result
