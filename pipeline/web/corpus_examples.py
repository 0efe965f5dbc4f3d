"""Examples of chunks in their context, found in the beginning of a split."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Self

import numpy as np

from data.corpus import Corpus
from pipeline.run.index.queries import PIXELS

MOST_BYTES = 4 << 20  # searched bytes of a split
_MOST_TRIED = 4000  # tested positions per chunk; its bytes may occur without being a chunk
_AROUND = 60  # bytes shown on each side


@dataclass
class Example:
    """An occurrence of a chunk: the text before and after it in its document."""

    before: str
    after: str


class ExampleFinder:
    """A search for examples in the beginning of a split.

    Attributes:
        where: the text that is searched, in words, or the reason why there is none.
    """

    def __init__(self, where: str, pieces: list[bytes], lengths: list[np.ndarray], begins: list[int]) -> None:
        """Join the pieces of documents to one text.

        Args:
            where: see the class.
            pieces: bytes of documents or parts of them.
            lengths: of the chunks in each piece, (N,).
            begins: bytes at which documents begin.
        """
        self.where = where
        self._text = b"".join(pieces)
        each = np.concatenate(lengths) if lengths else np.zeros(0, np.uint8)
        self._bounds = np.concatenate([[0], np.cumsum(each, dtype=np.int64)])
        self._documents = np.array([*begins, len(self._text)], np.int64)

    @classmethod
    def from_split(cls, corpus: Corpus, split: str) -> Self:
        """Read the first 4 MB of a split. Corpora of pictures and corpora at a URL are not read."""
        if corpus.is_remote or corpus.options.kind == PIXELS:
            why = "none, because the shards are behind a URL" if corpus.is_remote else "not of pictures"
            return cls(why, [], [], [])
        texts, lengths, begins, size = list[bytes](), list[np.ndarray](), list[int](), 0
        for piece in corpus.iterate_slices(split):
            if size >= MOST_BYTES:
                break
            chunks = int(np.searchsorted(np.cumsum(piece.lengths, dtype=np.int64), MOST_BYTES - size)) + 1
            lengths.append(piece.lengths[:chunks])
            texts.append(piece.tokens[: int(lengths[-1].sum(dtype=np.int64))].astype(np.uint8).tobytes())
            if piece.begins or not begins:
                begins.append(size)
            size += len(texts[-1])
        whole = size >= corpus.split_counts(split).tokens
        where = f"{'the' if whole else f'the first {size / 1e6:.1f} MB of the'} {split} split"
        return cls(where, texts, lengths, begins)

    def find_examples(self, chunk: bytes, most: int = 3) -> list[Example]:
        """Return up to `most` occurrences of a chunk, in different documents if possible."""
        if positions := list(islice(self._find_positions(chunk, apart=True), most)):
            others = (place for place in self._find_positions(chunk) if place not in positions)
            positions += islice(others, most - len(positions))
        return [self._make_example(place, len(chunk)) for place in positions]

    def _find_positions(self, chunk: bytes, apart: bool = False) -> Iterator[int]:
        """Yield the positions where the bytes are a chunk; `apart`: one position per document."""
        place = self._text.find(chunk)
        for _ in range(_MOST_TRIED):
            if place < 0:
                return
            number = int(np.searchsorted(self._bounds, place))
            begin, after = place, place + 1
            if self._bounds[number] == begin and self._bounds[number + 1] == begin + len(chunk):
                yield begin
                after = self._document_bounds(begin)[1] if apart else begin + len(chunk)
            place = self._text.find(chunk, after)

    def _document_bounds(self, place: int) -> tuple[int, int]:
        number = int(np.searchsorted(self._documents, place, side="right"))
        return int(self._documents[number - 1]), int(self._documents[number])

    def _make_example(self, place: int, length: int) -> Example:
        begin, end = self._document_bounds(place)
        before = self._text[max(begin, place - _AROUND) : place]
        after = self._text[place + length : min(end, place + length + _AROUND)]
        return Example(*(part.decode(errors="ignore") for part in (before, after)))
