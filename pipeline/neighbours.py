"""Questions to the index of a run: which chunks have embeddings near to a query's.

A query of a text is a chunk. One of pictures is a colour such as `#4080c0`, which stands for a chunk of that colour, or the
values of a whole chunk in hexadecimal, which answers give too. Without queries, chunks of the corpus are taken, from the
most frequent one to a rare one.
"""

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from pipeline.index import normalised, open_index
from pipeline.runs import RunFolder

if TYPE_CHECKING:
    from pipeline.inference import Run

OWN_QUERIES = 6
PIXELS = "pixels"


def neighbours(
    folder: RunFolder,
    queries: Sequence[str | bytes] = (),
    count: int = 8,
    run: "Run | None" = None,
    strict: bool = True,
) -> list[dict[str, Any]]:
    """The chunks whose embeddings have the highest cosine with each query's, the query itself left out.

    A query that the corpus has is looked up without the model; the encoder embeds any other.

    Args:
        folder: of the run.
        queries: see above.
        count: neighbours of each.
        run: the run, if it is open already.
        strict: false leaves queries out that are no chunks of this run, meant for another kind of data.

    Returns:
        `[{"query", "hex", "neighbours": [{"text", "hex", "score", "count"}]}]`; `hex` are the exact bytes.

    Raises:
        FileNotFoundError: the run has no index yet.
        ValueError: a query is empty or longer than a chunk or no colour, or the index is damaged.
    """
    built, table, chunker = open_index(folder)
    k = table["tokens"].shape[1]
    chunks = [row.tobytes()[:length] for row, length in zip(table["tokens"], table["lengths"], strict=True)]
    known = {chunk: i for i, chunk in enumerate(chunks)}
    asked = []
    for query in queries:
        try:
            asked.append(parse(query, chunker, k))
        except ValueError:
            if strict:
                raise
    if not asked:
        ranks = np.unique(np.geomspace(1, len(chunks), OWN_QUERIES).astype(int)) - 1
        asked = [chunks[row] for row in np.argsort(-table["counts"].astype(np.int64), kind="stable")[ranks]]
    strange = [query for query in asked if query not in known]
    if strange:
        from pipeline.inference import Run

        run = run or Run(folder)
        embedded = dict(zip(strange, normalised(run.embed(strange)), strict=True))
    vectors = np.stack([built.reconstruct(known[q]) if q in known else embedded[q] for q in asked])
    scores, rows = built.search(vectors, min(count + 1, built.ntotal))

    def named(query: bytes, scores: np.ndarray, rows: np.ndarray) -> dict[str, Any]:
        found = [
            {"text": spell(chunks[row], chunker), "hex": chunks[row].hex(), "score": score, "count": often}
            for score, row, often in zip(scores.tolist(), rows.tolist(), table["counts"][rows].tolist(), strict=True)
            if row != known.get(query)
        ]
        return {"query": spell(query, chunker), "hex": query.hex(), "neighbours": found[:count]}

    return [named(*item) for item in zip(asked, scores, rows, strict=True)]


def parse(query: str | bytes, chunker: str, k: int) -> bytes:
    """The chunk that a query means.

    Raises:
        ValueError: it has not 1 to `k` bytes, or the chunks are of pixels and it is neither a colour nor a chunk of them.
    """
    raw = query.encode() if isinstance(query, str) else query
    shown = raw.decode(errors="replace")
    if chunker != PIXELS:
        if not 1 <= len(raw) <= k:
            raise ValueError(f"the query {shown!r} has {len(raw)} bytes; a chunk has 1 to {k}")
        return raw
    digits = re.sub(r"[#,\s]", "", shown)
    if re.fullmatch(r"[0-9a-fA-F]+", digits) and len(digits) in (6, 2 * k):
        pixels = bytes.fromhex(digits)
        return (pixels * k)[:k] if len(digits) == 6 else pixels
    raise ValueError(
        f"the query {shown!r} is no chunk of pixels: give a colour such as #4080c0, or {k} values in hexadecimal; "
        "without queries chunks of the corpus are taken"
    )


def spell(chunk: bytes, chunker: str) -> str:
    """A chunk for people: text, or the colours of its pixels."""
    if chunker != PIXELS:
        return chunk.decode(errors="backslashreplace")
    return ",".join(f"#{chunk[i : i + 3].hex()}" for i in range(0, len(chunk), 3))


def picture(found: list[dict[str, Any]]) -> bytes | None:
    """Queries and neighbours drawn, as PNG bytes, if they are chunks of whole pixels."""
    from pipeline import plots

    chunks = [(item["query"], bytes.fromhex(item["hex"])) for item in found]
    if any(shown != spell(chunk, PIXELS) or len(chunk) % 3 for shown, chunk in chunks):
        return None
    rows = [
        [
            (bytes.fromhex(item["hex"]), "query"),
            *((bytes.fromhex(n["hex"]), f"{n['score']:.3f}") for n in item["neighbours"]),
        ]
        for item in found
    ]
    return plots.strips(rows)


def table(found: list[dict[str, Any]]) -> str:
    """Neighbours as text, with white space made visible."""
    lines = []
    for item in found:
        lines.append(f"{visible(item['query'])}")
        lines += [f"  {n['score']:6.3f}  {n['count']:>9,}  {visible(n['text'])}" for n in item["neighbours"]]
    return "\n".join(lines)


def visible(text: str) -> str:
    """A chunk with its white space and control characters made visible."""
    return printable(text).replace(" ", "␣").replace("\n", "↵").replace("\t", "⇥").replace("\r", "␍")


def printable(text: str) -> str:
    """Text with control characters as escapes, all but white space; some databases and pages take no others."""
    return re.sub(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]", lambda found: f"\\x{ord(found[0]):02x}", text)
