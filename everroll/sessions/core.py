"""The session server's logic: values in, values out, no HTTP.

What holds:
- A turn's answer is returned only after the journal has it (I7), and sampled tokens are never rendered again (I2).
- The same request is answered once: later copies get the recorded answer, copies in flight wait for the first.
- A turn goes on when its client hangs up, so that the client's retry finds the answer.
- A failed engine call leaves no trace.
"""

from __future__ import annotations

import asyncio
import dataclasses
import re
import time
import uuid
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any
from weakref import WeakValueDictionary

from everroll.contracts.outcomes import Cause, CauseKind
from everroll.contracts.spec import SamplingSpec
from everroll.sessions.errors import (
    AssemblyError,
    BadRequestError,
    ConflictError,
    EngineAwayError,
    EngineFailureError,
    PromptRefusedError,
    ReleasedSessionError,
    UnknownSessionError,
)
from everroll.sessions.journal import SqliteJournal
from everroll.sessions.records import Session, SessionRecord, Turn, compute_digest, describe_turn
from everroll.sessions.turns import ChatRequest, RequestKeys, TurnMaker, compute_keys
from everroll.tokens.assembly import NothingToTrain, assemble_samples
from everroll.tokens.samples import MalformedSamplesError, encode_samples

_MAX_TROUBLE = 1000
_SESSION_ID = re.compile(r"^[A-Za-z0-9][A-Za-z0-9._-]{0,199}$")


@dataclass(frozen=True)
class TurnAnswer:
    """A turn as served: recorded just now, or earlier."""

    turn: Turn
    sampling: SamplingSpec
    replayed: bool


