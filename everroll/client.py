"""Start, inspect and steer runs through a Temporal client.

Workflows are started by name: this module imports none of them.
"""

from __future__ import annotations

import asyncio
import getpass
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import TypeVar

import temporalio.service
from pydantic import ValidationError
from temporalio.api.enums.v1 import IndexedValueType
from temporalio.api.operatorservice.v1 import AddSearchAttributesRequest, ListSearchAttributesRequest
from temporalio.client import (
    Client,
    WorkflowExecutionDescription,
    WorkflowExecutionStatus,
    WorkflowFailureError,
    WorkflowHandle,
)
from temporalio.common import SearchAttributeKey, WorkflowIDConflictPolicy, WorkflowIDReusePolicy
from temporalio.exceptions import ApplicationError, FailureError, WorkflowAlreadyStartedError
from temporalio.service import RPCError, RPCStatusCode

from everroll.contracts import names
from everroll.contracts.health import Survey
from everroll.contracts.spec import RunSpec
from everroll.contracts.steering import JsonValue, SetRequest, SkipRequest, SteeringRecord, SteerRequest
from everroll.contracts.training import (
    ForkOrigin,
    ResumeRequest,
    RunStatus,
    TrainingRunRequest,
    TrainingRunResult,
)
from everroll.partial_history import REFUSAL
from everroll.survey import find_groups, survey_run
from everroll.temporal import build_plugin

_R = TypeVar("_R", bound=SteerRequest)

_STEP_ATTRIBUTE = SearchAttributeKey.for_int(names.SEARCH_STEP)
_PHASE_ATTRIBUTE = SearchAttributeKey.for_keyword(names.SEARCH_PHASE)
_REWARD_ATTRIBUTE = SearchAttributeKey.for_float(names.SEARCH_REWARD)
SEARCH_ATTRIBUTES: tuple[SearchAttributeKey[str] | SearchAttributeKey[int] | SearchAttributeKey[float], ...] = (
    SearchAttributeKey.for_keyword(names.SEARCH_RUN),
    _STEP_ATTRIBUTE,
    _PHASE_ATTRIBUTE,
    _REWARD_ATTRIBUTE,
)
_INDEXED_TYPES = {
    names.SEARCH_RUN: IndexedValueType.INDEXED_VALUE_TYPE_KEYWORD,
    names.SEARCH_STEP: IndexedValueType.INDEXED_VALUE_TYPE_INT,
    names.SEARCH_PHASE: IndexedValueType.INDEXED_VALUE_TYPE_KEYWORD,
    names.SEARCH_REWARD: IndexedValueType.INDEXED_VALUE_TYPE_DOUBLE,
}
_RPC_TIMEOUT = timedelta(seconds=10)
_QUERY_TIMEOUT = timedelta(seconds=3)
_QUERY_ATTEMPTS = 3
"""When events come in just then."""
_SURVEY_SECONDS = 4.0
_STEER_TIMEOUT = timedelta(seconds=30)
_STATES = {
    WorkflowExecutionStatus.RUNNING: "running",
    WorkflowExecutionStatus.COMPLETED: "completed",
    WorkflowExecutionStatus.FAILED: "failed",
    WorkflowExecutionStatus.CANCELED: "canceled",
    WorkflowExecutionStatus.TERMINATED: "terminated",
    WorkflowExecutionStatus.CONTINUED_AS_NEW: "running",
    WorkflowExecutionStatus.TIMED_OUT: "timed_out",
}


class RunNotFoundError(LookupError):
    """There is no run of that name."""


class SteeringError(RuntimeError):
    """The run refused what was asked of it; the text says why."""


class RunExistsError(RuntimeError):
    """A run of that name exists already."""


class RunFailedError(RuntimeError):
    """The run ended without completing; the text names the failure."""


@dataclass(frozen=True)
class IndexedStatus:
    """A run's search attributes; each is None until the run has set it."""

    step: int | None
    phase: str | None
    reward: float | None


