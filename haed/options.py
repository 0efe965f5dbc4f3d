"""Options of the models and of the IEM loss.

Importing this module imports neither torch nor anything else that is slow to import.
"""

import math
import re
import sys
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
from typing import Annotated, Any, Literal

from annotated_types import Ge, Le, Lt, Unit
from pydantic import AfterValidator, Field

# Bounds and units that several options have.
Width = Annotated[int, Ge(1), Le(65_536), Unit("dimensions")]
HeadWidth = Annotated[int, Ge(2), Le(4096), Unit("dimensions")]
Heads = Annotated[int, Ge(1), Le(4096), Unit("heads")]
Units = Annotated[int, Ge(1), Le(65_536), Unit("units")]
HiddenUnits = Annotated[int, Ge(1), Le(2**20), Unit("units")]
Layers = Annotated[int, Ge(1), Le(1024), Unit("layers")]
AnyLayers = Annotated[int, Ge(0), Le(1024), Unit("layers")]
Probability = Annotated[float, Ge(0), Lt(1), Unit("probability")]

# Options that several parts have.
AttentionHeads = Annotated[Heads, Field(description="Attention heads.")]
AttentionHeadWidth = Annotated[
    HeadWidth, Field(description="Width of an attention head. heads × head_width may differ from W.")
]
FeedForwardUnits = Annotated[HiddenUnits, Field(description="Hidden units of the feed-forward layers.")]
Pooling = Annotated[
    Literal["average", "max", "convolution"],
    Field(
        description="How neighbours are pooled to a coarser scale. average: their mean. max: their maximum. convolution: a "
        "convolution whose stride is its kernel size."
    ),
]
TRANSFORMER: dict[str, Any] = {"kinds": ("transformer",)}  # metadata of options of transformers alone


@dataclass(frozen=True)
class Family:
    """A family of models.

    Attributes:
        description: what the family is, in a few words.
        sections: sections of `ModelOptions` that belong to the family; other families reject them unless they list them
            too.
        chunks: true for models of chunks, which have a phase one, the IEM loss and an index of embeddings.
    """

    description: str
    sections: tuple[str, ...] = ()
    chunks: bool = False


CELLS, _MOST_CELLS = 1 << 21, 1 << 26  # of a row of counts, unless iem.cells is set; 34 MB and 1 GB

# Families by `model.kind`; `haed.registry` builds them.
SYSTEMS = {
    "haed": Family(
        "a model of chunks with an encoder, a main model and a decoder (model.encoder, model.main, model.decoder)",
        ("encoder", "main", "decoder", "mixture"),
        chunks=True,
    ),
    "hourglass": Family(
        "a transformer over tokens that shortens its sequence and lengthens it again (model.hourglass)",
        ("token", "hourglass"),
    ),
    "top_down": Family(
        "a transformer over tokens with layers for each scale, from coarse to fine (model.multiscale)",
        ("token", "multiscale"),
    ),
    "bottom_up": Family(
        "a transformer over tokens with layers for each scale, from fine to coarse. Tokens attend to all scales "
        "(model.multiscale)",
        ("token", "multiscale"),
    ),
    "retina": Family(
        "a transformer over tokens that attends to distant tokens in groups (model.retina)", ("token", "retina")
    ),
    "spacebyte": Family(
        "a transformer over tokens with larger layers where a word begins (model.spacebyte)", ("token", "spacebyte")
    ),
}


@cache
def installed_names(group: str, *_search_path: str) -> list[str]:
    """Return the names of a group's entry points, which are those of the packages on the search path."""
    return sorted(entry.name for entry in entry_points(group=group))


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
        return [*self, *(name for name in installed_names(self.group, *sys.path) if name not in self)]

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
    "haed.decoders", {"lstm": "haed.chunk.decoder:LSTMDecoder", "transformer": "haed.chunk.decoder:TransformerDecoder"}
)
LOSS_TERMS = PartKinds("haed.loss_terms", {})  # functions, by name; see `haed.iem.objective.LossTermInputs`


