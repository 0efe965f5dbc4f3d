"""Computation of all figures of an analysis. Whatever cannot be computed is noted."""

import logging
import os

import numpy as np

from pipeline.analysis import distributional, geometry, passages
from pipeline.analysis import intrinsic as checks
from pipeline.analysis.dataset import AnalysisData, embed_chunks
from pipeline.analysis.drift import measure_drift
from pipeline.config import Options
from pipeline.reporting.analysis import describe_findings
from pipeline.run.analysis import Agreement, Analysis, ByLayer, Classes, Drift, Intrinsic
from pipeline.run.files import Evaluation, Part, read_as
from pipeline.run.opened import Run
from pipeline.run.run_directory import format_command, stage_overrides

log = logging.getLogger(__name__)
_CONTEXTS, _BAND, _QUERIES, _NEAREST = 500, 2000, 300, 10
_FEWEST = 3 * _NEAREST  # chunks needed to compare use


def compute_analysis(
    options: Options, made: AnalysisData, before: Run | None, folder: str, maps: list[str]
) -> Analysis:
    """Compute the analysis without its pictures.

    Args:
        options: options of the run.
        made: chunks, embeddings and contexts of the run.
        before: run whose checkpoint drift is measured from, or None.
        folder: folder that the result is written to.
        maps: names of the maps.
    """
    notes, run = list(made.notes), made.run
    agreement, classes, intrinsic = _analyse_use(options, made, notes)
    found = Analysis(
        folder=folder,
        run=options.name,
        stage=run.phase,
        step=run.step,
        checkpoint=run.digest,
        fallback=run.checkpoint.fallback,
        split=options.analyse.split,
        chunks=len(made.chunks),
        least=made.every.least,
        width=made.vectors.shape[1],
        agreement=agreement,
        classes=classes,
        intrinsic=intrinsic,
        loss=_read_loss_by_frequency(run, notes),
        norms=geometry.measure_norms(made.vectors, made.counts),
        cloud=geometry.measure_spread(made.vectors),
        drift=_measure_drift_from(made, before, notes),
        passages=_compare_passages(options, run, notes),
        maps=maps,
        notes=notes,
    )
    found.findings = describe_findings(found)
    return found


def _analyse_use(
    options: Options, made: AnalysisData, notes: list[str]
) -> tuple[list[Agreement], Classes | None, Intrinsic | None]:
    """Compute agreement by frequency band, class information and intrinsic checks, which all need contexts."""
    size = len(made.chunks)
    if size < _FEWEST:
        notes.append(f"use and intrinsic checks are left out: {size} chunks are too few")
        return [], None, None
    counted = distributional.positive_pmi(distributional.count_contexts(made.stream, size, _CONTEXTS))
    small = distributional.reduce_dimensions(counted, min(made.vectors.shape[1], counted.shape[1]))
    bands = [slice(0, min(_BAND, size)), *([slice(size - _BAND, size)] if size >= 2 * _BAND else [])]
    agreement = [
        distributional.measure_agreement(
            made.centred, counted, made.chunks, made.counts, made.labels, band, _QUERIES, _NEAREST, made.pixels
        )
        for band in bands
    ]
    by_use = geometry.cluster_directions(small, options.analyse.clusters, options.seed)
    classes = distributional.measure_class_information(
        made.stream, made.clusters, by_use, made.chunks, made.counts, options.seed
    )
    if made.pixels:
        notes.append("intrinsic checks are of words: there are none for pixels")
        return agreement, classes, None
    return agreement, classes, _run_intrinsic_checks(options, made, small, notes)


def _run_intrinsic_checks(
    options: Options, made: AnalysisData, small: np.ndarray, notes: list[str]
) -> Intrinsic | None:
    """Run the intrinsic checks on the model and the baselines; `small` holds the reduced context vectors."""
    words = checks.index_words(made.chunks)
    rows = np.array(list(words.values()), int)
    spaces = {checks.MODEL: made.centred[rows], checks.WHOLE: made.vectors[rows], checks.COUNTED: small[rows]}
    if options.analyse.skip_gram:
        learned = checks.skip_gram(made.stream, len(made.chunks), min(100, small.shape[1]), options.seed)
        if learned is None:
            notes.append("the skip-gram is left out: gensim is not installed (pip install 'haed[baselines]')")
        else:
            spaces[checks.SKIP_GRAM] = learned[rows]
    places = {word: place for place, word in enumerate(words)}
    found = checks.measure_precision(places, checks.neighbour_finders([made.chunks[row] for row in rows], spaces))
    if found is None:
        notes.append("intrinsic checks are left out: the corpus has too few of the words that are asked for")
    else:
        notes += [f"intrinsic checks left out: {each}" for each in found.left_out]
    return found


def _read_loss_by_frequency(run: Run, notes: list[str]) -> list[Part]:
    """Read the bits by frequency that `haed evaluate` measured, or note why there are none."""
    path = run.folder.path / "evaluation.json"
    words = ("evaluate.breakdown=true", *stage_overrides(run.options.evaluate.stage))
    again = f"run `{format_command('evaluate', run.folder, *words)}` first"
    if not os.path.lexists(path):
        notes.append(f"loss by frequency is left out: {again}")
        return []
    found = read_as(Evaluation, path)
    if found.checkpoint != run.digest or found.breakdown is None:
        other = "of another checkpoint" if found.checkpoint != run.digest else "without its breakdown"
        notes.append(f"loss by frequency is left out: evaluation.json is {other}; {again}")
        return []
    return found.breakdown.by_frequency


def _compare_passages(options: Options, run: Run, notes: list[str]) -> ByLayer | None:
    """Compare the nearest passages layer by layer, at places drawn from the whole split."""
    limits = options.analyse
    if not limits.passages:
        return None
    log.info("comparing passages, layer by layer")
    places = passages.sample_places(run, limits.split, limits.passages, options.seed)
    if places is None:
        notes.append(
            "passages by layer are left out: fewer than two windows of the split were drawn (analyse.passages)"
        )
        return None
    return passages.compare_layers(places, options.seed)


def _measure_drift_from(made: AnalysisData, before: Run | None, notes: list[str]) -> Drift | None:
    if before is None:
        notes.append(
            "drift is left out: there is no other checkpoint to measure it from (analyse.against=RUN names one)"
        )
        return None
    source = embed_chunks(before, made.every, len(made.chunks))
    first, second = (f"{each.folder.path.name} {each.phase} step {each.step:,}" for each in (before, made.run))
    return measure_drift(source, made.vectors, made.labels, first, second)