@dataclass(frozen=True)
class RunView:
    """A run as seen from outside."""

    run: str
    workflow_id: str
    run_id: str
    namespace: str
    state: str
    """`running`, `completed`, `failed`, `canceled`, `terminated` or `timed_out`."""
    started_at: datetime
    """Of the run's first generation."""
    closed_at: datetime | None
    status: RunStatus | None
    """None when no worker answered the query in time; `status_error` says why."""
    status_error: str | None = None
    failure: str | None = None
    """Why it ended, from the outermost failure to the cause."""
    indexed: IndexedStatus | None = None
    """Where it stands by Temporal's own record, which needs no worker."""
    result: TrainingRunResult | None = None
    """Of a run that has completed, when no worker answered."""
    survey: Survey | None = None
    """What a running run waits for at this moment; taken when asked for."""

    def url(self, ui_base: str) -> str:
        """Address of the run's page in the Temporal web UI, which shows the latest generation."""
        workflow_id = self.workflow_id.replace("/", "%2F")
        return f"{ui_base.rstrip('/')}/namespaces/{self.namespace}/workflows/{workflow_id}"


@dataclass(frozen=True)
class RunListing:
    """One line of a list of runs."""

    run: str
    state: str
    started_at: datetime


class EverrollClient:
    """Runs in one Temporal namespace."""

    def __init__(self, temporal: Client) -> None:
        self.temporal = temporal

    @classmethod
    async def connect(cls, address: str, namespace: str, wait_seconds: float = 10.0) -> EverrollClient:
        """Connect, trying again for `wait_seconds`.

        Raises:
            ConnectionError: no Temporal server there.
        """
        deadline = asyncio.get_running_loop().time() + wait_seconds
        while True:
            try:
                return cls(await Client.connect(address, namespace=namespace, plugins=[build_plugin()]))
            except RuntimeError as error:
                if asyncio.get_running_loop().time() >= deadline:
                    raise ConnectionError(
                        f"no Temporal server answers at {address}: {_describe_connect_error(error)}"
                    ) from error
            await asyncio.sleep(0.2)

    async def register_search_attributes(self) -> None:
        """Register Everroll's search attributes in the namespace; those that exist are left alone."""
        service = self.temporal.operator_service
        namespace = self.temporal.namespace
        known = await service.list_search_attributes(
            ListSearchAttributesRequest(namespace=namespace), timeout=_RPC_TIMEOUT
        )
        missing = {name: kind for name, kind in _INDEXED_TYPES.items() if name not in known.custom_attributes}
        if not missing:
            return
        await service.add_search_attributes(
            AddSearchAttributesRequest(namespace=namespace, search_attributes=missing), timeout=_RPC_TIMEOUT
        )

    async def start(self, spec: RunSpec) -> None:
        """Start a run.

        Raises:
            RunExistsError: the name has been used.
        """
        try:
            await self._begin(spec, TrainingRunRequest(spec=spec), WorkflowIDReusePolicy.REJECT_DUPLICATE)
        except WorkflowAlreadyStartedError as error:
            raise RunExistsError(f"a run named {spec.run.name!r} exists already; choose another run.name") from error

    async def status(self, run: str, query_timeout: timedelta = _QUERY_TIMEOUT, *, survey: bool = False) -> RunView:
        """Describe a run, within about five seconds; its own account is asked of a worker and may be missing.

        `survey`: also find out what it waits for. Temporal tells, so that this works without any worker.

        Raises:
            RunNotFoundError: no such run.
            ConnectionError: Temporal does not answer.
        """
        handle = self._handle(run)
        description = await self._describe(handle, run)
        state = _STATES[description.status] if description.status else "running"
        (status, status_error), waiting, started_at = await asyncio.gather(
            self._query_status(handle, description, query_timeout),
            self._take_survey(run) if survey and state == "running" else _nothing(),
            self._find_start(description),
        )
        result, failure = (None, None) if state == "running" else await self._read_result(handle)
        return RunView(
            run=run,
            workflow_id=description.id,
            run_id=description.run_id,
            namespace=self.temporal.namespace,
            state=state,
            started_at=started_at,
            closed_at=description.close_time,
            status=status,
            status_error=status_error,
            failure=failure,
            indexed=_read_indexed(description),
            result=None if status else result,
            survey=waiting,
        )

    async def stop(self, run: str, reason: str = "") -> None:
        """Ask a run to stop after the step it is in.

        Raises:
            RunNotFoundError: no such run, or it has ended.
            SteeringError: it is asked to already.
        """
        await self._steer(run, names.UPDATE_STOP, _build_request(SteerRequest, reason))

    async def pause(self, run: str, reason: str = "") -> None:
        """Start no new group and no new episode until `resume`.

        Raises:
            RunNotFoundError: no such run, or it has ended.
            SteeringError: it is paused already.
        """
        await self._steer(run, names.UPDATE_PAUSE, _build_request(SteerRequest, reason))

    async def resume(self, run: str, reason: str = "") -> None:
        """Go on after a pause, whoever began it. `resume_ended` is for a run that has ended.

        Raises:
            RunNotFoundError: no such run, or it has ended.
            SteeringError: it is not paused.
        """
        await self._steer(run, names.UPDATE_RESUME, _build_request(SteerRequest, reason))

    async def set_values(self, run: str, values: Mapping[str, JsonValue], reason: str = "") -> SteeringRecord:
        """Change settings of a running run, by their keys in the run file; docs/steering.md says from when they count.

        Raises:
            RunNotFoundError: no such run, or it has ended.
            SteeringError: a key cannot change, a value is not valid, or all are in force already; all faults at once.
        """
        request = _build_request(SetRequest, reason, values=dict(values))
        return SteeringRecord.model_validate(await self._steer(run, names.UPDATE_SET, request))

    async def skip(self, run: str, group: int, reason: str = "") -> None:
        """Drop a group that is in flight or ready.

        Raises:
            RunNotFoundError: no such run, or it has ended.
            SteeringError: the group has not started, is being trained, or is settled.
        """
        await self._steer(run, names.UPDATE_SKIP, _build_request(SkipRequest, reason, group=group))

    async def _steer(self, run: str, update: str, request: SteerRequest) -> object:
        try:
            return await self._handle(run).execute_update(update, request, rpc_timeout=_STEER_TIMEOUT)
        except temporalio.client.WorkflowUpdateFailedError as error:
            text = error.cause.message if isinstance(error.cause, FailureError) else str(error.cause)
            raise SteeringError(f"run {run}: {text}") from error
        except RPCError as error:
            raise _translate(error, run) from error

    async def cancel(self, run: str, reason: str = "") -> None:
        """Cancel a run at once; its groups in flight are cancelled with it.

        Raises:
            RunNotFoundError: no such run.
        """
        text = f"by {name_person()}" + (f": {reason}" if reason else "")
        try:
            await self._handle(run).cancel(reason=text, rpc_timeout=_RPC_TIMEOUT)
        except RPCError as error:
            raise _translate(error, run) from error

    async def find_state(self, run: str) -> str | None:
        """`running`, or how it ended; None when Temporal does not know the run.

        Raises:
            ConnectionError: Temporal does not answer.
        """
        try:
            description = await self._describe(self._handle(run), run)
        except RunNotFoundError:
            return None
        return _STATES[description.status] if description.status else "running"

    async def was_stopped(self, run: str) -> bool:
        """Whether a run that has completed was asked to stop before its last step."""
        result, _ = await self._read_result(self._handle(run))
        return result is not None and result.stopped

    async def read_start(self, run: str) -> TrainingRunRequest:
        """What the newest execution of a run was started with.

        Raises:
            RunNotFoundError: Temporal does not know the run.
        """
        try:
            async for event in self._handle(run).fetch_history_events(page_size=1, rpc_timeout=_RPC_TIMEOUT):
                payloads = event.workflow_execution_started_event_attributes.input.payloads
                values = await self.temporal.data_converter.decode(payloads, [TrainingRunRequest])
                return TrainingRunRequest.model_validate(values[0])
        except RPCError as error:
            raise _translate(error, run) from error
        raise RunNotFoundError(f"run {run!r} has no history")

    async def resume_ended(self, spec: RunSpec, resume: ResumeRequest) -> None:
        """Go on with a run that has ended, from what lies in its directory: nothing that is settled runs again.

        Works with a Temporal server that has never heard of it. `spec` says where the directory is
        (`run.output_dir`/`run.name`); its settings count with `resume.from_file` only.

        Raises:
            SteeringError: it is running.
        """
        try:
            await self._begin(spec, TrainingRunRequest(spec=spec, resume=resume), WorkflowIDReusePolicy.ALLOW_DUPLICATE)
        except WorkflowAlreadyStartedError as error:
            raise SteeringError(f"run {spec.run.name} is running; there is nothing to resume") from error

    async def fork(self, spec: RunSpec, origin: ForkOrigin, resume: ResumeRequest) -> None:
        """Start a run from a step of another. `spec.run` names it and says where its directory will be; the other
        settings count with `resume.from_file` only, else they are the other run's.

        Raises:
            RunExistsError: the name has been used.
        """
        request = TrainingRunRequest(spec=spec, resume=resume, fork=origin)
        try:
            await self._begin(spec, request, WorkflowIDReusePolicy.REJECT_DUPLICATE)
        except WorkflowAlreadyStartedError as error:
            raise RunExistsError(f"a run named {spec.run.name!r} exists already; choose another --name") from error

    async def _begin(self, spec: RunSpec, request: TrainingRunRequest, reuse: WorkflowIDReusePolicy) -> None:
        await self.temporal.start_workflow(
            names.TRAINING_RUN,
            request,
            id=names.run_workflow_id(spec.run.name),
            task_queue=spec.services.task_queue,
            id_reuse_policy=reuse,
            id_conflict_policy=WorkflowIDConflictPolicy.FAIL,
            static_summary=_summarize(request),
            rpc_timeout=_RPC_TIMEOUT,
        )

    async def result(self, run: str) -> TrainingRunResult:
        """Wait until a run has ended.

        Raises:
            RunFailedError: it failed, was cancelled or terminated.
            RunNotFoundError: no such run.
        """
        try:
            return await self._handle(run).result()
        except WorkflowFailureError as error:
            raise RunFailedError(describe_failure(error.cause)) from error
        except RPCError as error:
            raise _translate(error, run) from error

    async def find_runs(self, limit: int = 50) -> list[RunListing]:
        """The latest runs, newest first; of one that was resumed, what became of it last.

        Raises:
            ConnectionError: Temporal does not answer.
        """
        query = f"WorkflowType = '{names.TRAINING_RUN}' AND ExecutionStatus != 'ContinuedAsNew'"
        found: dict[str, RunListing] = {}
        try:
            async for execution in self.temporal.list_workflows(query, limit=limit, rpc_timeout=_RPC_TIMEOUT):
                state = _STATES[execution.status] if execution.status else "running"
                listing = RunListing(execution.id.removeprefix("everroll/"), state, execution.start_time)
                known = found.get(listing.run)
                if known is None or known.started_at < listing.started_at:
                    found[listing.run] = listing
        except RPCError as error:
            raise _translate(error, "") from error
        return sorted(found.values(), key=lambda listing: listing.started_at, reverse=True)

    def _handle(self, run: str) -> WorkflowHandle[object, TrainingRunResult]:
        return self.temporal.get_workflow_handle(names.run_workflow_id(run), result_type=TrainingRunResult)

    async def _describe(
        self, handle: WorkflowHandle[object, TrainingRunResult], run: str
    ) -> WorkflowExecutionDescription:
        try:
            return await handle.describe(rpc_timeout=_RPC_TIMEOUT)
        except RPCError as error:
            raise _translate(error, run) from error

    async def _query_status(
        self,
        handle: WorkflowHandle[object, TrainingRunResult],
        description: WorkflowExecutionDescription,
        timeout: timedelta,
        attempt: int = 1,
    ) -> tuple[RunStatus | None, str | None]:
        try:
            return await handle.query(names.QUERY_STATUS, result_type=RunStatus, rpc_timeout=timeout), None
        except RPCError:
            queue = description.task_queue
            return (
                None,
                f"no workflow worker of task queue {queue} answers; is one running? (python -m worker workflows)",
            )
        except temporalio.client.WorkflowQueryFailedError as error:
            if REFUSAL in str(error) and attempt < _QUERY_ATTEMPTS:
                return await self._query_status(handle, description, timeout, attempt + 1)
            return None, f"the run does not know its status yet: {error}"

    async def _take_survey(self, run: str) -> Survey | None:
        """Best effort."""
        try:
            async with asyncio.timeout(_SURVEY_SECONDS):
                return await survey_run(self.temporal, run, await find_groups(self.temporal, run))
        except TimeoutError:
            return None

    async def _find_start(self, description: WorkflowExecutionDescription) -> datetime:
        """When the first generation started; its record may be gone by the namespace's retention."""
        first = description.raw_description.workflow_execution_info.first_run_id
        if first in ("", description.run_id):
            return description.start_time
        try:
            handle = self.temporal.get_workflow_handle(description.id, run_id=first)
            return (await handle.describe(rpc_timeout=_QUERY_TIMEOUT)).start_time
        except RPCError:
            return description.start_time

    async def _read_result(
        self, handle: WorkflowHandle[object, TrainingRunResult]
    ) -> tuple[TrainingRunResult | None, str | None]:
        """Of a run that has ended: its result, or why it has none."""
        try:
            return await handle.result(rpc_timeout=_RPC_TIMEOUT), None
        except WorkflowFailureError as error:
            return None, describe_failure(error.cause)
        except RPCError as error:
            return None, f"Temporal did not say how it ended: {error.message}"


