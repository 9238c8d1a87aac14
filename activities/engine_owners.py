"""An engine serves one run at a time: whoever publishes last decides what all of its clients sample with."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from temporalio.client import Client
from temporalio.service import RPCError, RPCStatusCode

from everroll.contracts import names
from everroll.contracts.spec import RunSpec
from everroll.failures import ConfigurationError
from everroll.running import find_shared_engines, goes_on, read_running

_RPC_TIMEOUT = timedelta(seconds=10)


class EngineOwners:
    """Looks for other runs of the namespace that use a run's engines."""

    def __init__(self, temporal: Client) -> None:
        self._temporal = temporal

    async def check(self, spec: RunSpec) -> None:
        """Two runs that only play share engines in peace, and one that plays nothing needs none.

        Raises:
            ConfigurationError: another run uses one of them, and was there first.
            ConnectionError: Temporal does not answer.
        """
        if spec.run.mode == "train":
            return
        own = (await self._find_start(spec.run.name), names.run_workflow_id(spec.run.name))
        async for other, request in read_running(self._temporal):
            shared = find_shared_engines(request, spec.services.engine_urls)
            if other.id == own[1] or not shared or not _is_in_the_way(spec, request.spec):
                continue
            # A run that was there first may have continued as new since. Of two that start together, one goes on.
            first = request.state is not None or (other.start_time, other.id) < own
            if first and await goes_on(self._temporal, other.id):
                raise ConfigurationError(
                    f"run {request.spec.run.name} goes on and uses {', '.join(shared)}: each would sample with the "
                    "other's weights. Wait until it has ended, or give this run engines of its own"
                )

    async def _find_start(self, run: str) -> datetime:
        """Now, of one that Temporal does not know."""
        try:
            handle = self._temporal.get_workflow_handle(names.run_workflow_id(run))
            return (await handle.describe(rpc_timeout=_RPC_TIMEOUT)).start_time
        except RPCError as error:
            if error.status is not RPCStatusCode.NOT_FOUND:
                raise ConnectionError(f"Temporal did not answer: {error.message}") from error
        return datetime.now(UTC)


def _is_in_the_way(spec: RunSpec, other: RunSpec) -> bool:
    modes = {spec.run.mode, other.run.mode}
    return "train" not in modes and modes != {"rollout"}
