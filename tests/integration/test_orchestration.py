"""The workflows on a real Temporal server, with simulated agent, engine and trainer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from temporalio.client import WorkflowFailureError, WorkflowHandle
from temporalio.exceptions import ApplicationError, CancelledError

from everroll.client import EverrollClient, RunExistsError, RunFailedError, RunNotFoundError, RunView
from everroll.contracts import names
from everroll.contracts.outcomes import CauseKind, ErrorType, SampleStatus
from everroll.contracts.rollout import CollectResult, EpisodeKey, EpisodeReport, EpisodeRequest
from everroll.contracts.training import Phase, PrepareTrainerRequest
from everroll.survey import survey_run
from tests.simulation import Simulation, abort, build_spec, fail, succeed

_WAIT_SECONDS = 60.0


async def wait_for_status(
    client: EverrollClient, run: str, condition: Callable[[RunView], bool], survey: bool = False
) -> RunView:
    deadline = time.monotonic() + _WAIT_SECONDS
    while True:
        view = await client.status(run, survey=survey)
        if condition(view):
            return view
        assert time.monotonic() < deadline, view
        await asyncio.sleep(0.05)


async def read_status(client: EverrollClient, run: str) -> RunView:
    """The run's own account, which its worker gives: on a busy machine not always within the time of one query."""
    return await wait_for_status(client, run, lambda view: view.status is not None)


async def test_a_synchronous_run(client: EverrollClient, run_name: str, task_queue: str) -> None:
    simulation = Simulation()
    async with simulation.workers(client.temporal, task_queue):
        await client.start(build_spec(run_name, task_queue))
        result = await client.result(run_name)
        view = await read_status(client, run_name)
    assert result.steps == 2
    assert result.trained_groups == 4
    assert not result.stopped
    assert simulation.published == [0, 1, 2]
    assert [[item.group for item in request.batch] for request in simulation.trained] == [[0, 1], [2, 3]]
    assert sorted(request.key.session_id for request in simulation.episodes) == sorted(simulation.released)
    assert len(set(simulation.released)) == 8
    assert view.state == "completed"
    assert view.status is not None
    assert view.status.phase is Phase.COMPLETED
    assert view.status.mean_reward == 0.25
    assert view.status.num_episodes == 8
    assert [record.groups for record in view.status.recent_steps] == [[0, 1], [2, 3]]


async def test_seeds_differ_by_episode_and_repeat_by_run(
    client: EverrollClient, run_name: str, task_queue: str
) -> None:
    simulation = Simulation()
    async with simulation.workers(client.temporal, task_queue):
        await client.start(build_spec(run_name, task_queue))
        await client.result(run_name)
    seeds = [request.seed for request in simulation.episodes]
    assert len(set(seeds)) == len(seeds)


async def test_a_run_that_was_refused_leaves_its_name_free(
    client: EverrollClient, run_name: str, task_queue: str, tmp_path: Path
) -> None:
    """Until it has begun: from then on its directory says whose it is, and how to go on is said."""
    refusals = [ApplicationError("the data set has no rows", type="ConfigurationError", non_retryable=True)] * 2

    def refuse(request: PrepareTrainerRequest) -> None:
        if refusals:
            raise refusals.pop()

    spec = build_spec(run_name, task_queue, run={"output_dir": str(tmp_path)})
    record = tmp_path / run_name / "run.json"
    gate = asyncio.Event()
    async with Simulation(on_prepare_trainer=refuse, gate=gate).workers(client.temporal, task_queue):
        for _ in range(2):
            await client.start(spec)
            with pytest.raises(RunFailedError, match="no rows"):
                await client.result(run_name)
        record.parent.mkdir()
        record.touch()
        with pytest.raises(RunExistsError, match=f"has ended; go on with it by `everroll resume {run_name}`"):
            await client.start(spec)
        record.unlink()
        await client.start(spec)
        with pytest.raises(RunExistsError, match="exists already, and goes on"):
            await client.start(spec)
        gate.set()
        await client.result(run_name)


