"""Workers with versions: an open run moves to the new version between two steps, its groups in flight stay."""

from __future__ import annotations

import asyncio
import time
from datetime import timedelta

import pytest
from pydantic import ValidationError
from temporalio.api.workflowservice.v1 import SetWorkerDeploymentCurrentVersionRequest
from temporalio.service import RPCError

from everroll.client import EverrollClient
from everroll.contracts import names
from everroll.contracts.training import Phase, PublishRequest
from tests.conftest import TemporalServer
from tests.integration.test_orchestration import read_status, wait_for_status
from tests.simulation import Simulation, build_spec
from worker.build import build_deployment_config
from worker.settings import WorkerSettings, load_settings

_SECONDS = 60.0


def build_versioned(deployment: str, build_id: str, train_gate: asyncio.Event) -> Simulation:
    settings = load_settings({"EVERROLL_DEPLOYMENT_NAME": deployment}, build_id=build_id)
    return Simulation(train_gate=train_gate, deployment_config=build_deployment_config(settings))


async def make_current(client: EverrollClient, deployment: str, build_id: str) -> None:
    """As `temporal worker deployment set-current-version` does; a worker that just started may not be known yet."""
    request = SetWorkerDeploymentCurrentVersionRequest(
        namespace=client.temporal.namespace, deployment_name=deployment, build_id=build_id
    )
    deadline = time.monotonic() + _SECONDS
    while True:
        try:
            service = client.temporal.workflow_service
            await service.set_worker_deployment_current_version(request, timeout=timedelta(seconds=10))
            return
        except RPCError:
            if time.monotonic() > deadline:
                raise
        await asyncio.sleep(0.1)


async def read_build_id(client: EverrollClient, workflow_id: str) -> str:
    description = await client.temporal.get_workflow_handle(workflow_id).describe()
    return description.raw_description.workflow_execution_info.versioning_info.deployment_version.build_id


async def test_a_run_moves_to_the_new_version_after_its_step(
    temporal_server: TemporalServer, client: EverrollClient, run_name: str, task_queue: str
) -> None:
    gate = asyncio.Event()
    deployment = f"deployment-{run_name}"
    old, new = build_versioned(deployment, "one", gate), build_versioned(deployment, "two", gate)

    def share_weights(request: PublishRequest) -> None:
        """Both stand for the same engine."""
        old.weight_version = new.weight_version = request.weights.version

    old.on_publish = new.on_publish = share_weights
    run_id = names.run_workflow_id(run_name)
    spec = build_spec(run_name, task_queue, run={"num_steps": 8}, rollout={"max_staleness": 1})
    other = await EverrollClient.connect(temporal_server.address, temporal_server.namespace)
    async with new.workers(other.temporal, task_queue):
        async with old.workers(client.temporal, task_queue):
            await make_current(client, deployment, "one")
            await client.start(spec)
            await wait_for_status(
                client, run_name, lambda view: view.status is not None and view.status.phase is Phase.TRAINING
            )
            assert await read_build_id(client, run_id) == "one"
            await make_current(client, deployment, "two")
            gate.set()  # the run may hear of the new version a step or two later
            await wait_for_status(
                client, run_name, lambda view: view.status is not None and view.status.generation >= 1
            )
            result = await asyncio.wait_for(client.result(run_name), _SECONDS)
        assert await read_build_id(client, run_id) == "two"
        view = await read_status(client, run_name)
    assert result.steps == 8
    assert view.status is not None
    assert view.status.generation == 1, "once is enough"
    assert await read_build_id(client, names.group_workflow_id(run_name, 0)) == "one"
    assert await read_build_id(client, names.group_workflow_id(run_name, 15)) == "two"
    trained = sorted(item.group for request in [*old.trained, *new.trained] for item in request.batch)
    assert trained == list(range(16))


def test_a_worker_has_a_version_only_when_it_is_given_one() -> None:
    assert build_deployment_config(WorkerSettings()) is None
    config = build_deployment_config(load_settings({"EVERROLL_BUILD_ID": "abc"}, build_id=None))
    assert config is not None
    assert (config.version.deployment_name, config.version.build_id) == ("everroll", "abc")
    assert load_settings({"EVERROLL_BUILD_ID": "abc"}, build_id="given").build_id == "given"
    with pytest.raises(ValidationError, match="build_id"):
        load_settings({"EVERROLL_BUILD_ID": ""})
