"""Shared options of the models of these tables and figures: the paper's kinds, at half of its depths and in its sizes.

The paper's tokens are BPE tokens, ours are bytes. A scale of 4 is about a word, and a window is 512 bytes.
"""

SIZE = (
    *("model.token.width=128", "model.token.heads=4", "model.token.head_width=32", "model.token.ffn=512"),
    "model.token.shift=false",  # which presets have, and the paper has not
)
BYTES = (
    "chunker.kind=fixed",
    "chunker.k=16",
    "batch.context=32",
    "batch.sequences=4",
)  # windows of 512, as in the paper's presets
QUICK = ("evaluate.breakdown=false", "evaluate.sequences=64", "validation.windows=8")
SMALL = (*SIZE, *BYTES, *QUICK)
WORDS = ("chunker.kind=words", "chunker.k=12", "batch.context=128")  # where words are told apart
HALF = "depths half of the paper's, widths a sixth"
PRESETS = {  # name: small, and of the paper's sizes
    "Vanilla": ("flat", "paper-transformer-wikitext103"),
    "Top-down": ("top-down", "paper-top-down-wikitext103"),
    "Bottom-up": ("bottom-up", "paper-bottom-up-wikitext103"),
    "Retina": ("retina", "paper-retina-wikitext103"),
}


def layers(kind: str, depth: str) -> str:
    """Return the option of layers: their number for a vanilla model or a Retina, else layers@scale."""
    name = {"Vanilla": "hourglass.hierarchy", "Retina": "retina.layers"}.get(kind, "multiscale.layers")
    return f"model.{name}={depth}{'@1' if kind == 'Vanilla' else ''}"
