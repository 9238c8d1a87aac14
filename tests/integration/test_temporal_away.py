"""Temporal itself goes away for a while, under an activity that asks it something."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from temporalio.client import Client
from temporalio.service import RetryConfig

from activities.runs import GroupActivities
from everroll.client import EverrollClient
from everroll.contracts import names
from everroll.temporal import build_plugin
from tests.conftest import TemporalServer
from tests.integration.test_long_histories import grow_history
from tests.integration.test_orchestration import wait_for_status
from tests.simulation import Simulation, build_spec


class Relay:
    """Passes bytes on to one port, until it is told to refuse."""

    def __init__(self, upstream: int) -> None:
        self._upstream = upstream
        self._writers: set[asyncio.StreamWriter] = set()
        self._server: asyncio.Server | None = None
        self.port = 0

    async def listen(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    def refuse(self) -> None:
        assert self._server is not None
        self._server.close()
        for writer in self._writers:
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        upstream_reader, upstream_writer = await asyncio.open_connection("127.0.0.1", self._upstream)
        self._writers |= {writer, upstream_writer}
        await asyncio.gather(_pass_on(reader, upstream_writer), _pass_on(upstream_reader, writer))


async def _pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
    writer.close()


@contextlib.asynccontextmanager
async def open_relay(server: TemporalServer) -> AsyncIterator[tuple[Relay, Client]]:
    """A relay, and a client behind it that gives up soon."""
    relay = Relay(int(server.address.rpartition(":")[2]))
    await relay.listen()
    retries = RetryConfig(max_elapsed_time_millis=300, max_retries=2)
    address = f"127.0.0.1:{relay.port}"
    yield relay, await Client.connect(address, plugins=[build_plugin()], retry_config=retries)
    relay.refuse()


async def test_waiting_for_groups_outlasts_an_outage_of_temporal(
    temporal_server: TemporalServer, client: EverrollClient, run_name: str, task_queue: str
) -> None:
    """What a run waits for after it continued as new: a lost connection is no failure of a group."""
    async with open_relay(temporal_server) as (relay, away):
        simulation = Simulation(gate=asyncio.Event(), light_activities=[GroupActivities(away).await_groups])
        assert simulation.gate is not None
        async with simulation.workers(client.temporal, task_queue):
            await client.start(build_spec(run_name, task_queue, run={"num_steps": 1}))
            await wait_for_status(client, run_name, lambda view: len(simulation.episodes) == 4)
            await grow_history(client, run_name)
            await wait_for_status(
                client, run_name, lambda view: view.status is not None and view.status.generation >= 1
            )
            await wait_for_attempt(client, run_name, 1)
            relay.refuse()
            await wait_for_attempt(client, run_name, 2)
            await relay.listen()
            simulation.gate.set()
            result = await asyncio.wait_for(client.result(run_name), 60)
    assert result.trained_groups == 2
    assert len(simulation.episodes) == 4


async def wait_for_attempt(client: EverrollClient, run_name: str, attempt: int) -> None:
    """Until the run's wait for its groups is tried for so many times."""
    handle = client.temporal.get_workflow_handle(names.run_workflow_id(run_name))
    async with asyncio.timeout(60):
        while True:
            pending = (await handle.describe()).raw_description.pending_activities
            found = [item for item in pending if item.activity_type.name == names.AWAIT_GROUPS]
            if any(item.attempt >= attempt and item.HasField("last_started_time") for item in found):
                return
            await asyncio.sleep(0.05)
