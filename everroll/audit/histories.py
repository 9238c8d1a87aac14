"""Temporal's histories as evidence: one `RunHistory` over all generations of a run, one `GroupHistory` per group."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Any, TypeVar

from pydantic import ValidationError
from temporalio.api.enums.v1 import EventType
from temporalio.api.history.v1 import HistoryEvent
from temporalio.client import Client
from temporalio.service import RPCError, RPCStatusCode

from everroll.audit.evidence import (
    BatchRead,
    Changed,
    Dispensed,
    EpisodeHistory,
    Generation,
    GroupHistory,
    Planned,
    Published,
    Recorded,
    RunEvent,
    RunHistory,
    Settled,
    Skipped,
    StepCompleted,
    StepScheduled,
)
from everroll.audit.report import AuditInputError, HistoryGoneError
from everroll.contracts import names
from everroll.contracts.base import Payload
from everroll.contracts.batches import ReadBatchRequest, StoredBatch
from everroll.contracts.curriculum import PlanRequest, PlanResult
from everroll.contracts.outcomes import CauseKind
from everroll.contracts.rollout import (
    AwaitGroupsResult,
    BlobRef,
    CollectRequest,
    CollectResult,
    DatasetRef,
    EpisodeReport,
    EpisodeRequest,
    GroupRequest,
    GroupResult,
    StoreGroupRequest,
)
from everroll.contracts.spec import RunSpec
from everroll.contracts.steering import SetRequest, SkipRequest, SteeringRecord, apply_changes
from everroll.contracts.training import (
    PrepareRunResult,
    PublishResult,
    RecordRunRequest,
    TrainingRunRequest,
    TrainingRunResult,
    TrainRequest,
    TrainResult,
)

_RPC_TIMEOUT = timedelta(seconds=30)
_P = TypeVar("_P", bound=Payload)

_RUN_STATES = {
    EventType.EVENT_TYPE_WORKFLOW_EXECUTION_COMPLETED: "completed",
    EventType.EVENT_TYPE_WORKFLOW_EXECUTION_FAILED: "failed",
    EventType.EVENT_TYPE_WORKFLOW_EXECUTION_CANCELED: "canceled",
    EventType.EVENT_TYPE_WORKFLOW_EXECUTION_TERMINATED: "terminated",
    EventType.EVENT_TYPE_WORKFLOW_EXECUTION_TIMED_OUT: "timed_out",
}
_CHILD_ENDINGS = {
    EventType.EVENT_TYPE_CHILD_WORKFLOW_EXECUTION_FAILED: "failed",
    EventType.EVENT_TYPE_CHILD_WORKFLOW_EXECUTION_CANCELED: "canceled",
    EventType.EVENT_TYPE_CHILD_WORKFLOW_EXECUTION_TERMINATED: "terminated",
    EventType.EVENT_TYPE_CHILD_WORKFLOW_EXECUTION_TIMED_OUT: "timed_out",
}


class HistoryReader:
    """Reads one run's histories, page by page."""

    def __init__(self, temporal: Client, run: str) -> None:
        self._temporal = temporal
        self._run = run

    async def read_run(self) -> RunHistory:
        """As far back as Temporal holds it.

        Raises:
            AuditInputError: no such run.
        """
        run_ids, is_cut = await self._find_generations()
        generations = []
        spec = dataset = None
        reader = _RunReader(self._decode)
        for run_id in run_ids:
            reader = _RunReader(self._decode)
            async for event in self._events(names.run_workflow_id(self._run), run_id):
                await reader.take(event)
            request = reader.request
            if request is None:
                raise AuditInputError(f"run {self._run}: the history of {run_id} has no beginning")
            spec = spec or request.spec
            dataset = dataset or reader.dataset or (request.state.dataset if request.state else None)
            generations.append(reader.build_generation(run_id, request))
        if spec is None:
            raise AuditInputError(f"run {self._run} has no history")
        return RunHistory(
            spec=spec,
            dataset=dataset,
            generations=generations,
            state=reader.state,
            stopped=reader.stopped,
            num_surplus=reader.num_surplus,
            result=reader.result,
            is_cut=is_cut,
        )

    async def read_start(self) -> TrainingRunRequest:
        """What the newest execution was started with.

        Raises:
            AuditInputError: no such run.
        """
        run_id = await self._find_latest()
        async with contextlib.aclosing(self._events(names.run_workflow_id(self._run), run_id)) as events:
            first = await anext(events)
        return await self._decode(first.workflow_execution_started_event_attributes.input, TrainingRunRequest)

    async def read_group(self, group: int) -> GroupHistory:
        """
        Raises:
            HistoryGoneError: Temporal does not hold its history.
        """
        reader = _GroupReader(self._decode)
        for events in await self._read_executions(names.group_workflow_id(self._run, group)):
            for event in events:
                await reader.take(event)
        if reader.request is None:
            raise AuditInputError(f"run {self._run}: the history of group {group} has no beginning")
        return GroupHistory(
            request=reader.request,
            episodes=reader.episodes,
            stored=reader.stored,
            manifest=reader.manifest,
            result=reader.result,
        )

    async def _find_generations(self) -> tuple[list[str], bool]:
        """Temporal's ids of the run's executions, oldest first; a reset run counts as the generation it repeats.

        And whether there were earlier ones that it does not hold any more.
        """
        run_ids: list[str] = []
        run_id = await self._find_latest()
        while run_id:
            try:
                async with contextlib.aclosing(self._events(names.run_workflow_id(self._run), run_id)) as events:
                    first = await anext(events)
            except HistoryGoneError:
                if not run_ids:
                    raise
                return run_ids[::-1], True
            run_ids.append(run_id)
            started = first.workflow_execution_started_event_attributes
            run_id = started.continued_execution_run_id
            if not run_id:
                request = await self._decode(started.input, TrainingRunRequest)
                if request.resume is not None and request.fork is None:
                    run_id = await self._find_before(first.event_time.ToDatetime(UTC), run_ids)
        return run_ids[::-1], False

    async def _find_before(self, moment: datetime, seen: list[str]) -> str:
        """The last execution of the run that began before it was resumed; none where that was on another server.

        One that was seen is no other, however the server rounds the times of its index.
        """
        query = f"WorkflowId = '{names.run_workflow_id(self._run)}'"
        try:
            found = [one async for one in self._temporal.list_workflows(query, rpc_timeout=_RPC_TIMEOUT)]
        except RPCError as error:
            raise ConnectionError(f"Temporal did not answer: {error.message}") from error
        earlier = [one for one in found if one.start_time < moment and one.run_id not in seen]
        return max(earlier, key=lambda one: one.start_time).run_id if earlier else ""

    async def _read_executions(self, workflow_id: str) -> list[list[HistoryEvent]]:
        """All executions of a workflow that is small, oldest first: usually there is one."""
        executions = []
        run_id: str | None = None
        while run_id != "":
            events = [event async for event in self._events(workflow_id, run_id)]
            executions.append(events)
            run_id = events[0].workflow_execution_started_event_attributes.continued_execution_run_id
        return executions[::-1]

    async def _find_latest(self) -> str:
        try:
            handle = self._temporal.get_workflow_handle(names.run_workflow_id(self._run))
            return (await handle.describe(rpc_timeout=_RPC_TIMEOUT)).run_id
        except RPCError as error:
            if error.status != RPCStatusCode.NOT_FOUND:
                raise ConnectionError(f"Temporal did not answer: {error.message}") from error
            text = f"no run named {self._run!r} in this Temporal namespace; everroll list shows which there are"
            raise AuditInputError(text) from error

    async def _events(self, workflow_id: str, run_id: str | None) -> AsyncGenerator[HistoryEvent]:
        handle = self._temporal.get_workflow_handle(workflow_id, run_id=run_id)
        try:
            async for event in handle.fetch_history_events(rpc_timeout=_RPC_TIMEOUT):
                yield event
        except RPCError as error:
            if error.status in (RPCStatusCode.NOT_FOUND, RPCStatusCode.INVALID_ARGUMENT):
                raise HistoryGoneError(self._describe_missing(workflow_id, run_id)) from error
            raise ConnectionError(f"Temporal did not answer: {error.message}") from error

    def _describe_missing(self, workflow_id: str, run_id: str | None) -> str:
        which = f"{workflow_id} (execution {run_id})" if run_id else workflow_id
        return (
            f"Temporal holds no history of {which} any more: the namespace's retention has passed, or somebody deleted "
            "it; lengthen the retention, or audit before it has passed"
        )

    async def _decode(self, payloads: Any, model: type[_P]) -> _P:
        try:
            values = await self._temporal.data_converter.decode(payloads.payloads, [model])
            return model.model_validate(values[0])
        except (ValidationError, RuntimeError, IndexError) as error:
            raise AuditInputError(f"run {self._run}: an event holds no {model.__name__}: {error}") from error


