"""Each steering command on a live run: what it changes, from when on, and that it stays on record. Real Temporal."""

from __future__ import annotations

import asyncio
import getpass
import json
from pathlib import Path

import pytest
from temporalio.client import WorkflowFailureError
from temporalio.exceptions import CancelledError
from typer.testing import CliRunner

from everroll.cli.main import app
from everroll.client import EverrollClient, SteeringError
from everroll.contracts import names
from everroll.contracts.training import Phase, ResumeRequest
from tests.conftest import TemporalServer
from tests.integration.test_orchestration import read_status, wait_for_status
from tests.integration.test_resume import wait_for
from tests.resume_helpers import RecordingSimulation, audit_settlement, read_fates
from tests.simulation import Simulation, build_spec
from workflows.run_groups import RunGroups

_SECONDS = 60


async def command(server: TemporalServer, *arguments: str) -> tuple[int, str]:
    """`everroll ...` against the test's server: exit code and output."""
    result = await asyncio.to_thread(CliRunner().invoke, app, [*arguments, "--address", server.address])
    return result.exit_code, result.output + str(result.exception or "")


async def test_settings_change_under_a_live_run(
    temporal_server: TemporalServer, client: EverrollClient, run_name: str, task_queue: str, tmp_path: Path
) -> None:
    """Learning rate from the next step, sampling for groups that start later; kept by who, and by a resume."""
    simulation = RecordingSimulation(client.temporal, tmp_path)
    simulation.train_gate = asyncio.Event()
    spec = simulation.build_spec(run_name, task_queue, run={"num_steps": 3}, rollout={"max_staleness": 1})
    async with simulation.workers(client.temporal, task_queue):
        await client.start(spec)
        await wait_for(lambda: len(simulation.trained) == 1 and len(simulation.episodes) == 8)
        code, text = await command(
            temporal_server,
            *("set", run_name, "learning_rate=0.25", "rollout.sampling.temperature=0.5", "max_tokens=7", "top_p=0.9"),
            *("--reason", "it diverges"),
        )
        assert code == 0, text
        assert "train.learning_rate = 0.25 (was 1e-06)" in text
        assert (simulation.run_dir(run_name) / "steering.jsonl").read_text(), "it answers when it is on disk"
        simulation.train_gate.set()
        await client.result(run_name)
        view = await read_status(client, run_name)
    assert [request.train.learning_rate for request in simulation.trained] == [1e-6, 0.25, 0.25]
    sampling = {request.key.group: request.sampling for request in simulation.episodes}
    assert [sampling[group].temperature for group in range(6)] == [1.0] * 4 + [0.5] * 2
    assert (sampling[5].max_tokens, sampling[5].top_p, sampling[3].max_tokens) == (7, 0.9, 1024)
    assert view.status is not None
    (record,) = view.status.steerings
    assert record.by.startswith(f"{getpass.getuser()}@")
    assert (record.action, record.reason, record.step) == ("set", "it diverges", 0)
    lines = (simulation.run_dir(run_name) / "steering.jsonl").read_text().splitlines()
    assert [json.loads(line)["changes"]["train.learning_rate"] for line in lines] == [{"old": 1e-6, "new": 0.25}]
    recorded = simulation.directory(run_name).read()
    assert recorded is not None
    assert recorded.spec.train.learning_rate == 0.25


