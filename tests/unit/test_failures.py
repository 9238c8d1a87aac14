"""The failure boundary's table, over every exception class of httpx and what else can come up."""

from __future__ import annotations

import asyncio
import errno
import inspect
import os

import httpx
import pytest
from temporalio.exceptions import ApplicationError, ApplicationErrorCategory
from temporalio.service import RPCError, RPCStatusCode

from everroll.contracts.outcomes import BadAnswerError, BusyError, CauseKind, ErrorType, TrainingError
from everroll.engines.base import EngineRejectedError, EngineUnavailableError, WeightUpdateError
from everroll.failures import (
    ConfigurationError,
    Outcome,
    ServerStatusError,
    build_cause,
    classify,
    raise_for_status,
    to_application_error,
    to_transient_application_error,
)
from everroll.store import StoreError
from everroll.tokens.samples import MalformedSamplesError

TRANSPORT, TIMEOUT = CauseKind.TRANSPORT, CauseKind.TIMEOUT

TRANSIENT = {
    httpx.ConnectError: TRANSPORT,
    httpx.ReadError: TRANSPORT,
    httpx.WriteError: TRANSPORT,
    httpx.CloseError: TRANSPORT,
    httpx.NetworkError: TRANSPORT,
    httpx.ProxyError: TRANSPORT,
    httpx.RemoteProtocolError: TRANSPORT,
    httpx.ProtocolError: TRANSPORT,
    httpx.TransportError: TRANSPORT,
    httpx.ConnectTimeout: TIMEOUT,
    httpx.ReadTimeout: TIMEOUT,
    httpx.WriteTimeout: TIMEOUT,
    httpx.PoolTimeout: TIMEOUT,
    httpx.TimeoutException: TIMEOUT,
}
TERMINAL = {
    httpx.UnsupportedProtocol: ErrorType.CONFIGURATION,
    httpx.LocalProtocolError: ErrorType.CONFIGURATION,
    httpx.InvalidURL: ErrorType.CONFIGURATION,
    httpx.DecodingError: ErrorType.BAD_ANSWER,
    httpx.TooManyRedirects: ErrorType.PROGRAMMING,
    httpx.RequestError: ErrorType.PROGRAMMING,
    httpx.HTTPError: ErrorType.PROGRAMMING,
    httpx.HTTPStatusError: ErrorType.PROGRAMMING,
    httpx.CookieConflict: ErrorType.PROGRAMMING,
    httpx.StreamError: ErrorType.PROGRAMMING,
    httpx.StreamConsumed: ErrorType.PROGRAMMING,
    httpx.StreamClosed: ErrorType.PROGRAMMING,
    httpx.ResponseNotRead: ErrorType.PROGRAMMING,
    httpx.RequestNotRead: ErrorType.PROGRAMMING,
}


def make(kind: type[Exception]) -> Exception:
    if issubclass(kind, httpx.HTTPStatusError):
        request = httpx.Request("GET", "http://x")
        return kind("text", request=request, response=httpx.Response(500, request=request))
    if issubclass(kind, (httpx.StreamConsumed, httpx.StreamClosed, httpx.ResponseNotRead, httpx.RequestNotRead)):
        return kind()  # type: ignore[call-arg]
    return kind("text")


def test_the_table_speaks_of_every_exception_of_httpx() -> None:
    known = {
        value
        for value in vars(httpx).values()
        if inspect.isclass(value) and issubclass(value, Exception) and value.__module__ == "httpx"
    }
    assert known == set(TRANSIENT) | set(TERMINAL)


@pytest.mark.parametrize(("kind", "cause"), TRANSIENT.items())
def test_transient(kind: type[Exception], cause: CauseKind) -> None:
    error = make(kind)
    assert classify(error).outcome is Outcome.TRANSIENT
    built = build_cause(error, "http://server")
    assert (built.kind, built.error, built.server) == (cause, kind.__name__, "http://server")
    with pytest.raises(ValueError, match="not a terminal error"):
        to_application_error(error)


@pytest.mark.parametrize(("kind", "error_type"), TERMINAL.items())
def test_terminal(kind: type[Exception], error_type: ErrorType) -> None:
    error = make(kind)
    assert classify(error).outcome is Outcome.TERMINAL
    mapped = to_application_error(error)
    assert mapped.type == error_type.value
    assert mapped.non_retryable
    with pytest.raises(ValueError, match="not a transient error"):
        build_cause(error, None)


