"""What a finished run's histories say: events, latency of episodes, largest payload, failed workflow tasks."""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from google.protobuf.message import Message
from temporalio.api.common.v1 import Payload
from temporalio.api.enums.v1 import EventType, TimeoutType, WorkflowTaskFailedCause
from temporalio.api.history.v1 import HistoryEvent
from temporalio.client import Client

_CONCURRENCY = 16


@dataclass
class Histories:
    """Figures over the histories of one run."""

    run_events: int = 0
    """Of the run's longest generation."""
    group_events: list[int] = field(default_factory=list)
    episode_seconds: list[float] = field(default_factory=list)
    """From the scheduling of an episode's first activity to the completion of its second."""
    max_payload_bytes: int = 0
    failed_tasks: list[str] = field(default_factory=list)
    """Workflow tasks that failed, each with its workflow and what was said."""
    num_late_closes: int = 0
    """Closes (a run's end, its continue-as-new) that the server put off because news had come since the workflow task
    began: it lets the workflow see a group's report or end first. It writes that down as a failed task, with a cause
    of its own; nothing failed, and any workflow that is told things while it closes meets it."""
    lost_tasks: list[str] = field(default_factory=list)
    """Workflow tasks that were begun and not answered in time, each with its workflow."""
    num_moved_tasks: int = 0
    """Workflow tasks that waited so long for the worker that knows the workflow that any other might take them."""
    generations: int = 1

    @property
    def max_events(self) -> int:
        return max(self.run_events, *self.group_events)

    def percentile(self, share: float) -> float:
        ordered = sorted(self.episode_seconds)
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))]

    @property
    def events_per_group(self) -> float:
        return statistics.mean(self.group_events)


async def read_histories(client: Client, run_id: str, num_groups: int) -> Histories:
    """Read the run (all of its generations) and its groups."""
    found = Histories(generations=0)
    next_run: str | None = None
    first = (await client.get_workflow_handle(run_id).describe()).raw_description.workflow_execution_info.first_run_id
    next_run = first or None
    while True:
        events = await _fetch(client, run_id, next_run)
        found.generations += 1
        found.run_events = max(found.run_events, len(events))
        _inspect(run_id, events, found)
        attributes = events[-1].workflow_execution_continued_as_new_event_attributes
        if not attributes.new_execution_run_id:
            break
        next_run = attributes.new_execution_run_id
    gate = asyncio.Semaphore(_CONCURRENCY)

    async def read_group(group: int) -> None:
        async with gate:
            workflow_id = f"{run_id}/group/{group}"
            events = await _fetch(client, workflow_id, None)
        found.group_events.append(len(events))
        found.episode_seconds += _measure_episodes(events)
        _inspect(workflow_id, events, found)

    await asyncio.gather(*(read_group(group) for group in range(num_groups)))
    return found


async def _fetch(client: Client, workflow_id: str, run_id: str | None) -> list[HistoryEvent]:
    handle = client.get_workflow_handle(workflow_id, run_id=run_id)
    return [event async for event in handle.fetch_history_events()]


def _inspect(workflow_id: str, events: Iterable[HistoryEvent], found: Histories) -> None:
    for event in events:
        if event.event_type == EventType.EVENT_TYPE_WORKFLOW_TASK_FAILED:
            _note_failed_task(workflow_id, event, found)
        elif event.event_type == EventType.EVENT_TYPE_WORKFLOW_TASK_TIMED_OUT:
            timeout = event.workflow_task_timed_out_event_attributes.timeout_type
            if timeout == TimeoutType.TIMEOUT_TYPE_SCHEDULE_TO_START:
                found.num_moved_tasks += 1
            else:
                found.lost_tasks.append(f"{workflow_id} event {event.event_id}: {TimeoutType.Name(timeout)}")
        found.max_payload_bytes = max(
            [found.max_payload_bytes, *(len(payload.data) for payload in find_payloads(event))]
        )


def _note_failed_task(workflow_id: str, event: HistoryEvent, found: Histories) -> None:
    failed = event.workflow_task_failed_event_attributes
    if failed.cause == WorkflowTaskFailedCause.WORKFLOW_TASK_FAILED_CAUSE_UNHANDLED_COMMAND:
        found.num_late_closes += 1
        return
    cause = WorkflowTaskFailedCause.Name(failed.cause)
    found.failed_tasks.append(f"{workflow_id} event {event.event_id}: {cause}: {failed.failure.message[:200]}")


def find_payloads(message: Message) -> Iterator[Payload]:
    if isinstance(message, Payload):
        yield message
        return
    for descriptor, value in message.ListFields():
        if descriptor.message_type is None:
            continue
        if isinstance(value, Message):
            yield from find_payloads(value)
        elif descriptor.message_type.GetOptions().map_entry:
            yield from (item for entry in value.values() if isinstance(entry, Message) for item in find_payloads(entry))
        else:
            yield from (item for entry in value for item in find_payloads(entry))


def _measure_episodes(events: Iterable[HistoryEvent]) -> Iterator[float]:
    scheduled: dict[int, str] = {}
    started: dict[str, float] = {}
    for event in events:
        if event.event_type == EventType.EVENT_TYPE_ACTIVITY_TASK_SCHEDULED:
            activity_id = event.activity_task_scheduled_event_attributes.activity_id
            scheduled[event.event_id] = activity_id
            started[activity_id] = event.event_time.ToMilliseconds() / 1000
        elif event.event_type == EventType.EVENT_TYPE_ACTIVITY_TASK_COMPLETED:
            activity_id = scheduled[event.activity_task_completed_event_attributes.scheduled_event_id]
            if activity_id.startswith("collect-"):
                episode = activity_id.replace("collect-", "episode-", 1)
                yield event.event_time.ToMilliseconds() / 1000 - started[episode]
