"""Queries that bring a history read in the middle of things: the workflow does not go on by it.

Without the guard each workflow below sees, after its timer, the time of the workflow task before, which no replay sees.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from temporalio import workflow
from temporalio.api.enums.v1 import EventType
from temporalio.client import WorkflowHandle, WorkflowHistory, WorkflowQueryFailedError
from temporalio.worker import Replayer, Worker

from everroll.client import EverrollClient
from everroll.partial_history import REFUSAL
from everroll.temporal import build_plugin

_NUM_WORKFLOWS = 3
_TIMER_SECONDS = 1.0


@workflow.defn
class Sleeper:
    """What a branch on the time comes to, after a timer: another workflow task long since, or not."""

    def __init__(self) -> None:
        self.times: list[float] = []

    @workflow.run
    async def run(self) -> list[float]:
        started = workflow.time()
        await asyncio.sleep(_TIMER_SECONDS)
        self.times.append(workflow.time())
        if workflow.time() - started < _TIMER_SECONDS / 2:
            await asyncio.sleep(0.05)  # a command that a replay does not make
        await asyncio.sleep(0.05)
        self.times.append(workflow.time())
        return self.times

    @workflow.query
    def count(self) -> int:
        return len(self.times)


@asynccontextmanager
async def running(client: EverrollClient, task_queue: str) -> AsyncIterator[None]:
    async with Worker(client.temporal, task_queue=task_queue, workflows=[Sleeper]):
        yield


async def wait_for_event(handle: WorkflowHandle[Sleeper, list[float]], event_type: EventType.ValueType) -> None:
    async with asyncio.timeout(60):
        while all(event.event_type != event_type for event in (await handle.fetch_history()).events):  # noqa: ASYNC110
            await asyncio.sleep(0.05)


async def ask(handle: WorkflowHandle[Sleeper, list[float]]) -> int | str:
    """The answer, or why there is none."""
    try:
        return await handle.query(Sleeper.count)
    except WorkflowQueryFailedError as error:
        return str(error)


async def test_a_query_that_waited_for_a_worker(client: EverrollClient, task_queue: str) -> None:
    """Asked while there is no worker; a timer fires before one comes, which then has both to do."""
    async with running(client, task_queue):
        handles = [
            await client.temporal.start_workflow(Sleeper.run, id=f"{task_queue}-{number}", task_queue=task_queue)
            for number in range(_NUM_WORKFLOWS)
        ]
        for handle in handles:
            assert await handle.query(Sleeper.count) in (0, 1)
    answers = [asyncio.create_task(ask(handle)) for handle in handles]
    for handle in handles:
        await wait_for_event(handle, EventType.EVENT_TYPE_TIMER_FIRED)
    open_histories = [await handle.fetch_history() for handle in handles]
    async with running(client, task_queue):
        results = [await asyncio.wait_for(handle.result(), 30) for handle in handles]
        answered = await asyncio.wait_for(asyncio.gather(*answers), 30)
    for handle, seen in zip(handles, results, strict=True):
        history = await handle.fetch_history()
        recorded = [
            event.event_time.ToNanoseconds() / 1e9
            for event in history.events
            if event.event_type == EventType.EVENT_TYPE_WORKFLOW_TASK_STARTED
        ]
        assert all(min(abs(time - at) for at in recorded[1:]) < 1e-6 for time in seen)
        await replay(history)
    assert {REFUSAL, 0} & set(answered), "no query came before the workflow task: the test shows nothing"
    assert set(answered) <= {REFUSAL, 0, 1, 2}
    await replay(open_histories[0])  # such as a check before a deploy gets


async def replay(history: WorkflowHistory) -> None:
    await Replayer(workflows=[Sleeper], plugins=[build_plugin()]).replay_workflow(history)


async def test_a_closed_workflow_answers(client: EverrollClient, task_queue: str) -> None:
    async with running(client, task_queue):
        handle = await client.temporal.start_workflow(Sleeper.run, id=task_queue, task_queue=task_queue)
        await asyncio.wait_for(handle.result(), 30)
    async with running(client, task_queue):
        assert await ask(handle) == 2
