"""How workflow workers run workflow code: directly, checked in the SDK's sandbox before.

The sandbox imports a workflow's module anew for each workflow and replaces `isinstance` and `__import__` for the whole
process while one runs, which took more than half of a workflow worker's CPU. What it guards against is caught earlier:
each workflow is built in the sandbox once when a worker starts, and the recorded histories are replayed in it by a test
(docs/decisions/0009-workflows-run-outside-the-sandbox.md).

For every payload that enters or leaves a workflow, the SDK asks the workflow several times for the context in which to
convert it. Everroll's converter and guard are the same in every context, so the question is answered here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from temporalio.converter import SerializationContext, StorageDriverStoreContext
from temporalio.worker import UnsandboxedWorkflowRunner, WorkflowInstance, WorkflowInstanceDetails, WorkflowRunner
from temporalio.worker.workflow_sandbox import SandboxedWorkflowRunner
from temporalio.workflow import Info

from everroll.partial_history import PartialHistoryGuard

if TYPE_CHECKING:
    from temporalio.bridge.proto.workflow_activation import WorkflowActivation
    from temporalio.bridge.proto.workflow_completion import WorkflowActivationCompletion
    from temporalio.worker._command_aware_visitor import CommandInfo
    from temporalio.workflow._definition import _Definition


@dataclass(frozen=True)
class DirectRunner(WorkflowRunner):
    """For data converters that are the same in every serialization context, and have no external storage."""

    sandbox: SandboxedWorkflowRunner
    """Where each workflow is built once, to see that it may."""
    runner: UnsandboxedWorkflowRunner

    def prepare_workflow(self, defn: _Definition) -> None:
        """Called for each workflow when a worker is built.

        Raises:
            temporalio.worker.workflow_sandbox.RestrictedWorkflowAccessError: its module does at import what no
                workflow may.
        """
        self.sandbox.prepare_workflow(defn)

    def create_instance(self, det: WorkflowInstanceDetails) -> WorkflowInstance:
        return _ContextFreeInstance(self.runner.create_instance(det))


class _ContextFreeInstance(WorkflowInstance):
    """Everything is the SDK's instance's, but the contexts, and histories that no workflow task stands for."""

    def __init__(self, instance: WorkflowInstance) -> None:
        self._instance = instance
        self._guard = PartialHistoryGuard()

    def activate(self, act: WorkflowActivation) -> WorkflowActivationCompletion:
        return self._guard.refuse(act) or self._instance.activate(act)

    def get_serialization_context(self, command_info: CommandInfo | None) -> SerializationContext | None:
        return None

    def get_external_store_context(self, command_info: CommandInfo | None) -> StorageDriverStoreContext:
        return StorageDriverStoreContext(target=None)

    def get_info(self) -> Info:
        return self._instance.get_info()

    def get_thread_id(self) -> int | None:
        return self._instance.get_thread_id()