def is_restoring(request: TrainingRunRequest) -> bool:
    """Whether an execution only reads the run directory, and goes on as another."""
    return request.resume is not None or request.fork is not None


@dataclass
class _RunReader:
    """Takes the events of one generation."""

    decode: Any
    request: TrainingRunRequest | None = None
    dataset: DatasetRef | None = None
    events: list[RunEvent] = field(default_factory=list)
    steerings: list[SteeringRecord] = field(default_factory=list)
    steerings_under_way: list[SteeringRecord] = field(default_factory=list)
    state: str = "running"
    stopped: bool = False
    num_surplus: int = 0
    result: TrainingRunResult | None = None
    _spec: RunSpec | None = None
    """As changed since the generation began."""
    _num_tasks: int = 0
    """Workflow tasks completed."""
    _children: dict[int, int] = field(default_factory=dict)
    """Event of the start to group."""
    _scheduled: dict[int, tuple[str, Payload | None]] = field(default_factory=dict)
    """Event of the schedule to activity name and decoded input, of those that are needed."""

    def build_generation(self, run_id: str, request: TrainingRunRequest) -> Generation:
        return Generation(
            run_id=run_id,
            start=request.state,
            events=self.events,
            num_tasks=self._num_tasks,
            spec=request.spec,
            steerings=self.steerings,
            steerings_under_way=self.steerings_under_way,
            restores=is_restoring(request),
            fork=request.fork,
        )

    async def take(self, event: HistoryEvent) -> None:
        kind = event.event_type
        if kind == EventType.EVENT_TYPE_WORKFLOW_EXECUTION_STARTED:
            attributes = event.workflow_execution_started_event_attributes
            self.request = await self.decode(attributes.input, TrainingRunRequest)
        elif kind == EventType.EVENT_TYPE_START_CHILD_WORKFLOW_EXECUTION_INITIATED:
            await self._take_initiated(event)
        elif kind == EventType.EVENT_TYPE_CHILD_WORKFLOW_EXECUTION_COMPLETED:
            completed = event.child_workflow_execution_completed_event_attributes
            group = self._children.get(completed.initiated_event_id)
            if group is not None:
                result = await self.decode(completed.result, GroupResult)
                self.events.append(Settled(group, result, task=self._num_tasks))
        elif kind == EventType.EVENT_TYPE_WORKFLOW_EXECUTION_UPDATE_ACCEPTED:
            await self._take_update(event)
        elif kind == EventType.EVENT_TYPE_WORKFLOW_TASK_COMPLETED:
            self._num_tasks += 1
        elif kind in _CHILD_ENDINGS:
            self._take_ending(event)
        elif kind == EventType.EVENT_TYPE_ACTIVITY_TASK_SCHEDULED:
            await self._take_scheduled(event)
        elif kind == EventType.EVENT_TYPE_ACTIVITY_TASK_COMPLETED:
            await self._take_completed(event)
        elif kind in _RUN_STATES:
            self.state = _RUN_STATES[kind]
            if kind == EventType.EVENT_TYPE_WORKFLOW_EXECUTION_COMPLETED:
                payloads = event.workflow_execution_completed_event_attributes.result
                self.result = await self.decode(payloads, TrainingRunResult)
                self.stopped = self.result.stopped
                self.num_surplus = self.result.dropped_groups.get(CauseKind.SURPLUS.value, 0)

    async def _take_update(self, event: HistoryEvent) -> None:
        asked = event.workflow_execution_update_accepted_event_attributes.accepted_request.input
        if asked.name == names.UPDATE_SET and self.request is not None:
            self._spec, _ = apply_changes(
                self._spec or self.request.spec, (await self.decode(asked.args, SetRequest)).values
            )
            self.events.append(Changed(self._spec, self._num_tasks))
        elif asked.name == names.UPDATE_SKIP:
            self.events.append(Skipped((await self.decode(asked.args, SkipRequest)).group))

    async def _take_initiated(self, event: HistoryEvent) -> None:
        initiated = event.start_child_workflow_execution_initiated_event_attributes
        if initiated.workflow_type.name == names.ROLLOUT_GROUP:
            request = await self.decode(initiated.input, GroupRequest)
            self._children[event.event_id] = request.group
            self.events.append(Dispensed(request, self._num_tasks))

    def _take_ending(self, event: HistoryEvent) -> None:
        attributes = (
            event.child_workflow_execution_failed_event_attributes,
            event.child_workflow_execution_canceled_event_attributes,
            event.child_workflow_execution_terminated_event_attributes,
            event.child_workflow_execution_timed_out_event_attributes,
        )
        initiated = next(one.initiated_event_id for one in attributes if one.initiated_event_id)
        group = self._children.get(initiated)
        if group is not None:
            self.events.append(Settled(group, None, _CHILD_ENDINGS[event.event_type], self._num_tasks))

    async def _take_scheduled(self, event: HistoryEvent) -> None:
        attributes = event.activity_task_scheduled_event_attributes
        name = attributes.activity_type.name
        request: Payload | None = None
        if name in (names.TRAIN_STEP, names.RECORD_BATCH):
            step = await self.decode(attributes.input, TrainRequest)
            self.events.append(StepScheduled(step, self._num_tasks))
            request = step
        elif name == names.READ_BATCH:
            request = await self.decode(attributes.input, ReadBatchRequest)
        elif name == names.PLAN_BLOCK:
            request = await self.decode(attributes.input, PlanRequest)
        elif name == names.RECORD_RUN:
            written = await self.decode(attributes.input, RecordRunRequest)
            self.steerings_under_way += written.steerings
            request = written
        self._scheduled[event.event_id] = (name, request)

    async def _take_completed(self, event: HistoryEvent) -> None:
        attributes = event.activity_task_completed_event_attributes
        name, request = self._scheduled.pop(attributes.scheduled_event_id)
        if name in (names.TRAIN_STEP, names.RECORD_BATCH) and isinstance(request, TrainRequest):
            self.events.append(StepCompleted(request.step, await self.decode(attributes.result, TrainResult)))
        elif name == names.READ_BATCH and isinstance(request, ReadBatchRequest):
            self.events.append(BatchRead(request.step, await self.decode(attributes.result, StoredBatch)))
        elif name == names.AWAIT_GROUPS:
            awaited = await self.decode(attributes.result, AwaitGroupsResult)
            self.events += [Settled(result.group, result, task=self._num_tasks) for result in awaited.results]
        elif name == names.PLAN_BLOCK and isinstance(request, PlanRequest):
            plan = await self.decode(attributes.result, PlanResult)
            self.events.append(Planned(request.first_group, plan.prompts))
        elif name == names.RECORD_RUN and isinstance(request, RecordRunRequest):
            self.steerings += request.steerings
            if request.spec is not None:
                self.events.append(Recorded(request.spec))
        elif name == names.PUBLISH_WEIGHTS:
            self.events.append(Published((await self.decode(attributes.result, PublishResult)).version))
        elif name == names.PREPARE_RUN:
            self.dataset = (await self.decode(attributes.result, PrepareRunResult)).dataset