async def test_what_is_refused(client: EverrollClient, run_name: str, task_queue: str, tmp_path: Path) -> None:
    """All faults at once; a refusal changes nothing and leaves no trace."""
    simulation = RecordingSimulation(client.temporal, tmp_path)
    simulation.held_from = 0
    spec = simulation.build_spec(run_name, task_queue)
    async with simulation.workers(client.temporal, task_queue):
        await client.start(spec)
        await wait_for(lambda: len(simulation.episodes) == 4)
        with pytest.raises(SteeringError) as refused:
            await client.set_values(run_name, {"learning_rate": -1, "temperatur": 1, "model.path": "x", "top_p": 1.5})
        text = str(refused.value)
        assert "train.learning_rate = -1: Input should be greater than 0" in text
        assert "temperatur: unknown; did you mean temperature?" in text
        assert "model.path: cannot change while the run is under way" in text
        assert "rollout.sampling.top_p = 1.5" in text
        with pytest.raises(SteeringError, match=r"in force already: train.learning_rate = 1e-06"):
            await client.set_values(run_name, {"train.learning_rate": 1e-6})
        with pytest.raises(SteeringError, match="group 7 has not started; the next one is group 2"):
            await client.skip(run_name, 7)
        with pytest.raises(SteeringError, match="reason: String should match pattern"):
            await client.pause(run_name, "two\nlines")
        with pytest.raises(SteeringError, match="not paused"):
            await client.resume(run_name)
        view = await read_status(client, run_name)
        assert view.status is not None
        assert view.status.steerings == []
        await client.stop(run_name)
        with pytest.raises(SteeringError, match="stops after step 1 already"):
            await client.stop(run_name)
        simulation.held_from = None
        result = await asyncio.wait_for(client.result(run_name), _SECONDS)
    assert result.stopped


async def test_length_concurrency_and_staleness(
    client: EverrollClient, run_name: str, task_queue: str, tmp_path: Path
) -> None:
    """Raised and lowered on a live run; the bounds hold for what starts from then on."""
    simulation = RecordingSimulation(client.temporal, tmp_path)
    simulation.held_from = 0
    rollout: dict[str, object] = {"max_groups_in_flight": 1}
    spec = simulation.build_spec(run_name, task_queue, run={"num_steps": 1}, rollout=rollout)
    async with simulation.workers(client.temporal, task_queue):
        await client.start(spec)
        await wait_for(lambda: len(simulation.episodes) == 2)
        view = await read_status(client, run_name)
        assert view.status is not None
        assert view.status.groups_in_flight == [0]
        await client.set_values(run_name, {"max_groups_in_flight": 3, "num_steps": 4, "max_staleness": 2})
        await wait_for(lambda: {request.key.group for request in simulation.episodes} == {0, 1, 2})
        await client.set_values(run_name, {"max_staleness": 0, "max_groups_in_flight": 2})
        simulation.held_from = None
        await wait_for_status(client, run_name, lambda view: view.status is not None and view.status.step >= 1)
        with pytest.raises(SteeringError, match=r"step \d is done; the run can end with step \d at the earliest"):
            await client.set_values(run_name, {"num_steps": 1})
        result = await asyncio.wait_for(client.result(run_name), _SECONDS)
    assert result.steps == 4
    fates = read_fates(simulation.run_dir(run_name))
    # Three groups were sampled by version 0, and two are a batch: the last of them is too old once version 1 is out.
    assert [fates[group] for group in range(3)].count(["stale"]) == 1
    assert all(len(found) == 1 for found in fates.values())
    assert sum(found == ["trained"] for found in fates.values()) == 8
    audited = await audit_settlement(client, run_name)
    assert audited == {g: "dropped: stale" if found == ["stale"] else "trained" for g, found in fates.items()}


async def test_a_group_is_skipped(client: EverrollClient, run_name: str, task_queue: str, tmp_path: Path) -> None:
    """In flight: its episodes are cancelled; ready: it is dropped. Either is settled once, also after a resume."""
    simulation = RecordingSimulation(client.temporal, tmp_path)
    simulation.held_from = 1
    spec = simulation.build_spec(run_name, task_queue)
    async with simulation.workers(client.temporal, task_queue):
        await client.start(spec)
        await wait_for_status(client, run_name, lambda view: view.status is not None and view.status.groups_ready == 1)
        await client.skip(run_name, 0, "its prompt is wrong")
        await client.skip(run_name, 1)
        await wait_for(lambda: {0, 1} <= set(read_fates(simulation.run_dir(run_name))))
        handle = client.temporal.get_workflow_handle(names.group_workflow_id(run_name, 1))
        with pytest.raises(WorkflowFailureError) as ended:
            await asyncio.wait_for(handle.result(), _SECONDS)
        assert isinstance(ended.value.cause, CancelledError)
        await client.cancel(run_name)
        await wait_for_status(client, run_name, lambda view: view.state == "canceled")
        simulation.held_from = None
        await client.resume_ended(spec, ResumeRequest())
        result = await asyncio.wait_for(client.result(run_name), _SECONDS)
    assert result.dropped_groups == {"skipped": 2}
    fates = read_fates(simulation.run_dir(run_name))
    assert fates == {0: ["skipped"], 1: ["skipped"], **{group: ["trained"] for group in range(2, 6)}}
    audited = await audit_settlement(client, run_name)
    assert audited == {0: "dropped: skipped", 1: "dropped: skipped", **dict.fromkeys(range(2, 6), "trained")}


