"""What the parts of a run share: its settings and state, the tasks beside its steps, and what must end it."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, NoReturn

from temporalio import workflow
from temporalio.exceptions import (
    ActivityError,
    ApplicationError,
    CancelledError,
    FailureError,
)

with workflow.unsafe.imports_passed_through():
    from everroll.contracts.outcomes import ErrorType
    from everroll.contracts.spec import RunSpec
    from everroll.contracts.training import RunState, TrainingRunRequest
    from workflows.calls import RunCalls
    from workflows.ledger import Ledger
    from workflows.metrics import RunMetrics
    from workflows.recording import Recorder


class RunCore:
    """Owns the run's state; decides nothing."""

    def __init__(self, request: TrainingRunRequest) -> None:
        self.spec = request.spec
        self.state = request.state or RunState()
        self.metrics = RunMetrics(self.spec.run.name)
        self.ledger = Ledger(self.spec, self.state, self.metrics.count_drop)
        self.calls = RunCalls(self.spec)
        self.recorder = Recorder(self.state, self.calls, lambda: self.spec)
        self.tasks: dict[asyncio.Task[None], None] = {}  # ordered, so that replays cancel in the same order
        self.closing = False
        """True once nothing new may begin."""
        self._failure: BaseException | None = None

    def use(self, spec: RunSpec) -> None:
        """Go on by other settings."""
        self.spec = spec
        self.calls.use(spec)
        self.ledger.use(spec)

    def follow(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Do it beside the steps; it is cancelled when the run ends."""
        task = asyncio.create_task(work)
        self.tasks[task] = None
        task.add_done_callback(lambda done: self.tasks.pop(done, None))
        return task

    def fail(self, error: BaseException) -> None:
        """End the run, whatever it waits for; the first failure is the one that counts."""
        self._failure = self._failure or error

    @property
    def fatal(self) -> BaseException | None:
        """What must end the run."""
        if self._failure is not None:
            return self._failure
        text = self.ledger.find_no_progress()
        return ApplicationError(text, type=ErrorType.NO_PROGRESS.value, non_retryable=True) if text else None

    def raise_if_fatal(self) -> None:
        if self.fatal is not None:
            raise self.fatal

    def record_soon(self) -> None:
        """Write down what the run directory lacks, if nobody is at it."""
        if self.recorder.is_due:
            self.follow(self._record())

    async def _record(self) -> None:
        try:
            await self.recorder.flush()
        except ActivityError as error:
            self.fail(error)


def raise_root(error: FailureError) -> NoReturn:
    """Fail the run with the text of the failure's root, so that the run's own page says what happened.

    Cancellation stays cancellation.
    """
    root: BaseException = error
    while isinstance(root, FailureError) and root.cause is not None and not isinstance(root, CancelledError):
        if isinstance(root, ApplicationError):
            break
        root = root.cause
    if isinstance(root, ApplicationError):
        raise ApplicationError(root.message, type=root.type, non_retryable=True) from error
    raise error