async def test_a_run_name_is_used_once(client: EverrollClient, run_name: str, task_queue: str) -> None:
    async with Simulation().workers(client.temporal, task_queue):
        await client.start(build_spec(run_name, task_queue))
        with pytest.raises(RunExistsError, match=run_name):
            await client.start(build_spec(run_name, task_queue))
        await client.result(run_name)
        with pytest.raises(RunExistsError, match=run_name):
            await client.start(build_spec(run_name, task_queue))
    with pytest.raises(RunNotFoundError, match="no run named 'nobody'"):
        await client.status("nobody")


async def test_refill_samples_only_the_missing_member_again(
    client: EverrollClient, run_name: str, task_queue: str
) -> None:
    simulation = Simulation()

    def collect(key: EpisodeKey) -> CollectResult:
        lost = (key.group, key.member, key.attempt) == (1, 0, 0)
        return abort(key) if lost else simulation.build_collected(key)

    simulation.collect = collect
    async with simulation.workers(client.temporal, task_queue):
        await client.start(build_spec(run_name, task_queue))
        result = await client.result(run_name)
    assert result.unusable_episodes == {"transport": 1}
    assert result.dropped_groups == {}
    assert [[item.group for item in request.batch] for request in simulation.trained] == [[0, 1], [2, 3]]
    members = [(outcome.key.member, outcome.key.attempt) for outcome in simulation.stored[1].outcomes]
    assert members == [(0, 1), (1, 0)]
    assert len(simulation.episodes) == 9


async def test_drop_policy_drops_the_whole_group(client: EverrollClient, run_name: str, task_queue: str) -> None:
    simulation = Simulation()
    simulation.collect = lambda key: (
        abort(key) if (key.group, key.member) == (1, 0) else simulation.build_collected(key)
    )
    async with simulation.workers(client.temporal, task_queue):
        await client.start(build_spec(run_name, task_queue, rollout={"on_unusable": "drop"}))
        result = await client.result(run_name)
        view = await read_status(client, run_name)
    assert result.dropped_groups == {"transport": 1}
    assert len(simulation.episodes) == 5 * 2, "no member is sampled again"
    assert [[item.group for item in request.batch] for request in simulation.trained] == [[0, 2], [3, 4]]
    assert 1 not in simulation.stored
    assert f"{run_name}-1-0-0" in simulation.released
    assert view.status is not None
    assert view.status.last_cause is not None
    assert view.status.last_cause.server == "http://127.0.0.1:1"
    assert view.status.recent_steps[0].dropped == {"transport": 1}


async def test_an_agent_that_always_fails_for_one_prompt(
    client: EverrollClient, run_name: str, task_queue: str
) -> None:
    """A7: that group is dropped with its cause, the others train, nothing is trained as reward 0."""
    simulation = Simulation(play=lambda request: fail(request) if request.key.group == 0 else succeed(request))
    async with simulation.workers(client.temporal, task_queue):
        await client.start(build_spec(run_name, task_queue, rollout={"max_refills": 1}))
        result = await client.result(run_name)
    assert result.dropped_groups == {"agent": 1}
    assert result.unusable_episodes == {"agent": 4}
    assert [[item.group for item in request.batch] for request in simulation.trained] == [[1, 2], [3, 4]]
    for stored in simulation.stored.values():
        assert all(outcome.status is SampleStatus.COMPLETED for outcome in stored.outcomes)


async def test_agents_that_never_give_a_verdict_end_the_run(
    client: EverrollClient, run_name: str, task_queue: str
) -> None:
    """A8: a named failure after a bounded number of empty rounds, and no empty batch."""

    def no_reward(request: EpisodeRequest) -> EpisodeReport:
        report = fail(request)
        assert report.cause is not None
        return report.model_copy(update={"cause": report.cause.model_copy(update={"kind": CauseKind.NO_REWARD})})

    simulation = Simulation(play=no_reward)
    async with simulation.workers(client.temporal, task_queue):
        await client.start(build_spec(run_name, task_queue, rollout={"max_refills": 0, "max_empty_rounds": 2}))
        with pytest.raises(RunFailedError, match=r"(?s)NoProgressError: the last 4 groups were all dropped.*no_reward"):
            await client.result(run_name)
    assert simulation.trained == []


