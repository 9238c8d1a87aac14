"""Workflows run outside the SDK's sandbox: it still looks at them before, and what they do is allowed in it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from temporalio.client import WorkflowHistory
from temporalio.converter import WorkflowSerializationContext
from temporalio.worker import Replayer, UnsandboxedWorkflowRunner
from temporalio.worker.workflow_sandbox import RestrictedWorkflowAccessError, SandboxedWorkflowRunner

from everroll.temporal import build_data_converter, build_plugin
from everroll.workflow_runner import DirectRunner
from tests.integration.test_replay import FILES, read_file
from tests.unit.forbidden_workflow import ForbiddenWorkflow
from workflows.evaluation import Evaluation
from workflows.rollout_group import RolloutGroup
from workflows.training_run import TrainingRun

WORKFLOWS = [TrainingRun, RolloutGroup, Evaluation]


def test_the_converter_is_the_same_in_every_context() -> None:
    converter = build_data_converter()
    context = WorkflowSerializationContext(namespace="n", workflow_id="w")
    assert converter.with_context(context) is converter
    assert converter.external_storage is None


def test_workers_run_workflows_directly() -> None:
    configure = build_plugin().workflow_runner
    assert callable(configure)
    assert isinstance(configure(SandboxedWorkflowRunner()), DirectRunner)
    with pytest.raises(TypeError, match="checked in the sandbox"):
        configure(UnsandboxedWorkflowRunner())


async def test_a_worker_refuses_a_workflow_that_the_sandbox_forbids() -> None:
    with pytest.raises(RuntimeError, match="ForbiddenWorkflow") as raised:
        await Replayer(workflows=[ForbiddenWorkflow], plugins=[build_plugin()]).replay_workflows(no_histories())
    assert isinstance(raised.value.__cause__, RestrictedWorkflowAccessError)


async def no_histories() -> AsyncIterator[WorkflowHistory]:
    for history in list[WorkflowHistory]():
        yield history


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name.split(".")[0])
async def test_what_workflows_do_is_allowed_in_the_sandbox(path: Path) -> None:
    async def histories() -> AsyncIterator[WorkflowHistory]:
        for item in read_file(path):
            yield WorkflowHistory.from_json(item["workflow_id"], item["history"])

    replayer = Replayer(workflows=WORKFLOWS, plugins=[build_plugin(sandboxed=True)])
    results = await replayer.replay_workflows(histories(), raise_on_replay_failure=False)
    assert not results.replay_failures
