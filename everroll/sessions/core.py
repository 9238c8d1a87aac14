"""The session server's logic: values in, values out, no HTTP.

What holds:
- A turn's answer is returned only after the journal has it (I7), and sampled tokens are never rendered again (I2).
- The same request is answered once: later copies get the recorded answer, copies in flight wait for the first.
- A turn goes on when its client hangs up, so that the client's retry finds the answer.
- A failed engine call leaves no trace.
- A session in memory is one that this server holds in the journal. Whoever finds that it does not, or does not know
  what became of a write, forgets the session; claiming it anew shows what is recorded, and no earlier write can follow.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import re
import time
import uuid
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from weakref import WeakValueDictionary

from pydantic_core import from_json

from everroll.contracts.outcomes import Cause, CauseKind
from everroll.contracts.spec import SamplingSpec
from everroll.sessions.digest import digest_turns
from everroll.sessions.errors import (
    AssemblyError,
    BadRequestError,
    ConflictError,
    EngineAwayError,
    EngineFailureError,
    JournalError,
    NotOwnerError,
    PromptRefusedError,
    ReleasedSessionError,
    UnknownSessionError,
)
from everroll.sessions.journal import Journal
from everroll.sessions.records import Claim, Session, SessionRecord, Turn, describe_turn
from everroll.sessions.storage import StorageGauge
from everroll.sessions.turns import ChatRequest, RequestKeys, TurnMaker
from everroll.tokens.assembly import NothingToTrain, assemble_samples
from everroll.tokens.renderer import Message
from everroll.tokens.samples import MalformedSamplesError, encode_samples

_MAX_TROUBLE = 1000
_SESSION_ID = re.compile(r"^[A-Za-z0-9][A-Za-z0-9._-]{0,199}\Z")
_EPISODE_ID = re.compile(r"^(.+)-\d+-\d+-\d+$")
"""`<run>-<group>-<member>-<attempt>`, as runs name their sessions."""


@dataclass(frozen=True)
class TurnAnswer:
    """A turn as served: recorded just now, or earlier."""

    turn: Turn
    sampling: SamplingSpec
    replayed: bool


@dataclass(frozen=True)
class SessionLimits:
    """What a session may record, and how many are kept in memory."""

    max_turns: int
    max_tokens: int
    max_cached_sessions: int


class SessionCore:
    """All sessions of one server."""

    def __init__(
        self, journal: Journal, maker: TurnMaker, limits: SessionLimits, storage: StorageGauge | None = None
    ) -> None:
        self._journal = journal
        self._maker = maker
        self._limits = limits
        self._storage = storage
        self._sessions: OrderedDict[str, Session] = OrderedDict()
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._in_flight: dict[tuple[str, bytes], asyncio.Task[Turn]] = {}
        self._used: dict[str, Claim] = {}
        """Sessions used since `take_used` was called last."""

    async def create(
        self,
        session_id: str | None,
        sampling: SamplingSpec | None,
        seed: int | None,
        attempt: int | None = None,
        min_weight_version: int | None = None,
        run: str | None = None,
    ) -> Session:
        """Create a session, or open it again with everything recorded so far.

        `attempt` grows with each attempt at the episode. A later one takes over: the keys of earlier attempts take no
        further turns, and only turns that the latest attempt makes or is served again are collected. No turn will be
        sampled by weights older than `min_weight_version`. `run` is the run whose end its retention goes by; by default
        the one that a session's id of the form `<run>-<group>-<member>-<attempt>` names.

        Raises:
            BadRequestError: not a session id.
            ConflictError: it exists with other pinned values, or a later attempt has opened it.
            ReleasedSessionError: it was released.
            StorageFullError: there is no room for a new one.
        """
        session_id = session_id or uuid.uuid4().hex
        if not _SESSION_ID.match(session_id):
            raise BadRequestError(
                f"not a session id: {session_id!r:.250} (letters, digits, '.', '_', '-'; at most 200)"
            )
        async with self._lock(session_id):
            session = await self._find(session_id)
            if session is None:
                session = await self._create(
                    SessionRecord(
                        session_id,
                        sampling or SamplingSpec(),
                        seed or 0,
                        created_at=time.time(),
                        attempt=attempt or 0,
                        min_weight_version=min_weight_version or 0,
                        run=_name_run(session_id) if run is None else run,
                    )
                )
            record = session.record
            _refuse_released(record)
            if sampling not in (None, record.sampling):
                raise ConflictError(f"session {session_id} exists with other sampling values: {record.sampling!r}")
            if seed not in (None, record.seed):
                raise ConflictError(f"session {session_id} exists with another seed: {record.seed}")
            if min_weight_version not in (None, record.min_weight_version):
                raise ConflictError(f"session {session_id} exists for weight version {record.min_weight_version} on")
            if attempt is not None and attempt < record.attempt:
                raise ConflictError(f"session {session_id} was opened by a later attempt than {attempt}")
            if attempt is not None and attempt > record.attempt:
                session.record = dataclasses.replace(record, attempt=attempt)
                with self._forgetting(session):
                    await self._journal.set_attempt(session.claim, attempt, record.run)
            self._used[session_id] = session.claim
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
        self._used[session_id] = session.claim
        keys = self._maker.compute_keys(request)
        recorded = session.by_request.get(keys.request_key)
        if recorded is not None:
            session.engine_trouble = None
            await self._touch(session, recorded)
            return TurnAnswer(session.turns[recorded], session.record.sampling, replayed=True)
        flight = (session_id, keys.request_key)
        joined = flight in self._in_flight
        if not joined:
            self._refuse_past_limits(session)
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

    async def count_prompt_tokens(self, session_id: str, request: ChatRequest) -> int:
        """Tokens of the prompt that a request would be sampled from.

        Raises:
            SessionError: as `turn` does.
        """
        session = await self._get(session_id)
        _refuse_released(session.record)
        return await self._maker.count_prompt_tokens(session, request)

    async def recall(self, session_id: str, request_key: bytes) -> list[Message]:
        """The conversation up to and including the recorded answer to a request, for wires that name it by id.

        Raises:
            UnknownSessionError: no such session.
            BadRequestError: the session has recorded no such request.
        """
        session = await self._get(session_id)
        index = session.by_request.get(request_key)
        if index is None:
            raise BadRequestError(f"session {session_id} has recorded no response of this id")
        return session.messages(index)

    async def collect(
        self, session_id: str, max_seq_len: int | None, metadata: dict[str, Any]
    ) -> bytes | NothingToTrain:
        """The session's samples as one body; equal records give equal bytes. Works on released sessions too.

        Raises:
            UnknownSessionError: no such session.
            AssemblyError: the recorded turns give no valid samples.
        """
        session = await self._get_current(session_id)
        turns = [turn.tokens for turn in session.live_turns()]
        if session.record.released_at is None and session.record.max_seq_len != max_seq_len:
            session.record = dataclasses.replace(session.record, max_seq_len=max_seq_len)
            with self._forgetting(session):
                await self._journal.set_max_seq_len(session.claim, max_seq_len)
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
            session = await self._find(session_id, or_digest=False)
            if session is None:
                return
            if session.record.released_at is None:
                session.record = dataclasses.replace(session.record, released_at=time.time())
                await self._cancel([task for (owner, _), task in self._in_flight.items() if owner == session_id])
                with self._forgetting(session):
                    await self._journal.release_session(session.claim, session.record.released_at or time.time())
                self._forget(session)
            if await self._journal.load_digest(session_id) is None:
                await self.write_digest(session_id)

    async def write_digest(self, session_id: str) -> None:
        """Keep the digest of a released session for good, made of what the journal holds.

        Not of what memory holds: a call that was cancelled may have left a turn that memory does not know.
        """
        session = await self._journal.read_session(session_id)
        if session is None:
            return
        turns = [turn.tokens for turn in session.live_turns()]
        digest = await asyncio.to_thread(digest_turns, session_id, turns, session.record.max_seq_len)
        await self._journal.write_digest(session_id, digest.model_dump_json(), len(session.turns))

    async def describe(self, session_id: str) -> dict[str, Any]:
        """The records of a session, for people.

        Raises:
            UnknownSessionError: no such session.
        """
        session = await self._get_current(session_id)
        digest = await self._journal.load_digest(session_id)
        record = session.record
        live = {turn.index for turn in session.live_turns()}
        return {
            "session_id": session_id,
            "sampling": record.sampling.model_dump(),
            "seed": record.seed,
            "created_at": record.created_at,
            "min_weight_version": record.min_weight_version,
            "run": record.run,
            "released_at": record.released_at,
            "digest": None if digest is None else from_json(digest),
            "attempt": record.attempt,
            "num_turns": len(session.turns),
            "turns": [
                {**describe_turn(turn, session.attempts[index]), "live": index in live}
                for index, turn in sorted(session.turns.items())
            ],
        }

    def take_used(self) -> list[Claim]:
        """The sessions used since the last call."""
        used, self._used = list(self._used.values()), {}
        return used

    async def close(self) -> None:
        """Drop the calls in flight; their clients can ask again after a restart."""
        await self._cancel(list(self._in_flight.values()))

    @property
    def num_in_flight(self) -> int:
        return len(self._in_flight)

    async def _create(self, record: SessionRecord) -> Session:
        """The caller holds the session's lock and has not found it."""
        if self._storage is not None:
            self._storage.refuse_when_full()
        session = await self._journal.create_session(record)
        if session is None:  # another server was quicker
            session = await self._find(record.session_id)
            if session is None:
                raise JournalError(f"session {record.session_id} could not be created")
        self._keep(session)
        return session

    def _refuse_past_limits(self, session: Session) -> None:
        limits, name = self._limits, f"session {session.record.session_id} has reached its limit of"
        if session.next_index >= limits.max_turns:
            raise BadRequestError(f"{name} {limits.max_turns} turns")
        if session.num_tokens >= limits.max_tokens:
            raise BadRequestError(f"{name} {limits.max_tokens} tokens")

    async def _cancel(self, tasks: list[asyncio.Task[Turn]]) -> None:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _make_turn(self, session: Session, request: ChatRequest, keys: RequestKeys) -> Turn:
        attempt = session.record.attempt  # of the request: one that outlives its attempt still belongs to it
        turn = await self._maker.make(session, request, keys)
        with self._forgetting(session):
            await self._journal.append_turn(session.claim, turn, attempt)
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
            with self._forgetting(session):
                await self._journal.touch_turn(session.claim, index, attempt)
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

    async def _get_current(self, session_id: str) -> Session:
        """As `_get`, and sure to know all that is recorded: another server may have taken it over unnoticed."""
        session = await self._get(session_id)
        if session.record.released_at is None and not await self._journal.holds(session.claim):
            self._forget(session)
            session = await self._get(session_id)
        return session

    async def _find(self, session_id: str, or_digest: bool = True) -> Session | None:
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

    @contextlib.contextmanager
    def _forgetting(self, session: Session) -> Iterator[None]:
        """Around writes: after one whose outcome is not known, only the journal knows the session."""
        try:
            yield
        except (JournalError, NotOwnerError, asyncio.CancelledError):
            self._forget(session)
            raise

    def _forget(self, session: Session) -> None:
        if self._sessions.get(session.record.session_id) is session:
            del self._sessions[session.record.session_id]
        self._used.pop(session.record.session_id, None)

    def _keep(self, session: Session) -> None:
        """Keep in memory; past the limit the longest unused session that has no call in flight is let go."""
        self._sessions[session.record.session_id] = session
        self._sessions.move_to_end(session.record.session_id)
        if len(self._sessions) > self._limits.max_cached_sessions:
            busy = {owner for owner, _ in self._in_flight} | {session.record.session_id}
            idle = next((session_id for session_id in self._sessions if session_id not in busy), None)
            if idle is not None:
                del self._sessions[idle]

    def _lock(self, session_id: str) -> asyncio.Lock:
        return self._locks.setdefault(session_id, asyncio.Lock())


def _build_trouble(error: EngineFailureError | PromptRefusedError) -> Cause:
    kind = CauseKind.DATA if isinstance(error, PromptRefusedError) else CauseKind.ENGINE
    return Cause(kind=kind, error=type(error).__name__, message=str(error)[:_MAX_TROUBLE], server=error.engine_url)


def _name_run(session_id: str) -> str:
    found = _EPISODE_ID.match(session_id)
    return found[1] if found else ""


def _refuse_released(record: SessionRecord) -> None:
    if record.released_at is not None:
        raise ReleasedSessionError(f"session {record.session_id} was released and takes no further turns")
