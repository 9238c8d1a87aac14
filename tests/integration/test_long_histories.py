"""Continue-as-new in the middle of things: while a run waits or is paused, and within a group (I9).

The test server suggests it at 200 events.
"""

from __future__ import annotations

import asyncio
from datetime import timedelta

import pytest

from everroll.client import EverrollClient
from everroll.contracts import names
from everroll.contracts.health import EpisodesReport
from everroll.contracts.outcomes import SampleStatus
from everroll.contracts.rollout import EpisodeReport, EpisodeRequest, GroupRequest, GroupResult
from everroll.contracts.training import Phase
from tests.integration.test_orchestration import read_status, wait_for_status
from tests.integration.test_pausing import flaky_simulation
from tests.simulation import Simulation, build_spec, fail, succeed
from workflows import policies

_ENOUGH_SIGNALS = 80


async def grow_history(client: EverrollClient, run_name: str) -> None:
    """Reports that say nothing: a few events each."""
    handle = client.temporal.get_workflow_handle(names.run_workflow_id(run_name))
    for _ in range(_ENOUGH_SIGNALS):
        await handle.signal(names.SIGNAL_REPORT, EpisodesReport(group=0, num_collected=0))


async def test_a_paused_run_continues_as_new_and_goes_on_when_its_server_answers(
    client: EverrollClient, run_name: str, task_queue: str
) -> None:
    """The pause, its probe, a ready group and one on hold are carried; nothing is played or trained twice."""
    budget = {"window": 4, "max_share": 0.5, "probe_seconds": 0.1}
    rollout = {"abort_budget": budget, "refill_backoff_seconds": 0.1, "max_refills": 50}
    async with flaky_simulation() as (simulation, flaky), simulation.workers(client.temporal, task_queue):
        flaky.down = True
        simulation.collect = lambda key: simulation.build_collected(key) if key.group == 0 else flaky.collect(key)
        await client.start(build_spec(run_name, task_queue, rollout=rollout))
        await wait_for_status(
            client, run_name, lambda view: view.status is not None and view.status.phase is Phase.PAUSED
        )
        await grow_history(client, run_name)
        view = await wait_for_status(
            client, run_name, lambda view: view.status is not None and view.status.generation >= 1
        )
        assert view.status is not None
        assert view.status.phase is Phase.PAUSED
        assert view.status.groups_ready == 1
        assert view.status.groups_in_flight == [1]
        first_page = view.url("http://ui")
        assert view.run_id not in first_page
        first = client.temporal.get_workflow_handle(names.run_workflow_id(run_name))
        assert view.started_at < (await first.describe()).start_time, "the first generation's start"
        await flaky.come_back()
        result = await asyncio.wait_for(client.result(run_name), 60)
    assert result.steps == 2
    assert [[item.group for item in request.batch] for request in simulation.trained] == [[0, 1], [2, 3]]
    played = [request.key.session_id for request in simulation.episodes]
    assert len(played) == len(set(played))


async def test_a_run_that_waits_continues_as_new(
    client: EverrollClient, run_name: str, task_queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the watchdog knows is carried too, so that its surveys do not become frequent again."""
    monkeypatch.setattr(policies, "SURVEY_FIRST", timedelta(seconds=1))
    simulation = Simulation(gate=asyncio.Event())
    assert simulation.gate is not None
    async with simulation.workers(client.temporal, task_queue):
        await client.start(build_spec(run_name, task_queue, run={"num_steps": 1}))
        await wait_for_status(client, run_name, lambda view: view.status is not None and view.status.survey is not None)
        await grow_history(client, run_name)
        view = await wait_for_status(
            client, run_name, lambda view: view.status is not None and view.status.generation >= 1
        )
        assert view.status is not None
        assert view.status.survey is not None
        simulation.gate.set()
        result = await asyncio.wait_for(client.result(run_name), 60)
        view = await read_status(client, run_name)
    assert result.trained_groups == 2
    assert len(simulation.episodes) == 4
    assert view.status is not None
    assert view.status.recent_steps[0].rollout_seconds > 1, "counted from the generation that began the step"


async def test_a_group_continues_as_new_between_attempts(
    client: EverrollClient, run_name: str, task_queue: str
) -> None:
    """One member succeeds at once, the other after many refills: no attempt is lost, doubled or counted anew."""
    last = 25

    def play(request: EpisodeRequest) -> EpisodeReport:
        return fail(request) if request.key.member == 1 and request.key.attempt < last else succeed(request)

    simulation = Simulation(play=play)
    spec = build_spec(run_name, task_queue, rollout={"max_refills": 100})
    request = GroupRequest(
        run=run_name,
        group=0,
        weight_version=0,
        dataset=simulation.dataset,
        rollout=spec.rollout,
        seed=1,
        session_url="http://127.0.0.1:1",
        store_url="store",
        task_queue=task_queue,
    )
    group_id = names.group_workflow_id(run_name, 0)
    async with simulation.workers(client.temporal, task_queue):
        handle = await client.temporal.start_workflow(
            names.ROLLOUT_GROUP, request, id=group_id, task_queue=task_queue, result_type=GroupResult
        )
        result = await asyncio.wait_for(handle.result(), 60)
        last_run = await client.temporal.get_workflow_handle(group_id).describe()
    assert last_run.run_id != handle.first_execution_run_id
    assert result.is_trainable
    assert result.num_episodes == last + 2
    assert result.unusable == {"agent": last}
    played = [request.key for request in simulation.episodes]
    assert sorted(key.attempt for key in played if key.member == 1) == list(range(last + 1))
    assert [key.attempt for key in played if key.member == 0] == [0]
    assert sorted(simulation.released) == sorted(key.session_id for key in played)
    outcomes = simulation.stored[0].outcomes
    assert [(outcome.key.attempt, outcome.status) for outcome in outcomes] == [
        (0, SampleStatus.COMPLETED),
        (last, SampleStatus.COMPLETED),
    ]


async def test_a_group_whose_run_is_gone_samples_nothing_again(
    client: EverrollClient, run_name: str, task_queue: str
) -> None:
    """A terminated run cannot cancel its groups; they notice when they report an abort."""
    async with flaky_simulation() as (simulation, flaky), simulation.workers(client.temporal, task_queue):
        flaky.down = True
        gate = simulation.gate = asyncio.Event()
        rollout = {"max_refills": 50, "refill_backoff_seconds": 1.0, "groups_per_step": 1}
        await client.start(build_spec(run_name, task_queue, rollout=rollout))
        await wait_for_status(client, run_name, lambda view: len(simulation.episodes) == 2)
        await client.temporal.get_workflow_handle(names.run_workflow_id(run_name)).terminate("by a person")
        gate.set()
        group = client.temporal.get_workflow_handle(names.group_workflow_id(run_name, 0), result_type=GroupResult)
        result = await asyncio.wait_for(group.result(), 60)
    assert not result.is_trainable
    assert len(simulation.episodes) <= 6
    assert len(simulation.released) == len({request.key.session_id for request in simulation.episodes})
