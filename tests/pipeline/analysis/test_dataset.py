"""What an analysis reads of a corpus: the frequent chunks, and the split as a stream of them."""

from pathlib import Path

import numpy as np
import pytest

from pipeline.analysis import dataset
from pipeline.analysis.dataset import find_frequent_chunks, read_stream
from pipeline.run.index.chunk_index import ChunkIndex
from pipeline.run.opened import open_run


@pytest.mark.parametrize("most", [1, 100, 10**6])
def test_a_stream_has_no_more_chunks_than_asked_for(run: Path, most: int) -> None:
    corpus = open_run(run).folder.open_corpus()
    documents = [len(lengths) for _, lengths in corpus.iterate_documents("train")]
    stream, whole = read_stream(corpus, "train", find_frequent_chunks(corpus, "train", 10**6, 1), most)
    assert (stream >= 0).sum() == min(most, sum(documents)) and whole == (most > sum(documents))
    gaps = 1 if most < documents[0] else len(documents)
    assert np.array_equal((stream < 0).nonzero()[0][:1], [0]) and (stream < 0).sum() == gaps


def test_a_limit_on_chunks_does_not_lower_the_minimum_count(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dataset, "ENOUGH", 20)
    corpus = open_run(run).folder.open_corpus()
    found = find_frequent_chunks(corpus, "train", 8, None)
    assert len(found.chunks) == 8 and found.least == 10 and found.rows.left_out > 12
    monkeypatch.setattr(dataset, "ENOUGH", 10**6)
    assert find_frequent_chunks(corpus, "train", 8, None).least == 1


def test_a_minimum_count_is_lowered_only_if_it_can_be(run: Path) -> None:
    corpus = open_run(run).folder.open_corpus()
    with pytest.raises(ValueError, match=r"few to analyse\. Choose another analyse\.split"):
        find_frequent_chunks(corpus, "train", 2, 1)
    with pytest.raises(ValueError, match=r"few to analyse\. Lower analyse\.min_count, or choose another"):
        find_frequent_chunks(corpus, "train", 2, 5)


def test_the_mean_is_that_of_an_index(run: Path) -> None:
    opened = open_run(run)
    opened.options.analyse.max_chunks, opened.options.analyse.projector = 20, 0
    found = dataset.load_analysis_data(opened, opened.options)
    mean = ChunkIndex(opened.folder, opened.digest).mean
    assert mean is not None and np.allclose(found.vectors - found.centred, mean, atol=1e-6)
