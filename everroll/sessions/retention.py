"""What becomes of sessions in time: released when nobody uses them any more, deleted when their retention has passed.

| session | when |
|---|---|
| unreleased, unused for `idle_seconds` | released |
| unreleased, its run ended `grace_seconds` ago | released |
| released, its run ended `retention_seconds` ago | deleted, but for its digest |
| released `retention_seconds` ago, of no run | deleted, but for its digest |

A run has ended when somebody says so (`end_run`), or when none of its sessions was used for `idle_seconds`. A session
that is opened again takes the end of its run back. While the servers were down nobody could use a session: what goes by
idleness starts only when this server has been up for as long.
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass

from everroll.sessions.core import SessionCore
from everroll.sessions.database import Statement
from everroll.sessions.errors import JournalError, NotOwnerError, SessionError
from everroll.sessions.journal import Journal
from everroll.sessions.storage import StorageGauge

_BATCH = 100
_log = logging.getLogger(__name__)

_LIVES = "EXISTS (SELECT 1 FROM servers WHERE server_id = owner AND expires_at > {now})"
_UNUSED = (
    "SELECT session_id FROM sessions WHERE released_at IS NULL "
    "AND (used_at < {now} - $1 OR run IN (SELECT run FROM runs WHERE ended_at < {now} - $2))"
)
_UNUSED_HERE = f"{_UNUSED} AND (owner = $3 OR NOT {_LIVES}) LIMIT {_BATCH}"
_UNUSED_ANYWHERE = f"{_UNUSED} ORDER BY used_at LIMIT {10 * _BATCH}"
_END_SILENT_RUNS = (
    "INSERT INTO runs (run, ended_at) SELECT run, max(used_at) FROM sessions "
    "WHERE run <> '' AND run NOT IN (SELECT run FROM runs) GROUP BY run HAVING max(used_at) < {now} - $1 "
    "ON CONFLICT DO NOTHING"
)
_END_RUN = "INSERT INTO runs (run, ended_at) VALUES ($1, {now}) ON CONFLICT DO NOTHING"
_EXPIRED = (
    "SELECT session_id FROM sessions LEFT JOIN runs ON runs.run = sessions.run WHERE released_at IS NOT NULL "
    "AND COALESCE(ended_at, CASE WHEN sessions.run = '' THEN released_at END) < {now} - $1 "
    f"LIMIT {_BATCH}"
)
_DELETE_TURNS = "DELETE FROM turns WHERE session_id = $1"
_DELETE_SESSION = "DELETE FROM sessions WHERE session_id = $1"
_DELETE_RUNS = (
    "DELETE FROM runs WHERE ended_at < {now} - $1 AND NOT EXISTS (SELECT 1 FROM sessions WHERE sessions.run = runs.run)"
)
_DELETE_SERVERS = "DELETE FROM servers WHERE expires_at < {now} - $1"
_FIRST_SERVER = "SELECT min(server_id) FROM servers WHERE expires_at > {now}"


@dataclass(frozen=True)
class RetentionPolicy:
    """How long sessions stay."""

    idle_seconds: float
    grace_seconds: float
    retention_seconds: float


class Retention:
    """Applies a policy to a journal, a little at a time so that no chat waits for it."""

    def __init__(self, journal: Journal, core: SessionCore, policy: RetentionPolicy) -> None:
        self._journal = journal
        self._database = journal.database
        self._core = core
        self._policy = policy
        self._started = time.monotonic()

    async def end_run(self, run: str) -> None:
        """Note that a run has ended now; its retention counts from here."""
        await self._database.write(Statement(_END_RUN, (run,)))

    async def list_unused(self, idle_seconds: float | None) -> list[str]:
        """Sessions that nobody released and nobody uses, whichever server holds them; the first thousand.

        `idle_seconds` replaces the policy's limit.
        """
        await self._journal.set_used(self._core.take_used())
        idle = self._policy.idle_seconds if idle_seconds is None else idle_seconds
        rows = await self._database.read(_UNUSED_ANYWHERE, float(idle), self._policy.grace_seconds)
        return [str(row[0]) for row in rows]

    async def apply(self) -> tuple[int, int]:
        """Release what is unused, delete what has expired; gives how many sessions of each."""
        await self._journal.set_used(self._core.take_used())
        up = time.monotonic() - self._started >= self._policy.idle_seconds
        released = await self._release_unused(self._policy.idle_seconds if up else float("inf"))
        rows = await self._database.read(_FIRST_SERVER)
        if rows[0][0] not in (None, self._journal.server_id):
            return released, 0  # what follows is for one server at a time
        if up:
            await self._database.write(Statement(_END_SILENT_RUNS, (self._policy.idle_seconds,)))
        return released, await self.delete_expired()

    async def delete_expired(self) -> int:
        """Delete released sessions whose retention has passed; their digests stay."""
        retention = self._policy.retention_seconds
        deleted = 0
        while rows := await self._database.read(_EXPIRED, retention):
            for (session_id,) in rows:
                if await self._journal.load_digest(session_id) is None:
                    await self._core.write_digest(session_id)
                await self._database.write(
                    Statement(_DELETE_TURNS, (session_id,)), Statement(_DELETE_SESSION, (session_id,))
                )
                deleted += 1
            await self._database.reclaim()
        await self._database.write(Statement(_DELETE_RUNS, (retention,)), Statement(_DELETE_SERVERS, (retention,)))
        return deleted

    async def _release_unused(self, idle_seconds: float) -> int:
        """Those of this server, and of servers that are gone."""
        released = 0
        values = (idle_seconds, self._policy.grace_seconds, self._journal.server_id)
        while rows := await self._database.read(_UNUSED_HERE, *values):
            before = released
            for (session_id,) in rows:
                try:
                    await self._core.release(str(session_id))
                    released += 1
                except NotOwnerError:
                    continue
            if released == before:
                break
        return released


async def keep_lease(journal: Journal) -> None:
    """Renew this server's lease until cancelled. While the journal is away the others may take its sessions over."""
    while True:
        await asyncio.sleep(journal.lease_seconds / 3)
        try:
            await journal.renew_lease()
        except JournalError as error:
            _log.warning("the lease could not be renewed: %s", error)


async def keep_house(retention: Retention, storage: StorageGauge, interval_seconds: float) -> None:
    """Apply retention and measure storage now and then, until cancelled."""
    while True:
        try:
            await storage.measure()
            released, deleted = await retention.apply()
            if released or deleted:
                _log.info("released %d unused sessions, deleted %d whose retention has passed", released, deleted)
        except SessionError as error:
            _log.warning("housekeeping is put off: %s", error)
        except Exception:  # a bug: loud, and chats go on
            _log.exception("housekeeping failed")
        await asyncio.sleep(interval_seconds)
