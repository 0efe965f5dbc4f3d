"""The stage `analyse` on tiny runs: what it writes, says and leaves out."""

import json
import re
import shutil
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest

from data.filesystem import read_json
from pipeline.analysis import stage
from pipeline.analysis.stage import analyse_run
from pipeline.arguments import load_run_options
from pipeline.cli import main
from pipeline.config import Options
from pipeline.reporting.findings import describe_findings
from pipeline.reporting.report import load_run_report
from pipeline.run.analysis_results import Analysis
from pipeline.run.files import read_as
from pipeline.run.run_directory import RunFolder
from tests.conftest import of_kind
from tests.pipeline.conftest import CommandLine

FEW = ["analyse.max_chunks=50", "analyse.map=pca", "analyse.projector=0", "analyse.passages=0"]
KEYS = {"agreement", "checkpoint", "classes", "cloud", "drift", "findings", "intrinsic", "loss", "norms", "passages"}


@pytest.mark.slow
def test_it_writes_figures_pictures_a_map_and_an_export(run: Path, haed: CommandLine) -> None:
    found = haed.json("analyse", run, "analyse.clusters=5", "analyse.skip_gram=false")
    assert found == read_json(run / "analysis" / "analysis.json") and found.keys() >= KEYS
    assert found["chunks"] > 300 and found["least"] == 1 and found["width"] == 16
    assert found["drift"]["before"] == "run pretrain step 6" and found["drift"]["after"] == "run finetune step 4"
    assert 0 < found["drift"]["overlap"] <= 1 and found["loss"] and found["classes"]["classes"] == 5
    for name in found["files"]:
        assert (run / "analysis" / name).exists()
    pictures = {f"{name}.png" for name in ("map", "use", "loss", "norms", "drift", "passages")}
    assert {"map.html", *pictures} <= set(found["files"])
    layers = found["passages"]["layers"]
    assert [each["name"] for each in layers] == ["layer 0", "ŷ"] and layers[0]["overlap"] is None
    rows = (run / "analysis" / "projector" / "metadata.tsv").read_text().splitlines()
    assert len(rows) == found["chunks"] + 1 and rows[0] == "chunk\tcount\tbytes"
    exported = np.fromfile(run / "analysis" / "projector" / "vectors.bytes", "<f4").reshape(found["chunks"], 16)
    cosines = exported @ exported.T  # the same that an index of all chunks gives
    assert 'tensor_name: "run centred"' in (run / "analysis" / "projector" / "projector_config.pbtxt").read_text()
    assert cosines[~np.eye(len(exported), dtype=bool)].mean() == pytest.approx(
        found["cloud"]["centred_cosine"], abs=1e-4
    )
    options = load_run_options(str(run), ["analyse.clusters=5", "analyse.skip_gram=false"], "analyse")
    again = asdict(analyse_run(options))
    assert json.loads(json.dumps(again)) | {"seconds": 0} == found | {"seconds": 0}
    assert main(["report", str(run)]) == 0
    page = (run / "report.html").read_text()
    assert "Analysis of the embeddings" in page and 'href="analysis/map.html"' in page and 'alt="map.png"' in page
    assert "Passages by layer" in page and page.count("data:image/png;base64") == sum(
        name.endswith(".png") for name in found["files"]
    )


@pytest.mark.slow
def test_what_is_cut_is_said_and_what_is_not_there_any_more_is_gone(run: Path, haed: CommandLine) -> None:
    (run / "analysis" / "projector").mkdir(parents=True)
    for name in ("drift.png", "passages.png"):
        (run / "analysis" / name).touch()  # of an analysis before
    assert main(["evaluate", str(run), "evaluate.stage=pretrain"]) == 0
    given = [
        f"analyse.{word}" for word in ("max_chunks=50", "corpus_chunks=100", "projector=20", "map=pca", "passages=0")
    ]
    said = haed.output("analyse", run, "evaluate.stage=pretrain", *given)
    assert "chunks that are as rare or rarer are left out (analyse.max_chunks=50)" in said
    assert "analyse.corpus_chunks=100" in said
    assert "drift is left out: there is no other checkpoint" in said and "pretrain step 6: 50 chunks" in said
    folder = run / "analysis"
    assert not (folder / "drift.png").exists() and not (folder / "passages.png").exists()
    assert (folder / "loss.png").exists()
    assert len((folder / "projector" / "metadata.tsv").read_text().splitlines()) == 21
    assert np.fromfile(folder / "projector" / "vectors.bytes", "<f4").size == 20 * 16
    assert main(["report", str(run)]) == 0
    page = (run / "report.html").read_text()
    assert "The analysis belongs to another checkpoint (pretrain step 6), so it is not shown" in page


@pytest.mark.slow
def test_drift_from_another_run(run: Path, haed: CommandLine) -> None:
    other = run.parent / "other"
    shutil.copytree(run, other)
    said = haed.error("analyse", run, "analyse.against=other", status=2)
    assert "analyse.against=other is the analysed checkpoint itself" in said
    shutil.rmtree(other / "finetune")
    said = haed.output("analyse", run, "analyse.against=other", "analyse.projector=0")
    assert "From other pretrain step 6 to run finetune step 4" in said
    assert not (run / "analysis" / "projector").exists()
    assert "no run 'nowhere'" in haed.error("analyse", run, "analyse.against=nowhere")


