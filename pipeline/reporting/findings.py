"""Presentation of an analysis: its findings as sentences, its tables, and the captions of its pictures."""

import re
from pathlib import Path

from pipeline.reporting.rendering import Table
from pipeline.run.analysis_results import Analysis, Intrinsic
from pipeline.suggestions import format_command

ANALYSIS = "analysis"  # folder of a run that `haed analyse` writes to
MAP = "map.html"
RESULT = "analysis.json"


def read_map_checkpoint(page: Path) -> str | None:
    """Return the digest of the checkpoint that a map was made from; None if the file does not say."""
    with open(page, "rb") as file:
        match = re.search(rb'<meta name="checkpoint" content="(\w+)">', file.read(1000))
    return match[1].decode() if match else None


# Pictures in the order of a report: their titles, and how to read them.
PICTURES = {
    "map.png": ("Map", "Every point is a chunk."),
    "use.png": (
        "Use and spelling",
        "Use compares the chunks that stand before and after a chunk, by positive pointwise mutual "
        "information. Spelling compares the first 64 bytes by edit distance, divided by the longer length; "
        "pictures and sound by the mean absolute difference, divided by 255. 0 is the similarity "
        "of random chunks, 1 that of the nearest chunks by the same measure. Neighbours are ranked "
        "by centred cosine, the default of index.metric.",
    ),
    "intrinsic.png": (
        "Intrinsic checks",
        "Precision@10: the number of the set's other members among the 10 nearest words, over the most possible. "
        "For pairs, it is whether the other half is among them. A word stands for its most frequent form. The baselines "
        "are PPMI-SVD, from context counts of the same split, and spelling, by edit distance.",
    ),
    "loss.png": ("Loss by frequency", "Exact bits of the evaluation, by how often a chunk occurs in the train split."),
    "norms.png": ("Norm against frequency", ""),
    "drift.png": (
        "Drift",
        "Embeddings of the same chunks by two checkpoints. Both are centred and scaled. The first is then rotated and "
        "reflected to match the second (orthogonal Procrustes). The remaining difference is not due to the choice of coordinates.",
    ),
    "passages.png": (
        "Passages by layer",
        "A passage is the text that the model has read up to a place. Its neighbours are places in "
        "other windows, by centred cosine of a layer's output. ŷ is the output of all layers.",
    ),
}


def describe_findings(result: Analysis) -> list[str]:
    """Summarise each part of the analysis in a sentence."""
    sentences = []
    for band in result.agreement:
        which = "most frequent chunks" if band.first == 1 else f"chunks from rank {band.first:,}"
        fewest, most = band.counts
        if_equal = "once each" if most == 1 else f"{most:,} times each"
        often = f"{fewest:,} to {most:,} times" if fewest < most else if_equal
        sentences.append(
            f"Neighbours of the {band.among:,} {which} ({often}): {band.verdict}. On a scale from chance "
            f"to the best possible, they reach {band.use.share:z.0%} in use and {band.spelling.share:z.0%} in spelling."
        )
    if (each := result.classes) is not None:
        sentences.append(
            f"The cluster of a chunk (one of {each.classes}) gives {each.embedding:.2f} bits of information "
            f"on the next chunk's cluster, of which {each.bias:z.2f} are the bias of small counts. Clusters by context "
            f"give {each.use:.2f}, by spelling {each.spelling:.2f}, random classes {each.random:.2f} ± {each.random_deviation:.2g}."
        )
    if (checks := result.intrinsic) is not None and checks.mean:
        values = ", ".join(f"{name} {value:.3f}" for name, value in checks.mean.items())
        sentences.append(
            f"Mean precision@10 of words of one kind: {values}. By centred cosine, the default of index.metric, {checks.verdict}."
        )
    if result.loss:
        bits, tokens = (sum(getattr(part, name) for part in result.loss) for name in ("bits", "tokens"))
        rare = [part for part in result.loss if part.of in ("0", "1", "2–9")]
        shares = [sum(getattr(part, name) for part in rare) for name in ("bits", "tokens")]
        sentences.append(
            f"Chunks that occur less than 10 times in training have {shares[0] / max(bits, 1e-9):.0%} of "
            f"the bits and {shares[1] / max(tokens, 1):.0%} of the tokens."
        )
    sentences.append(
        f"The norms are {result.norms.mean:.3g} ± {result.norms.deviation:.2g}. Their correlation with "
        f"frequency is {result.norms.correlation:+z.2f} (Spearman), and a ten times higher count changes "
        f"them by {result.norms.slope:+z.1%}."
    )
    sentences.append(
        f"The mean cosine of two chunks is {result.cloud.mean_cosine:z.2f}. Of {result.cloud.width} "
        f"dimensions, {result.cloud.dimension:.1f} are effectively used (participation ratio)."
    )
    if (moved := result.drift) is not None:
        sentences.append(
            f"From {moved.before} to {moved.after}, {moved.overlap:.0%} of the {moved.neighbours} nearest "
            f"neighbours stayed (by chance {moved.chance:.1%}). After the best rotation, the mean cosine "
            f"of a chunk with itself is {moved.cosine:z.2f} (by chance {moved.cosine_chance:z.2f})."
        )
    if (alike := result.passages) is not None:
        first, last, chance = alike.layers[0], alike.layers[-1], alike.chance
        kept = ", ".join(f"{each.overlap:.0%}" for each in alike.layers[1:] if each.overlap is not None)
        sentences.append(
            f"Of the {alike.neighbours} nearest passages, {kept} are the same from one layer to the next "
            f"(by chance {chance.overlap or 0:.1%}). {first.last:.0%} end with the same chunk at {first.name}, and "
            f"{last.last:.0%} at {last.name} (by chance {chance.last:.1%}). {first.following:.0%} and "
            f"{last.following:.0%} are followed by the same chunk (by chance {chance.following:.1%})."
        )
    return sentences


def precision_table(checks: Intrinsic) -> Table:
    """Return the table of precision@10: a row for each word set, and a column for each system."""
    names = list(checks.checks[0].precision)
    rows = [
        (
            f"{check.name}{'' if check.use else ' (similar spelling)'}",
            f"{check.found} of {check.members}{' pairs' if check.pairs else ''}",
            *(f"{check.precision[name]:.3f}" for name in names),
        )
        for check in checks.checks
    ]
    for title, means in (("mean", checks.mean), ("mean, spelled alike", checks.mean_spelled)):
        if means:
            rows.append((title, "", *(f"{means[name]:.3f}" for name in names)))
    return Table(["set", "in the corpus", *names], rows, [False, False, *(True for _ in names)])


def format_analysis(result: Analysis) -> str:
    """Format the analysis as text."""
    lines = [f"{result.run}, {result.stage} step {result.step:,}: {result.chunks:,} chunks of the {result.split} split"]
    lines += [f"- {sentence}" for sentence in result.findings]
    if result.intrinsic is not None:
        table = precision_table(result.intrinsic).to_text()
        lines += ["", "precision@10", *(f"  {line}" for line in table.splitlines()), ""]
    lines += [f"note: {note}" for note in result.notes]
    lines += [f"{result.folder}/{name}" for name in result.files if not name.endswith(".png")]
    if (report := Path(result.folder).with_name("report.html")).exists():
        lines.append(f"{report} does not show this analysis. Run {format_command('report', report.parent)} again")
    return "\n".join(lines)
