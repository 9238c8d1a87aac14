"""The journal: every turn, in SQLite, before an agent sees it.

One thread writes. It takes whatever has queued up meanwhile, commits it as one transaction, and only then are the
callers told: durability costs one disk flush per group of turns, not per turn.

With `synchronous = "full"` (default) each commit is flushed to disk: neither a killed process nor a crashed machine
loses an answered turn. With `"normal"` a killed process loses nothing, and a crashed machine can lose the last seconds;
the file stays consistent in both.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import queue
import sqlite3
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal, TypeVar

from everroll.sessions.errors import JournalError
from everroll.sessions.journal_rows import (
    INSERT_SESSION,
    INSERT_TURN,
    SCHEMA,
    SCHEMA_VERSION,
    decode_session,
    decode_turn,
    encode_session,
    encode_turn,
)
from everroll.sessions.records import Session, SessionRecord, Turn

_MAX_GROUP = 512
_WRITE_TIMEOUT_SECONDS = 60.0
_BUSY_TIMEOUT_SECONDS = 30.0

_T = TypeVar("_T")
_Statement = tuple[str, tuple[Any, ...]]


@dataclass(eq=False)
class _Job:
    """Statements that succeed or fail together."""

    statements: tuple[_Statement, ...]
    done: asyncio.Future[None]


class SqliteJournal:
    """Sessions and turns in one SQLite file. Open it with `open_journal`."""

    def __init__(self, path: Path, lock: IO[bytes], writer: sqlite3.Connection, reader: sqlite3.Connection) -> None:
        self.path = path
        self._lock = lock
        self._writer = writer
        self._reader = reader
        self._reader_lock = threading.Lock()
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._write_forever, name="journal-writer", daemon=True)
        self._thread.start()

    async def create_session(self, record: SessionRecord) -> None:
        """Write a new session; nothing happens if there is one of this id."""
        await self._write((INSERT_SESSION, encode_session(record)))

    async def append_turn(self, session_id: str, turn: Turn, attempt: int) -> None:
        """Write a turn. When this returns, the turn is durable."""
        await self._write((INSERT_TURN, encode_turn(session_id, turn, attempt)))

    async def touch_turn(self, session_id: str, index: int, attempt: int) -> None:
        """Note that a recorded turn was served again in this attempt."""
        await self._write(
            (
                "UPDATE turns SET attempt = max(attempt, ?) WHERE session_id = ? AND turn_index = ?",
                (attempt, session_id, index),
            )
        )

    async def set_attempt(self, session_id: str, attempt: int) -> None:
        await self._write(("UPDATE sessions SET attempt = ? WHERE session_id = ?", (attempt, session_id)))

    async def release_session(self, session_id: str, released_at: float) -> None:
        """Mark a session as released. Turns handed in before are in the journal when this returns."""
        await self._write(("UPDATE sessions SET released_at = ? WHERE session_id = ?", (released_at, session_id)))

    async def write_digest(self, session_id: str, digest: str, num_turns: int) -> None:
        """Keep the digest of a released session; it stays when the turns are gone."""
        await self._write(("INSERT OR REPLACE INTO digests VALUES (?, ?, ?)", (session_id, digest, num_turns)))

    async def load_session(self, session_id: str) -> Session | None:
        """Read a session with all its turns; None when there is none."""
        return await self._read(lambda reader: _select_session(reader, session_id))

    async def load_digest(self, session_id: str) -> str | None:
        def select(reader: sqlite3.Connection) -> str | None:
            row = reader.execute("SELECT digest FROM digests WHERE session_id = ?", (session_id,)).fetchone()
            return None if row is None else str(row[0])

        return await self._read(select)

    async def close(self) -> None:
        """Finish what is queued, then close the file."""
        self._jobs.put(None)
        await asyncio.to_thread(self._thread.join, _WRITE_TIMEOUT_SECONDS)
        self._writer.close()
        with self._reader_lock:
            self._reader.close()
        self._lock.close()

    async def _write(self, *statements: _Statement) -> None:
        """Raises JournalError when it could not be written, or not in time."""
        if not self._thread.is_alive():
            raise JournalError(f"journal {self.path} is closed")
        job = _Job(statements, self._loop.create_future())
        self._jobs.put(job)
        try:
            async with asyncio.timeout(_WRITE_TIMEOUT_SECONDS):
                await job.done
        except TimeoutError as error:
            raise JournalError(f"journal {self.path} was not written within {_WRITE_TIMEOUT_SECONDS} s") from error
        except sqlite3.Error as error:
            raise JournalError(f"journal {self.path} cannot be written: {error}") from error

    async def _read(self, select: Callable[[sqlite3.Connection], _T]) -> _T:
        def locked() -> _T:
            with self._reader_lock:
                return select(self._reader)

        try:
            return await asyncio.to_thread(locked)
        except sqlite3.Error as error:
            raise JournalError(f"journal {self.path} cannot be read: {error}") from error

    def _write_forever(self) -> None:
        """Body of the writer thread."""
        open_ = True
        while open_:
            group = [self._jobs.get()]
            while len(group) < _MAX_GROUP and not self._jobs.empty():
                group.append(self._jobs.get())
            jobs = [job for job in group if job is not None]
            open_ = len(jobs) == len(group)
            outcomes = self._commit(jobs)
            self._loop.call_soon_threadsafe(_settle, outcomes)

    def _commit(self, jobs: list[_Job]) -> list[tuple[_Job, sqlite3.Error | None]]:
        """Commit all jobs as one transaction; if that fails, each by itself, so that one bad job fails alone."""
        error = self._commit_together(jobs)
        if error is None or len(jobs) == 1:
            return [(job, error) for job in jobs]
        return [(job, self._commit_together([job])) for job in jobs]

    def _commit_together(self, jobs: list[_Job]) -> sqlite3.Error | None:
        try:
            self._writer.execute("BEGIN IMMEDIATE")
            for job in jobs:
                for sql, values in job.statements:
                    self._writer.execute(sql, values)
            self._writer.execute("COMMIT")
        except sqlite3.Error as error:
            if self._writer.in_transaction:
                self._writer.execute("ROLLBACK")
            return error
        return None


def open_journal(path: Path, synchronous: Literal["full", "normal"] = "full") -> SqliteJournal:
    """Open or create the journal file. Call it inside a running event loop.

    Raises:
        JournalError: the file cannot be opened, is in use, or was written by another version.
    """
    with contextlib.ExitStack() as on_failure:
        lock = on_failure.enter_context(_lock_journal(path))
        journal = _open_locked(path, lock, synchronous)
        on_failure.pop_all()
    return journal


def _lock_journal(path: Path) -> IO[bytes]:
    """Hold the journal for this process; the system lets go of it when the process ends, however it ends."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = open(f"{path}.lock", "ab")  # noqa: SIM115 (open as long as the journal)
    except OSError as error:
        raise JournalError(f"journal {path} cannot be opened: {error}") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        lock.close()
        raise JournalError(f"journal {path} is in use by another session server") from error
    return lock


