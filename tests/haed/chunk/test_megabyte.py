"""Parity with the package MEGABYTE-pytorch, weight for weight, where the definitions agree.

docs/explanation/model-kinds.md lists where they do not.

The package is used as it is. Its token shift, which has no counterpart here, moves the second half of the channels: the weights
here write zeros into it. Its norms have no mean, ours have: what is written has none.
"""

from typing import Literal

import pytest
import torch
from torch import Tensor, nn

from haed.base import ChunkingSpec, TokenBatch
from haed.chunk.decoder import TransformerDecoder
from haed.chunk.encoder import MLPEncoder
from haed.chunk.main import TransformerMain
from haed.chunk.model import HAED
from haed.chunk.packing import Chunks
from haed.options import DecoderOptions, EncoderOptions, IEMOptions, MainOptions, ModelOptions
from haed.registry import make_system

V, T, P = 11, 5, 4  # symbols, patches, tokens of a patch
WIDE, NARROW, HEADS, HEAD = 16, 12, 2, 6


def quiet(weight: Tensor) -> Tensor:
    """The same, writing nothing into the second half of the channels (its rows), and no mean into the first."""
    first, rest = weight.chunk(2)
    return torch.cat([first - first.mean(0), torch.zeros_like(rest)])


def package(rotary: bool) -> nn.Module:
    megabyte = pytest.importorskip("MEGABYTE_pytorch", reason="pip install --no-deps -r benchmarks/peers.txt")
    torch.manual_seed(0)
    made = megabyte.MEGABYTE(
        num_tokens=V,
        dim=(WIDE, NARROW),
        depth=(2, 2),
        max_seq_len=(T, P),
        dim_head=HEAD,
        heads=HEADS,
        ff_mult=2,
        rel_pos=rotary,
        pos_emb=not rotary,
    ).double()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter += 0.3 * torch.randn_like(parameter)
        tables = [made.token_embs[0], *(made.pos_embs or [])]
        for start, table in [(start, None) for start in made.start_tokens] + [(None, table) for table in tables]:
            values = start if start is not None else table.weight.t()
            values.copy_(quiet(values))
        writers = [made.token_embs[1][3], made.to_next_transformer_projections[0][1]]
        writers += [each for stage in made.transformers for a, f in stage.layers for each in (a.to_out, f[4])]
        for linear in writers:
            shape = (P, NARROW) if len(linear.weight) == P * NARROW else (1, -1)
            for values in (linear.weight, linear.bias):
                if values is not None:
                    parts = values.unflatten(0, shape)
                    values.copy_(torch.stack([quiet(part) for part in parts]).flatten(0, 1))
        made.token_embs[1][4].weight.fill_(1)
        made.token_embs[1][4].bias.zero_()
    return made.eval()


def load_blocks(blocks: nn.ModuleList, stage: nn.Module) -> None:
    for block, (attention, ffn) in zip(blocks, stage.layers, strict=True):
        values = {
            "norm.weight": attention.norm.g,
            "attention.qkv.weight": torch.cat([attention.to_q.weight, attention.to_kv.weight]),
            "attention.out.weight": attention.to_out.weight,
            "feed_forward.norm.weight": ffn[0].g,
            "feed_forward.up.weight": ffn[1].weight,
            "feed_forward.up.bias": ffn[1].bias,
            "feed_forward.down.weight": ffn[4].weight,
            "feed_forward.down.bias": ffn[4].bias,
        }
        zeros = {name: torch.zeros_like(value) for name, value in block.state_dict().items()}
        block.load_state_dict(zeros | values)


