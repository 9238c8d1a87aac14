"""What failed a workflow, as a failure of the activity that waited for it."""

from __future__ import annotations

from temporalio.client import WorkflowFailureError
from temporalio.exceptions import ApplicationError, FailureError

from everroll.contracts.outcomes import ErrorType


def find_terminal(error: BaseException) -> ApplicationError:
    """The failure at the root of a group's, as one that is never retried: the group will not heal."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, ApplicationError):
        cause = cause.cause if isinstance(cause, (FailureError, WorkflowFailureError)) else None
    if cause is None:
        return ApplicationError(str(error), type=ErrorType.PROGRAMMING.value, non_retryable=True)
    return ApplicationError(cause.message, type=cause.type, non_retryable=True)
