"""An engine that was started anew is given the run's weights at once, whoever started it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from temporalio.api.enums.v1 import EventType
from temporalio.exceptions import ApplicationError

from activities.watching import EngineWatchActivities
from everroll.client import EverrollClient
from everroll.contracts import names
from everroll.contracts.health import WatchEnginesRequest, WatchEnginesResult
from everroll.contracts.outcomes import CauseKind
from everroll.contracts.training import PublishRequest
from everroll.engines.http import open_client_session
from tests.activity_attempts import ActivityAttempt
from tests.engine_wires import SGLANG, VLLM_GENERATE, Wire, run_wire_server
from tests.integration.test_orchestration import wait_for_status
from tests.simulation import Simulation, build_spec
from workflows import policies

both_kinds = pytest.mark.parametrize("wire", [SGLANG, VLLM_GENERATE], ids=lambda wire: wire.name)


class Attempt(ActivityAttempt):
    """One attempt at `watch_engines`, with what the attempt before had told in its heartbeat."""

    def __init__(self, details: Sequence[Any] = ()) -> None:
        super().__init__(details, heartbeat_timeout_seconds=0.06)

    async def watch(self, urls: list[str], version: int) -> WatchEnginesResult:
        request = WatchEnginesRequest(engine_urls=urls, engine_kind="auto", version=version, poll_seconds=0.02)
        async with open_client_session() as session:
            work = self.environment.run(EngineWatchActivities(session).watch_engines, request)
            return await asyncio.wait_for(work, 60)

    async def wait_for_version(self, url: str, version: int) -> None:
        """Until the watch has seen an engine serve it, and told so."""
        await wait_until(lambda: bool(self.heartbeats) and self.heartbeats[-1][1].get(url) == version)


async def wait_until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


@both_kinds
async def test_an_engine_that_falls_back_is_named(wire: Wire) -> None:
    """Newer versions are no news; older ones are, though the watch began before them."""
    async with run_wire_server(wire) as one, run_wire_server(wire) as other:
        one.version = other.version = 3
        attempt = Attempt()
        watching = asyncio.create_task(attempt.watch([one.url, other.url], 3))
        one.version = other.version = 5
        await attempt.wait_for_version(one.url, 5)
        await attempt.wait_for_version(other.url, 5)
        assert not watching.done()
        other.version = 4
        assert (await watching).lost == {other.url: 4}


async def test_worker_and_engine_are_lost_together() -> None:
    """The next attempt knows what the engine served."""
    async with run_wire_server(SGLANG) as server:
        server.version = 7
        first = Attempt()
        watching = asyncio.create_task(first.watch([server.url], 1))
        await first.wait_for_version(server.url, 7)
        first.environment.cancel()
        with pytest.raises(asyncio.CancelledError):
            await watching
        server.version = 2
        assert (await Attempt(first.heartbeats[-1]).watch([server.url], 1)).lost == {server.url: 2}


async def test_an_engine_that_is_away_is_waited_for() -> None:
    async with run_wire_server(SGLANG) as away:
        away_url = away.url
    async with run_wire_server(SGLANG) as server:
        server.version = 2
        attempt = Attempt()
        watching = asyncio.create_task(attempt.watch([away_url, server.url], 2))
        await wait_until(lambda: len(attempt.heartbeats) > 3)
        assert not watching.done()
        server.version = 0
        assert (await watching).lost == {server.url: 0}


async def test_the_run_gives_it_its_weights(client: EverrollClient, run_name: str, task_queue: str) -> None:
    """While groups play; the watch goes on, is no news to people, and ends with the run."""
    gate = asyncio.Event()
    simulation = Simulation(gate=gate, is_gated=lambda key: key.group >= 2)
    async with simulation.workers(client.temporal, task_queue):
        await client.start(build_spec(run_name, task_queue))
        await wait_until(lambda: simulation.watched == [1])
        simulation.weight_version = 0
        simulation.engine_restarts.set()
        await wait_until(lambda: simulation.published == [0, 1, 1])
        await wait_until(lambda: simulation.watched == [1, 1])
        survey = (await client.status(run_name, survey=True)).survey
        gate.set()
        await client.result(run_name)
    assert survey is not None
    assert names.WATCH_ENGINES not in {item.activity for item in survey.waiting}
    history = await client.temporal.get_workflow_handle(names.run_workflow_id(run_name)).fetch_history()
    scheduled = [
        event
        for event in history.events
        if event.event_type == EventType.EVENT_TYPE_ACTIVITY_TASK_SCHEDULED
        and event.activity_task_scheduled_event_attributes.activity_type.name == names.WATCH_ENGINES
    ]
    assert len(scheduled) == 2


async def test_a_paused_run_ends_with_its_watch(client: EverrollClient, run_name: str, task_queue: str) -> None:
    simulation = Simulation(gate=asyncio.Event(), is_gated=lambda key: key.group >= 2)
    async with simulation.workers(client.temporal, task_queue):
        await client.start(build_spec(run_name, task_queue))
        await wait_until(lambda: simulation.watched == [1])
        await client.pause(run_name)
        simulation.engine_restarts.set()
        await wait_until(lambda: simulation.published == [0, 1, 1])
        await client.cancel(run_name)
        await wait_for_status(client, run_name, lambda view: view.state == "canceled")


async def test_a_publish_that_waits_for_an_engine_hears_of_it(
    client: EverrollClient, run_name: str, task_queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine dies while it is given new weights: the run does not sit its back-off out."""
    monkeypatch.setattr(policies, "publish_backoff_seconds", lambda num_failures, dead_seconds: 600.0)
    tries = []

    def lose(request: PublishRequest) -> None:
        if request.weights.version == 2:
            tries.append(2)
            if len(tries) == 1:
                raise ApplicationError(f"{request.engine_urls[0]} is away", type=CauseKind.ENGINE.value)

    simulation = Simulation(on_publish=lose)
    async with simulation.workers(client.temporal, task_queue):
        await client.start(build_spec(run_name, task_queue))
        await wait_until(lambda: tries == [2])
        simulation.engine_restarts.set()
        await asyncio.wait_for(client.result(run_name), 60)
    assert simulation.published == [0, 1, 2, 2]
