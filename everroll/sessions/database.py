"""What a journal needs of a database: durable writes in groups, and reads. Two implementations stand beside this.

Statements are written once, with `$1`, `$2`, ... for their values and what differs in braces (see `Dialect`). Each may
be run twice: after a lost connection nobody knows whether a commit went through, so it is sent again.

Every write for a session names the epoch in which its writer holds the session. Where that has passed, the statement
puts NULL into a column that must not be NULL; the database refuses it, and the writer learns that it was deposed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

Row = tuple[Any, ...]

MAX_GROUP = 512
"""Most writes that are committed together."""
WRITE_TIMEOUT_SECONDS = 60.0
FENCED_COLUMNS = frozenset({"session_id", "epoch"})
"""Columns whose NULL says that the writer was deposed."""


@dataclass(frozen=True)
class Dialect:
    """How two databases spell the same thing."""

    blob: str
    real: str
    integer: str
    now: str
    """Seconds since 1970 by the database's clock, so that all servers agree on leases."""
    lock: str
    """Ends a subquery for a session's row: a take-over then waits for the write, or the write sees the take-over."""

    def format(self, sql: str) -> str:
        return sql.format(blob=self.blob, real=self.real, integer=self.integer, now=self.now, lock=self.lock)


@dataclass(frozen=True)
class Statement:
    """One statement with its values."""

    sql: str
    values: Row = ()


class Database(Protocol):
    """A place to keep a journal. All methods raise JournalError when it is away, and StorageFullError when full."""

    name: str
    """For people; without a password."""

    async def write(self, *statements: Statement) -> None:
        """Run statements, all or none; durable when this returns. Concurrent calls are committed together.

        Raises:
            NotOwnerError: the statements were for a session that another server has taken over.
        """

    async def read(self, sql: str, *values: Any) -> list[Row]: ...

    async def read_by_key(self, sql: str, *values: Any) -> Row | None:
        """The one row, if there is one, that a statement finds by its primary keys: a read that is short enough not to
        be worth a thread's attention."""

    async def measure_used_bytes(self) -> int:
        """Space that the journal takes."""

    def measure_free_bytes(self) -> int | None:
        """Space left on its disk, where that can be known."""

    async def reclaim(self) -> None:
        """Give the space of deleted rows back in small pieces, where that does not happen by itself."""

    async def close(self) -> None:
        """Finish what is queued, then close."""
