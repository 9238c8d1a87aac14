"""Fixtures that all tests share: one real Temporal server a session, unique task queues, free ports."""

from __future__ import annotations

import asyncio
import logging
import subprocess
import uuid
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from everroll.client import EverrollClient
from everroll.local.plan import TEMPORAL_TUNING
from everroll.local.ports import choose_port
from everroll.local.temporal_binary import find_temporal

_START_SECONDS = 30.0


@dataclass(frozen=True)
class TemporalServer:
    """A Temporal development server on loopback."""

    address: str
    namespace: str = "default"


@pytest.fixture(scope="session")
def temporal_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TemporalServer]:
    """The real server binary with a database file, tuned as `everroll up` does, search attributes registered."""
    directory = tmp_path_factory.mktemp("temporal")
    port = choose_port(0)
    command = [
        str(find_temporal()),
        *("server", "start-dev", "--headless", "--ip", "127.0.0.1", "--port", str(port)),
        *("--db-filename", str(directory / "temporal.sqlite"), "--log-level", "error"),
        *TEMPORAL_TUNING,
        # Far below the default of 4,096, so that continue-as-new happens in ordinary tests.
        *("--dynamic-config-value", "limit.historyCount.suggestContinueAsNew=200"),
    ]
    with open(directory / "server.log", "wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    server = TemporalServer(f"127.0.0.1:{port}")
    try:
        asyncio.run(_prepare(server))
        yield server
    finally:
        process.terminate()
        process.wait(timeout=20)


async def _prepare(server: TemporalServer) -> None:
    client = await EverrollClient.connect(server.address, server.namespace, _START_SECONDS)
    await client.register_search_attributes()


@pytest.fixture(autouse=True)
def log_levels() -> Iterator[None]:
    """The command line, run in a test's own process, quiets loggers that another test listens to."""
    loggers = [logging.getLogger(name) for name in ("temporalio", "temporal_core")]
    levels = [logger.level for logger in loggers]
    yield
    for logger, level in zip(loggers, levels, strict=True):
        logger.setLevel(level)


@pytest.fixture
async def client(temporal_server: TemporalServer) -> EverrollClient:
    return await EverrollClient.connect(temporal_server.address, temporal_server.namespace)


@pytest.fixture
def task_queue() -> str:
    return f"everroll-{uuid.uuid4().hex[:12]}"


@pytest.fixture
def run_name(request: pytest.FixtureRequest) -> str:
    name = "".join(letter if letter.isalnum() else "-" for letter in request.node.name)[:40].strip("-")
    return f"{name}-{uuid.uuid4().hex[:8]}"
