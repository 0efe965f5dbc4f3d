"""Stage `neighbours`: queries to the indexes of a run. `pipeline.run.spaces.probe` documents the kinds of queries."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Literal

from pipeline.config import ConfigError, Options, Phase
from pipeline.run.index import SearchResults, check_chunks
from pipeline.run.run_directory import RunFolder
from pipeline.run.spaces.probe import Model, Probe

log = logging.getLogger(__name__)


@dataclass(kw_only=True)
class IndexQuery:
    """Query to an index.

    Attributes:
        space: `chunks` finds chunks similar to a query. `contexts` finds positions similar to the end of a text.
            `predictions` finds chunks similar to those that the model expects after a text.
        queries: chunks or texts. If there are none, `chunks` uses frequent chunks of the corpus.
        like: chunks to add up, instead of `queries`.
        minus: chunks to subtract.
        plus: further chunks to add.
        count: neighbours of each query; None: eight, or as many as there are.
        min_count: minimum count of a chunk in the results; None: the threshold of known chunks.
        refresh: build the index first if it is missing, damaged or of another checkpoint.
    """

    space: Literal["chunks", "contexts", "predictions"] = "chunks"
    queries: Sequence[str | bytes] = ()
    like: Sequence[str | bytes] = field(default_factory=list)
    minus: Sequence[str | bytes] = field(default_factory=list)
    plus: Sequence[str | bytes] = field(default_factory=list)
    count: int | None = None
    min_count: int | None = None
    refresh: bool = False


def find_neighbours(options: Options, queries: Sequence[str | bytes] = (), count: int | None = None) -> SearchResults:
    """Find the chunks of the index nearest to each query; see `pipeline.probe.neighbours.query_index`."""
    return query_index(options, IndexQuery(queries=queries, count=count))


def query_index(options: Options, question: IndexQuery) -> SearchResults:
    """Answer a query. Chunks of the corpus are looked up in the index; the model is opened only for other queries.

    Raises:
        ConfigError: the model has no such space, or the query is invalid.
        FileNotFoundError: the run has no such index yet.
        ValueError: a query is invalid, or the index is damaged or of another checkpoint.
    """
    if question.space != "contexts":
        check_chunks(options)
    elif question.min_count is not None:
        raise ConfigError("--min-count is of chunks: a place in the text is there once")
    summed = [*question.like, *question.minus, *question.plus]
    if question.space != "chunks" and not question.queries:
        raise ConfigError(f"{question.space} are asked for by texts: give one")
    folder = RunFolder.from_options(options)
    folder.check_unchanged(options)
    asked = options.evaluate.stage
    probe = Probe(folder, folder.checkpoint_digest(asked) if asked else None, _cached_opener(folder, options))
    if question.refresh:
        _refresh_index(options, probe, question.space)
    if summed:
        return probe.analogy(question.like, question.minus, question.plus, question.count, question.min_count)
    if question.space == "contexts":
        return probe.contexts(*question.queries, count=question.count)
    told = probe.expected if question.space == "predictions" else probe.neighbours
    return told(*question.queries, count=question.count, min_count=question.min_count)


def _cached_opener(folder: RunFolder, options: Options) -> Callable[[Phase], Model]:
    @cache
    def opened(stage: Phase) -> Model:
        from pipeline.run.opened import Run

        return Run(folder, replace(options, evaluate=replace(options.evaluate, stage=stage)))

    return opened


def _refresh_index(options: Options, probe: Probe, space: Literal["chunks", "contexts", "predictions"]) -> None:
    """Build the index of the queried space unless it can be opened."""
    try:
        _ = probe.places if space == "contexts" else probe.index
    except (FileNotFoundError, ValueError) as error:
        from pipeline.probe.index import build_index

        log.info("--refresh: %s", error)
        build_index(replace(options, index=replace(options.index, space=space)))
