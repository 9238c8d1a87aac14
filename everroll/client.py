"""Start, inspect and steer runs through a Temporal client.

Workflows are started by name: this module imports none of them. What can be known of a run is in `client_reading`, what
can be asked of it in `client_steering`.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

from temporalio.api.enums.v1 import IndexedValueType
from temporalio.api.operatorservice.v1 import AddSearchAttributesRequest, ListSearchAttributesRequest
from temporalio.client import Client, WorkflowExecutionStatus, WorkflowFailureError
from temporalio.common import SearchAttributeKey, WorkflowIDConflictPolicy, WorkflowIDReusePolicy
from temporalio.exceptions import WorkflowAlreadyStartedError
from temporalio.service import RPCError

from everroll.client_base import (
    RPC_TIMEOUT,
    RunExistsError,
    RunFailedError,
    RunNotFoundError,
    SteeringError,
    describe_failure,
    translate_rpc_error,
)
from everroll.client_reading import IndexedStatus, RunListing, RunReader, RunView
from everroll.client_steering import RunSteering, build_resume, name_person
from everroll.contracts import names
from everroll.contracts.spec import RunSpec
from everroll.contracts.training import ForkOrigin, ResumeRequest, TrainingRunRequest, TrainingRunResult
from everroll.temporal import build_plugin

__all__ = [
    "SEARCH_ATTRIBUTES",
    "EverrollClient",
    "IndexedStatus",
    "RunExistsError",
    "RunFailedError",
    "RunListing",
    "RunNotFoundError",
    "RunView",
    "SteeringError",
    "build_resume",
    "describe_failure",
    "name_person",
]

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


class EverrollClient(RunReader, RunSteering):
    """Runs in one Temporal namespace."""

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
            ListSearchAttributesRequest(namespace=namespace), timeout=RPC_TIMEOUT
        )
        missing = {name: kind for name, kind in _INDEXED_TYPES.items() if name not in known.custom_attributes}
        if not missing:
            return
        await service.add_search_attributes(
            AddSearchAttributesRequest(namespace=namespace, search_attributes=missing), timeout=RPC_TIMEOUT
        )

    async def start(self, spec: RunSpec) -> None:
        """Start a run.

        Raises:
            RunExistsError: the name has been used.
        """
        try:
            await self._begin(spec, TrainingRunRequest(spec=spec), _choose_reuse(spec))
        except WorkflowAlreadyStartedError as error:
            raise RunExistsError(await self._describe_existing(spec.run.name, "run.name")) from error

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
            await self._begin(spec, request, _choose_reuse(spec))
        except WorkflowAlreadyStartedError as error:
            raise RunExistsError(await self._describe_existing(spec.run.name, "--name")) from error

    async def _describe_existing(self, run: str, option: str) -> str:
        found = await self._describe(self.handle(run), run)
        text = f"a run named {run!r} exists already"
        if found.status is WorkflowExecutionStatus.RUNNING:
            return f"{text}, and goes on; see `everroll status {run}`, or choose another {option}"
        return f"{text} and has ended; go on with it by `everroll resume {run}`, or choose another {option}"

    async def _begin(self, spec: RunSpec, request: TrainingRunRequest, reuse: WorkflowIDReusePolicy) -> None:
        await self.temporal.start_workflow(
            names.TRAINING_RUN,
            request,
            id=names.run_workflow_id(spec.run.name),
            task_queue=spec.services.task_queue,
            id_reuse_policy=reuse,
            id_conflict_policy=WorkflowIDConflictPolicy.FAIL,
            static_summary=_summarize(request),
            rpc_timeout=RPC_TIMEOUT,
        )

    async def result(self, run: str) -> TrainingRunResult:
        """Wait until a run has ended.

        Raises:
            RunFailedError: it failed, was cancelled or terminated.
            RunNotFoundError: no such run.
        """
        try:
            return await self.handle(run).result()
        except WorkflowFailureError as error:
            raise RunFailedError(describe_failure(error.cause)) from error
        except RPCError as error:
            raise translate_rpc_error(error, run) from error


def _summarize(request: TrainingRunRequest) -> str:
    """In the web UI's list."""
    run, rollout, origin = request.spec.run, request.spec.rollout, request.fork
    if origin is not None:
        return f"forked from {origin.run} at step {origin.step}"
    how = "resumed: " if request.resume is not None else ""
    return f"{how}{run.num_steps} steps of {rollout.groups_per_step} groups x {rollout.episodes_per_group} episodes"


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


def _choose_reuse(spec: RunSpec) -> WorkflowIDReusePolicy:
    """A run that was refused before it began leaves nothing in its directory, and its name is free again."""
    root = Path(spec.run.output_dir)
    if (
        not root.parent.is_dir() or (root / spec.run.name / names.RUN_RECORD_FILE).exists()
    ):  # or it lies on another machine
        return WorkflowIDReusePolicy.REJECT_DUPLICATE
    return WorkflowIDReusePolicy.ALLOW_DUPLICATE_FAILED_ONLY
