"""Quality of samples: likelihood under an n-gram model, repeats, BLEU against the replaced text, and time.

Subramanian et al. 2020, appendix 6.3. Prompts of 64 words are spread over the valid split. Three samples of each are
drawn at temperature 0.7 from the 10 likeliest tokens (the paper does not state its number). The n-gram model is the
Witten-Bell byte model that evaluations use as a baseline, fitted on the train split. Repeats are the share of word
n-grams that occurred before in their sample. BLEU scores the true text with the samples as references.
"""

import math
import re
from collections.abc import Sequence

from haed.options import SYSTEMS
from pipeline.config import SampleOptions
from pipeline.experiments.measures import Measured
from pipeline.run.opened import Run
from pipeline.score import baselines

PROMPTS, SAMPLES, WORDS, BYTES = 8, 3, 64, 320  # bytes: about as many as so many words have
ORDER, GRAMS = 5, (1, 2, 3, 4)
_SHOWN, _LETTERS = 3, 160


def measure(run: Run) -> Measured:
    """Measure bits per character under the n-gram model, repeats, seconds per sample, and BLEU.

    A note has the same metrics for the true text.

    Raises:
        ValueError: the valid split is shorter than a prompt and its continuation.
    """
    corpus, k = run.folder.open_corpus(), run.system.cut.k
    prompts, truths = spread(b"".join(corpus.iterate_original_blocks("valid")))
    chunks = WORDS if SYSTEMS[run.options.model.kind].chunks else math.ceil(BYTES / k)
    how = SampleOptions(chunks=chunks, temperature=0.7, top_k=10, top_p=1.0)
    found = [run.continued(prompt, SAMPLES, how) for prompt in prompts]
    written = [[text.decode(errors="replace") for text in each.texts] for each in found]
    train = b"".join(corpus.iterate_original_blocks("train"))
    figures = _counted(train, [text for each in written for text in each])
    text = ", ".join(f"{name} {value:.2f}" for name, value in _counted(train, truths).items())
    notes = [f"of the text that samples stand for: {text}"]
    figures["seconds a sample"] = sum(each.seconds for each in found) / (SAMPLES * len(found))
    try:
        figures["BLEU"] = bleu(truths, written)
    except ImportError:
        notes.append("no BLEU: pip install 'haed[experiments]', and delete measures/samples.json of the runs")
    rows = [["prompt, its end", "sample", "the text"]]
    for prompt, each, truth in list(zip(prompts, written, truths, strict=True))[:_SHOWN]:
        rows.append([prompt.decode(errors="replace")[-_LETTERS:], each[0], truth])
    return Measured(figures, examples=rows, notes=notes)


def _counted(train: bytes, texts: Sequence[str]) -> dict[str, float]:
    """Return the bits per character under n-grams of `train`, and the texts' mean repeats."""
    (scored, *_) = baselines.measure_baselines(train, "".join(texts).encode(), [ORDER])
    repeated = {f"repeated {n}-grams": sum(repeats(each, n) for each in texts) / len(texts) for n in GRAMS}
    return {"bits/char of n-grams": scored.bits_per_char, **repeated}


def spread(text: bytes) -> tuple[list[bytes], list[str]]:
    """Return evenly spaced prompts of WORDS words, and the words that follow each.

    Raises:
        ValueError: there are too few words.
    """
    words = [match.start() for match in re.finditer(rb"\S+", text)]
    first = len(words) - 2 * WORDS
    if first <= 0:
        raise ValueError(f"the valid split has {len(words)} words: samples need {2 * WORDS + 1}")
    begins = [first * number // PROMPTS for number in range(PROMPTS)]
    parts = [[words[begin + skip] for skip in (0, WORDS, 2 * WORDS)] for begin in begins]
    return [text[a:b] for a, b, _ in parts], [text[b:c].decode(errors="replace") for _, b, c in parts]


def repeats(text: str, n: int) -> float:
    """Return the share of word n-grams that occurred before in a text."""
    words = text.split()
    grams = [tuple(words[at : at + n]) for at in range(len(words) - n + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


def bleu(truths: Sequence[str], written: Sequence[Sequence[str]]) -> float:
    """Return the BLEU of texts with the samples of each as its references, from 0 to 100.

    Raises:
        ImportError: sacrebleu is not installed.
    """
    import sacrebleu

    return float(sacrebleu.corpus_bleu(list(truths), [list(each) for each in zip(*written, strict=True)]).score)
