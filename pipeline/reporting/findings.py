"""Presentation of an analysis: its findings as sentences, its tables, and the captions of its pictures."""

from pipeline.reporting.rendering import Table
from pipeline.run.analysis_results import Analysis, Intrinsic

ANALYSIS = "analysis"  # folder of a run that `haed analyse` writes to
MAP = "map.html"

# Pictures in the order of a report: their titles, and how to read them.
PICTURES = {
    "map.png": ("Map", "Every point is a chunk."),
    "use.png": (
        "Use and spelling",
        "Use is what stands before and after a chunk: positive pointwise mutual information with the most frequent chunks there. "
        "Spelling is the edit distance divided by the longer's length. 0 is the similarity of any two chunks, 1 that of the "
        "chunks which are nearest by that very similarity. Neighbours are those of the centred cosine, which an index has "
        "unless index.metric says otherwise.",
    ),
    "intrinsic.png": (
        "Intrinsic checks",
        "Of the 10 nearest words of each member, the share that are members too; of pairs, whether the other half is among "
        "them. A word stands for the most frequent of its forms. The baselines are PPMI-SVD, made by counting the contexts of "
        "the same split, and spelling, the edit distance.",
    ),
    "loss.png": ("Loss by frequency", "Exact bits of the evaluation, by the count of a chunk in the train split."),
    "norms.png": ("Norm against frequency", ""),
    "drift.png": (
        "Drift",
        "Embeddings of the same chunks by two checkpoints, after the rotation, reflection and scaling that bring them closest "
        "(orthogonal Procrustes). What is left of the difference is not of the coordinates alone.",
    ),
    "passages.png": (
        "Passages by layer",
        "A passage is what the model has read at a place. Its nearest are places in other windows, by the centred cosine of a "
        "layer's output; ŷ is the output of all layers.",
    ),
}


def describe_findings(result: Analysis) -> list[str]:
    """Summarise each part of the analysis in a sentence."""
    sentences = []
    for band in result.agreement:
        which = "most frequent chunks" if band.first == 1 else f"chunks from rank {band.first:,}"
        fewest, most = band.counts
        often = (
            f"{fewest:,} to {most:,} times" if fewest < most else "once each" if most == 1 else f"{most:,} times each"
        )
        sentences.append(
            f"Neighbours of the {band.among:,} {which} ({often}): {band.verdict}. "
            f"From chance to the best possible they are at {band.use.share:.0%} in use and {band.spelling.share:.0%} in "
            "spelling."
        )
    if (each := result.classes) is not None:
        sentences.append(
            f"The cluster of a chunk, one of {each.classes}, tells {each.embedding:.2f} bits of that of the next one "
            f"(clusters by context {each.use:.2f}, by spelling {each.spelling:.2f}, shuffled {each.shuffled:.2f})."
        )
    if (checks := result.intrinsic) is not None and checks.mean:
        values = ", ".join(f"{name} {value:.3f}" for name, value in checks.mean.items())
        sentences.append(
            f"Words of a kind find each other, mean precision@10: {values}. For the centred cosine, which an index has "
            "unless index.metric says otherwise, "
            f"{checks.verdict}."
        )
    if result.loss:
        bits, tokens = (sum(getattr(part, name) for part in result.loss) for name in ("bits", "tokens"))
        rare = [part for part in result.loss if part.of in ("0", "1", "2–9")]
        shares = [sum(getattr(part, name) for part in rare) for name in ("bits", "tokens")]
        sentences.append(
            f"Chunks that training saw less than 10 times have {shares[0] / max(bits, 1e-9):.0%} of the bits and "
            f"{shares[1] / max(tokens, 1):.0%} of the tokens."
        )
    sentences.append(
        f"Norms are {result.norms.mean:.3g} ± {result.norms.deviation:.2g}; with frequency they correlate at "
        f"{result.norms.correlation:+.2f} (Spearman), {result.norms.slope:+.1%} for ten times the count."
    )
    sentences.append(
        f"The mean cosine of two chunks is {result.cloud.mean_cosine:.2f}; of {result.cloud.width} dimensions "
        f"{result.cloud.dimension:.1f} are in effect used (participation ratio)."
    )
    if (moved := result.drift) is not None:
        sentences.append(
            f"From {moved.before} to {moved.after}, {moved.overlap:.0%} of the {moved.neighbours} nearest stayed (by chance "
            f"{moved.chance:.1%}); after the best turn a chunk's cosine with itself is {moved.cosine:.2f} in the mean."
        )
    if (alike := result.passages) is not None:
        first, last, chance = alike.layers[0], alike.layers[-1], alike.chance
        kept = ", ".join(f"{each.overlap:.0%}" for each in alike.layers[1:] if each.overlap is not None)
        sentences.append(
            f"Of the {alike.neighbours} passages nearest to one, {kept} are the same from one layer to the next (by chance "
            f"{chance.overlap or 0:.1%}). From {first.name} to {last.name}, {first.last:.0%} to {last.last:.0%} end with the "
            f"same chunk (by chance {chance.last:.1%}), and {first.following:.0%} to {last.following:.0%} are followed by the "
            f"same (by chance {chance.following:.1%})."
        )
    return sentences


def precision_table(checks: Intrinsic) -> Table:
    """Return the table of precision@10: a row for each word set, and a column for each system."""
    names = list(checks.checks[0].precision)
    rows = [
        (
            f"{check.name}{'' if check.use else ' (spelled alike)'}",
            f"{check.found} of {check.members}{' pairs' if check.pairs else ''}",
            *(f"{check.precision[name]:.3f}" for name in names),
        )
        for check in checks.checks
    ]
    for what, means in (("mean", checks.mean), ("mean, spelled alike", checks.mean_spelled)):
        if means:
            rows.append((what, "", *(f"{means[name]:.3f}" for name in names)))
    return Table(["set", "in the corpus", *names], rows, [False, False, *(True for _ in names)])


def format_analysis(result: Analysis) -> str:
    """Format the analysis as text."""
    lines = [f"{result.run}, {result.stage} step {result.step:,}: {result.chunks:,} chunks of the {result.split} split"]
    lines += [f"- {sentence}" for sentence in result.findings]
    if result.intrinsic is not None:
        lines += [
            "",
            "precision@10",
            *(f"  {line}" for line in precision_table(result.intrinsic).to_text().splitlines()),
            "",
        ]
    lines += [f"note: {note}" for note in result.notes]
    lines += [f"{result.folder}/{name}" for name in result.files if not name.endswith(".png")]
    return "\n".join(lines)
