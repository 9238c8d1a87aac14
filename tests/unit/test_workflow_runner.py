"""The sandbox without contexts: what it takes for granted about the data converter holds."""

from __future__ import annotations

import pytest
from temporalio.converter import WorkflowSerializationContext
from temporalio.worker import UnsandboxedWorkflowRunner, WorkflowRunner
from temporalio.worker.workflow_sandbox import SandboxedWorkflowRunner

from everroll.temporal import build_data_converter, build_plugin
from everroll.workflow_runner import ContextFreeSandbox


def test_the_converter_is_the_same_in_every_context() -> None:
    converter = build_data_converter()
    context = WorkflowSerializationContext(namespace="n", workflow_id="w")
    assert converter.with_context(context) is converter
    assert converter.external_storage is None


def test_workflows_run_in_the_sandbox_with_the_restrictions_of_the_sdk() -> None:
    configure = build_plugin().workflow_runner
    assert callable(configure)
    runner = configure(SandboxedWorkflowRunner())
    assert isinstance(runner, WorkflowRunner)
    assert isinstance(runner, ContextFreeSandbox)
    assert runner.restrictions.invalid_module_members is SandboxedWorkflowRunner().restrictions.invalid_module_members
    with pytest.raises(TypeError, match="run in the sandbox"):
        configure(UnsandboxedWorkflowRunner())
