"""The engines behind the session server: which one answers a turn, and what its failures mean to an agent.

A turn is tried on one engine after the other, always with the same token ids. Engines that say they are busy (paused,
updating, overloaded) and connections that broke are tried again for a while; an engine that cannot be reached, or that
serves older weights than the session may be sampled from, is left out. The whole turn is bounded in time.
"""

from __future__ import annotations

import asyncio
import dataclasses
import math
import secrets
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from everroll.engines.base import (
    Completion,
    Engine,
    EngineAnswerError,
    EngineError,
    EngineRejectedError,
    EngineUnavailableError,
    GenerateRequest,
)
from everroll.sessions.engine_pool import EnginePool, EngineState
from everroll.sessions.errors import BrokenAnswerError, EngineAwayError, PromptRefusedError

_MAX_LOGPROB = 1e-4
"""Rounding can lift the log-probability of a near-certain token slightly above 0."""
_MIN_LOGPROB = -3.4e38
"""What float32, in which they are recorded, can hold."""
_MAX_INT32 = 2**31 - 1
_PROMPT_REFUSED = (400, 413, 422)
"""Statuses that speak of the request; others that refuse (a missing key or route) speak of the set-up."""
_FIRST_BACKOFF_SECONDS = 0.05
_MAX_BACKOFF_SECONDS = 1.0


@dataclass(frozen=True)
class Patience:
    """How long a turn waits for engines, in seconds."""

    busy_seconds: float = 60.0
    """For engines that are paused or updating, or whose connections break, counted from the first failure."""
    turn_seconds: float = 900.0
    """For everything: all engines, all tries."""


@dataclass
class _Round:
    """One pass over the engines."""

    problems: list[str] = field(default_factory=list)
    can_pass: bool = False
    """Whether any engine's trouble is of the kind that passes."""
    was_lost: bool = False
    """Whether a connection broke under a call, which in-place updates make routine: worth one more try in any case."""


