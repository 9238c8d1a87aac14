"""Ending groups that the run no longer waits for: a step's stragglers, and what was started in excess."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Iterable
from typing import Any

from temporalio import workflow
from temporalio.exceptions import FailureError

with workflow.unsafe.imports_passed_through():
    from everroll.contracts import names
    from everroll.contracts.outcomes import Cause, CauseKind
    from everroll.contracts.rollout import EndGroupRequest
    from everroll.contracts.spec import RunSpec
    from workflows import policies
    from workflows.ledger import Ledger


class EarlyEnd:
    """Tells groups to end. Each ends its episodes, settles as dropped, and so gives its accounts as any other."""

    def __init__(
        self,
        spec: RunSpec,
        ledger: Ledger,
        is_paused: Callable[[], bool],
        spawn: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]],
    ) -> None:
        self._spec = spec
        self._ledger = ledger
        self._is_paused = is_paused
        self._spawn = spawn
        self._told: dict[int, Cause] = {}
        self._num_sending = 0

    @property
    def busy(self) -> bool:
        """Whether a group is being told: what is under way when the run continues as new may never arrive."""
        return self._num_sending > 0

    def watch_step(self) -> asyncio.Task[None] | None:
        """While a batch is gathered: end its stragglers when they have had their grace. Cancel it with the batch."""
        stragglers = self._spec.rollout.stragglers
        if stragglers.policy == "wait" or stragglers.after_share == 1:
            return None
        return self._spawn(self._end_after_grace(stragglers.grace_seconds))

    def end_stragglers(self) -> None:
        """The batch is complete: its other groups are waited for no longer, where that is the policy."""
        if self._spec.rollout.stragglers.policy == "drop":
            self.end_groups(self._ledger.find_stragglers(), CauseKind.STRAGGLER, "its step went on without it")

    def end_groups(self, groups: Iterable[int], kind: CauseKind, message: str) -> None:
        for group in groups:
            if group not in self._told:
                self._told[group] = Cause(kind=kind, message=f"group {group}: {message}")
                self._spawn(self._tell(group, self._told[group]))

    def note_started(self, group: int) -> None:
        """A group that was to end before it had started is told now."""
        if group in self._told:
            self._spawn(self._tell(group, self._told[group]))

    def note_settled(self, group: int) -> None:
        self._told.pop(group, None)

    async def _end_after_grace(self, grace_seconds: float) -> None:
        limit = policies.group_limit(self._spec.rollout)
        with contextlib.suppress(TimeoutError):
            await workflow.wait_condition(self._ledger.has_share, timeout=limit)
            await asyncio.sleep(grace_seconds)
            while self._is_paused():
                await workflow.wait_condition(lambda: not self._is_paused(), timeout=limit)
                await asyncio.sleep(grace_seconds)
            self.end_groups(self._ledger.find_stragglers(), CauseKind.STRAGGLER, "it was slower than its step waits")

    async def _tell(self, group: int, cause: Cause) -> None:
        handle = workflow.get_external_workflow_handle(names.group_workflow_id(self._spec.run.name, group))
        self._num_sending += 1
        try:
            await handle.signal(names.SIGNAL_END, EndGroupRequest(cause=cause))
        except FailureError as error:
            # The group ended meanwhile, or has not started: then it is told once it has.
            workflow.logger.info("group %d was not told to end: %s", group, error)
        finally:
            self._num_sending -= 1
