"""A simulated engine: SGLang's wire, tokens by chance, and the latencies that it is told. Knows no HTTP.

A request waits for one of `max_batch_size` places, then for its first token, then for the others at its own rate, and
ends with an end-of-turn token or at its length limit. Its tokens are ordinary words of the model's vocabulary, their
log-probabilities are made up, and equal seeds draw equal completions.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field

from everroll.engines.embedded.sequence import Finish, FinishKind, Sequence
from everroll.simulation.distributions import Distribution


@dataclass(frozen=True)
class EngineBehaviour:
    """How the engine behaves."""

    first_token_seconds: Distribution
    tokens_per_second: float
    """Of one request."""
    completion_tokens: Distribution
    max_batch_size: int
    failure_rate: float
    """Share of requests that are aborted half-way."""
    update_seconds: float
    """Time to load new weights; no request gets a token meanwhile."""


@dataclass
class SimulatedEngine:
    """State of one engine."""

    behaviour: EngineBehaviour
    word_ids: SequenceOf[int]
    """Token ids that completions are made of."""
    weight_version: int = 0
    num_running: int = 0
    num_waiting: int = 0
    model_path: str = ""
    _places: asyncio.Semaphore = field(init=False)
    _running: asyncio.Event = field(init=False, default_factory=asyncio.Event)
    _paused_at: float | None = field(init=False, default=None)
    _paused_seconds: float = field(init=False, default=0.0)
    """Of all pauses that are over."""
    _aborts: dict[str, asyncio.Event] = field(init=False, default_factory=dict)
    _update_lock: asyncio.Lock = field(init=False, default_factory=asyncio.Lock)

    def __post_init__(self) -> None:
        self._places = asyncio.Semaphore(self.behaviour.max_batch_size)
        self._running.set()

    @property
    def is_paused(self) -> bool:
        return self._paused_at is not None

    def pause(self, mode: str) -> None:
        """Stop time for all requests; with mode `abort` they end."""
        if self._paused_at is None:
            self._paused_at = time.monotonic()
            self._running.clear()
        if mode == "abort":
            self.abort(None)

    def resume(self) -> None:
        if self._paused_at is not None:
            self._paused_seconds += time.monotonic() - self._paused_at
            self._paused_at = None
            self._running.set()

    def abort(self, rid: str | None) -> None:
        """End the requests with this id, or all."""
        for key, aborted in self._aborts.items():
            if rid is None or key == rid:
                aborted.set()

    async def update_weights(self, path: str, version: int | None) -> None:
        """Take the time that loading takes; nothing is read."""
        async with self._update_lock:
            await asyncio.sleep(self.behaviour.update_seconds)
            self.model_path = path
            self.weight_version = self.weight_version if version is None else version

    async def generate(self, sequence: Sequence, stop_token_id: int | None) -> Sequence:
        """Fill the sequence with tokens and its finish, after the time that this takes."""
        generator = random.Random(sequence.params.seed)
        aborted = self._aborts.setdefault(sequence.rid, asyncio.Event())
        work = asyncio.ensure_future(self._generate(sequence, stop_token_id, generator))
        stop = asyncio.ensure_future(aborted.wait())
        try:
            await asyncio.wait((work, stop), return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                sequence.finish = Finish(FinishKind.ABORT, message="aborted by request")
            return sequence
        finally:
            self._aborts.pop(sequence.rid, None)
            for task in (work, stop):
                task.cancel()
            await asyncio.gather(work, stop, return_exceptions=True)

    async def _generate(self, sequence: Sequence, stop_token_id: int | None, generator: random.Random) -> None:
        self.num_waiting += 1
        try:
            await self._places.acquire()
        finally:
            self.num_waiting -= 1
        self.num_running += 1
        try:
            wanted = max(1, round(self.behaviour.completion_tokens.draw(generator)))
            fails = generator.random() < self.behaviour.failure_rate
            seconds = self.behaviour.first_token_seconds.draw(generator)
            seconds += (min(wanted, sequence.params.max_new_tokens) - 1) / self.behaviour.tokens_per_second
            await self._spend(seconds / 2 if fails else seconds)
            if fails:
                sequence.finish = Finish(FinishKind.ABORT, message="a simulated failure")
            else:
                self._fill(sequence, stop_token_id, generator, wanted)
        finally:
            self.num_running -= 1
            self._places.release()

    async def _spend(self, seconds: float) -> None:
        """Let time pass in which the engine is not paused."""
        end = self._active_seconds() + seconds
        while (left := end - self._active_seconds()) > 0:
            await self._running.wait()
            await asyncio.sleep(left)

    def _active_seconds(self) -> float:
        """A clock that stands still while the engine is paused."""
        now = time.monotonic() if self._paused_at is None else self._paused_at
        return now - self._paused_seconds

    def _fill(self, sequence: Sequence, stop_token_id: int | None, generator: random.Random, wanted: int) -> None:
        while sequence.finish is None:
            ends = stop_token_id is not None and sequence.num_new + 1 >= wanted
            token_id = stop_token_id if ends and stop_token_id is not None else generator.choice(self.word_ids)
            sequence.append(token_id, -generator.random(), self.weight_version)