def _open_locked(path: Path, lock: IO[bytes], synchronous: str) -> SqliteJournal:
    try:
        writer = _connect(path, synchronous)
        for statement in SCHEMA:
            writer.execute(statement)
        version = writer.execute("SELECT value FROM meta WHERE key = 'schema_version'").fetchone()[0]
        if version != SCHEMA_VERSION:
            raise JournalError(f"journal {path} has schema {version}, this version reads {SCHEMA_VERSION}")
        return SqliteJournal(path, lock, writer, _connect(path, synchronous))
    except (OSError, sqlite3.Error) as error:
        raise JournalError(f"journal {path} cannot be opened: {error}") from error


def _connect(path: Path, synchronous: str) -> sqlite3.Connection:
    connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=_BUSY_TIMEOUT_SECONDS)
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute(f"PRAGMA synchronous = {synchronous.upper()}")
    return connection


def _settle(outcomes: list[tuple[_Job, sqlite3.Error | None]]) -> None:
    """Tell the waiting callers, in the event loop's thread."""
    for job, error in outcomes:
        if job.done.done():  # the caller gave up
            continue
        if error is None:
            job.done.set_result(None)
        else:
            job.done.set_exception(error)


def _select_session(reader: sqlite3.Connection, session_id: str) -> Session | None:
    row = reader.execute("SELECT * FROM sessions WHERE session_id = ?", (session_id,)).fetchone()
    if row is None:
        return None
    session = Session(decode_session(row))
    rows = reader.execute("SELECT * FROM turns WHERE session_id = ? ORDER BY turn_index", (session_id,))
    for turn, attempt in map(decode_turn, rows):
        session.add(turn, attempt)
    return session
