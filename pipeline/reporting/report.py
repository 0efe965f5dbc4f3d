"""Stage `report`: `report.html`, the page of a run as one file; and what a run's page shows, read from its folder.

The report and the served page have the same template, `templates/run.html`. The report has the pictures in it, the
neighbours of some chunks, and refuses damaged files. The served page has links and questions, and shows what it can read.

Both are made from files of the run only, so that they can be made again at any time. Parts that were not run are left
out.
"""

import json
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from data.filesystem import PICTURE, read_bytes, write_atomically
from data.statistics import Summary
from pipeline.config import PHASES, Difference, Options, Phase, flatten_options, list_presets, load_options
from pipeline.console import format_error, markdown_code, markdown_text
from pipeline.reporting.charts import draw_corpus, draw_curves
from pipeline.reporting.findings import ANALYSIS, MAP, PICTURES, RESULT, precision_table
from pipeline.reporting.rendering import Table, data_uri, render_file
from pipeline.reporting.run_state import (
    RunState,
    count_parameters,
    damaged_state,
    determine_state,
    phase_metrics,
    read_settings,
    status_of,
)
from pipeline.reporting.terms import Footnotes
from pipeline.run.analysis_results import Analysis
from pipeline.run.checkpoints import Checkpoint, explain_too_few_steps, list_checkpoints, read_state, resolve_pointer
from pipeline.run.files import MIXTURE_COLUMNS, Evaluation, KeptSample, describe_speed, read_as
from pipeline.run.index.probe import Probe
from pipeline.run.index.queries import PIXELS, SearchResults
from pipeline.run.index.storage import StaleIndexError, has_index
from pipeline.run.metrics import Record
from pipeline.run.run_directory import RunFolder, guard_results, stage_overrides
from pipeline.run.trackers import publish_results
from pipeline.suggestions import format_command, name_flows

T = TypeVar("T")
OWN_OPTIONS = ("name", "runs_dir", "shards_dir")  # options in which every run differs from its preset


@dataclass
class RankedModel:
    """The model or a baseline in the order of their bits: its name, bits, and whether the model beats it."""

    name: str
    bits: float
    verdict: str
    is_model: bool = False


