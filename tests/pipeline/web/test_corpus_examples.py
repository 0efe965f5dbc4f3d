"""Places of chunks, against a walk over all of them."""

from pathlib import Path

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from pipeline.run.run_directory import RunFolder
from pipeline.web.corpus_examples import ExampleFinder

CHUNKS = st.lists(st.sampled_from([b"a", b"ab", b"b", b"ba ", b" "]), min_size=1, max_size=8)


@given(st.lists(CHUNKS, min_size=1, max_size=4), st.sampled_from([b"a", b"ab", b"b", b"ba ", b" ", b"x"]))
def test_examples_are_places_of_the_chunk_in_as_many_documents_as_there_are(
    documents: list[list[bytes]], chunk: bytes
) -> None:
    texts = [b"".join(chunks) for chunks in documents]
    lengths = [np.array([len(each) for each in chunks], np.uint8) for chunks in documents]
    begins = np.cumsum([0, *(len(text) for text in texts[:-1])]).tolist()
    found = ExampleFinder("here", texts, lengths, begins).find_examples(chunk, most=3)
    places = [
        (number, b"".join(chunks[:at]).decode(), b"".join(chunks[at + 1 :]).decode())
        for number, chunks in enumerate(documents)
        for at, each in enumerate(chunks)
        if each == chunk
    ]
    assert len(found) == min(3, len(places))
    assert {(each.before, each.after) for each in found} <= {(before, after) for _, before, after in places}
    firsts = [next(place[1:] for place in places if place[0] == number) for number in sorted({p[0] for p in places})]
    assert [(each.before, each.after) for each in found][: len(firsts)] == firsts[: len(found)]


def test_only_the_beginning_of_a_split_is_read_and_said(run: Path, monkeypatch) -> None:
    corpus = RunFolder(run).open_corpus()
    whole = ExampleFinder.from_split(corpus, "train")
    monkeypatch.setattr("pipeline.web.corpus_examples.MOST_BYTES", 1000)
    part = ExampleFinder.from_split(corpus, "train")
    assert whole.where == "the train split" and part.where.startswith("the first 0.0 MB of the")
    tokens, lengths = next(corpus.iterate_documents("train"))
    document, chunk = tokens.tobytes(), tokens[: lengths[0]].tobytes()
    for found in (whole, part):
        example = found.find_examples(chunk, 1)[0]
        assert example.before == "" and document.startswith(chunk + example.after.encode())
