"""Embeddings in two dimensions: PCA always, UMAP or t-SNE where they are installed (`pip install haed[maps]`).

PCA is a shadow: what is far apart on it is far apart, what is near may not be. UMAP (McInnes et al. 2018) and t-SNE (van der
Maaten & Hinton 2008) keep neighbours together; distances between groups, and their sizes, mean little.
"""

import logging
from collections.abc import Callable
from importlib.util import find_spec
from typing import Literal

import numpy as np

from pipeline.config import ConfigError
from pipeline.probe.analyse.geometry import unit

log = logging.getLogger(__name__)
Kind = Literal["auto", "pca", "umap", "tsne"]
NAMES = {"pca": "PCA", "umap": "UMAP", "tsne": "t-SNE"}
_PACKAGES = {"umap": ("umap", "umap-learn"), "tsne": ("openTSNE", "openTSNE")}
_FEWEST = 32  # points of a map of neighbours


def kinds(asked: Kind) -> list[str]:
    """The maps that are made, the best one first: that asked for, and PCA. `auto` takes what is installed.

    Raises:
        ConfigError: the package of the one asked for is not installed.
    """
    there = [kind for kind, (module, _) in _PACKAGES.items() if find_spec(module)]
    if asked in _PACKAGES and asked not in there:
        raise ConfigError(
            f"analyse.map={asked} needs {_PACKAGES[asked][1]}, which is not installed: pip install 'haed[maps]', or "
            "analyse.map=pca"
        )
    chosen = there[:1] if asked == "auto" else [asked] if asked in there else []
    return [*chosen, "pca"]


def project(vectors: np.ndarray, kind: str, seed: int) -> np.ndarray:
    """Places (n, 2) float32 of embeddings (n, E), which are compared by cosine."""
    units = unit(vectors)
    others: dict[str, Callable[[np.ndarray, int], np.ndarray]] = {"umap": _umap, "tsne": _tsne}
    if kind in others and len(units) >= _FEWEST:
        log.info("%s of %s chunks", NAMES[kind], f"{len(units):,}")
        return others[kind](units, seed).astype(np.float32)
    return principal(units)


def principal(vectors: np.ndarray) -> np.ndarray:
    """The first two principal components (n, 2), signs chosen so that the largest coordinate of each is positive."""
    centred = vectors.astype(np.float64) - vectors.mean(0, dtype=np.float64)
    _, directions = np.linalg.eigh(centred.T @ centred)
    found = centred @ np.pad(directions[:, ::-1][:, :2], ((0, 0), (0, max(0, 2 - vectors.shape[1]))))
    largest = np.abs(found).argmax(0)
    return np.asarray(found * np.where(found[largest, [0, 1]] < 0, -1, 1), np.float32)


def _umap(units: np.ndarray, seed: int) -> np.ndarray:
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of its packages, of what it has no use for here
        from umap import UMAP

        made = UMAP(n_neighbors=15, min_dist=0.1, metric="cosine", random_state=seed % (1 << 31), n_jobs=1)
        return np.asarray(made.fit_transform(units))


def _tsne(units: np.ndarray, seed: int) -> np.ndarray:
    from openTSNE import TSNE

    perplexity = min(30, (len(units) - 1) // 3)
    made = TSNE(perplexity=perplexity, metric="cosine", random_state=seed % (1 << 31), n_jobs=1)
    return np.asarray(made.fit(units))
