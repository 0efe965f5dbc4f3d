"""Options of the models and of the IEM loss. Importing this module imports neither torch nor anything heavy."""

from dataclasses import dataclass, field
from typing import Annotated, Literal

from pydantic import Field


@dataclass(kw_only=True)
class EncoderOptions:
    """The encoder: a chunk, without context, to its embedding."""

    kind: Annotated[Literal["mlp"], Field(description="mlp: token embeddings of the whole chunk through an MLP")] = (
        "mlp"
    )
    token_width: Annotated[int, Field(ge=1, description="width of a token's embedding (paper: 10)")] = 32
    hidden: Annotated[int, Field(ge=1, description="units of each hidden layer (paper: 256)")] = 512
    layers: Annotated[int, Field(ge=1, description="linear layers (paper: 2)")] = 2
    width: Annotated[int, Field(ge=1, description="width E of a chunk's embedding (paper: 256)")] = 256
    output: Annotated[
        Literal["norm", "relu"], Field(description="what ends the encoder: a layer norm, or ReLU as in the paper")
    ] = "norm"


@dataclass(kw_only=True)
class MainOptions:
    """The main model: embeddings of the chunks so far to a prediction of the next one."""

    kind: Annotated[Literal["transformer"], Field(description="transformer: causal, pre-norm")] = "transformer"
    layers: Annotated[int, Field(ge=1, description="blocks (paper: 6)")] = 4
    width: Annotated[int, Field(ge=1, description="width W of the residual stream (paper: 356)")] = 256
    heads: Annotated[int, Field(ge=1, description="attention heads (paper: 8; 12 in the IEM experiments)")] = 4
    head_width: Annotated[int, Field(ge=2, description="width of a head; heads × head_width need not be W")] = 64
    ffn: Annotated[int, Field(ge=1, description="hidden units of the feed-forward layers (paper: 1424)")] = 1024
    positions: Annotated[
        Literal["rotary", "concatenated"],
        Field(description="rotary, or learned vectors that fill the coordinates from E to W (paper; needs W > E)"),
    ] = "rotary"


@dataclass(kw_only=True)
class DecoderOptions:
    """The decoder: prediction ŷ and the chunk's tokens so far to the next token."""

    kind: Annotated[
        Literal["lstm", "transformer"], Field(description="lstm (paper), or a causal transformer over the chunk")
    ] = "lstm"
    token_width: Annotated[int, Field(ge=1, description="width of a token's embedding in the LSTM (paper: 10)")] = 64
    width: Annotated[int, Field(ge=1, description="LSTM units or transformer width (paper: 1024 units)")] = 512
    layers: Annotated[int, Field(ge=1, description="layers")] = 1
    heads: Annotated[int, Field(ge=1, description="attention heads of the transformer decoder")] = 4
    ffn: Annotated[int, Field(ge=1, description="feed-forward units of the transformer decoder")] = 1024
    previous: Annotated[bool, Field(description="the transformer decoder also sees the tokens of the chunk before")] = (
        False
    )


@dataclass(kw_only=True)
class ModelOptions:
    """A Hierarchical Attention Encoder-Decoder."""

    kind: Annotated[Literal["haed"], Field(description="haed: encoder, main model and decoder as set below")] = "haed"
    encoder: EncoderOptions = field(default_factory=EncoderOptions)
    main: MainOptions = field(default_factory=MainOptions)
    decoder: DecoderOptions = field(default_factory=DecoderOptions)


@dataclass(kw_only=True)
class IEMOptions:
    """The Implicit Embedding Matrix loss."""

    correction: Annotated[
        Literal["inclusion", "log_q", "none"],
        Field(description="of sampled candidates: log π (calibrated), log(n·Q), or none (the paper's plain loss)"),
    ] = "inclusion"
    extra_batches: Annotated[
        int, Field(ge=0, description="batches read only for their chunks, as further negatives (paper: 3)")
    ] = 0
    counts: Annotated[
        Literal["streaming", "corpus"],
        Field(description="where Q comes from: chunks seen so far, or all of the train split, counted at the start"),
    ] = "streaming"
    smoothing: Annotated[float, Field(ge=0, description="added to every count of Q")] = 0.0
    bank: Annotated[
        int, Field(ge=0, description="distinct chunks seen last that are kept as further negatives; 0: none")
    ] = 0
    bank_draws: Annotated[
        int,
        Field(ge=1, description="of these so many are drawn for each step, and encoded anew; all, if there are fewer"),
    ] = 1024
    mined: Annotated[
        int,
        Field(ge=0, description="hard negatives of each query: its nearest chunks in the bank; uncalibrated. 0: none"),
    ] = 0
    mined_share: Annotated[
        float, Field(gt=0, le=1, description="at most so many of them, as a share of the candidates")
    ] = 0.1
    mined_refresh: Annotated[int, Field(ge=1, description="steps after which the index of the bank is built anew")] = (
        200
    )
    similarity: Annotated[
        Literal["dot", "cosine"], Field(description="of query and embedding, times a scale that is learned")
    ] = "dot"
    temperature: Annotated[
        float, Field(gt=0, description="cosine: what the scale begins as the inverse of (dot: it begins as 1/√E)")
    ] = 0.07
    head: Annotated[
        Literal["linear", "none"],
        Field(description="between the main model and the score: a linear map W→E, or the first E coordinates (paper)"),
    ] = "linear"
    block: Annotated[
        int | None, Field(ge=1, description="queries scored at a time; bounds memory, changes no result; null: fitting")
    ] = None
