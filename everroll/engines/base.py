"""What every inference engine looks like to Everroll, and how a call to one can fail. No HTTP library is used here.

    RuntimeError
      EngineError                   a call to an engine failed; names method, URL, status and body
        EngineUnavailableError      503  away, timed out, answered 5xx, or aborted the call; another try can help
        EngineAnswerError           502  answered, but what it said cannot be trusted; nothing may be recorded
        EngineRejectedError         400  refused the request itself (4xx, e.g. the prompt is too long)
        WeightUpdateError           502  refused new weights; the old ones keep serving

`http_status` is what the agent behind the failed call gets to see. `can_retry` says whether the same call can succeed
on this engine or another one without anybody mending anything.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, Protocol

API_KEY_VARIABLE = "EVERROLL_ENGINE_API_KEY"
"""Environment variable with the key that engines ask for, for servers and clients alike."""

FinishReason = Literal["stop", "length"]
PauseMode = Literal["abort", "retract", "in_place"]

_BODY_LIMIT = 2000


class EngineError(RuntimeError):
    """A call to an engine failed."""

    http_status: ClassVar[int] = 502
    can_retry: ClassVar[bool] = False

    def __init__(self, method: str, url: str, problem: str, *, status: int | None = None, body: str = "") -> None:
        self.method, self.url, self.problem, self.status, self.body = method, url, problem, status, body[:_BODY_LIMIT]
        answered = "" if status is None else f" answered {status}"
        tail = f": {self.body}" if self.body else ""
        super().__init__(f"{method} {url}{answered}: {problem}{tail}")


Trouble = Literal["unreachable", "timeout", "lost", "busy", "failed"]
"""`unreachable`: no connection; `timeout`: no answer in time; `lost`: the connection broke under the call; `busy`:
paused, updating or overloaded (503, 429, an aborted call), which passes; `failed`: any other 5xx."""


class EngineUnavailableError(EngineError):
    """Unreachable, timed out, answered 5xx, or aborted the call. In-place weight updates make these routine."""

    http_status = 503
    can_retry = True

    def __init__(
        self,
        method: str,
        url: str,
        problem: str,
        *,
        status: int | None = None,
        body: str = "",
        trouble: Trouble = "failed",
    ) -> None:
        super().__init__(method, url, problem, status=status, body=body)
        self.trouble: Trouble = trouble

    @property
    def may_have_arrived(self) -> bool:
        """Whether the engine may be working on the call all the same."""
        return self.trouble in ("timeout", "lost")


class EngineAnswerError(EngineError):
    """A 2xx answer that is malformed or contradicts itself. Recording it would poison training."""


class EngineRejectedError(EngineError):
    """The engine refused the request itself; sending it again cannot help."""

    http_status = 400


class WeightUpdateError(EngineError):
    """The engine refused new weights (SGLang says so with HTTP 200 or 400) and goes on with the old ones."""


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One model call: prompt token ids in."""

    rid: str
    """Chosen by the caller; names the call in the engine's logs and in `abort_request`."""
    token_ids: list[int]
    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    """-1: all tokens."""
    stop_token_ids: tuple[int, ...] = ()
    seed: int | None = None
    """The draw of token i depends on (seed, i) only; None lets the engine choose."""


@dataclass(frozen=True, slots=True)
class Completion:
    """One model call: completion token ids and log-probabilities out. All lists have length T >= 1."""

    token_ids: list[int]  # [T] the stop token included
    logprobs: list[float]  # [T] of log_softmax(logits / temperature), not renormalised to top-p or top-k
    weight_versions: list[int]  # [T] version that sampled each token
    finish_reason: FinishReason
    weight_version: int
    """Version that served when the call ended."""
    num_cached_tokens: int = 0
    """Prompt tokens whose keys and values came from the engine's prefix cache."""


@dataclass(frozen=True, slots=True)
class Serving:
    """What an engine serves now."""

    version: int
    """0 before any update."""
    path: str | None
    """Directory that the weights were loaded from, as the engine says it; None where it does not tell."""


class Engine(Protocol):
    """A client of one inference engine. Every method is bounded in time and raises EngineError only."""

    @property
    def base_url(self) -> str: ...

    async def generate(self, request: GenerateRequest) -> Completion:
        """Sample one completion.

        Raises:
            EngineUnavailableError: transport, timeout, 5xx, or the engine aborted the call.
            EngineAnswerError: the answer breaks the protocol.
            EngineRejectedError: the engine refused the request.
        """

    async def weight_version(self) -> int:
        """The version now serving; 0 before any update."""

    async def serving(self) -> Serving:
        """The version now serving, and where its weights came from."""

    async def is_paused(self) -> bool | None:
        """Whether sampling is paused; None where the engine does not tell."""

    async def pause(self, mode: PauseMode) -> None:
        """Stop sampling: abort calls in flight, send them back to the queue (retract), or freeze them (in_place)."""

    async def resume(self) -> None:
        """Go on sampling."""

    async def update_weights(self, path: str, version: int) -> None:
        """Load the checkpoint directory `path` (as the engine sees it) and serve it as `version`.

        Raises:
            WeightUpdateError: refused; the old weights keep serving.
        """

    async def check_health(self) -> None:
        """Return if the engine serves.

        Raises:
            EngineUnavailableError: it does not.
        """

    async def close(self) -> None:
        """Free what the client holds."""
