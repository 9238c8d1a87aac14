"""The failure boundary: from exception to outcome, in one table. Nothing else in the tree decides what is fatal.

Exception                                                      Outcome
-------------------------------------------------------------  ------------------------------------------------
asyncio.CancelledError                                         CANCELLED: raised on, never absorbed
httpx.UnsupportedProtocol, LocalProtocolError, InvalidURL      TERMINAL, ConfigurationError: cannot heal
httpx.DecodingError, BadAnswerError, MalformedSamplesError     TERMINAL, BadAnswerError
httpx.TransportError (all others), TimeoutError                TRANSIENT: the sample is ABORTED, the run goes on
ServerStatusError (any non-2xx)                                TERMINAL, RuntimeError with method, URL, status, body
BusyError (another trainer holds the run)                      TRANSIENT: tried again until the step's deadline
TrainingError (all others)                                     TERMINAL, TrainingError: the trainer refused
EngineUnavailableError (while publishing)                      TRANSIENT: tried again; past the budget the run pauses
EngineError (all others, while publishing)                     TERMINAL, PublishError: an engine refused new weights
StoreError; OSError of a full or broken disk                   TERMINAL, StoreError: nothing can be written or read
RPCError (Temporal is away or overloaded)                      TRANSIENT: tried again until the activity's deadline
everything else                                                TERMINAL, ProgrammingError

Error tree of Everroll itself:

    RuntimeError
      ServerStatusError      a server answered, and not with 2xx
      ConfigurationError     the run cannot work as configured
    ValueError
      BadAnswerError         (everroll.contracts.outcomes) a 2xx answer that cannot be decoded or breaks the protocol
        MalformedSamplesError (everroll.tokens.samples)
"""

from __future__ import annotations

import asyncio
import errno
import json
from dataclasses import dataclass
from enum import Enum

import httpx
from temporalio.exceptions import ApplicationError, ApplicationErrorCategory
from temporalio.service import RPCError, RPCStatusCode

from everroll.contracts.outcomes import (
    BadAnswerError,
    BusyError,
    Cause,
    CauseKind,
    ErrorType,
    TrainingError,
)
from everroll.engines.base import EngineError, EngineUnavailableError
from everroll.store import StoreError

_BODY_LIMIT = 2000
_REFUSALS = frozenset(
    {
        RPCStatusCode.INVALID_ARGUMENT,
        RPCStatusCode.NOT_FOUND,
        RPCStatusCode.ALREADY_EXISTS,
        RPCStatusCode.PERMISSION_DENIED,
        RPCStatusCode.FAILED_PRECONDITION,
        RPCStatusCode.UNIMPLEMENTED,
        RPCStatusCode.UNAUTHENTICATED,
    }
)
"""What Temporal answers when asking it again cannot help; any other status passes."""

_DISK_ERRNOS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO})
"""A disk is full, over its quota, read-only or broken: for a person to mend, and no fault of the program."""


class ServerStatusError(RuntimeError):
    """A server answered with a non-2xx status. The message holds method, URL, status and body."""

    def __init__(self, method: str, url: str, status: int, body: str) -> None:
        self.method, self.url, self.status, self.body = method, url, status, body
        super().__init__(f"{method} {url} answered {status}: {body}")


class ConfigurationError(RuntimeError):
    """The run cannot work as configured; the message says what to change."""


class Outcome(Enum):
    TRANSIENT = "transient"
    TERMINAL = "terminal"
    CANCELLED = "cancelled"


@dataclass(frozen=True)
class Verdict:
    """What an exception means."""

    outcome: Outcome
    error_type: ErrorType | None = None
    """Set exactly for TERMINAL."""
    cause_kind: CauseKind | None = None
    """Set exactly for TRANSIENT."""


