"""Everything that an episode touches, for tests of the failure boundary: real workflows, episodes, collection, session
server and store, over real sockets that can be broken. Only the engine's words and the trainer are simulated.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import httpx
import pytest

from activities.collection import CollectionActivities, store_group
from activities.engine_owners import EngineOwners
from activities.episodes import EpisodeActivities
from activities.preflight import Preflight
from activities.runs import RunActivities
from everroll.agents import AgentClients
from everroll.client import EverrollClient
from everroll.contracts.rollout import DatasetRef
from everroll.contracts.spec import RunSpec
from everroll.contracts.training import TrainingRunResult
from everroll.http_client import build_http_client
from everroll.prompts import DatasetCache, load_dataset
from everroll.tokens.renderer import load_renderer
from tests.fault_proxy import FaultProxy, run_fault_proxy
from tests.session_helpers import (
    ADMIN_KEY,
    FakeEngine,
    Stack,
    model_section,
    run_fake_engine,
    run_stack,
    write_model_dir,
)
from tests.simulation import Simulation, build_spec

_READ_SECONDS = 30.0


@dataclass
class World:
    """Everything that a run of this module touches."""

    client: EverrollClient
    stack: Stack
    proxy: FaultProxy
    """Between workers and the session server."""
    engine_proxy: FaultProxy
    """Between the session server and the engine."""
    engine: FakeEngine
    simulation: Simulation
    spec: Callable[..., RunSpec]
    runs: RunActivities
    http: httpx.AsyncClient
    """What episodes and collections call with."""

    def be_impatient(self) -> None:
        """Episodes and collections wait a second for an answer: for tests of servers that give none."""
        self.http.timeout = httpx.Timeout(1.0)

    async def run(self, spec: RunSpec) -> TrainingRunResult:
        await self.client.start(spec)
        return await asyncio.wait_for(self.client.result(spec.run.name), 90)

    def trained_groups(self) -> list[list[int]]:
        return [[item.group for item in request.batch] for request in self.simulation.trained]


def write_dataset(path: Path, texts: list[str]) -> DatasetRef:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    fingerprint = load_dataset(path).fingerprint
    return DatasetRef(path=str(path), fingerprint=fingerprint, num_prompts=len(texts), seed=0, shuffle=False)


@pytest.fixture(scope="module", name="model_dir")
def model_dir_fixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model_dir(tmp_path_factory.mktemp("model"))


@pytest.fixture(name="world")
async def world_fixture(
    client: EverrollClient, run_name: str, task_queue: str, model_dir: Path, tmp_path: Path
) -> AsyncIterator[World]:
    """With all workers in this process."""
    async with open_world(client, run_name, task_queue, model_dir, tmp_path) as opened:
        yield opened


@contextlib.asynccontextmanager
async def open_world(
    client: EverrollClient,
    run_name: str,
    task_queue: str,
    model_dir: Path,
    tmp_path: Path,
    rollout_queue_suffix: str = "",
) -> AsyncIterator[World]:
    """`rollout_queue_suffix`: anything but empty leaves episodes to workers that the test starts."""
    prompts = tmp_path / "prompts.jsonl"
    dataset = write_dataset(prompts, [f"prompt {n}" for n in range(20)])
    renderer = load_renderer(model_section(model_dir))
    async with contextlib.AsyncExitStack() as resources:
        engine = await resources.enter_async_context(run_fake_engine("hello there"))
        engine_proxy = await resources.enter_async_context(run_fault_proxy(engine.base_url))
        engine.base_url = engine_proxy.url
        stack = await resources.enter_async_context(
            run_stack(renderer, model_dir, tmp_path / "journal.sqlite", [engine], engine_patience_seconds=5.0)
        )
        proxy = await resources.enter_async_context(run_fault_proxy(stack.client.base_url))
        http = await resources.enter_async_context(build_http_client(read_seconds=_READ_SECONDS, connect_seconds=10))
        engine_session = await resources.enter_async_context(aiohttp.ClientSession())
        episodes = EpisodeActivities(AgentClients(http), DatasetCache(), ADMIN_KEY)
        collection = CollectionActivities(http, ADMIN_KEY)
        runs = RunActivities(Preflight(http, engine_session, ADMIN_KEY), EngineOwners(client.temporal))
        simulation = Simulation(
            dataset=dataset,
            rollout_activities=[episodes.run_episode, collection.collect_samples],
            light_activities=[store_group, collection.release_sessions],
            rollout_queue_suffix=rollout_queue_suffix,
        )
        # The engine says that it serves the newest weights, whichever they are.
        engine.weight_version = 100

        def spec(agent: str = "ask_once", **overrides: dict[str, object]) -> RunSpec:
            rollout = {
                "agent": {"function": f"tests.boundary_agents:{agent}"},
                "collect_attempts": 1,
                "refill_backoff_seconds": 0.1,
                **overrides.pop("rollout", {}),
            }
            services = {
                "session_url": proxy.url,
                "engine_urls": [engine.base_url],
                "store_url": str(tmp_path / "store"),
                **overrides.pop("services", {}),
            }
            model = {**model_section(model_dir).model_dump(), **overrides.pop("model", {})}
            data = {"path": str(prompts), **overrides.pop("data", {})}
            return build_spec(
                run_name, task_queue, rollout=rollout, services=services, model=model, data=data, **overrides
            )

        await resources.enter_async_context(simulation.workers(client.temporal, task_queue))
        yield World(client, stack, proxy, engine_proxy, engine, simulation, spec, runs, http)
