"""What a run waits for, by name (I8, B2, B3): from the run itself, and from outside when no worker answers."""

from __future__ import annotations

import asyncio
import time
from datetime import timedelta

import pytest
from temporalio import activity
from temporalio.client import (
    Client,
    DescribeWorkflowInput,
    FetchWorkflowHistoryEventsInput,
    Interceptor,
    ListWorkflowsInput,
    OutboundInterceptor,
    QueryWorkflowInput,
    WorkflowExecutionAsyncIterator,
    WorkflowExecutionDescription,
    WorkflowHandle,
    WorkflowHistoryEventAsyncIterator,
)

from activities.runs import HealthActivities
from everroll import survey as survey_module
from everroll.cli.progress import list_attention
from everroll.client import EverrollClient, RunView
from everroll.contracts import names
from everroll.contracts.health import Survey, SurveyRequest
from everroll.contracts.training import PrepareTrainerRequest, TrainingRunResult
from everroll.temporal import build_plugin
from tests.conftest import TemporalServer
from tests.integration.test_orchestration import wait_for_status
from tests.simulation import Simulation, build_spec
from workflows import policies


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The run's own survey comes after one second, and what waits for half a second is worth a word."""
    monkeypatch.setattr(policies, "SURVEY_FIRST", timedelta(seconds=1))
    monkeypatch.setattr(survey_module, "_ROUTINE_SECONDS", 0.5)


async def wait_for_survey(client: EverrollClient, run_name: str, activity: str) -> RunView:
    """Until the run itself says that it waits for this."""
    return await wait_for_status(
        client,
        run_name,
        lambda view: (
            view.status is not None
            and view.status.survey is not None
            and any(item.activity == activity for item in view.status.survey.waiting)
        ),
    )


async def connect_watched(server: TemporalServer) -> tuple[EverrollClient, list[tuple[str, timedelta | None]]]:
    """A client, and what it calls with which time limit."""
    watch = CallWatch()
    temporal = await Client.connect(server.address, plugins=[build_plugin()], interceptors=[watch])
    return EverrollClient(temporal), watch.calls


def check_bounds(calls: list[tuple[str, timedelta | None]]) -> None:
    """A query, which only a worker can answer, is waited for briefly; everything else is Temporal's own to answer."""
    assert [limit for name, limit in calls if name == "query"] == [timedelta(seconds=3)]
    assert all(limit is not None and limit <= timedelta(seconds=10) for _, limit in calls), calls


class CallWatch(Interceptor):
    """Notes the time limit of each call that a client makes for a status."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, timedelta | None]] = []

    def intercept_client(self, next: OutboundInterceptor) -> OutboundInterceptor:
        return _WatchedCalls(next, self.calls)


class _WatchedCalls(OutboundInterceptor):
    def __init__(self, next: OutboundInterceptor, calls: list[tuple[str, timedelta | None]]) -> None:
        super().__init__(next)
        self._calls = calls

    async def describe_workflow(self, input: DescribeWorkflowInput) -> WorkflowExecutionDescription:
        self._calls.append(("describe", input.rpc_timeout))
        return await super().describe_workflow(input)

    async def query_workflow(self, input: QueryWorkflowInput) -> object:
        self._calls.append(("query", input.rpc_timeout))
        return await super().query_workflow(input)

    def list_workflows(self, input: ListWorkflowsInput) -> WorkflowExecutionAsyncIterator:
        self._calls.append(("list", input.rpc_timeout))
        return super().list_workflows(input)

    def fetch_workflow_history_events(
        self, input: FetchWorkflowHistoryEventsInput
    ) -> WorkflowHistoryEventAsyncIterator:
        self._calls.append(("history", input.rpc_timeout))
        return super().fetch_workflow_history_events(input)


async def cancel(client: EverrollClient, run_name: str) -> None:
    """Cancel and wait until it is done."""
    await client.cancel(run_name)
    await wait_for_status(client, run_name, lambda view: view.state != "running")


async def read_details(handle: WorkflowHandle[object, TrainingRunResult]) -> str:
    """Current details, as the web UI shows them."""
    return str(await handle.query("__temporal_workflow_metadata"))


def test_the_first_survey_comes_within_a_minute() -> None:
    """B2: with the time that a survey may take."""
    latest = 2 * policies.SURVEY_FIRST + policies.LIGHT_START_TO_CLOSE / 2
    assert latest <= timedelta(minutes=1)


@pytest.mark.usefixtures("impatient")
async def test_a_run_without_a_trainer_says_so(client: EverrollClient, run_name: str, task_queue: str) -> None:
    simulation = Simulation(train_queue_suffix="-elsewhere")
    async with simulation.workers(client.temporal, task_queue):
        await client.start(build_spec(run_name, task_queue))
        view = await wait_for_survey(client, run_name, "prepare_trainer")
        details = await read_details(client.temporal.get_workflow_handle(names.run_workflow_id(run_name)))
        await cancel(client, run_name)
    attention = "\n".join(list_attention(view))
    assert "waits for the run prepare_trainer since" in attention
    assert f"no worker of {task_queue}-train has taken it" in attention
    assert f"no worker of {task_queue}-train has taken it" in details


@pytest.mark.usefixtures("impatient")
async def test_a_step_that_takes_long_is_named(client: EverrollClient, run_name: str, task_queue: str) -> None:
    """Also outside of the rollout; and it is forgotten once there is progress."""
    simulation = Simulation(train_gate=asyncio.Event())
    assert simulation.train_gate is not None
    async with simulation.workers(client.temporal, task_queue):
        await client.start(build_spec(run_name, task_queue, run={"num_steps": 1}))
        view = await wait_for_survey(client, run_name, "train_step")
        simulation.train_gate.set()
        await client.result(run_name)
        after = await client.status(run_name)
    assert view.status is not None
    assert view.status.survey is not None
    assert [item.subject for item in view.status.survey.waiting] == ["the run train_step"]
    assert after.status is not None
    assert after.status.survey is None


@pytest.mark.usefixtures("impatient")
async def test_weights_that_an_engine_lost_are_published_though_agents_are_patient(
    client: EverrollClient, run_name: str, task_queue: str
) -> None:
    """Killed right after it took new weights, an engine serves version 0; agents ask again and again, and tell nobody.

    Found by chaos, seed first, round 1.
    """
    gate = asyncio.Event()
    simulation = Simulation(gate=gate)
    async with simulation.workers(client.temporal, task_queue):
        await client.start(build_spec(run_name, task_queue, run={"num_steps": 1}))
        async with asyncio.timeout(60):
            while simulation.published.count(0) < 2:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        gate.set()
        await client.result(run_name)


@pytest.mark.usefixtures("impatient")
async def test_rollouts_without_a_worker_are_named(client: EverrollClient, run_name: str, task_queue: str) -> None:
    """B2: which episodes wait, since when."""
    simulation = Simulation(rollout_queue_suffix="-elsewhere")
    started = time.time()
    async with simulation.workers(client.temporal, task_queue):
        await client.start(build_spec(run_name, task_queue))
        view = await wait_for_survey(client, run_name, "episode-1-0")
        await cancel(client, run_name)
    assert view.status is not None
    assert view.status.survey is not None
    assert view.status.survey.num_waiting == 4
    assert all(item.stuck and item.since > started - 5 for item in view.status.survey.waiting)


@pytest.mark.usefixtures("impatient")
async def test_a_run_ends_while_a_survey_is_under_way(
    client: EverrollClient, run_name: str, task_queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The watchdog is ended with the run, whatever it waits for."""
    asked, answer = asyncio.Event(), asyncio.Event()

    @activity.defn(name=names.SURVEY_GROUPS)
    async def take_slow_survey(self: HealthActivities, request: SurveyRequest) -> Survey:
        asked.set()
        await asyncio.wait_for(answer.wait(), 60)
        return Survey(taken_at=time.time())

    monkeypatch.setattr(HealthActivities, "survey_groups", take_slow_survey)
    async with Simulation(gate=asyncio.Event()).workers(client.temporal, task_queue):
        await client.start(build_spec(run_name, task_queue))
        await asyncio.wait_for(asked.wait(), 60)
        await cancel(client, run_name)
        answer.set()


