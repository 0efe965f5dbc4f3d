"""The stage `sample`: continuations of prompts, or lower halves of held-out pictures; printed and kept for the report."""

import logging
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path

import numpy as np

from pipeline.files import write_atomically
from pipeline.inference import Run
from pipeline.options import Options
from pipeline.runs import RunFolder

log = logging.getLogger(__name__)


@dataclass
class Sample:
    """A prompt and its continuation; bytes that are not UTF-8 are shown as hexadecimal escapes."""

    prompt: str
    text: str


def sample(options: Options, prompts: list[str] | None = None, samples: int = 1) -> list[Sample]:
    """Continues prompts, by default those of `sample.prompts`, which are also written to samples.json.

    A model of pictures completes the lower halves of `sample.pictures` held-out ones instead, into samples.png.

    Raises:
        FileNotFoundError: no such run, or nothing was trained in it.
        ValueError: a prompt for a model of pictures.
    """
    folder = RunFolder.find(Path(options.runs_dir) / options.name)
    run = Run(folder, options)
    if run.chunker.name == "pixels":
        if prompts:
            raise ValueError("this run's model is of pictures: it takes no --prompt, but completes sample.pictures=")
        return _complete_pictures(run, samples)
    written = [
        Sample(prompt, text.decode("utf-8", errors="backslashreplace"))
        for prompt in (options.sample.prompts if prompts is None else prompts)
        for text in run.sample(prompt, samples, options.sample)
    ]
    if prompts is None:
        folder.write_json("samples.json", [asdict(item) for item in written])
    return written


def _complete_pictures(run: Run, samples: int) -> list[Sample]:
    """Draws held-out pictures: what is given of each, its completions, and the original."""
    from pipeline import plots

    corpus, how = run.folder.corpus(), run.options.sample
    split = next((name for name in ("test", "valid", "train") if corpus.counts(name).documents), "train")
    originals = np.stack([tokens for tokens, _ in islice(corpus.documents(split), how.pictures)])
    chunks = originals.shape[1] // run.chunker.k
    given = originals[:, : chunks // 2 * run.chunker.k]
    lower = run.complete(given.repeat(samples, 0), chunks - chunks // 2, how)
    completed = np.concatenate([given.repeat(samples, 0), lower], 1).reshape(len(given), samples, -1)
    blank = np.concatenate([given, np.full_like(originals[:, given.shape[1] :], 255)], 1)
    rows = np.concatenate([blank[:, None], completed, originals[:, None]], 1)
    picture = run.folder.path / "samples.png"
    write_atomically(picture, plots.pictures(rows, ["given", *["completed"] * samples, "original"]))
    log.info("%s", picture)
    return [Sample(f"upper half of picture {number} of {split}", str(picture)) for number in range(1, len(rows) + 1)]
