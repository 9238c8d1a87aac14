"""An engine serves one run at a time: whoever publishes last decides what all of its clients sample with."""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta

from temporalio.client import Client, WorkflowExecution, WorkflowExecutionStatus
from temporalio.service import RPCError, RPCStatusCode

from everroll.audit.histories import HistoryReader
from everroll.audit.report import AuditInputError
from everroll.contracts import names
from everroll.contracts.spec import RunSpec
from everroll.contracts.training import TrainingRunRequest
from everroll.failures import ConfigurationError

_RPC_TIMEOUT = timedelta(seconds=10)
_RUNNING = f"WorkflowType = '{names.TRAINING_RUN}' AND ExecutionStatus = 'Running'"


class EngineOwners:
    """Looks for other runs of the namespace that use a run's engines."""

    def __init__(self, temporal: Client) -> None:
        self._temporal = temporal

    async def check(self, spec: RunSpec) -> None:
        """Two runs that only play share engines in peace, and one that plays nothing needs none.

        Raises:
            ConfigurationError: another run uses one of them, and was there first.
        """
        if spec.run.mode == "train":
            return
        try:
            own = (await self._find_start(spec.run.name), names.run_workflow_id(spec.run.name))
            async for other, request in self._read_others(spec.run.name):
                shared = sorted(set(spec.services.engine_urls) & set(request.spec.services.engine_urls))
                if not shared or not _is_in_the_way(spec, request.spec):
                    continue
                # A run that was there first may have continued as new since. Of two that start together, one goes on.
                first = request.state is not None or (other.start_time, other.id) < own
                if first and await self._goes_on(other.id):
                    raise ConfigurationError(
                        f"run {request.spec.run.name} goes on and uses {', '.join(shared)}: each would sample with the "
                        "other's weights. Wait until it has ended, or give this run engines of its own"
                    )
        except RPCError as error:
            raise ConnectionError(f"Temporal did not answer: {error.message}") from error

    async def _find_start(self, run: str) -> datetime:
        """Now, of one that Temporal does not know."""
        try:
            handle = self._temporal.get_workflow_handle(names.run_workflow_id(run))
            return (await handle.describe(rpc_timeout=_RPC_TIMEOUT)).start_time
        except RPCError as error:
            if error.status is not RPCStatusCode.NOT_FOUND:
                raise
        return datetime.now(UTC)

    async def _goes_on(self, workflow_id: str) -> bool:
        """Lists lag behind: one that has just ended may still stand in them."""
        found = await self._temporal.get_workflow_handle(workflow_id).describe(rpc_timeout=_RPC_TIMEOUT)
        return found.status is WorkflowExecutionStatus.RUNNING

    async def _read_others(self, run: str) -> AsyncIterator[tuple[WorkflowExecution, TrainingRunRequest]]:
        async for execution in self._temporal.list_workflows(_RUNNING, rpc_timeout=_RPC_TIMEOUT):
            if execution.id == names.run_workflow_id(run):
                continue
            try:
                yield (
                    execution,
                    await HistoryReader(self._temporal, execution.id.removeprefix("everroll/")).read_start(),
                )
            except AuditInputError:
                continue  # it has ended meanwhile, or is of another version


def _is_in_the_way(spec: RunSpec, other: RunSpec) -> bool:
    modes = {spec.run.mode, other.run.mode}
    return "train" not in modes and modes != {"rollout"}
