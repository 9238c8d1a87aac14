"""What a run asks the server after it continued as new, while the groups of the generation before play on."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from temporalio import workflow
from temporalio.client import (
    Client,
    FetchWorkflowHistoryEventsInput,
    Interceptor,
    OutboundInterceptor,
    WorkflowHandle,
    WorkflowHistoryEventAsyncIterator,
)
from temporalio.exceptions import ApplicationError
from temporalio.testing import ActivityEnvironment
from temporalio.worker import Worker

from activities.group_waits import GroupWaits
from activities.runs import GroupActivities
from everroll.client import EverrollClient
from everroll.contracts import names
from everroll.contracts.rollout import AwaitGroupsRequest, AwaitGroupsResult, GroupResult

SECONDS = 30.0


@workflow.defn(name="WaitedGroup", sandboxed=False)
class WaitedGroup:
    """Ends when it is told to, with so many episodes, or fails where that is negative."""

    def __init__(self) -> None:
        self._num_episodes: int | None = None

    @workflow.run
    async def run(self, group: int) -> GroupResult:
        await workflow.wait_condition(lambda: self._num_episodes is not None)
        assert self._num_episodes is not None
        if self._num_episodes < 0:
            raise ApplicationError("broken", type="ProgrammingError")
        return GroupResult(group=group, num_episodes=self._num_episodes)

    @workflow.signal
    def end(self, num_episodes: int) -> None:
        self._num_episodes = num_episodes


class CountedPolls(Interceptor):
    """How many waits for each workflow were opened at the server."""

    def __init__(self) -> None:
        self.opened: Counter[str] = Counter()

    def intercept_client(self, next: OutboundInterceptor) -> OutboundInterceptor:
        opened = self.opened

        class Outbound(OutboundInterceptor):
            def fetch_workflow_history_events(
                self, input: FetchWorkflowHistoryEventsInput
            ) -> WorkflowHistoryEventAsyncIterator:
                opened[input.id] += 1
                return super().fetch_workflow_history_events(input)

        return Outbound(next)


@asynccontextmanager
async def start_groups(
    client: Client, run: str, task_queue: str, num_groups: int
) -> AsyncIterator[list[WorkflowHandle[WaitedGroup, GroupResult]]]:
    async with Worker(client, task_queue=task_queue, workflows=[WaitedGroup]):
        yield [await start_group(client, run, task_queue, group) for group in range(num_groups)]


async def start_group(
    client: Client, run: str, task_queue: str, group: int
) -> WorkflowHandle[WaitedGroup, GroupResult]:
    name = names.group_workflow_id(run, group)
    return await client.start_workflow(WaitedGroup.run, group, id=name, task_queue=task_queue)


async def ask(activities: GroupActivities, run: str, *groups: int) -> dict[int, int]:
    """Run the activity; returns the episodes of each group that has ended."""
    request = AwaitGroupsRequest(run=run, groups=list(groups))
    answer: AwaitGroupsResult = await asyncio.wait_for(
        ActivityEnvironment().run(activities.await_groups, request), SECONDS
    )
    return {result.group: result.num_episodes for result in answer.results}


async def test_the_end_of_one_group_opens_no_wait_for_the_others_anew(
    client: EverrollClient, run_name: str, task_queue: str
) -> None:
    polls = CountedPolls()
    temporal = Client(**{**client.temporal.config(), "interceptors": [polls]})
    activities = GroupActivities(temporal)
    async with start_groups(temporal, run_name, task_queue, 4) as groups:
        left = [0, 1, 2, 3]
        while left:
            await groups[left[0]].signal(WaitedGroup.end, 10 + left[0])
            assert await ask(activities, run_name, *left) == {left[0]: 10 + left[0]}
            left.pop(0)
    assert polls.opened == {names.group_workflow_id(run_name, group): 1 for group in range(4)}


async def test_a_group_that_is_played_again_is_waited_for_again(
    client: EverrollClient, run_name: str, task_queue: str
) -> None:
    """The first time ends while somebody else is waited for; its result must not be taken for the second one's."""
    activities = GroupActivities(client.temporal)
    async with start_groups(client.temporal, run_name, task_queue, 2) as groups:
        await groups[1].signal(WaitedGroup.end, 1)
        assert await ask(activities, run_name, 0, 1) == {1: 1}
        await groups[0].signal(WaitedGroup.end, 2)
        await groups[0].result()
        again = await start_group(client.temporal, run_name, task_queue, 0)
        asked = asyncio.create_task(ask(activities, run_name, 0))
        await again.signal(WaitedGroup.end, 3)
        assert await asked == {0: 3}


async def test_the_failure_of_a_group_is_told_to_each_who_asks(
    client: EverrollClient, run_name: str, task_queue: str
) -> None:
    activities = GroupActivities(client.temporal)
    async with start_groups(client.temporal, run_name, task_queue, 1) as groups:
        await groups[0].signal(WaitedGroup.end, -1)
        for _ in range(2):
            with pytest.raises(ApplicationError, match="broken") as caught:
                await ask(activities, run_name, 0)
            assert caught.value.non_retryable


async def test_a_wait_that_nobody_asks_for_again_is_given_up(
    client: EverrollClient, run_name: str, task_queue: str
) -> None:
    waits = GroupWaits(client.temporal, keep_seconds=0.05)
    async with start_groups(client.temporal, run_name, task_queue, 1) as groups:
        with waits.hold(run_name, [0]) as (first,):
            pass
        with waits.hold(run_name, [0]) as (second,):
            assert second is first
            with waits.hold(run_name, [0]) as (third,):  # two attempts at one activity
                assert third is first
            await asyncio.wait([first], timeout=0.2)  # four times what it is kept for
            assert not first.done()
        await asyncio.wait([first], timeout=SECONDS)
        assert first.cancelled()
        await groups[0].signal(WaitedGroup.end, 5)
        with waits.hold(run_name, [0]) as (anew,):
            assert (await asyncio.wait_for(anew, SECONDS)).num_episodes == 5
        again = await start_group(client.temporal, run_name, task_queue, 0)
        await again.signal(WaitedGroup.end, 6)
        with waits.hold(run_name, [0]) as (last,):  # the one that was told is not told again
            assert (await asyncio.wait_for(last, SECONDS)).num_episodes == 6
