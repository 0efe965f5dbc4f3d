"""Spelling with the words of a document: by brute force, sums of symbols, and what is fitted."""

import itertools
import math

import pytest
import torch
from torch import Tensor

from haed.chunk.packing import Chunks
from haed.chunk.spelling import SUFFIXES, DocumentWords, Speller

K, V = 5, 2  # so that the last 3 symbols are a context of their own


def chunks_of(words: list[tuple[int, ...]]) -> Chunks:
    tokens = torch.tensor([[*word, *[0] * (K - len(word))] for word in words]).view(-1, K)
    return Chunks(tokens, torch.tensor([len(word) for word in words], dtype=torch.long))


def some_scale() -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(K + 1, DocumentWords.contexts, generator=generator, dtype=torch.float64)


def all_words(fixed: bool) -> list[tuple[int, ...]]:
    sizes = [K] if fixed else range(1, K + 1)
    return [word for size in sizes for word in itertools.product(range(V), repeat=size)]


def uniform_decisions(words: list[tuple[int, ...]], fixed: bool) -> Tensor:
    """log p of a decoder for which all symbols that are possible are equally likely."""
    result = torch.zeros(len(words), K + 1, dtype=torch.float64)
    for row, word in enumerate(words):
        for place in range(len(word) + (len(word) < K and not fixed)):
            result[row, place] = -math.log(V if fixed or place == 0 else V + 1)
    return result


@pytest.mark.parametrize("fixed", [False, True])
def test_the_probabilities_of_all_strings_sum_to_one_whatever_the_document_has(fixed: bool) -> None:
    words = DocumentWords(K, V, fixed)
    speller = Speller(some_scale())
    every = all_words(fixed)
    for read in [[], *([word] for word in every[::3]), every[:2]]:
        words.remember_chunks(chunks_of(read))
        mixed = speller.mix_decisions(uniform_decisions(every, fixed), words.count_symbols(chunks_of(every)))
        assert mixed.sum(1).exp().sum().item() == pytest.approx(1)


def test_every_probability_is_that_of_counting_different_words_by_brute_force() -> None:
    generator = torch.Generator().manual_seed(0)
    every = all_words(False)
    document = [every[i] for i in torch.randint(0, len(every), (30,), generator=generator).tolist()]
    scale = some_scale()
    decisions = uniform_decisions(document, False)
    found = Speller(scale).mix_decisions(decisions, DocumentWords(K, V, False).read_chunks(chunks_of(document)))
    for number, word in enumerate(document):
        before = [(*other, V) if len(other) < K else other for other in set(document[:number])]
        symbols = (*word, V) if len(word) < K else word
        for place, symbol in enumerate(symbols):
            p = float(decisions[number, place].exp())
            for which, size in enumerate((*SUFFIXES, None)):
                context = symbols[place - size : place] if size and size <= place else symbols[:place]
                at = [place] if size is None else range(size, K + 1) if size <= place else []
                following = [
                    other[i]
                    for other in before
                    for i in at
                    if i < len(other) and other[i - len(context) : i] == context
                ]
                if following:
                    pull = float(scale[place, which].exp()) * len(set(following))
                    p = (following.count(symbol) + pull * p) / (len(following) + pull)
            assert float(found[number, place].exp()) == pytest.approx(p)


def test_symbols_one_by_one_have_the_probabilities_of_whole_chunks() -> None:
    words, every = DocumentWords(K, V, False), all_words(False)
    words.remember_chunks(chunks_of(every[3:9]))
    speller = Speller(some_scale())
    mixed = speller.mix_decisions(uniform_decisions(every, False), words.count_symbols(chunks_of(every)))
    for row, word in enumerate(every):
        for place, symbol in enumerate((*word, V) if len(word) < K else word):
            logits = torch.zeros(1, V + 1)
            logits[0, V] = -torch.inf if place == 0 else 0.0
            found = speller.mix_symbols(logits, [words.next_symbols(word[:place])], place)
            assert float(found.exp().sum()) == pytest.approx(1)
            assert float(found[0, symbol]) == pytest.approx(float(mixed[row, place]))


def test_what_is_fitted_trusts_words_where_they_are_right() -> None:
    document = [(0, 1, 0, 1, 1), (1, 0, 1, 0, 0)] * 200
    counts = DocumentWords(K, V, False).read_chunks(chunks_of(document))
    decisions = uniform_decisions(document, False)
    nothing = torch.zeros(len(document), dtype=torch.bool)
    speller = Speller.fit(decisions, counts, nothing)
    assert speller.log_scale[1, -1] < -1  # after its first symbol a word is certain
    assert speller.mix_decisions(decisions, counts).sum() > 0.5 * decisions.sum()
    none = Speller.fit(decisions[:0], counts[:0], nothing[:0])
    assert none.log_scale.exp().flatten().tolist() == pytest.approx([1.0] * (K + 1) * DocumentWords.contexts)


def test_a_copy_goes_on_by_itself() -> None:
    words = DocumentWords(K, V, False)
    words.remember_chunks(chunks_of([(0, 1)]))
    other = words.fork()
    other.remember_chunks(chunks_of([(0, 0)]))
    assert words.next_symbols((0,)) == [(2, {1: 1})] and other.next_symbols((0,)) == [(2, {1: 1, 0: 1})]
