"""Stage `analyse`: metrics, plots and a map of a run's embeddings, written to its folder `analysis/`.

It needs no index. The frequent chunks of the split are embedded again by the selected checkpoint, which takes
seconds. So two checkpoints can be compared, and nothing can be stale. Whatever cannot be computed is noted.
"""

import errno
import logging
import os
import shutil
import time
from dataclasses import asdict
from pathlib import Path

import numpy as np

from data.filesystem import make_folders, write_atomically
from haed.options import SYSTEMS
from pipeline.analysis import distributional, geometry, map, passages, plots
from pipeline.analysis import intrinsic as checks
from pipeline.analysis.dataset import AnalysisData, label_chunks, load_analysis_data
from pipeline.analysis.geometry import find_nearest, measure_drift, normalise_rows
from pipeline.analysis.map import render_map_page
from pipeline.config import ConfigError, Options
from pipeline.console import format_error
from pipeline.reporting.findings import ANALYSIS, MAP, PICTURES, RESULT, describe_findings
from pipeline.run.analysis_results import Agreement, Analysis, ByLayer, Classes, Drift, Intrinsic
from pipeline.run.device import release_memory
from pipeline.run.files import Evaluation, Part, read_as
from pipeline.run.opened import Run
from pipeline.run.run_directory import RunFolder, guard_results, stage_overrides
from pipeline.suggestions import format_command

log = logging.getLogger(__name__)
_ON_MAP = 8  # neighbours of a point
_CONTEXTS, _BAND, _QUERIES, _NEAREST = 500, 2000, 300, 10
_FEWEST = 3 * _NEAREST  # chunks needed to compare use


def _compute_analysis(
    options: Options, dataset: AnalysisData, before: Run | str, folder: str, maps: list[str]
) -> Analysis:
    """Compute the analysis without its pictures; `before` is the run that drift is measured from, or why there is none."""
    notes, run = list(dataset.notes), dataset.run
    agreement, classes, intrinsic = _analyse_use(options, dataset, notes)
    analysis = Analysis(
        folder=folder,
        run=options.name,
        stage=run.phase,
        step=run.step,
        checkpoint=run.digest,
        fallback=run.checkpoint.fallback,
        split=options.analyse.split,
        chunks=len(dataset.chunks),
        least=int(dataset.counts[-1]),
        width=dataset.vectors.shape[1],
        agreement=agreement,
        classes=classes,
        intrinsic=intrinsic,
        loss=_read_loss_by_frequency(run, notes),
        norms=geometry.measure_norms(dataset.vectors, dataset.counts),
        cloud=geometry.measure_spread(dataset.vectors),
        drift=_measure_drift_from(dataset, before, notes),
        passages=_compare_passages(options, run, notes),
        maps=maps,
        notes=notes,
    )
    analysis.findings = describe_findings(analysis)
    return analysis


def _analyse_use(
    options: Options, dataset: AnalysisData, notes: list[str]
) -> tuple[list[Agreement], Classes | None, Intrinsic | None]:
    """Compute agreement by frequency band, class information and intrinsic checks, which all need contexts."""
    size, of_values = len(dataset.chunks), dataset.run.of_values
    if size < _FEWEST:
        notes.append(f"use and intrinsic checks are left out: {size} chunks are too few")
        return [], None, None
    counted = distributional.positive_pmi(distributional.count_contexts(dataset.stream, size, _CONTEXTS))
    small = distributional.reduce_dimensions(counted, min(dataset.vectors.shape[1], counted.shape[1]))
    bands = [slice(0, min(_BAND, size)), *([slice(size - _BAND, size)] if size >= 2 * _BAND else [])]
    agreement = [
        distributional.measure_agreement(
            dataset.centred,
            counted,
            dataset.chunks,
            dataset.counts,
            dataset.labels,
            band,
            _QUERIES,
            _NEAREST,
            of_values,
        )
        for band in bands
    ]
    by_use = geometry.cluster_directions(small, options.analyse.clusters, options.seed)
    classes = distributional.measure_class_information(
        dataset.stream, dataset.clusters, by_use, dataset.chunks, dataset.counts, options.seed
    )
    if of_values:
        notes.append("intrinsic checks need words, so there are none for pictures and sound")
        return agreement, classes, None
    return agreement, classes, _run_intrinsic_checks(options, dataset, small, notes)


