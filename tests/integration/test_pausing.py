"""The abort budget and pauses on a real Temporal server; the server that dies is a real socket."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator
from typing import Any, cast

import pytest
from temporalio.api.enums.v1 import EventType
from temporalio.client import Client, WorkflowHandle
from temporalio.common import SearchAttributeKey
from temporalio.service import RPCError
from temporalio.testing import ActivityEnvironment

from activities.runs import HealthActivities
from everroll.client import EverrollClient, RunFailedError, RunView, SteeringError
from everroll.contracts import names
from everroll.contracts.health import AwaitServerRequest, HoldRequest, Pause
from everroll.contracts.outcomes import Cause, CauseKind, SampleStatus
from everroll.contracts.rollout import CollectResult, EpisodeKey, GroupRequest
from everroll.contracts.spec import RunSpec
from everroll.contracts.training import Phase, PrepareTrainerRequest, PublishRequest
from everroll.engines.base import EngineUnavailableError, WeightUpdateError
from everroll.http_client import build_http_client
from everroll.local.ports import choose_port
from tests.integration.test_orchestration import read_status, wait_for_status
from tests.simulation import Simulation, build_spec, fail, succeed

PHASE = SearchAttributeKey.for_keyword(names.SEARCH_PHASE)


class Flaky:
    """A server that can be taken down, and episodes that fail while it is."""

    def __init__(self, simulation: Simulation) -> None:
        self.port = choose_port(0)
        self.url = f"http://127.0.0.1:{self.port}"
        self.down = False
        self.returned = False
        self._simulation = simulation
        self._server: asyncio.Server | None = None

    def collect(self, key: EpisodeKey) -> CollectResult:
        if not self.down:
            return self._simulation.build_collected(key)
        cause = Cause(kind=CauseKind.TRANSPORT, error="ConnectError", message="refused", server=self.url)
        return CollectResult(key=key, status=SampleStatus.ABORTED, cause=cause)

    async def come_back(self) -> None:
        self.down, self.returned = False, True
        await self.answer_probes()

    async def answer_probes(self) -> None:
        self._server = await asyncio.start_server(self._answer, "127.0.0.1", self.port)

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\nconnection: close\r\n\r\n{}")
        await writer.drain()
        writer.close()

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
            await self._server.wait_closed()


@contextlib.asynccontextmanager
async def flaky_simulation() -> AsyncIterator[tuple[Simulation, Flaky]]:
    simulation = Simulation()
    flaky = Flaky(simulation)
    simulation.collect = flaky.collect
    yield simulation, flaky
    await flaky.close()


BUDGET = {"window": 8, "max_share": 0.5, "probe_seconds": 0.1}
ROLLOUT = {"abort_budget": BUDGET, "refill_backoff_seconds": 0.1, "max_refills": 50}


async def test_a_dead_server_pauses_the_run_until_it_answers(
    client: EverrollClient, run_name: str, task_queue: str
) -> None:
    """A4: bounded aborts, a message that says what and since when; then on by itself, nothing lost or doubled."""
    async with flaky_simulation() as (simulation, flaky), simulation.workers(client.temporal, task_queue):
        flaky.down = True
        await client.start(build_spec(run_name, task_queue, rollout=ROLLOUT))
        view = await wait_for_status(
            client, run_name, lambda view: view.status is not None and view.status.phase is Phase.PAUSED
        )
        assert view.status is not None
        assert view.status.pause is not None
        assert view.status.pause.server == flaky.url
        for part in (flaky.url, "ConnectError", "first at", "last at", "is named by"):
            assert part in view.status.pause.message
        # On hold: what is under way ends, nothing new starts.
        await asyncio.sleep(1.5)
        num_episodes = len(simulation.episodes)
        await asyncio.sleep(1.0)
        assert len(simulation.episodes) == num_episodes
        assert simulation.trained == []
        await flaky.come_back()
        result = await client.result(run_name)
    assert result.steps == 2
    assert result.dropped_groups == {}
    assert [[item.group for item in request.batch] for request in simulation.trained] == [[0, 1], [2, 3]]
    assert result.unusable_episodes["transport"] >= 5


async def test_resume_ends_a_pause_that_waits_for_a_server(
    client: EverrollClient, run_name: str, task_queue: str
) -> None:
    """The probe gets no answer, but a person knows better; what was counted before the pause counts no more."""
    async with flaky_simulation() as (simulation, flaky), simulation.workers(client.temporal, task_queue):
        flaky.down = True
        await client.start(build_spec(run_name, task_queue, rollout=ROLLOUT))
        view = await wait_for_status(
            client, run_name, lambda view: view.status is not None and view.status.phase is Phase.PAUSED
        )
        assert view.status is not None
        assert view.status.unusable_episodes["transport"] >= 5
        description = await client.temporal.get_workflow_handle(names.run_workflow_id(run_name)).describe()
        assert description.typed_search_attributes.get(PHASE) == "paused"
        losses = iter([True])

        def lose_one_more(key: EpisodeKey) -> CollectResult:
            flaky.down = next(losses, False)
            return flaky.collect(key)

        simulation.collect = lose_one_more
        await client.resume(run_name)
        result = await asyncio.wait_for(client.result(run_name), 60)
    assert result.steps == 2
    assert result.dropped_groups == {}


async def test_on_hold_no_episode_starts(client: EverrollClient, run_name: str, task_queue: str) -> None:
    """Paused in the middle of a group: its refills wait until the run goes on."""
    gate = asyncio.Event()
    simulation = Simulation(gate=gate)
    simulation.play = lambda request: fail(request) if request.key.attempt == 0 else succeed(request)
    async with simulation.workers(client.temporal, task_queue):
        await client.start(build_spec(run_name, task_queue, run={"num_steps": 1}))
        await wait_for_status(client, run_name, lambda view: len(simulation.episodes) == 4)
        await client.pause(run_name)
        for group in range(2):
            await wait_for_hold(client.temporal.get_workflow_handle(names.group_workflow_id(run_name, group)))
        gate.set()
        await wait_for_status(client, run_name, lambda view: len(simulation.events) == 4)
        await asyncio.sleep(1.0)
        assert len(simulation.episodes) == 4
        await client.resume(run_name)
        result = await asyncio.wait_for(client.result(run_name), 60)
    assert len(simulation.episodes) == 8
    assert result.unusable_episodes == {"agent": 4}


def list_playing(view: RunView) -> list[str]:
    """Episodes that Temporal holds as under way; a view without a survey has one that nobody knows."""
    if view.survey is None:
        return ["unknown"]
    return [item.subject for item in view.survey.waiting if item.activity.startswith("episode-")]


async def wait_for_hold(handle: WorkflowHandle[Any, Any]) -> None:
    """Until the group's history holds the signal, and a task has taken it in."""
    async with asyncio.timeout(60):
        while True:
            events = [event async for event in handle.fetch_history_events()]
            kinds = [event.event_type for event in events]
            if EventType.EVENT_TYPE_WORKFLOW_EXECUTION_SIGNALED in kinds:
                after = kinds[kinds.index(EventType.EVENT_TYPE_WORKFLOW_EXECUTION_SIGNALED) :]
                if EventType.EVENT_TYPE_WORKFLOW_TASK_COMPLETED in after:
                    return
            await asyncio.sleep(0.05)


