"""Recalled chunks against counting by brute force: every order, every chunk, ends of documents, what was never seen."""

import pytest
import torch
from torch import Tensor

from haed.chunk.packing import Chunks, chunk_keys
from haed.chunk.recalled import ORDERS, ChunkRecall, Recalled

K = 3


def chunks_of(values: list[int]) -> Chunks:
    """Chunks of different lengths for small numbers: equal ones for equal numbers."""
    tokens, lengths = torch.zeros(len(values), K, dtype=torch.long), torch.zeros(len(values), dtype=torch.long)
    for row, value in enumerate(values):
        lengths[row] = 1 + value % K
        tokens[row, : int(lengths[row])] = 1 + value
    return Chunks(tokens, lengths)


def recall_of(documents: list[list[int]]) -> tuple[ChunkRecall, list[int]]:
    values = sorted({value for document in documents for value in document})
    chunks = chunks_of(values)
    order = chunk_keys(chunks.tokens, chunks.lengths).argsort()
    values = [values[i] for i in order]
    ids = [0]
    for document in documents:
        ids += [1 + values.index(value) for value in document] + [0]
    return ChunkRecall.build(chunks[order], torch.tensor(ids[1:], dtype=torch.int32)), values


def brute_force(documents: list[list[int]], past: list[int], values: list[int]) -> list[float]:
    """p of every chunk of `values` after `past`, counted."""
    every = [value for document in documents for value in document]
    p = {value: every.count(value) / len(every) for value in values}
    past = [-1, *past]
    for order in ORDERS:
        if order > len(past):
            break
        after: list[int] = []
        for document in documents:
            whole = [-1, *document]
            after += [whole[i] for i in range(1, len(whole)) if i >= order and whole[i - order : i] == past[-order:]]
        if after:
            types = len(set(after))
            p = {v: (after.count(v) + types * p[v]) / (len(after) + types) for v in values}
    return [p[value] for value in values]


def random_documents(generator: torch.Generator, number: int, size: int, values: int) -> list[list[int]]:
    lengths = torch.randint(0, size, (number,), generator=generator).tolist()
    return [torch.randint(0, values, (length,), generator=generator).tolist() for length in lengths]


@pytest.mark.parametrize(("number", "size", "values"), [(1, 2, 1), (5, 30, 2), (8, 60, 3), (3, 400, 2), (20, 9, 40)])
def test_every_probability_is_that_of_counting_and_they_sum_to_one(number: int, size: int, values: int) -> None:
    generator = torch.Generator().manual_seed(number)
    documents = [*random_documents(generator, number, size, values), [0]]
    recall, known = recall_of(documents)
    for held in [*random_documents(generator, 2, 40, values + 1), (documents[0] * 2)[:45]]:
        part = Recalled(recall)
        whole = Recalled(recall).score(torch.zeros(len(held), 1), chunks_of(held))
        for place, value in enumerate(held):
            expected = torch.tensor(brute_force(documents, held[:place], known), dtype=torch.float64)
            prediction = part.predict_next(torch.zeros(1))
            assert prediction.present
            _, probability = prediction.list_outcomes()
            torch.testing.assert_close(probability, expected)
            torch.testing.assert_close(probability.sum(), torch.tensor(1.0, dtype=torch.float64))
            scores = part.score(torch.zeros(1, 1), chunks_of([value]))
            own = expected[known.index(value)] if value in known else torch.tensor(0.0, dtype=torch.float64)
            torch.testing.assert_close(scores.log_prob.exp()[0], own)
            torch.testing.assert_close(whole.log_prob.exp()[place], own)  # one by one or all at once
            torch.testing.assert_close(scores.features[0], prediction.features)
            torch.testing.assert_close(whole.features[place], prediction.features)


def test_what_stands_before_and_behind_the_longest_context_is_counted_right() -> None:
    """Contexts that agree in more than 32 chunks, and differ in what precedes or follows them."""
    generator = torch.Generator().manual_seed(7)
    same = torch.randint(0, 4, (40,), generator=generator).tolist()
    documents = [[first, *same[size:], last] for first in range(3) for last in range(4) for size in (0, 7, 8, 9)]
    recall, values = recall_of(documents)
    for first in range(4):
        held = [first, *same, 2, 1]
        part = Recalled(recall)
        scores = part.score(torch.zeros(len(held), 1), chunks_of(held))
        for place in range(len(held)):
            expected = torch.tensor(brute_force(documents, held[:place], values), dtype=torch.float64)
            torch.testing.assert_close(scores.log_prob[place].exp(), expected[values.index(held[place])])


def test_a_train_split_without_chunks_recalls_nothing() -> None:
    recall = ChunkRecall.build(chunks_of([]), torch.zeros(1, dtype=torch.int32))
    part = Recalled(recall)
    scores: Tensor = part.score(torch.zeros(2, 1), chunks_of([1, 2])).log_prob
    assert scores.tolist() == [-torch.inf, -torch.inf]
    assert not part.predict_next(torch.zeros(1)).present