async def test_zero_variance_groups_are_dropped_when_the_filter_is_on(
    client: EverrollClient, run_name: str, task_queue: str
) -> None:
    def play(request: EpisodeRequest) -> EpisodeReport:
        report = succeed(request)
        return report.model_copy(update={"reward": 1.0}) if request.key.group == 1 else report

    simulation = Simulation(play=play)
    async with simulation.workers(client.temporal, task_queue):
        await client.start(build_spec(run_name, task_queue, rollout={"drop_zero_variance": True}))
        result = await client.result(run_name)
    assert result.dropped_groups == {"zero_variance": 1}
    assert [[item.group for item in request.batch] for request in simulation.trained] == [[0, 2], [3, 4]]


async def test_a_terminal_failure_fails_the_run_at_once(client: EverrollClient, run_name: str, task_queue: str) -> None:
    simulation = Simulation()
    text = "POST http://127.0.0.1:1/sessions/x/samples answered 500: broken token invariant"

    def collect(key: EpisodeKey) -> CollectResult:
        if key.group == 1:
            raise ApplicationError(text, type=ErrorType.SERVER.value, non_retryable=True)
        return simulation.build_collected(key)

    simulation.collect = collect
    async with simulation.workers(client.temporal, task_queue):
        await client.start(build_spec(run_name, task_queue))
        with pytest.raises(RunFailedError) as caught:
            await client.result(run_name)
        view = await read_status(client, run_name)
    assert str(caught.value).startswith(f"RuntimeError: {text}")
    assert view.state == "failed"
    assert view.failure is not None
    assert text in view.failure
    assert simulation.trained == []


async def test_a_programming_error_is_loud_and_not_retried(
    client: EverrollClient, run_name: str, task_queue: str
) -> None:
    calls = []

    def collect(key: EpisodeKey) -> CollectResult:
        calls.append(key)
        raise KeyError("output_ids")

    async with Simulation(collect=collect).workers(client.temporal, task_queue):
        await client.start(build_spec(run_name, task_queue, rollout={"groups_per_step": 1}))
        with pytest.raises(RunFailedError, match="ProgrammingError: KeyError: 'output_ids'"):
            await client.result(run_name)
    assert len(calls) == len({key.session_id for key in calls})


async def test_stop_finishes_the_step(client: EverrollClient, run_name: str, task_queue: str) -> None:
    simulation = Simulation(train_gate=asyncio.Event())
    assert simulation.train_gate is not None
    async with simulation.workers(client.temporal, task_queue):
        await client.start(build_spec(run_name, task_queue, run={"num_steps": 5}))
        await wait_for_status(
            client, run_name, lambda view: view.status is not None and view.status.phase is Phase.TRAINING
        )
        await client.stop(run_name)
        simulation.train_gate.set()
        result = await client.result(run_name)
    assert result.stopped
    assert result.steps == 1
    assert simulation.published == [0, 1]


async def test_overlap_stays_within_its_bound(client: EverrollClient, run_name: str, task_queue: str) -> None:
    simulation = Simulation(train_gate=asyncio.Event())
    assert simulation.train_gate is not None
    spec = build_spec(run_name, task_queue, run={"num_steps": 4}, rollout={"max_staleness": 1})
    async with simulation.workers(client.temporal, task_queue):
        await client.start(spec)
        await wait_for_status(
            client,
            run_name,
            lambda view: (
                view.status is not None and view.status.phase is Phase.TRAINING and view.status.groups_ready == 2
            ),
        )
        # Two groups are in training and two are ready: with one version of staleness, nothing more may start.
        assert {request.key.group for request in simulation.episodes} == {0, 1, 2, 3}
        simulation.train_gate.set()
        result = await client.result(run_name)
    assert result.trained_groups == 8
    assert result.dropped_groups == {}
    batches = [[item.group for item in request.batch] for request in simulation.trained]
    assert all(batch == sorted(batch) for batch in batches)
    assert sorted(group for batch in batches for group in batch) == list(range(8))
    assert {request.key.group for request in simulation.episodes} == set(range(8))