@pytest.mark.parametrize(
    ("error", "error_type"),
    [
        (KeyError("k"), ErrorType.PROGRAMMING),
        (ValueError("v"), ErrorType.PROGRAMMING),
        (RuntimeError("r"), ErrorType.PROGRAMMING),
        (OSError("disk"), ErrorType.PROGRAMMING),
        (ServerStatusError("GET", "http://x", 500, "b"), ErrorType.SERVER),
        (ConfigurationError("c"), ErrorType.CONFIGURATION),
        (BadAnswerError("b"), ErrorType.BAD_ANSWER),
        (MalformedSamplesError("m"), ErrorType.BAD_ANSWER),
        (TrainingError("t"), ErrorType.TRAINING),
        (StoreError("s"), ErrorType.STORE),
        (WeightUpdateError("POST", "http://x", "refused"), ErrorType.PUBLISH),
        (EngineRejectedError("POST", "http://x", "too long"), ErrorType.PUBLISH),
    ],
)
def test_other_terminal_errors(error: Exception, error_type: ErrorType) -> None:
    mapped = to_application_error(error)
    assert mapped.type == error_type.value
    assert mapped.non_retryable


def test_subclasses_follow_their_parents() -> None:
    """Temporal matches exact names; the table does not."""

    class Odd(ServerStatusError):
        pass

    class OddTransport(httpx.ReadError):
        pass

    assert to_application_error(Odd("GET", "http://x", 503, "b")).type == "RuntimeError"
    assert classify(OddTransport("x")).outcome is Outcome.TRANSIENT


def test_timeouts_of_the_standard_library_and_engines_that_are_away_are_transient() -> None:
    assert classify(TimeoutError()).cause_kind is TIMEOUT
    assert classify(TimeoutError()).cause_kind is TIMEOUT
    assert classify(BusyError("held")).cause_kind is CauseKind.BUSY
    assert classify(EngineUnavailableError("GET", "http://x", "away")).cause_kind is TRANSPORT


def test_temporal_that_is_away_is_transient_and_one_that_refuses_is_not() -> None:
    away = RPCError("tcp connect error", RPCStatusCode.UNAVAILABLE, b"")
    refused = RPCError("workflow not found", RPCStatusCode.NOT_FOUND, b"")
    assert classify(away).cause_kind is TRANSPORT
    assert to_application_error(refused).type == ErrorType.PROGRAMMING.value


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO])
def test_a_disk_that_takes_nothing_is_no_fault_of_the_program(number: int) -> None:
    full = OSError(number, os.strerror(number), "/store/blob")
    mapped = to_application_error(full)
    assert mapped.type == ErrorType.STORE.value
    assert mapped.non_retryable
    assert "/store/blob" in mapped.message
    assert (
        to_application_error(FileNotFoundError(errno.ENOENT, "no such file", "x")).type == ErrorType.PROGRAMMING.value
    )


def test_a_transient_error_is_routine_and_keeps_its_cause() -> None:
    """One that an activity could not absorb: Temporal tries again, without an error in its log."""
    mapped = to_transient_application_error(EngineUnavailableError("GET", "http://x", "away"), "[publish]")
    assert not mapped.non_retryable
    assert mapped.type == "transport"
    assert mapped.category is ApplicationErrorCategory.BENIGN
    assert mapped.details[0].server == "http://x"


def test_cancellation_is_cancellation() -> None:
    assert classify(asyncio.CancelledError()).outcome is Outcome.CANCELLED
    with pytest.raises(ValueError, match="not a terminal error"):
        to_application_error(asyncio.CancelledError())


def test_an_application_error_stays_what_it_is() -> None:
    error = ApplicationError("x", type="Mine")
    assert to_application_error(error) is error


@pytest.mark.parametrize("status", [301, 400, 404, 409, 422, 500, 502, 503])
def test_every_status_but_2xx_names_method_url_status_and_body(status: int) -> None:
    request = httpx.Request("POST", "http://server/sessions/s/samples")
    with pytest.raises(RuntimeError) as caught:
        raise_for_status(httpx.Response(status, request=request, text="what went wrong"))
    assert str(caught.value) == f"POST http://server/sessions/s/samples answered {status}: what went wrong"


def test_2xx_is_no_error() -> None:
    raise_for_status(httpx.Response(204, request=httpx.Request("GET", "http://x")))