async def test_a_probe_waits_for_a_good_answer() -> None:
    """An error and a body that cannot be decoded are signs of a server that is being mended."""
    answers = iter(
        [
            b"503 Away\r\ncontent-length: 0",
            b"200 OK\r\ncontent-encoding: gzip\r\ncontent-length: 2",
            b"200 OK\r\ncontent-length: 2",
        ]
    )

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        head = next(answers)
        writer.write(b"HTTP/1.1 " + head + b"\r\nconnection: close\r\n\r\n" + b"{}" * (b": 2" in head))
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with server, build_http_client() as http:
        probe = HealthActivities(cast("Client", None), http).await_server
        request = AwaitServerRequest(server=url, probe_seconds=0.01)
        await asyncio.wait_for(ActivityEnvironment().run(probe, request), 60)
    assert next(answers, None) is None


async def test_a_small_run_pauses_too(client: EverrollClient, run_name: str, task_queue: str) -> None:
    """Fewer episodes than the budget's window: infrastructure never ends as "no progress"."""
    async with flaky_simulation() as (simulation, flaky), simulation.workers(client.temporal, task_queue):
        flaky.down = True
        budget = {"dead_seconds": 3.0, "probe_seconds": 0.1}
        rollout = {"abort_budget": budget, "refill_backoff_seconds": 0.05, "max_refills": 1, "max_empty_rounds": 1}
        await client.start(build_spec(run_name, task_queue, rollout=rollout))
        await wait_for_status(
            client, run_name, lambda view: view.status is not None and view.status.phase is Phase.PAUSED
        )
        await flaky.come_back()
        result = await asyncio.wait_for(client.result(run_name), 60)
    assert result.steps == 2


