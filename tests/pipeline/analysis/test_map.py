"""Projections, the projector's files, and the page of a map, which must not take a chunk for markup."""

import importlib.util
import io
import json
import re

import numpy as np
import pytest
from PIL import Image

from pipeline.analysis import map
from pipeline.analysis.map import render_map_page
from pipeline.analysis.plots import choose_pixel_colours, plot_map
from pipeline.config import ConfigError


def test_pca_is_the_singular_value_decomposition() -> None:
    vectors = np.random.default_rng(0).normal(size=(50, 5)) * [9, 5, 1, 1, 1]
    centred = vectors - vectors.mean(0)
    left, values, _ = np.linalg.svd(centred, full_matrices=False)
    found = map.principal_components(vectors)
    np.testing.assert_allclose(np.abs(found), np.abs(left[:, :2] * values[:2]), atol=1e-4)
    assert (found[np.abs(found).argmax(0), [0, 1]] > 0).all()
    assert map.principal_components(vectors[:, :1]).shape == (50, 2)


def test_a_map_whose_package_is_missing_is_refused_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(map, "find_spec", lambda name: None)
    assert map.select_projections("auto") == map.select_projections("pca") == ["pca"]
    with pytest.raises(ConfigError, match=r"analyse.map=umap needs umap-learn.*haed\[maps\]"):
        map.select_projections("umap")
    monkeypatch.setattr(map, "find_spec", lambda name: name == "openTSNE")
    assert map.select_projections("auto") == map.select_projections("tsne") == ["tsne", "pca"]


@pytest.mark.parametrize(("kind", "module"), [("umap", "umap"), ("tsne", "openTSNE")])
def test_maps_of_neighbours_keep_groups_together(kind: str, module: str) -> None:
    if importlib.util.find_spec(module) is None:
        pytest.skip(f"{module} is not installed")
    group = np.arange(90) // 30
    vectors = np.eye(8)[group] + 0.05 * np.random.default_rng(0).normal(size=(90, 8))
    places = map.project_chunks(vectors, [kind, "pca"], seed=0)
    found = places[map.NAMES[kind]]
    distances = np.linalg.norm(found[:, None] - found, axis=2) + 1e9 * np.eye(90)
    assert found.shape == (90, 2) and (group[distances.argmin(1)] == group).mean() > 0.9
    assert list(map.project_chunks(vectors[:31], [kind, "pca"], seed=0)) == ["PCA"]  # too few for neighbourhoods


NASTY = ["</script><script>alert(1)</script>", "<img src=x onerror=alert(2)>", "a&b", 'q"', "@TITLE@@POINTS@"]


@pytest.mark.parametrize(
    ("labels", "colours"),
    [
        (["#102030,#405060", "#a0b0c0,#61"], ["#102030", "#a0b0c0"]),
        (["#102030", "#61"], ["#102030", "#616161"]),
        (["#61", "#6162", "#61"], ["#616161", "#616262", "#616161"]),  # matplotlib would read #6162 as #66116622
    ],
)
def test_a_point_has_the_colour_of_its_first_pixel(labels: list[str], colours: list[str]) -> None:
    assert choose_pixel_colours(labels) == colours
    places, clusters = np.arange(2 * len(labels)).reshape(-1, 2) / 2, np.zeros(len(labels), np.int64)
    drawn = np.asarray(Image.open(io.BytesIO(plot_map(places, clusters, labels, "PCA", colours))).convert("RGB"))
    for colour in colours:
        assert (np.abs(drawn - np.frombuffer(bytes.fromhex(colour[1:]), np.uint8).astype(int)).sum(2) < 30).any()


def test_no_chunk_is_markup_and_nothing_is_fetched() -> None:
    points = {"labels": NASTY, "places": {"PCA": np.random.default_rng(0).normal(size=(len(NASTY), 2))}}
    found = render_map_page("<run>", "about & more", "d1", points)
    (inside,) = re.findall(r'<script type="application/json" id="points">(.*?)</script>', found, re.DOTALL)
    values = json.loads(inside)
    assert values["labels"] == NASTY and "<" not in inside
    assert "<h1>&lt;run&gt;</h1>" in found and "about &amp; more" in found
    assert found.count("<script") == 2 and not re.search(r"(?:https?:)?//[a-z]", found)
    assert "default-src 'none'" in found and "innerHTML" not in found
    places = np.array(values["places"]["PCA"]).reshape(-1, 2)
    assert places.min() == 0 and places.max() == 20_000


def test_the_projector_has_vectors_labels_and_sprites(tmp_path) -> None:  # type: ignore[no-untyped-def]
    vectors = np.random.default_rng(0).normal(size=(5, 3))
    chunks = [bytes([255, 0, 0] * 2), bytes([0, 0, 255] * 2), *[bytes([9] * 6)] * 3]
    columns = {"count": np.arange(5)}
    map.export_projector(tmp_path, 'a "name"', vectors, ["tab\there", "line\nend", "c", "d", "e"], columns, chunks)
    read = np.fromfile(tmp_path / "vectors.bytes", "<f4").reshape(5, 3)
    np.testing.assert_allclose(read, vectors / np.linalg.norm(vectors, axis=1, keepdims=True), atol=1e-6)
    lines = (tmp_path / "metadata.tsv").read_text().splitlines()
    assert lines[0] == "chunk\tcount" and lines[1] == "tab⇥here\t0" and len(lines) == 6
    picture = np.asarray(Image.open(io.BytesIO((tmp_path / "sprites.png").read_bytes())))
    assert picture.shape == (48, 48, 3)
    assert picture[0, 0].tolist() == [255, 0, 0] and picture[0, 16].tolist() == [0, 0, 255]
    assert picture[47, 47].tolist() == [255, 255, 255]


@pytest.mark.filterwarnings("ignore")  # TensorBoard's own
def test_tensorboard_reads_the_projector(tmp_path) -> None:  # type: ignore[no-untyped-def]
    plugin = pytest.importorskip("tensorboard.plugins.projector.projector_plugin")
    from tensorboard.plugins import base_plugin

    vectors = np.random.default_rng(0).normal(size=(300, 40))
    map.export_projector(tmp_path, "run", vectors, ["x"] * 300, {"count": np.arange(300)}, [])

    class Nothing:
        def list_runs(self, context: object, experiment_id: str) -> list[object]:
            return []

    made = plugin.ProjectorPlugin(base_plugin.TBContext(logdir=str(tmp_path), data_provider=Nothing()))
    made._update_configs()
    (embedding,) = made._configs["."].embeddings
    assert list(embedding.tensor_shape) == [300, 40] and embedding.metadata_path == "metadata.tsv"
    np.testing.assert_allclose(
        made.tensor_cache.get((".", "run"))[0], vectors[0] / np.linalg.norm(vectors[0]), atol=1e-6
    )
