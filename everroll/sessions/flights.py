"""Model calls in flight: copies of a request share one, and it goes on when its clients hang up."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from everroll.sessions.errors import EngineAwayError
from everroll.sessions.records import Turn

Flight = tuple[str, bytes]
"""Session and request key."""


class Flights:
    """Each call is a task of its own; who wants its turn waits for it."""

    def __init__(self) -> None:
        self._tasks: dict[Flight, asyncio.Task[Turn]] = {}

    def __len__(self) -> int:
        return len(self._tasks)

    def __contains__(self, flight: Flight) -> bool:
        return flight in self._tasks

    def list_sessions(self) -> set[str]:
        """The sessions that have calls in flight."""
        return {session_id for session_id, _ in self._tasks}

    def start(self, flight: Flight, call: Coroutine[Any, Any, Turn]) -> None:
        task = asyncio.create_task(call)
        self._tasks[flight] = task
        task.add_done_callback(lambda done: self._land(flight, done))

    async def wait(self, flight: Flight, refuse: Callable[[], None]) -> Turn:
        """Wait without owning: a client that hangs up does not cancel the call.

        Args:
            refuse: called when the call was cancelled; raises if it knows a reason.

        Raises:
            EngineAwayError: the call was cancelled because the server stops.
        """
        task = self._tasks[flight]
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if not task.cancelled():
                raise
            refuse()
            raise EngineAwayError("the session server is stopping") from None

    async def cancel(self, session_id: str | None = None) -> None:
        """Those of a session, or all."""
        tasks = [task for (owner, _), task in self._tasks.items() if session_id in (None, owner)]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _land(self, flight: Flight, task: asyncio.Task[Turn]) -> None:
        del self._tasks[flight]
        if not task.cancelled():
            task.exception()  # seen: whoever waited gets it, and if nobody did, nothing was recorded