async def test_a_server_that_answers_its_probe_and_does_not_work_is_tried_ever_more_rarely(
    client: EverrollClient, run_name: str, task_queue: str
) -> None:
    """No endless round of playing, pausing and going on; once it works, the run is as before."""
    async with flaky_simulation() as (simulation, flaky), simulation.workers(client.temporal, task_queue):
        flaky.down = True
        await flaky.answer_probes()
        rollout = {**ROLLOUT, "abort_budget": {**BUDGET, "window": 4}}
        await client.start(build_spec(run_name, task_queue, rollout=rollout))
        view = await wait_for_status(
            client,
            run_name,
            lambda view: (
                view.status is not None
                and view.status.pause is not None
                and "it has answered its probe 2 times and not worked all the same" in view.status.pause.message
            ),
        )
        assert view.status is not None
        assert view.status.pause is not None
        assert f"{flaky.url} is named by" in view.status.pause.message
        flaky.down = False
        result = await asyncio.wait_for(client.result(run_name), 60)
    assert result.steps == 2
    assert result.dropped_groups == {}


@pytest.mark.parametrize("answers", [False, True])
async def test_a_pause_that_nothing_ends_fails_the_run(
    client: EverrollClient, run_name: str, task_queue: str, answers: bool
) -> None:
    """Several in a row count as one: a server that only answers its probe does not put the end off."""
    async with flaky_simulation() as (simulation, flaky), simulation.workers(client.temporal, task_queue):
        flaky.down = True
        if answers:
            await flaky.answer_probes()
        rollout = {**ROLLOUT, "abort_budget": {**BUDGET, "probe_seconds": 0.3, "max_pause_seconds": 2.0}}
        await client.start(build_spec(run_name, task_queue, rollout=rollout))
        text = f"(?s)AbortBudgetExceeded: nothing ended this pause within 2 s: .*{flaky.url} is named by"
        with pytest.raises(RunFailedError, match=text):
            await asyncio.wait_for(client.result(run_name), 60)


async def test_by_policy_the_run_fails_at_once(client: EverrollClient, run_name: str, task_queue: str) -> None:
    async with flaky_simulation() as (simulation, flaky), simulation.workers(client.temporal, task_queue):
        flaky.down = True
        rollout = {**ROLLOUT, "abort_budget": {**BUDGET, "on_exceeded": "fail"}}
        await client.start(build_spec(run_name, task_queue, rollout=rollout))
        with pytest.raises(RunFailedError, match=f"(?s)AbortBudgetExceeded: abort budget exceeded.*{flaky.url}"):
            await client.result(run_name)


@contextlib.asynccontextmanager
async def engine_goes_away() -> AsyncIterator[tuple[Simulation, Flaky]]:
    """An engine that is there at first, and away when version 1 is published."""
    async with flaky_simulation() as (simulation, flaky):

        def publish(request: PublishRequest) -> None:
            flaky.down = flaky.down or (request.weights.version == 1 and not flaky.returned)
            if flaky.down:
                raise EngineUnavailableError("GET", f"{flaky.url}/get_model_info", "ConnectionRefusedError: refused")

        simulation.on_publish = publish
        yield simulation, flaky


def build_publish_spec(run_name: str, task_queue: str, flaky: Flaky, on_exceeded: str = "pause") -> RunSpec:
    budget = {"dead_seconds": 1.0, "probe_seconds": 0.1, "on_exceeded": on_exceeded}
    services = {"engine_urls": ["http://127.0.0.1:1", flaky.url]}
    return build_spec(run_name, task_queue, rollout={"abort_budget": budget}, services=services)


async def wait_for_publish_pause(client: EverrollClient, run_name: str) -> Pause:
    view = await wait_for_status(
        client, run_name, lambda view: view.status is not None and view.status.phase is Phase.PAUSED
    )
    assert view.status is not None
    assert view.status.step == 0
    assert view.status.pause is not None
    return view.status.pause


async def test_an_engine_that_stays_away_while_publishing_pauses_the_run(
    client: EverrollClient, run_name: str, task_queue: str
) -> None:
    """Named with cause, times and count; on by itself when it answers; nothing is trained twice."""
    async with engine_goes_away() as (simulation, flaky), simulation.workers(client.temporal, task_queue):
        await client.start(build_publish_spec(run_name, task_queue, flaky))
        pause = await wait_for_publish_pause(client, run_name)
        assert pause.server == flaky.url
        assert re.search(
            rf"weights version 1 cannot be published: {flaky.url} did not answer, \d+ times in a row, first at .*"
            rf"last at .*transport: EngineUnavailableError: GET {flaky.url}/get_model_info",
            pause.message,
        )
        await flaky.come_back()
        result = await asyncio.wait_for(client.result(run_name), 60)
    assert result.steps == 2
    assert [request.step for request in simulation.trained] == [1, 2]
    assert sorted(set(simulation.published)) == [0, 1, 2]
    assert simulation.published == sorted(simulation.published)


