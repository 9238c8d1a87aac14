"""Heartbeats from the event loop, so that an activity's own code need not think of them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from temporalio import activity

_FRACTION = 3.0
_DEFAULT_INTERVAL_SECONDS = 5.0
_FIRST_SECONDS = 1.0
"""What is over sooner costs the server no heartbeat; what is not shows in the web UI what it does."""


class Progress:
    """What an activity is doing, re-sent with every heartbeat (a bare heartbeat would erase it)."""

    def __init__(self, stage: str) -> None:
        self.stage = stage

    def report(self, stage: str) -> None:
        """Set the stage; safe to call from any thread. Seen in the web UI with the next heartbeat."""
        self.stage = stage


class _Pulse:
    """Beats by timers rather than by a task: an activity that is over at once starts nothing."""

    def __init__(self, progress: Progress, interval_seconds: float, first_seconds: float) -> None:
        self._progress = progress
        self._interval_seconds = interval_seconds
        self._loop = asyncio.get_running_loop()
        self._next = self._loop.call_later(min(first_seconds, interval_seconds), self._beat)

    def _beat(self) -> None:
        self._next = self._loop.call_later(self._interval_seconds, self._beat)
        activity.heartbeat(self._progress.stage)

    def stop(self) -> None:
        self._next.cancel()


@contextlib.asynccontextmanager
async def heartbeating(stage: str, first_seconds: float = _FIRST_SECONDS) -> AsyncIterator[Progress]:
    """Heartbeat three times per heartbeat timeout while the body runs, the first time sooner if `first_seconds` is."""
    progress = Progress(stage)
    timeout = activity.info().heartbeat_timeout
    interval_seconds = timeout.total_seconds() / _FRACTION if timeout else _DEFAULT_INTERVAL_SECONDS
    pulse = _Pulse(progress, interval_seconds, first_seconds)
    try:
        yield progress
    finally:
        pulse.stop()