class Upstream:
    """Sticky by session, so that its prefix stays in one engine's cache; the next engine when that one is away."""

    def __init__(self, engines: Sequence[Engine], patience: Patience | None = None, failure_threshold: int = 3) -> None:
        self.pool = EnginePool(engines, failure_threshold)
        self._patience = patience or Patience()
        self.failures: Counter[str] = Counter()
        """Failed calls by class of error, for people."""

    def engine_url(self, session_id: str) -> str:
        """The engine that a session's calls go to first."""
        return self.pool.rank(session_id)[0].url

    def describe(self) -> list[dict[str, Any]]:
        """Every engine, for people."""
        return [state.describe() for state in self.pool.states]

    async def generate(self, session_id: str, request: GenerateRequest, min_weight_version: int = 0) -> Completion:
        """Sample one completion by weights of at least this version.

        Raises:
            EngineAwayError: every engine is away, aborted the call, or serves older weights.
            BrokenAnswerError: an engine's answer cannot be trusted.
            PromptRefusedError: the engine refused the request itself.
        """
        last, url = _Round(), self.engine_url(session_id)
        bound = asyncio.timeout(self._patience.turn_seconds)
        try:
            async with bound:
                return await self._try_until(session_id, request, min_weight_version, last, url)
        except TimeoutError:
            if not bound.expired():
                raise
            said = "; ".join(last.problems) or "no engine has failed either"
            text = f"no completion within {self._patience.turn_seconds:g} s; {said}"
            raise EngineAwayError(text, url) from None

    async def _try_until(
        self, session_id: str, request: GenerateRequest, min_weight_version: int, last: _Round, url: str
    ) -> Completion:
        loop = asyncio.get_running_loop()
        deadline, backoff = None, _FIRST_BACKOFF_SECONDS
        may_repeat = True
        while True:
            last.problems, last.can_pass, last.was_lost = [], False, False
            for state in self.pool.rank(session_id):
                completion = await self._try(state, request, min_weight_version, last)
                if completion is not None:
                    return completion
            deadline = deadline or loop.time() + self._patience.busy_seconds
            repeats, may_repeat = may_repeat and last.was_lost, False
            if not repeats and (not last.can_pass or loop.time() + backoff > deadline):
                raise EngineAwayError("; ".join(last.problems), url)
            await asyncio.sleep(backoff)
            backoff = min(backoff * 2, _MAX_BACKOFF_SECONDS)

    async def _try(
        self, state: EngineState, request: GenerateRequest, min_weight_version: int, tried: _Round
    ) -> Completion | None:
        """One call to one engine; None, and why in `tried`, if another may do better."""
        try:
            if not await self._serves(state, min_weight_version, tried):
                return None
            completion = await self._call(state, request)
        except EngineUnavailableError as error:
            self._note(state, error, tried)
            return None
        except EngineAnswerError as error:
            self._count(state, error)
            raise BrokenAnswerError(str(error), state.url) from error
        except EngineRejectedError as error:
            self._count(state, error)
            if error.status not in _PROMPT_REFUSED:
                raise BrokenAnswerError(str(error), state.url) from error
            raise PromptRefusedError(f"the engine refused the request: {error}", state.url) from error
        oldest = min(completion.weight_versions)
        if oldest < min_weight_version:
            tried.problems.append(_describe_old(state.url, oldest, min_weight_version))
            return None
        return completion

    async def _serves(self, state: EngineState, min_weight_version: int, tried: _Round) -> bool:
        """Whether the engine's weights are new enough for the session; if not, or not known, why is in `tried`."""
        try:
            if await state.serves(min_weight_version):
                return True
        except EngineError as error:
            self._note(state, error, tried)
        else:
            tried.problems.append(_describe_old(state.url, state.weight_version, min_weight_version))
        return False

    def _note(self, state: EngineState, error: EngineError, tried: _Round) -> None:
        self._count(state, error)
        tried.problems.append(str(error))
        if isinstance(error, EngineUnavailableError):
            tried.can_pass = tried.can_pass or error.trouble in ("busy", "lost")
            tried.was_lost = tried.was_lost or error.trouble == "lost"

    async def _call(self, state: EngineState, request: GenerateRequest) -> Completion:
        state.num_calls += 1
        state.num_in_flight += 1
        try:
            completion = await state.engine.generate(_name_call(request))
        finally:
            state.num_in_flight -= 1
        _check_completion(completion, state.url)
        state.note_success(completion.weight_version)
        return completion

    def _count(self, state: EngineState, error: EngineError) -> None:
        self.failures[type(error).__name__] += 1
        state.num_failed_calls += 1
        if isinstance(error, EngineUnavailableError) and error.trouble != "busy":
            state.note_failure(error)


def _name_call(request: GenerateRequest) -> GenerateRequest:
    """A name that no other call has: an engine may still work on an earlier one, of a server that was killed or over a
    connection that broke. SGLang refuses a second call of a name as malformed, and older versions of it crash."""
    return dataclasses.replace(request, rid=f"{request.rid}/{secrets.token_hex(4)}")


def _describe_old(url: str, version: int | None, needed: int) -> str:
    return f"engine {url} serves version {version}, the session needs at least {needed}"


def _check_completion(completion: Completion, url: str) -> None:
    """Last gate before the journal, whatever the engine's client has checked.

    Raises:
        EngineAnswerError: counts differ, a value is no log-probability, or what is recorded as int32 is larger.
    """
    count = len(completion.token_ids)
    lengths = {"logprobs": len(completion.logprobs), "weight_versions": len(completion.weight_versions)}
    wrong = {name: length for name, length in lengths.items() if length != count}
    if count == 0 or wrong:
        raise EngineAnswerError("POST", url, f"{count} tokens, but {wrong or 'at least one is needed'}")
    logprobs = completion.logprobs
    if not all(map(math.isfinite, logprobs)) or min(logprobs) < _MIN_LOGPROB or max(logprobs) > _MAX_LOGPROB:
        raise EngineAnswerError("POST", url, "a value among the log-probabilities is none")
    if max(max(completion.token_ids), max(completion.weight_versions), completion.num_cached_tokens) > _MAX_INT32:
        raise EngineAnswerError("POST", url, "a token id, a weight version or a count is above 2**31 - 1")