async def test_an_engine_that_answers_its_probe_and_takes_no_weights_is_tried_ever_more_rarely(
    client: EverrollClient, run_name: str, task_queue: str
) -> None:
    """One try for each pause: the history of a run that waits for it stays short."""
    async with engine_goes_away() as (simulation, flaky), simulation.workers(client.temporal, task_queue):
        await flaky.answer_probes()
        await client.start(build_publish_spec(run_name, task_queue, flaky))
        await wait_for_status(
            client,
            run_name,
            lambda view: (
                view.status is not None
                and view.status.pause is not None
                and "did not answer, 1 times in a row" in view.status.pause.message
                and "it has answered its probe 3 times" in view.status.pause.message
            ),
        )
        flaky.down, flaky.returned = False, True
        result = await asyncio.wait_for(client.result(run_name), 60)
    assert result.steps == 2
    assert [request.step for request in simulation.trained] == [1, 2]


async def test_resume_ends_a_pause_while_publishing(client: EverrollClient, run_name: str, task_queue: str) -> None:
    """Also when the engine does not answer its probe: the person may know another way."""
    async with engine_goes_away() as (simulation, flaky), simulation.workers(client.temporal, task_queue):
        await client.start(build_publish_spec(run_name, task_queue, flaky))
        await wait_for_publish_pause(client, run_name)
        flaky.down, flaky.returned = False, True
        await client.resume(run_name)
        result = await asyncio.wait_for(client.result(run_name), 60)
    assert result.steps == 2


async def test_by_policy_an_engine_that_stays_away_fails_the_run(
    client: EverrollClient, run_name: str, task_queue: str
) -> None:
    async with engine_goes_away() as (simulation, flaky), simulation.workers(client.temporal, task_queue):
        await client.start(build_publish_spec(run_name, task_queue, flaky, on_exceeded="fail"))
        with pytest.raises(RunFailedError, match=f"(?s)AbortBudgetExceeded: weights version 1.*{flaky.url} did not"):
            await asyncio.wait_for(client.result(run_name), 60)


async def test_an_engine_that_refuses_weights_fails_the_run_at_once(
    client: EverrollClient, run_name: str, task_queue: str
) -> None:
    """An answer is no outage: loud, and not tried again."""
    asked = []

    def refuse(request: PublishRequest) -> None:
        asked.append(request.weights.version)
        if request.weights.version == 1:
            raise WeightUpdateError("POST", "http://127.0.0.1:1/update_weights_from_disk", "shapes differ", status=400)

    simulation = Simulation(on_publish=refuse)
    async with simulation.workers(client.temporal, task_queue):
        await client.start(build_spec(run_name, task_queue))
        with pytest.raises(RunFailedError, match=r"(?s)PublishError: WeightUpdateError.*answered 400: shapes differ"):
            await asyncio.wait_for(client.result(run_name), 60)
    assert asked == [0, 1]


async def test_a_short_absence_of_an_engine_is_no_pause(client: EverrollClient, run_name: str, task_queue: str) -> None:
    failures = iter([1, 1])

    def publish(request: PublishRequest) -> None:
        if request.weights.version == 1 and next(failures, None):
            raise EngineUnavailableError("POST", "http://127.0.0.1:1/pause_generation", "reset")

    simulation = Simulation(on_publish=publish)
    async with simulation.workers(client.temporal, task_queue):
        await client.start(build_spec(run_name, task_queue))
        result = await asyncio.wait_for(client.result(run_name), 60)
        view = await read_status(client, run_name)
    assert result.steps == 2
    assert view.status is not None
    assert view.status.generation == 0


async def test_before_a_run_goes_on_its_weights_are_published_again(
    client: EverrollClient, run_name: str, task_queue: str
) -> None:
    """A server that was away may have lost them: no episode may be played by the first ones."""
    async with flaky_simulation() as (simulation, flaky), simulation.workers(client.temporal, task_queue):
        flaky.down = True
        await client.start(build_spec(run_name, task_queue, run={"num_steps": 1}, rollout=ROLLOUT))
        await wait_for_status(
            client, run_name, lambda view: view.status is not None and view.status.phase is Phase.PAUSED
        )
        for group in range(2):
            await wait_for_hold(client.temporal.get_workflow_handle(names.group_workflow_id(run_name, group)))
        await wait_for_status(client, run_name, lambda view: not list_playing(view), survey=True)
        simulation.logs_plays = True
        simulation.events.clear()
        await flaky.come_back()
        await asyncio.wait_for(client.result(run_name), 60)
    started = [event for event in simulation.events if event.startswith(("publish", "play"))]
    assert started[0] == "publish 0"


