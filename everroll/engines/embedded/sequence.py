"""One request inside the engine: what it asked for, what it has got so far, and where it stands."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from itertools import count

_NUMBERS = count()


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one request wants its tokens drawn and when it ends."""

    max_new_tokens: int
    temperature: float = 1.0
    """0 takes the likeliest token; its log-probability is then that of temperature 1."""
    top_p: float = 1.0
    top_k: int = -1
    stop_token_ids: frozenset[int] = frozenset()
    seed: int = 0


class FinishKind(Enum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


@dataclass(frozen=True, slots=True)
class Finish:
    """Why a sequence ended."""

    kind: FinishKind
    matched: int | None = None
    """The stop token, for STOP."""
    message: str = ""
    """For ABORT."""
    status_code: int = 503
    """For ABORT."""


@dataclass(slots=True, eq=False)
class Sequence:
    """A request with P prompt tokens and N sampled ones.

    `num_computed` tokens have their keys and values in the sequence's row; the scheduler keeps it at most P + N - 1,
    since the last token is only ever fed to sample the next one.
    """

    rid: str
    token_ids: list[int]  # [P + N]
    params: SamplingParams
    num_prompt: int = 0
    number: int = field(default_factory=lambda: next(_NUMBERS))
    """Order of arrival."""
    logprobs: list[float] = field(default_factory=list)  # [N]
    weight_versions: list[int] = field(default_factory=list)  # [N]
    finish: Finish | None = None
    num_computed: int = 0
    num_cached: int = 0
    """Prompt tokens found in the prefix cache when the request was first admitted."""
    row: int = -1
    """Row of the key-value cache, or -1 while waiting."""
    kv_epoch: int = -1
    """Weight epoch that all of the row's keys and values come from, or -1 once they are mixed."""
    missing_key: int | None = None
    """First block of the prompt that the prefix cache lacked at admission, while it is being computed."""

    def __post_init__(self) -> None:
        self.num_prompt = self.num_prompt or len(self.token_ids)

    @property
    def num_new(self) -> int:
        return len(self.token_ids) - self.num_prompt

    @property
    def new_token_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt :]

    @property
    def max_tokens(self) -> int:
        """Longest this sequence can become."""
        return self.num_prompt + self.params.max_new_tokens

    @property
    def num_to_prefill(self) -> int:
        """Tokens still to be computed before the last one can be fed to sample the next."""
        return len(self.token_ids) - 1 - self.num_computed

    def append(self, token_id: int, logprob: float, weight_version: int) -> None:
        """Record a sampled token and set `finish` if it was the last."""
        self.token_ids.append(token_id)
        self.logprobs.append(logprob)
        self.weight_versions.append(weight_version)
        if token_id in self.params.stop_token_ids:
            self.finish = Finish(FinishKind.STOP, matched=token_id)
        elif self.num_new >= self.params.max_new_tokens:
            self.finish = Finish(FinishKind.LENGTH)
