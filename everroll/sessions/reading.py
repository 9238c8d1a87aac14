"""Read-only access to a journal, for the audit and for people. It may be in use by a session server meanwhile.

Columns are read by name and decoded here, apart from the code that wrote them: what the audit proves should not rest on
the writer. Only tables and column names are shared with it: `sessions`, `turns`, `digests` (see `journal_rows`).
"""

from __future__ import annotations

import asyncio
import json
import sqlite3
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import unquote, urlsplit

import numpy as np
from pydantic import ValidationError

from everroll.contracts.spec import SamplingSpec
from everroll.sessions.digest import SessionDigest
from everroll.tokens.assembly import TurnTokens

_BUSY_TIMEOUT_SECONDS = 30.0
SESSION_COLUMNS = "session_id, sampling, seed, created_at, attempt, released_at"
TURN_COLUMNS = (
    "turn_index, attempt, follows, extends, depth, prompt_key, added_ids, completion_ids, logprobs, weight_versions, "
    "finish_reason, messages, tools, reply, num_prompt_tokens, num_cached_tokens, seed, created_at, note"
)


class JournalReadError(RuntimeError):
    """A journal is missing, is none, or cannot be read; the text names it."""


class MalformedSessionError(JournalReadError):
    """The journal can be read, and what it holds of one session is no record of a session: somebody changed it."""


@dataclass(frozen=True, eq=False)
class RecordedTurn:
    """One row of `turns`."""

    tokens: TurnTokens
    attempt: int
    """The latest attempt that made it or was served it again."""
    depth: int
    messages: list[dict[str, Any]]
    """What the request added to the conversation."""
    tools: list[dict[str, Any]] | None
    reply: dict[str, Any]
    num_prompt_tokens: int
    num_cached_tokens: int
    seed: int
    created_at: float
    note: str


@dataclass(frozen=True, eq=False)
class RecordedSession:
    """A session's rows. Times are Unix seconds."""

    session_id: str
    sampling: SamplingSpec
    seed: int
    created_at: float
    attempt: int
    released_at: float | None
    turns: list[RecordedTurn]
    """In order of recording; empty also when the journal's retention has passed."""

    def live_turns(self) -> list[TurnTokens]:
        """The turns of the latest attempt and all that they follow: what samples are assembled from."""
        by_index = {turn.tokens.index: turn.tokens for turn in self.turns}
        live: set[int] = set()
        for turn in self.turns:
            index: int | None = turn.tokens.index if turn.attempt == self.attempt else None
            while index is not None and index not in live:
                live.add(index)
                index = by_index[index].follows
        return [by_index[index] for index in sorted(live)]


@dataclass(frozen=True)
class SessionListing:
    """One line of a list of sessions."""

    session_id: str
    created_at: float
    released_at: float | None
    num_turns: int


class JournalReader(Protocol):
    """What is read of a journal. Raises JournalReadError when it cannot be."""

    async def read_session(self, session_id: str) -> RecordedSession | None:
        """A session with all its turns; None when there is no row of it."""
        ...

    async def read_digest(self, session_id: str) -> SessionDigest | None:
        """What was kept of a session's samples for good; None when there is none (yet)."""
        ...

    async def list_sessions(self, prefix: str, limit: int) -> list[SessionListing]:
        """Sessions whose id starts with `prefix`, newest first."""
        ...

    async def close(self) -> None: ...


def open_journal_reader(url: str) -> JournalReader:
    """Open a journal by path, or by URL: `sqlite:///path` or `postgresql://user@host/database`.

    Raises:
        JournalReadError: missing, not a journal, or of a kind that is not supported.
    """
    parts = urlsplit(url)
    if parts.scheme in ("", "sqlite", "file"):
        return SqliteReader(Path(unquote(parts.path)) if parts.scheme else Path(url))
    if parts.scheme not in ("postgresql", "postgres"):
        raise JournalReadError(f"journal {parts.scheme}://...: give a path, or a postgresql:// URL")
    try:
        from everroll.sessions.reading_postgres import PostgresReader
    except ModuleNotFoundError as error:
        text = f"a journal in PostgreSQL needs the package {error.name}: pip install 'everroll[postgres]'"
        raise JournalReadError(text) from error
    return PostgresReader(url)


