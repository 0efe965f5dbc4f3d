"""The fields of analysis.json: the result of an analysis of a run's embeddings."""

from dataclasses import dataclass, field

from pipeline.config import Phase
from pipeline.run.files import Part

_FEWEST_SETS = 5
# 97.5 % quantiles of Student's t with 4, 5, … degrees of freedom. With more than 29 the last one is used, which is stricter.
_STUDENT_T = (
    *(2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131, 2.120),
    *(2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045),
)


@dataclass
class SimilarityStatistics:
    """Similarity of one kind, use or spelling, between chunks and their neighbours.

    Attributes:
        neighbours: mean similarity of the neighbours by embedding.
        chance: mean similarity of a query and any other chunk of the band.
        best: mean similarity of the nearest chunks by this similarity itself.
        share: position of `neighbours` between `chance` (0) and `best` (1).
        overlap: share of the neighbours by embedding that are also nearest by this similarity.
        correlation: Spearman's rank correlation of this similarity and the cosine of embeddings, over the same pairs.
        by_cosine: mean similarity by the cosine of embeddings, in the bins of `Agreement.cosines`.
    """

    neighbours: float
    chance: float
    best: float
    share: float
    overlap: float
    correlation: float
    by_cosine: list[float | None]


@dataclass
class Example:
    """Displayed chunk with its nearest chunks by embedding, by use and by spelling."""

    chunk: str
    embedding: list[str]
    use: list[str]
    spelling: list[str]


@dataclass
class Agreement:
    """Agreement of the neighbours by embedding with those by use and spelling, in a frequency band.

    Attributes:
        first: frequency rank of the first chunk of the band. Queries and neighbours both lie in the band.
        among: number of chunks in the band.
        counts: occurrences of the last and the first chunk of the band.
        neighbours: neighbours of each query.
        chance: expected overlap of two unrelated lists of neighbours.
        use: similarity of contexts.
        spelling: similarity of the first 64 bytes, or of pixels.
        cosines: lower edges of the bins of the cosine of embeddings.
        examples: some queries with their neighbours.
    """

    first: int
    among: int
    counts: tuple[int, int]
    queries: int
    neighbours: int
    chance: float
    use: SimilarityStatistics
    spelling: SimilarityStatistics
    cosines: list[float]
    examples: list[Example] = field(default_factory=list)

    @property
    def verdict(self) -> str:
        """Say which of use and spelling has the larger share."""
        use, spelling = self.use.share, self.spelling.share
        if max(use, spelling) < 0.1:
            return "neither use nor spelling"
        if abs(use - spelling) < 0.05:
            return "use and spelling alike"
        return "use before spelling" if use > spelling else "spelling before use"


@dataclass
class Classes:
    """Mutual information, in bits, of the classes of neighbouring chunks (average, as in Brown et al. 1992).

    Attributes:
        pairs: number of neighbouring chunks counted.
        embedding: bits for the clusters of embeddings.
        use: bits for as many clusters of context vectors, the baseline.
        spelling: bits for as many equally frequent classes of chunks sorted by their bytes.
        bias: bits for the clusters of embeddings if the chunks of the split are permuted: the bias of small counts.
        random: mean bits for random classes, which are permutations of the clusters of embeddings. Unlike `bias`, they
            keep what a chunk alone tells of the next one.
    """

    classes: int
    pairs: int
    embedding: float
    use: float
    spelling: float
    bias: float
    random: float
    random_deviation: float


@dataclass
class Check:
    """Result of one word set.

    Attributes:
        of: `text` or `code`.
        use: true if members are alike in use only, false if they are also spelled alike.
        pairs: true if the set consists of pairs.
        found: number of members, or pairs, that are frequent enough in the corpus.
        members: number of members, or pairs, of the set.
        missing: members that the corpus lacks.
        precision: precision@10 by system.
    """

    name: str
    of: str
    use: bool
    pairs: bool
    found: int
    members: int
    missing: list[str]
    precision: dict[str, float]


@dataclass
class Difference:
    """Precision of the model less that of another system: mean over sets, its standard error (None for one set), sets."""

    mean: float
    error: float | None
    sets: int

    @property
    def is_significant(self) -> bool:
        """Return true if there are at least five sets, and Student's t differs from zero at 5 %, two-sided."""
        if self.error is None or self.sets < _FEWEST_SETS:
            return False
        return abs(self.mean) > _STUDENT_T[min(self.sets - _FEWEST_SETS, len(_STUDENT_T) - 1)] * self.error


@dataclass
class Intrinsic:
    """Results of all sets that are frequent enough in the corpus.

    Attributes:
        words: number of words searched.
        left_out: sets with too few members in the corpus, or meant for another kind of corpus.
        mean: mean precision over sets alike in use only, by system.
        mean_spelled: mean precision over sets that are also spelled alike, by system.
        difference: precision of the model less each baseline, over sets alike in use only.
    """

    words: int
    checks: list[Check]
    left_out: list[str]
    mean: dict[str, float] = field(default_factory=dict)
    mean_spelled: dict[str, float] = field(default_factory=dict)
    difference: dict[str, Difference] = field(default_factory=dict)

    @property
    def verdict(self) -> str:
        """Say over how many sets each baseline is beaten, not told apart or better."""
        groups: dict[str, list[str]] = {"beaten": [], "not told apart": [], "better": []}
        for name, each in self.difference.items():
            group = "not told apart" if not each.is_significant else "beaten" if each.mean > 0 else "better"
            groups[group].append(name)
        sets = next((each.sets for each in self.difference.values()), 0)
        listed = "; ".join(f"{kind}: {', '.join(names)}" for kind, names in groups.items() if names)
        return f"over {sets} sets, {listed}"


