"""Heartbeats from a background task, so that an activity's own code need not think of them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from temporalio import activity

_FRACTION = 3.0
_DEFAULT_INTERVAL_SECONDS = 5.0
_FIRST_SECONDS = 1.0
"""What is over sooner costs the server no heartbeat."""


class Progress:
    """What an activity is doing, re-sent with every heartbeat (a bare heartbeat would erase it)."""

    def __init__(self, stage: str) -> None:
        self.stage = stage

    def report(self, stage: str) -> None:
        """Set the stage; safe to call from any thread. Seen in the web UI with the next heartbeat."""
        self.stage = stage


@contextlib.asynccontextmanager
async def heartbeating(stage: str) -> AsyncIterator[Progress]:
    """Heartbeat three times per heartbeat timeout while the body runs."""
    progress = Progress(stage)
    timeout = activity.info().heartbeat_timeout
    interval = timeout.total_seconds() / _FRACTION if timeout else _DEFAULT_INTERVAL_SECONDS
    task = asyncio.create_task(_beat(progress, interval))
    try:
        yield progress
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def _beat(progress: Progress, interval_seconds: float) -> None:
    await asyncio.sleep(min(_FIRST_SECONDS, interval_seconds))
    while True:
        activity.heartbeat(progress.stage)
        await asyncio.sleep(interval_seconds)
