"""A journal's database in PostgreSQL, for several servers behind one address.

One task writes. It takes whatever has queued up meanwhile and sends it as one transaction, equal statements together
in one round trip. A lost connection is opened again within a bound, and the group is sent again; past the bound the
callers are told.
"""

from __future__ import annotations

import asyncio
import functools
import time
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import asyncpg

from everroll.sessions.database import (
    FENCED_COLUMNS,
    MAX_GROUP,
    WRITE_TIMEOUT_SECONDS,
    Dialect,
    Row,
    Statement,
)
from everroll.sessions.errors import JournalError, NotOwnerError, SessionError, StorageFullError
from everroll.sessions.journal_schema import MIGRATIONS, check_version

_CONNECT_SECONDS = 5.0
_COMMAND_SECONDS = 20.0
_RECONNECT_SECONDS = 10.0
_MAX_CONNECTIONS = 5
_MIGRATION_LOCK = 0x6576_6572
"""Of `pg_advisory_xact_lock`: one server at a time brings the tables up to date."""

DIALECT = Dialect(
    blob="BYTEA",
    real="DOUBLE PRECISION",
    integer="BIGINT",
    now="CAST(EXTRACT(EPOCH FROM clock_timestamp()) AS DOUBLE PRECISION)",
    lock="FOR SHARE",
)
# What says that the connection, not the statement, is at fault.
_LOST = (
    OSError,
    TimeoutError,
    asyncpg.PostgresConnectionError,
    asyncpg.InterfaceError,
    asyncpg.InternalClientError,  # of a connection that was cut in the middle of a call
    asyncpg.OperatorInterventionError,
    asyncpg.TooManyConnectionsError,
)


@dataclass(eq=False)
class _Job:
    """Statements that succeed or fail together."""

    statements: tuple[Statement, ...]
    done: asyncio.Future[None]


class PostgresDatabase:
    """Open it with `open_postgres`."""

    def __init__(self, pool: asyncpg.Pool, name: str) -> None:
        self.name = name
        self._pool = pool
        self._jobs: asyncio.Queue[_Job | None] = asyncio.Queue()
        self._writer = asyncio.create_task(self._write_forever(), name="journal-writer")

    async def write(self, *statements: Statement) -> None:
        if self._writer.done():
            raise JournalError(f"journal {self.name} is closed")
        job = _Job(statements, asyncio.get_running_loop().create_future())
        self._jobs.put_nowait(job)
        try:
            async with asyncio.timeout(WRITE_TIMEOUT_SECONDS):
                await job.done
        except TimeoutError as error:
            raise JournalError(f"journal {self.name} was not written within {WRITE_TIMEOUT_SECONDS:g} s") from error

    async def read(self, sql: str, *values: Any) -> list[Row]:
        deadline = time.monotonic() + _RECONNECT_SECONDS
        pause = 0.05
        while True:
            try:
                async with self._pool.acquire(timeout=_CONNECT_SECONDS) as connection:
                    return [tuple(record) for record in await connection.fetch(_adapt(sql), *values)]
            except _LOST as error:
                if time.monotonic() > deadline:
                    raise JournalError(f"journal {self.name} cannot be reached: {error!r}") from error
                await asyncio.sleep(pause)
                pause = min(2 * pause, 1.0)
            except asyncpg.PostgresError as error:
                raise JournalError(f"journal {self.name} cannot be read: {error}") from error

    async def read_by_key(self, sql: str, *values: Any) -> Row | None:
        rows = await self.read(sql, *values)
        return rows[0] if rows else None

    async def measure_used_bytes(self) -> int:
        ((size,),) = await self.read("SELECT pg_database_size(current_database())")
        return int(size)

    def measure_free_bytes(self) -> int | None:
        return None

    async def reclaim(self) -> None:
        """Autovacuum does."""

    async def close(self) -> None:
        self._jobs.put_nowait(None)
        try:
            async with asyncio.timeout(WRITE_TIMEOUT_SECONDS):
                await self._writer
                await self._pool.close()
        except TimeoutError:
            self._pool.terminate()

    async def _write_forever(self) -> None:
        open_ = True
        while open_:
            group = [await self._jobs.get()]
            while len(group) < MAX_GROUP and not self._jobs.empty():
                group.append(self._jobs.get_nowait())
            jobs = [job for job in group if job is not None]
            open_ = len(jobs) == len(group)
            if jobs:
                await self._commit(jobs)

    async def _commit(self, jobs: list[_Job]) -> None:
        """Commit all jobs as one transaction; if that fails, each by itself, so that one bad job fails alone."""
        error = await self._commit_within_bound(jobs)
        if error is not None and len(jobs) > 1 and not isinstance(error, _LOST):
            for job in jobs:
                await self._commit([job])
            return
        for job in jobs:
            if job.done.done():  # the caller gave up
                continue
            if error is None:
                job.done.set_result(None)
            else:
                job.done.set_exception(self._translate(error))

    async def _commit_within_bound(self, jobs: list[_Job]) -> Exception | None:
        """Commit, again after a lost connection; gives the error that remains."""
        deadline = time.monotonic() + _RECONNECT_SECONDS
        pause = 0.05
        while True:
            try:
                await self._commit_together(jobs)
                return None
            except _LOST as error:
                if time.monotonic() > deadline:
                    return error
                await asyncio.sleep(pause)
                pause = min(2 * pause, 1.0)
            except Exception as error:  # the statements' own fault
                return error

    async def _commit_together(self, jobs: list[_Job]) -> None:
        rows: dict[str, list[Row]] = {}
        for job in jobs:
            for statement in job.statements:
                rows.setdefault(_adapt(statement.sql), []).append(statement.values)
        async with self._pool.acquire(timeout=_CONNECT_SECONDS) as connection, connection.transaction():
            for sql, values in rows.items():
                await connection.executemany(sql, values)

    def _translate(self, error: Exception) -> SessionError:
        if isinstance(error, asyncpg.NotNullViolationError) and error.column_name in FENCED_COLUMNS:
            return NotOwnerError("another session server has taken this session over")
        if isinstance(error, asyncpg.DiskFullError):
            return StorageFullError(f"journal {self.name} cannot be written: {error}")
        translated = JournalError(f"journal {self.name} cannot be written: {error!r}")
        translated.__cause__ = error
        return translated