class SqliteReader:
    """Reads a journal in an SQLite file."""

    def __init__(self, path: Path) -> None:
        if not path.is_file():
            raise JournalReadError(f"no journal at {path}")
        self._path = path
        self._lock = threading.Lock()
        try:
            self._connection = sqlite3.connect(
                path, isolation_level=None, check_same_thread=False, timeout=_BUSY_TIMEOUT_SECONDS
            )
            self._connection.execute("PRAGMA query_only = ON")
            self._connection.execute("SELECT session_id FROM sessions LIMIT 1").fetchone()
        except sqlite3.Error as error:
            raise JournalReadError(f"{path} is no journal: {error}") from error

    async def read_session(self, session_id: str) -> RecordedSession | None:
        found = await self._select(f"SELECT {SESSION_COLUMNS} FROM sessions WHERE session_id = ?", session_id)
        if not found:
            return None
        rows = await self._select(
            f"SELECT {TURN_COLUMNS} FROM turns WHERE session_id = ? ORDER BY turn_index", session_id
        )
        return decode_session(found[0], rows)

    async def read_digest(self, session_id: str) -> SessionDigest | None:
        rows = await self._select("SELECT digest FROM digests WHERE session_id = ?", session_id)
        return parse_digest(str(rows[0][0])) if rows else None

    async def list_sessions(self, prefix: str, limit: int) -> list[SessionListing]:
        rows = await self._select(
            "SELECT session_id, created_at, released_at, "
            "(SELECT count(*) FROM turns WHERE turns.session_id = sessions.session_id) "
            "FROM sessions WHERE substr(session_id, 1, ?) = ? ORDER BY created_at DESC LIMIT ?",
            *(len(prefix), prefix, limit),
        )
        return [SessionListing(*row) for row in rows]

    async def close(self) -> None:
        with self._lock:
            self._connection.close()

    async def _select(self, sql: str, *values: str | int) -> list[tuple[Any, ...]]:
        def locked() -> list[tuple[Any, ...]]:
            with self._lock:
                return self._connection.execute(sql, values).fetchall()

        try:
            return await asyncio.to_thread(locked)
        except sqlite3.Error as error:
            raise JournalReadError(f"journal {self._path} cannot be read: {error}") from error


def parse_digest(text: str) -> SessionDigest | None:
    """A digest as the journal keeps it; None for one of another version, which says nothing to this one.

    Raises:
        MalformedSessionError: it is no digest.
    """
    if not text.startswith("{"):
        return None
    try:
        digest = SessionDigest.model_validate_json(text)
    except ValidationError as error:
        raise MalformedSessionError(f"the digest kept at release cannot be read: {error}") from error
    return digest if digest.version == 1 else None


def decode_session(row: tuple[Any, ...], turns: list[tuple[Any, ...]]) -> RecordedSession:
    """Rows as selected by `SESSION_COLUMNS` and `TURN_COLUMNS`.

    Raises:
        MalformedSessionError: names the session, and the first turn that is wrong.
    """
    session_id, sampling, seed, created_at, attempt, released_at = row
    try:
        session = RecordedSession(
            session_id=session_id,
            sampling=SamplingSpec.model_validate_json(sampling),
            seed=seed,
            created_at=created_at,
            attempt=attempt,
            released_at=released_at,
            turns=[_decode_turn(turn) for turn in turns],
        )
    except (ValueError, TypeError) as error:
        raise MalformedSessionError(f"session {session_id} cannot be read: {error}") from error
    _validate_turns(session)
    return session


def _validate_turns(session: RecordedSession) -> None:
    """Turns form a forest that grows, so that whoever walks it up comes to an end; values of a turn are aligned."""
    seen: set[int] = set()
    for turn in session.turns:
        tokens = turn.tokens
        who = f"session {session.session_id} turn {tokens.index}"
        if tokens.follows is not None and tokens.follows not in seen:
            raise MalformedSessionError(f"{who} follows turn {tokens.follows}, which was not recorded before it")
        sizes = [tokens.completion_ids.size, tokens.logprobs.size, tokens.weight_versions.size]
        if len(set(sizes)) > 1:
            raise MalformedSessionError(f"{who} has {sizes} sampled tokens, log-probabilities and weight versions")
        seen.add(tokens.index)


def _decode_turn(row: tuple[Any, ...]) -> RecordedTurn:
    index, attempt, follows, extends, depth, prompt_key, added_ids, completion_ids, logprobs, weight_versions = row[:10]
    finish_reason, messages, tools, reply, num_prompt_tokens, num_cached_tokens, seed, created_at, note = row[10:]
    tokens = TurnTokens(
        index=index,
        follows=follows,
        extends=bool(extends),
        prompt_key=bytes(prompt_key),
        added_ids=np.frombuffer(added_ids, dtype="<i4").astype(np.int32),
        completion_ids=np.frombuffer(completion_ids, dtype="<i4").astype(np.int32),
        logprobs=np.frombuffer(logprobs, dtype="<f4").astype(np.float32),
        weight_versions=np.frombuffer(weight_versions, dtype="<i4").astype(np.int32),
        finish_reason=finish_reason,
    )
    return RecordedTurn(
        tokens=tokens,
        attempt=attempt,
        depth=depth,
        messages=json.loads(messages),
        tools=json.loads(tools),
        reply=json.loads(reply),
        num_prompt_tokens=num_prompt_tokens,
        num_cached_tokens=num_cached_tokens,
        seed=seed,
        created_at=created_at,
        note=note,
    )