@dataclass
class RunReport:
    """Content of a run page, as far as available.

    Attributes:
        name: name of the run.
        state: its progress.
        phases: metrics of each phase.
        warnings: sentences on the checkpoint, and on outdated, missing or damaged parts.
        evaluation: content of evaluation.json, or None.
        statistics: statistics of the train split, or None if they are unknown.
        samples: content of samples.json.
        neighbours: neighbours of chunks with their scores; empty on a served page.
        analysis: content of analysis.json, or None if there is none of the present checkpoint.
        pictures: PNG files that exist, by their name in the run's folder.
        checkpoints: the checkpoints of all phases.
        options: every option by dotted key; empty if the configuration cannot be read.
        environment: text of environment.json, empty if there is none.
        parameters: number of parameters of the checkpoint, or None if it cannot be read.
    """

    name: str
    state: RunState
    phases: dict[str, list[Record]]
    warnings: list[str]
    evaluation: Evaluation | None = None
    statistics: Summary | None = None
    samples: list[KeptSample] = field(default_factory=list)
    neighbours: SearchResults = field(default_factory=lambda: SearchResults([]))
    analysis: Analysis | None = None
    pictures: dict[str, Path] = field(default_factory=dict)
    checkpoints: list["CheckpointInfo"] = field(default_factory=list)
    options: dict[str, Any] = field(default_factory=dict)
    environment: str = ""
    parameters: int | None = None

    @property
    def training(self) -> str:
        """Return the training as a sentence: phases, steps, seconds."""
        parts = []
        for phase, records in self.phases.items():
            saved = self.state.metrics if phase == self.state.phase else {}  # may be ahead of the last record
            step, seconds = (max(each.get(name, 0) for each in [*records, saved]) for name in ("step", "seconds"))
            parts.append(f"{phase} {step:,} steps in {seconds:,.0f} s")
        return ", ".join(parts) or ("" if self.checkpoints else "not trained yet")

    @property
    def corpus(self) -> str:
        """Return the corpus with the size of its train split; empty if the configuration cannot be read."""
        source = " ".join(self.options[key] for key in ("source.kind", "source.path") if self.options.get(key))
        if not source or self.statistics is None:
            return source
        tokens = sum(length * count for length, count in enumerate(self.statistics.chunk_lengths))
        documents = sum(self.statistics.tokens_per_document.documents_from.values())
        return f"{source} ({tokens:,} tokens in {documents:,} document{'s' * (documents != 1)} of the train split)"

    @property
    def known_share(self) -> float | None:
        """Return a lower bound on the share of the train split's chunks that are known, or None without a mixture."""
        parts, statistics = self.evaluation.parts if self.evaluation else None, self.statistics
        if parts is None or statistics is None:
            return None
        rarest = min((count for rank, count in statistics.rank_frequency if rank <= parts.known), default=0)
        unknown = max(0, statistics.distinct_chunks - parts.known) * rarest
        return max(0.0, 1 - unknown / max(1, sum(statistics.chunk_lengths)))

    @property
    def mixture(self) -> Table | None:
        """Return the table of bits per token of a mixture's parts by frequency, or None."""
        breakdown = self.evaluation.breakdown if self.evaluation else None
        rows = breakdown.mixture_rows() if breakdown is not None else []
        return Table(MIXTURE_COLUMNS, rows, [False, *(True for _ in MIXTURE_COLUMNS[1:])]) if rows else None

    @property
    def ranking(self) -> list[RankedModel]:
        """Return the model among the baselines, from fewest to most bits; empty without baselines."""
        if not self.evaluation or not self.evaluation.baselines:
            return []
        better = self.evaluation.not_beaten
        rows = [RankedModel(self.name, self.evaluation.bits_per_char, "", True)]
        if self.evaluation.remembered is not None:
            rows.append(RankedModel(f"{self.name}, without memory", self.evaluation.alone.value, "", True))
        rows += [
            RankedModel(each.name, each.bits_per_char, "not beaten" if each.name in better else "beaten")
            for each in self.evaluation.baselines
        ]
        return sorted(rows, key=lambda row: row.bits)

    def template_values(self, addresses: Mapping[str, str]) -> dict[str, Any]:
        """Return the values of `templates/run.html`.

        Args:
            addresses: addresses of pictures, and of the map, by their names in the run's folder.
        """
        folder = f"{ANALYSIS}/"
        within = {name.rpartition("/")[2]: place for name, place in addresses.items() if name.startswith(folder)}
        precision = self.analysis.intrinsic if self.analysis else None
        preset, changed = find_nearest_preset(self.options) if self.options else ("", [])
        computed = ("training", "corpus", "known_share", "mixture", "ranking")
        values = vars(self) | {name: getattr(self, name) for name in computed}
        return values | {
            "footnotes": Footnotes(),
            "curves": draw_curves(self.phases),
            "corpus_charts": draw_corpus(self.statistics) if self.statistics else "",
            "seed": self.options.get("seed"),
            "is_pixels": self.options.get("chunker.kind") == PIXELS,
            "preset": preset,
            "changed": changed,
            "speed": describe_speed(self.samples),
            "samples_picture": addresses.get("samples.png"),
            "captions": PICTURES,
            "analysis_pictures": within,
            "map": within.get(MAP),
            "precision": precision_table(precision) if precision is not None else None,
        }


