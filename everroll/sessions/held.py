"""The sessions in memory: each is one that this server holds in the journal.

Whoever finds that a session is not held any more, or does not know what became of a write, forgets it; claiming it anew
shows what is recorded, and no earlier write can follow.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator
from weakref import WeakValueDictionary

from everroll.sessions.errors import JournalError, NotOwnerError, ReleasedSessionError, UnknownSessionError
from everroll.sessions.journal import Journal
from everroll.sessions.records import Claim, Session, SessionRecord


class HeldSessions:
    """Sessions by id, the longest unused of them let go past a limit."""

    def __init__(self, journal: Journal, max_sessions: int, list_busy: Callable[[], Collection[str]]) -> None:
        """`list_busy` names the sessions that have calls in flight: those are never let go."""
        self._journal = journal
        self._max_sessions = max_sessions
        self._list_busy = list_busy
        self._sessions: OrderedDict[str, Session] = OrderedDict()
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._used: dict[str, Claim] = {}

    def __len__(self) -> int:
        return len(self._sessions)

    def lock(self, session_id: str) -> asyncio.Lock:
        """To be held while it is decided what a session's id stands for."""
        return self._locks.setdefault(session_id, asyncio.Lock())

    async def get(self, session_id: str) -> Session:
        """Raises UnknownSessionError: no such session; and as `find` does."""
        session = self._sessions.get(session_id)
        if session is None:
            async with self.lock(session_id):
                session = await self.find(session_id)
        else:
            self._sessions.move_to_end(session_id)
        if session is None:
            raise UnknownSessionError(f"no session {session_id!r:.250}")
        return session

    async def get_current(self, session_id: str) -> Session:
        """As `get`, and sure to know all that is recorded: another server may have taken it over unnoticed."""
        session = await self.get(session_id)
        if session.record.released_at is None and not await self._journal.holds(session.claim):
            self.forget(session)
            session = await self.get(session_id)
        return session

    async def find(self, session_id: str, or_digest: bool = True) -> Session | None:
        """From memory, or from the journal, which makes it this server's. The caller holds the session's lock.

        Raises:
            NotOwnerError: another server holds it.
            ReleasedSessionError: nothing but its digest is left (unless `or_digest` is off: then it is None).
        """
        session = self._sessions.get(session_id) or await self._journal.claim_session(session_id)
        if session is None and or_digest and await self._journal.load_digest(session_id) is not None:
            raise ReleasedSessionError(f"session {session_id} was released, and only its digest has been kept")
        if session is not None and session.record.released_at is None:
            self._keep(session)
        return session

    async def create(self, record: SessionRecord) -> Session:
        """A session that `find` has not found. The caller holds its lock."""
        session = await self._journal.create_session(record)
        if session is None:  # another server was quicker
            session = await self.find(record.session_id)
            if session is None:
                raise JournalError(f"session {record.session_id} could not be created")
        self._keep(session)
        return session

    def note_use(self, session: Session) -> None:
        self._used[session.record.session_id] = session.claim

    def take_used(self) -> list[Claim]:
        """The sessions used since the last call."""
        used, self._used = list(self._used.values()), {}
        return used

    @contextlib.contextmanager
    def forgetting(self, session: Session) -> Iterator[None]:
        """Around writes: after one whose outcome is not known, only the journal knows the session."""
        try:
            yield
        except (JournalError, NotOwnerError, asyncio.CancelledError):
            self.forget(session)
            raise

    def forget(self, session: Session) -> None:
        if self._sessions.get(session.record.session_id) is session:
            del self._sessions[session.record.session_id]
        self._used.pop(session.record.session_id, None)

    def _keep(self, session: Session) -> None:
        self._sessions[session.record.session_id] = session
        self._sessions.move_to_end(session.record.session_id)
        if len(self._sessions) > self._max_sessions:
            busy = {*self._list_busy(), session.record.session_id}
            idle = next((session_id for session_id in self._sessions if session_id not in busy), None)
            if idle is not None:
                del self._sessions[idle]
