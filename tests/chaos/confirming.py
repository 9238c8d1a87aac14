"""Whether a blow fell at the moment that was waited for: found afterwards, in what the run has left.

Between seeing a moment and the kill lie milliseconds, in which what was to be caught may have been over.
"""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

from temporalio.api.enums.v1 import EventType
from temporalio.api.history.v1 import HistoryEvent

from everroll.contracts import names
from tests.chaos.world import RUN, World

Confirm = Callable[[World, float], Awaitable[bool]]
"""Whether a blow at that time (Unix seconds) met the moment; asked when the run is over."""


def was_begun_again(workflow_id: str, activity: str) -> Confirm:
    """The activity, by its id or its type, was not acknowledged at the blow: its last attempt began after it."""

    async def confirm(world: World, blow_at: float) -> bool:
        times = await _find_activity(world, workflow_id, activity, blow_at)
        return times is not None and times[0] > blow_at

    return confirm


def was_under_way(workflow_id: str, activity: str) -> Confirm:
    """The activity had begun, and ended after the blow."""

    async def confirm(world: World, blow_at: float) -> bool:
        times = await _find_activity(world, workflow_id, activity, blow_at)
        return times is not None and times[1] > blow_at

    return confirm


def was_unseen(turns: set[tuple[str, int]]) -> Confirm:
    """One of these turns, by session and depth, was seen after the blow only."""

    async def confirm(world: World, blow_at: float) -> bool:
        if world.clock_moved:
            return True  # nobody can tell
        seen_before = {(turn.session, turn.turn) for turn in world.read_seen() if turn.at <= blow_at}
        return bool(turns - seen_before)

    return confirm


def was_written_later(path: Path) -> Confirm:
    """What has this name now got it after the blow, or is gone again by retention."""

    async def confirm(world: World, blow_at: float) -> bool:
        return not path.exists() or path.stat().st_ctime > blow_at  # noqa: ASYNC240

    return confirm


def list_turns(world: World) -> set[tuple[str, int]]:
    """Turns in the journal, by session and depth."""
    with contextlib.closing(sqlite3.connect(f"file:{world.journal}?mode=ro", uri=True, timeout=10)) as journal:
        return set(journal.execute("SELECT session_id, depth FROM turns"))


async def _find_activity(world: World, workflow_id: str, activity: str, blow_at: float) -> tuple[float, float] | None:
    """When the last attempt began and ended of the activity that had been scheduled last at the blow."""
    found: HistoryEvent | None = None
    started: dict[int, HistoryEvent] = {}
    ended: dict[int, HistoryEvent] = {}
    async for event in _read_histories(world, workflow_id):
        match event.event_type:
            case EventType.EVENT_TYPE_ACTIVITY_TASK_SCHEDULED:
                wanted = event.activity_task_scheduled_event_attributes
                if _at(event) <= blow_at and activity in (wanted.activity_id, wanted.activity_type.name):
                    found, started, ended = event, {}, {}
            case EventType.EVENT_TYPE_ACTIVITY_TASK_STARTED:
                started[event.activity_task_started_event_attributes.scheduled_event_id] = event
            case EventType.EVENT_TYPE_ACTIVITY_TASK_COMPLETED:
                ended[event.activity_task_completed_event_attributes.scheduled_event_id] = event
            case EventType.EVENT_TYPE_ACTIVITY_TASK_FAILED:
                ended[event.activity_task_failed_event_attributes.scheduled_event_id] = event
    if found is None or found.event_id not in started or found.event_id not in ended:
        return None
    return _at(started[found.event_id]), _at(ended[found.event_id])


async def _read_histories(world: World, workflow_id: str) -> AsyncIterator[HistoryEvent]:
    """Of all executions, the oldest first."""
    client = world.client.temporal
    runs = [run async for run in client.list_workflows(f"WorkflowId = '{workflow_id}'")]
    for run in sorted(runs, key=lambda run: run.start_time):
        async for event in client.get_workflow_handle(workflow_id, run_id=run.run_id).fetch_history_events():
            yield event


def _at(event: HistoryEvent) -> float:
    return event.event_time.ToNanoseconds() / 1e9


def run_activity(activity: str) -> tuple[str, str]:
    """Of the run's workflow."""
    return names.run_workflow_id(RUN), activity


def group_activity(group: int, activity: str) -> tuple[str, str]:
    """Of a group's workflow."""
    return names.group_workflow_id(RUN, group), activity
