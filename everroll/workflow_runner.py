"""The SDK's workflow sandbox, without its entry into the sandbox for each payload.

For every payload that enters or leaves a workflow, the SDK asks the workflow, several times and each time through the
sandbox, for the context in which to convert it. Everroll's converter and guard are the same in every context, so the
question is answered here: it took about 40 % of a workflow worker's CPU.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from temporalio.converter import SerializationContext, StorageDriverStoreContext
from temporalio.worker import WorkflowInstance, WorkflowInstanceDetails
from temporalio.worker.workflow_sandbox import SandboxedWorkflowRunner
from temporalio.workflow import Info

from everroll.partial_history import PartialHistoryGuard

if TYPE_CHECKING:
    from temporalio.bridge.proto.workflow_activation import WorkflowActivation
    from temporalio.bridge.proto.workflow_completion import WorkflowActivationCompletion
    from temporalio.worker._command_aware_visitor import CommandInfo


class ContextFreeSandbox(SandboxedWorkflowRunner):
    """For data converters that are the same in every serialization context, and have no external storage."""

    def create_instance(self, det: WorkflowInstanceDetails) -> WorkflowInstance:
        return _ContextFreeInstance(super().create_instance(det))


class _ContextFreeInstance(WorkflowInstance):
    """Everything is the sandboxed instance's, but the contexts, and histories that no workflow task stands for."""

    def __init__(self, sandboxed: WorkflowInstance) -> None:
        self._sandboxed = sandboxed
        self._guard = PartialHistoryGuard()

    def activate(self, act: WorkflowActivation) -> WorkflowActivationCompletion:
        return self._guard.refuse(act) or self._sandboxed.activate(act)

    def get_serialization_context(self, command_info: CommandInfo | None) -> SerializationContext | None:
        return None

    def get_external_store_context(self, command_info: CommandInfo | None) -> StorageDriverStoreContext:
        return StorageDriverStoreContext(target=None)

    def get_info(self) -> Info:
        return self._sandboxed.get_info()

    def get_thread_id(self) -> int | None:
        return self._sandboxed.get_thread_id()
