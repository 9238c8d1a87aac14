"""The engines behind the session server: which one answers a turn, and what its failures mean to an agent."""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Sequence

import numpy as np

from everroll.engines.base import (
    Completion,
    Engine,
    EngineAnswerError,
    EngineRejectedError,
    EngineUnavailableError,
    GenerateRequest,
)
from everroll.sessions.errors import BrokenAnswerError, EngineAwayError, PromptRefusedError

_MAX_LOGPROB = 1e-4
"""Rounding can lift the log-probability of a near-certain token slightly above 0."""


class Upstream:
    """Sticky by session, so that its prefix stays in one engine's cache; the next engine when that one is away."""

    def __init__(self, engines: Sequence[Engine]) -> None:
        if not engines:
            raise ValueError("no engine")
        self.engines = tuple(engines)
        self.failures: Counter[str] = Counter()
        """Failed calls by class of error, for people."""

    def engine_url(self, session_id: str) -> str:
        """The engine that a session's calls go to first."""
        return self.engines[self._first(session_id)].base_url

    def _first(self, session_id: str) -> int:
        return zlib.crc32(session_id.encode()) % len(self.engines)

    async def generate(self, session_id: str, request: GenerateRequest) -> Completion:
        """Sample one completion.

        Raises:
            EngineAwayError: every engine is away or aborted the call.
            BrokenAnswerError: an engine's answer cannot be trusted.
            PromptRefusedError: the engine refused the request itself.
        """
        first = self._first(session_id)
        away = []
        for engine in (*self.engines[first:], *self.engines[:first]):
            try:
                completion = await engine.generate(request)
                _check_completion(completion)
                return completion
            except EngineUnavailableError as error:
                self.failures[type(error).__name__] += 1
                away.append(str(error))
            except EngineAnswerError as error:
                self.failures[type(error).__name__] += 1
                raise BrokenAnswerError(str(error), engine.base_url) from error
            except EngineRejectedError as error:
                self.failures[type(error).__name__] += 1
                raise PromptRefusedError(f"the engine refused the request: {error}", engine.base_url) from error
        raise EngineAwayError("; ".join(away), self.engines[first].base_url)


def _check_completion(completion: Completion) -> None:
    """Last gate before the journal, whatever the engine's client has checked.

    Raises:
        EngineAnswerError: counts differ, or a value is no log-probability.
    """
    count = len(completion.token_ids)
    lengths = {"logprobs": len(completion.logprobs), "weight_versions": len(completion.weight_versions)}
    wrong = {name: length for name, length in lengths.items() if length != count}
    if count == 0 or wrong:
        raise EngineAnswerError("POST", "engine", f"{count} tokens, but {wrong or 'at least one is needed'}")
    logprobs = np.asarray(completion.logprobs, dtype=np.float32)
    if not np.isfinite(logprobs).all() or (logprobs > _MAX_LOGPROB).any():
        raise EngineAnswerError("POST", "engine", "a value among the log-probabilities is none")