def _run_intrinsic_checks(
    options: Options, dataset: AnalysisData, small: np.ndarray, notes: list[str]
) -> Intrinsic | None:
    """Run the intrinsic checks on the model and the baselines; `small` holds the reduced context vectors."""
    words = checks.index_words(dataset.chunks)
    rows = np.array(list(words.values()), int)
    spaces = {checks.MODEL: dataset.centred[rows], checks.WHOLE: dataset.vectors[rows], checks.COUNTED: small[rows]}
    if options.analyse.skip_gram:
        learned = checks.skip_gram(dataset.stream, len(dataset.chunks), min(100, small.shape[1]), options.seed)
        if learned is None:
            notes.append("the skip-gram is left out because gensim is not installed. Run pip install 'haed[baselines]'")
        else:
            spaces[checks.SKIP_GRAM] = learned[rows]
    result = checks.measure_precision(list(words), [dataset.chunks[row] for row in rows], spaces)
    if result is None:
        notes.append("intrinsic checks are left out: too few of their words are frequent in the corpus")
    else:
        notes += [f"intrinsic checks left out: {each}" for each in result.left_out]
    return result


def _read_loss_by_frequency(run: Run, notes: list[str]) -> list[Part]:
    """Read the bits by frequency that `haed evaluate` measured, or note why there are none."""
    path = run.folder.path / "evaluation.json"
    words = ("evaluate.breakdown=true", *stage_overrides(run.options.evaluate.stage))
    again = f"Run {format_command('evaluate', run.folder.path, *words)} first"
    if not os.path.lexists(path):
        notes.append(f"loss by frequency is left out. {again}")
        return []
    try:
        evaluation = read_as(Evaluation, path)
    except (OSError, ValueError) as error:
        notes.append(f"loss by frequency is left out: {format_error(error)}")
        return []
    if evaluation.checkpoint != run.digest or evaluation.breakdown is None:
        other = "of another checkpoint" if evaluation.checkpoint != run.digest else "without its breakdown"
        notes.append(f"loss by frequency is left out: evaluation.json is {other}. {again}")
        return []
    return evaluation.breakdown.by_frequency


def _compare_passages(options: Options, run: Run, notes: list[str]) -> ByLayer | None:
    limits = options.analyse
    if not limits.passages:
        return None
    log.info("comparing passages, layer by layer")
    if (places := passages.sample_places(run, limits.split, limits.passages, options.seed)) is None:
        notes.append(
            "passages by layer are left out: fewer than two windows of the split were drawn. Raise analyse.passages"
        )
        return None
    return passages.compare_layers(places, options.seed)


def _measure_drift_from(dataset: AnalysisData, before: Run | str, notes: list[str]) -> Drift | None:
    if isinstance(before, str):
        notes.append(f"drift is left out: {before}")
        return None
    rows, size, seed = dataset.every.rows, len(dataset.chunks), dataset.run.options.seed
    source = before.embed_rows(rows.tokens[:size], rows.lengths[:size])
    first, second = (f"{each.folder.path.name} {each.phase} step {each.step:,}" for each in (before, dataset.run))
    try:
        return measure_drift(source, dataset.vectors, dataset.labels, first, second, seed=seed)
    except ValueError as error:
        notes.append(f"drift is left out: {error}")
        return None


