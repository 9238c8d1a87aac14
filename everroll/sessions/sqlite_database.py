"""A journal's database in one SQLite file, for one machine.

One thread writes. It takes whatever has queued up meanwhile, commits it as one transaction, and only then are the
callers told: durability costs one disk flush per group of turns, not per turn.

With `synchronous = "full"` (default) each commit is flushed to disk: neither a killed process nor a crashed machine
loses an answered turn. With `"normal"` a killed process loses nothing, and a crashed machine can lose the last seconds;
the file stays consistent in both.
"""

from __future__ import annotations

import asyncio
import fcntl
import functools
import queue
import re
import shutil
import sqlite3
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from everroll.sessions.database import (
    FENCED_COLUMNS,
    MAX_GROUP,
    WRITE_TIMEOUT_SECONDS,
    Dialect,
    Row,
    Statement,
)
from everroll.sessions.errors import JournalError, NotOwnerError, StorageFullError
from everroll.sessions.journal_schema import MIGRATIONS, check_version

_BUSY_TIMEOUT_SECONDS = 30.0
_LOCK_WAIT_SECONDS = 1.0
_RECLAIM_PAGES = 256
"""Freed in one write; turns are written in between."""
_NULL = re.compile(r"^NOT NULL constraint failed: \w+\.(\w+)$")

DIALECT = Dialect(
    blob="BLOB", real="REAL", integer="INTEGER", now="((julianday('now') - 2440587.5) * 86400.0)", lock=""
)


@dataclass(eq=False)
class _Job:
    """Statements that succeed or fail together."""

    statements: tuple[Statement, ...]
    done: asyncio.Future[None]


class SqliteDatabase:
    """Open it with `open_sqlite`."""

    def __init__(
        self, path: Path, writer: sqlite3.Connection, reader: sqlite3.Connection, finder: sqlite3.Connection
    ) -> None:
        self.name = str(path)
        self.path = path
        self._writer = writer
        self._reader = reader
        self._reader_lock = threading.Lock()
        self._finder = finder
        """For the event loop's thread alone; it waits for nobody."""
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._write_forever, name="journal-writer", daemon=True)
        self._thread.start()

    async def write(self, *statements: Statement) -> None:
        if not self._thread.is_alive():
            raise JournalError(f"journal {self.path} is closed")
        job = _Job(statements, self._loop.create_future())
        self._jobs.put(job)
        try:
            async with asyncio.timeout(WRITE_TIMEOUT_SECONDS):
                await job.done
        except TimeoutError as error:
            raise JournalError(f"journal {self.path} was not written within {WRITE_TIMEOUT_SECONDS:g} s") from error
        except sqlite3.Error as error:
            raise self._translate(error) from error

    async def read(self, sql: str, *values: Any) -> list[Row]:
        def locked() -> list[Row]:
            with self._reader_lock:
                return self._reader.execute(_adapt(sql), values).fetchall()

        try:
            return await asyncio.to_thread(locked)
        except sqlite3.Error as error:
            raise JournalError(f"journal {self.path} cannot be read: {error}") from error

    async def read_by_key(self, sql: str, *values: Any) -> Row | None:
        try:
            row: Row | None = self._finder.execute(_adapt(sql), values).fetchone()
        except sqlite3.Error:  # busy, for one, as while the file is recovered: the patient way then
            rows = await self.read(sql, *values)
            return rows[0] if rows else None
        return row

    async def measure_used_bytes(self) -> int:
        ((pages, free, size),) = await self.read(
            "SELECT page_count, freelist_count, page_size "
            "FROM pragma_page_count(), pragma_freelist_count(), pragma_page_size()"
        )
        return int((pages - free) * size)

    def measure_free_bytes(self) -> int | None:
        return shutil.disk_usage(self.path.parent).free

    async def reclaim(self) -> None:
        ((free,),) = await self.read("SELECT freelist_count FROM pragma_freelist_count()")
        for _ in range(0, free, _RECLAIM_PAGES):
            # One page a statement: the driver takes one step, and a step frees one page.
            await self.write(*[Statement("PRAGMA incremental_vacuum(1)")] * _RECLAIM_PAGES)

    async def close(self) -> None:
        self._jobs.put(None)
        await asyncio.to_thread(self._thread.join, WRITE_TIMEOUT_SECONDS)
        self._writer.close()
        self._finder.close()
        with self._reader_lock:
            self._reader.close()

    def _translate(self, error: sqlite3.Error) -> JournalError | NotOwnerError:
        found = _NULL.match(str(error))
        if found and found[1] in FENCED_COLUMNS:
            return NotOwnerError("another session server has taken this session over")
        if error.sqlite_errorcode == sqlite3.SQLITE_FULL:
            return StorageFullError(f"journal {self.path} cannot be written: {error}")
        return JournalError(f"journal {self.path} cannot be written: {error}")

    def _write_forever(self) -> None:
        """Body of the writer thread."""
        open_ = True
        while open_:
            group = [self._jobs.get()]
            while len(group) < MAX_GROUP and not self._jobs.empty():
                group.append(self._jobs.get())
            jobs = [job for job in group if job is not None]
            open_ = len(jobs) == len(group)
            outcomes = self._commit(jobs)
            self._loop.call_soon_threadsafe(_settle, outcomes)

    def _commit(self, jobs: list[_Job]) -> list[tuple[_Job, Exception | None]]:
        """Commit all jobs as one transaction; if that fails, each by itself, so that one bad job fails alone."""
        error = self._commit_together(jobs)
        if error is None or len(jobs) == 1:
            return [(job, error) for job in jobs]
        return [(job, self._commit_together([job])) for job in jobs]

    def _commit_together(self, jobs: list[_Job]) -> Exception | None:
        try:
            self._writer.execute("BEGIN IMMEDIATE")
            for job in jobs:
                for statement in job.statements:
                    self._writer.execute(_adapt(statement.sql), statement.values).fetchall()
            self._writer.execute("COMMIT")
        except Exception as error:  # also values that no column holds: the thread must outlive any job
            if self._writer.in_transaction:
                self._writer.execute("ROLLBACK")
            return error
        return None


