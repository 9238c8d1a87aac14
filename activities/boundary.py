"""The failure boundary at work: the interceptor that maps whatever an activity raises, and retries of lost calls."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from temporalio import activity
from temporalio.exceptions import FailureError
from temporalio.worker import ActivityInboundInterceptor, ExecuteActivityInput, Interceptor

from everroll.contracts.outcomes import Cause
from everroll.failures import (
    Outcome,
    build_cause,
    classify,
    to_application_error,
    to_transient_application_error,
)

logger = logging.getLogger(__name__)
T = TypeVar("T")

_FIRST_BACKOFF_SECONDS = 0.1
_MAX_BACKOFF_SECONDS = 2.0


class CallAbortedError(Exception):
    """A call failed in transport at every attempt; `cause` says how the last one did."""

    def __init__(self, cause: Cause) -> None:
        self.cause = cause
        super().__init__(str(cause))


async def retry_transient(call: Callable[[], Awaitable[T]], attempts: int, server: str) -> T:
    """Make a call again while it fails in transport. Anything else that it raises passes through.

    Raises:
        CallAbortedError: every attempt failed in transport.
    """
    for attempt in range(1, attempts + 1):
        try:
            return await call()
        except Exception as error:
            if classify(error).outcome is not Outcome.TRANSIENT:
                raise
            cause = build_cause(error, server)
            if attempt == attempts:
                raise CallAbortedError(cause) from error
            logger.warning("attempt %d of %d at %s failed: %s", attempt, attempts, server, cause)
        backoff = min(_MAX_BACKOFF_SECONDS, _FIRST_BACKOFF_SECONDS * 2 ** (attempt - 1))
        await asyncio.sleep(backoff * random.uniform(0.5, 1.0))
    raise ValueError(f"attempts must be at least 1, not {attempts}")


class BoundaryInterceptor(Interceptor):
    """Maps exceptions of activities by the table in `everroll.failures`: terminal ones are never retried."""

    def intercept_activity(self, next: ActivityInboundInterceptor) -> ActivityInboundInterceptor:
        return _BoundaryInbound(next)


class _BoundaryInbound(ActivityInboundInterceptor):
    async def execute_activity(self, input: ExecuteActivityInput) -> Any:
        try:
            return await super().execute_activity(input)
        except FailureError:
            raise
        except BaseException as error:
            verdict = classify(error)
            if verdict.outcome is Outcome.CANCELLED or isinstance(error, (SystemExit, KeyboardInterrupt)):
                raise
            info = activity.info()
            where = f"[{info.activity_type}, {info.activity_id} of {info.workflow_id}]"
            if verdict.cause_kind is not None:
                raise to_transient_application_error(error, where) from error
            raise to_application_error(error, where) from error