@guard_results
def analyse_run(options: Options) -> Analysis:
    """Analyse the embeddings of a run's present checkpoint, or of the checkpoint of `evaluate.stage`.

    Raises:
        ConfigError: the model has no chunk embeddings, or an option cannot be satisfied.
        FileExistsError: something else has the place of the analysis or of one of its files.
        PermissionError: it may not be written.
        FileNotFoundError: no such shards or run, or nothing was trained.
        ValueError: the split has too few chunks, or a file of the run is damaged.
    """
    began, kind, folder = time.perf_counter(), options.model.kind, RunFolder.from_options(options)
    if not SYSTEMS[kind].chunks:
        raise ConfigError(
            f"model.kind={kind} does not embed single chunks, so there are no embeddings to analyse. Use "
            f"{format_command('evaluate', folder.path)}, which breaks down the bits by length and frequency"
        )
    kinds = map.select_projections(options.analyse.map)
    place = folder.path / ANALYSIS
    _check_place(place)
    run = Run(folder, options)
    before = _open_drift_reference(run)
    dataset = load_analysis_data(run, options)
    log.info("comparing neighbours by use and by spelling")
    places = map.project_chunks(dataset.centred, kinds, options.seed)
    analysis = _compute_analysis(options, dataset, before, str(place), list(places))
    log.info("drawing")
    pictures = _draw_pictures(analysis, dataset, places)
    content = {**pictures, MAP: _render_map(options, dataset, places)}
    make_folders(place, within=folder.path)
    (place / RESULT).unlink(missing_ok=True)  # first: a stage that ends early leaves no metrics beside other pictures
    for name in set(PICTURES) - set(content):  # left by an earlier analysis
        (place / name).unlink(missing_ok=True)
    for name, written in content.items():
        write_atomically(place / name, written)
    if (exported := place / "projector").is_symlink():
        exported.unlink()
    shutil.rmtree(exported, ignore_errors=True)
    if options.analyse.projector:
        _export_projector(dataset, options)
    analysis.files = [MAP, *pictures, *(["projector"] if options.analyse.projector else [])]
    analysis.seconds = time.perf_counter() - began
    folder.write_json(f"{ANALYSIS}/{RESULT}", asdict(analysis))
    release_memory()
    return analysis


def _check_place(place: Path) -> None:
    """Raise OSError if the analysis cannot be written, or something else has the place of one of its files."""
    folder = place if place.is_dir() else place.parent
    if folder.is_dir() and not os.access(folder, os.W_OK):  # before an hour's work
        number = errno.EROFS if os.statvfs(folder).f_flag & os.ST_RDONLY else errno.EACCES
        raise OSError(number, os.strerror(number), str(place))
    files = [place / name for name in (RESULT, MAP, *PICTURES)]
    wrong = [place] if place.exists() and not place.is_dir() else [path for path in files if path.is_dir()]
    if wrong:
        kind = "folder, not a file" if wrong[0].is_dir() else "file, not a folder"
        raise FileExistsError(f"{wrong[0]} is a {kind}, so the analysis cannot be written. Move it away")


def draw_map(run: Run) -> None:
    """Write the map of a run's embeddings alone, where an analysis writes it."""
    dataset = load_analysis_data(run, run.options)
    places = map.project_chunks(dataset.centred, map.select_projections(run.options.analyse.map), run.options.seed)
    place = run.folder.path / ANALYSIS
    make_folders(place, within=run.folder.path)
    write_atomically(place / MAP, _render_map(run.options, dataset, places))


def _render_map(options: Options, dataset: AnalysisData, places: dict[str, np.ndarray]) -> bytes:
    run, size, units = dataset.run, len(dataset.chunks), normalise_rows(dataset.centred)
    near = find_nearest(dataset.centred, np.arange(size), min(_ON_MAP, size - 1))
    cosines = np.stack([(units * units[column]).sum(1) for column in near.T], 1)
    points = {
        "labels": dataset.labels,
        "counts": dataset.counts,
        "lengths": np.array([len(chunk) for chunk in dataset.chunks]),
        "clusters": dataset.clusters,
        "near": near,
        "cosines": (100 * cosines).round().astype(int),
        "places": places,
        "pixels": dataset.pixels,
    }
    description = (
        f"{run.phase} step {run.step:,}, checkpoint {run.digest[:12]}, made on {time.strftime('%Y-%m-%d at %H:%M')}: "
        f"the {size:,} most frequent chunks of the {options.analyse.split} split. Lines lead to the "
        "nearest chunks by centred cosine in all dimensions, which may be far apart on the map. Wheel or two fingers: zoom; "
        "drag: move; click: keep; /: search."
    )
    return render_map_page(f"{options.name}: map of embeddings", description, run.digest, points).encode()


