"""Runs that ended, by failure, cancellation or termination, go on from what lies in their directory. Real Temporal."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest
from temporalio.exceptions import ApplicationError

from everroll.client import EverrollClient, RunFailedError, SteeringError
from everroll.contracts import names
from everroll.contracts.outcomes import ErrorType
from everroll.contracts.rollout import EpisodeReport, EpisodeRequest
from everroll.contracts.spec import RunSpec
from everroll.contracts.training import Phase, ResumeRequest, TrainingRunResult
from tests.integration.test_orchestration import read_status, wait_for_status
from tests.resume_helpers import RecordingSimulation, audit_settlement, read_fates
from tests.simulation import succeed

_SECONDS = 60


async def resume(client: EverrollClient, spec: RunSpec, **values: object) -> TrainingRunResult:
    await client.resume_ended(spec, ResumeRequest.model_validate(values))
    return await asyncio.wait_for(client.result(spec.run.name), _SECONDS)


async def wait_for(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(_SECONDS):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.02)


async def test_a_failed_run_goes_on_where_it_was(
    client: EverrollClient, run_name: str, task_queue: str, tmp_path: Path
) -> None:
    """C1: what was trained or stored is not played again, what was lost is, and the seeds are the same."""
    simulation = RecordingSimulation(client.temporal, tmp_path)
    broken = True

    def play(request: EpisodeRequest) -> EpisodeReport:
        if broken and request.key.group == 5:
            raise ApplicationError("POST /sessions: 500", type=ErrorType.SERVER.value, non_retryable=True)
        return succeed(request)

    simulation.play = play
    spec = simulation.build_spec(run_name, task_queue, run={"num_steps": 4})
    async with simulation.workers(client.temporal, task_queue):
        await client.start(spec)
        with pytest.raises(RunFailedError, match="500"):
            await client.result(run_name)
        broken = False
        before = list(simulation.episodes)
        result = await resume(client, spec)
        view = await read_status(client, run_name)
    assert result.steps == 4
    assert result.trained_groups == 8
    assert simulation.trained_groups(run_name) == list(range(8))
    assert read_fates(simulation.run_dir(run_name)) == {group: ["trained"] for group in range(8)}
    again = simulation.episodes[len(before) :]
    assert {request.key.group for request in again if request.key.group < 4} == set()
    # The lost group has sessions of its own, and draws what it would have drawn.
    first = {(r.key.group, r.key.member): r for r in before}
    for request in again:
        assert request.key.attempt == names.ATTEMPTS_PER_RESUME
        if (request.key.group, request.key.member) in first:
            assert request.seed == first[request.key.group, request.key.member].seed
    assert view.status is not None
    assert [record.groups for record in view.status.recent_steps] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert view.status.num_resumes == 1
    assert view.status.num_episodes == 16
    assert view.status.steerings[-1].action == "resumed"
    assert set((await audit_settlement(client, run_name)).values()) == {"trained"}


async def test_a_terminated_run_takes_its_groups_over(
    client: EverrollClient, run_name: str, task_queue: str, tmp_path: Path
) -> None:
    """Groups that still play are neither raced nor played again; those that ended meanwhile count."""
    simulation = RecordingSimulation(client.temporal, tmp_path)
    simulation.held_from = 2
    spec = simulation.build_spec(run_name, task_queue, run={"num_steps": 3}, rollout={"max_staleness": 1})
    handle = client.temporal.get_workflow_handle(names.run_workflow_id(run_name))
    async with simulation.workers(client.temporal, task_queue):
        await client.start(spec)
        await wait_for_status(
            client,
            run_name,
            lambda view: view.status is not None and view.status.step == 1 and len(simulation.episodes) == 12,
        )
        await handle.terminate()
        simulation.held_from = 3
        await wait_for(lambda: 2 in simulation.directory(run_name).read_settled())
        await client.resume_ended(spec, ResumeRequest())
        view = await wait_for_status(
            client,
            run_name,
            lambda view: view.status is not None and view.status.generation == 0 and view.status.phase is Phase.ROLLOUT,
        )
        assert view.status is not None
        # C4, C5: two ready or in flight for each of the two versions, and no more.
        assert view.status.groups_ready == 1
        assert len(view.status.groups_in_flight) == 3
        assert len(simulation.episodes) == 12
        simulation.held_from = None
        result = await asyncio.wait_for(client.result(run_name), _SECONDS)
    assert result.trained_groups == 6
    assert read_fates(simulation.run_dir(run_name)) == {group: ["trained"] for group in range(6)}
    assert len(simulation.episodes) == 12
    assert {request.key.attempt for request in simulation.episodes} == {0}
    fates = await audit_settlement(client, run_name)
    # The history of the terminated execution does not tell of group 2, which ended after it.
    assert fates == dict.fromkeys(range(6), "trained")


async def test_a_cancelled_run_plays_its_lost_groups_first(
    client: EverrollClient, run_name: str, task_queue: str, tmp_path: Path
) -> None:
    simulation = RecordingSimulation(client.temporal, tmp_path)
    simulation.held_from = 5
    spec = simulation.build_spec(run_name, task_queue, run={"num_steps": 3}, rollout={"max_staleness": 2})
    async with simulation.workers(client.temporal, task_queue):
        await client.start(spec)
        await wait_for(lambda: set(simulation.directory(run_name).read_settled()) == {0, 1, 2, 3, 4})
        await client.cancel(run_name, "to look at something")
        await wait_for_status(client, run_name, lambda view: view.state == "canceled")
        before = len(simulation.episodes)
        simulation.held_from = None
        result = await resume(client, spec)
        view = await read_status(client, run_name)
    assert result.trained_groups == 6
    assert [request.key.group for request in simulation.episodes[before:]] == [5, 5]
    assert view.status is not None
    cancel, resumed = view.status.steerings
    assert (cancel.action, resumed.action) == ("cancel", "resumed")
    assert cancel.reason.startswith("by ")
    assert cancel.reason.endswith("to look at something")
    assert await audit_settlement(client, run_name) == dict.fromkeys(range(6), "trained")


async def test_nothing_is_trained_that_is_too_old_by_the_bound_of_now(
    client: EverrollClient, run_name: str, task_queue: str, tmp_path: Path
) -> None:
    """C5: a whole batch lies ready when the run is resumed with a lower bound, which holds at once."""
    simulation = RecordingSimulation(client.temporal, tmp_path)
    simulation.train_gate = asyncio.Event()
    spec = simulation.build_spec(run_name, task_queue, run={"num_steps": 3}, rollout={"max_staleness": 2})
    async with simulation.workers(client.temporal, task_queue):
        await client.start(spec)
        await wait_for(lambda: len(simulation.trained) == 1)
        await wait_for(lambda: set(simulation.directory(run_name).read_settled()) == set(range(6)))
        await client.cancel(run_name)
        simulation.train_gate.set()
        await wait_for_status(client, run_name, lambda view: view.state == "canceled")
        result = await resume(client, spec, changes={"max_staleness": 0})
    assert result.dropped_groups == {"stale": 4}
    first = sorted(item.group for item in simulation.trained[0].batch)  # two of the first six, whichever were ready
    trained = [*first, 6, 7, 8, 9]
    assert simulation.trained_groups(run_name) == trained
    fates = {group: ["trained"] if group in trained else ["stale"] for group in range(10)}
    assert read_fates(simulation.run_dir(run_name)) == fates


async def test_running_and_finished_runs(
    client: EverrollClient, run_name: str, task_queue: str, tmp_path: Path
) -> None:
    """A running run is not resumed; one that has done its steps goes on when it is given more."""
    simulation = RecordingSimulation(client.temporal, tmp_path)
    simulation.held_from = 0
    spec = simulation.build_spec(run_name, task_queue, run={"num_steps": 1})
    async with simulation.workers(client.temporal, task_queue):
        await client.start(spec)
        with pytest.raises(SteeringError, match="is running; there is nothing to resume"):
            await client.resume_ended(spec, ResumeRequest())
        simulation.held_from = None
        await client.result(run_name)
        result = await resume(client, spec, changes={"run.num_steps": 2})
        assert result.steps == 2
        assert simulation.trained_groups(run_name) == [0, 1, 2, 3]
        record = simulation.directory(run_name).read()
    assert record is not None
    assert record.spec.run.num_steps == 2
    assert record.num_resumes == 1


async def test_a_new_run_file_ends_the_groups_of_the_old_one(
    client: EverrollClient, run_name: str, task_queue: str, tmp_path: Path
) -> None:
    """The session server has moved: groups that still play by the old address are ended, and played by the new one."""
    simulation = RecordingSimulation(client.temporal, tmp_path)
    simulation.held_from = 1
    spec = simulation.build_spec(run_name, task_queue, run={"num_steps": 1})
    moved = spec.model_copy(update={"services": spec.services.model_copy(update={"session_url": "http://127.0.0.1:2"})})
    async with simulation.workers(client.temporal, task_queue):
        await client.start(spec)
        await wait_for(lambda: 0 in simulation.directory(run_name).read_settled() and len(simulation.episodes) == 4)
        await client.temporal.get_workflow_handle(names.run_workflow_id(run_name)).terminate()
        await client.resume_ended(moved, ResumeRequest(from_file=True))
        await wait_for(lambda: len(simulation.episodes) == 6)
        simulation.held_from = None
        result = await asyncio.wait_for(client.result(run_name), _SECONDS)
    assert result.trained_groups == 2
    again = simulation.episodes[4:]
    assert {(r.key.group, r.key.attempt, r.session_url) for r in again} == {(1, 10_000, "http://127.0.0.1:2")}
    assert await audit_settlement(client, run_name) == {0: "trained", 1: "trained"}