def _read_indexed(description: WorkflowExecutionDescription) -> IndexedStatus:
    attributes = description.typed_search_attributes
    return IndexedStatus(
        step=attributes.get(_STEP_ATTRIBUTE),
        phase=attributes.get(_PHASE_ATTRIBUTE),
        reward=attributes.get(_REWARD_ATTRIBUTE),
    )


def name_person() -> str:
    """Who steers, as far as this machine knows."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        user = "unknown"
    return f"{user}@{socket.gethostname()}"[:300]


def _build_request(kind: type[_R], reason: str, **values: object) -> _R:
    """
    Raises:
        SteeringError: the reason is too long, or no single line.
    """
    try:
        return kind.model_validate({"reason": reason, "by": name_person(), **values})
    except ValidationError as error:
        faults = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors(include_url=False))
        raise SteeringError(f"cannot be asked: {faults}") from error


def build_resume(reason: str, changes: Mapping[str, JsonValue], *, from_file: bool) -> ResumeRequest:
    """How a run goes on: asked for by whoever sits here.

    Raises:
        SteeringError: the reason is too long, or no single line.
    """
    request = _build_request(SteerRequest, reason)
    return ResumeRequest(from_file=from_file, changes=dict(changes), by=request.by, reason=request.reason)


def _summarize(request: TrainingRunRequest) -> str:
    """In the web UI's list."""
    run, rollout, origin = request.spec.run, request.spec.rollout, request.fork
    if origin is not None:
        return f"forked from {origin.run} at step {origin.step}"
    how = "resumed: " if request.resume is not None else ""
    return f"{how}{run.num_steps} steps of {rollout.groups_per_step} groups x {rollout.episodes_per_group} episodes"


