"""What all parts of the client share: its errors, and the handle of a run."""

from __future__ import annotations

from datetime import timedelta

from temporalio.client import Client, WorkflowExecutionStatus, WorkflowHandle
from temporalio.exceptions import ActivityError, ApplicationError, ChildWorkflowError, FailureError
from temporalio.service import RPCError, RPCStatusCode

from everroll.contracts import names
from everroll.contracts.training import TrainingRunResult

RPC_TIMEOUT = timedelta(seconds=10)
"""Of calls that Temporal itself answers."""
_MIN_WORDS = 12
"""Letters of a text that is no accident where it is found in another."""


class RunNotFoundError(LookupError):
    """There is no run of that name."""


class SteeringError(RuntimeError):
    """The run refused what was asked of it; the text says why."""


class RunExistsError(RuntimeError):
    """A run of that name exists already."""


class RunFailedError(RuntimeError):
    """The run ended without completing; the text names the failure."""


STATES = {
    WorkflowExecutionStatus.RUNNING: "running",
    WorkflowExecutionStatus.COMPLETED: "completed",
    WorkflowExecutionStatus.FAILED: "failed",
    WorkflowExecutionStatus.CANCELED: "canceled",
    WorkflowExecutionStatus.TERMINATED: "terminated",
    WorkflowExecutionStatus.CONTINUED_AS_NEW: "running",
    WorkflowExecutionStatus.TIMED_OUT: "timed_out",
}
"""How people call what Temporal knows of a run."""


class RunHandles:
    """Runs in one Temporal namespace."""

    def __init__(self, temporal: Client) -> None:
        self.temporal = temporal

    def handle(self, run: str) -> WorkflowHandle[object, TrainingRunResult]:
        return self.temporal.get_workflow_handle(names.run_workflow_id(run), result_type=TrainingRunResult)


def describe_failure(error: BaseException | None) -> str:
    """One line a cause, from the outermost to the root. What a level only says again is left out."""
    lines: list[str] = []
    while error is not None:
        cause = error.cause if isinstance(error, FailureError) else error.__cause__
        line = _describe_level(error)
        if not (_is_envelope(error) and cause is not None) and not any(_says(known, line) for known in lines):
            lines.append(line)
        error = cause
    return "\n".join(lines)


def _describe_level(error: BaseException) -> str:
    name = error.type if isinstance(error, ApplicationError) and error.type else type(error).__name__
    text = error.message if isinstance(error, FailureError) else str(error)
    if isinstance(error, ActivityError):
        text = f"{error.activity_type}: {text}"
    return f"{name}: {text}"


def _is_envelope(error: BaseException) -> bool:
    """What Temporal puts around a failure that says it all."""
    return isinstance(error, (ActivityError, ChildWorkflowError)) and isinstance(error.cause, ApplicationError)


def _says(known: str, line: str) -> bool:
    """Whether a line that is printed has the words of another in it, whatever class each calls it."""
    words = line.partition(": ")[2]
    return line in known or (len(words) >= _MIN_WORDS and words in known)


def translate_rpc_error(error: RPCError, run: str) -> Exception:
    if error.status == RPCStatusCode.NOT_FOUND and "namespace" in error.message.lower():
        return ConnectionError(f"the Temporal server has no such namespace: {error.message}")
    if error.status == RPCStatusCode.NOT_FOUND:
        return RunNotFoundError(f"no run named {run!r} is running; everroll list shows which there are")
    return ConnectionError(f"Temporal did not answer: {error.message}")
