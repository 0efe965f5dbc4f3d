"""Options of the models and of the IEM loss.

Importing this module imports neither torch nor anything else that is slow to import.
"""

import math
import re
from dataclasses import dataclass, field
from importlib import import_module
from importlib.metadata import entry_points
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field


@dataclass(frozen=True)
class Family:
    """A family of models.

    Attributes:
        about: description in a few words.
        sections: sections of `ModelOptions` that belong to the family; other families reject them unless they list them
            too.
        chunks: true for models of chunks, which have a phase one, the IEM loss and an index of embeddings.
    """

    about: str
    sections: tuple[str, ...] = ()
    chunks: bool = False


# Families by `model.kind`; `haed.registry` builds them.
SYSTEMS = {
    "haed": Family(
        "encoder, main model and decoder of chunks (model.encoder, model.main, model.decoder)",
        ("encoder", "main", "decoder", "mixture"),
        chunks=True,
    ),
    "hourglass": Family(
        "a transformer over tokens that shortens its sequence and lengthens it again (model.hourglass); flat: 6@1",
        ("token", "hourglass"),
    ),
    "top_down": Family(
        "a transformer over tokens with layers of their own for each scale, from coarse to fine (model.multiscale)",
        ("token", "multiscale"),
    ),
    "bottom_up": Family(
        "the same from fine to coarse; then the tokens look at every scale (model.multiscale)", ("token", "multiscale")
    ),
    "retina": Family(
        "a transformer over tokens that looks at what is far away in groups (model.retina)", ("token", "retina")
    ),
    "spacebyte": Family(
        "a transformer over tokens with larger layers where words begin (model.spacebyte)", ("token", "spacebyte")
    ),
}


class PartKinds(dict[str, str]):
    """The kinds of a part of chunk models: `module:name` by kind. A class is imported when a model is built with it.

    Args:
        group: entry points by which other packages add kinds.
        classes: the kinds of this package.
    """

    def __init__(self, group: str, classes: dict[str, str]) -> None:
        super().__init__(classes)
        self.group = group

    def list_names(self) -> list[str]:
        """Return the kinds of this package and of all others, which is slower than a look at one's own."""
        return [*self, *(each.name for each in entry_points(group=self.group) if each.name not in self)]

    def check_name(self, name: str) -> str:
        """Return the name of a kind of this package or of an installed one.

        Raises:
            ValueError: there is no such kind.
        """
        if name not in self and name not in (names := self.list_names()):
            raise ValueError(f"expected one of {', '.join(names)}")
        return name

    def add_choices(self, schema: dict[str, Any]) -> None:
        """Add the names to a JSON schema, for forms."""
        schema.update(enum=self.list_names())

    def load_class(self, kind: str) -> Any:
        """Import the class of a kind."""
        if kind not in self:
            (entry, *_) = entry_points(group=self.group, name=kind)
            return entry.load()
        module, _, name = self[kind].partition(":")
        return getattr(import_module(module), name)


ENCODERS = PartKinds(
    "haed.encoders",
    {
        "mlp": "haed.chunk.encoder:MLPEncoder",
        "linear": "haed.chunk.encoder:MLPEncoder",
        "lstm": "haed.chunk.encoder:LSTMEncoder",
        "transformer": "haed.chunk.encoder:TransformerEncoder",
    },
)
MAINS = PartKinds("haed.mains", {"transformer": "haed.chunk.main:TransformerMain", "lstm": "haed.chunk.main:LSTMMain"})
DECODERS = PartKinds(
    "haed.decoders",
    {"lstm": "haed.chunk.decoder:LSTMDecoder", "transformer": "haed.chunk.decoder:TransformerDecoder"},
)
LOSS_TERMS = PartKinds("haed.loss_terms", {})  # functions, by name; see `haed.iem.objective.LossTermInputs`


