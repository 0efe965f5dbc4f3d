"""Compute the perplexity of words by modified Kneser-Ney n-grams (Chen and Goodman 1998), interpolated.

    python benchmarks/word_ngrams.py train.txt test.txt [--order 5]

Words are counted as WikiText's: what is between white space, and one end for each line. The vocabulary is closed, as in the
published figures. So every word of the test file must occur in train (WikiText writes `<unk>` for the others). Contexts go
across lines.
"""

import argparse
import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parent.parent)  # else `data` would be the script beside this one

import numpy as np

from pipeline.console import exit_on_error

END = "<eos>"


def read_words(path: Path) -> list[str]:
    return [word for line in path.open(encoding="utf-8") for word in (*line.split(), END)]


def number_grams(
    longest: int, train: np.ndarray, test: np.ndarray, words: int
) -> list[tuple[np.ndarray, np.ndarray, int]]:
    """Number the n-grams of train for n from 1 to `longest`.

    Return for each n the numbers of those that end at each word of train, of those that end at each word of test (−1 if train lacks
    it), and how many there are. The first n − 1 words end none and are left out.
    """
    grams = [(train, test, words)]
    for n in range(2, longest + 1):
        before, before_test, _ = grams[-1]
        keys, wanted = (x[:-1].astype(np.int64) * words + y[n - 1 :] for x, y in ((before, train), (before_test, test)))
        kinds, numbers = np.unique(keys, return_inverse=True)
        at = np.minimum(np.searchsorted(kinds, wanted), len(kinds) - 1)
        known = (before_test[:-1] >= 0) & (kinds[at] == wanted)
        grams.append((numbers, np.where(known, at, -1), len(kinds)))
    return grams


def kneser_ney(train: np.ndarray, test: np.ndarray, words: int, order: int) -> np.ndarray:
    """Return the probability of each word of test, all numbered below `words`."""
    grams = number_grams(order, train, test, words)
    probability = np.full(len(test), 1 / words)
    for n, (numbers, wanted, size) in enumerate(grams, 1):
        if n == order:
            counts = np.bincount(numbers, minlength=size)
        else:  # how many different words stand before it
            longer, _, many = grams[n]
            ends = np.zeros(many, np.int64)
            ends[longer] = numbers[1:]
            counts = np.bincount(ends, minlength=size)
        of = [max(int((counts == times).sum()), 1) for times in (1, 2, 3, 4)]
        share = of[0] / (of[0] + 2 * of[1])
        rates = [0.0, *(times - (times + 1) * share * of[times] / of[times - 1] for times in (1, 2, 3))]
        discounts = np.clip(rates, 0, [0, 1, 2, 3])[np.minimum(counts, 3)]
        contexts, at = np.zeros(size, np.int64), np.zeros(len(wanted), np.int64)
        if n > 1:
            before, before_test, _ = grams[n - 2]
            contexts[numbers], at = before[:-1], before_test[:-1]
        total, left = (np.bincount(contexts, weights=x) for x in (counts, discounts))
        row = np.where(wanted >= 0, wanted, 0)
        discounted = np.where(wanted >= 0, counts[row] - discounts[row], 0)
        there = (at >= 0) & (at < len(total))
        at = np.where(there, at, 0)
        there &= total[at] > 0
        below = probability[n - 1 :]
        probability[n - 1 :] = np.where(there, (discounted + left[at] * below) / np.maximum(total[at], 1), below)
    return probability


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("train", type=Path)
    parser.add_argument("test", type=Path)
    parser.add_argument("--order", type=int, default=5)
    arguments = parser.parse_args()
    train, test = read_words(arguments.train), read_words(arguments.test)
    numbers = {word: number for number, word in enumerate(dict.fromkeys(train))}
    if unknown := {word for word in test if word not in numbers}:
        parser.error(f"{len(unknown)} words of {arguments.test} are not in {arguments.train}, such as {min(unknown)}")
    train_numbers, test_numbers = (np.array([numbers[word] for word in words]) for words in (train, test))
    for order in range(1, arguments.order + 1):
        mean = -float(np.log(kneser_ney(train_numbers, test_numbers, len(numbers), order)).mean())
        print(
            f"order {order}: perplexity {np.exp(mean):.1f} of {len(test):,} words, {len(numbers):,} different ones",
            flush=True,
        )


if __name__ == "__main__":
    with exit_on_error():
        main()
