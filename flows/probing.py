"""The flows that query a trained run: nearest neighbours, next chunks, and analysis of the embeddings."""

from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field

from data.checked import PICTURE, read_bytes
from data.chunkers import Chunker
from flows.artifacts import post_markdown, post_table, run_artifact_key
from flows.forms import Run, Split, Words, stage_flow
from flows.reading import describe_checkpoint, describe_origin, load_tagged_options
from pipeline.console import escape_control_characters, markdown_code, markdown_text
from pipeline.run.analysis import Analysis
from pipeline.run.files import read_as
from pipeline.run.index.chunk_index import ChunkIndex
from pipeline.run.index.queries import PIXELS, Passage, QueryResult
from pipeline.run.index.storage import IndexMetadata, IndexSummary, space_folder
from pipeline.run.opened import NextChunks
from pipeline.run.run_directory import RunFolder


@stage_flow("next", lambda found: f"after {len(found)} prompts")
def next_chunks(
    run: Run,
    prompts: Words = [],  # noqa: B006
    count: Annotated[int, Field(ge=1, le=1000)] = 10,
    overrides: Words = [],  # noqa: B006
) -> list[NextChunks]:
    """Compute the likeliest next chunks after each prompt, with their probabilities, as a table.

    Args:
        run: a name under runs, or a folder
        prompts: texts, where trailing white space matters; none: the start of a document
        count: chunks after each prompt
        overrides: options to change, each key=value as on the command line, such as evaluate.likelihood=decoder
    """
    from pipeline.inference import next_chunks as run_stage
    from pipeline.inference import prediction_heading, prediction_rows

    options = load_tagged_options(run, overrides, "next")
    found = run_stage(options, prompts, count)
    table = [{"prompt": prediction_heading(item)} | row for item in found for row in prediction_rows(item)]
    post_table(table, run_artifact_key("next", options), f"next chunks, by {describe_checkpoint(options)}")
    return found


def _summarize_index(found: IndexSummary) -> str:
    from pipeline.run.index.build import describe_index

    return "; ".join([*describe_index(found).splitlines(), f"of {found.split}, {found.stage} step {found.step:,}"])


@stage_flow("index", _summarize_index)
def index(
    run: Run,
    space: Literal["chunks", "contexts"] | None = None,
    split: Split = None,
    overrides: Words = [],  # noqa: B006
) -> IndexSummary:
    """Build a FAISS index of the embeddings of all distinct chunks, or of the model's states throughout the text.

    Args:
        run: a name under runs, or a folder
        space: chunks, or contexts, which are positions in the text; empty: as in the run, chunks by default
        split: the split to index; empty: as in the run, train by default
        overrides: options to change, each key=value as on the command line, such as index.kind=hnsw
    """
    from pipeline.run.index.build import build_index as run_stage

    return run_stage(load_tagged_options(run, overrides, "index", index__split=split, index__space=space))


@stage_flow("neighbours", lambda found: f"of {len(found)} queries")
def neighbours(
    run: Run,
    queries: Words = [],  # noqa: B006
    space: Literal["chunks", "contexts", "predictions"] = "chunks",
    count: Annotated[int | None, Field(ge=1, le=1000)] = None,
    min_count: Annotated[int | None, Field(ge=1, le=10**12)] = None,
    overrides: Words = [],  # noqa: B006
) -> list[QueryResult]:
    """Find the nearest chunks or passages in an index, as a table, and as an image if they are chunks of pixels.

    Args:
        run: a name under runs, or a folder
        queries: chunks, or texts for the other spaces, where trailing white space matters; for images, colours such as
            #4080c0, or PICTURE:CHUNK, counted from 0; none: chunks of the corpus
        space: chunks similar to a query, contexts similar to the end of a text, or predictions of chunks after a text
        count: neighbours of each query; empty: 8; fewer if there are no more, which is noted
        min_count: least occurrences of a chunk in the results; empty: those of a known chunk; 1: all
        overrides: options to change, each key=value as on the command line, such as runs_dir=/data/runs
    """
    from pipeline.inference import IndexQuery, query_index
    from pipeline.reporting import plots
    from pipeline.reporting.rendering import data_uri

    options = load_tagged_options(run, overrides, "neighbours")
    asked = IndexQuery(space=space, queries=[query for query in queries if query], count=count, min_count=min_count)
    found = query_index(options, asked)
    folder = RunFolder.from_options(options)
    meta = read_as(IndexMetadata, space_folder(folder, "contexts" if space == "contexts" else "chunks") / "meta.json")
    nothing = "" if asked.queries else "nothing was asked, so these are frequent chunks; "
    about = f"{nothing}{found.about}; by {describe_origin(options, meta.stage, meta.step, meta.checkpoint)}"
    if space == "contexts":
        rows = [
            _passage_row(item, each, found.score)
            for item in found
            for each in item.neighbours
            if isinstance(each, Passage)
        ]
    else:
        opened, chunker = ChunkIndex.open(folder, meta.checkpoint), folder.load_chunker()
        rows = [_query_row(item, opened, chunker, found.score, space == "chunks") for item in found]
    post_table(rows, run_artifact_key("neighbours", options), f"neighbours: {about}")
    if drawn := plots.draw_neighbours(found):
        text = f"![queries and their neighbours, with scores]({data_uri(drawn)})"
        post_markdown(
            f"{text}\n\n{markdown_text(about)}", run_artifact_key("neighbours-drawn", options), f"neighbours: {about}"
        )
    return list(found)


