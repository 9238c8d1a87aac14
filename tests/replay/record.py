"""Record the histories of a release, for the replay tests (docs/upgrades.md).

    python -m tests.replay.record [--release 0.1.0] [--only normal]

Plays each scenario of `tests.replay.scenarios` on a Temporal server of its own and writes the histories of the run's
executions and of its groups to `tests/replay/histories/<release>/<scenario>.json.gz`. Histories of earlier releases
stay as they are: the code of today must still replay them while runs of those releases may be open.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gzip
import json
import subprocess
import tempfile
import uuid
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

from temporalio.client import WorkflowExecutionStatus

from everroll.client import EverrollClient
from everroll.contracts import names
from everroll.local.plan import TEMPORAL_TUNING
from everroll.local.ports import choose_port
from everroll.local.temporal_binary import find_temporal
from everroll.temporal import install_runtime
from tests.replay.scenarios import SCENARIOS, Scenario

HISTORIES = Path(__file__).parent / "histories"
# Few enough that a short run continues as new.
_SUGGEST = ("--dynamic-config-value", "limit.historyCount.suggestContinueAsNew=200")


async def record(client: EverrollClient, scenario: Scenario) -> bytes:
    run, task_queue = f"recorded-{scenario.name}", f"recorded-{uuid.uuid4().hex[:8]}"
    await scenario.play(client, run, task_queue)
    histories = await read_histories(client, run)
    # Without a time stamp, so that equal histories are equal files.
    return gzip.compress(json.dumps(histories, sort_keys=True).encode(), mtime=0)


async def read_histories(client: EverrollClient, run: str) -> list[dict[str, Any]]:
    """Of all executions of the run and of its groups, oldest first."""
    executions = await _find_executions(client, names.run_workflow_id(run))
    histories = []
    for workflow_id, run_id in executions:
        history = await client.temporal.get_workflow_handle(workflow_id, run_id=run_id).fetch_history()
        histories.append({"workflow_id": workflow_id, "history": _without_hosts(history.to_json_dict())})
    return histories


def _without_hosts(value: Any) -> Any:
    """A history without the names of the machine that it was recorded on, which replaying does not need."""
    if isinstance(value, dict):
        return {key: _without_hosts(item) for key, item in value.items() if key != "identity"}
    return [_without_hosts(item) for item in value] if isinstance(value, list) else value


async def _find_executions(client: EverrollClient, prefix: str) -> list[tuple[str, str]]:
    """Workflow id and run id of all that begin with this id; the list may lag behind for a moment."""
    found: list[tuple[str, str]] = []
    while True:
        listed = [item async for item in client.temporal.list_workflows(f'WorkflowId STARTS_WITH "{prefix}"')]
        is_open = any(item.status is WorkflowExecutionStatus.RUNNING for item in listed)
        latest = [(item.id, item.run_id) for item in sorted(listed, key=lambda item: (item.start_time, item.id))]
        if latest and latest == found and not is_open:
            return found
        found = latest
        await asyncio.sleep(1.0)


@contextlib.contextmanager
def run_server(directory: str) -> Iterator[str]:
    """A Temporal server; yields its address."""
    port = choose_port(0)
    command = [
        str(find_temporal()),
        *("server", "start-dev", "--headless", "--ip", "127.0.0.1", "--port", str(port)),
        *("--db-filename", f"{directory}/temporal.sqlite", "--log-level", "error", *TEMPORAL_TUNING, *_SUGGEST),
    ]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.terminate()
        server.wait(timeout=60)


async def record_all(address: str, only: str | None) -> dict[str, bytes]:
    """The files' bodies by scenario."""
    client = await EverrollClient.connect(address, "default", 30.0)
    await client.register_search_attributes()
    scenarios = [scenario for scenario in SCENARIOS if only in (None, scenario.name)]
    return {scenario.name: await asyncio.wait_for(record(client, scenario), 300) for scenario in scenarios}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--release", default=version("everroll"), help="directory to write to")
    parser.add_argument("--only", choices=[scenario.name for scenario in SCENARIOS])
    options = parser.parse_args()
    install_runtime()
    with tempfile.TemporaryDirectory() as directory, run_server(directory) as address:
        bodies = asyncio.run(record_all(address, options.only))
    target = HISTORIES / options.release
    target.mkdir(parents=True, exist_ok=True)
    for name, body in bodies.items():
        (target / f"{name}.json.gz").write_bytes(body)
        print(f"{options.release}/{name}.json.gz: {len(body)} bytes")


if __name__ == "__main__":
    main()