async def test_a_group_that_starts_while_the_run_is_paused_is_on_hold(
    client: EverrollClient, run_name: str, task_queue: str
) -> None:
    """`GroupRequest.hold`: no episode is played before the run's first word reaches it."""
    simulation = Simulation()
    async with simulation.workers(client.temporal, task_queue):
        request = GroupRequest(
            run=run_name,
            group=0,
            weight_version=0,
            dataset=simulation.dataset,
            rollout=build_spec(run_name, task_queue).rollout,
            seed=1,
            session_url="http://127.0.0.1:1",
            store_url="store",
            task_queue=task_queue,
            hold=HoldRequest(number=3, held=True),
        )
        handle = await client.temporal.start_workflow(
            names.ROLLOUT_GROUP, request, id=names.group_workflow_id(run_name, 0), task_queue=task_queue
        )
        await handle.signal(names.SIGNAL_HOLD, HoldRequest(number=2, held=False))  # overtaken by what it knows already
        await wait_for_hold(handle)
        kinds = [event.event_type async for event in handle.fetch_history_events()]
        assert EventType.EVENT_TYPE_ACTIVITY_TASK_SCHEDULED not in kinds
        await handle.signal(names.SIGNAL_HOLD, HoldRequest(number=4, held=False))
        await asyncio.wait_for(handle.result(), 60)
    assert len(simulation.episodes) == 2


async def test_a_group_admitted_just_before_a_pause_starts_on_hold(
    client: EverrollClient, run_name: str, task_queue: str
) -> None:
    """Going on and pausing meet in one workflow task, as when the worker was away: nothing is played in between."""
    ready = False

    def prepare(request: PrepareTrainerRequest) -> None:
        if not ready:
            raise TimeoutError("not yet")

    simulation = Simulation(on_prepare_trainer=prepare)
    async with simulation.workers(client.temporal, task_queue):
        await client.start(build_spec(run_name, task_queue, run={"num_steps": 1}))
        await wait_for_status(client, run_name, lambda view: view.status is not None)
        await client.pause(run_name)
        ready = True
        await wait_for_status(
            client, run_name, lambda view: view.status is not None and view.status.phase is Phase.PAUSED
        )
    steering = [asyncio.create_task(client.resume(run_name))]
    await asyncio.sleep(0.5)  # they are taken in in this order
    steering.append(asyncio.create_task(client.pause(run_name, "after all")))
    await asyncio.sleep(0.5)
    async with simulation.workers(client.temporal, task_queue):
        await asyncio.wait_for(asyncio.gather(*steering), 60)
        for group in range(2):
            await wait_for_start(client.temporal.get_workflow_handle(names.group_workflow_id(run_name, group)))
        await asyncio.sleep(0.5)
        assert simulation.episodes == []
        await client.resume(run_name)
        await asyncio.wait_for(client.result(run_name), 60)
    assert len(simulation.episodes) == 4


async def wait_for_start(handle: WorkflowHandle[Any, Any]) -> None:
    """Until its first task is done."""
    async with asyncio.timeout(60):
        while True:
            with contextlib.suppress(RPCError):
                events = [event async for event in handle.fetch_history_events()]
                if EventType.EVENT_TYPE_WORKFLOW_TASK_COMPLETED in [event.event_type for event in events]:
                    return
            await asyncio.sleep(0.05)


async def test_a_person_pauses_and_resumes(client: EverrollClient, run_name: str, task_queue: str) -> None:
    simulation = Simulation(train_gate=asyncio.Event())
    assert simulation.train_gate is not None
    async with simulation.workers(client.temporal, task_queue):
        await client.start(build_spec(run_name, task_queue))
        await wait_for_status(
            client, run_name, lambda view: view.status is not None and view.status.phase is Phase.TRAINING
        )
        await client.pause(run_name, "looking at the rewards")
        with pytest.raises(SteeringError, match=r"paused already: paused by request.*: looking"):
            await client.pause(run_name)
        simulation.train_gate.set()
        view = await wait_for_status(
            client,
            run_name,
            lambda view: view.status is not None and view.status.step == 1 and view.status.phase is Phase.PAUSED,
        )
        assert view.status is not None
        assert view.status.pause is not None
        assert "looking at the rewards" in view.status.pause.message
        assert view.status.groups_in_flight == []
        assert len(simulation.episodes) == 4
        await client.resume(run_name)
        result = await client.result(run_name)
    assert result.steps == 2
