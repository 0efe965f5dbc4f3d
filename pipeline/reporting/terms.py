"""Terms of the pages, each explained by a footnote of the page that uses it."""

from html import escape

from markupsafe import Markup

TERMS = {
    "bits/char": "Exact bits per character: −log₂ of the probability of the text, divided by its characters. Fewer is better.",
    "bits/dim": "Exact bits per value of a picture or a sound: −log₂ of its probability, divided by its values. "
    "Fewer is better.",
    "bits/token": "Exact bits per token. A token of a text is a byte.",
    "standard error": "Standard error of the mean over documents. It does not include the variation between seeds.",
    "perplexity of words": "2 to the power of the bits per word, where white space divides the words. Lower is better.",
    "context": "A chunk is predicted from the chunks before it in a window of at most this many chunks.",
    "chunk": "A short piece of a document, such as a word with the white space after it. The model predicts one chunk at a time.",
    "known chunk": "A chunk of the model's vocabulary, which holds the most frequent chunks of the train split. Every other "
    "chunk is spelled by the decoder. The decoder can also spell a known chunk.",
    "mixture": "The model adds two probabilities of a chunk: that of the known chunks and that of the decoder. The gate "
    "weights them.",
    "gate": "The weights of the parts of the likelihood. They sum to one and are computed before the chunk is read. In "
    "the model alone, the gate is the weight of the known chunks.",
    "memory": "What evaluation and sampling may look up: the chunks before, in the same document, and the train "
    "split. Memory is added after training. “Without memory” is the model alone.",
    "known": "From the vocabulary of the train split.",
    "spelled": "From the decoder, token by token.",
    "copied": "A chunk of the same document, found where the model had a similar state.",
    "repeated": "A chunk of the same document, found after the same chunks.",
    "recalled": "A chunk of the train split, found after the same chunks.",
    "IEM loss": "Loss of phase one: the cross-entropy of the next chunk among the chunks of the batch, in nats per chunk. "
    "It is not a likelihood, so it is not comparable with bits.",
    "baseline": "A model of bytes or a compressor, on the same bytes. “Given train” means that it read the train split first.",
    "validation": "A fixed subset of the validation split, scored without memory.",
}


class Footnotes:
    """The footnotes of one page. Numbers follow the order in which the page uses the terms."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}

    def mark(self, term: str, shown: str = "") -> Markup:
        """Return a term as a link to its footnote.

        Args:
            term: a key of `TERMS`.
            shown: text of the link; empty: the term.
        """
        number = self._numbers.setdefault(term, len(self._numbers) + 1)
        explanation = escape(TERMS[term])
        return Markup(
            f'<a class="term" href="#note-{number}" title="{explanation}">{escape(shown or term)}<sup>{number}</sup></a>'
        )

    @property
    def used(self) -> list[tuple[int, str, str]]:
        """Return number, term and explanation of each footnote so far."""
        return [(number, term, TERMS[term]) for term, number in self._numbers.items()]
