"""Registry of model kinds: builds models, their training objectives and their samplers.

To add a family, write a `SequenceModel` (see `haed.base`) in a file of its own. Give it options and a line in `SYSTEMS` of
`haed.options`, and a line in `KINDS` here. Its exact loss is `haed.base.Likelihood`. The loss of phase one, and of
chunk models in every phase, is computed in `haed.iem.objective`.
"""

from collections.abc import Callable
from dataclasses import dataclass

from haed.base import ChunkingSpec, Likelihood, Objective, SequenceModel, TokenBatch
from haed.chunk.mixture import ChunkVocabulary
from haed.chunk.model import HAED
from haed.distributed import Ranks
from haed.iem.objective import ChunkObjective
from haed.options import IEMOptions, ModelOptions
from haed.sampling import ChunkSampler, Sampler, TokenSampler
from haed.token.hourglass import Hourglass
from haed.token.multiscale import BottomUp, TopDown
from haed.token.retina import Retina
from haed.token.spacebyte import SpaceByte


@dataclass(frozen=True)
class Kind:
    """A family of models: the constructors of its model and of its sampler.

    Attributes:
        system: builds the model from (options, IEM options, cut).
        sampler: builds the sampler from (system, prompt, samples).
    """

    system: Callable[[ModelOptions, IEMOptions, ChunkingSpec], SequenceModel]
    sampler: Callable[..., Sampler]


KINDS: dict[str, Kind] = {
    "haed": Kind(HAED, ChunkSampler),
    "hourglass": Kind(Hourglass, TokenSampler),
    "top_down": Kind(TopDown, TokenSampler),
    "bottom_up": Kind(BottomUp, TokenSampler),
    "retina": Kind(Retina, TokenSampler),
    "spacebyte": Kind(SpaceByte, TokenSampler),
}


def make_system(options: ModelOptions, iem: IEMOptions, cut: ChunkingSpec) -> SequenceModel:
    """Build the model that the options describe, initialised from PyTorch's global generator.

    Args:
        options: options of the model.
        iem: options of the IEM loss.
        cut: how the corpus is cut into chunks.

    Raises:
        ValueError: the model's parts do not fit together.
    """
    system = KINDS[options.kind].system(options, iem, cut)
    system.kind = options.kind
    return system


def make_objective(
    system: SequenceModel,
    iem: IEMOptions,
    *,
    iem_weight: float,
    decode_fraction: float,
    pieces: int = 1,
    ranks: Ranks | None = None,
    lexicon: ChunkVocabulary | None = None,
) -> Objective:
    """Build the training objective of a phase.

    Args:
        system: model to train.
        iem: options of the IEM loss.
        iem_weight: weight of the IEM loss; 0 switches it off.
        decode_fraction: share of the chunks that is decoded for the exact loss.
        pieces: number of pieces in which a batch's windows are computed.
        ranks: processes that train together.
        lexicon: known chunks of a mixture.

    Raises:
        ValueError: the model cannot be trained with these settings.
    """
    if isinstance(system, HAED):
        return ChunkObjective(system, iem, iem_weight, decode_fraction, pieces, ranks, lexicon)
    for_chunks = {"iem_weight": iem_weight != 0, "decode_fraction": decode_fraction != 1, "batch.pieces": pieces != 1}
    if wrong := [name for name, other in for_chunks.items() if other]:
        raise ValueError(
            f"{', '.join(wrong)}: only models of chunks have a phase one and decode a share. Train a {type(system).__name__} "
            "with `haed train`, iem_weight=0, decode_fraction=1 and batch.pieces=1"
        )
    return Likelihood(system, ranks)


def make_sampler(system: SequenceModel, prompt: TokenBatch, samples: int = 1) -> Sampler:
    """Build a sampler that continues prompts.

    Args:
        system: made by `make_system`, in evaluation mode.
        prompt: (B, P) closed chunks, where P may be 0; or (1, P), which all samples continue.
        samples: B.
    """
    return KINDS[system.kind].sampler(system, prompt, samples)
