"""Settings of Prefect, made before it is imported: quiet, offline, with its data beside the runs.

Environment variables of the user take precedence, then the settings of the active profile.
"""

import hashlib
import os
import re
import stat
import sys
import tomllib
from contextlib import suppress
from pathlib import Path
from typing import Any

from data.urls import redact_urls
from pipeline.config import ConfigError

DEFAULTS = {
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "DO_NOT_TRACK": "1",
    "PREFECT_SERVER_UI_SHOW_PROMOTIONAL_CONTENT": "false",
    # A temporary server takes 10 s to start on two cores, longer on busy ones.
    "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "120",
    "PREFECT_SERVER_LOGGING_LEVEL": "WARNING",
    # PostgreSQL on a busy machine may take longer than Prefect's 10 and 5 s, and an answer 500 ends a flow.
    "PREFECT_SERVER_DATABASE_TIMEOUT": "60",
    "PREFECT_SERVER_DATABASE_CONNECTION_TIMEOUT": "30",
    # Leases in memory would end a running training after a restart of the server.
    "PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE": "prefect.server.concurrency.lease_storage.filesystem",
    # The poll interval dominates the time from a click to the first log line.
    "PREFECT_RUNNER_POLL_FREQUENCY": "1",
    "PREFECT_LOGGING_EXTRA_LOGGERS": "pipeline,data,haed,flows",
    # A stage run outside a flow in the same process logs to the terminal alone.
    "PREFECT_LOGGING_TO_API_WHEN_MISSING_FLOW": "ignore",
}
# What flows need that a worker starts elsewhere.
OF_FLOWS = {
    name: DEFAULTS[name] for name in ("PREFECT_LOGGING_EXTRA_LOGGERS", "PREFECT_LOGGING_TO_API_WHEN_MISSING_FLOW")
} | {
    "PREFECT_FLOWS_HEARTBEAT_FREQUENCY": "30",  # seconds; the end of a worker shows by the silence of its flows
    "PYTHONSAFEPATH": "1",  # no module of the folder they run in is taken for one of ours
    "HAED_TRAININGS": "1",  # at a time on a device
}


def deployment_suffix(folder: Path, host: str = "") -> str:
    """Return the common part of the names of a folder's deployments: host, folder name, and digits of a hash of both.

    Args:
        folder: where the deployments run.
        host: name of a host or work pool, to tell apart those that share a server.
    """
    digits = hashlib.sha256(f"{host}:{folder.resolve()}".encode()).hexdigest()[:4]
    return "-".join([*filter(None, [host]), re.sub(r"[^\w.]+", "-", folder.resolve().name) or "root", digits])


def prepare() -> None:
    """Set the settings that are not set yet. Call it before Prefect is first imported.

    The active profile of Prefect is applied: that of PREFECT_HOME, else the user's own.

    Raises:
        ConfigError: the profiles file is not readable, or the address of a server contains a password.
    """
    home = Path(os.environ.get("PREFECT_HOME") or ".prefect").expanduser().absolute()
    os.environ["PREFECT_HOME"] = str(home)
    named = os.environ.get("PREFECT_PROFILES_PATH")
    files = [Path(named)] if named else [home / "profiles.toml", Path("~/.prefect/profiles.toml").expanduser()]
    name, settings = "", dict[str, Any]()
    if file := next(filter(Path.is_file, files), None):
        os.environ["PREFECT_PROFILES_PATH"] = str(file)
        name, settings = _read_active_profile(file)
        for key, value in settings.items():
            os.environ.setdefault(key, str(value))
    for variable in ("PREFECT_API_URL", "PREFECT_UI_URL", "PREFECT_UI_API_URL"):  # addresses are printed and stored
        address = os.environ.get(variable, "")
        if redact_urls(address) != address:
            advice = "Leave it out, and set PREFECT_API_AUTH_STRING"
            raise ConfigError(f"{variable}={address} holds a name or password. {advice}")
    if settings:
        server = os.environ.get("PREFECT_API_URL")
        sets = f"the server {server}" if server else ", ".join(settings)
        print(f"Prefect profile {name!r} of {file}: {sets}", file=sys.stderr, flush=True)
    for name, value in DEFAULTS.items():
        os.environ.setdefault(name, value)
    for name in ("NO_PROXY", "no_proxy"):  # a proxy for the outside must not stand before the server on this machine
        hosts = [host for host in os.environ.get(name, "").split(",") if host]
        os.environ[name] = ",".join(dict.fromkeys([*hosts, "127.0.0.1", "localhost"]))
    keep_private(home)


def keep_private(home: Path) -> None:
    """Make PREFECT_HOME readable by this user alone: records with all parameters, logs, results, a password.

    A folder with other files and without Prefect's database keeps its mode. Otherwise a wrong PREFECT_HOME would lock
    other users out.
    """
    database = home / "prefect.db"
    is_ours = not home.exists() or not any(home.iterdir()) or database.exists()
    home.mkdir(parents=True, exist_ok=True)
    with suppress(OSError):  # an empty file is an empty database; SQLite gives its journals the same mode
        os.close(os.open(database, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
    status = home.stat()
    if is_ours and status.st_uid == os.getuid() and not status.st_mode & stat.S_ISVTX:
        with suppress(OSError):
            home.chmod(0o700)


def _read_active_profile(file: Path) -> tuple[str, dict[str, Any]]:
    try:
        content = tomllib.loads(file.read_text(encoding="utf-8"))
        name = os.environ.get("PREFECT_PROFILE") or content.get("active") or ""
        return str(name), dict(content.get("profiles", {}).get(name, {}))
    except (OSError, ValueError, AttributeError, TypeError) as error:
        raise ConfigError(f"{file} is not a valid file of Prefect profiles: {error}") from error
