"""Groups of a run that are not settled, by number: what each does and since when.

Temporal tells; no worker is asked.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from temporalio.api.enums.v1 import PendingActivityState
from temporalio.api.workflow.v1 import PendingActivityInfo
from temporalio.client import Client, WorkflowExecutionDescription, WorkflowExecutionStatus
from temporalio.service import RPCError

from everroll.contracts import names

_MAX_SHOWN = 8
"""Groups that are looked at: the first by number, which as a rule are the oldest."""
_RPC_TIMEOUT = timedelta(seconds=2)
_ACTIVITIES = {names.RUN_EPISODE: "play", names.COLLECT_SAMPLES: "are collected"}
_WAITING = "wait for a worker"


@dataclass(frozen=True)
class OpenGroup:
    """A group that plays, or whose samples wait to be trained."""

    group: int
    state: str
    """`playing` or `ready`."""
    since: datetime
    """When it began to play, or had played."""
    episodes: str = ""
    """Of one that plays: how many of its episodes are where."""

    def describe(self, now: datetime) -> str:
        """One line for people."""
        for_long = timedelta(seconds=max(0, int((now - self.since).total_seconds())))
        text = f"group {self.group}: {self.state} for {for_long}"
        return f"{text}, episodes: {self.episodes}" if self.episodes else text


@dataclass(frozen=True)
class OpenGroups:
    """All open groups of a run, of which the first few are described."""

    first: tuple[OpenGroup, ...]
    num_more: int

    def describe(self, now: datetime) -> list[str]:
        lines = [group.describe(now) for group in self.first]
        return [*lines, f"and {self.num_more} more groups"] if lines and self.num_more else lines


async def look_at_groups(client: Client, run: str, groups: Sequence[int]) -> OpenGroups:
    """Best effort: what does not answer is left out."""
    shown = sorted(groups)[:_MAX_SHOWN]
    found = await asyncio.gather(*(_look(client, run, group) for group in shown))
    return OpenGroups(tuple(group for group in found if group is not None), len(groups) - len(shown))


async def _look(client: Client, run: str, group: int) -> OpenGroup | None:
    workflow_id = names.group_workflow_id(run, group)
    try:
        description = await client.get_workflow_handle(workflow_id).describe(rpc_timeout=_RPC_TIMEOUT)
        first = description.raw_description.workflow_execution_info.first_run_id
        began = description.start_time
        if first not in ("", description.run_id):
            handle = client.get_workflow_handle(workflow_id, run_id=first)
            began = (await handle.describe(rpc_timeout=_RPC_TIMEOUT)).start_time
    except RPCError:
        return None
    if description.status is WorkflowExecutionStatus.RUNNING or description.close_time is None:
        return OpenGroup(group, "playing", began, _count_episodes(description))
    return OpenGroup(group, "ready", description.close_time)


def _count_episodes(description: WorkflowExecutionDescription) -> str:
    """`3 play, 1 wait for a worker`."""
    found = (_name_activity(activity) for activity in description.raw_description.pending_activities)
    counts = Counter(name for name in found if name)
    return ", ".join(f"{count} {name}" for name, count in sorted(counts.items()))


def _name_activity(activity: PendingActivityInfo) -> str:
    if activity.state == PendingActivityState.PENDING_ACTIVITY_STATE_SCHEDULED:
        return _WAITING
    return _ACTIVITIES.get(activity.activity_type.name, "")