@dataclass(kw_only=True)
class EncoderOptions:
    """Encoder: maps a chunk, without context, to its embedding."""

    kind: Annotated[
        str,
        Field(
            description="Encoder of a chunk. mlp: an MLP over the embeddings of its tokens. linear: a layer norm and one "
            "linear map over them (MEGABYTE). lstm: the last output of an LSTM (HRED). transformer: the mean over "
            "the tokens' outputs.",
            json_schema_extra=ENCODERS.add_choices,
        ),
        AfterValidator(ENCODERS.check_name),
    ] = "mlp"
    token_width: Annotated[Width, Field(description="Width of a token's embedding (paper: 10).")] = field(
        default=32, metadata={"kinds": ("mlp", "linear", "lstm")}
    )
    hidden: Annotated[
        Units,
        Field(
            description="Hidden units of the MLP (paper: 256), units of the LSTM (paper: 1024), or width of the transformer."
        ),
    ] = field(default=512, metadata={"kinds": ("mlp", "lstm", "transformer")})
    layers: Annotated[
        Layers,
        Field(
            description="Linear maps of the MLP (paper: 2), layers of the LSTM (paper: 1), or blocks of the transformer."
        ),
    ] = field(default=2, metadata={"kinds": ("mlp", "lstm", "transformer")})
    heads: AttentionHeads = field(default=4, metadata=TRANSFORMER)
    ffn: FeedForwardUnits = field(default=1024, metadata=TRANSFORMER)
    width: Annotated[
        Width,
        Field(description="Width E of a chunk's embedding (paper: 256). The LSTM encoder returns its first E units."),
    ] = 256
    output: Annotated[
        Literal["norm", "relu", "none"],
        Field(
            description="Last operation of the encoder. norm: a layer norm. relu: ReLU (paper). none: nothing (HRED)."
        ),
    ] = "norm"
    rows: Annotated[
        int,
        Field(
            ge=0,
            le=2**24,
            description="Rows of a table of chunk embeddings. A hash of the whole chunk selects one row, which is added "
            "before model.encoder.output. 0: no table (paper). Training needs 4 · rows · (model.encoder.width + "
            "1) bytes, and twice as much with optimizer.ema. A step's time grows with the rows that it uses, and "
            "with all rows if optimizer.ema is set.",
        ),
        Unit("rows"),
    ] = 0


@dataclass(kw_only=True)
class MainOptions:
    """Main model: predicts the next chunk from the embeddings of the chunks before it."""

    kind: Annotated[
        str,
        Field(
            description="Main model. transformer: a causal transformer with pre-norm. lstm: an LSTM whose input gate is at "
            "most 1 − forget gate (HRED).",
            json_schema_extra=MAINS.add_choices,
        ),
        AfterValidator(MAINS.check_name),
    ] = "transformer"
    layers: Annotated[
        Layers, Field(description="Blocks of the transformer (paper: 6) or layers of the LSTM (paper: 1).")
    ] = 4
    width: Annotated[
        Width, Field(description="Width W of the residual stream and of the prediction ŷ (paper: 356).")
    ] = 256
    units: Annotated[
        int | None,
        Field(ge=1, le=65_536, description="Units of the LSTM, of which the first W are ŷ (paper: 1500). Null: W."),
        Unit("units"),
    ] = field(default=None, metadata={"kinds": ("lstm",)})
    heads: Annotated[Heads, Field(description="Attention heads (paper: 8, and 12 in the IEM experiments).")] = field(
        default=4, metadata=TRANSFORMER
    )
    head_width: AttentionHeadWidth = field(default=64, metadata=TRANSFORMER)
    ffn: Annotated[HiddenUnits, Field(description="Hidden units of the feed-forward layers (paper: 1424).")] = field(
        default=1024, metadata=TRANSFORMER
    )
    positions: Annotated[
        Literal["rotary", "concatenated", "learned"],
        Field(
            description="Position encoding of the transformer. rotary: rotary embeddings. concatenated: learned vectors fill "
            "the dimensions from E to W, which needs W > E (paper). learned: learned vectors are added to all "
            "dimensions."
        ),
    ] = field(default="rotary", metadata=TRANSFORMER)
    dropout: Annotated[
        Probability,
        Field(
            description="Dropout probability. In the transformer it applies to the inputs, the attention weights, and the "
            "hidden units and outputs of each layer. In the LSTM it applies to the inputs and to every "
            "layer's outputs."
        ),
    ] = 0.0


