"""What a run waits for, by name: unfinished activities, and workflows that no worker goes on with, as Temporal knows.

No worker is asked, so this works when all of them are dead. Best effort: what does not answer in time is left out.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from datetime import timedelta

from google.protobuf.timestamp_pb2 import Timestamp
from temporalio.api.enums.v1 import PendingActivityState, PendingWorkflowTaskState
from temporalio.api.workflow.v1 import PendingActivityInfo
from temporalio.api.workflowservice.v1 import DescribeWorkflowExecutionResponse
from temporalio.client import Client
from temporalio.service import RPCError

from everroll.contracts import names
from everroll.contracts.health import Survey, Waiting

_RPC_TIMEOUT = timedelta(seconds=3)
_CONCURRENCY = 16
_MAX_GROUPS = 64
_MAX_SHOWN = 20
_ROUTINE_SECONDS = 5.0
"""A task that waits for a worker for less than this is nothing to speak of."""
_SILENT_SHARE = 0.6
"""Part of its heartbeat timeout after which an activity counts as silent: it heartbeats three times in each."""
_HIDDEN = (names.SURVEY_GROUPS, names.WATCH_ENGINES, names.AWAIT_GROUPS, names.AWAIT_EVALUATION)
"""The survey itself, the look at engines, which nothing waits for, and activities that only stand for a group or an
evaluation, which is surveyed itself."""


async def survey_run(client: Client, run: str, groups: Sequence[int]) -> Survey:
    """What the run itself, its evaluations and these groups (the first 64 of them) wait for."""
    gate = asyncio.Semaphore(_CONCURRENCY)

    async def ask(workflow_id: str, group: int | None = None) -> list[Waiting]:
        async with gate:
            return await _survey_workflow(client, workflow_id, group)

    async def ask_evaluation(workflow_id: str) -> list[Waiting]:
        which = workflow_id.partition("/eval/")[2]
        waiting = await ask(workflow_id)
        return [item.model_copy(update={"activity": f"evaluation {which} {item.activity}"}) for item in waiting]

    found = await asyncio.gather(
        ask(names.run_workflow_id(run)),
        *(ask_evaluation(workflow_id) for workflow_id in await _find_evaluations(client, run)),
        *(ask(names.group_workflow_id(run, group), group) for group in groups[:_MAX_GROUPS]),
    )
    waiting = sorted((item for items in found for item in items), key=lambda item: (not item.stuck, item.since))
    return Survey(taken_at=time.time(), waiting=waiting[:_MAX_SHOWN], num_waiting=len(waiting))


async def _find_evaluations(client: Client, run: str) -> list[str]:
    """Evaluations of a run that are under way, by Temporal's index."""
    query = f"{names.SEARCH_RUN} = '{run}' AND WorkflowType = '{names.EVALUATION}' AND ExecutionStatus = 'Running'"
    try:
        found = client.list_workflows(query, limit=_MAX_GROUPS, rpc_timeout=_RPC_TIMEOUT)
        return sorted([execution.id async for execution in found])
    except RPCError:
        return []


async def find_groups(client: Client, run: str) -> list[int]:
    """Groups of a run that are under way, by Temporal's index, which lags by a second or so."""
    query = f"{names.SEARCH_RUN} = '{run}' AND WorkflowType = '{names.ROLLOUT_GROUP}' AND ExecutionStatus = 'Running'"
    try:
        found = client.list_workflows(query, limit=_MAX_GROUPS, rpc_timeout=_RPC_TIMEOUT)
        return sorted([int(execution.id.rpartition("/")[2]) async for execution in found])
    except RPCError:
        return []


async def _survey_workflow(client: Client, workflow_id: str, group: int | None) -> list[Waiting]:
    try:
        description = await client.get_workflow_handle(workflow_id).describe(rpc_timeout=_RPC_TIMEOUT)
    except RPCError:
        return []  # ended meanwhile, or Temporal is busy
    response = description.raw_description
    pending = [activity for activity in response.pending_activities if activity.activity_type.name not in _HIDDEN]
    waiting = [await _describe_activity(client, group, activity) for activity in pending]
    return [*_describe_workflow_task(response, group), *waiting]


def _describe_workflow_task(response: DescribeWorkflowExecutionResponse, group: int | None) -> list[Waiting]:
    """The workflow's next task, when no worker takes it or its code fails."""
    if not response.HasField("pending_workflow_task"):
        return []
    task = response.pending_workflow_task
    since = _seconds(task.original_scheduled_time if task.HasField("original_scheduled_time") else task.scheduled_time)
    if time.time() - since < _ROUTINE_SECONDS:
        return []
    queue = response.execution_config.task_queue.name
    started = task.state == PendingWorkflowTaskState.PENDING_WORKFLOW_TASK_STATE_STARTED
    stage = "its code fails, see the workflow worker's log" if task.attempt > 1 else "a worker has it, and is slow"
    if not started and task.attempt <= 1:
        stage = f"no worker of {queue} has taken it"
    return [Waiting(group=group, activity="workflow task", stage=stage, attempt=task.attempt, since=since, stuck=True)]


async def _describe_activity(client: Client, group: int | None, activity: PendingActivityInfo) -> Waiting:
    since = _seconds(activity.scheduled_time)
    heartbeat = _seconds(activity.last_heartbeat_time) if activity.HasField("last_heartbeat_time") else None
    scheduled = activity.state == PendingActivityState.PENDING_ACTIVITY_STATE_SCHEDULED
    silent = 0.0 if scheduled else time.time() - max(heartbeat or 0.0, _seconds(activity.last_started_time))
    timeout = activity.activity_options.heartbeat_timeout.ToTimedelta().total_seconds()
    is_silent = timeout > 0 and silent > _SILENT_SHARE * timeout
    stage = _describe_unstarted(activity) if scheduled else await _describe_stage(client, activity)
    if is_silent:
        stage = f"{stage}; no heartbeat for {silent:.0f} s from {activity.last_worker_identity or 'its worker'}"
    return Waiting(
        group=group,
        activity=activity.activity_type.name if group is None else activity.activity_id,
        stage=stage,
        attempt=activity.attempt,
        since=since,
        last_heartbeat=heartbeat,
        last_failure=activity.last_failure.message[:300] if activity.HasField("last_failure") else "",
        stuck=(scheduled and time.time() - since > _ROUTINE_SECONDS) or is_silent or activity.attempt > 1,
    )


def _describe_unstarted(activity: PendingActivityInfo) -> str:
    if activity.attempt > 1:
        return "waits to be tried again"
    return f"no worker of {activity.activity_options.task_queue.name or 'its queue'} has taken it"


async def _describe_stage(client: Client, activity: PendingActivityInfo) -> str:
    if activity.HasField("heartbeat_details"):
        details = await client.data_converter.decode(activity.heartbeat_details.payloads)
        return str(details[0]) if details else "running"
    return "running"


def _seconds(moment: Timestamp) -> float:
    """Unix seconds."""
    return moment.ToNanoseconds() / 1e9
