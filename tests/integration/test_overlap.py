"""Overlap's options on a real server: stale groups sampled again, oversampling, stragglers, and the bounds (I5)."""

from __future__ import annotations

import asyncio
import contextlib
import gc
from collections.abc import Callable
from datetime import timedelta

import pytest
from temporalio import activity

from everroll.client import EverrollClient
from everroll.contracts import names
from everroll.contracts.outcomes import SampleStatus
from everroll.contracts.rollout import CollectResult, EpisodeKey, EpisodeReport, EpisodeRequest
from tests.integration.test_audit_settlement import account_for
from tests.integration.test_orchestration import read_status
from tests.simulation import Collect, Simulation, build_spec, succeed
from workflows import policies

_SECONDS = 60.0


def batches(simulation: Simulation) -> list[list[int]]:
    return [[item.group for item in request.batch] for request in simulation.trained]


def collect_stale(simulation: Simulation, is_stale: Callable[[EpisodeKey], bool]) -> Collect:
    """Collected samples, those of some episodes as an engine gives them that has lost its weights."""

    def collect(key: EpisodeKey) -> CollectResult:
        collected = simulation.build_collected(key)
        if not is_stale(key) or collected.samples is None:
            return collected
        samples = collected.samples.model_copy(update={"min_weight_version": 0})
        return collected.model_copy(update={"samples": samples})

    return collect


async def test_a_stale_group_is_sampled_again_under_its_own_number(
    client: EverrollClient, run_name: str, task_queue: str
) -> None:
    """Settled once: the same prompt, sessions of their own, and the place in the batch that it would have had."""
    simulation = Simulation()
    simulation.collect = collect_stale(simulation, lambda key: key.group == 2 and key.attempt == 0)
    spec = build_spec(run_name, task_queue, run={"num_steps": 3}, rollout={"on_stale": "refill"})
    async with simulation.workers(client.temporal, task_queue):
        await client.start(spec)
        result = await asyncio.wait_for(client.result(run_name), _SECONDS)
    assert batches(simulation) == [[0, 1], [2, 3], [4, 5]]
    assert result.dropped_groups == {}
    played = [request.key.session_id for request in simulation.episodes if request.key.group == 2]
    assert sorted(played) == [f"{run_name}-2-{member}-{attempt}" for member in range(2) for attempt in (0, 4)]
    assert sorted(simulation.released) == sorted(request.key.session_id for request in simulation.episodes)
    account = await account_for(client, run_name)
    assert account.fates == dict.fromkeys(range(6), "trained")


async def test_a_group_that_is_always_stale_is_dropped_in_the_end(
    client: EverrollClient, run_name: str, task_queue: str
) -> None:
    simulation = Simulation()
    simulation.collect = collect_stale(simulation, lambda key: key.group == 2)
    spec = build_spec(run_name, task_queue, rollout={"on_stale": "refill", "max_refills": 1})
    async with simulation.workers(client.temporal, task_queue):
        await client.start(spec)
        result = await asyncio.wait_for(client.result(run_name), _SECONDS)
    assert batches(simulation) == [[0, 1], [3, 4]]
    assert result.dropped_groups == {"stale": 1}
    attempts = {request.key.attempt for request in simulation.episodes if request.key.group == 2}
    assert attempts == {0, 2, 4, 6}
    assert (await account_for(client, run_name)).fates[2] == "dropped: stale"


class SlowToLeave:
    """Episodes of some groups last until they are cancelled, and take their time to leave."""

    def __init__(self, simulation: Simulation, is_hung: Callable[[EpisodeKey], bool]) -> None:
        self._simulation = simulation
        self._is_hung = is_hung

    @activity.defn(name=names.RUN_EPISODE)
    async def run_episode(self, request: EpisodeRequest) -> EpisodeReport:
        self._simulation.episodes.append(request)
        try:
            while self._is_hung(request.key):
                activity.heartbeat("hung")
                await asyncio.sleep(0.05)
        except asyncio.CancelledError:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(0.5)
            raise
        finally:
            self._simulation.events.append(f"left {request.key.group}")
        return succeed(request)


