"""Options of the commands that use a trained run: evaluation, samples, index, analyses."""

from dataclasses import dataclass, field
from typing import Annotated, Literal

from pydantic import Field

from pipeline.options.training import Phase


@dataclass(kw_only=True)
class EvaluateOptions:
    """Options of evaluation on a whole split, and the precision in which a trained run computes."""

    split: Annotated[Literal["train", "valid", "test"], Field(description="which split is scored")] = "test"
    stride: Annotated[
        int | None, Field(ge=1, le=65_536, description="chunks newly scored by each window; null: half of its context")
    ] = None
    stage: Annotated[
        Phase | None,
        Field(
            description="whose checkpoint is evaluated, sampled from and indexed; null: finetune's, else train's, else "
            "pretrain's"
        ),
    ] = None
    likelihood: Annotated[
        Literal["mixture", "decoder"],
        Field(
            description="of a run with model.mixture.known: the mixture, or the decoder alone; of others there is one"
        ),
    ] = "mixture"
    closed_set: Annotated[
        int,
        Field(
            ge=0,
            le=10**8,
            description="IEM scores are normalised over all distinct chunks if there are at most so many",
        ),
    ] = 200_000
    closed_windows: Annotated[
        int,
        Field(ge=0, le=10**7, description="windows in which that is held against the decoder's likelihood; 0: none"),
    ] = 64
    breakdown: Annotated[
        bool, Field(description="also bits by position in a chunk, by its length, and by its frequency in training")
    ] = True
    precision: Annotated[
        Literal["fp32", "bf16", "auto"],
        Field(
            description="of all that is asked of a trained run: bits, samples, next chunks, vectors; auto: bf16 where the "
            "processor multiplies it fast, which is quicker and off by some hundredths of a bit a chunk"
        ),
    ] = "fp32"
    sequences: Annotated[int, Field(ge=1, le=65_536, description="windows scored at a time")] = 16
    baselines: Annotated[bool, Field(description="also measure n-gram models and xz on the same bytes")] = True


@dataclass(kw_only=True)
class SampleOptions:
    """Options of sampling."""

    prompts: Annotated[
        list[str], Field(description="prompts of the report's samples; none: frequent chunks of the corpus")
    ] = field(default_factory=list)
    pictures: Annotated[
        int, Field(ge=1, le=10_000, description="held-out pictures whose lower half a model of pictures completes")
    ] = 8
    chunks: Annotated[int, Field(ge=1, le=10**7, description="chunks to write")] = 60
    temperature: Annotated[float, Field(ge=0, le=1e3, description="0: always the likeliest token, or known chunk")] = (
        0.8
    )
    top_k: Annotated[int, Field(ge=0, le=10**6, description="only the k likeliest tokens, or known chunks; 0: all")] = 0
    top_p: Annotated[
        float, Field(gt=0, le=1, description="only the likeliest tokens, or known chunks, that make up this mass")
    ] = 0.95
    seed: Annotated[int, Field(ge=0, le=2**63 - 1, description="of the draws")] = 0


@dataclass(kw_only=True)
class IndexOptions:
    """Options of a trained run's indexes: of its chunks, and of places in the text."""

    space: Annotated[
        Literal["chunks", "contexts", "predictions"],
        Field(
            description="chunks: what the encoder makes of every distinct one; contexts: states of the main model all over the "
            "text; predictions are not stored, but asked for among chunks"
        ),
    ] = "chunks"
    kind: Annotated[
        Literal["auto", "flat", "hnsw", "ivf", "ivfpq"],
        Field(
            description="exact search, or approximate by a graph, by clusters, or by clusters of compressed vectors; auto: flat "
            "for up to 256 MB of vectors, then a graph, and beyond 8 GB of 8-bit codes ivfpq"
        ),
    ] = "auto"
    metric: Annotated[
        Literal["auto", "centred", "cosine", "ip", "l2"],
        Field(
            description="centred: the cosine once the mean embedding is taken off, of chunks only; cosine, inner product, or "
            "Euclidean distance; auto: centred of chunks, cosine of contexts"
        ),
    ] = "auto"
    recall: Annotated[
        float,
        Field(gt=0, le=1, description="share of the exact ten nearest that an approximate index is tuned to find"),
    ] = 0.99
    split: Annotated[
        Literal["train", "valid", "test"], Field(description="whose distinct chunks, or contexts, are indexed")
    ] = "train"
    min_count: Annotated[
        int | None,
        Field(
            ge=1,
            le=10**12,
            description="leave rarer chunks out; null: all are in, and questions are answered with those that occur often, "
            "unless they have a --min-count",
        ),
    ] = None
    max_chunks: Annotated[
        int | None,
        Field(
            ge=1,
            le=10**9,
            description="index so many at most, the most frequent first; a vector takes 4 · model.encoder.width bytes of the "
            "disk; null: all",
        ),
    ] = 1_000_000
    max_contexts: Annotated[
        int | None,
        Field(
            ge=1,
            le=10**9,
            description="index about so many places of the text, in windows drawn by the seed; null: all",
        ),
    ] = 100_000
    layer: Annotated[
        int | None,
        Field(
            ge=0,
            le=1000,
            description="contexts are what comes out of this layer of the main model, from 0; null: out of all of them",
        ),
    ] = None
    scale: Annotated[
        int | None,
        Field(
            ge=1,
            le=10**6,
            description="contexts are what the layers of this scale of a multi-scale model, or level of an Hourglass, make of "
            "the last of its groups of so many tokens that is complete; null: what comes out of them all",
        ),
    ] = None
    queries: Annotated[
        list[str], Field(description="queries shown in the report; none: frequent chunks of the corpus")
    ] = field(default_factory=list)
    neighbours: Annotated[int, Field(ge=1, le=10**5, description="neighbours per query")] = 8


@dataclass(kw_only=True)
class AnalyseOptions:
    """Options of `haed analyse`."""

    split: Annotated[
        Literal["train", "valid", "test"], Field(description="whose chunks and contexts are looked at")
    ] = "train"
    min_count: Annotated[
        int | None,
        Field(
            ge=1,
            le=10**12,
            description="leave rarer chunks out; null: those that occur less than 10 times, if 1,000 others do",
        ),
    ] = None
    max_chunks: Annotated[
        int,
        Field(
            ge=3,
            le=100_000,
            description="chunks of the analyses and of the map, the most frequent first; time grows with their square",
        ),
    ] = 20_000
    corpus_chunks: Annotated[
        int, Field(ge=1, le=10**10, description="contexts are counted in so many chunks of the split at most")
    ] = 5_000_000
    against: Annotated[
        str | None,
        Field(
            description="drift is measured from the embeddings of this run (name or path); null: from this run's phase one"
        ),
    ] = None
    clusters: Annotated[
        int, Field(ge=2, le=1000, description="clusters of embeddings, as word classes and colours")
    ] = 50
    map: Annotated[
        Literal["auto", "pca", "umap", "tsne"],
        Field(description="the map beside PCA; auto: UMAP or t-SNE if one is installed (pip install 'haed[maps]')"),
    ] = "auto"
    passages: Annotated[
        int,
        Field(ge=0, le=10**6, description="places of the text whose nearest ones are compared by layer; 0: none"),
    ] = 4000
    projector: Annotated[
        int,
        Field(
            ge=0,
            le=10**7,
            description="points of the export for TensorBoard's projector, the most frequent first; 0: none",
        ),
    ] = 100_000
    skip_gram: Annotated[
        bool, Field(description="also train a skip-gram as a baseline, if gensim is installed (haed[baselines])")
    ] = True
