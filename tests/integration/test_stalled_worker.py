"""A12: a rollout worker that is frozen, taken for dead, and comes back in the middle of the next attempt."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

from everroll.client import EverrollClient
from tests.boundary_world import model_dir_fixture, open_world  # noqa: F401
from tests.conftest import TemporalServer
from tests.session_helpers import ADMIN_KEY

ROOT = Path(__file__).resolve().parents[2]


@contextlib.asynccontextmanager
async def rollout_worker(server: TemporalServer, task_queue: str, log: Path) -> AsyncIterator[int]:
    """`python -m worker rollout`; gives its process id."""
    settings = {
        "EVERROLL_TEMPORAL_ADDRESS": server.address,
        "EVERROLL_TASK_QUEUE": task_queue,
        "EVERROLL_ADMIN_KEY": ADMIN_KEY,
    }
    with log.open("wb") as file:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "worker", "rollout"), cwd=ROOT, stdout=file, stderr=file, env=os.environ | settings
        )
    try:
        yield process.pid
    finally:
        process.kill()
        await asyncio.wait_for(process.wait(), 60)


async def wait_for_files(directory: Path, pattern: str, count: int) -> list[str]:
    """Contents of so many files, ordered by name."""
    deadline = time.monotonic() + 60
    while len(found := read_files(directory, pattern)) < count or not all(found):
        assert time.monotonic() < deadline, (pattern, found)
        await asyncio.sleep(0.02)
    return found


def read_files(directory: Path, pattern: str) -> list[str]:
    return [path.read_text() for path in sorted(directory.glob(pattern))]


async def test_what_a_frozen_worker_says_afterwards_is_ignored(
    client: EverrollClient,
    temporal_server: TemporalServer,
    run_name: str,
    task_queue: str,
    model_dir: Path,
    tmp_path: Path,
) -> None:
    """Its turns are refused, its result counts for nothing; attempt 2 goes on from the turns that were recorded."""
    progress = tmp_path / "progress"
    progress.mkdir()
    async with contextlib.AsyncExitStack() as stack:
        world = await stack.enter_async_context(
            open_world(client, run_name, task_queue, model_dir, tmp_path, rollout_queue_suffix="-unused")
        )
        agent = {"function": "tests.boundary_agents:play_two_turns", "args": {"directory": str(progress)}}
        rollout = {"groups_per_step": 1, "heartbeat_timeout_seconds": 1.5, "agent": agent}
        await client.start(world.spec(run={"num_steps": 1}, rollout=rollout))
        frozen = await stack.enter_async_context(rollout_worker(temporal_server, task_queue, tmp_path / "1.log"))
        await wait_for_files(progress, f"began-{frozen}-*", 2)
        os.kill(frozen, signal.SIGSTOP)
        second = await stack.enter_async_context(rollout_worker(temporal_server, task_queue, tmp_path / "2.log"))
        await wait_for_files(progress, f"began-{second}-*", 2)
        (progress / f"go-{frozen}").touch()
        os.kill(frozen, signal.SIGCONT)
        assert await wait_for_files(progress, f"ended-{frozen}-*", 2) == ["409", "409"]
        (progress / f"go-{second}").touch()
        result = await asyncio.wait_for(client.result(run_name), 60)
        assert await wait_for_files(progress, f"ended-{second}-*", 2) == ["200", "200"]
    assert result.steps == 1
    assert result.unusable_episodes == {}
    assert len(world.engine.requests) == 4, "recorded turns are served again, and refused ones reach no engine"
    assert world.trained_groups() == [[0]]
