"""Stage `analyse`: metrics, plots and a map of a run's embeddings, written to its folder `analysis/`.

It needs no index. The frequent chunks of the split are embedded again by the selected checkpoint, which takes
seconds. So two checkpoints can be compared, and nothing can be stale.
"""

import logging
import shutil
import time
from dataclasses import asdict

import numpy as np

from data.filesystem import make_folders, write_atomically
from haed.options import SYSTEMS
from pipeline.analysis import map, plots
from pipeline.analysis.dataset import AnalysisData, label_chunks, load_analysis_data
from pipeline.analysis.figures import compute_analysis
from pipeline.analysis.geometry import find_nearest, normalise_rows
from pipeline.analysis.map import MapPoints, render_map_page
from pipeline.config import ConfigError, Options
from pipeline.reporting.analysis import ANALYSIS, PICTURES
from pipeline.run.analysis import Analysis
from pipeline.run.device import release_memory
from pipeline.run.opened import Run
from pipeline.run.run_directory import RunFolder, guard_results

log = logging.getLogger(__name__)
_ON_MAP = 8  # neighbours of a point


@guard_results
def analyse_run(options: Options) -> Analysis:
    """Analyse the embeddings of a run's present checkpoint, or of the checkpoint of `evaluate.stage`.

    Raises:
        ConfigError: the model has no chunk embeddings, or an option cannot be satisfied.
        FileNotFoundError: no such shards or run, or nothing was trained.
        ValueError: the split has too few chunks, or a file of the run is damaged.
    """
    began, kind = time.perf_counter(), options.model.kind
    if not SYSTEMS[kind].chunks:
        raise ConfigError(
            f"model.kind={kind} embeds no chunk by itself, so there are no embeddings to analyse: `haed evaluate` tells where "
            "its bits are spent, by length and by frequency"
        )
    kinds = map.select_projections(options.analyse.map)
    folder = RunFolder.from_options(options)
    run = Run(folder, options)
    before = _open_drift_reference(run)
    made = load_analysis_data(run, options)
    place = folder.path / ANALYSIS
    log.info("comparing neighbours in use and in spelling")
    found = compute_analysis(options, made, before, str(place), [map.NAMES[name] for name in kinds])
    log.info("drawing")
    places = {map.NAMES[name]: map.project_vectors(made.centred, name, options.seed) for name in kinds}
    pictures = _draw_pictures(found, made, places)
    of_map = (
        f"{found.stage} step {found.step:,}: the {found.chunks:,} most frequent chunks of the {found.split} split; lines lead "
        "to the nearest by the centred cosine in all dimensions, which need not be near in two. Wheel: zoom; drag: move; "
        "click: keep; /: search."
    )
    content = {
        **pictures,
        "map.html": render_map_page(
            f"{options.name}: map of embeddings", of_map, _build_map_points(made, places)
        ).encode(),
    }
    make_folders(place, within=folder.path)
    for name in set(PICTURES) - set(content):  # left by an earlier analysis
        (place / name).unlink(missing_ok=True)
    for name, written in content.items():
        write_atomically(place / name, written)
    shutil.rmtree(place / "projector", ignore_errors=True)
    if options.analyse.projector:
        _export_projector(made, options)
    found.files = ["map.html", *pictures, *(["projector"] if options.analyse.projector else [])]
    found.seconds = time.perf_counter() - began
    folder.write_json(f"{ANALYSIS}/analysis.json", asdict(found))
    release_memory()
    return found


def _open_drift_reference(run: Run) -> Run | None:
    """Open the run that drift is measured from: `analyse.against`, or phase one; return None if there is neither.

    Raises:
        ConfigError: the other run uses another chunker, or its checkpoint is the same.
    """
    options, named = run.options, run.options.analyse.against
    try:
        if named is not None:
            other = RunFolder.find(named, options.runs_dir)
            found = Run(other, other.load_options())
        elif run.phase == "finetune":
            other = run.folder.find_first_run(options)
            found = Run(other, other.load_options(["evaluate.stage=pretrain"]))
        else:
            return None
    except FileNotFoundError:
        if named is not None:
            raise
        return None  # phase one was deleted
    if (found.chunker.name, found.chunker.k) != (run.chunker.name, run.chunker.k):
        raise ConfigError(
            f"analyse.against={named}: its chunks are {found.chunker.name} of {found.chunker.k}, those of {run.folder.path} "
            f"{run.chunker.name} of {run.chunker.k}"
        )
    if found.digest == run.digest:
        raise ConfigError(f"analyse.against={named}: that is the checkpoint which is analysed")
    return found


def _draw_pictures(found: Analysis, made: AnalysisData, places: dict[str, np.ndarray]) -> dict[str, bytes]:
    """Draw the plots of the analysis; return PNG files by name."""
    first = found.maps[0]
    own = [label.split(",")[0] for label in made.labels] if made.pixels else []
    pictures = {"map.png": plots.plot_map(places[first], made.clusters, made.labels, first, own)}
    if found.agreement:
        pictures["use.png"] = plots.plot_agreement(found.agreement)
    if found.intrinsic is not None:
        pictures["intrinsic.png"] = plots.plot_intrinsic_checks(found.intrinsic)
    if found.loss:
        pictures["loss.png"] = plots.plot_loss(found.loss)
    pictures["norms.png"] = plots.plot_norms(made.vectors, made.counts)
    if found.drift is not None:
        pictures["drift.png"] = plots.plot_drift(found.drift)
    if found.passages is not None:
        pictures["passages.png"] = plots.plot_passages(found.passages)
    return pictures


def _build_map_points(made: AnalysisData, places: dict[str, np.ndarray]) -> MapPoints:
    """Return the points of the map, each with its nearest neighbours."""
    size, units = len(made.chunks), normalise_rows(made.centred)
    near = find_nearest(made.centred, np.arange(size), min(_ON_MAP, size - 1))
    cosines = np.stack([(units * units[column]).sum(1) for column in near.T], 1)
    return MapPoints(
        labels=made.labels,
        counts=made.counts,
        lengths=np.array([len(chunk) for chunk in made.chunks]),
        clusters=made.clusters,
        near=near,
        cosines=(100 * cosines).round().astype(int),
        places=places,
        pixels=made.pixels,
    )


def _export_projector(made: AnalysisData, options: Options) -> None:
    """Write the export for TensorBoard's projector."""
    top = slice(options.analyse.projector)
    chunks = made.every.chunks[top]
    map.export_projector(
        RunFolder.from_options(options).path / ANALYSIS / "projector",
        f"{options.name} centred",
        made.embedded[top] - made.vectors.mean(0),
        label_chunks(made.run, chunks),
        {"count": made.every.counts[top], "bytes": made.every.rows.lengths[top]},
        chunks if made.pixels else [],
    )
