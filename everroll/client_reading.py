"""What can be known of runs from outside: how one stands and what it waits for, how it ended, which there are."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from datetime import datetime, timedelta

import temporalio.client
from temporalio.client import (
    WorkflowExecutionDescription,
    WorkflowFailureError,
    WorkflowHandle,
)
from temporalio.common import SearchAttributeKey
from temporalio.service import RPCError

from everroll.client_base import (
    RPC_TIMEOUT,
    STATES,
    RunHandles,
    RunNotFoundError,
    describe_failure,
    translate_rpc_error,
)
from everroll.contracts import names
from everroll.contracts.health import Survey
from everroll.contracts.training import RunStatus, TrainingRunRequest, TrainingRunResult
from everroll.open_groups import OpenGroups, look_at_groups
from everroll.partial_history import REFUSAL
from everroll.survey import find_groups, survey_run

_STEP_ATTRIBUTE = SearchAttributeKey.for_int(names.SEARCH_STEP)
_PHASE_ATTRIBUTE = SearchAttributeKey.for_keyword(names.SEARCH_PHASE)
_REWARD_ATTRIBUTE = SearchAttributeKey.for_float(names.SEARCH_REWARD)
_QUERY_TIMEOUT = timedelta(seconds=3)
_QUERY_ATTEMPTS = 3
"""When events come in just then."""
_SURVEY_SECONDS = 4.0
_GROUPS_SECONDS = 2.0


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
    open_groups: OpenGroups | None = None
    """Groups of a running run that play or are ready; looked at together with the survey."""

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


class RunReader(RunHandles):
    """Asks Temporal, and the run itself where a worker answers."""

    async def status(self, run: str, query_timeout: timedelta = _QUERY_TIMEOUT, *, survey: bool = False) -> RunView:
        """Describe a run, within about five seconds; its own account is asked of a worker and may be missing.

        `survey`: also find out what it waits for, and what its groups do. Temporal tells, so that this works without
        any worker.

        Raises:
            RunNotFoundError: no such run.
            ConnectionError: Temporal does not answer.
        """
        handle = self.handle(run)
        description = await self._describe(handle, run)
        state = STATES[description.status] if description.status else "running"
        (status, status_error), waiting, started_at = await asyncio.gather(
            self._query_status(handle, description, query_timeout),
            self._take_survey(run) if survey and state == "running" else _nothing(),
            self._find_start(description),
        )
        open_groups = await self._look_at_groups(run, status) if survey and state == "running" else None
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
            open_groups=open_groups,
        )

    async def find_state(self, run: str) -> str | None:
        """`running`, or how it ended; None when Temporal does not know the run.

        Raises:
            ConnectionError: Temporal does not answer.
        """
        try:
            description = await self._describe(self.handle(run), run)
        except RunNotFoundError:
            return None
        return STATES[description.status] if description.status else "running"

    async def find_step(self, run: str) -> int:
        """Steps that a run has done by Temporal's own record, which needs no worker.

        Raises:
            RunNotFoundError: Temporal does not know the run.
            ConnectionError: Temporal does not answer.
        """
        return _read_indexed(await self._describe(self.handle(run), run)).step or 0

    async def read_start(self, run: str) -> TrainingRunRequest:
        """What the newest execution of a run was started with.

        Raises:
            RunNotFoundError: Temporal does not know the run.
        """
        try:
            async for event in self.handle(run).fetch_history_events(page_size=1, rpc_timeout=RPC_TIMEOUT):
                payloads = event.workflow_execution_started_event_attributes.input.payloads
                values = await self.temporal.data_converter.decode(payloads, [TrainingRunRequest])
                return TrainingRunRequest.model_validate(values[0])
        except RPCError as error:
            raise translate_rpc_error(error, run) from error
        raise RunNotFoundError(f"run {run!r} has no history")

    async def find_runs(self, limit: int = 50) -> list[RunListing]:
        """The latest runs, newest first; of one that was resumed, what became of it last.

        Raises:
            ConnectionError: Temporal does not answer.
        """
        query = f"WorkflowType = '{names.TRAINING_RUN}' AND ExecutionStatus != 'ContinuedAsNew'"
        found: dict[str, RunListing] = {}
        try:
            async for execution in self.temporal.list_workflows(query, limit=limit, rpc_timeout=RPC_TIMEOUT):
                state = STATES[execution.status] if execution.status else "running"
                listing = RunListing(execution.id.removeprefix("everroll/"), state, execution.start_time)
                known = found.get(listing.run)
                if known is None or known.started_at < listing.started_at:
                    found[listing.run] = listing
        except RPCError as error:
            raise translate_rpc_error(error, "") from error
        return sorted(found.values(), key=lambda listing: listing.started_at, reverse=True)

    async def _describe(
        self, handle: WorkflowHandle[object, TrainingRunResult], run: str
    ) -> WorkflowExecutionDescription:
        try:
            return await handle.describe(rpc_timeout=RPC_TIMEOUT)
        except RPCError as error:
            raise translate_rpc_error(error, run) from error

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

    async def _look_at_groups(self, run: str, status: RunStatus | None) -> OpenGroups | None:
        """Of a run whose workers do not answer, those that play by Temporal's index. Best effort."""
        try:
            async with asyncio.timeout(_GROUPS_SECONDS):
                if status is not None:
                    known = [*status.groups_in_flight, *status.ready_groups]
                else:
                    known = await find_groups(self.temporal, run)
                return await look_at_groups(self.temporal, run, known)
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
            return await handle.result(rpc_timeout=RPC_TIMEOUT), None
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


async def _nothing() -> None:
    """In place of a survey that is not asked for."""