async def test_stragglers_are_ended_and_keep_their_accounts(
    client: EverrollClient, run_name: str, task_queue: str
) -> None:
    """The first complete batch is trained; the straggler's sessions are released after its episodes have left them."""
    simulation = Simulation()
    slow = SlowToLeave(simulation, lambda key: key.group == 1)
    simulation.rollout_activities = [slow.run_episode, simulation.collect_samples]
    rollout = {"oversample_groups": 1, "stragglers": {"policy": "drop"}}
    async with simulation.workers(client.temporal, task_queue):
        await client.start(build_spec(run_name, task_queue, rollout=rollout))
        result = await asyncio.wait_for(client.result(run_name), _SECONDS)
        view = await read_status(client, run_name)
    assert batches(simulation)[0] == [0, 2]
    assert result.dropped_groups["straggler"] >= 1
    order = [event for event in simulation.events if event.endswith(" 1")]
    assert order == ["left 1", "left 1", "release 1"]
    assert sorted(simulation.released) == sorted(request.key.session_id for request in simulation.episodes)
    assert view.status is not None
    assert view.status.num_episodes == len(simulation.episodes), "those of the straggler are counted too"
    account = await account_for(client, run_name)
    assert account.fates[1] == "dropped: straggler"
    assert set(account.fates) == set(account.dispensed)


class DeafToCancellation:
    """All episodes of a group go on in spite of their cancellation, until they are let go."""

    def __init__(self, simulation: Simulation, group: int) -> None:
        self._simulation = simulation
        self._group = group
        self.let_go = asyncio.Event()

    @activity.defn(name=names.RUN_EPISODE)
    async def run_episode(self, request: EpisodeRequest) -> EpisodeReport:
        self._simulation.episodes.append(request)
        while request.key.group == self._group and not self.let_go.is_set():
            activity.heartbeat("plays")
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(0.05)
        return succeed(request)


async def test_sessions_of_episodes_that_go_on_are_left_alone(
    client: EverrollClient, run_name: str, task_queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run does not wait for them beyond a grace, and takes no session from under an agent that still uses it."""
    monkeypatch.setattr(policies, "CANCEL_GRACE", timedelta(seconds=0.5))
    simulation = Simulation()
    deaf = DeafToCancellation(simulation, group=1)
    simulation.rollout_activities = [deaf.run_episode, simulation.collect_samples]
    rollout = {"oversample_groups": 1, "stragglers": {"policy": "drop"}}
    async with simulation.workers(client.temporal, task_queue):
        await client.start(build_spec(run_name, task_queue, run={"num_steps": 1}, rollout=rollout))
        try:
            result = await asyncio.wait_for(client.result(run_name), _SECONDS)
        finally:
            deaf.let_go.set()
    assert batches(simulation) == [[0, 2]]
    assert result.dropped_groups == {"straggler": 1}
    assert {session.rsplit("-", 3)[1] for session in simulation.released} == {"0", "2"}


async def test_a_step_gives_up_on_hung_groups_after_its_grace(
    client: EverrollClient, run_name: str, task_queue: str, caplog: pytest.LogCaptureFixture
) -> None:
    simulation = Simulation()
    slow = SlowToLeave(simulation, lambda key: key.group in (2, 3))
    simulation.rollout_activities = [slow.run_episode, simulation.collect_samples]
    stragglers = {"policy": "drop", "after_share": 0.5, "grace_seconds": 0.2}
    rollout = {"groups_per_step": 4, "stragglers": stragglers}
    async with simulation.workers(client.temporal, task_queue):
        await client.start(build_spec(run_name, task_queue, run={"num_steps": 1}, rollout=rollout))
        result = await asyncio.wait_for(client.result(run_name), _SECONDS)
    assert batches(simulation) == [[0, 1, 4, 5]]
    assert result.dropped_groups == {"straggler": 2}
    gc.collect()
    assert "never retrieved" not in caplog.text, "each ended episode would be reported as an error"


async def test_surplus_groups_stay_for_the_next_step_and_are_settled_at_the_end(
    client: EverrollClient, run_name: str, task_queue: str
) -> None:
    simulation = Simulation()
    rollout = {"max_staleness": 5, "oversample_groups": 2}
    async with simulation.workers(client.temporal, task_queue):
        await client.start(build_spec(run_name, task_queue, run={"num_steps": 3}, rollout=rollout))
        result = await asyncio.wait_for(client.result(run_name), _SECONDS)
    trained = [group for batch in batches(simulation) for group in batch]
    assert len(trained) == len(set(trained)) == 6
    assert all(batch == sorted(batch) for batch in batches(simulation))
    assert set(result.dropped_groups) <= {"surplus"}
    account = await account_for(client, run_name)
    assert len(account.dispensed) == 6 + result.dropped_groups.get("surplus", 0)
    assert set(account.fates.values()) <= {"trained", "dropped: surplus"}
    assert len(account.fates) == len(account.dispensed)
    assert all(outcome.status is SampleStatus.COMPLETED for s in simulation.stored.values() for outcome in s.outcomes)
