"""Two runs on the same engines would sample with each other's weights: the second is refused."""

from __future__ import annotations

import asyncio

import pytest

from activities.engine_owners import EngineOwners
from everroll.client import EverrollClient
from everroll.contracts.spec import RunSpec
from everroll.failures import ConfigurationError
from tests.integration.test_orchestration import wait_for_status
from tests.simulation import Simulation, build_spec


def build(name: str, task_queue: str, port: int, mode: str = "full") -> RunSpec:
    spec = build_spec(name, task_queue, run={"mode": mode})
    engines = [f"http://engine-of-{task_queue}:{port}"]
    return spec.model_copy(update={"services": spec.services.model_copy(update={"engine_urls": engines})})


async def begin(client: EverrollClient, spec: RunSpec) -> None:
    await client.start(spec)
    await wait_for_status(
        client, spec.run.name, lambda view: view.status is not None and len(view.status.groups_in_flight) > 0
    )


async def test_the_first_run_on_an_engine_keeps_it(client: EverrollClient, run_name: str, task_queue: str) -> None:
    gate = asyncio.Event()
    first, second = (build(f"{run_name}-{name}", task_queue, 1) for name in "ab")
    elsewhere = build(f"{run_name}-c", task_queue, 2)
    owners = EngineOwners(client.temporal)
    async with Simulation(gate=gate).workers(client.temporal, task_queue):
        for spec in (first, second, elsewhere):
            await begin(client, spec)
        await owners.check(first)
        await owners.check(elsewhere)
        with pytest.raises(ConfigurationError, match=rf"run {first.run.name} goes on and uses http://engine-of-.*:1:"):
            await owners.check(second)
        gate.set()
        await client.result(first.run.name)
        await owners.check(second)
        for spec in (second, elsewhere):
            await client.result(spec.run.name)


async def test_runs_that_only_play_share_engines(client: EverrollClient, run_name: str, task_queue: str) -> None:
    first, second = (build(f"{run_name}-{name}", task_queue, 1, "rollout") for name in "ab")
    owners = EngineOwners(client.temporal)
    async with Simulation(gate=asyncio.Event()).workers(client.temporal, task_queue):
        for spec in (first, second):
            await begin(client, spec)
        await owners.check(second)
        with pytest.raises(ConfigurationError, match="goes on and uses"):
            await owners.check(build(second.run.name, task_queue, 1))
        for spec in (first, second):
            await client.cancel(spec.run.name)
            await wait_for_status(client, spec.run.name, lambda view: view.state == "canceled")