@dataclass
class _GroupReader:
    """Takes the events of one group, execution after execution."""

    decode: Any
    request: GroupRequest | None = None
    episodes: dict[str, EpisodeHistory] = field(default_factory=dict)
    stored: StoreGroupRequest | None = None
    manifest: BlobRef | None = None
    result: GroupResult | None = None
    _scheduled: dict[int, tuple[str, str]] = field(default_factory=dict)
    """Event of the schedule to activity name and session id."""

    async def take(self, event: HistoryEvent) -> None:
        kind = event.event_type
        if kind == EventType.EVENT_TYPE_WORKFLOW_EXECUTION_STARTED:
            self._scheduled.clear()
            request = await self.decode(event.workflow_execution_started_event_attributes.input, GroupRequest)
            self.request = self.request or request
        elif kind == EventType.EVENT_TYPE_ACTIVITY_TASK_SCHEDULED:
            await self._take_scheduled(event)
        elif kind == EventType.EVENT_TYPE_ACTIVITY_TASK_COMPLETED:
            await self._take_completed(event)
        elif kind == EventType.EVENT_TYPE_WORKFLOW_EXECUTION_COMPLETED:
            payloads = event.workflow_execution_completed_event_attributes.result
            self.result = await self.decode(payloads, GroupResult)

    async def _take_scheduled(self, event: HistoryEvent) -> None:
        attributes = event.activity_task_scheduled_event_attributes
        name, session_id = attributes.activity_type.name, ""
        if name == names.RUN_EPISODE:
            episode = await self.decode(attributes.input, EpisodeRequest)
            session_id = episode.key.session_id
            self.episodes[session_id] = EpisodeHistory(request=episode)
        elif name == names.COLLECT_SAMPLES:
            collect = await self.decode(attributes.input, CollectRequest)
            session_id = collect.key.session_id
            self.episodes[session_id] = replace(self.episodes[session_id], collect=collect)
        elif name == names.STORE_GROUP:
            self.stored = await self.decode(attributes.input, StoreGroupRequest)
        self._scheduled[event.event_id] = (name, session_id)

    async def _take_completed(self, event: HistoryEvent) -> None:
        attributes = event.activity_task_completed_event_attributes
        name, session_id = self._scheduled.pop(attributes.scheduled_event_id)
        if name == names.RUN_EPISODE:
            report = await self.decode(attributes.result, EpisodeReport)
            self.episodes[session_id] = replace(self.episodes[session_id], report=report)
        elif name == names.COLLECT_SAMPLES:
            collected = await self.decode(attributes.result, CollectResult)
            self.episodes[session_id] = replace(self.episodes[session_id], collected=collected)
        elif name == names.STORE_GROUP:
            self.manifest = await self.decode(attributes.result, BlobRef)
