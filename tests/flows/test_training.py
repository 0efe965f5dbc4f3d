"""An experiment as a flow run, on a real Prefect server: its page is an artifact, and what was there is not made again."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

SCRIPT = """
import json
from dataclasses import replace
from pathlib import Path
from flows.environment import prepare
prepare()
from prefect.client.orchestration import get_client
from flows.flows import experiment
from pipeline.experiments.catalogue import EXPERIMENTS
from pipeline.experiments.hourglass.copy import COPY
from prefect.settings import PREFECT_API_URL, temporary_settings
from flows.server import start_temporary_server

if __name__ == "__main__":
    EXPERIMENTS["hourglass-copy"] = replace(COPY, arms=COPY.arms[3:], better=())
    given = {"seconds": 0.2, "overrides": ["threads=1", "validation.windows=4"]}
    made = []
    with temporary_settings({PREFECT_API_URL: start_temporary_server()()}):
        for _ in range(2):
            folder = experiment("hourglass-copy", **given)
            made.append([path.stat().st_mtime_ns for path in sorted(Path("experiments/runs").rglob("model.safetensors"))])
        with get_client(sync_client=True) as client:
            artifacts = [(item.key, item.data) for item in client.read_artifacts()]
    print(json.dumps({"folder": folder, "made": made, "artifacts": artifacts}))
"""


def test_the_last_state_of_a_training_says_that_it_was_too_short() -> None:
    from flows.training import _summarize_training
    from pipeline.train.trainer import TrainingResult

    remark = "pretrain has taken 9 steps, at 2.2 s each; …: pretrain.seconds=220 or more"
    enough = TrainingResult("runs/x", "pretrain", "runs/x/pretrain/checkpoints/step-00000009", 9, 20.0, 0.01, 0)
    assert _summarize_training(enough).startswith("9 steps in 20 s, 0.01 epochs; runs/x")
    said = _summarize_training(replace(enough, remark=remark))
    assert "too few to learn anything" in said and said.endswith(remark)


@pytest.mark.slow
@pytest.mark.usefixtures("prefect_home")
def test_the_page_is_an_artifact_and_runs_are_made_once(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PREFECT_")}
    done = subprocess.run(
        [sys.executable, "script.py"],
        cwd=tmp_path,
        env=environment | {"PYTHONPATH": str(Path(__file__).resolve().parents[2])},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["made"][0] == found["made"][1] and found["made"][0]
    key, text = found["artifacts"][-1]
    assert key == "experiment-hourglass-copy-minutes" and "data:image/png;base64" in text
    assert "| 1@1 |" in text.replace("\\", "")  # as it is shown: signs of Markdown are escaped
    assert (tmp_path / found["folder"] / "report.html").is_file()