def _check_orders(orders: list[int]) -> list[int]:
    if not orders or len(set(orders)) < len(orders) or not all(1 <= order <= 64 for order in orders):
        raise ValueError(f"{orders}: expected distinct lengths of n-grams, from 1 to 64")
    return orders


@dataclass(kw_only=True)
class GramsOptions:
    """Hashed n-grams of the last tokens, looked up in a table (Pagnoni et al. 2024, section 3.2.1)."""

    rows: Annotated[
        int,
        Field(ge=0, le=2**28, description="Rows of the table for each length of n-grams (BLT: 500,000). 0: no table."),
        Unit("rows"),
    ] = 0
    orders: Annotated[
        list[Annotated[int, Field(json_schema_extra={"minimum": 1, "maximum": 64})]],
        Field(description="Lengths of the n-grams, each listed once (BLT: 3 to 8).", max_length=64),
        Unit("tokens"),
        AfterValidator(_check_orders),
    ] = field(default_factory=lambda: [2, 3, 4, 5], metadata={"needs": {"rows": ()}})
    width: Annotated[Width, Field(description="Width of a row.")] = field(default=32, metadata={"needs": {"rows": ()}})


@dataclass(kw_only=True)
class DecoderOptions:
    """Decoder: predicts the next token from ŷ and the chunk's tokens so far."""

    kind: Annotated[
        str,
        Field(
            description="Decoder of a chunk's tokens. lstm: an LSTM (paper). transformer: a causal transformer over the "
            "chunk.",
            json_schema_extra=DECODERS.add_choices,
        ),
        AfterValidator(DECODERS.check_name),
    ] = "lstm"
    token_width: Annotated[Width, Field(description="Width of a token's embedding in the LSTM (paper: 10).")] = field(
        default=64, metadata={"kinds": ("lstm",)}
    )
    width: Annotated[Units, Field(description="Units of the LSTM (paper: 1024) or width of the transformer.")] = 512
    layers: Annotated[Layers, Field(description="Layers of the LSTM or blocks of the transformer.")] = 1
    heads: AttentionHeads = field(default=4, metadata=TRANSFORMER)
    ffn: FeedForwardUnits = field(default=1024, metadata=TRANSFORMER)
    context: Annotated[
        Literal["same", "each"],
        Field(
            description="How the transformer decoder maps ŷ to the positions of a chunk. same: one matrix for all positions. "
            "each: one matrix for each position (MEGABYTE)."
        ),
    ] = field(default="same", metadata=TRANSFORMER)
    previous: Annotated[
        bool, Field(description="The transformer decoder also sees the tokens of the previous chunk.")
    ] = field(default=False, metadata=TRANSFORMER)
    dropout: Annotated[
        Probability,
        Field(
            description="Dropout probability. In the transformer it applies to the inputs, the attention weights, and the "
            "hidden units and outputs of each layer. In the LSTM it applies to ŷ, the table of token "
            "embeddings, and every layer's outputs."
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
            description="Maximum number of known chunks, the most frequent chunks of the train split. The IEM score gives "
            "their likelihood, and the decoder gives that of all others. 0: the decoder alone. Null: 131,072, or "
            "0 with chunker.kind=pixels, where most chunks are new. A score takes 2 · known · model.encoder.width "
            "operations, and the embeddings take 2 bytes per dimension on disk, and up to 8 in memory.",
        ),
        Unit("chunks"),
    ] = 0