@dataclass
class ChunkDrift:
    """A displayed chunk, and the cosine of its aligned old embedding with its new one."""

    chunk: str
    cosine: float


@dataclass
class Drift:
    """Difference between the embeddings of two checkpoints.

    Attributes:
        before, after: displayed names of the checkpoints.
        distance: Procrustes' statistic: the distance after the best alignment, 0 if that makes them equal.
        distance_chance: that distance after the chunks of one checkpoint are permuted, for unrelated embeddings.
        cosine: mean cosine of each chunk's two embeddings after that alignment. All cosines are of centred embeddings.
        cosine_chance: that cosine after the same permutation.
        unaligned: the mean cosine without alignment, or None if the widths differ.
        neighbours: number of neighbours compared for each chunk, by the centred cosine.
        queries: number of chunks whose neighbours are compared.
        overlap: share of the neighbours that both checkpoints have.
        chance: that share for unrelated embeddings.
        most, least: the frequent chunks that moved most and least.
    """

    before: str
    after: str
    distance: float
    distance_chance: float
    cosine: float
    cosine_chance: float
    unaligned: float | None
    neighbours: int
    queries: int
    overlap: float
    chance: float
    most: list[ChunkDrift] = field(default_factory=list)
    least: list[ChunkDrift] = field(default_factory=list)


@dataclass
class Norms:
    """Norms of the embeddings and their relation to the frequency of the chunks.

    Attributes:
        correlation: Spearman's rank correlation of norm and count.
        slope: least-squares slope of the norm over log10 of the count, as a multiple of the mean norm.
    """

    mean: float
    deviation: float
    correlation: float
    slope: float


@dataclass
class EmbeddingSample:
    """Anisotropy and effective dimension of the embeddings.

    Attributes:
        width: E, width of an embedding.
        mean_cosine: mean cosine of all pairs (anisotropy): 0 if directions are spread evenly, 1 if all are equal.
        centred_cosine: mean cosine of all pairs after subtracting the mean vector.
        dimension: participation ratio of the eigenvalues of the covariance, from 1 to E.
        half: number of principal components that hold half of the variance.
    """

    width: int
    mean_cosine: float
    centred_cosine: float
    dimension: float
    half: int


@dataclass
class Layer:
    """Shares that describe the neighbours by the output of a layer.

    Attributes:
        name: `layer 0` and so on, or `ŷ`, the output of the main model.
        overlap: share of the neighbours that the previous layer has too; None for the first layer.
        last: share of the neighbours with the same chunk before them as the query.
        following: share of the neighbours with the same chunk after them as the query.
        document: share of the neighbours in the same document as the query.
    """

    name: str
    overlap: float | None
    last: float
    following: float
    document: float


@dataclass
class SimilarPassages:
    """Displayed passage with its nearest passages by layer name."""

    passage: str
    nearest: dict[str, list[str]]


@dataclass
class ByLayer:
    """Most similar passages, layer by layer.

    Attributes:
        places: number of places compared.
        windows: number of windows that contain them. Neighbours are of other windows.
        queries: number of places whose neighbours were searched.
        neighbours: neighbours of each query.
        chance: shares expected for random places.
        layers: shares of each layer, from the first to ŷ.
    """

    places: int
    windows: int
    queries: int
    neighbours: int
    chance: Layer
    layers: list[Layer]
    examples: list[SimilarPassages]


@dataclass(kw_only=True)
class Analysis:
    """Fields of analysis.json.

    Attributes:
        stage, step, checkpoint: phase, step and digest of the checkpoint.
        fallback: why a checkpoint other than the best was used, or None.
        split: split whose chunks and contexts were analysed.
        chunks: number of chunks analysed, the most frequent ones.
        least: count of the rarest analysed chunk.
        agreement: agreement in use and spelling by frequency band, the most frequent chunks first.
        classes: information that clusters give about the next cluster, or None.
        intrinsic: intrinsic checks, or None for pixels and for corpora with too few of the words.
        loss: bits by frequency from evaluation.json, empty if it has none of this checkpoint.
        drift: drift from phase one or from another run, or None if there is neither.
        passages: most similar passages by layer, or None if not requested or too few.
        maps: names of the maps, in the order they are shown.
        findings: sentences that summarise the analysis.
        notes: what was left out, cut or not possible, and why.
    """

    folder: str
    run: str
    stage: Phase
    step: int
    checkpoint: str
    fallback: str | None
    split: str
    chunks: int
    least: int
    width: int
    agreement: list[Agreement]
    classes: Classes | None
    intrinsic: Intrinsic | None
    loss: list[Part]
    norms: Norms
    cloud: EmbeddingSample
    drift: Drift | None
    passages: ByLayer | None
    maps: list[str]
    findings: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    files: list[str] = field(default_factory=list)
    seconds: float = 0.0