async def test_cancelling_a_run_ends_its_groups(client: EverrollClient, run_name: str, task_queue: str) -> None:
    simulation = Simulation(gate=asyncio.Event())
    assert simulation.gate is not None
    async with simulation.workers(client.temporal, task_queue):
        await client.start(build_spec(run_name, task_queue))
        await wait_for_status(client, run_name, lambda view: len(simulation.episodes) == 4)
        await client.cancel(run_name)
        view = await wait_for_status(client, run_name, lambda view: view.state != "running")
        assert view.state == "canceled"
        deadline = time.monotonic() + _WAIT_SECONDS
        for group in range(2):
            handle = client.temporal.get_workflow_handle(names.group_workflow_id(run_name, group))
            while (status := (await handle.describe()).status) and status.name == "RUNNING":
                assert time.monotonic() < deadline
                await asyncio.sleep(0.05)
            assert status is not None
            assert status.name == "CANCELED"
    assert simulation.trained == []


async def test_a_group_that_a_person_ends_is_settled_as_skipped(
    client: EverrollClient, run_name: str, task_queue: str
) -> None:
    simulation = Simulation(gate=asyncio.Event())
    assert simulation.gate is not None
    async with simulation.workers(client.temporal, task_queue):
        await client.start(build_spec(run_name, task_queue))
        await wait_for_status(client, run_name, lambda view: len(simulation.episodes) == 4)
        await client.temporal.get_workflow_handle(names.group_workflow_id(run_name, 0)).terminate("looks broken")
        simulation.gate.set()
        result = await client.result(run_name)
    assert result.dropped_groups == {"skipped": 1}
    assert [[item.group for item in request.batch] for request in simulation.trained] == [[1, 2], [3, 4]]


async def test_input_that_is_no_run_fails_with_the_reason(
    client: EverrollClient, run_name: str, task_queue: str
) -> None:
    async with Simulation().workers(client.temporal, task_queue):
        await client.temporal.start_workflow(
            names.TRAINING_RUN,
            {"spec": {"run": {"name": run_name, "num_steps": 0}}},
            id=names.run_workflow_id(run_name),
            task_queue=task_queue,
        )
        with pytest.raises(RunFailedError, match=r"(?s)num_steps.*greater than or equal to 1"):
            await client.result(run_name)


async def test_continue_as_new_neither_drains_nor_loses_groups_in_flight(
    client: EverrollClient, run_name: str, task_queue: str
) -> None:
    """Group 3 is slow: it is still in flight whenever the run continues as new, and is trained in the end."""
    slow = asyncio.Event()
    simulation = Simulation(gate=slow, is_gated=lambda key: key.group == 3)
    num_steps = 20
    spec = build_spec(run_name, task_queue, run={"num_steps": num_steps}, rollout={"max_staleness": 50})
    async with simulation.workers(client.temporal, task_queue):
        await client.start(spec)
        view = await wait_for_status(
            client, run_name, lambda view: view.status is not None and view.status.generation >= 2
        )
        assert view.status is not None
        assert 3 in view.status.groups_in_flight
        slow.set()
        result = await client.result(run_name)
    assert result.steps == num_steps
    groups = sorted(item.group for request in simulation.trained for item in request.batch)
    assert len(groups) == len(set(groups)) == 2 * num_steps
    assert 3 in groups
    assert result.dropped_groups == {}
    # No group was started twice: each episode ran exactly once.
    played = [request.key.session_id for request in simulation.episodes]
    assert len(played) == len(set(played))


