"""Page of an analysis, `analysis/report.html`: self-contained, one section per analysis, with links to the map."""

from collections.abc import Iterator, Mapping

from pipeline.probe.analyse.distributional import Agreement
from pipeline.probe.analyse.result import Analysis, precision_header, precision_rows
from pipeline.show.page import escape, render_image, render_page, render_table

_ABOUT = {
    "map.png": (
        "Map",
        "Every point is a chunk. <a href='map.html'>map.html</a> is the same to zoom and search, with each chunk's neighbours.",
    ),
    "use.png": (
        "Use and spelling",
        "Use is what stands before and after a chunk (positive pointwise mutual information with the most frequent chunks "
        "there), spelling the edit distance over the longer's length. 0 is the likeness of any two chunks, 1 that of the chunks "
        "which are nearest in that very likeness. Neighbours are those of the centred cosine, which an index has unless "
        "index.metric says otherwise.",
    ),
    "intrinsic.png": (
        "Intrinsic checks",
        "Of the 10 nearest words of each member, how many are members too, over the most that could be; of pairs, whether the "
        "other half is among them. A word stands for the most frequent of its forms. PPMI-SVD is made by counting the contexts "
        "of the same split, spelling is the edit distance: baselines that an embedding has to beat.",
    ),
    "loss.png": ("Loss by frequency", "Exact bits of the evaluation, by how often the train split has a chunk."),
    "norms.png": ("Norm against frequency", ""),
    "drift.png": (
        "Drift",
        "Embeddings of the same chunks by two checkpoints, after the rotation, reflection and scaling that bring them closest "
        "(orthogonal Procrustes): what is left of the difference is not of the coordinates alone.",
    ),
    "passages.png": (
        "Passages by layer",
        "A passage is what the model has read at a place. Its nearest are places in other windows, by the centred cosine of what "
        "comes out of a layer; ŷ comes out of them all.",
    ),
}


def render_analysis_page(found: Analysis, pictures: Mapping[str, bytes]) -> str:
    """Return the analysis as an HTML page.

    Args:
        found: the analysis.
        pictures: PNG files by name. Those listed in `_ABOUT` are shown.
    """
    parts = [
        f"<h1>{escape(found.run)}: what the embeddings know</h1><p class=lead>{found.chunks:,} chunks of the "
        f"{escape(found.split)} split that occur {found.least:,} times or more; {found.stage} step {found.step:,}</p>",
        "<ul>" + "".join(f"<li>{escape(sentence)}" for sentence in found.findings) + "</ul>",
    ]
    tables = {
        "use.png": "".join(_render_examples(band) for band in found.agreement),
        "intrinsic.png": _render_checks(found),
        "drift.png": _render_drift(found),
        "passages.png": _render_passages(found),
    }
    for name, (title, about) in _ABOUT.items():
        if name in pictures:
            parts += [f"<h2>{title}</h2><p>{about}</p>", render_image(name, pictures[name]), tables.get(name, "")]
    if found.notes:
        parts.append("<h2>What to know</h2><ul>" + "".join(f"<li>{escape(note)}" for note in found.notes) + "</ul>")
    return render_page(f"{found.run}: embeddings", "".join(parts))


def _render_examples(band: Agreement) -> str:
    """Return a table of example chunks of a band with their neighbours by embedding, use and spelling."""

    def cells() -> Iterator[tuple[str, ...]]:
        for example in band.examples:
            lists = (example.embedding, example.use, example.spelling)
            yield _render_code([example.chunk]), *(_render_code(each[:5]) for each in lists)

    title = f"chunks of rank {band.first:,} to {band.first + band.among - 1:,}"
    summary = f"<details><summary>neighbours among {title}</summary>"
    return f"{summary}{render_table(('chunk', 'the model', 'by use', 'by spelling'), cells(), 4)}</details>"


def _render_checks(found: Analysis) -> str:
    if (checks := found.intrinsic) is None:
        return ""
    missing = "; ".join(f"{each.name}: {', '.join(each.missing)}" for each in checks.checks if each.missing)
    lines = ([escape(cell) for cell in row] for row in precision_rows(checks))
    told = f"<p>Among {checks.words:,} words. Not often enough in the corpus: {escape(missing) or 'none'}."
    told += f" Left out: {escape('; '.join(checks.left_out))}.</p>" if checks.left_out else "</p>"
    return f"{render_table(precision_header(checks), lines, 2)}{told}"


def _render_drift(found: Analysis) -> str:
    if (drift := found.drift) is None:
        return ""
    plain = "" if drift.unaligned is None else f" (without it {drift.unaligned:.3f})"
    return (
        f"<p>From {escape(drift.before)} to {escape(drift.after)}: distance {drift.distance:.3f} of 1, mean cosine after the "
        f"best turn {drift.cosine:.3f}{plain}; of the {drift.neighbours} nearest of {drift.queries:,} chunks "
        f"{drift.overlap:.1%} are the same, by chance {drift.chance:.2%}.</p>"
    )


def _render_passages(found: Analysis) -> str:
    if (alike := found.passages) is None:
        return ""

    def share(value: float | None) -> str:
        return "" if value is None else f"{value:.1%}"

    lines = (
        (escape(each.name), share(each.overlap), share(each.last), share(each.following), share(each.document))
        for each in (*alike.layers, alike.chance)
    )
    head = ("by", "also of the layer before", "same chunk before", "same chunk behind", "same document")
    parts = [
        f"<p>{alike.queries:,} of {alike.places:,} places in {alike.windows:,} windows, {alike.neighbours} neighbours each.</p>",
        render_table(head, lines, 1),
    ]
    for each in alike.examples:
        rows = (
            (escape(name), "<br>".join(f"<code>{escape(text)}</code>" for text in near))
            for name, near in each.nearest.items()
        )
        parts.append(
            f"<details><summary><code>{escape(each.passage)}</code></summary>{render_table(('by', 'nearest'), rows, 2)}</details>"
        )
    return "".join(parts)


def _render_code(chunks: list[str]) -> str:
    return " ".join(f"<code>{escape(chunk)}</code>" for chunk in chunks)
