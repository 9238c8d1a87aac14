"""Pausing and going on: by the abort budget, or because a person asked."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from datetime import timedelta
from typing import Any

from temporalio import workflow
from temporalio.exceptions import ApplicationError, FailureError

with workflow.unsafe.imports_passed_through():
    from everroll.contracts import names
    from everroll.contracts.health import AwaitServerRequest, EpisodesReport, Pause
    from everroll.contracts.outcomes import ErrorType
    from everroll.contracts.spec import RunSpec
    from everroll.contracts.training import RunState
    from workflows import policies
    from workflows.abort_budget import AbortBudget


class PauseControl:
    """While paused, a run admits no group and its groups in flight start no episode."""

    def __init__(
        self,
        spec: RunSpec,
        state: RunState,
        before_recovery: Callable[[], Awaitable[None]],
        on_change: Callable[[], None],
    ) -> None:
        self._before_recovery = before_recovery
        self._on_change = on_change
        self._spec = spec
        self._state = state
        self._budget = AbortBudget(spec.rollout.abort_budget, state.budget)
        self._tasks: set[asyncio.Task[None]] = set()
        self._probe: asyncio.Task[None] | None = None
        self.fatal: BaseException | None = None
        """Set when the run must fail: by policy, or because nobody ended a pause."""

    @property
    def paused(self) -> bool:
        return self._state.pause is not None

    def restore(self) -> None:
        """After continue-as-new: go on probing."""
        if self._state.pause is not None and self._state.pause.server is not None:
            self._start_probe(self._state.pause.server)

    def take(self, report: EpisodesReport) -> None:
        """Count a group's report; pause or fail when the budget is exceeded."""
        self._budget.add(report)
        trouble = self._budget.find_excess()
        if trouble is None or self.paused:
            return
        message = self._budget.describe(trouble)
        if self._spec.rollout.abort_budget.on_exceeded == "fail":
            self.fatal = ApplicationError(message, type=ErrorType.ABORT_BUDGET.value, non_retryable=True)
            return
        self.begin(Pause(message=message, since=workflow.time(), server=trouble.server))

    def begin(self, pause: Pause) -> None:
        workflow.logger.warning("run %s is paused: %s", self._spec.run.name, pause.message)
        self._state.pause = pause
        self._hold_groups(True)
        if pause.server is not None:
            self._start_probe(pause.server)
        self._on_change()

    def end(self) -> None:
        """Go on; aborts are counted anew."""
        if self._state.pause is None:
            return
        workflow.logger.info("run %s goes on", self._spec.run.name)
        self._state.pause = None
        self._budget.reset()
        if self._probe is not None:
            self._probe.cancel()
        self._hold_groups(False)
        self._on_change()

    async def close(self) -> None:
        """Cancel what is under way."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _start_probe(self, server: str) -> None:
        self._probe = self._spawn(self._await_server(server))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _await_server(self, server: str) -> None:
        """Wait in one long activity, however long the outage, so that the history stays short."""
        limit = timedelta(seconds=self._spec.rollout.abort_budget.max_pause_seconds)
        try:
            await workflow.execute_activity(
                names.AWAIT_SERVER,
                AwaitServerRequest(server=server, probe_seconds=self._spec.rollout.abort_budget.probe_seconds),
                task_queue=self._spec.services.task_queue,
                start_to_close_timeout=limit,
                schedule_to_close_timeout=limit,
                heartbeat_timeout=policies.AWAIT_SERVER_HEARTBEAT,
                retry_policy=policies.RETRY,
                summary=f"probe {server}",
            )
        except FailureError as error:
            pause = self._state.pause
            message = f"{server} did not answer again; {pause.message if pause else error}"
            self.fatal = ApplicationError(message, type=ErrorType.ABORT_BUDGET.value, non_retryable=True)
            return
        self._probe = None
        await self._before_recovery()  # a server that was away may have lost the weights
        self.end()

    def _hold_groups(self, held: bool) -> None:
        for group in self._state.in_flight:
            self.hold_group(group, held)

    def hold_group(self, group: int, held: bool) -> None:
        """Tell a group in flight."""
        self._spawn(self._hold_group(group, held))

    async def _hold_group(self, group: int, held: bool) -> None:
        handle = workflow.get_external_workflow_handle(names.group_workflow_id(self._spec.run.name, group))
        try:
            await handle.signal(names.SIGNAL_HOLD, held)
        except FailureError as error:
            # The group ended meanwhile.
            workflow.logger.info("group %d was not put on hold: %s", group, error)
