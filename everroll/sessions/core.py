"""The session server's logic: values in, values out, no HTTP.

What holds:
- A turn's answer is returned only after the journal has it (I7), and sampled tokens are never rendered again (I2).
- The same request is answered once: later copies get the recorded answer, copies in flight wait for the first.
- A turn goes on when its client hangs up, so that the client's retry finds the answer.
- A failed engine call leaves no trace.
- Sessions in memory are held in the journal (`held`), and calls in flight are shared (`flights`).
"""

from __future__ import annotations

import asyncio
import dataclasses
import re
import time
import uuid
from dataclasses import dataclass
from typing import Any

from pydantic_core import from_json

from everroll.contracts.outcomes import Cause, CauseKind
from everroll.contracts.spec import SamplingSpec
from everroll.sessions.attempts import admit_attempt
from everroll.sessions.digest import digest_turns
from everroll.sessions.errors import (
    AssemblyError,
    BadRequestError,
    ConflictError,
    EngineFailureError,
    PromptRefusedError,
    ReleasedSessionError,
)
from everroll.sessions.flights import Flights
from everroll.sessions.held import HeldSessions
from everroll.sessions.journal import Journal
from everroll.sessions.metrics import SessionMetrics
from everroll.sessions.records import NO_ATTEMPT, Claim, Session, SessionRecord, Turn, describe_session
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
        self,
        journal: Journal,
        maker: TurnMaker,
        limits: SessionLimits,
        storage: StorageGauge | None = None,
        metrics: SessionMetrics | None = None,
    ) -> None:
        self._journal = journal
        self._maker = maker
        self._limits = limits
        self._storage = storage
        self._metrics = metrics or SessionMetrics()
        self._flights = Flights()
        self._held = HeldSessions(journal, limits.max_cached_sessions, self._flights.list_sessions)

    async def create(
        self,
        session_id: str | None,
        sampling: SamplingSpec | None,
        seed: int | None,
        attempt: int | None = None,
        min_weight_version: int | None = None,
        run: str | None = None,
        series: str | None = None,
    ) -> Session:
        """Create a session, or open it again with everything recorded so far.

        `attempt` grows with each attempt at the episode, within its `series` if there is one (see `attempts`). A later
        one takes over: the keys of earlier attempts take no further turns, and only turns that the latest attempt makes
        or is served again are collected. No turn will be sampled by weights older than `min_weight_version`. `run` is
        the run whose end its retention goes by; by default the one that a session's id of the form
        `<run>-<group>-<member>-<attempt>` names.

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
        async with self._held.lock(session_id):
            session = await self._held.find(session_id)
            if session is None:
                if self._storage is not None:
                    await self._storage.refuse_when_full()
                record = SessionRecord(
                    session_id,
                    sampling or SamplingSpec(),
                    seed or 0,
                    created_at=time.time(),
                    min_weight_version=min_weight_version or 0,
                    run=_name_run(session_id) if run is None else run,
                )
                session = await self._held.create(admit_attempt(record, attempt, series))
            record = session.record
            _refuse_released(record)
            if sampling not in (None, record.sampling):
                raise ConflictError(f"session {session_id} exists with other sampling values: {record.sampling!r}")
            if seed not in (None, record.seed):
                raise ConflictError(f"session {session_id} exists with another seed: {record.seed}")
            if min_weight_version not in (None, record.min_weight_version):
                raise ConflictError(f"session {session_id} exists for weight version {record.min_weight_version} on")
            session.record = admit_attempt(record, attempt, series)
            if session.record != record:
                with self._held.forgetting(session):
                    await self._journal.set_attempt(session.claim, session.record)
            self._held.note_use(session)
            return session

    async def turn(self, session_id: str, request: ChatRequest, attempt: int | None = None) -> TurnAnswer:
        """Answer one model call of an attempt (None: the latest).

        Raises:
            SessionError: see `everroll.sessions.errors`; nothing was recorded then.
        """
        session = await self._held.get(session_id)
        _refuse_ended(session.record)
        if attempt not in (None, session.record.attempt):
            raise ConflictError(f"this attempt at session {session_id} was given up; a later one has taken over")
        self._held.note_use(session)
        keys = self._maker.compute_keys(request)
        recorded = session.by_request.get(keys.request_key)
        if recorded is not None:
            session.engine_trouble = None
            await self._touch(session, recorded)
            return self._answer(session.turns[recorded], session, replayed=True)
        flight = (session_id, keys.request_key)
        joined = flight in self._flights
        if not joined:
            self._refuse_past_limits(session)
            self._flights.start(flight, self._make_turn(session, request, keys))
        try:
            turn = await self._flights.wait(flight, lambda: _refuse_ended(session.record))
        except (EngineFailureError, PromptRefusedError) as error:
            session.engine_trouble = _build_trouble(error)
            raise
        session.engine_trouble = None
        if joined:
            await self._touch(session, turn.index)
        return self._answer(turn, session, replayed=joined)

    async def note_arrival(self, session_id: str, answer: TurnAnswer, arrived: bool) -> None:
        """Say whether a client was there to receive an answer.

        A turn that nobody received is an orphan: its agent knows nothing of it, so it is not trained, unless it is
        asked for again or continued.

        Raises:
            SessionError: see `everroll.sessions.errors`.
        """
        index = answer.turn.index
        session = await self._held.get(session_id)
        if session.record.is_sealed:
            return  # what was collected stays as it is
        if arrived:
            session.arrived.add(index)
            if session.attempts[index] == NO_ATTEMPT:
                await self._touch(session, index)
        elif not answer.replayed and index not in session.arrived and session.record.released_at is None:
            await self._disown(session, index)

    async def _disown(self, session: Session, index: int) -> None:
        """Nobody has received it."""
        session.attempts[index] = NO_ATTEMPT  # first, so that another client's arrival meanwhile takes it back
        with self._held.forgetting(session):
            await self._journal.disown_turn(session.claim, index)

    async def count_prompt_tokens(self, session_id: str, request: ChatRequest) -> int:
        """Tokens of the prompt that a request would be sampled from.

        Raises:
            SessionError: as `turn` does.
        """
        session = await self._held.get(session_id)
        _refuse_released(session.record)
        return await self._maker.count_prompt_tokens(session, request)

    async def recall(self, session_id: str, request_key: bytes) -> list[Message]:
        """The conversation up to and including the recorded answer to a request, for wires that name it by id.

        Raises:
            UnknownSessionError: no such session.
            BadRequestError: the session has recorded no such request.
        """
        session = await self._held.get(session_id)
        index = session.by_request.get(request_key)
        if index is None:
            raise BadRequestError(f"session {session_id} has recorded no response of this id")
        return session.messages(index)

    async def seal(self, session_id: str) -> None:
        """Take no further turns of the present attempt: what is collected from now on is what is kept of it.

        A later attempt at the episode takes turns again. A call that is under way is given up, and stays known as one
        that had no answer (see `engine_trouble`).

        Raises:
            UnknownSessionError: no such session.
        """
        session = await self._held.get_current(session_id)
        if session.record.released_at is not None:
            return
        if not session.record.is_sealed:
            session.record = dataclasses.replace(session.record, sealed_attempt=session.record.attempt)
            with self._held.forgetting(session):
                await self._journal.set_sealed(session.claim, session.record.attempt)
        trouble = await self.engine_trouble(session_id)
        answered = set(session.turns)
        await self._flights.cancel(session_id)
        session = await self._held.get(session_id)  # a call that was given up may have left a turn in the journal alone
        session.engine_trouble = trouble
        for index in sorted(session.turns.keys() - answered):
            await self._disown(session, index)

    async def collect(
        self, session_id: str, max_seq_len: int | None, metadata: dict[str, Any]
    ) -> bytes | NothingToTrain:
        """The session's samples as one body; equal records give equal bytes. Works on released sessions too.

        Raises:
            UnknownSessionError: no such session.
            AssemblyError: the recorded turns give no valid samples.
        """
        session = await self._held.get_current(session_id)
        turns = [turn.tokens for turn in session.live_turns()]
        if session.record.released_at is None and session.record.max_seq_len != max_seq_len:
            session.record = dataclasses.replace(session.record, max_seq_len=max_seq_len)
            with self._held.forgetting(session):
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
        session = await self._held.get(session_id)
        if session_id in self._flights.list_sessions():
            text = f"a model call of session {session_id} has had no answer when its samples were collected"
            return Cause(
                kind=CauseKind.ENGINE, error="NoAnswer", message=text, server=self._maker.engine_url(session_id)
            )
        return session.engine_trouble

    async def release(self, session_id: str) -> None:
        """Refuse further turns, free memory, keep journal and digest. Unknown and released sessions are left alone."""
        async with self._held.lock(session_id):
            session = await self._held.find(session_id, or_digest=False)
            if session is None:
                return
            if session.record.released_at is None:
                session.record = dataclasses.replace(session.record, released_at=time.time())
                await self._flights.cancel(session_id)
                with self._held.forgetting(session):
                    await self._journal.release_session(session.claim, session.record.released_at or time.time())
                self._held.forget(session)
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
        session = await self._held.get_current(session_id)
        digest = await self._journal.load_digest(session_id)
        return describe_session(session, None if digest is None else from_json(digest))

    def take_used(self) -> list[Claim]:
        """The sessions used since the last call."""
        return self._held.take_used()

    async def close(self) -> None:
        """Drop the calls in flight; their clients can ask again after a restart."""
        await self._flights.cancel()

    @property
    def num_in_flight(self) -> int:
        return len(self._flights)

    @property
    def num_held(self) -> int:
        """Sessions in memory."""
        return len(self._held)

    def _refuse_past_limits(self, session: Session) -> None:
        limits, name = self._limits, f"session {session.record.session_id} has reached its limit of"
        if session.next_index >= limits.max_turns:
            raise BadRequestError(f"{name} {limits.max_turns} turns")
        if session.num_tokens >= limits.max_tokens:
            raise BadRequestError(f"{name} {limits.max_tokens} tokens")

    def _answer(self, turn: Turn, session: Session, replayed: bool) -> TurnAnswer:
        self._metrics.note_turn(turn.num_prompt_tokens, turn.tokens.completion_ids.size, replayed)
        return TurnAnswer(turn, session.record.sampling, replayed)

    async def _make_turn(self, session: Session, request: ChatRequest, keys: RequestKeys) -> Turn:
        attempt = session.record.attempt  # of the request: one that outlives its attempt still belongs to it
        turn = await self._maker.make(session, request, keys)
        with self._held.forgetting(session):
            started = time.perf_counter()
            await self._journal.append_turn(session.claim, turn, attempt)
            self._metrics.journal_seconds.observe(time.perf_counter() - started)
        session.add(turn, attempt)
        return turn

    async def _touch(self, session: Session, index: int) -> None:
        """Count a recorded turn to the present attempt."""
        attempt = session.record.attempt
        if session.attempts[index] < attempt:
            with self._held.forgetting(session):
                await self._journal.touch_turn(session.claim, index, attempt)
            session.attempts[index] = max(attempt, session.attempts[index])


def _build_trouble(error: EngineFailureError | PromptRefusedError) -> Cause:
    kind = CauseKind.DATA if isinstance(error, PromptRefusedError) else CauseKind.ENGINE
    return Cause(kind=kind, error=type(error).__name__, message=str(error)[:_MAX_TROUBLE], server=error.engine_url)


def _name_run(session_id: str) -> str:
    found = _EPISODE_ID.match(session_id)
    return found[1] if found else ""


def _refuse_ended(record: SessionRecord) -> None:
    _refuse_released(record)
    if record.is_sealed:
        text = f"the samples of session {record.session_id} were collected; this attempt takes no further turns"
        raise ReleasedSessionError(text)


def _refuse_released(record: SessionRecord) -> None:
    if record.released_at is not None:
        raise ReleasedSessionError(f"session {record.session_id} was released and takes no further turns")