@dataclass(kw_only=True)
class TokenOptions:
    """Embedding, blocks and output, which all models of tokens share."""

    width: Annotated[Width, Field(description="Width W of the residual stream.")] = 256
    heads: AttentionHeads = 4
    head_width: AttentionHeadWidth = 64
    ffn: FeedForwardUnits = 1024
    attention: Annotated[
        Literal["rotary", "relative", "local", "lsh", "plain"],
        Field(
            description="Kind of attention. rotary: rotary embeddings. relative: relative positions (Transformer-XL). local: "
            "rotary, to the last positions. lsh: rotary, to the last positions with similar contents (Reformer). "
            "plain: no positions."
        ),
    ] = "rotary"
    window: Annotated[
        int,
        Field(
            ge=1,
            le=2**20,
            description="Positions that local attention sees, including its own, or size of a bucket of lsh attention.",
        ),
        Unit("positions"),
    ] = field(
        default=128,
        metadata={
            "needs": {
                "attention": ("local", "lsh"),
                "model.hourglass.attention": ("local", "lsh"),
                "model.kind": ("spacebyte",),  # its small layers
            }
        },
    )
    hashes: Annotated[int, Field(ge=1, le=64, description="Rounds of hashing in lsh attention."), Unit("rounds")] = (
        field(default=2, metadata={"needs": {"attention": ("lsh",), "model.hourglass.attention": ("lsh",)}})
    )
    activation: Annotated[Literal["gelu", "relu"], Field(description="Activation of the feed-forward layers.")] = "gelu"
    dropout: Annotated[
        Probability,
        Field(
            description="Dropout probability of the embeddings, the attention weights, and the hidden units and "
            "outputs of each layer."
        ),
    ] = 0.0
    shift: Annotated[
        bool, Field(description="Half of a layer's input comes from the previous position (token shift).")
    ] = False
    positions: Annotated[
        Literal["none", "learned", "sinusoidal"],
        Field(
            description="Position vectors added to the embeddings. none: no vectors, since the attention has distances of its "
            "own. learned: learned vectors. sinusoidal: fixed sines and cosines."
        ),
    ] = "none"
    grams: GramsOptions = field(default_factory=GramsOptions)


@dataclass(kw_only=True)
class HourglassOptions:
    """Hourglass: its levels, shortening and lengthening (Nawrot et al. 2021)."""

    hierarchy: Annotated[
        str,
        Field(
            description="layers@factor from the input to the output, such as 2@1 1@2 4@4 1@2 2@1 (section 3). 6@1 is a flat "
            "transformer of six layers."
        ),
    ] = "1@1 2@4 1@1"
    shortening: Annotated[
        Literal["average", "linear", "attention_average", "attention_linear"],
        Field(
            description="How a level's sequence is shortened (section 2.1). average: the mean of each group. linear: a linear "
            "map of each group. attention_average, attention_linear: attention with S = average or linear."
        ),
    ] = "attention_average"
    lengthening: Annotated[
        Literal["repeat", "linear", "attention", "attention_linear"],
        Field(
            description="How a sequence is lengthened again (section 2.3). repeat: each vector is repeated. linear: a linear "
            "map. attention, attention_linear: attention with U = x or x + linear(x')."
        ),
    ] = "attention_linear"
    attention: Annotated[
        list[Literal["rotary", "relative", "local", "lsh", "plain"]],
        Field(
            description="Attention of each level, from the finest to the coarsest. The last one holds for all further levels. "
            "An empty list means model.token.attention.",
            max_length=64,
        ),
    ] = field(default_factory=list)


@dataclass(kw_only=True)
class MultiscaleOptions:
    """Scales of Top-down and Bottom-up (Subramanian et al. 2020)."""

    layers: Annotated[
        str, Field(description="layers@scale for each scale in tokens, such as 2@16 2@4 4@1 (section 3).")
    ] = "2@4 4@1"
    pooling: Pooling = "average"
    upsampling: Annotated[
        Literal["linear", "repeat"],
        Field(
            description="How top_down returns to a finer scale. linear: a vector for each position. repeat: one vector for "
            "all positions, so that 6@4 is a bag."
        ),
    ] = "linear"
    heads: Annotated[
        str,
        Field(
            description="bottom_up: heads@scale, such as 2@16 2@4. Empty: equal shares, and one more for each of the "
            "finest scales if some are left."
        ),
    ] = ""


