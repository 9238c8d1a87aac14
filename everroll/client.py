"""Start, inspect and steer runs through a Temporal client.

Workflows are started by name: this module imports none of them.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from datetime import datetime, timedelta

import temporalio.service
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
from everroll.contracts.health import SteerRequest
from everroll.contracts.spec import RunSpec
from everroll.contracts.training import RunStatus, TrainingRunRequest, TrainingRunResult
from everroll.temporal import build_plugin

SEARCH_ATTRIBUTES: tuple[SearchAttributeKey[str] | SearchAttributeKey[int] | SearchAttributeKey[float], ...] = (
    SearchAttributeKey.for_keyword(names.SEARCH_RUN),
    SearchAttributeKey.for_int(names.SEARCH_STEP),
    SearchAttributeKey.for_keyword(names.SEARCH_PHASE),
    SearchAttributeKey.for_float(names.SEARCH_REWARD),
)
_INDEXED_TYPES = {
    names.SEARCH_RUN: IndexedValueType.INDEXED_VALUE_TYPE_KEYWORD,
    names.SEARCH_STEP: IndexedValueType.INDEXED_VALUE_TYPE_INT,
    names.SEARCH_PHASE: IndexedValueType.INDEXED_VALUE_TYPE_KEYWORD,
    names.SEARCH_REWARD: IndexedValueType.INDEXED_VALUE_TYPE_DOUBLE,
}
_RPC_TIMEOUT = timedelta(seconds=10)
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
class RunView:
    """A run as seen from outside."""

    run: str
    workflow_id: str
    run_id: str
    namespace: str
    state: str
    """`running`, `completed`, `failed`, `canceled`, `terminated` or `timed_out`."""
    started_at: datetime
    closed_at: datetime | None
    status: RunStatus | None
    """None when no worker answered the query in time; `status_error` says why."""
    status_error: str | None = None
    failure: str | None = None
    """Why it ended, from the outermost failure to the cause."""

    def url(self, ui_base: str) -> str:
        """Address of the run's page in the Temporal web UI."""
        workflow_id = self.workflow_id.replace("/", "%2F")
        return f"{ui_base.rstrip('/')}/namespaces/{self.namespace}/workflows/{workflow_id}/{self.run_id}/history"


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
                    raise ConnectionError(f"no Temporal server answers at {address}: {error}") from error
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
            await self.temporal.start_workflow(
                names.TRAINING_RUN,
                TrainingRunRequest(spec=spec),
                id=names.run_workflow_id(spec.run.name),
                task_queue=spec.services.task_queue,
                id_reuse_policy=WorkflowIDReusePolicy.REJECT_DUPLICATE,
                id_conflict_policy=WorkflowIDConflictPolicy.FAIL,
                static_summary=f"{spec.run.num_steps} steps of {spec.rollout.groups_per_step} groups "
                f"x {spec.rollout.episodes_per_group} episodes",
                rpc_timeout=_RPC_TIMEOUT,
            )
        except WorkflowAlreadyStartedError as error:
            raise RunExistsError(f"a run named {spec.run.name!r} exists already; choose another run.name") from error

    async def status(self, run: str, query_timeout: timedelta = timedelta(seconds=5)) -> RunView:
        """Describe a run; its own account is asked of a worker and may be missing when none answers.

        Raises:
            RunNotFoundError: no such run.
        """
        handle = self._handle(run)
        description = await self._describe(handle, run)
        status, status_error = await self._query_status(handle, query_timeout)
        state = _STATES[description.status] if description.status else "running"
        failure = None if state in ("running", "completed") else await self._read_failure(handle)
        return RunView(
            run=run,
            workflow_id=description.id,
            run_id=description.run_id,
            namespace=self.temporal.namespace,
            state=state,
            started_at=description.start_time,
            closed_at=description.close_time,
            status=status,
            status_error=status_error,
            failure=failure,
        )

    async def stop(self, run: str) -> None:
        """Ask a run to stop after the step it is in.

        Raises:
            RunNotFoundError: no such run, or it has ended.
        """
        try:
            await self._handle(run).signal(names.SIGNAL_STOP, rpc_timeout=_RPC_TIMEOUT)
        except RPCError as error:
            raise _translate(error, run) from error

    async def pause(self, run: str, reason: str = "") -> None:
        """Start no new group and no new episode until `resume`.

        Raises:
            RunNotFoundError: no such run, or it has ended.
            SteeringError: it is paused already.
        """
        await self._steer(run, names.UPDATE_PAUSE, reason)

    async def resume(self, run: str, reason: str = "") -> None:
        """Go on after a pause, whoever began it.

        Raises:
            RunNotFoundError: no such run, or it has ended.
            SteeringError: it is not paused.
        """
        await self._steer(run, names.UPDATE_RESUME, reason)

    async def _steer(self, run: str, update: str, reason: str) -> None:
        try:
            await self._handle(run).execute_update(update, SteerRequest(reason=reason), rpc_timeout=_STEER_TIMEOUT)
        except temporalio.client.WorkflowUpdateFailedError as error:
            raise SteeringError(f"run {run}: {describe_failure(error.cause)}") from error
        except RPCError as error:
            raise _translate(error, run) from error

    async def cancel(self, run: str) -> None:
        """Cancel a run at once; its groups in flight are cancelled with it.

        Raises:
            RunNotFoundError: no such run.
        """
        try:
            await self._handle(run).cancel(rpc_timeout=_RPC_TIMEOUT)
        except RPCError as error:
            raise _translate(error, run) from error

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
        """The latest runs, newest first."""
        found = []
        async for execution in self.temporal.list_workflows(f"WorkflowType = '{names.TRAINING_RUN}'", limit=limit):
            state = _STATES[execution.status] if execution.status else "running"
            found.append(RunListing(execution.id.removeprefix("everroll/"), state, execution.start_time))
        return found

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
        self, handle: WorkflowHandle[object, TrainingRunResult], timeout: timedelta
    ) -> tuple[RunStatus | None, str | None]:
        try:
            return await handle.query(names.QUERY_STATUS, result_type=RunStatus, rpc_timeout=timeout), None
        except RPCError as error:
            return None, f"no worker of this run's workflows answers: {error.message}"
        except temporalio.client.WorkflowQueryFailedError as error:
            return None, f"the run does not know its status yet: {error}"

    async def _read_failure(self, handle: WorkflowHandle[object, TrainingRunResult]) -> str | None:
        try:
            await handle.result(rpc_timeout=_RPC_TIMEOUT)
        except WorkflowFailureError as error:
            return describe_failure(error.cause)
        return None


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
    if error.status == RPCStatusCode.NOT_FOUND:
        return RunNotFoundError(f"no run named {run!r} is running; everroll list shows which there are")
    return ConnectionError(f"Temporal did not answer: {error.message}")