async def test_an_engine_that_lost_its_weights_gets_them_again(
    client: EverrollClient, run_name: str, task_queue: str
) -> None:
    """An engine restarts in mid-run and serves version 0: what it played is dropped as stale, and the run goes on."""
    simulation = Simulation()
    spec = build_spec(run_name, task_queue, run={"num_steps": 4})
    restarted = False

    def collect(key: EpisodeKey) -> CollectResult:
        nonlocal restarted
        if simulation.weight_version == 2 and not restarted:
            restarted = True
            simulation.weight_version = 0
        return simulation.build_collected(key)

    simulation.collect = collect
    async with simulation.workers(client.temporal, task_queue):
        await client.start(spec)
        result = await client.result(run_name)
    assert restarted
    assert result.steps == 4
    assert simulation.published.count(2) >= 2
    assert simulation.published[-1] == 4
    assert 1 <= result.dropped_groups["stale"] <= 2


async def test_groups_that_are_always_stale_end_the_run(client: EverrollClient, run_name: str, task_queue: str) -> None:
    """An engine that another run keeps updating: named failure after a bounded number of groups."""
    simulation = Simulation(keeps_version_0=True)
    spec = build_spec(run_name, task_queue, run={"num_steps": 4}, rollout={"max_empty_rounds": 2})
    async with simulation.workers(client.temporal, task_queue):
        await client.start(spec)
        with pytest.raises(RunFailedError, match=r"(?s)NoProgressError: the last 4 groups were all dropped.*stale"):
            await client.result(run_name)
    assert len(simulation.trained) == 1


async def test_stop_completes_the_step_even_if_a_group_is_dropped(
    client: EverrollClient, run_name: str, task_queue: str
) -> None:
    simulation = Simulation(gate=asyncio.Event())
    assert simulation.gate is not None
    simulation.play = lambda request: fail(request) if request.key.group == 0 else succeed(request)
    spec = build_spec(run_name, task_queue, run={"num_steps": 5}, rollout={"max_refills": 0})
    async with simulation.workers(client.temporal, task_queue):
        await client.start(spec)
        await wait_for_status(client, run_name, lambda view: len(simulation.episodes) == 4)
        await client.stop(run_name)
        simulation.gate.set()
        result = await asyncio.wait_for(client.result(run_name), _WAIT_SECONDS)
    assert result.stopped
    assert result.steps == 1
    assert [[item.group for item in request.batch] for request in simulation.trained] == [[1, 2]]


async def test_a_group_of_an_earlier_generation_that_fails_fails_the_run(
    client: EverrollClient, run_name: str, task_queue: str
) -> None:
    slow = asyncio.Event()
    simulation = Simulation(gate=slow, is_gated=lambda key: key.group == 3)
    text = "POST http://127.0.0.1:1/sessions/x/samples answered 500: late"

    def collect(key: EpisodeKey) -> CollectResult:
        if key.group == 3:
            raise ApplicationError(text, type=ErrorType.SERVER.value, non_retryable=True)
        return simulation.build_collected(key)

    simulation.collect = collect
    spec = build_spec(run_name, task_queue, run={"num_steps": 500}, rollout={"max_staleness": 5})
    async with simulation.workers(client.temporal, task_queue):
        await client.start(spec)
        await wait_for_status(client, run_name, lambda view: view.status is not None and view.status.generation >= 1)
        slow.set()
        with pytest.raises(RunFailedError, match="answered 500: late"):
            await asyncio.wait_for(client.result(run_name), _WAIT_SECONDS)


async def test_cancelling_reaches_groups_of_an_earlier_generation(
    client: EverrollClient, run_name: str, task_queue: str
) -> None:
    simulation = Simulation(gate=asyncio.Event(), is_gated=lambda key: key.group == 3)
    spec = build_spec(run_name, task_queue, run={"num_steps": 500}, rollout={"max_staleness": 5})
    async with simulation.workers(client.temporal, task_queue):
        await client.start(spec)
        await wait_for_status(client, run_name, lambda view: view.status is not None and view.status.generation >= 1)
        await client.cancel(run_name)
        view = await wait_for_status(client, run_name, lambda view: view.state != "running")
        assert view.state == "canceled"
        assert view.status is not None
        assert view.status.phase is Phase.CANCELED
        handle = client.temporal.get_workflow_handle(names.group_workflow_id(run_name, 3))
        with pytest.raises(WorkflowFailureError) as caught:
            await asyncio.wait_for(handle.result(), _WAIT_SECONDS)
        assert isinstance(caught.value.cause, CancelledError)