async def test_a_group_that_ends_before_its_cancellation_arrives_is_skipped_all_the_same(
    client: EverrollClient, run_name: str, task_queue: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is stored as trainable, and nothing of it is trained."""

    async def come_too_late(self: RunGroups, group: int) -> None:
        pass

    monkeypatch.setattr(RunGroups, "_end", come_too_late)
    simulation = RecordingSimulation(client.temporal, tmp_path)
    simulation.held_from = 1
    spec = simulation.build_spec(run_name, task_queue, run={"num_steps": 1})
    async with simulation.workers(client.temporal, task_queue):
        await client.start(spec)
        await wait_for(lambda: len(simulation.episodes) == 4)
        await client.skip(run_name, 1)
        simulation.held_from = None
        result = await asyncio.wait_for(client.result(run_name), _SECONDS)
    assert (tmp_path / "store" / run_name / "groups" / "00000001").exists()
    assert result.dropped_groups == {"skipped": 1}
    assert read_fates(simulation.run_dir(run_name)) == {0: ["trained"], 1: ["skipped"], 2: ["trained"]}
    assert await audit_settlement(client, run_name) == {0: "trained", 1: "dropped: skipped", 2: "trained"}


async def test_a_skip_whose_cancellation_is_lost_over_continue_as_new_ends_the_group(
    client: EverrollClient, run_name: str, task_queue: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The group would play to its end, for nothing; here it never ends by itself."""
    end = RunGroups._end

    async def lose_the_first(self: RunGroups, group: int) -> None:
        if self._core.state.generation > 0:
            await end(self, group)

    monkeypatch.setattr(RunGroups, "_end", lose_the_first)
    simulation = Simulation(gate=asyncio.Event(), is_gated=lambda key: key.group == 3)
    async with simulation.workers(client.temporal, task_queue):
        await client.start(build_spec(run_name, task_queue, run={"num_steps": 500}, rollout={"max_staleness": 5}))
        await wait_for(lambda: any(request.key.group == 3 for request in simulation.episodes))
        await client.skip(run_name, 3)
        group = client.temporal.get_workflow_handle(names.group_workflow_id(run_name, 3))
        with pytest.raises(WorkflowFailureError) as caught:
            await asyncio.wait_for(group.result(), _SECONDS)
        assert isinstance(caught.value.cause, CancelledError)
        view = await wait_for_status(
            client, run_name, lambda view: view.status is not None and view.status.dropped_groups == {"skipped": 1}
        )
        await client.cancel(run_name)
    assert view.status is not None
    assert view.status.generation >= 1


async def test_a_pause_says_who_and_survives_continue_as_new(
    client: EverrollClient, run_name: str, task_queue: str, tmp_path: Path
) -> None:
    simulation = RecordingSimulation(client.temporal, tmp_path)
    spec = simulation.build_spec(run_name, task_queue, run={"num_steps": 14}, rollout={"max_staleness": 1})
    async with simulation.workers(client.temporal, task_queue):
        await client.start(spec)
        await client.set_values(run_name, {"temperature": 0.75})
        await client.pause(run_name, "lunch")
        view = await wait_for_status(
            client, run_name, lambda view: view.status is not None and view.status.phase is Phase.PAUSED
        )
        assert view.status is not None
        assert view.status.pause is not None
        assert view.status.pause.message.startswith(f"paused by request by {getpass.getuser()}@")
        assert view.status.pause.message.endswith(": lunch")
        await client.resume(run_name)
        result = await asyncio.wait_for(client.result(run_name), _SECONDS)
        view = await read_status(client, run_name)
    assert result.steps == 14
    assert view.status is not None
    assert view.status.generation >= 1
    assert [record.action for record in view.status.steerings] == ["set", "pause", "resume"]
    assert simulation.episodes[-1].sampling.temperature == 0.75