def _open_drift_reference(run: Run) -> Run | str:
    """Open the run that drift is measured from: `analyse.against`, or phase one; return it, or why there is neither.

    Raises:
        ConfigError: the run in `analyse.against` embeds no chunks, uses another chunker, or has the same checkpoint.
        OSError, ValueError: the run in `analyse.against` is missing or damaged.
    """
    options, named = run.options, run.options.analyse.against
    absent = "there is no other checkpoint to compare with. Name one with analyse.against=RUN"
    if named is None and run.phase != "finetune":
        return absent
    try:
        other = run.folder.find_first_run(options) if named is None else RunFolder.find(named, options.runs_dir)
        reference_name = str(other.path) if named is None else f"analyse.against={named}"
        reference_options = other.load_options(["evaluate.stage=pretrain"] if named is None else [])
        if not SYSTEMS[reference_options.model.kind].chunks:
            raise ConfigError(
                f"{reference_name} is of model.kind={reference_options.model.kind}, which does not embed single chunks, so there are no "
                "embeddings to compare with. Name another run"
            )
        reference = Run(other, reference_options)
        if (reference.chunker.name, reference.chunker.k) != (run.chunker.name, run.chunker.k):
            raise ConfigError(
                f"{reference_name} has other chunks: {reference.chunker.name} of {reference.chunker.k}. "
                f"{run.folder.path} has {run.chunker.name} of {run.chunker.k}"
            )
        if reference.digest == run.digest:
            raise ConfigError(f"{reference_name} is the analysed checkpoint itself. Name another run")
        return reference
    except (OSError, ValueError) as error:
        if named is not None:
            raise
        return absent if isinstance(error, FileNotFoundError) else format_error(error)  # phase one was deleted


def _draw_pictures(analysis: Analysis, dataset: AnalysisData, places: dict[str, np.ndarray]) -> dict[str, bytes]:
    first = analysis.maps[0]
    point_colours = plots.choose_pixel_colours(dataset.labels) if dataset.pixels else []
    pictures = {"map.png": plots.plot_map(places[first], dataset.clusters, dataset.labels, first, point_colours)}
    if analysis.agreement:
        pictures["use.png"] = plots.plot_agreement(analysis.agreement)
    if analysis.intrinsic is not None:
        pictures["intrinsic.png"] = plots.plot_intrinsic_checks(analysis.intrinsic)
    if analysis.loss:
        pictures["loss.png"] = plots.plot_loss(analysis.loss)
    pictures["norms.png"] = plots.plot_norms(dataset.vectors, dataset.counts)
    if analysis.drift is not None:
        pictures["drift.png"] = plots.plot_drift(analysis.drift)
    if analysis.passages is not None:
        pictures["passages.png"] = plots.plot_passages(analysis.passages)
    return pictures


def _export_projector(dataset: AnalysisData, options: Options) -> None:
    top = slice(options.analyse.projector)
    chunks = dataset.every.chunks[top]
    map.export_projector(
        RunFolder.from_options(options).path / ANALYSIS / "projector",
        f"{options.name} centred",
        dataset.embedded[top] - dataset.mean,
        label_chunks(dataset.run, chunks),
        {"count": dataset.every.rows.counts[top], "bytes": dataset.every.rows.lengths[top]},
        chunks if dataset.pixels else [],
    )
