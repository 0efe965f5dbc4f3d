"""The user's own Prefect profile counts; what is set in the environment counts more."""

import json
from pathlib import Path

import pytest

from tests.flows.api import haed, python

SCRIPT = """
import json, os
from flows.environment import prepare
prepare()
names = ("PREFECT_API_URL", "PREFECT_LOGGING_LEVEL", "PREFECT_RUNNER_POLL_FREQUENCY", "PREFECT_HOME")
found = [os.environ.get(name) for name in names]
if "PREFECT_PROFILE" in os.environ:  # Prefect itself must find it too; its import takes seconds
    from prefect.settings import get_current_settings
    assert get_current_settings().logging.level == "ERROR"
print(json.dumps(found))
"""
TEAM = "http://team.example/api"
PROFILES = f"""
active = "team"
[profiles.team]
PREFECT_API_URL = "{TEAM}"
PREFECT_RUNNER_POLL_FREQUENCY = "7"
[profiles.other]
PREFECT_LOGGING_LEVEL = "ERROR"
"""


@pytest.mark.parametrize(
    ("given", "expected", "said"),
    [
        ({}, [TEAM, None, "7"], f"Prefect profile 'team' of ~: the server {TEAM}\n"),
        ({"PREFECT_API_URL": "http://mine/api"}, ["http://mine/api", None, "7"], "'team' of ~: the server http://mine"),
        ({"PREFECT_PROFILE": "other"}, [None, "ERROR", "1"], "Prefect profile 'other' of ~: PREFECT_LOGGING_LEVEL\n"),
        ({"HOME": "/nowhere"}, [None, None, "1"], ""),
    ],
)
def test_a_profile_counts(given: dict[str, str], expected: list[object], said: str, tmp_path: Path) -> None:
    file, work = tmp_path / ".prefect" / "profiles.toml", tmp_path / "work"
    for folder in (file.parent, work):
        folder.mkdir()
    file.write_text(PROFILES)
    done = python(work, "-c", SCRIPT, **({"HOME": str(tmp_path)} | given))
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [*expected, str(work / ".prefect")]
    spoken = done.stderr.replace(str(file), "~")
    assert said in spoken and (said or not spoken)


def test_a_file_of_profiles_that_is_none_is_said_in_a_line(tmp_path: Path) -> None:
    (tmp_path / ".prefect").mkdir()
    (tmp_path / ".prefect/profiles.toml").write_text("active = [")
    done = haed(tmp_path, "deploy", "--pool", "any", HOME=str(tmp_path))
    assert done.returncode == 2 and "not a valid file of Prefect profiles" in done.stderr
    assert done.stderr.count("\n") == 1


def test_no_password_in_the_address_of_a_server(tmp_path: Path) -> None:
    (tmp_path / "profiles.toml").write_text(PROFILES.replace("http://team", "http://me:hunter2@team"))
    for given in (
        {"PREFECT_API_URL": "http://me:hunter2@127.0.0.1:1/api"},
        {"PREFECT_PROFILES_PATH": str(tmp_path / "profiles.toml")},
    ):
        done = haed(tmp_path, "serve", "--no-server", **given)
        assert done.returncode == 2 and "set PREFECT_API_AUTH_STRING" in done.stderr
        assert "hunter2" not in done.stdout + done.stderr and len(done.stderr.splitlines()) == 1


@pytest.mark.nightly
@pytest.mark.parametrize("command", ["run", "serve", "deploy --pool any"])
def test_a_server_of_a_profile_is_used_and_missed(command: str, tmp_path: Path) -> None:
    """One on another machine: 127.0.0.2, where none answers."""
    (tmp_path / ".prefect").mkdir()
    (tmp_path / ".prefect/profiles.toml").write_text(PROFILES.replace(TEAM, "http://127.0.0.2:9/api"))
    done = haed(tmp_path, *command.split(), HOME=str(tmp_path), PREFECT_CLIENT_MAX_RETRIES="0")
    assert done.returncode == 1 and "error: no Prefect server answers at http://127.0.0.2:9/api" in done.stderr
    assert "Prefect profile 'team'" in done.stderr and "Traceback" not in done.stderr


def test_a_host_that_has_no_address_is_no_busy_port(tmp_path: Path) -> None:
    done = haed(tmp_path, "serve", "--host", "nobody.invalid", "--port", "4399")
    assert done.returncode == 2 and done.stderr.startswith("error: --host nobody.invalid: "), done.stderr
