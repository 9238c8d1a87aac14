"""Random runs on a real server hold I1 (each prompt settles once) and I5 (the bounds), whatever happens to them.

What happens: episodes abort, fail or come stale, workers go and come back, pauses, and continue-as-new (which the test
server suggests at 200 events). C4 and C5: the bounds hold also right after each of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from everroll.client import EverrollClient, SteeringError
from everroll.contracts import names
from everroll.contracts.health import EpisodesReport
from everroll.contracts.rollout import CollectResult, EpisodeKey, EpisodeReport, EpisodeRequest, StoreGroupRequest
from everroll.contracts.spec import RunSpec
from tests.conftest import TemporalServer
from tests.integration.test_audit_settlement import account_for
from tests.integration.test_orchestration import wait_for_status
from tests.simulation import Simulation, abort, build_spec, fail, succeed

_SECONDS = 300.0
_SIGNALS_TO_GROW = 80
"""Enough for the history to be suggested for continue-as-new."""


@dataclass(frozen=True)
class Scenario:
    """A run, and what happens to it after some of its episodes."""

    seed: int
    batch: int
    num_steps: int
    max_staleness: int
    on_unusable: str
    on_stale: str
    oversample_groups: int
    drops_stragglers: bool
    trouble: float
    """Share of episodes that abort, fail or come stale."""
    disturbances: dict[int, str]
    """Number of episodes played, to what happens then."""

    def build_spec(self, run: str, task_queue: str) -> RunSpec:
        rollout = {
            "groups_per_step": self.batch,
            "max_staleness": self.max_staleness,
            "on_unusable": self.on_unusable,
            "on_stale": self.on_stale,
            "max_refills": 2,
            "refill_backoff_seconds": 0.05,
            "max_empty_rounds": 1000,
            "oversample_groups": self.oversample_groups,
            "stragglers": {"policy": "drop" if self.drops_stragglers else "wait"},
            "abort_budget": {"max_share": 1.0, "window": 1000},
        }
        return build_spec(run, task_queue, run={"num_steps": self.num_steps}, rollout=rollout)

    def limit(self) -> int:
        """Most groups that may play or wait at once."""
        return (self.max_staleness + 1) * self.batch + self.oversample_groups


scenarios = st.builds(
    Scenario,
    seed=st.integers(0, 10**6),
    batch=st.integers(1, 3),
    num_steps=st.integers(2, 4),
    max_staleness=st.integers(0, 2),
    on_unusable=st.sampled_from(["drop", "refill"]),
    on_stale=st.sampled_from(["drop", "refill"]),
    oversample_groups=st.integers(0, 2),
    drops_stragglers=st.booleans(),
    trouble=st.sampled_from([0.0, 0.1, 0.25]),
    disturbances=st.dictionaries(
        st.integers(1, 12), st.sampled_from(["restart", "pause", "grow"]), min_size=1, max_size=3
    ),
)


@dataclass
class World:
    """Simulated activities with the scenario's troubles, which watch the bounds from within."""

    scenario: Scenario
    simulation: Simulation = field(default_factory=Simulation)
    most_playing: int = 0
    """Most groups at once that had a session which was not released: those in flight, seen from within."""

    def __post_init__(self) -> None:
        self.simulation.play = self._play
        self.simulation.collect = self._collect

    def _draw(self, key: EpisodeKey, what: str) -> float:
        return random.Random(f"{self.scenario.seed} {what} {key.group} {key.member} {key.attempt}").random()

    def _play(self, request: EpisodeRequest) -> EpisodeReport:
        played = {played.key.session_id: played.key.group for played in self.simulation.episodes}
        open_groups = {played[session] for session in played.keys() - self.simulation.released}
        self.most_playing = max(self.most_playing, len(open_groups))
        return fail(request) if self._draw(request.key, "agent") < self.scenario.trouble else succeed(request)

    def _collect(self, key: EpisodeKey) -> CollectResult:
        if self._draw(key, "abort") < self.scenario.trouble:
            return abort(key)
        collected = self.simulation.build_collected(key)
        if self._draw(key, "stale") < self.scenario.trouble / 2 and collected.samples is not None:
            samples = collected.samples.model_copy(update={"min_weight_version": 0})
            return collected.model_copy(update={"samples": samples})
        return collected


