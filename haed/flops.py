"""Model FLOPs of a training step: the products that the algorithm asks for, forward and twice that backward.

Recomputation (`pieces`) and element-wise work do not count. A product of (n, a) with (a, b) is 2·n·a·b.
"""

from torch import nn

from haed.candidates import Prepared
from haed.model import HAED
from haed.transformer import Attention


def flops_of_step(model: HAED, batch: Prepared, ranks: int = 1) -> float:
    """Of a prepared batch and its backward pass, on all ranks together, each rank's batch taken to be like this one.

    Matrices of the encoder see the distinct chunks, those of the main model every place of every window, the context's of
    the decoder the decoded chunks, and the decoder's others the decisions; an LSTM's recurrence begins at a chunk's second,
    and its tokens go through their matrix once each. Attention within chunks, and to the one before, does not count.
    """
    places = sum(piece.starts.numel() for piece in batch.pieces)
    decisions = sum(len(piece.packed.targets) for piece in batch.pieces)
    decoded = sum(len(piece.decoded) for piece in batch.pieces)
    encoded = len(batch.tokens) if batch.adjustment is not None else batch.candidates
    rows = {
        "encoder": encoded,
        "main": places,
        "head": batch.targets,
        "decoder": decisions,
        "decoder.context": decoded,
        "decoder.recurrent": decisions - decoded,
        "decoder.input": model.vocabulary + 1,
    }
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    total = 0.0
    for name, parameter in model.named_parameters():
        if (
            parameter.ndim == 2
            and parameter.requires_grad
            and id(parameter) not in embeddings
            and "positions" not in name
        ):
            first, *rest = name.split(".")
            total += parameter.numel() * rows.get(f"{first}.{rest[0]}", rows[first])
    if model.decoder.sees_before:  # keys and values of the chunks before, padding included
        qkv = (module.qkv.weight.numel() for module in model.decoder.modules() if isinstance(module, Attention))
        total += decoded * model.k * sum(qkv)
    context = batch.pieces[0].starts.shape[1]
    widths = (module.out.in_features for module in model.main.modules() if isinstance(module, Attention))
    total += sum(2 * places * context * width for width in widths)  # scores, and their product with the values
    if batch.adjustment is not None:
        total += batch.targets * batch.candidates * model.encoder.width
    return 6 * total * ranks