async def open_postgres(url: str) -> PostgresDatabase:
    """Connect, and bring the tables up to date.

    Raises:
        JournalError: it cannot be reached, refuses the credentials, or was written by a later version.
    """
    name = describe_url(url)
    pool: asyncpg.Pool | None = None
    try:
        pool = await asyncpg.create_pool(
            url, min_size=1, max_size=_MAX_CONNECTIONS, timeout=_CONNECT_SECONDS, command_timeout=_COMMAND_SECONDS
        )
        async with pool.acquire(timeout=_CONNECT_SECONDS) as connection, connection.transaction():
            await _migrate(connection, name)
    except (*_LOST, asyncpg.PostgresError, ValueError) as error:
        if pool is not None:
            pool.terminate()
        raise JournalError(f"journal {name} cannot be opened: {type(error).__name__}: {error}") from None
    except JournalError:
        assert pool is not None
        pool.terminate()
        raise
    return PostgresDatabase(pool, name)


def describe_url(url: str) -> str:
    """The URL without user, password and options, for messages and logs."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"


async def _migrate(connection: Any, name: str) -> None:
    await connection.execute("SELECT pg_advisory_xact_lock($1)", _MIGRATION_LOCK)
    await connection.execute("CREATE TABLE IF NOT EXISTS meta (key TEXT PRIMARY KEY, value TEXT NOT NULL)")
    version = check_version(name, await connection.fetchval("SELECT value FROM meta WHERE key = 'schema_version'"))
    for statements in MIGRATIONS[version:]:
        for sql in statements:
            await connection.execute(DIALECT.format(sql))
    await connection.execute(
        "INSERT INTO meta VALUES ('schema_version', $1) ON CONFLICT (key) DO UPDATE SET value = excluded.value",
        str(len(MIGRATIONS)),
    )


@functools.cache
def _adapt(sql: str) -> str:
    return DIALECT.format(sql)