class SessionCore:
    """All sessions of one server."""

    def __init__(self, journal: SqliteJournal, maker: TurnMaker, max_turns: int, max_cached_sessions: int) -> None:
        self._journal = journal
        self._maker = maker
        self._max_turns = max_turns
        self._max_cached_sessions = max_cached_sessions
        self._sessions: OrderedDict[str, Session] = OrderedDict()
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._in_flight: dict[tuple[str, bytes], asyncio.Task[Turn]] = {}

    async def create(
        self,
        session_id: str | None,
        sampling: SamplingSpec | None,
        seed: int | None,
        attempt: int | None = None,
    ) -> Session:
        min_weight_version: int | None = None,
        """Create a session, or open it again with everything recorded so far.

        `attempt` grows with each attempt at the episode. A later one takes over: the keys of earlier attempts take no
        further turns, and only turns that the latest attempt makes or is served again are collected. No turn will be
        sampled by weights older than `min_weight_version`.

        Raises:
            BadRequestError: not a session id.
            ConflictError: it exists with other pinned values, or a later attempt has opened it.
            ReleasedSessionError: it was released.
        """
        session_id = session_id or uuid.uuid4().hex
        if not _SESSION_ID.match(session_id):
            raise BadRequestError(
                f"not a session id: {session_id!r:.250} (letters, digits, '.', '_', '-'; at most 200)"
            )
        async with self._lock(session_id):
            session = await self._find(session_id)
            if session is None:
                return await self._create(
                    session_id, sampling or SamplingSpec(), seed or 0, attempt or 0, min_weight_version or 0
                )
            record = session.record
            _refuse_released(record)
            if sampling not in (None, record.sampling):
                raise ConflictError(f"session {session_id} exists with other sampling values: {record.sampling!r}")
            if seed not in (None, record.seed):
                raise ConflictError(f"session {session_id} exists with another seed: {record.seed}")
            if attempt is not None and attempt < record.attempt:
            if min_weight_version not in (None, record.min_weight_version):
                raise ConflictError(f"session {session_id} exists for weight version {record.min_weight_version} on")
                raise ConflictError(f"session {session_id} was opened by a later attempt than {attempt}")
            if attempt is not None and attempt > record.attempt:
                session.record = dataclasses.replace(record, attempt=attempt)
                await self._journal.set_attempt(session_id, attempt)
            return session

    async def turn(self, session_id: str, request: ChatRequest, attempt: int | None = None) -> TurnAnswer:
        """Answer one model call of an attempt (None: the latest).

        Raises:
            SessionError: see `everroll.sessions.errors`; nothing was recorded then.
        """
        session = await self._get(session_id)
        _refuse_released(session.record)
        if attempt not in (None, session.record.attempt):
            raise ConflictError(f"this attempt at session {session_id} was given up; a later one has taken over")
        keys = compute_keys(request)
        recorded = session.by_request.get(keys.request_key)
        if recorded is not None:
            session.engine_trouble = None
            await self._touch(session, recorded)
            return TurnAnswer(session.turns[recorded], session.record.sampling, replayed=True)
        flight = (session_id, keys.request_key)
        joined = flight in self._in_flight
        if not joined:
            if session.next_index >= self._max_turns:
                raise BadRequestError(f"session {session_id} has reached its limit of {self._max_turns} turns")
            task = asyncio.create_task(self._make_turn(session, request, keys))
            self._in_flight[flight] = task
            task.add_done_callback(lambda done: self._land(flight, done))
        try:
            turn = await self._wait_for(self._in_flight[flight], session)
        except (EngineFailureError, PromptRefusedError) as error:
            session.engine_trouble = _build_trouble(error)
            raise
        session.engine_trouble = None
        if joined:
            await self._touch(session, turn.index)
        return TurnAnswer(turn, session.record.sampling, replayed=joined)

    async def collect(
        self, session_id: str, max_seq_len: int | None, metadata: dict[str, Any]
    ) -> bytes | NothingToTrain:
        """The session's samples as one body; equal records give equal bytes. Works on released sessions too.

        Raises:
            UnknownSessionError: no such session.
            AssemblyError: the recorded turns give no valid samples.
        """
        session = await self._get(session_id)
        turns = [turn.tokens for turn in session.live_turns()]
        temperature = session.record.sampling.temperature

        def assemble() -> bytes | NothingToTrain:
            samples = assemble_samples(session_id, turns, temperature, max_seq_len, metadata)
            return samples if isinstance(samples, NothingToTrain) else encode_samples(samples)

        try:
            return await asyncio.to_thread(assemble)  # long conversations must not hold up other sessions
        except MalformedSamplesError as error:
            raise AssemblyError(str(error)) from error

    async def engine_trouble(self, session_id: str) -> Cause | None:
        """How the latest model call failed in the engines, unless a later one succeeded.

        A call that is still under way when samples are collected counts too: its agent gave up waiting.

        Raises:
            UnknownSessionError: no such session.
        """
        session = await self._get(session_id)
        if any(owner == session_id for owner, _ in self._in_flight):
            text = f"a model call of session {session_id} has had no answer when its samples were collected"
            return Cause(
                kind=CauseKind.ENGINE, error="NoAnswer", message=text, server=self._maker.engine_url(session_id)
            )
        return session.engine_trouble

    async def release(self, session_id: str) -> None:
        """Refuse further turns, free memory, keep journal and digest. Unknown and released sessions are left alone."""
        async with self._lock(session_id):
            session = await self._find(session_id)
            if session is None:
                return
            if session.record.released_at is None:
                session.record = dataclasses.replace(session.record, released_at=time.time())
            await self._cancel([task for (owner, _), task in self._in_flight.items() if owner == session_id])
            self._sessions.pop(session_id, None)
            await self._journal.release_session(session_id, session.record.released_at or time.time())
            if await self._journal.load_digest(session_id) is None:
                await self._write_digest(session_id)

    async def describe(self, session_id: str) -> dict[str, Any]:
        """The records of a session, for people.

        Raises:
            UnknownSessionError: no such session.
        """
        session = await self._get(session_id)
        record = session.record
        live = {turn.index for turn in session.live_turns()}
        return {
            "session_id": session_id,
            "sampling": record.sampling.model_dump(),
            "seed": record.seed,
            "created_at": record.created_at,
            "released_at": record.released_at,
            "digest": await self._journal.load_digest(session_id),
            "attempt": record.attempt,
            "num_turns": len(session.turns),
            "turns": [
                {**describe_turn(turn, session.attempts[index]), "live": index in live}
                for index, turn in sorted(session.turns.items())
            ],
        }

    async def close(self) -> None:
        """Drop the calls in flight; their clients can ask again after a restart."""
        await self._cancel(list(self._in_flight.values()))

    @property
    def num_in_flight(self) -> int:
        return len(self._in_flight)

    async def _create(
        self, session_id: str, sampling: SamplingSpec, seed: int, attempt: int, min_weight_version: int
    ) -> Session:
        record = SessionRecord(
            session_id, sampling, seed, time.time(), attempt=attempt, min_weight_version=min_weight_version
        )
        session = Session(record)
        await self._journal.create_session(session.record)
        self._keep(session)
        return session

            "min_weight_version": record.min_weight_version,
    async def _cancel(self, tasks: list[asyncio.Task[Turn]]) -> None:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _write_digest(self, session_id: str) -> None:
        """Over what the journal holds: a cancelled call may have left a turn there that memory does not know."""
        session = await self._journal.load_session(session_id)
        if session is not None:
            turns = list(session.turns.values())
            digest = await asyncio.to_thread(compute_digest, turns)
            await self._journal.write_digest(session_id, digest, len(turns))

    async def _make_turn(self, session: Session, request: ChatRequest, keys: RequestKeys) -> Turn:
        attempt = session.record.attempt  # of the request: one that outlives its attempt still belongs to it
        turn = await self._maker.make(session, request, keys)
        await self._journal.append_turn(session.record.session_id, turn, attempt)
        session.add(turn, attempt)
        return turn

    async def _wait_for(self, task: asyncio.Task[Turn], session: Session) -> Turn:
        """Wait without owning: a client that hangs up does not cancel the call."""
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if not task.cancelled():
                raise
            _refuse_released(session.record)
            raise EngineAwayError("the session server is stopping") from None

    def _land(self, flight: tuple[str, bytes], task: asyncio.Task[Turn]) -> None:
        del self._in_flight[flight]
        if not task.cancelled():
            task.exception()  # seen: whoever waited gets it, and if nobody did, nothing was recorded

    async def _touch(self, session: Session, index: int) -> None:
        """Count a recorded turn to the present attempt."""
        attempt = session.record.attempt
        if session.attempts[index] < attempt:
            await self._journal.touch_turn(session.record.session_id, index, attempt)
            session.attempts[index] = max(attempt, session.attempts[index])

    async def _get(self, session_id: str) -> Session:
        session = self._sessions.get(session_id)
        if session is None:
            async with self._lock(session_id):
                session = await self._find(session_id)
        else:
            self._sessions.move_to_end(session_id)
        if session is None:
            raise UnknownSessionError(f"no session {session_id!r:.250}")
        return session

    async def _find(self, session_id: str) -> Session | None:
        """From memory, or from the journal after a restart. The caller holds the session's lock."""
        session = self._sessions.get(session_id) or await self._journal.load_session(session_id)
        if session is not None and session.record.released_at is None:
            self._keep(session)
        return session

    def _keep(self, session: Session) -> None:
        """Keep in memory; past the limit the longest unused session that has no call in flight is let go."""
        self._sessions[session.record.session_id] = session
        self._sessions.move_to_end(session.record.session_id)
        if len(self._sessions) > self._max_cached_sessions:
            busy = {owner for owner, _ in self._in_flight} | {session.record.session_id}
            idle = next((session_id for session_id in self._sessions if session_id not in busy), None)
            if idle is not None:
                del self._sessions[idle]

    def _lock(self, session_id: str) -> asyncio.Lock:
        return self._locks.setdefault(session_id, asyncio.Lock())


def _build_trouble(error: EngineFailureError | PromptRefusedError) -> Cause:
    kind = CauseKind.DATA if isinstance(error, PromptRefusedError) else CauseKind.ENGINE
    return Cause(kind=kind, error=type(error).__name__, message=str(error)[:_MAX_TROUBLE], server=error.engine_url)


def _refuse_released(record: SessionRecord) -> None:
    if record.released_at is not None:
        raise ReleasedSessionError(f"session {record.session_id} was released and takes no further turns")
