"""Pausing and going on: by the abort budget, or because a person asked."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from datetime import timedelta
from typing import Any

from temporalio import workflow
from temporalio.exceptions import ApplicationError, FailureError, is_cancelled_exception

with workflow.unsafe.imports_passed_through():
    from everroll.contracts import names
    from everroll.contracts.health import AwaitServerRequest, EpisodesReport, HoldRequest, Pause
    from everroll.contracts.outcomes import ErrorType
    from workflows import policies
    from workflows.abort_budget import AbortBudget
    from workflows.run_core import RunCore


class PauseControl:
    """While paused, a run admits no group and its groups in flight start no episode."""

    def __init__(
        self,
        core: RunCore,
        before_recovery: Callable[[], Awaitable[None]],
        on_change: Callable[[], None],
    ) -> None:
        self._before_recovery = before_recovery
        self._on_change = on_change
        self._core = core
        self._spec = core.spec
        self._state = core.state
        self._budget = AbortBudget(core.spec.rollout.abort_budget, core.state.budget)
        self._tasks: dict[asyncio.Task[None], None] = {}  # ordered, so that replays cancel in the same order
        self._waiting: asyncio.Task[None] | None = None
        self._num_blocked = 0

    @property
    def paused(self) -> bool:
        return self._state.pause is not None

    def restore(self) -> None:
        """After continue-as-new: go on waiting for the end of a pause, and tell groups again where they stand."""
        if self._state.pause is not None and self._waiting is None:
            self._start_waiting(self._state.pause)
        if self._state.hold_number:
            self._tell_groups()

    def take(self, report: EpisodesReport) -> None:
        """Count a group's report; pause or fail when the budget is exceeded."""
        self._budget.add(report)
        trouble = self._budget.find_excess()
        if trouble is None or self.paused:
            return
        self._pause_or_fail(self._budget.describe(trouble), trouble.server)

    async def wait_out(self, message: str, server: str | None) -> None:
        """Return when the run may go on after a trouble outside of episodes. A pause that is on already stays as it is.

        Raises:
            ApplicationError: the policy is to fail, or nothing ended the pause.
        """
        if not self.paused:
            self._pause_or_fail(message, server)
        self._num_blocked += 1
        self._on_change()
        try:
            await workflow.wait_condition(lambda: self._core.fatal is not None or not self.paused, timeout=self._limit)
        finally:
            self._num_blocked -= 1
            self._on_change()
        self._core.raise_if_fatal()

    @property
    def relapsed(self) -> bool:
        """Whether the last pause ended by itself, and nothing has worked since."""
        return self._state.budget.relapses > 0

    def note_success(self) -> None:
        """Something outside of episodes worked."""
        self._budget.note_success()

    @property
    def blocking(self) -> bool:
        """Whether what the run is doing waits for the end of the pause."""
        return self._num_blocked > 0 and self.paused

    @property
    def _limit(self) -> timedelta:
        """Longest time of a pause, and some: `_wait_for_end` keeps to it."""
        return timedelta(seconds=self._spec.rollout.abort_budget.max_pause_seconds) + policies.PAUSE_GRACE

    def _pause_or_fail(self, message: str, server: str | None) -> None:
        if self._spec.rollout.abort_budget.on_exceeded == "fail":
            self._core.fail(ApplicationError(message, type=ErrorType.ABORT_BUDGET.value, non_retryable=True))
            return
        message += self._budget.describe_relapses()
        self._budget.note_pause(workflow.time())
        self.begin(Pause(message=message, since=workflow.time(), server=server))

    def begin(self, pause: Pause) -> None:
        workflow.logger.warning("run %s is paused: %s", self._spec.run.name, pause.message)
        self._state.pause = pause
        self._change_hold()
        self._start_waiting(pause)
        self._on_change()

    def end(self) -> None:
        """Go on, because a person says so."""
        self._budget.note_success()
        self._go_on()

    def _go_on(self) -> None:
        """Aborts are counted anew."""
        if self._state.pause is None:
            return
        workflow.logger.info("run %s goes on", self._spec.run.name)
        self._state.pause = None
        self._budget.reset()
        if self._waiting is not None:
            self._waiting.cancel()
            self._waiting = None
        self._change_hold()
        self._on_change()

    @property
    def hold(self) -> HoldRequest:
        """What groups must know now."""
        return HoldRequest(number=self._state.hold_number, held=self.paused)

    def tell_group(self, group: int) -> None:
        """Tell a group in flight whether to hold."""
        self._spawn(self._tell_group(group, self.hold))

    async def close(self) -> None:
        """Cancel what is under way."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _change_hold(self) -> None:
        self._state.hold_number += 1
        self._tell_groups()

    def _tell_groups(self) -> None:
        for group in self._state.in_flight:
            self.tell_group(group)

    def _start_waiting(self, pause: Pause) -> None:
        self._waiting = self._spawn(self._wait_for_end(pause))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks[task] = None
        task.add_done_callback(lambda done: self._tasks.pop(done, None))
        return task

    async def _wait_for_end(self, pause: Pause) -> None:
        """Probe the server that is to blame; a pause that nothing ends fails the run.

        A server that answers its probe and does not work is given ever more time, within the limit of one pause.
        """
        limit = self._spec.rollout.abort_budget.max_pause_seconds
        since = pause.since if pause.requested else self._state.budget.paused_at or pause.since
        remaining = max(1.0, limit - (workflow.time() - since))
        delay = remaining if pause.server is None else min(self._compute_delay(pause), remaining)
        await asyncio.sleep(delay)
        answered = False
        if pause.server is not None and delay < remaining:
            answered = await self._await_server(pause.server, timedelta(seconds=remaining - delay))
        if self._state.pause is not pause:
            return  # somebody went on meanwhile
        if not answered:
            text = f"nothing ended this pause within {limit:.0f} s: {pause.message}"
            self._core.fail(ApplicationError(text, type=ErrorType.ABORT_BUDGET.value, non_retryable=True))
            return
        await self._before_recovery()  # a server that was away may have lost the weights
        if self._state.pause is pause:
            self._waiting = None
            self._state.budget.relapses += 1  # until something works
            self._go_on()

    def _compute_delay(self, pause: Pause) -> float:
        """Seconds until a server is probed that answered its last probe and did not work."""
        probe_seconds = self._spec.rollout.abort_budget.probe_seconds
        delay = policies.relapse_backoff_seconds(probe_seconds, self._state.budget.relapses)
        return max(0.0, delay - (workflow.time() - pause.since))

    async def _await_server(self, server: str, limit: timedelta) -> bool:
        """One long activity, however long the outage, so that the history stays short."""
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
            if is_cancelled_exception(error):
                raise asyncio.CancelledError from error
            workflow.logger.warning("%s did not answer again: %s", server, error)
            return False
        return True

    async def _tell_group(self, group: int, request: HoldRequest) -> None:
        handle = workflow.get_external_workflow_handle(names.group_workflow_id(self._spec.run.name, group))
        try:
            await handle.signal(names.SIGNAL_HOLD, request)
        except FailureError as error:
            # The group ended meanwhile, or has not started: then it is told once it has.
            workflow.logger.info("group %d was not told to hold or go on: %s", group, error)