@torch.no_grad()
def ours(theirs: nn.Module, rotary: bool) -> HAED:
    """With the same weights; what the package has not is zero."""
    positions: Literal["rotary", "learned"] = "rotary" if rotary else "learned"
    options = ModelOptions(
        encoder=EncoderOptions(kind="linear", token_width=NARROW, width=WIDE),
        main=MainOptions(layers=2, width=WIDE, heads=HEADS, head_width=HEAD, ffn=2 * WIDE, positions=positions),
        decoder=DecoderOptions(kind="transformer", layers=2, width=NARROW, heads=HEADS, ffn=2 * NARROW, context="each"),
    )
    made = make_system(options, IEMOptions(), ChunkingSpec(P, V, True, T)).double().eval()
    assert isinstance(made, HAED)
    encoder, main, decoder = made.encoder, made.main, made.decoder
    assert isinstance(encoder, MLPEncoder) and isinstance(main, TransformerMain)
    assert isinstance(decoder, TransformerDecoder)
    for module in (*main.modules(), *decoder.modules()):
        if isinstance(module, nn.LayerNorm):
            module.eps = 0

    embedding, _, norm, linear, end = theirs.token_embs[1]
    encoder.tokens.weight[:V] = embedding.weight
    for mine, other in ((encoder.norm, norm), (encoder.layers[0], linear), (encoder.output, end)):
        mine.load_state_dict(other.state_dict())

    main.start.copy_(theirs.start_tokens[0])
    load_blocks(main.blocks, theirs.transformers[0])
    main.norm.weight.copy_(theirs.transformers[0].norm.g)
    load_blocks(decoder.blocks, theirs.transformers[1])
    decoder.norm.weight.copy_(theirs.transformers[1].norm.g)

    decoder.positions.weight.zero_()
    if not rotary:
        assert main.positions is not None
        main.positions.zero_()  # the package's start tokens have none, and what follows them begins with its first
        main.positions[1:] = theirs.pos_embs[0].weight[: T - 1]
        decoder.positions.weight[1:] = theirs.pos_embs[1].weight[: P - 1]
    decoder.tokens.weight[:V], decoder.tokens.weight[V] = theirs.token_embs[0].weight, theirs.start_tokens[1]
    project = theirs.to_next_transformer_projections[0][1]
    decoder.context.weight.zero_()  # where ours predicts a patch's first token, the package's sees its start token alone
    decoder.context.bias.zero_()
    decoder.context.weight[NARROW:] = project.weight[:-NARROW]
    decoder.context.bias[NARROW:] = project.bias[:-NARROW]
    decoder.output.weight[:V], decoder.output.bias[:V] = theirs.to_logits.weight, theirs.to_logits.bias
    return made


@torch.no_grad()
def test_the_patch_embedder_and_the_global_model_are_the_packages() -> None:
    """With rotary positions in it."""
    theirs = package(rotary=True)
    made = ours(theirs, rotary=True)
    tokens = torch.randint(V, (3, T, P))
    chunks = Chunks(tokens.flatten(0, 1), torch.full((3 * T,), P))
    patches = theirs.token_embs[1](tokens)
    vectors = made.encode(chunks).vector.unflatten(0, (3, T))
    torch.testing.assert_close(vectors, patches, rtol=0, atol=1e-12)
    start = theirs.start_tokens[0].expand(3, 1, -1)
    predictions = theirs.transformers[0](torch.cat([start, patches[:, :-1]], 1))
    starts = torch.zeros(3, T, dtype=torch.bool)
    torch.testing.assert_close(made.main(vectors, starts), predictions, rtol=0, atol=1e-7)


@torch.no_grad()
def test_log_probabilities_within_patches_are_the_packages() -> None:
    """Of all tokens but the first one of each patch, for which it uses the patch before (see docs/explanation/model-kinds.md)."""
    theirs = package(rotary=False)
    made = ours(theirs, rotary=False)
    tokens = torch.randint(V, (3, T, P))
    found = made.decision_log_likelihood(TokenBatch.from_chunks(tokens, torch.full((3, T), P)))[..., :P]
    logits = theirs(tokens)  # after each token, of the next
    wanted = logits.log_softmax(-1)[:, :, :-1].gather(-1, tokens[:, :, 1:, None]).squeeze(-1)
    torch.testing.assert_close(found[:, :, 1:], wanted, rtol=0, atol=1e-10)
    assert float(wanted.std()) > 0.5
