"""Result of an analysis of a run's embeddings: the fields of analysis.json, and their text as sentences and tables."""

from dataclasses import dataclass, field

from pipeline.config import Phase
from pipeline.probe.analyse.distributional import Agreement, Classes
from pipeline.probe.analyse.drift import Drift
from pipeline.probe.analyse.geometry import EmbeddingSample, Norms
from pipeline.probe.analyse.intrinsic import Intrinsic
from pipeline.probe.passages import ByLayer
from pipeline.run.files import Part


@dataclass(kw_only=True)
class Analysis:
    """Fields of analysis.json.

    Attributes:
        folder: folder with all files of the analysis.
        run: name of the run.
        stage: phase whose checkpoint was analysed.
        step: step of that checkpoint.
        checkpoint: digest of that checkpoint.
        fallback: why a checkpoint other than the best was used, or None.
        split: split whose chunks and contexts were analysed.
        chunks: number of chunks analysed, the most frequent ones.
        least: minimum count of an analysed chunk.
        width: width of their embeddings.
        agreement: agreement in use and spelling by frequency band, the most frequent chunks first.
        classes: information that clusters give about the next cluster, or None.
        intrinsic: intrinsic checks, or None for pixels and for corpora with too few of the words.
        loss: bits by frequency from evaluation.json, empty if it has none of this checkpoint.
        norms: norms of the embeddings.
        cloud: anisotropy and effective dimension of the embeddings.
        drift: drift from phase one or from another run, or None if there is neither.
        passages: most similar passages by layer, or None if not requested or too few.
        maps: names of the maps, in the order they are shown.
        findings: sentences that summarise the analysis.
        notes: what was left out, cut or not possible, and why.
        files: files written beside analysis.json.
        seconds: duration of the analysis.
    """

    folder: str
    run: str
    stage: Phase
    step: int
    checkpoint: str
    fallback: str | None
    split: str
    chunks: int
    least: int
    width: int
    agreement: list[Agreement]
    classes: Classes | None
    intrinsic: Intrinsic | None
    loss: list[Part]
    norms: Norms
    cloud: EmbeddingSample
    drift: Drift | None
    passages: ByLayer | None
    maps: list[str]
    findings: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    files: list[str] = field(default_factory=list)
    seconds: float = 0.0


def describe_findings(found: Analysis) -> list[str]:
    """Summarise each part of the analysis in a sentence."""
    told = []
    for band in found.agreement:
        which = "most frequent chunks" if band.first == 1 else f"chunks from rank {band.first:,}"
        fewest, most = band.counts
        often = (
            f"{fewest:,} to {most:,} times" if fewest < most else "once each" if most == 1 else f"{most:,} times each"
        )
        told.append(
            f"Neighbours of the {band.among:,} {which} ({often}): {band.verdict}. "
            f"From chance to the best possible they are at {band.use.share:.0%} in use and {band.spelling.share:.0%} in "
            "spelling."
        )
    if (each := found.classes) is not None:
        told.append(
            f"The cluster of a chunk, one of {each.classes}, tells {each.embedding:.2f} bits of that of the next one "
            f"(clusters by context {each.use:.2f}, by spelling {each.spelling:.2f}, shuffled {each.shuffled:.2f})."
        )
    if (checks := found.intrinsic) is not None and checks.mean:
        values = ", ".join(f"{name} {value:.3f}" for name, value in checks.mean.items())
        told.append(
            f"Words of a kind find each other, mean precision@10: {values}. For the centred cosine, which an index has "
            "unless index.metric says otherwise, "
            f"{checks.verdict}."
        )
    if found.loss:
        bits, tokens = (sum(getattr(part, name) for part in found.loss) for name in ("bits", "tokens"))
        rare = [part for part in found.loss if part.of in ("0", "1", "2–9")]
        shares = [sum(getattr(part, name) for part in rare) for name in ("bits", "tokens")]
        told.append(
            f"Chunks that training saw less than 10 times have {shares[0] / max(bits, 1e-9):.0%} of the bits and "
            f"{shares[1] / max(tokens, 1):.0%} of the tokens."
        )
    told.append(
        f"Norms are {found.norms.mean:.3g} ± {found.norms.deviation:.2g}; with frequency they correlate at "
        f"{found.norms.correlation:+.2f} (Spearman), {found.norms.slope:+.1%} for ten times the count."
    )
    told.append(
        f"The mean cosine of two chunks is {found.cloud.mean_cosine:.2f}; of {found.cloud.width} dimensions "
        f"{found.cloud.dimension:.1f} are in effect used (participation ratio)."
    )
    if (moved := found.drift) is not None:
        told.append(
            f"From {moved.before} to {moved.after}, {moved.overlap:.0%} of the {moved.neighbours} nearest stayed (by chance "
            f"{moved.chance:.1%}); after the best turn a chunk's cosine with itself is {moved.cosine:.2f} in the mean."
        )
    if (alike := found.passages) is not None:
        first, last, chance = alike.layers[0], alike.layers[-1], alike.chance
        kept = ", ".join(f"{each.overlap:.0%}" for each in alike.layers[1:] if each.overlap is not None)
        told.append(
            f"Of the {alike.neighbours} passages nearest to one, {kept} are the same from one layer to the next (by chance "
            f"{chance.overlap or 0:.1%}). From {first.name} to {last.name}, {first.last:.0%} to {last.last:.0%} end with the "
            f"same chunk (by chance {chance.last:.1%}), and {first.following:.0%} to {last.following:.0%} are followed by the "
            f"same (by chance {chance.following:.1%})."
        )
    return told


def precision_rows(checks: Intrinsic) -> list[tuple[str, ...]]:
    """Return the rows of the precision@10 table: name of the set, members found, precision by system."""
    names = list(checks.checks[0].precision)
    lines = [
        (
            f"{check.name}{'' if check.use else ' (spelled alike)'}",
            f"{check.found} of {check.members}{' pairs' if check.pairs else ''}",
            *(f"{check.precision[name]:.3f}" for name in names),
        )
        for check in checks.checks
    ]
    for what, means in (("mean", checks.mean), ("mean, spelled alike", checks.mean_spelled)):
        if means:
            lines.append((what, "", *(f"{means[name]:.3f}" for name in names)))
    return lines


def precision_header(checks: Intrinsic) -> tuple[str, ...]:
    """Return the header of the precision@10 table."""
    return ("set", "in the corpus", *checks.checks[0].precision)


def format_analysis(found: Analysis) -> str:
    """Format the analysis as text."""
    lines = [f"{found.run}, {found.stage} step {found.step:,}: {found.chunks:,} chunks of the {found.split} split"]
    lines += [f"- {sentence}" for sentence in found.findings]
    if found.intrinsic is not None:
        cells = [precision_header(found.intrinsic), *precision_rows(found.intrinsic)]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        lines += ["", "precision@10"]
        for cell in cells:
            first, second, *rest = (
                text.ljust(width) if at < 2 else text.rjust(width)
                for at, (text, width) in enumerate(zip(cell, widths, strict=True))
            )
            lines.append("  ".join(["", first, second, *rest]).rstrip())
        lines.append("")
    lines += [f"note: {note}" for note in found.notes]
    lines += [f"{found.folder}/{name}" for name in found.files if not name.endswith(".png")]
    return "\n".join(lines)