@guard_results
def write_report(options: Options) -> Path:
    """Write report.html of a run; return its path.

    Raises:
        ValueError: a file of the run is damaged, or its configuration was changed since it was trained.
    """
    folder = RunFolder.from_options(options)
    report = load_run_report(folder, options)
    if has_index(folder, "chunks"):
        try:
            report.neighbours = _find_neighbours(folder, options)
        except StaleIndexError as error:
            report.warnings.append(f"No neighbours are shown: {error}.")
    addresses = {name: data_uri(read_bytes(path, PICTURE, folder.path)) for name, path in report.pictures.items()}
    if (folder.path / ANALYSIS / MAP).is_file():
        addresses[f"{ANALYSIS}/{MAP}"] = f"{ANALYSIS}/{MAP}"
    path = folder.path / "report.html"
    write_atomically(path, render_file("run.html", **report.template_values(addresses)).encode())
    publish_results(options, path)
    return path


def summarise_report(options: Options) -> str:
    """Return the most important of a run's report as Markdown: metrics, baselines and warnings.

    Raises:
        ValueError: a file of the run is damaged, or its configuration was changed since it was trained.
    """
    folder = RunFolder.from_options(options)
    report = load_run_report(folder, options)
    lines = [f"# {markdown_text(report.name)}", markdown_text(report.training)]
    if evaluation := report.evaluation:
        metric = evaluation.headline
        lines.append(f"**{metric.value:.3f} {metric.unit}** on the {markdown_text(evaluation.split)} split")
        if evaluation.remembered is not None:
            shares = f"Share of the text by part: {evaluation.remembered}."
            lines.append(f"{evaluation.alone.value:.3f} {metric.unit} by the model alone. {shares}")
        lines += [markdown_text(note) for note in (evaluation.perplexity_note, evaluation.likelihood_note) if note]
    if ranking := [[each.name, f"{each.bits:.4f}", each.verdict] for each in report.ranking]:
        lines.append(Table(["model", "bits", ""], ranking, [False, True, False]).to_markdown())
    if report.mixture:
        lines.append(report.mixture.to_markdown())
    lines += [markdown_text(name_flows(warning)) for warning in report.warnings]
    lines.append(f"Report: {markdown_code(str(folder.path.resolve() / 'report.html'))}")
    return "\n\n".join(lines)


def load_run_report(folder: RunFolder, options: Options | None = None) -> RunReport:
    """Read what the page of a run shows. No model is opened.

    Args:
        folder: folder of the run.
        options: options of the run, for a report; None: those in its folder, if they can be read. A damaged file is then
            a warning.

    Raises:
        ValueError: with options, a file is damaged, or the configuration was changed.
    """
    files = _RunFiles(folder, is_strict=options is not None)
    saved = files.attempt(folder.load_options)
    options = options or saved
    stage = options.evaluate.stage if options else None
    phases = phase_metrics(folder, folder.phase_history(options) if options else None, files.attempt)
    state = files.attempt(lambda: determine_state(folder)) or damaged_state(folder)
    report = RunReport(folder.path.name, state, phases, files.warnings)
    report.options = flatten_options(saved) if saved else {}
    report.evaluation = files.read("evaluation.json", Evaluation)
    report.samples = files.read("samples.json", list[KeptSample]) or []
    is_recorded = folder.is_trained() or os.path.lexists(folder.path / "corpus.json")
    record = files.attempt(lambda: folder.read_corpus_record() if is_recorded else None)
    report.statistics = record.statistics.get("train") if record else None
    environment = files.read("environment.json", dict[str, Any])
    report.environment = json.dumps(environment, indent=2, ensure_ascii=False) if environment else ""
    analysis = files.read(f"{ANALYSIS}/{RESULT}", Analysis)
    present = files.attempt(lambda: folder.select_checkpoint(stage) if folder.is_trained() else None)
    if present is not None:
        if files.is_strict:
            folder.check_unchanged(options, present)
        files.warnings += _collect_warnings(folder, options, present, report)
        report.parameters = count_parameters(folder)
    report.checkpoints = describe_checkpoints(folder, present, phase_metrics(folder, attempt=files.attempt))
    if analysis and present is not None and analysis.checkpoint == present.digest:
        report.analysis = analysis
    elif analysis:
        files.warnings.append(
            f"The analysis belongs to another checkpoint ({analysis.stage} step {analysis.step:,}), so "
            f"it is not shown. Run {format_command('analyse', folder.path, *stage_overrides(stage))} again."
        )
    drawn = report.analysis.files if report.analysis else []
    names = ["samples.png", *(f"{ANALYSIS}/{name}" for name in PICTURES if name in drawn)]
    report.pictures = {name: folder.path / name for name in names if os.path.lexists(folder.path / name)}
    return report


