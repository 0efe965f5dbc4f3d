"""Stage `next`: probabilities of the next chunks after a prompt."""

from pipeline.options import Options
from pipeline.run.folder import RunFolder
from pipeline.run.opened import NextChunk, NextChunks, Run
from pipeline.run.spaces.queries import Texts, to_texts
from pipeline.shown import visible


def following(options: Options, prompts: Texts = (), count: int = 10) -> list[NextChunks]:
    """Return the most probable next chunks after each prompt, by default at the start of a document; see `Run.next`.

    Raises:
        ConfigError: the model predicts tokens, not chunks.
        FileNotFoundError: nothing was trained in the run.
        ValueError: a prompt for a model of pictures.
    """
    run = Run(RunFolder.of(options), options)
    return [run.next(prompt, count) for prompt in to_texts(prompts, 'following(options, ["import "])') or [b""]]


def rows(item: NextChunks) -> list[dict[str, str]]:
    """Return table rows of the chunks after one prompt, with visible white space, and the probability of all others."""

    def row(text: str, probability: float, chunk: NextChunk | None) -> dict[str, str]:
        summoned = f"{100 * chunk.summoned:.1f}" if chunk and item.gate is not None else ""
        count = f"{chunk.count:,}" if chunk and chunk.count is not None else ""
        return {"probability": f"{probability:.4f}", "summoned %": summoned, "in train": count, "chunk": text}

    return [
        *(row(visible(chunk.text), chunk.probability, chunk) for chunk in item.chunks),
        row("(all others)", item.rest, None),
    ]


def heading(item: NextChunks) -> str:
    """Describe the prompt, how it was cut, and the gate."""
    cut = f"after {visible(item.before)}" if item.before is not None else "where a document begins"
    opened = f", given that it begins with {visible(item.opened)}" if item.opened is not None else ""
    gate = f"; summoned with probability {item.gate:.3f}" if item.gate is not None else ""
    return f"{visible(item.prompt)}: the chunk {cut}{opened}{gate}"


def table(found: list[NextChunks]) -> str:
    """Format the next chunks of all prompts as text."""
    lines = []
    for item in found:
        lines.append(heading(item))
        for row in ({name: name for name in rows(item)[0]}, *rows(item)):
            lines.append("  {probability:>11}  {summoned %:>10}  {in train:>9}  {chunk}".format(**row))
    return "\n".join(lines)