@pytest.mark.usefixtures("impatient")
async def test_a_retried_activity_shows_its_last_failure(
    client: EverrollClient, run_name: str, task_queue: str
) -> None:
    simulation = Simulation(gate=asyncio.Event())

    def give_up(request: PrepareTrainerRequest) -> None:
        raise TimeoutError("the disk is slow")

    simulation.on_prepare_trainer = give_up
    async with simulation.workers(client.temporal, task_queue):
        await client.start(build_spec(run_name, task_queue))
        view = await wait_for_status(
            client,
            run_name,
            lambda view: any("the disk is slow" in line for line in list_attention(view)),
        )
        await cancel(client, run_name)
    (line,) = list_attention(view)
    assert "the run prepare_trainer" in line
    assert ", attempt " in line


@pytest.mark.usefixtures("impatient")
async def test_status_without_any_worker(temporal_server: TemporalServer, run_name: str, task_queue: str) -> None:
    """Each call that it makes ends within seconds, and it says what is missing."""
    client, calls = await connect_watched(temporal_server)
    await client.start(build_spec(run_name, task_queue))
    await asyncio.sleep(0.6)
    calls.clear()
    view = await client.status(run_name, survey=True)
    check_bounds(calls)
    await client.temporal.get_workflow_handle(names.run_workflow_id(run_name)).terminate()
    assert view.state == "running"
    text = "\n".join(list_attention(view))
    assert f"no workflow worker of task queue {task_queue} answers; is one running?" in text
    assert "waits for the run workflow task since" in text
    assert f"no worker of {task_queue} has taken it" in text


async def test_status_of_a_run_that_ended_before_its_workers(
    temporal_server: TemporalServer, run_name: str, task_queue: str
) -> None:
    client, calls = await connect_watched(temporal_server)
    async with Simulation().workers(client.temporal, task_queue):
        await client.start(build_spec(run_name, task_queue))
        await client.result(run_name)
    calls.clear()
    view = await client.status(run_name, survey=True)
    check_bounds(calls)
    assert view.state == "completed"
    assert view.status is None
    assert view.indexed is not None
    assert (view.indexed.step, view.indexed.phase, view.indexed.reward) == (2, "completed", 0.25)
    assert view.result is not None
    assert view.result.trained_groups == 4


async def test_status_asks_what_a_silent_run_waits_for(client: EverrollClient, run_name: str, task_queue: str) -> None:
    """Groups of a run whose workers are gone are found by Temporal's index."""
    simulation = Simulation(gate=asyncio.Event())
    async with simulation.workers(client.temporal, task_queue):
        await client.start(build_spec(run_name, task_queue))
        await wait_for_status(client, run_name, lambda view: len(simulation.episodes) == 4)
        deadline = time.monotonic() + 60
        while (survey := (await client.status(run_name, survey=True)).survey) is None or survey.num_waiting < 4:
            assert time.monotonic() < deadline, survey
        await cancel(client, run_name)
    assert {item.subject for item in survey.waiting} == {
        f"group {group} episode-{member}-0" for group in (0, 1) for member in (0, 1)
    }