@dataclass(kw_only=True)
class EncoderOptions:
    """Encoder: maps a chunk, without context, to its embedding."""

    kind: Annotated[
        str,
        Field(
            description="mlp: token embeddings of the whole chunk through an MLP; linear: through a layer norm and one linear "
            "map (MEGABYTE); lstm: its last output (HRED); transformer: over the chunk's tokens, their mean",
            json_schema_extra=ENCODERS.add_choices,
        ),
        AfterValidator(ENCODERS.check_name),
    ] = "mlp"
    token_width: Annotated[
        int, Field(ge=1, le=65_536, description="width of a token's embedding, but for the transformer (paper: 10)")
    ] = field(default=32, metadata={"kinds": ("mlp", "linear", "lstm")})
    hidden: Annotated[
        int,
        Field(
            ge=1,
            le=65_536,
            description="units of a hidden layer (paper: 256); LSTM units (paper: 1024); transformer width",
        ),
    ] = field(default=512, metadata={"kinds": ("mlp", "lstm", "transformer")})
    layers: Annotated[
        int, Field(ge=1, le=1024, description="of linear maps (paper: 2), of the LSTM (paper: 1), of the transformer")
    ] = field(default=2, metadata={"kinds": ("mlp", "lstm", "transformer")})
    heads: Annotated[int, Field(ge=1, le=4096, description="attention heads of the transformer encoder")] = field(
        default=4, metadata={"kinds": ("transformer",)}
    )
    ffn: Annotated[int, Field(ge=1, le=2**20, description="feed-forward units of the transformer encoder")] = field(
        default=1024, metadata={"kinds": ("transformer",)}
    )
    width: Annotated[
        int,
        Field(ge=1, le=65_536, description="width E of a chunk's embedding (paper: 256); lstm: its first E units"),
    ] = 256
    output: Annotated[
        Literal["norm", "relu", "none"],
        Field(description="what ends the encoder: a layer norm, ReLU (paper), or none, as HRED has it"),
    ] = "norm"
    rows: Annotated[
        int,
        Field(
            ge=0,
            le=2**24,
            description="rows of a table: each chunk has one, found by a hash of the whole chunk and added before that end; 0: "
            "none (paper). In training it takes 4 · rows · (model.encoder.width + 1) bytes, time for the rows of a step; with "
            "optimizer.ema twice as much, and time for all",
        ),
    ] = 0


@dataclass(kw_only=True)
class MainOptions:
    """Main model: predicts the next chunk from the embeddings of the chunks before it."""

    kind: Annotated[
        str,
        Field(
            description="transformer: causal, pre-norm; lstm: its input gate at most 1 − forget gate (HRED)",
            json_schema_extra=MAINS.add_choices,
        ),
        AfterValidator(MAINS.check_name),
    ] = "transformer"
    layers: Annotated[int, Field(ge=1, le=1024, description="blocks (paper: 6), or layers of the LSTM (paper: 1)")] = 4
    width: Annotated[
        int, Field(ge=1, le=65_536, description="width W of the residual stream and of the prediction ŷ (paper: 356)")
    ] = 256
    units: Annotated[
        int | None, Field(ge=1, le=65_536, description="lstm: units, whose first W are ŷ (paper: 1500); null: W")
    ] = field(default=None, metadata={"kinds": ("lstm",)})
    heads: Annotated[int, Field(ge=1, le=4096, description="attention heads (paper: 8; 12 in the IEM experiments)")] = (
        field(default=4, metadata={"kinds": ("transformer",)})
    )
    head_width: Annotated[
        int, Field(ge=2, le=4096, description="width of a head; heads × head_width need not be W")
    ] = field(default=64, metadata={"kinds": ("transformer",)})
    ffn: Annotated[int, Field(ge=1, le=2**20, description="hidden units of the feed-forward layers (paper: 1424)")] = (
        field(default=1024, metadata={"kinds": ("transformer",)})
    )
    positions: Annotated[
        Literal["rotary", "concatenated", "learned"],
        Field(
            description="of the transformer: rotary; learned vectors that fill the coordinates from E to W (concatenated: paper; "
            "needs W > E), or are added to all (learned)"
        ),
    ] = "rotary"
    dropout: Annotated[
        float,
        Field(
            ge=0,
            lt=1,
            description="of the inputs, of what attention and feed-forward layers add, and of attention; lstm: of the inputs and "
            "of every layer's outputs",
        ),
    ] = 0.0


def _check_orders(orders: list[int]) -> list[int]:
    if not orders or len(set(orders)) < len(orders) or not all(1 <= order <= 64 for order in orders):
        raise ValueError(f"{orders}: expected different lengths of n-grams, from 1 to 64")
    return orders


@dataclass(kw_only=True)
class GramsOptions:
    """Hashed n-grams of the last tokens, looked up in a table (Pagnoni et al. 2024, section 3.2.1)."""

    rows: Annotated[
        int, Field(ge=0, le=2**28, description="of the table, for each length of n-grams (BLT: 500,000); 0: none")
    ] = 0
    orders: Annotated[
        list[Annotated[int, Field(json_schema_extra={"minimum": 1, "maximum": 64})]],
        Field(description="lengths of n-grams in tokens (BLT: 3 to 8)", max_length=64),
        AfterValidator(_check_orders),
    ] = field(default_factory=lambda: [2, 3, 4, 5])
    width: Annotated[int, Field(ge=1, le=65_536, description="width of a row")] = 32