class Disturber:
    """Does to the run what the scenario says."""

    def __init__(self, client: EverrollClient, run: str, task_queue: str, world: World) -> None:
        self._client = client
        self._run = run
        self._task_queue = task_queue
        self._world = world
        self._workers = contextlib.AsyncExitStack()

    @contextlib.asynccontextmanager
    async def serve(self) -> AsyncIterator[None]:
        await self._start()
        try:
            yield
        finally:
            await self._workers.aclose()

    async def disturb_until(self, result: asyncio.Future[object]) -> None:
        left = dict(self._world.scenario.disturbances)
        while not result.done():
            for number in sorted(left):
                if len(self._world.simulation.episodes) >= number:
                    await self._do(left.pop(number))
            await asyncio.wait([result], timeout=0.02)

    async def _start(self) -> None:
        await self._workers.enter_async_context(self._world.simulation.workers(self._client.temporal, self._task_queue))

    async def _do(self, what: str) -> None:
        if what == "restart":
            await self._workers.aclose()
            await self._start()
        elif what == "pause":
            for ask in (self._client.pause, self._client.resume):
                await self._ask(ask)
        else:
            handle = self._client.temporal.get_workflow_handle(names.run_workflow_id(self._run))
            with contextlib.suppress(Exception):  # it may be over
                for _ in range(_SIGNALS_TO_GROW):
                    await handle.signal(names.SIGNAL_REPORT, EpisodesReport(group=0, num_collected=0))

    async def _ask(self, ask: Callable[[str], Awaitable[None]]) -> None:
        """Until it is answered: a request that timed out on a busy machine may have been heard or not."""
        while True:
            with contextlib.suppress(ConnectionError):
                with contextlib.suppress(SteeringError, LookupError):
                    await ask(self._run)
                return


async def play(server: TemporalServer, scenario: Scenario) -> None:
    client = await EverrollClient.connect(server.address, server.namespace)
    run, task_queue = f"random-{uuid.uuid4().hex[:8]}", f"random-{uuid.uuid4().hex[:8]}"
    world = World(scenario)
    disturber = Disturber(client, run, task_queue, world)
    async with disturber.serve():
        await client.start(scenario.build_spec(run, task_queue))
        result = asyncio.ensure_future(client.result(run))
        try:
            await asyncio.wait_for(disturber.disturb_until(result), _SECONDS)
        except TimeoutError as error:
            error.add_note(f"{run}: {await client.status(run, survey=True)}")
            raise
        ended = result.result()
        view = await wait_for_status(client, run, lambda view: view.status is not None)
    assert ended.steps == scenario.num_steps
    assert view.status is not None
    trained = [item.group for request in unique_steps(world) for item in request.batch]
    assert len(trained) == len(set(trained)) == scenario.num_steps * scenario.batch
    account = await account_for(client, run)
    assert sorted(account.dispensed) == list(range(view.status.next_group)), "none is skipped"
    assert set(account.fates) == set(account.dispensed), "each is settled"
    assert sorted(group for group, fate in account.fates.items() if fate == "trained") == sorted(trained)
    assert sum(ended.dropped_groups.values()) + len(trained) == len(account.dispensed), "and settled once"
    assert world.most_playing <= account.most_open <= scenario.limit(), "in flight, ready and in training"
    check_staleness(world)


def unique_steps(world: World) -> list:
    """Steps as they were first asked for: a worker that goes away has its step asked for again."""
    steps = {request.step: request for request in world.simulation.trained}
    for request in world.simulation.trained:
        assert request.batch == steps[request.step].batch
    return [steps[number] for number in sorted(steps)]


def check_staleness(world: World) -> None:
    """The oldest token of what was trained is at most `max_staleness` versions older than the weights it trains."""
    for request in unique_steps(world):
        for item in request.batch:
            stored: StoreGroupRequest = world.simulation.stored[item.group]
            oldest = min(o.samples.min_weight_version for o in stored.outcomes if o.samples is not None)
            assert request.step - 1 - oldest <= world.scenario.max_staleness


def run_scenario(server: TemporalServer, scenario: Scenario) -> None:
    asyncio.run(play(server, scenario))


common = {"deadline": None, "derandomize": True, "phases": [Phase.generate], "suppress_health_check": list(HealthCheck)}


@given(scenario=scenarios)
@settings(max_examples=3, **common)
def test_random_runs_settle_each_prompt_once_within_the_bounds(
    temporal_server: TemporalServer, scenario: Scenario
) -> None:
    run_scenario(temporal_server, scenario)


@pytest.mark.slow
@pytest.mark.timeout(900)
@given(scenario=scenarios)
@settings(max_examples=30, **(common | {"derandomize": False, "print_blob": True}))
def test_many_random_runs(temporal_server: TemporalServer, scenario: Scenario) -> None:
    run_scenario(temporal_server, scenario)
