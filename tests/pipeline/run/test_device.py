"""What is set before torch is loaded."""

import os
import subprocess
import sys

import pytest


@pytest.mark.slow
@pytest.mark.parametrize("own", [None, "ACTIVE"])
def test_idle_threads_of_openmp_sleep_unless_the_user_says_otherwise(own: str | None) -> None:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("OMP_")}
    given = clean | {"OMP_DISPLAY_ENV": "TRUE", "HAED_TRAININGS": "2"} | ({"OMP_WAIT_POLICY": own} if own else {})
    command = [sys.executable, "-c", "import pipeline.run.device"]
    done = subprocess.run(command, env=given, capture_output=True, text=True, check=True)
    if "OMP_WAIT_POLICY" not in done.stderr:
        pytest.skip("torch came without OpenMP")
    assert f"OMP_WAIT_POLICY = '{own or 'PASSIVE'}'" in done.stderr


def test_a_training_alone_keeps_the_default_of_openmp() -> None:
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "HAED_"))}
    command = [sys.executable, "-c", "import os, pipeline; print(os.environ.get('OMP_WAIT_POLICY'))"]
    assert subprocess.run(command, env=clean, capture_output=True, text=True, check=True).stdout == "None\n"
