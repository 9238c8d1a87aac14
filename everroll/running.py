"""The runs of a namespace that go on, with what each was started with."""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import timedelta

from temporalio.client import Client, WorkflowExecution, WorkflowExecutionStatus
from temporalio.service import RPCError

from everroll.audit.histories import HistoryReader
from everroll.audit.report import AuditInputError
from everroll.contracts import names
from everroll.contracts.training import TrainingRunRequest

_RPC_TIMEOUT = timedelta(seconds=10)
_RUNNING = f"WorkflowType = '{names.TRAINING_RUN}' AND ExecutionStatus = 'Running'"


async def read_running(temporal: Client) -> AsyncIterator[tuple[WorkflowExecution, TrainingRunRequest]]:
    """As Temporal's list has it, which lags behind: `goes_on` is sure.

    Raises:
        ConnectionError: Temporal does not answer.
    """
    try:
        executions = [execution async for execution in temporal.list_workflows(_RUNNING, rpc_timeout=_RPC_TIMEOUT)]
    except RPCError as error:
        raise ConnectionError(f"Temporal did not answer: {error.message}") from error
    for execution in executions:
        try:
            request = await HistoryReader(temporal, execution.id.removeprefix(names.run_workflow_id(""))).read_start()
        except AuditInputError:
            continue  # it has ended meanwhile, or is of another version
        yield execution, request


async def goes_on(temporal: Client, workflow_id: str) -> bool:
    """
    Raises:
        ConnectionError: Temporal does not answer.
    """
    try:
        found = await temporal.get_workflow_handle(workflow_id).describe(rpc_timeout=_RPC_TIMEOUT)
    except RPCError as error:
        raise ConnectionError(f"Temporal did not answer: {error.message}") from error
    return found.status is WorkflowExecutionStatus.RUNNING


def find_shared_engines(request: TrainingRunRequest, urls: list[str]) -> list[str]:
    """Engines of a run that are also among these."""
    return sorted(set(urls) & set(request.spec.services.engine_urls))
