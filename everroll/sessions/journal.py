"""The journal: every turn, in a database, before an agent sees it.

It also says which server holds which session. A session has one owner at a time, in an epoch that grows with each
time it is claimed; every write names its epoch, so that an owner that was given up for dead cannot write any more.
Owners prove that they live by a lease, one row for each server.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from everroll.sessions.database import Database, Statement
from everroll.sessions.errors import JournalError, NotOwnerError
from everroll.sessions.journal_rows import (
    NUM_SESSION_COLUMNS,
    NUM_TURN_COLUMNS,
    SESSION_COLUMNS,
    TURN_COLUMNS,
    decode_session,
    decode_turn,
    encode_series,
    encode_session,
    encode_turn,
)
from everroll.sessions.records import NO_ATTEMPT, Claim, Session, SessionRecord, Turn
from everroll.sessions.sqlite_database import open_sqlite

LEASE_SECONDS = 10.0
"""How long a server that has fallen silent keeps its sessions."""
_POSTGRES = ("postgresql://", "postgres://")

_FENCE = "(SELECT session_id FROM sessions WHERE session_id = $1 AND epoch = $2 {lock})"
_SAME = " AND ".join(
    f"turns.{name} = excluded.{name}" for name in ("request_key", "completion_ids", "logprobs", "created_at")
)


def _numbers(first: int, count: int) -> str:
    return ", ".join(f"${number}" for number in range(first, first + count))


_INSERT_SESSION = (
    f"INSERT INTO sessions ({SESSION_COLUMNS}, used_at, owner, epoch) "
    f"VALUES ({_numbers(1, NUM_SESSION_COLUMNS)}, {{now}}, ${NUM_SESSION_COLUMNS + 1}, 1) ON CONFLICT DO NOTHING"
)
# The same turn again is no error: after a lost connection it may be there already. Another one in its place is.
_INSERT_TURN = (
    f"INSERT INTO turns (session_id, {TURN_COLUMNS}) VALUES ({_FENCE}, {_numbers(3, NUM_TURN_COLUMNS)}) "
    f"ON CONFLICT (session_id, turn_index) DO UPDATE SET turn_index = CASE WHEN {_SAME} THEN turns.turn_index END"
)
_TOUCH_TURN = (
    f"UPDATE turns SET session_id = {_FENCE}, attempt = CASE WHEN attempt < $4 THEN $4 ELSE attempt END "
    "WHERE session_id = $1 AND turn_index = $3"
)
_DISOWN_TURN = f"UPDATE turns SET session_id = {_FENCE}, attempt = $4 WHERE session_id = $1 AND turn_index = $3"
_SET = "UPDATE sessions SET epoch = CASE WHEN epoch = $2 THEN epoch END, {{}} WHERE session_id = $1"
_SET_ATTEMPT = _SET.replace("{{}}", "attempt = $3, series = $4, used_at = {now}")
_SET_USED = _SET.replace("{{}}", "used_at = {now}")
_SET_RELEASED = _SET.replace("{{}}", "released_at = $3")
_SET_SEALED = _SET.replace("{{}}", "sealed_attempt = $3")
_SET_MAX_SEQ_LEN = _SET.replace("{{}}", "max_seq_len = $3")
_FORGET_END = "DELETE FROM runs WHERE run = $1"
_OWNER_LIVES = "EXISTS (SELECT 1 FROM servers WHERE server_id = sessions.owner AND expires_at > {now})"
_CLAIM = (
    "UPDATE sessions SET owner = $2, epoch = epoch + 1 WHERE session_id = $1 AND released_at IS NULL "
    f"AND (owner = $2 OR NOT {_OWNER_LIVES})"
)
_RENEW = (
    "INSERT INTO servers (server_id, url, expires_at) VALUES ($1, $2, {now} + $3) "
    "ON CONFLICT (server_id) DO UPDATE SET url = excluded.url, expires_at = excluded.expires_at"
)


@dataclass(frozen=True)
class Owner:
    """The server that holds a session."""

    server_id: str
    url: str
    """Where the other servers reach it; empty if they cannot."""


class Journal:
    """Sessions, turns, digests, and who holds them. Open it with `open_journal`."""

    def __init__(self, database: Database, server_id: str, url: str, lease_seconds: float) -> None:
        self.database = database
        self.server_id = server_id
        self.lease_seconds = lease_seconds
        self._url = url

    async def create_session(self, record: SessionRecord) -> Session | None:
        """Write a new session and hold it; None if there is one of this id."""
        statements = [Statement(_INSERT_SESSION, (*encode_session(record), self.server_id))]
        if record.run:
            statements.append(Statement(_FORGET_END, (record.run,)))
        await self.database.write(*statements)
        found = await self.database.read_by_key(
            "SELECT owner, epoch, created_at FROM sessions WHERE session_id = $1", record.session_id
        )
        return Session(record, epoch=1) if found == (self.server_id, 1, record.created_at) else None

    async def claim_session(self, session_id: str) -> Session | None:
        """Hold a session and read it with all its turns; None when there is none. A released one is only read.

        Raises:
            NotOwnerError: a server that lives holds it.
        """
        row = await self._select_session(session_id)
        if row is not None and row[0].released_at is None:
            await self.database.write(Statement(_CLAIM, (session_id, self.server_id)))
            row = await self._select_session(session_id)
        if row is None:
            return None
        record, owner, epoch = row
        if record.released_at is None and owner != self.server_id:
            raise NotOwnerError(f"session {session_id} is held by another session server")
        session = Session(record, epoch=epoch)
        await self._load_turns(session)
        return session

    async def read_session(self, session_id: str) -> Session | None:
        """A session with all its turns, without holding it; None when there is none."""
        row = await self._select_session(session_id)
        if row is None:
            return None
        session = Session(row[0], epoch=0)
        await self._load_turns(session)
        return session

    async def holds(self, claim: Claim) -> bool:
        """Whether this server still is what it thinks it is."""
        row = await self.database.read_by_key(
            "SELECT 1 FROM sessions WHERE session_id = $1 AND epoch = $2 AND owner = $3",
            *(claim.session_id, claim.epoch, self.server_id),
        )
        return row is not None

    async def append_turn(self, claim: Claim, turn: Turn, attempt: int) -> None:
        """Write a turn. When this returns, the turn is durable."""
        await self.database.write(Statement(_INSERT_TURN, (*_key(claim), *encode_turn(turn, attempt))))

    async def touch_turn(self, claim: Claim, index: int, attempt: int) -> None:
        """Note that a recorded turn was served again in this attempt."""
        await self.database.write(Statement(_TOUCH_TURN, (*_key(claim), index, attempt)))

    async def disown_turn(self, claim: Claim, index: int) -> None:
        """Note that a turn reached nobody: it belongs to no attempt until it is asked for again."""
        await self.database.write(Statement(_DISOWN_TURN, (*_key(claim), index, NO_ATTEMPT)))

    async def set_attempt(self, claim: Claim, record: SessionRecord) -> None:
        """Note a later attempt; its run goes on, whatever was said of its end."""
        values = (*_key(claim), record.attempt, encode_series(record))
        await self.database.write(Statement(_SET_ATTEMPT, values), Statement(_FORGET_END, (record.run,)))

    async def set_max_seq_len(self, claim: Claim, max_seq_len: int | None) -> None:
        """Note the length that samples were truncated to when they were collected last."""
        await self.database.write(Statement(_SET_MAX_SEQ_LEN, (*_key(claim), max_seq_len)))

    async def set_sealed(self, claim: Claim, attempt: int) -> None:
        """Note that an attempt takes no further turns. Those handed in before are in the journal when this returns."""
        await self.database.write(Statement(_SET_SEALED, (*_key(claim), attempt)))

    async def set_used(self, claims: Sequence[Claim]) -> None:
        """Note that sessions were used up to now. Those that have gone to other servers are left out."""
        for claim in claims:
            try:
                await self.database.write(Statement(_SET_USED, _key(claim)))
            except NotOwnerError:
                continue

    async def release_session(self, claim: Claim, released_at: float) -> None:
        """Mark a session as released. Turns handed in before are in the journal when this returns."""
        await self.database.write(Statement(_SET_RELEASED, (*_key(claim), released_at)))

    async def write_digest(self, session_id: str, digest: str, num_turns: int) -> None:
        """Keep the digest of a released session; it stays when the turns are gone, and never changes."""
        sql = "INSERT INTO digests (session_id, digest, num_turns) VALUES ($1, $2, $3) ON CONFLICT DO NOTHING"
        await self.database.write(Statement(sql, (session_id, digest, num_turns)))

    async def load_digest(self, session_id: str) -> str | None:
        row = await self.database.read_by_key("SELECT digest FROM digests WHERE session_id = $1", session_id)
        return str(row[0]) if row else None

    async def find_owner(self, session_id: str) -> Owner | None:
        """The server that lives and holds a session; None when there is none."""
        row = await self.database.read_by_key(
            "SELECT servers.server_id, url FROM sessions JOIN servers ON server_id = owner "
            "WHERE session_id = $1 AND expires_at > {now}",
            session_id,
        )
        return Owner(*row) if row else None

    async def renew_lease(self) -> None:
        await self.database.write(Statement(_RENEW, (self.server_id, self._url, self.lease_seconds)))

    async def end_lease(self, server_id: str) -> None:
        """Let all sessions of a server go: of this one at its end, of another one that was found dead."""
        await self.database.write(Statement("DELETE FROM servers WHERE server_id = $1", (server_id,)))

    async def end_all_leases(self) -> None:
        """For a journal that no other server can have open."""
        await self.database.write(Statement("DELETE FROM servers"))

    async def close(self) -> None:
        await self.database.close()

    async def _select_session(self, session_id: str) -> tuple[SessionRecord, str, int] | None:
        """Record, owner and epoch."""
        row = await self.database.read_by_key(
            f"SELECT {SESSION_COLUMNS}, owner, epoch FROM sessions WHERE session_id = $1", session_id
        )
        return (decode_session(row[:-2]), row[-2], row[-1]) if row else None

    async def _load_turns(self, session: Session) -> None:
        rows = await self.database.read(
            f"SELECT {TURN_COLUMNS} FROM turns WHERE session_id = $1 ORDER BY turn_index", session.record.session_id
        )
        turns = await asyncio.to_thread(lambda: [decode_turn(row) for row in rows])  # long ones must not hold up others
        for turn, attempt in turns:
            session.add(turn, attempt)


async def open_journal(
    url: str,
    synchronous: Literal["full", "normal"] = "full",
    *,
    server_id: str | None = None,
    peer_url: str = "",
    lease_seconds: float = LEASE_SECONDS,
) -> Journal:
    """Open or create a journal: a path to an SQLite file, or a `postgresql://` URL. The lease is the caller's to keep.

    Raises:
        JournalError: it cannot be opened, or was written by a later version.
    """
    database = await _open_database(url, synchronous)
    return Journal(database, server_id or uuid.uuid4().hex, peer_url, lease_seconds)


def is_postgres(url: str) -> bool:
    return url.startswith(_POSTGRES)


async def _open_database(url: str, synchronous: str) -> Database:
    if is_postgres(url):
        try:
            from everroll.sessions.postgres_database import open_postgres
        except ModuleNotFoundError as error:
            text = f"a journal in PostgreSQL needs the package {error.name}: pip install 'everroll[postgres]'"
            raise JournalError(text) from error
        return await open_postgres(url)
    if "://" in url:
        scheme = url.partition("://")[0]
        raise JournalError(f"journal {scheme}://...: not supported; give a path, or postgresql://user@host/database")
    return open_sqlite(Path(url), synchronous)


def _key(claim: Claim) -> tuple[str, int]:
    return claim.session_id, claim.epoch
