"""A worker process that is started beside the servers it works with."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator

import pytest
from aiohttp import web

from everroll.local.root import find_root
from tests.conftest import TemporalServer
from worker.waiting import wait_for_servers

_GUARD_SECONDS = 60


class Server:
    """Starts to serve when it is told to; counts who asks."""

    url = ""
    serves = False
    num_asked = 0

    async def answer(self, request: web.BaseRequest) -> web.Response:
        self.num_asked += 1
        return web.Response(status=200 if self.serves else 503)

    async def await_asked(self, times: int) -> None:
        async with asyncio.timeout(_GUARD_SECONDS):
            while self.num_asked < times:  # noqa: ASYNC110
                await asyncio.sleep(0.01)


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    server = Server()
    runner = web.ServerRunner(web.Server(server.answer))
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    server.url = f"http://127.0.0.1:{runner.addresses[0][1]}/health"
    yield server
    await runner.cleanup()


@contextlib.asynccontextmanager
async def rollout_worker(
    temporal: TemporalServer, task_queue: str, server: Server
) -> AsyncIterator[asyncio.subprocess.Process]:
    settings = {
        "EVERROLL_TEMPORAL_ADDRESS": temporal.address,
        "EVERROLL_TEMPORAL_NAMESPACE": temporal.namespace,
        "EVERROLL_TASK_QUEUE": task_queue,
        "EVERROLL_WAIT_FOR": server.url,
    }
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "worker", "rollout"),
        cwd=find_root(),
        stderr=asyncio.subprocess.PIPE,
        env=os.environ | settings,
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
            await process.communicate()


async def test_it_takes_no_task_before_they_serve(
    temporal_server: TemporalServer, task_queue: str, server: Server
) -> None:
    async with rollout_worker(temporal_server, task_queue, server) as process, asyncio.timeout(_GUARD_SECONDS):
        await server.await_asked(3)
        assert process.stderr is not None
        reading = asyncio.ensure_future(process.stderr.readline())
        assert not reading.done(), "nothing is said yet"
        server.serves = True
        while b"worker ready" not in (line := await reading):
            assert line, "it ended"
            reading = asyncio.ensure_future(process.stderr.readline())
        process.send_signal(signal.SIGTERM)
        await process.communicate()
    assert process.returncode == 0


async def test_it_can_be_stopped_while_it_waits(
    temporal_server: TemporalServer, task_queue: str, server: Server
) -> None:
    async with rollout_worker(temporal_server, task_queue, server) as process, asyncio.timeout(_GUARD_SECONDS):
        await server.await_asked(1)
        process.send_signal(signal.SIGTERM)
        _, said = await process.communicate()
    assert process.returncode == 0
    assert b"worker ready" not in said


async def test_it_gives_up_by_name(server: Server) -> None:
    with pytest.raises(ConnectionError, match=rf"{server.url} .EVERROLL_WAIT_FOR.: it answers 503"):
        await wait_for_servers([server.url], 0.2)
    assert server.num_asked >= 1
