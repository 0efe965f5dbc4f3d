"""Stage `sample`: continue prompts, or complete the lower halves of held-out pictures."""

import logging
from codecs import getincrementaldecoder
from dataclasses import asdict
from itertools import islice

import numpy as np

from data.checked import encode_checked_json
from data.corpus import Corpus
from data.filesystem import write_atomically
from pipeline.config import Options, SampleOptions
from pipeline.run.files import KeptSample, Sample, write_or_log
from pipeline.run.metrics import ProgressCounter
from pipeline.run.opened import Run, count_characters
from pipeline.run.run_directory import RunFolder, guard_results
from pipeline.run.spaces.queries import Texts, to_texts

log = logging.getLogger(__name__)


@guard_results
def sample(options: Options, prompts: Texts | None = None, samples: int = 1) -> list[Sample]:
    """Continue prompts, by default those of `sample.prompts`.

    If `sample.prompts` is empty, the prompts are frequent chunks of the corpus and the empty prompt. Samples of default
    prompts are also written to samples.json, with the digest of the checkpoint. A model of pictures completes the lower
    halves of `sample.pictures` held-out pictures instead, and writes samples.png.

    Raises:
        FileNotFoundError: nothing was trained in the run.
        ValueError: a prompt was given for a model of pictures.
    """
    folder = RunFolder.from_options(options)
    run = Run(folder, options)
    if run.chunker.name == "pixels":
        if prompts:
            raise ValueError("this run's model is of pictures: it takes no --prompt, but completes sample.pictures=")
        return _complete_pictures(run, samples)
    given = (options.sample.prompts or folder.corpus_prompts()) if prompts is None else prompts
    asked = to_texts(given, 'sample(options, ["import "])')
    log.info("continuing %d prompts by %s step %s", len(asked), run.phase, f"{run.step:,}")
    written, progress = list[Sample](), ProgressCounter("sample", len(asked), "prompts")
    for prompt in asked:
        written += continue_prompt(run, prompt, samples, options.sample)
        progress.add_done()
    if prompts is None:
        kept = [KeptSample(**asdict(item), checkpoint=run.digest, fallback=run.checkpoint.fallback) for item in written]
        write_or_log(folder.path / "samples.json", encode_checked_json([asdict(item) for item in kept]))
    return written


def continue_prompt(run: Run, prompt: bytes, samples: int, how: SampleOptions) -> list[Sample]:
    """Return `samples` continuations of a prompt, as displayed text and as bytes."""
    found = run.continued(prompt, samples, how)
    speed = sum(count_characters(text) for text in found.texts) / found.seconds
    shares = [None] * samples if found.summoned is None else found.summoned
    return [
        Sample(_escape_bytes(prompt), decode_whole_characters(text), (prompt + text).hex(), share, speed)
        for text, share in zip(found.texts, shares, strict=True)
    ]


def _escape_bytes(text: bytes) -> str:
    return text.decode(errors="backslashreplace")


def decode_whole_characters(written: bytes) -> str:
    """Decode UTF-8 without an incomplete character at the end. Other invalid bytes become escapes."""
    begun = getincrementaldecoder("utf-8")("backslashreplace")
    return begun.decode(written)


def _complete_pictures(run: Run, samples: int) -> list[Sample]:
    """Draw held-out pictures, each as its given half, its completions and the original."""
    from pipeline.reporting import plots

    corpus, how = run.folder.open_corpus(), run.options.sample
    split = next((name for name in ("test", "valid", "train") if corpus.split_counts(name).documents), "train")
    originals = np.stack([tokens for tokens, _ in islice(corpus.iterate_documents(split), how.pictures)])
    shape = _picture_shape(corpus)
    chunks = -(-originals.shape[1] // run.chunker.k)  # the last one may be shorter
    given = originals[:, : chunks // 2 * run.chunker.k]
    lower = run.complete(given.repeat(samples, 0), chunks - chunks // 2, how)[:, : originals.shape[1] - given.shape[1]]
    completed = np.concatenate([given.repeat(samples, 0), lower], 1).reshape(len(given), samples, -1)
    blank = np.concatenate([given, np.full_like(originals[:, given.shape[1] :], 255)], 1)
    rows = np.concatenate([blank[:, None], completed, originals[:, None]], 1)
    picture = run.folder.path / "samples.png"
    write_atomically(
        picture,
        plots.draw_pictures(rows.reshape(*rows.shape[:2], *shape), ["given", *["completed"] * samples, "original"]),
    )
    log.info("%s", picture)
    return [Sample(f"upper half of picture {number} of {split}: ", str(picture)) for number in range(1, len(rows) + 1)]


def _picture_shape(corpus: Corpus) -> tuple[int, int, int]:
    """Return the height, width and channels of the pictures of a corpus."""
    return corpus.form["height"], corpus.form["width"], corpus.form["channels"]
