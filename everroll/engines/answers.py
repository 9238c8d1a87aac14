"""Checks that every client makes on what an engine says, whatever its wire: counts, ids, log-probabilities."""

from __future__ import annotations

import math
from typing import cast

from everroll.engines.base import EngineAnswerError

# Rounding can lift the log-probability of a near-certain token slightly above 0; anything more is no log-probability.
_MAX_LOGPROB = 1e-4
_UNNAMED_VERSION = "default"


class AnswerReader:
    """Reads one answer; every complaint names the call and quotes the body."""

    def __init__(self, method: str, url: str, payload: bytes) -> None:
        self._method, self._url, self._payload = method, url, payload

    def read_token_ids(self, value: object, name: str) -> list[int]:
        if not isinstance(value, list) or not set(map(type, value)) <= {int} or min(value, default=0) < 0:
            raise self.error(f"{name} is no list of token ids")
        return value

    def check_num_tokens(self, token_ids: list[int], most: int) -> None:
        if not 1 <= len(token_ids) <= most:
            raise self.error(f"{len(token_ids)} tokens, asked for 1 to {most}")

    def read_logprob(self, value: object, name: str) -> float:
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not is_number or not math.isfinite(value) or value > _MAX_LOGPROB:  # type: ignore[arg-type, operator]
            raise self.error(f"{name} = {value!r} is no log-probability")
        return float(value)  # type: ignore[arg-type]

    def read_logprobs(self, values: list[object], name: str) -> list[float]:
        """All of a completion's; they are read one by one only where something is wrong."""
        if set(map(type, values)) <= {float}:
            logprobs = cast(list[float], values)
            if all(map(math.isfinite, logprobs)) and max(logprobs, default=0.0) <= _MAX_LOGPROB:
                return logprobs
        return [self.read_logprob(value, f"{name}[{index}]") for index, value in enumerate(values)]

    def read_version(self, value: object) -> int:
        """Engines keep the version as text; `default` stands for weights that nobody has named yet."""
        if value == _UNNAMED_VERSION:
            return 0
        try:
            version = int(value) if isinstance(value, (str, int)) and not isinstance(value, bool) else -1
        except ValueError:
            version = -1
        if version < 0:
            raise self.error(f"weight_version is {value!r}, expected a number from 0")
        return version

    def error(self, problem: str) -> EngineAnswerError:
        return EngineAnswerError(self._method, self._url, problem, status=200, body=self.body)

    @property
    def body(self) -> str:
        return self._payload.decode("utf-8", "replace")


def is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