@dataclass(kw_only=True)
class DecoderOptions:
    """Decoder: predicts the next token from ŷ and the chunk's tokens so far."""

    kind: Annotated[
        str,
        Field(
            description="lstm (paper), or a causal transformer over the chunk", json_schema_extra=DECODERS.add_choices
        ),
        AfterValidator(DECODERS.check_name),
    ] = "lstm"
    token_width: Annotated[
        int, Field(ge=1, le=65_536, description="width of a token's embedding in the LSTM (paper: 10)")
    ] = field(default=64, metadata={"kinds": ("lstm",)})
    width: Annotated[int, Field(ge=1, le=65_536, description="LSTM units or transformer width (paper: 1024 units)")] = (
        512
    )
    layers: Annotated[int, Field(ge=1, le=1024, description="layers")] = 1
    heads: Annotated[int, Field(ge=1, le=4096, description="attention heads of the transformer decoder")] = field(
        default=4, metadata={"kinds": ("transformer",)}
    )
    ffn: Annotated[int, Field(ge=1, le=2**20, description="feed-forward units of the transformer decoder")] = field(
        default=1024, metadata={"kinds": ("transformer",)}
    )
    context: Annotated[
        Literal["same", "each"],
        Field(
            description="ŷ is mapped to every place of the chunk by the same matrix, or to each by its own (MEGABYTE; of the "
            "transformer decoder)"
        ),
    ] = "same"
    previous: Annotated[bool, Field(description="the transformer decoder also sees the tokens of the chunk before")] = (
        False
    )
    dropout: Annotated[
        float,
        Field(
            ge=0,
            lt=1,
            description="of the inputs, of what attention and feed-forward layers add, and of attention; lstm: of ŷ, of the "
            "table of token embeddings, and of every layer's outputs",
        ),
    ] = 0.0
    grams: GramsOptions = field(default_factory=GramsOptions)


@dataclass(kw_only=True)
class MixtureOptions:
    """Mixture of two likelihoods: the IEM score for known chunks, the decoder for all others."""

    known: Annotated[
        int | None,
        Field(
            ge=0,
            le=10**7,
            description="known chunks: the most frequent ones of the train split, so many at most; 0: none, the decoder is the "
            "likelihood; null: 131,072, but none with chunker.kind=pixels, where most chunks are new. A score takes "
            "2 · known · model.encoder.width operations, their embeddings 2 bytes a coordinate",
        ),
    ] = 0


@dataclass(kw_only=True)
class TokenOptions:
    """Embedding, blocks and output, which all models of tokens share."""

    width: Annotated[int, Field(ge=1, le=65_536, description="width W of the residual stream")] = 256
    heads: Annotated[int, Field(ge=1, le=4096, description="attention heads")] = 4
    head_width: Annotated[
        int, Field(ge=2, le=4096, description="width of a head; heads × head_width need not be W")
    ] = 64
    ffn: Annotated[int, Field(ge=1, le=2**20, description="hidden units of the feed-forward layers")] = 1024
    attention: Annotated[
        Literal["rotary", "relative", "local", "lsh", "plain"],
        Field(
            description="rotary; relative (Transformer-XL); local: rotary, to the last positions; lsh: rotary, to the last "
            "ones with like contents (Reformer); plain: knows no positions"
        ),
    ] = "rotary"
    window: Annotated[
        int,
        Field(ge=1, le=2**20, description="positions that local attention sees, its own included; lsh: of its bucket"),
    ] = 128
    hashes: Annotated[int, Field(ge=1, le=64, description="rounds of hashing of lsh attention")] = 2
    activation: Annotated[Literal["gelu", "relu"], Field(description="of the feed-forward layers")] = "gelu"
    dropout: Annotated[
        float,
        Field(ge=0, lt=1, description="of embeddings, of what attention and feed-forward layers add, and of attention"),
    ] = 0.0
    shift: Annotated[bool, Field(description="half of a layer's input is of the position before (token shift)")] = False
    positions: Annotated[
        Literal["none", "learned", "sinusoidal"],
        Field(description="added to the embeddings; none: where attention itself knows distances"),
    ] = "none"
    grams: GramsOptions = field(default_factory=GramsOptions)