async def _nothing() -> None:
    """In place of a survey that is not asked for."""


def describe_failure(error: BaseException | None) -> str:
    """One line a level, from the outermost failure to the cause."""
    lines = []
    while error is not None:
        name = error.type if isinstance(error, ApplicationError) and error.type else type(error).__name__
        text = error.message if isinstance(error, FailureError) else str(error)
        lines.append(f"{name}: {text}")
        error = error.cause if isinstance(error, FailureError) else error.__cause__
    return "\n".join(lines)


def _translate(error: RPCError, run: str) -> Exception:
    if error.status == RPCStatusCode.NOT_FOUND and "namespace" in error.message.lower():
        return ConnectionError(f"the Temporal server has no such namespace: {error.message}")
    if error.status == RPCStatusCode.NOT_FOUND:
        return RunNotFoundError(f"no run named {run!r} is running; everroll list shows which there are")
    return ConnectionError(f"Temporal did not answer: {error.message}")


def _describe_connect_error(error: RuntimeError) -> str:
    """The reason among the many words of the SDK's core."""
    text = str(error)
    known = {
        "onnection refused": "the connection was refused",
        "dns error": "its name cannot be resolved",
        "invalid": "the address is not valid; write HOST:PORT",
        "imed out": "it did not answer in time",
    }
    return next((words for part, words in known.items() if part in text), text.splitlines()[0][:200])