@dataclass(kw_only=True)
class RetinaOptions:
    """Windows and scales of Retina (Subramanian et al. 2020, section 3.4)."""

    layers: Annotated[Layers, Field(description="Layers of the transformer (paper: 12 and 16).")] = 6
    windows: Annotated[
        str,
        Field(
            description="from:to@scale for each scale. Its heads look at distances from `from` to `to` tokens. The default is "
            "the paper's."
        ),
        Unit("tokens"),
    ] = "256:512@16 8:256@4 0:8@1"
    pooling: Pooling = "average"
    heads: Annotated[
        str,
        Field(
            description="heads@scale, such as 1@16 1@4 2@1. Empty: equal shares of model.token.heads, and one more for "
            "each of the finest scales if some are left."
        ),
    ] = ""


@dataclass(kw_only=True)
class SpaceByteOptions:
    """SpaceByte: layers at every token, and larger ones where a word begins (Slagle 2024)."""

    before: Annotated[AnyLayers, Field(description="Layers at every token, before the larger layers.")] = 2
    layers: Annotated[Layers, Field(description="Larger layers, which run where a word begins.")] = 4
    after: Annotated[AnyLayers, Field(description="Layers at every token, after the larger layers.")] = 2
    width: Annotated[
        int | None,
        Field(
            ge=1,
            le=65_536,
            description="Width of the larger layers, at least model.token.width. Null: 3/2 of model.token.width.",
        ),
        Unit("dimensions"),
    ] = None
    heads: Annotated[
        int | None,
        Field(ge=1, le=4096, description="Attention heads of the larger layers. Null: 3/2 of model.token.heads."),
        Unit("heads"),
    ] = None
    ffn: Annotated[
        int | None,
        Field(
            ge=1,
            le=2**20,
            description="Hidden units of the larger layers' feed-forward layers. Null: 3/2 of model.token.ffn.",
        ),
        Unit("units"),
    ] = None
    letters: Annotated[
        str,
        Field(
            description="Tokens that are inside a word, as ranges. The default has digits, ASCII letters, and bytes that "
            "continue a UTF-8 character."
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
            description=f"Family of the model. {' '.join(f'{name}: {family.description}.' for name, family in SYSTEMS.items())}",
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
            example = f"0.01*{(installed or ['name'])[0]}"
            raise ValueError(f"{term!r}: expected WEIGHT*NAME, such as {example}. A weight is 0 or more")
        if match[2] in _FIGURES:
            raise ValueError(
                f"{term!r}: iem_{match[2]} is a metric of the loss itself. Its package must rename the term"
            )
    if len({term.partition("*")[2] for term in terms}) < len(terms):
        raise ValueError(f"{', '.join(terms)}: a term is given twice. Add their weights")
    return terms


@dataclass(kw_only=True)
class IEMOptions:
    """The Implicit Embedding Matrix loss."""

    correction: Annotated[
        Literal["inclusion", "none"],
        Field(
            description="Correction for candidate sampling. inclusion: subtract the log inclusion probability, which makes "
            "scores calibrated. none: the paper's plain sampled softmax."
        ),
    ] = "inclusion"
    extra_batches: Annotated[
        int,
        Field(
            ge=0,
            le=1024,
            description="Batches that are read only for their chunks, which become further negatives (paper: 3).",
        ),
        Unit("batches"),
    ] = 0
    smoothing: Annotated[
        float, Field(ge=0, le=1e9, description="Added to the count of windows that contain a chunk."), Unit("windows")
    ] = field(default=0.0, metadata={"needs": {"correction": ("inclusion",)}})
    duplicates: Annotated[
        bool,
        Field(
            description="Each occurrence of a chunk is a candidate of its own (paper). It needs iem.correction=none."
        ),
    ] = False
    similarity: Annotated[
        Literal["dot", "cosine"],
        Field(
            description="Similarity of query and embedding, which iem.scale multiplies. dot: dot product. cosine: cosine "
            "similarity."
        ),
    ] = "dot"
    scale: Annotated[
        Literal["learned", "none"],
        Field(description="Factor of the similarity. learned: its logarithm is learned. none: 1 (paper)."),
    ] = "learned"
    temperature: Annotated[
        float,
        Field(
            ge=2e-3,
            le=500,
            description="Initial inverse of the scale with iem.similarity=cosine. With dot, the scale begins at 1/√E. The "
            "scale is bounded to 1/1,000 to 1,000, near which it hardly learns.",
        ),
    ] = field(default=0.07, metadata={"needs": {"similarity": ("cosine",)}})
    bias: Annotated[
        bool, Field(description="A chunk's score gets a bias that is linear in its embedding (paper: false).")
    ] = True
    head: Annotated[
        Literal["linear", "none"],
        Field(
            description="Map from the main model to the score. linear: a linear map W→E. none: the first E dimensions "
            "(paper)."
        ),
    ] = "linear"
    group: Annotated[
        int | None,
        Field(ge=1, le=2**20, description="Neighbouring ranks that share candidates. Null: all ranks."),
        Unit("ranks"),
    ] = None
    cells: Annotated[
        int | None,
        Field(
            ge=2**10,
            le=2**28,
            description="Cells of each of the two rows of the count-min sketch that counts the windows with a chunk, "
            "rounded up to a power of two, with 16 bytes each. Null: one for each distinct chunk of the train split, from "
            "2,097,152 to 67,108,864.",
        ),
        Unit("cells"),
    ] = field(default=None, metadata={"needs": {"correction": ("inclusion",)}})
    block: Annotated[
        int | None,
        Field(
            ge=1,
            le=10**8,
            description="Queries scored at a time. It bounds memory and changes no result. Null: chosen automatically.",
        ),
        Unit("queries"),
    ] = None

    terms: Annotated[
        list[Annotated[str, Field(max_length=200, json_schema_extra={"pattern": NO_ADDRESS})]],
        Field(
            description="Further terms of the loss from other packages. Each is WEIGHT*NAME, such as 0.01*center.",
            max_length=64,
        ),
        AfterValidator(_check_terms),
    ] = field(default_factory=list)

    def choose_cells(self, distinct: int) -> int:
        """Return the cells of a row of counts for a train split with so many distinct chunks."""
        return self.cells or min(max(CELLS, distinct), _MOST_CELLS)

    def check_terms(self) -> None:
        """Check that packages have installed the further terms, and load them. Only training needs them.

        Raises:
            ValueError: there is no term of such a name, or it is no function.
        """
        for name in self.split_terms():
            if name not in (installed := LOSS_TERMS.list_names()):
                known = f"expected one of {', '.join(installed)}" if installed else "no package has installed any"
                advice = "Install the package that has it as an entry point of haed.loss_terms, or leave the term out"
                raise ValueError(f"iem.terms: there is no term {name}; {known}. {advice}")
            try:
                term = LOSS_TERMS.load_class(name)
            except (Exception, SystemExit) as error:  # whatever another package raises
                reason = f"{type(error).__name__}: {error}"
                raise ValueError(f"iem.terms: {name} of haed.loss_terms cannot be loaded: {reason}") from error
            if not callable(term):
                raise ValueError(f"iem.terms: {name} of haed.loss_terms is {term!r:.100}, expected a function")

    def split_terms(self) -> dict[str, float]:
        """Return the weights of the further terms by name."""
        return {name: float(weight) for weight, _, name in (term.partition("*") for term in self.terms)}

    def check_calibrated(self) -> None:
        """Raise ValueError if the learned score is not a likelihood, which a mixture requires."""
        if self.correction != "inclusion":
            raise ValueError(
                f"iem.correction={self.correction}: the score is not a likelihood, which a mixture needs. Set "
                "iem.correction=inclusion, or model.mixture.known=0"
            )

    def check_windows(self, windows: int) -> None:
        """Raise ValueError if a step has too few windows for a mixture: others show how likely its chunks are."""
        if windows < 2:
            raise ValueError(
                "with one window per step, a mixture cannot tell how likely its chunks are. Raise batch.sequences or "
                "iem.extra_batches, or set model.mixture.known=0"
            )
