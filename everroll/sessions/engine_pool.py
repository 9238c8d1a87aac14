"""What the session server knows of its engines: which are healthy, which weights each serves, and who is asked first.

Sessions are spread by rendezvous hashing: an engine that joins or leaves moves only the sessions that are or were its
own. An engine is unhealthy after so many failed checks or calls in a row, and healthy again after one success.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

from everroll.engines.base import Engine, EngineError

_MAX_ERROR = 1000
_log = logging.getLogger(__name__)


@dataclass(eq=False)
class EngineState:
    """One engine, as far as the session server knows."""

    engine: Engine
    threshold: int
    weight_version: int | None = None
    """As it said last, in a check or with a turn; None before it has said anything."""
    failures: int = 0
    """Failed checks and calls since the last success."""
    num_calls: int = 0
    num_failed_calls: int = 0
    num_in_flight: int = 0
    last_error: str = ""
    last_error_at: float | None = None
    """Seconds since 1970, as the next."""
    last_success_at: float | None = None

    def __post_init__(self) -> None:
        self._asking: asyncio.Task[int] | None = None

    @property
    def url(self) -> str:
        return self.engine.base_url

    @property
    def is_healthy(self) -> bool:
        return self.failures < self.threshold

    def note_success(self, weight_version: int) -> None:
        if not self.is_healthy:
            _log.info("engine %s answers again, weight version %d", self.url, weight_version)
        self.failures, self.weight_version, self.last_success_at = 0, weight_version, time.time()

    def note_failure(self, error: Exception) -> None:
        self.failures += 1
        self.last_error, self.last_error_at = str(error)[:_MAX_ERROR], time.time()
        if self.failures == self.threshold:
            _log.warning("engine %s is unhealthy: %s", self.url, self.last_error)

    async def serves(self, min_weight_version: int) -> bool:
        """Whether its weights are new enough; what is known and too old is asked for again first.

        Raises:
            EngineError: it had to be asked, and did not answer.
        """
        if self.weight_version is not None and self.weight_version >= min_weight_version:
            return True
        return min_weight_version == 0 or await self._ask_version() >= min_weight_version

    async def check(self) -> None:
        """One health check. Never raises what an engine does."""
        try:
            await self.engine.check_health()
            self.note_success(await self.engine.weight_version())
        except EngineError as error:
            self.note_failure(error)

    def describe(self) -> dict[str, Any]:
        return {
            "url": self.url,
            "healthy": self.is_healthy,
            "weight_version": self.weight_version,
            "failures_in_a_row": self.failures,
            "calls": self.num_calls,
            "failed_calls": self.num_failed_calls,
            "in_flight": self.num_in_flight,
            "last_error": self.last_error,
            "last_error_at": self.last_error_at,
            "last_success_at": self.last_success_at,
        }

    async def _ask_version(self) -> int:
        """One question at a time, however many turns wait for its answer."""
        if self._asking is None or self._asking.done():
            self._asking = asyncio.create_task(self.engine.weight_version())
        self.weight_version = await asyncio.shield(self._asking)
        return self.weight_version


class EnginePool:
    """All engines of one session server."""

    def __init__(self, engines: Sequence[Engine], failure_threshold: int) -> None:
        if not engines:
            raise ValueError("no engine")
        self.states = tuple(EngineState(engine, failure_threshold) for engine in engines)

    def rank(self, session_id: str) -> list[EngineState]:
        """A session's engines in the order in which they are asked: healthy ones first."""
        if len(self.states) == 1:
            return list(self.states)
        ranked = sorted(self.states, key=lambda state: _weigh(state.url, session_id), reverse=True)
        return sorted(ranked, key=lambda state: not state.is_healthy)

    @contextlib.asynccontextmanager
    async def checking(self, interval_seconds: float) -> AsyncIterator[None]:
        """Check every engine in the background, each for itself, at this interval."""
        tasks = [asyncio.create_task(_check_forever(state, interval_seconds)) for state in self.states]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def _check_forever(state: EngineState, interval_seconds: float) -> None:
    while True:
        try:
            await state.check()
        except Exception:  # a bug in a client must not end the checks
            _log.exception("checking engine %s failed", state.url)
        await asyncio.sleep(interval_seconds)


def _weigh(url: str, session_id: str) -> bytes:
    return hashlib.blake2b(f"{url}\0{session_id}".encode(), digest_size=8).digest()
