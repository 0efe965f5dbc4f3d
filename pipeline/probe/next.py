"""Stage `next`: probabilities of the next chunks after a prompt."""

from pipeline.config import Options
from pipeline.console import escape_control_characters
from pipeline.run.opened import NextChunk, NextChunks, Run
from pipeline.run.run_directory import RunFolder
from pipeline.run.spaces.queries import Texts, to_texts


def next_chunks(options: Options, prompts: Texts = (), count: int = 10) -> list[NextChunks]:
    """Return the most probable next chunks after each prompt, by default at the start of a document; see `Run.next`.

    Raises:
        ConfigError: the model predicts tokens, not chunks.
        FileNotFoundError: nothing was trained in the run.
        ValueError: a prompt for a model of pictures.
    """
    run = Run(RunFolder.from_options(options), options)
    return [run.next(prompt, count) for prompt in to_texts(prompts, 'next_chunks(options, ["import "])') or [b""]]


def prediction_rows(item: NextChunks) -> list[dict[str, str]]:
    """Return table rows of the chunks after one prompt, with visible white space, and the probability of all others."""

    def row(text: str, probability: float, chunk: NextChunk | None) -> dict[str, str]:
        known = f"{100 * chunk.summoned:.1f}" if chunk and item.gate is not None else ""
        count = f"{chunk.count:,}" if chunk and chunk.count is not None else ""
        return {"probability": f"{probability:.4f}", "vocabulary %": known, "in train": count, "chunk": text}

    return [
        *(row(escape_control_characters(chunk.text), chunk.probability, chunk) for chunk in item.chunks),
        row("(all others)", item.rest, None),
    ]


def prediction_heading(item: NextChunks) -> str:
    """Describe the prompt, how it was cut, and the gate."""
    cut = f"after {escape_control_characters(item.before)}" if item.before is not None else "where a document begins"
    opened = f", given that it begins with {escape_control_characters(item.opened)}" if item.opened is not None else ""
    gate = f"; from the vocabulary with probability {item.gate:.3f}" if item.gate is not None else ""
    return f"{escape_control_characters(item.prompt)}: the chunk {cut}{opened}{gate}"


def format_predictions(found: list[NextChunks]) -> str:
    """Format the next chunks of all prompts as text."""
    lines = []
    for item in found:
        lines.append(prediction_heading(item))
        for row in ({name: name for name in prediction_rows(item)[0]}, *prediction_rows(item)):
            lines.append("  {probability:>11}  {vocabulary %:>12}  {in train:>9}  {chunk}".format(**row))
    return "\n".join(lines)
