import torch

from haed.chunk.mixture import ChunkVocabulary
from haed.chunk.packing import Chunks, find_distinct
from tests.haed.chunk.test_model import small, windows


def test_the_softmax_over_a_closed_set_by_brute_force() -> None:
    """In float64, chunk by chunk; over the set its probabilities sum to one."""
    model, given = small("lstm"), windows(2, 6, 3, 3)
    given.lengths[1, 4:] = 0
    real = given.chunk_mask
    every = find_distinct(given.tokens[real], given.lengths[real])
    lexicon = ChunkVocabulary(Chunks(every.tokens, every.lengths))
    closed = model.embed_vocabulary(lexicon)
    with torch.no_grad():
        rows = lexicon.find_rows(Chunks(given.tokens, given.lengths)[real])
        found = closed.log_softmax(model.compute_query(model.predict_vectors(given)), rows)
        embedded = model.encode(Chunks(every.tokens, every.lengths))
        query = model.compute_query(model.predict_vectors(given))
        scores = (query @ model.compute_key(embedded.vector).t() + embedded.bias).log_softmax(1)
    torch.testing.assert_close(found, scores.gather(1, every.inverse[:, None]).squeeze(1))
    assert len(closed) == len(every.keys) and len(found) == 10