class _RunFiles:
    """A reader of the files of a run. A damaged file is an error if it is strict, otherwise a warning."""

    def __init__(self, folder: RunFolder, is_strict: bool) -> None:
        self.folder, self.is_strict = folder, is_strict
        self.warnings: list[str] = []

    def read(self, name: str, kind: type[T]) -> T | None:
        """Return the content of a JSON file; None if it is missing or damaged."""
        path = self.folder.path / name
        return self.attempt(lambda: read_as(kind, path, self.folder.path)) if os.path.lexists(path) else None

    def attempt(self, work: Callable[[], T]) -> T | None:
        """Return a result; None if it needs a file that cannot be read."""
        try:
            return work()
        except (OSError, ValueError) as error:
            if self.is_strict:
                raise
            if (warning := format_error(error)) not in self.warnings:
                self.warnings.append(warning)
            return None


def _find_neighbours(folder: RunFolder, options: Options) -> SearchResults:
    """Find the neighbours of the configured queries. The model is opened only for chunks missing from the corpus."""

    def open_model(stage: Phase) -> Any:
        from pipeline.run.opened import Run

        return Run(folder, replace(options, evaluate=replace(options.evaluate, stage=stage)))

    return Probe(folder, None, open_model).neighbours(*options.index.queries, skip_invalid=True)


def _collect_warnings(folder: RunFolder, options: Options | None, present: Checkpoint, report: RunReport) -> list[str]:
    """Collect warnings about the reported checkpoint, which is the best and need not be the newest."""
    stage, phase, step = options.evaluate.stage if options else None, present.phase, present.step
    warnings = [present.fallback] if present.fallback else []
    history = folder.phase_history(options).values() if options else ()
    warnings += [f"{few}." for each in history if (few := explain_too_few_steps(each / "checkpoints"))]
    is_best = resolve_pointer(present.path.parent, "best") == present.path  # else a damaged one is
    if is_best and (newest := list_checkpoints(present.path.parent)[-1]) != present.path:
        warnings.append(f"The best validation of {phase} was at step {step:,}, not at the end ({newest.name}).")
    if report.evaluation and report.evaluation.checkpoint != present.digest:
        warnings.append(_explain_stale_evaluation(folder, report.evaluation, present, stage))
    if any(sample.checkpoint not in (None, present.digest) for sample in report.samples):
        warnings.append(
            f"The samples belong to another checkpoint than the run's present one ({phase} step {step:,}). "
            f"Run {format_command('sample', folder.path, *stage_overrides(stage))} again."
        )
    return warnings


def _explain_stale_evaluation(
    folder: RunFolder, evaluation: Evaluation, present: Checkpoint, stage: Phase | None
) -> str:
    return (
        f"The likelihood belongs to checkpoint {evaluation.checkpoint[:12]} ({evaluation.stage} step "
        f"{evaluation.step:,}). The run's present checkpoint is {present.digest[:12]} ({present.phase} "
        f"step {present.step:,}). Run {format_command('evaluate', folder.path, *stage_overrides(stage))} again."
    )


@dataclass
class EvaluationStatus:
    """The evaluation of a run.

    Attributes:
        result: the evaluation; None: there is none that can be read.
        warnings: warnings about it.
        is_stale: whether it belongs to another checkpoint than the present one.
    """

    result: Evaluation | None
    warnings: list[str]
    is_stale: bool = False


