"""Read-only access to a journal in PostgreSQL."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlsplit

import asyncpg

from everroll.sessions.digest import SessionDigest
from everroll.sessions.reading import (
    SESSION_COLUMNS,
    TURN_COLUMNS,
    JournalReadError,
    RecordedSession,
    SessionListing,
    decode_session,
    parse_digest,
)

_CONNECT_SECONDS = 10.0
_COMMAND_SECONDS = 60.0
_MAX_CONNECTIONS = 4


class PostgresReader:
    """Connects when it is first used; every transaction is read-only."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._pool: asyncpg.Pool | None = None
        parts = urlsplit(url)
        self._name = f"{parts.hostname or ''}{parts.path}"
        """Without a password."""

    async def read_session(self, session_id: str) -> RecordedSession | None:
        found = await self._select(f"SELECT {SESSION_COLUMNS} FROM sessions WHERE session_id = $1", session_id)
        if not found:
            return None
        sql = f"SELECT {TURN_COLUMNS} FROM turns WHERE session_id = $1 ORDER BY turn_index"
        return decode_session(found[0], await self._select(sql, session_id))

    async def read_digest(self, session_id: str) -> SessionDigest | None:
        rows = await self._select("SELECT digest FROM digests WHERE session_id = $1", session_id)
        return parse_digest(str(rows[0][0])) if rows else None

    async def list_sessions(self, prefix: str, limit: int) -> list[SessionListing]:
        rows = await self._select(
            "SELECT session_id, created_at, released_at, "
            "(SELECT count(*) FROM turns WHERE turns.session_id = sessions.session_id) "
            "FROM sessions WHERE starts_with(session_id, $1) ORDER BY created_at DESC LIMIT $2",
            *(prefix, limit),
        )
        return [SessionListing(*row) for row in rows]

    async def close(self) -> None:
        if self._pool is not None:
            self._pool.terminate()

    async def _select(self, sql: str, *values: str | int) -> list[tuple[Any, ...]]:
        try:
            pool = await self._open()
            async with pool.acquire(timeout=_CONNECT_SECONDS) as connection:
                return [tuple(record) for record in await connection.fetch(sql, *values)]
        except (OSError, TimeoutError, ValueError, asyncpg.PostgresError, asyncpg.InterfaceError) as error:
            raise JournalReadError(f"journal {self._name} cannot be read: {error!r}") from error

    async def _open(self) -> asyncpg.Pool:
        if self._pool is None:
            self._pool = asyncpg.create_pool(
                self._url,
                min_size=0,
                max_size=_MAX_CONNECTIONS,
                timeout=_CONNECT_SECONDS,
                command_timeout=_COMMAND_SECONDS,
                server_settings={"default_transaction_read_only": "on"},
            )
        await self._pool
        return self._pool
