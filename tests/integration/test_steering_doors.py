"""The three doors to a run that is under way: the command line, the Python client, and nothing but Temporal (as its web
UI and its own command line have it). Each request has its effect, and stays on record with who and when. Real Temporal.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from typer.testing import CliRunner

from everroll.cli.main import app
from everroll.client import EverrollClient, RunFailedError, name_person
from everroll.contracts import names
from everroll.contracts.steering import JsonValue
from everroll.contracts.training import RunStatus
from everroll.local.temporal_binary import find_temporal
from tests.conftest import TemporalServer
from tests.integration.test_orchestration import read_status, wait_for_status
from tests.integration.test_resume import wait_for
from tests.resume_helpers import RecordingSimulation, read_fates

_SECONDS = 60
REASON = "to see what happens"
VALUES: dict[str, JsonValue] = {
    "train.learning_rate": 0.25,
    "rollout.sampling.temperature": 0.5,
    "rollout.max_staleness": 1,
    "rollout.max_groups_in_flight": 3,
    "run.num_steps": 5,
}


@dataclass
class Door:
    """How somebody reaches a run."""

    server: TemporalServer
    client: EverrollClient
    run: str

    async def ask(self, what: str, group: int | None = None) -> None:
        raise NotImplementedError

    @property
    def by(self) -> str:
        return name_person()

    @property
    def cancelled(self) -> str:
        """What is kept of a cancellation."""
        return f"by {self.by}: {REASON}"


class CommandLine(Door):
    async def ask(self, what: str, group: int | None = None) -> None:
        values = [f"{key}={value}" for key, value in VALUES.items()] if what == "set" else []
        words = [what, self.run, *values, *([] if group is None else [str(group)]), "--reason", REASON]
        done = await asyncio.to_thread(CliRunner().invoke, app, [*words, "--address", self.server.address])
        assert done.exit_code == 0, done.output


class PythonClient(Door):
    async def ask(self, what: str, group: int | None = None) -> None:
        simple: dict[str, Callable[[str, str], Awaitable[None]]] = {
            "pause": self.client.pause,
            "resume": self.client.resume,
            "stop": self.client.stop,
            "cancel": self.client.cancel,
        }
        if what == "set":
            await self.client.set_values(self.run, VALUES, REASON)
        elif group is not None:
            await self.client.skip(self.run, group, REASON)
        else:
            await simple[what](self.run, REASON)


class PlainTemporal(Door):
    @property
    def by(self) -> str:
        return "ada@web-ui"

    @property
    def cancelled(self) -> str:
        return ""

    async def ask(self, what: str, group: int | None = None) -> None:
        if what == "cancel":
            words = ["workflow", "cancel"]  # neither it nor the web UI's button takes a reason
        else:
            values = {"values": VALUES} if what == "set" else {} if group is None else {"group": group}
            body = json.dumps({**values, "by": self.by, "reason": REASON})
            words = ["workflow", "update", "execute", "--name", what, "--input", body]
        words += ["--workflow-id", names.run_workflow_id(self.run), "--address", self.server.address]
        process = await asyncio.create_subprocess_exec(
            str(find_temporal()), *words, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
        )
        output, _ = await asyncio.wait_for(process.communicate(), _SECONDS)
        assert process.returncode == 0, output.decode()


@pytest.fixture(params=[CommandLine, PythonClient, PlainTemporal])
def person(
    request: pytest.FixtureRequest, temporal_server: TemporalServer, client: EverrollClient, run_name: str
) -> Door:
    door: Door = request.param(temporal_server, client, run_name)
    return door


@pytest.fixture
def simulation(client: EverrollClient, tmp_path: Path) -> RecordingSimulation:
    """No episode ends before a test lets it."""
    simulation = RecordingSimulation(client.temporal, tmp_path)
    simulation.held_from = 0
    return simulation


async def test_every_request_counts_and_is_on_record(
    client: EverrollClient, run_name: str, task_queue: str, simulation: RecordingSimulation, person: Door
) -> None:

    async def status() -> RunStatus:
        found = (await read_status(client, run_name)).status
        assert found is not None
        return found

    began = time.time()
    async with simulation.workers(client.temporal, task_queue):
        await client.start(simulation.build_spec(run_name, task_queue))
        await wait_for(lambda: len(simulation.episodes) == 4)
        await person.ask("pause")
        pause = (await status()).pause
        assert pause is not None
        assert pause.message == f"paused by request by {person.by}: {REASON}"
        await person.ask("resume")
        assert (await status()).pause is None
        await person.ask("set")
        assert (await status()).num_steps == 5
        await wait_for(lambda: 2 in {request.key.group for request in simulation.episodes})
        await person.ask("skip", group=1)
        await wait_for(lambda: read_fates(simulation.run_dir(run_name)) == {1: ["skipped"]})
        await person.ask("stop")
        simulation.held_from = None
        result = await asyncio.wait_for(client.result(run_name), _SECONDS)
    assert (result.stopped, result.steps) == (True, 1)
    trained = {item.group for item in simulation.trained[0].batch}
    assert len(trained) == 2
    assert 1 not in trained  # it was skipped; which of the others are ready first is theirs
    assert simulation.trained[0].train.learning_rate == 0.25
    assert {request.key.group: request.sampling.temperature for request in simulation.episodes} == {
        group: 1.0 if group < 2 else 0.5 for group in range(len({r.key.group for r in simulation.episodes}))
    }
    lines = (simulation.run_dir(run_name) / "steering.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    assert [record["action"] for record in records] == ["pause", "resume", "set", "skip", "stop"]
    assert {record["by"] for record in records} == {person.by}
    assert {record["reason"] for record in records} == {REASON}
    assert [record["number"] for record in records] == [1, 2, 3, 4, 5]
    assert began <= records[0]["at"] <= records[-1]["at"] <= time.time()
    assert {key: change["new"] for key, change in records[2]["changes"].items()} == VALUES
    assert records[3]["group"] == 1


async def test_a_cancellation_is_on_record(
    client: EverrollClient, run_name: str, task_queue: str, simulation: RecordingSimulation, person: Door
) -> None:
    began = time.time()
    async with simulation.workers(client.temporal, task_queue):
        await client.start(simulation.build_spec(run_name, task_queue))
        await wait_for(lambda: len(simulation.episodes) == 4)
        await person.ask("cancel")
        with pytest.raises(RunFailedError, match="Cancelled"):
            await asyncio.wait_for(client.result(run_name), _SECONDS)
        view = await wait_for_status(client, run_name, lambda view: view.status is not None and view.state != "running")
    assert view.state == "canceled"
    (line,) = (simulation.run_dir(run_name) / "steering.jsonl").read_text().splitlines()
    record = json.loads(line)
    assert began <= record["at"] <= time.time()
    assert (record["action"], record["reason"]) == ("cancel", person.cancelled)
