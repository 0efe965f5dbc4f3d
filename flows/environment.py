"""Settings of Prefect, made before it is imported: quiet, offline, with its data beside the runs.

What a user has set in the environment stands. Sources: measurements with Prefect 3.8.8.
"""

import os
from pathlib import Path

DEFAULTS = {
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "DO_NOT_TRACK": "1",
    "PREFECT_SERVER_UI_SHOW_PROMOTIONAL_CONTENT": "false",
    # A temporary server takes 10 s to start on two cores, longer on busy ones.
    "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "120",
    "PREFECT_SERVER_LOGGING_LEVEL": "WARNING",
    # Leases in memory would end a running training after a restart of the server.
    "PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE": "prefect.server.concurrency.lease_storage.filesystem",
    # The poll interval dominates the time from a click to the first log line.
    "PREFECT_RUNNER_POLL_FREQUENCY": "2",
    "PREFECT_LOGGING_EXTRA_LOGGERS": "pipeline,data,haed,flows",
    # A stage run outside a flow in the same process logs to the terminal alone.
    "PREFECT_LOGGING_TO_API_WHEN_MISSING_FLOW": "ignore",
}
# What flows need that a worker starts elsewhere.
OF_FLOWS = {
    name: DEFAULTS[name] for name in ("PREFECT_LOGGING_EXTRA_LOGGERS", "PREFECT_LOGGING_TO_API_WHEN_MISSING_FLOW")
} | {"PREFECT_FLOWS_HEARTBEAT_FREQUENCY": "30"}  # seconds; the end of a worker shows by the silence of its flows


def prepare() -> None:
    """Sets what is not set yet; must come before the first import of Prefect."""
    os.environ.setdefault("PREFECT_HOME", str(Path(".prefect").resolve()))
    for name, value in DEFAULTS.items():
        os.environ.setdefault(name, value)
    for name in ("NO_PROXY", "no_proxy"):  # a proxy for the outside must not stand before the server on this machine
        hosts = [host for host in os.environ.get(name, "").split(",") if host]
        os.environ[name] = ",".join(dict.fromkeys([*hosts, "127.0.0.1", "localhost"]))
