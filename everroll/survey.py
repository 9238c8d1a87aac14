"""What a run waits for, by name: the unfinished activities of its groups, as Temporal knows them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from datetime import timedelta

from temporalio.api.enums.v1 import PendingActivityState
from temporalio.api.workflow.v1 import PendingActivityInfo
from temporalio.client import Client
from temporalio.service import RPCError

from everroll.contracts.health import Survey, Waiting
from everroll.contracts.names import group_workflow_id

_RPC_TIMEOUT = timedelta(seconds=5)
_CONCURRENCY = 8
_MAX_GROUPS = 64
_MAX_SHOWN = 20


async def survey_groups(client: Client, run: str, groups: Sequence[int]) -> Survey:
    """Unfinished activities of these groups (the first 64 of them), the longest waiting first."""
    gate = asyncio.Semaphore(_CONCURRENCY)

    async def ask(group: int) -> list[Waiting]:
        async with gate:
            return await _survey_group(client, run, group)

    found = await asyncio.gather(*(ask(group) for group in groups[:_MAX_GROUPS]))
    waiting = sorted((item for items in found for item in items), key=lambda item: item.since)
    return Survey(taken_at=time.time(), waiting=waiting[:_MAX_SHOWN], num_waiting=len(waiting))


async def _survey_group(client: Client, run: str, group: int) -> list[Waiting]:
    handle = client.get_workflow_handle(group_workflow_id(run, group))
    try:
        description = await handle.describe(rpc_timeout=_RPC_TIMEOUT)
    except RPCError:
        return []  # ended meanwhile, or Temporal is busy: a survey is best effort
    pending = description.raw_description.pending_activities
    return [await _describe(client, group, activity) for activity in pending]


async def _describe(client: Client, group: int, activity: PendingActivityInfo) -> Waiting:
    failure = activity.last_failure
    return Waiting(
        group=group,
        activity=activity.activity_id,
        stage=await _describe_stage(client, activity),
        attempt=activity.attempt,
        since=activity.scheduled_time.ToNanoseconds() / 1e9,
        last_heartbeat=(
            activity.last_heartbeat_time.ToNanoseconds() / 1e9 if activity.HasField("last_heartbeat_time") else None
        ),
        last_failure=failure.message[:300] if activity.HasField("last_failure") else "",
    )


async def _describe_stage(client: Client, activity: PendingActivityInfo) -> str:
    if activity.state == PendingActivityState.PENDING_ACTIVITY_STATE_SCHEDULED:
        return "no worker has taken it" if activity.attempt <= 1 else "waits to be tried again"
    if activity.HasField("heartbeat_details"):
        details = await client.data_converter.decode(activity.heartbeat_details.payloads)
        return str(details[0]) if details else "running"
    return "running"