_PROGRAMMING = Verdict(Outcome.TERMINAL, ErrorType.PROGRAMMING)
_STORE = Verdict(Outcome.TERMINAL, ErrorType.STORE)
# The first row that matches decides.
_TABLE: list[tuple[tuple[type[BaseException], ...], Verdict]] = [
    ((asyncio.CancelledError,), Verdict(Outcome.CANCELLED)),
    (
        (httpx.UnsupportedProtocol, httpx.LocalProtocolError, httpx.InvalidURL, ConfigurationError),
        Verdict(Outcome.TERMINAL, ErrorType.CONFIGURATION),
    ),
    ((httpx.DecodingError, BadAnswerError), Verdict(Outcome.TERMINAL, ErrorType.BAD_ANSWER)),
    ((httpx.TimeoutException, TimeoutError), Verdict(Outcome.TRANSIENT, cause_kind=CauseKind.TIMEOUT)),
    ((httpx.TransportError,), Verdict(Outcome.TRANSIENT, cause_kind=CauseKind.TRANSPORT)),
    ((ServerStatusError,), Verdict(Outcome.TERMINAL, ErrorType.SERVER)),
    ((BusyError,), Verdict(Outcome.TRANSIENT, cause_kind=CauseKind.BUSY)),
    ((TrainingError,), Verdict(Outcome.TERMINAL, ErrorType.TRAINING)),
    ((EngineUnavailableError,), Verdict(Outcome.TRANSIENT, cause_kind=CauseKind.TRANSPORT)),
    ((EngineError,), Verdict(Outcome.TERMINAL, ErrorType.PUBLISH)),
    ((StoreError,), _STORE),
    ((RPCError,), Verdict(Outcome.TRANSIENT, cause_kind=CauseKind.TRANSPORT)),
    ((BaseException,), _PROGRAMMING),
]


def classify(error: BaseException) -> Verdict:
    """Look an exception up in the table."""
    if isinstance(error, RPCError) and error.status in _REFUSALS:
        return _PROGRAMMING
    if isinstance(error, OSError) and error.errno in _DISK_ERRNOS:
        return _STORE
    return next(verdict for types, verdict in _TABLE if isinstance(error, types))


def build_cause(error: BaseException, server: str | None) -> Cause:
    """The cause of an abort, for an exception that `classify` calls transient."""
    kind = classify(error).cause_kind
    if kind is None:
        raise ValueError(f"not a transient error: {error!r}")
    return Cause(kind=kind, error=type(error).__name__, message=str(error)[:_BODY_LIMIT], server=server)


def to_transient_application_error(error: BaseException, where: str) -> ApplicationError:
    """A transient exception that an activity could not absorb: its type is the cause's kind, its detail the `Cause`."""
    cause = build_cause(error, error.url if isinstance(error, EngineError) else None)
    return ApplicationError(
        f"{type(error).__name__}: {error} {where}",
        cause,
        type=cause.kind.value,
        category=ApplicationErrorCategory.BENIGN,
    )


def to_application_error(error: BaseException, where: str = "") -> ApplicationError:
    """The one place where a terminal exception becomes an `ApplicationError`: typed, never retried, cause kept.

    `where` names the activity, for people who see only the run's page.
    """
    if isinstance(error, ApplicationError):
        return error
    verdict = classify(error)
    if verdict.error_type is None:
        raise ValueError(f"not a terminal error: {error!r}")
    text = (
        str(error) if isinstance(error, (ServerStatusError, ConfigurationError)) else f"{type(error).__name__}: {error}"
    )
    return ApplicationError(f"{text} {where}".strip(), type=verdict.error_type.value, non_retryable=True)


def raise_for_status(response: httpx.Response) -> None:
    """Raise unless the status is 2xx. The body must have been read.

    Raises:
        ServerStatusError: with method, URL, status and the first 2,000 characters of the body.
    """
    if response.is_success:
        return
    request = response.request
    raise ServerStatusError(request.method, str(request.url), response.status_code, response.text[:_BODY_LIMIT])


def parse_json(response: httpx.Response) -> dict[str, object]:
    """The JSON object in a 2xx answer.

    Raises:
        BadAnswerError: not JSON, or not an object.
    """
    try:
        value = response.json()
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise BadAnswerError(f"{response.request.method} {response.request.url} answered no JSON: {error}") from error
    if not isinstance(value, dict):
        raise BadAnswerError(
            f"{response.request.method} {response.request.url} answered no JSON object: {value!r:.200}"
        )
    return value