@dataclass(kw_only=True)
class HourglassOptions:
    """Hourglass: its levels, shortening and lengthening (Nawrot et al. 2021)."""

    hierarchy: Annotated[
        str,
        Field(
            description="layers@factor from the input to the output, such as 2@1 1@2 4@4 1@2 2@1 (section 3); flat: 6@1"
        ),
    ] = "1@1 2@4 1@1"
    shortening: Annotated[
        Literal["average", "linear", "attention_average", "attention_linear"],
        Field(description="average, linear, or attention with S = average or linear (section 2.1)"),
    ] = "attention_average"
    lengthening: Annotated[
        Literal["repeat", "linear", "attention", "attention_linear"],
        Field(description="repeat, linear, or attention with U = x or x + linear(x') (section 2.3)"),
    ] = "attention_linear"
    attention: Annotated[
        list[Literal["rotary", "relative", "local", "lsh", "plain"]],
        Field(
            description="of the levels' layers, from the finest to the coarsest, the last one of all further levels; "
            "none: model.token.attention",
            max_length=64,
        ),
    ] = field(default_factory=list)


@dataclass(kw_only=True)
class MultiscaleOptions:
    """Scales of Top-down and Bottom-up (Subramanian et al. 2020)."""

    layers: Annotated[
        str, Field(description="layers@scale for each scale, in tokens, such as 2@16 2@4 4@1 (section 3)")
    ] = "2@4 4@1"
    pooling: Annotated[
        Literal["average", "max", "convolution"],
        Field(description="of neighbours to the next scale; a convolution's stride is its kernel's size"),
    ] = "average"
    upsampling: Annotated[
        Literal["linear", "repeat"],
        Field(description="top_down: a vector for each place of a finer scale, or one for all (a bag: 6@4)"),
    ] = "linear"
    heads: Annotated[
        str, Field(description="bottom_up: heads@scale, as 2@16 2@4; empty: equal parts, the rest to the finest")
    ] = ""


@dataclass(kw_only=True)
class RetinaOptions:
    """Windows and scales of Retina (Subramanian et al. 2020, section 3.4)."""

    layers: Annotated[int, Field(ge=1, le=1024, description="layers (paper: 12 and 16)")] = 6
    windows: Annotated[
        str,
        Field(
            description="from:to@scale for each scale: the distances, in tokens, at which its heads look (paper: as it is here)"
        ),
    ] = "256:512@16 8:256@4 0:8@1"
    pooling: Annotated[
        Literal["average", "max", "convolution"],
        Field(description="of neighbours to a coarser scale; a convolution's stride is its kernel's size"),
    ] = "average"
    heads: Annotated[
        str,
        Field(
            description="heads@scale, such as 1@16 1@4 2@1; empty: equal parts of model.token.heads, the rest to the finest"
        ),
    ] = ""


@dataclass(kw_only=True)
class SpaceByteOptions:
    """SpaceByte: layers at every token, and larger ones where a word begins (Slagle 2024)."""

    before: Annotated[int, Field(ge=0, le=1024, description="layers at every token, before the larger ones")] = 2
    layers: Annotated[int, Field(ge=1, le=1024, description="larger layers, where a word begins")] = 4
    after: Annotated[int, Field(ge=0, le=1024, description="layers at every token, after the larger ones")] = 2
    width: Annotated[
        int | None, Field(ge=1, le=65_536, description="of larger layers, from model.token.width on; null: 3/2 of it")
    ] = None
    heads: Annotated[int | None, Field(ge=1, le=4096, description="theirs; null: 3/2 of model.token.heads")] = None
    ffn: Annotated[int | None, Field(ge=1, le=2**20, description="hidden units; null: 3/2 of model.token.ffn")] = None
    letters: Annotated[
        str,
        Field(
            description="tokens inside a word, as ranges: by default digits, ASCII letters, bytes that continue a UTF-8 character"
        ),
    ] = "48-57 65-90 97-122 128-191"


def _check_family(name: str) -> str:
    if name not in SYSTEMS:
        raise ValueError(f"expected one of {', '.join(SYSTEMS)}")
    return name


