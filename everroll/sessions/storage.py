"""How much room the journal has left: new sessions are refused before the disk is full."""

from __future__ import annotations

from everroll.sessions.database import Database
from everroll.sessions.errors import StorageFullError


class StorageGauge:
    """Measured now and then (`measure`), asked at every new session (`refuse_when_full`)."""

    def __init__(self, database: Database, max_bytes: int | None, min_free_bytes: int) -> None:
        self._database = database
        self._max_bytes = max_bytes
        self._min_free_bytes = min_free_bytes
        self._full = ""

    async def measure(self) -> None:
        """Raises JournalError when the journal is away."""
        self._full = ""
        free = self._database.measure_free_bytes()
        if free is not None and free < self._min_free_bytes:
            self._full = f"its disk has {free} bytes left, fewer than {self._min_free_bytes}"
        elif self._max_bytes is not None:
            used = await self._database.measure_used_bytes()
            if used >= self._max_bytes:
                self._full = f"it takes {used} bytes, the limit is {self._max_bytes}"

    async def refuse_when_full(self) -> None:
        """Raises StorageFullError for a session that would be new; those that there are go on.

        Before it refuses it looks again: a run that goes on because there is room now must not be told of yesterday.
        """
        if self._full:
            await self.measure()
        if self._full:
            raise StorageFullError(f"journal {self._database.name} takes no new sessions: {self._full}")