@stage_flow("analyse", lambda found: f"{len(found.findings)} findings, {found.stage} step {found.step:,}")
def analyse(run: Run, overrides: Words = []) -> Analysis:  # noqa: B006
    """Analyse the chunk embeddings: use and spelling, intrinsic checks with baselines, drift, a map.

    Args:
        run: a name under runs, or a folder
        overrides: options to change, each key=value as on the command line, such as analyse.against=other
    """
    from pipeline.analysis.stage import analyse_run as run_stage
    from pipeline.reporting.analysis import precision_table
    from pipeline.reporting.rendering import data_uri

    options = load_tagged_options(run, overrides, "analyse")
    found = run_stage(options)
    folder, about = Path(found.folder), describe_origin(options, found.stage, found.step, found.checkpoint)
    if found.intrinsic is not None:
        table = precision_table(found.intrinsic)
        rows = [dict(zip(table.titles, row, strict=True)) for row in table.rows]
        post_table(rows, run_artifact_key("analysis", options), f"precision@10 of words of a kind, by {about}")
    sentences = [*found.findings, *(f"note: {note}" for note in found.notes)]
    told = "\n".join(f"- {markdown_text(sentence)}" for sentence in sentences)
    pictures = "\n\n".join(
        f"![{markdown_text(path.stem)}]({data_uri(read_bytes(path, PICTURE))})"
        for path in (folder / name for name in found.files)
        if path.suffix == ".png"
    )
    place = f"The map to zoom and search: {markdown_code(str(folder.resolve() / 'map.html'))}"
    text = f"{told}\n\n{markdown_text(about)}\n\n{place}\n\n{pictures}\n"
    post_markdown(text, run_artifact_key("analysis-drawn", options), f"what the embeddings know, by {about}")
    return found


def _passage_row(item: QueryResult, near: Passage, score: str) -> dict[str, Any]:
    """Return the table row of a passage that is similar to the end of a query text."""
    where = {
        "document": near.name,
        "byte": near.offset,
        "before": escape_control_characters(near.text),
        "after": escape_control_characters(near.after),
    }
    return {"query": escape_control_characters(item.query), score: round(near.score, 3)} | where


def _query_row(item: QueryResult, index: ChunkIndex, chunker: Chunker, score: str, is_chunk: bool) -> dict[str, Any]:
    """Return the table row of a query: its count in the indexed split, its neighbours, and notes.

    A note says if the query is not indexed, or was cut into several chunks. A query that is not a chunk itself is a
    text; its neighbours are the chunks expected after it.
    """
    near = " · ".join(f"{escape_control_characters(n.text)} {n.score:.3f} ×{n.count:,}" for n in item.neighbours)
    if not is_chunk:
        return {"query": escape_control_characters(item.query), f"{score}, count": near}
    chunk = bytes.fromhex(item.hex)
    row = index.find_row(chunk)
    notes = [f"no chunk of the index ({index.meta.split})"] if row is None else []
    if chunker.name != PIXELS:
        ends = np.cumsum(chunker.split(chunk)[1]).tolist()
        parts = [chunk[begin:end] for begin, end in pairwise([0, *ends])]
        if len(parts) > 1:
            cut = ", ".join(escape_control_characters(part.decode(errors="backslashreplace")) for part in parts)
            notes.append(f"{len(parts)} chunks ({cut}), taken for one")
    own = 0 if row is None else int(index.chunks.counts[row])
    # The UI does not wrap lines: what is long comes last.
    return {
        "query": escape_control_characters(item.query),
        "count": own,
        f"{score}, count": near,
        "note": "; ".join(notes),
    }
