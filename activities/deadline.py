"""A deadline that holds even for work that swallows its own cancellation."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from temporalio import activity

T = TypeVar("T")
_GRACE_SECONDS = 5.0
_left_behind: set[asyncio.Task[Any]] = set()
"""Keeps tasks alive that nobody waits for; the event loop holds weak references only."""


class DeadlinePassedError(Exception):
    """The work did not end in time. No `TimeoutError`, which the work may raise by itself."""


async def run_within(work: Coroutine[Any, Any, T], seconds: float) -> T:
    """The result of `work`, or whatever it raises.

    Late work is cancelled; if it does not end within five more seconds either, it is left behind with a warning. The
    same holds when the caller is cancelled.

    Raises:
        DeadlinePassedError: it did not end within `seconds`.
    """
    task = asyncio.create_task(work)
    try:
        done, _ = await asyncio.wait({task}, timeout=seconds)
    except asyncio.CancelledError:
        await _end(task)
        raise
    if not done:
        await _end(task)
        raise DeadlinePassedError
    return task.result()


async def _end(task: asyncio.Task[Any]) -> None:
    task.cancel()
    _left_behind.add(task)
    task.add_done_callback(_forget)
    _, pending = await asyncio.wait({task}, timeout=_GRACE_SECONDS)
    if pending:
        activity.logger.warning("it goes on %.0f s after it was cancelled, and is left behind", _GRACE_SECONDS)


def _forget(task: asyncio.Task[Any]) -> None:
    _left_behind.discard(task)
    if not task.cancelled():
        task.exception()  # looked at, so that it is not reported as lost