def evaluation_status(folder: RunFolder) -> EvaluationStatus:
    """Return the evaluation of a run, if there is one, and whether it belongs to the present checkpoint."""
    files, stage = _RunFiles(folder, is_strict=False), read_settings(folder).get("evaluate.stage")
    stage = stage if stage in PHASES else None
    result, present = files.read("evaluation.json", Evaluation), None
    with suppress(OSError, ValueError):
        present = folder.select_checkpoint(stage)
    warnings = [*files.warnings, *([present.fallback] if present is not None and present.fallback else [])]
    if result is None or present is None or present.digest == result.checkpoint:
        return EvaluationStatus(result, warnings)
    warnings.append(_explain_stale_evaluation(folder, result, present, stage))
    return EvaluationStatus(result, warnings, is_stale=True)


@dataclass
class CheckpointInfo:
    """A checkpoint in a run's folder.

    Attributes:
        phase: its phase.
        step: its step.
        digest: digest of its content; None: it is damaged.
        score: validation loss; None: it was not validated.
        unit: unit of the score.
        megabytes: size of its files in MB.
        notes: best, latest, or in use (questions go to this checkpoint).
    """

    phase: str
    step: int
    digest: str | None
    score: float | None
    unit: str
    megabytes: float
    notes: list[str]


def describe_checkpoints(
    folder: RunFolder, present: Checkpoint | None, metrics: Mapping[str, list[Record]]
) -> list[CheckpointInfo]:
    """Return the checkpoints of all phases, in the order of training.

    Args:
        folder: folder of the run.
        present: the checkpoint that questions go to.
        metrics: metrics of the run's phases that can be read.
    """
    summaries = []
    for phase in PHASES:
        place = folder.phase_folder(phase) / "checkpoints"
        names = {"best": resolve_pointer(place, "best"), "latest": resolve_pointer(place, "latest")}
        for path in list_checkpoints(place):
            if not path.name.removeprefix("step-").isdecimal():
                continue
            notes = [name for name, named in names.items() if named == path]
            notes += ["in use"] if present and path == present.path else []
            digest, step = None, int(path.name.removeprefix("step-"))
            with suppress(OSError, ValueError):
                digest = read_state(path)["digest"]
            score, unit = _last_validation(metrics.get(phase, []), step)
            size = sum(status.st_size for file in path.glob("*") if (status := status_of(file)))
            summaries.append(CheckpointInfo(phase, step, digest, score, unit, size / 1e6, notes))
    return summaries


def _last_validation(records: list[Record], step: int) -> tuple[float | None, str]:
    """Return the last validation at a step, and its unit; None and an empty text without one."""
    names = {"validation/bits_per_token": "bits per token", "validation/iem": "iem"}
    here = [record for record in records if record["step"] == step]
    scores = [(record[name], unit) for record in here for name, unit in names.items() if name in record]
    return scores[-1] if scores else (None, "")


def find_nearest_preset(settings: dict[str, Any]) -> tuple[str, list[Difference]]:
    """Return the preset that differs from a run's options in the fewest, and these; of the same kind of model, if possible.

    Args:
        settings: the options of the run by dotted key.
    """
    presets, changed = flat_presets(), dict[str, list[Difference]]()
    same_kind = [name for name, flat in presets.items() if flat["model.kind"] == settings["model.kind"]]
    for name in same_kind or presets:
        was = presets[name]
        differing = [key for key in settings if key not in OWN_OPTIONS and settings[key] != was.get(key)]
        changed[name] = [Difference(key, was.get(key), settings[key]) for key in differing]
    nearest = min(changed, key=lambda name: len(changed[name]))
    return nearest, changed[nearest]


@cache
def flat_presets() -> dict[str, dict[str, Any]]:
    """Return the options of every preset by dotted key."""
    return {name: flatten_options(load_options(name)) for name in list_presets()}