def open_sqlite(path: Path, synchronous: str) -> SqliteDatabase:
    """Open or create the file, and bring its tables up to date. Call it inside a running event loop.

    Raises:
        JournalError: it cannot be opened, or was written by a later version.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        writer = _connect(path, synchronous)
        _migrate(writer, path)
        return SqliteDatabase(path, writer, _connect(path, synchronous), _connect(path, synchronous, 0.0))
    except (OSError, sqlite3.Error) as error:
        raise JournalError(f"journal {path} cannot be opened: {error}") from error


def lock_sqlite(path: Path) -> IO[bytes]:
    """Hold the file for this server; the system lets go of it when the process ends, however it ends.

    Raises:
        JournalError: another session server holds it.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = open(f"{path}.lock", "ab")  # noqa: SIM115 (open as long as the journal)
    except OSError as error:
        raise JournalError(f"journal {path} cannot be opened: {error}") from error
    deadline = time.monotonic() + _LOCK_WAIT_SECONDS  # one that was killed just now may still be on its way out
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return lock
        except OSError as error:
            if time.monotonic() > deadline:
                lock.close()
                raise JournalError(f"journal {path} is in use by another session server") from error
            time.sleep(0.05)


def _migrate(writer: sqlite3.Connection, path: Path) -> None:
    writer.execute("BEGIN IMMEDIATE")
    try:
        writer.execute("CREATE TABLE IF NOT EXISTS meta (key TEXT PRIMARY KEY, value TEXT NOT NULL)")
        row = writer.execute("SELECT value FROM meta WHERE key = 'schema_version'").fetchone()
        version = check_version(str(path), None if row is None else row[0])
        for statements in MIGRATIONS[version:]:
            for sql in statements:
                writer.execute(DIALECT.format(sql))
        writer.execute("INSERT OR REPLACE INTO meta VALUES ('schema_version', ?)", (str(len(MIGRATIONS)),))
        writer.execute("COMMIT")
    except BaseException:
        writer.execute("ROLLBACK")
        raise


def _connect(path: Path, synchronous: str, busy_timeout_seconds: float = _BUSY_TIMEOUT_SECONDS) -> sqlite3.Connection:
    connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=busy_timeout_seconds)
    connection.execute("PRAGMA auto_vacuum = INCREMENTAL")  # counts for a new file only
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute(f"PRAGMA synchronous = {synchronous.upper()}")
    return connection


@functools.cache
def _adapt(sql: str) -> str:
    """`$1` is `?1` here."""
    return re.sub(r"\$(\d+)", r"?\1", DIALECT.format(sql))


def _settle(outcomes: list[tuple[_Job, Exception | None]]) -> None:
    """Tell the waiting callers, in the event loop's thread."""
    for job, error in outcomes:
        if job.done.done():  # the caller gave up
            continue
        if error is None:
            job.done.set_result(None)
        else:
            job.done.set_exception(error)