def test_a_damaged_phase_one_or_evaluation_is_noted(run: Path, haed: CommandLine) -> None:
    for state in (run / "pretrain" / "checkpoints").glob("*/state.json"):
        state.write_text("{")
    (run / "evaluation.json").write_text("{")
    said = haed.output("analyse", run, *FEW)
    assert re.search("note: drift is left out: .*(damaged|whole)", said)
    damaged = "note: loss by frequency is left out: .*evaluation.json is damaged"
    assert re.search(f"{damaged}.*Run `haed evaluate {run}` again", said)
    other = Path(shutil.copytree(run, run.parent / "other"))
    assert main(["analyse", str(run), *FEW, f"analyse.against={other}", "evaluate.stage=finetune"]) == 2
    shutil.rmtree(other / "finetune")  # what was asked for is not left out
    assert main(["analyse", str(run), *FEW, "analyse.against=other"]) == 1


@pytest.mark.slow
def test_an_analysis_that_fails_leaves_no_metrics_beside_other_pictures(
    run: Path, haed: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    haed.output("report", run)
    said = haed.output("analyse", run, *FEW)
    assert f"report.html does not show this analysis. Run `haed report {run}` again" in said and "-0%" not in said
    folder = run / "analysis"
    files = {path.name for path in load_run_report(RunFolder(run)).pictures.values()}
    assert "norms.png" in files and "passages.png" not in files
    (folder / "passages.png").touch()
    assert {path.name for path in load_run_report(RunFolder(run)).pictures.values()} == files
    (folder / "analysis.json").write_text("garbage")
    assert f"Run `haed analyse {run}` again" in haed.error("report", run)

    def fail(path: Path, content: bytes) -> None:
        raise OSError("no more")

    kept = Path(shutil.copytree(run, run.parent / "kept"))
    (folder / "projector").symlink_to(kept)
    with monkeypatch.context() as patched:
        patched.setattr(stage, "write_atomically", fail)
        assert main(["analyse", str(run), *FEW]) == 1
    assert not (folder / "analysis.json").exists() and (folder / "norms.png").exists()
    assert main(["analyse", str(run), *FEW, "analyse.projector=20"]) == 0
    assert (folder / "projector" / "metadata.tsv").is_file() and not (folder / "projector").is_symlink()
    assert (kept / "config.yaml").is_file() and not (kept / "metadata.tsv").exists()


def test_findings_have_no_negative_zero(run: Path, haed: CommandLine) -> None:
    haed.output("analyse", run, *FEW)
    found = read_as(Analysis, run / "analysis" / "analysis.json")
    assert found.agreement
    for each in (found.agreement[0].use, found.agreement[0].spelling):
        each.share = -0.001
    found.norms.slope = found.norms.correlation = found.cloud.mean_cosine = -0.0001
    assert not re.search(r"-0\.?0*(?![.\d])", " ".join(describe_findings(found)))


def test_what_has_the_place_of_the_analysis_is_named(run: Path, haed: CommandLine) -> None:
    (run / "analysis").touch()
    assert "analysis is a file, not a folder" in haed.error("analyse", run, *FEW)
    (run / "analysis").unlink()
    (run / "analysis" / "map.png").mkdir(parents=True)
    assert "map.png is a folder, not a file" in haed.error("analyse", run, *FEW)


@pytest.mark.slow
def test_pixels_have_a_map_of_their_colours(pictures: Options, haed: CommandLine) -> None:
    where = f"{pictures.runs_dir}/{pictures.name}"
    said = haed.output("analyse", where)
    assert "4 chunks are too few" in said and f"Run `haed evaluate {where} evaluate.breakdown=true" in said
    page = (Path(where) / "analysis" / "map.html").read_text()
    assert '"pixels":true' in page and "#3c3c3c" in page
    assert (Path(where) / "analysis" / "projector" / "sprites.png").is_file()


def test_what_cannot_be_analysed_is_said_in_a_line(tiny: list[str], run: Path, haed: CommandLine) -> None:
    tokens = of_kind("hourglass", tiny)
    for name in ("shard", "train"):
        assert main([name, "--config", "flat", *tokens, "name=tokens"]) == 0
    for status, expected, words in (
        (2, f"no embeddings to analyse. Use `haed evaluate {run.parent}/tokens`", [run.parent / "tokens"]),
        (1, "too few to analyse. Lower analyse.min_count", [run, "analyse.min_count=100000"]),
        (2, "analyse.against=tokens is of model.kind=hourglass", [run, "analyse.against=tokens"]),
        (2, "`haed analyse` takes", [run, "index.min_count=3"]),
    ):
        error = haed.error("analyse", *words, status=status)
        assert expected in error and error.count("error:") == 1 and "Traceback" not in error


def test_a_run_that_there_is_not_is_not_called_forbidden(options: Options) -> None:
    with pytest.raises(FileNotFoundError):
        analyse_run(options)