async def wait_for_history(handle: WorkflowHandle[Any, Any], num_events: int) -> None:
    deadline = time.monotonic() + _WAIT_SECONDS
    while (await handle.describe()).history_length < num_events:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.02)


async def test_a_stop_is_not_lost_over_continue_as_new(client: EverrollClient, run_name: str, task_queue: str) -> None:
    """Asked for while the step after which the run would continue as new is trained."""
    simulation = Simulation(train_gate=asyncio.Event())
    assert simulation.train_gate is not None
    simulation.train_gate.set()
    spec = build_spec(run_name, task_queue, run={"num_steps": 500}, rollout={"groups_per_step": 1})
    handle = client.temporal.get_workflow_handle(names.run_workflow_id(run_name))
    async with simulation.workers(client.temporal, task_queue):
        await client.start(spec)
        await wait_for_status(client, run_name, lambda view: len(simulation.trained) >= 2)
        await wait_for_history(handle, num_events=200)
        await client.stop(run_name)
        result = await asyncio.wait_for(client.result(run_name), _WAIT_SECONDS)
    assert result.stopped
    assert result.steps == len(simulation.trained) < 500


async def test_sessions_are_released_only_after_the_group_is_stored(
    client: EverrollClient, run_name: str, task_queue: str
) -> None:
    """F4."""
    simulation = Simulation()
    async with simulation.workers(client.temporal, task_queue):
        await client.start(build_spec(run_name, task_queue))
        await client.result(run_name)
    for group in range(4):
        order = [event for event in simulation.events if event.endswith(f" {group}")]
        assert order == [f"collect {group}"] * 2 + [f"store {group}", f"release {group}"]
    assert simulation.ended_runs == [run_name]


async def test_a_survey_names_what_is_waited_for(client: EverrollClient, run_name: str, task_queue: str) -> None:
    """B2, B3: the episode, what its last heartbeat said, since when; and what no worker has taken."""
    simulation = Simulation(gate=asyncio.Event(), is_gated=lambda key: key.member == 1)
    assert simulation.gate is not None
    started = time.time()
    async with simulation.workers(client.temporal, task_queue):
        await client.start(build_spec(run_name, task_queue))
        await wait_for_status(client, run_name, lambda view: sorted(simulation.events) == ["collect 0", "collect 1"])
        survey = await survey_run(client.temporal, run_name, [0, 1, 99])
        simulation.gate.set()
        await client.result(run_name)
    assert survey.num_waiting == 2
    assert {(item.group, item.activity, item.stage) for item in survey.waiting} == {
        (0, "episode-1-0", "waiting"),
        (1, "episode-1-0", "waiting"),
    }
    assert all(started - 5 < item.since < time.time() + 5 for item in survey.waiting)


async def test_a_survey_says_that_no_worker_is_there(client: EverrollClient, run_name: str, task_queue: str) -> None:
    """B2."""
    simulation = Simulation(rollout_queue_suffix="-elsewhere")
    async with simulation.workers(client.temporal, task_queue):
        await client.start(build_spec(run_name, task_queue))
        await wait_for_status(
            client, run_name, lambda view: view.status is not None and view.status.groups_in_flight == [0, 1]
        )
        deadline = time.monotonic() + _WAIT_SECONDS
        while (survey := await survey_run(client.temporal, run_name, [0, 1])).num_waiting < 4:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.05)
        await client.cancel(run_name)
    assert {item.stage for item in survey.waiting} == {f"no worker of {task_queue}-rollout has taken it"}
