"""What all parts of the client share: its errors, and the handle of a run."""

from __future__ import annotations

from datetime import timedelta

from temporalio.client import Client, WorkflowHandle
from temporalio.exceptions import ApplicationError, FailureError
from temporalio.service import RPCError, RPCStatusCode

from everroll.contracts import names
from everroll.contracts.training import TrainingRunResult

RPC_TIMEOUT = timedelta(seconds=10)
"""Of calls that Temporal itself answers."""


class RunNotFoundError(LookupError):
    """There is no run of that name."""


class SteeringError(RuntimeError):
    """The run refused what was asked of it; the text says why."""


class RunExistsError(RuntimeError):
    """A run of that name exists already."""


class RunFailedError(RuntimeError):
    """The run ended without completing; the text names the failure."""


class RunHandles:
    """Runs in one Temporal namespace."""

    def __init__(self, temporal: Client) -> None:
        self.temporal = temporal

    def handle(self, run: str) -> WorkflowHandle[object, TrainingRunResult]:
        return self.temporal.get_workflow_handle(names.run_workflow_id(run), result_type=TrainingRunResult)


def describe_failure(error: BaseException | None) -> str:
    """One line a level, from the outermost failure to the cause."""
    lines = []
    while error is not None:
        name = error.type if isinstance(error, ApplicationError) and error.type else type(error).__name__
        text = error.message if isinstance(error, FailureError) else str(error)
        lines.append(f"{name}: {text}")
        error = error.cause if isinstance(error, FailureError) else error.__cause__
    return "\n".join(lines)


def translate_rpc_error(error: RPCError, run: str) -> Exception:
    if error.status == RPCStatusCode.NOT_FOUND and "namespace" in error.message.lower():
        return ConnectionError(f"the Temporal server has no such namespace: {error.message}")
    if error.status == RPCStatusCode.NOT_FOUND:
        return RunNotFoundError(f"no run named {run!r} is running; everroll list shows which there are")
    return ConnectionError(f"Temporal did not answer: {error.message}")