@dataclass(kw_only=True)
class ModelOptions:
    """The model: its family and the options of its parts."""

    kind: Annotated[
        str,
        Field(
            description="; ".join(f"{name}: {family.about}" for name, family in SYSTEMS.items()),
            json_schema_extra=lambda schema: schema.update(enum=list(SYSTEMS)),
        ),
        AfterValidator(_check_family),
    ] = "haed"
    encoder: EncoderOptions = field(default_factory=EncoderOptions)
    main: MainOptions = field(default_factory=MainOptions)
    decoder: DecoderOptions = field(default_factory=DecoderOptions)
    mixture: MixtureOptions = field(default_factory=MixtureOptions)
    token: TokenOptions = field(default_factory=TokenOptions)
    hourglass: HourglassOptions = field(default_factory=HourglassOptions)
    multiscale: MultiscaleOptions = field(default_factory=MultiscaleOptions)
    retina: RetinaOptions = field(default_factory=RetinaOptions)
    spacebyte: SpaceByteOptions = field(default_factory=SpaceByteOptions)


NO_ADDRESS = "^[^:/]*$"  # of texts in forms: no address, which might hold a password
_FIGURES = ("accuracy", "rank", "effective")  # metrics that begin with iem_, as those of terms do


def _check_terms(terms: list[str]) -> list[str]:
    installed = LOSS_TERMS.list_names() if terms else []
    for term in terms:
        match = re.fullmatch(r"(\d+(?:\.\d*)?(?:[eE][+-]?\d+)?)\*(\w+)", term)
        if match is None or not math.isfinite(float(match[1])):
            raise ValueError(f"{term!r}: expected WEIGHT*NAME, such as 0.01*{(installed or ['name'])[0]}")
        if match[2] not in installed:
            known = f"expected one of {', '.join(installed)}" if installed else "no package has installed one"
            raise ValueError(f"{term!r}: no term of the loss is named {match[2]}; {known}")
        if match[2] in _FIGURES:
            raise ValueError(
                f"{term!r}: iem_{match[2]} is a metric of the loss itself; its package must rename the term"
            )
    if len({term.partition("*")[2] for term in terms}) < len(terms):
        raise ValueError(f"{', '.join(terms)}: a term is there twice; add their weights")
    return terms


@dataclass(kw_only=True)
class IEMOptions:
    """The Implicit Embedding Matrix loss."""

    correction: Annotated[
        Literal["inclusion", "none"],
        Field(
            description="of sampled candidates: log π, by other windows and by what is before in the own one (calibrated), or "
            "none (the paper's plain loss)"
        ),
    ] = "inclusion"
    extra_batches: Annotated[
        int, Field(ge=0, le=1024, description="batches read only for their chunks, as further negatives (paper: 3)")
    ] = 0
    smoothing: Annotated[float, Field(ge=0, le=1e9, description="added to counts of windows with a chunk")] = 0.0
    duplicates: Annotated[
        bool, Field(description="each occurrence of a chunk is a candidate of its own (paper); with correction=none")
    ] = False
    similarity: Annotated[Literal["dot", "cosine"], Field(description="of query and embedding, times iem.scale")] = (
        "dot"
    )
    scale: Annotated[
        Literal["learned", "none"],
        Field(description="of the similarity: learned, by its logarithm, or none, which is 1 (paper)"),
    ] = "learned"
    temperature: Annotated[
        float,
        Field(gt=0, le=1e3, description="cosine: what the scale begins as the inverse of (dot: it begins as 1/√E)"),
    ] = 0.07
    bias: Annotated[
        bool, Field(description="a chunk's score has a share of its own, linear in its embedding (paper: none)")
    ] = True
    head: Annotated[
        Literal["linear", "none"],
        Field(description="between the main model and the score: a linear map W→E, or the first E coordinates (paper)"),
    ] = "linear"
    group: Annotated[
        int | None, Field(ge=1, le=2**20, description="neighbouring ranks that share candidates; null: all of them do")
    ] = None
    block: Annotated[
        int | None,
        Field(ge=1, le=10**8, description="queries scored at a time; bounds memory, changes no result; null: fitting"),
    ] = None

    terms: Annotated[
        list[Annotated[str, Field(max_length=200, json_schema_extra={"pattern": NO_ADDRESS})]],
        Field(
            description="further terms of the loss from other packages, each weight*name, such as 0.01*center",
            max_length=64,
        ),
        AfterValidator(_check_terms),
    ] = field(default_factory=list)

    def split_terms(self) -> dict[str, float]:
        """Return the weights of the further terms by name."""
        return {name: float(weight) for weight, _, name in (term.partition("*") for term in self.terms)}

    def check_calibrated(self) -> None:
        """Raise ValueError if the learned score is not a likelihood, which a mixture requires."""
        if self.correction != "inclusion":
            raise ValueError(
                f"iem.correction={self.correction}: the score is no likelihood, as a mixture needs it: set "
                "iem.correction=inclusion, or model.mixture.known=0"
            )
