"""Outcomes: how a sample, an episode and a group can end, and the names under which errors cross Temporal.

`everroll.failures` maps exceptions onto these; workflows only ever see these.
"""

from __future__ import annotations

from enum import StrEnum

from everroll.contracts.base import Payload


class SampleStatus(StrEnum):
    """Fate of a sample. Only COMPLETED and TRUNCATED carry a verdict and may be trained."""

    PENDING = "pending"
    COMPLETED = "completed"
    TRUNCATED = "truncated"
    """Ended at a length limit; the tokens recorded up to there are valid."""
    ABORTED = "aborted"
    """Infrastructure failed; there is no verdict."""
    FAILED = "failed"
    """The agent raised; there is no verdict."""

    @property
    def has_verdict(self) -> bool:
        return self in (SampleStatus.COMPLETED, SampleStatus.TRUNCATED)


class CauseKind(StrEnum):
    """Why a sample or a group is unusable. The counts shown to people are keyed by these."""

    TRANSPORT = "transport"
    """A connection was refused, broken or lost."""
    TIMEOUT = "timeout"
    """A server did not answer in time."""
    ENGINE = "engine"
    """No engine answered the session's last model call, or what it answered was broken."""
    BUSY = "busy"
    """Another process holds what is needed."""
    DATA = "data"
    """An engine refused the prompt itself, as when it is too long for the model, and the agent failed of it."""
    NO_RECORDS = "no_records"
    """The agent made no model call."""
    ALL_TRUNCATED = "all_truncated"
    """No sample was left after truncation to `max_seq_len`."""
    NO_REWARD = "no_reward"
    """The agent returned, but without a reward."""
    AGENT = "agent"
    """The agent function raised, or its command failed."""
    DEADLINE = "deadline"
    """The episode ran past its deadline."""
    SKIPPED = "skipped"
    """A person cancelled or terminated the group."""
    ZERO_VARIANCE = "zero_variance"
    """All rewards of a group were equal and the filter is on."""
    STALE = "stale"
    """The group's oldest weight version was further back than `max_staleness` allows."""
    STRAGGLER = "straggler"
    """The group was still playing when its step waited for it no longer."""
    SURPLUS = "surplus"
    """The run completed without the group: it had been started in excess."""

    @property
    def is_outage(self) -> bool:
        """Whether a server or the network failed, whatever was being sampled: the same draw may well succeed."""
        return self in (CauseKind.TRANSPORT, CauseKind.TIMEOUT, CauseKind.ENGINE, CauseKind.BUSY)


class Cause(Payload):
    """What made a sample unusable, in terms a person can act on."""

    kind: CauseKind
    error: str = ""
    """Class name of the exception, e.g. `ReadError`."""
    message: str = ""
    server: str | None = None
    """Base URL of the server that failed, if one did."""

    def __str__(self) -> str:
        error = "" if self.message.startswith(f"{self.error}: ") else self.error
        parts = [self.kind.value, error, self.message]
        text = ": ".join(part for part in parts if part)
        return f"{text} (server {self.server})" if self.server else text


class ErrorType(StrEnum):
    """`ApplicationError.type` of every terminal failure that Everroll raises; all are non-retryable.

    Temporal matches exact names, so exceptions are mapped onto these once, in `everroll.failures`.
    """

    SERVER = "RuntimeError"
    """A server answered with a non-2xx status; the message holds method, URL, status and body."""
    CONFIGURATION = "ConfigurationError"
    """The run cannot work as configured (bad URL, changed data set, unknown agent, unreadable model)."""
    BAD_ANSWER = "BadAnswerError"
    """A server's 2xx answer could not be decoded or breaks the protocol."""
    PROGRAMMING = "ProgrammingError"
    """Any other exception: a bug, in Everroll or in user code that must not fail quietly."""
    TRAINING = "TrainingError"
    """The trainer refused a batch or failed to apply a step."""
    PUBLISH = "PublishError"
    """An engine refused new weights."""
    STORE = "StoreError"
    """The blob store cannot be written, or a blob is missing or corrupt."""
    ABORT_BUDGET = "AbortBudgetExceeded"
    """More episodes were aborted than the budget allows, and the policy is to fail."""
    NO_PROGRESS = "NoProgressError"
    """Bounded effort gave no trainable batch."""
    PAYLOAD_TOO_LARGE = "PayloadsTooLarge"
    """Raised by the SDK; retrying it loops for ever."""


class TrainingError(RuntimeError):
    """The trainer refused a batch, or cannot apply a step; the message names what and why."""


class BusyError(TrainingError):
    """Another process holds the run; it will let go, or its lock ends with it."""


class BadAnswerError(ValueError):
    """A server's 2xx answer cannot be decoded or breaks the protocol."""
