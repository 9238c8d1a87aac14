"""Publishing weights: one version at a time, and an engine that stays away pauses the run instead of failing it."""

from __future__ import annotations

import asyncio
import contextlib

from temporalio import workflow
from temporalio.exceptions import (
    ActivityError,
    ApplicationError,
    is_cancelled_exception,
)
from temporalio.exceptions import TimeoutError as TemporalTimeoutError

with workflow.unsafe.imports_passed_through():
    from everroll.contracts.health import ServerTrouble
    from everroll.contracts.outcomes import Cause, CauseKind
    from everroll.contracts.spec import RunSpec
    from everroll.contracts.training import Weights
    from workflows import policies
    from workflows.abort_budget import describe_trouble
    from workflows.calls import RunCalls
    from workflows.pausing import PauseControl


class Publisher:
    """Brings the engines to the newest version. Never two at once, so that a late one cannot undo a newer one."""

    def __init__(self, spec: RunSpec, calls: RunCalls, pauses: PauseControl, weights: Weights | None) -> None:
        self._spec = spec
        self._calls = calls
        self._pauses = pauses
        self._lock = asyncio.Lock()
        self._newest = weights
        self._num_waiting = 0
        self._num_published = 0
        self._first = weights is None

    @property
    def busy(self) -> bool:
        """Whether a publish is under way or waits."""
        return self._lock.locked() or self._num_waiting > 0

    async def publish(self, weights: Weights) -> None:
        """Return when every engine serves these weights, however long one is away (the pause's limit bounds it).

        Raises:
            ActivityError: an engine refused them.
            ApplicationError: an engine stayed away beyond the abort budget, and the policy is to fail, or nothing ended
                the pause.
        """
        self._newest = weights
        self._num_waiting += 1
        try:
            while (trouble := await self._try_for_a_while()) is not None:
                message = f"weights version {weights.version} cannot be published: {describe_trouble(trouble)}"
                await self._pauses.wait_out(message, trouble.server)
            self._pauses.note_success()
        finally:
            self._num_waiting -= 1

    async def publish_again(self) -> None:
        """Bring back engines that lost the weights, by a restart. An engine that is away again is left alone.

        Raises:
            ActivityError: an engine refused them.
        """
        if self._newest is None:
            return
        async with self._lock:
            try:
                await self._calls.publish(self._newest)
                self._num_published += 1
            except ActivityError as error:
                cause = self._find_cause(error)
                # Its next failure tells, or the next step's publish does.
                workflow.logger.warning("weights could not be published again: %s", cause)

    async def _try_for_a_while(self) -> ServerTrouble | None:
        """None when it is done; the trouble when an engine did not answer for `dead_seconds`.

        Once is enough after a pause that ended because the engine answered its probe.
        """
        dead_seconds = self._spec.rollout.abort_budget.dead_seconds
        trouble: ServerTrouble | None = None
        while True:
            try:
                async with self._lock:
                    if self._newest is not None:
                        await self._calls.publish(self._newest, self._first)
                self._first = False
                return None
            except ActivityError as error:
                trouble = _count(trouble, self._find_cause(error), workflow.time())
            workflow.logger.warning("an engine did not take the weights: %s", trouble.cause)
            if self._pauses.relapsed or trouble.last_at - trouble.first_at >= dead_seconds:
                return trouble
            await self._wait(policies.publish_backoff_seconds(trouble.count, dead_seconds))

    async def _wait(self, seconds: float) -> None:
        """Until the next try; not for so long if the engine was found to be back, and has the weights."""
        before = self._num_published
        with contextlib.suppress(TimeoutError):
            await workflow.wait_condition(lambda: self._num_published > before, timeout=seconds)

    def _find_cause(self, error: ActivityError) -> Cause:
        """What kept an engine from answering; anything that cannot heal, and cancellation, is raised."""
        if is_cancelled_exception(error):
            raise asyncio.CancelledError from error
        root = error.cause
        if isinstance(root, TemporalTimeoutError):
            # The last heartbeat names the engine that was being updated.
            text = f"{root}; {' '.join(map(str, root.last_heartbeat_details))}"
            return Cause(kind=CauseKind.TIMEOUT, error="TimeoutError", message=text, server=self._find_engine(text))
        if not isinstance(root, ApplicationError) or root.type not in set(CauseKind):
            raise error
        cause = Cause.model_validate(root.details[0]) if root.details else Cause(kind=CauseKind(root.type))
        return cause.model_copy(update={"server": self._find_engine(cause.server or root.message)})

    def _find_engine(self, text: str) -> str | None:
        """The engine whose URL stands in a text; the only one there is, if none does."""
        urls = sorted(self._spec.services.engine_urls, key=len, reverse=True)
        return next((url for url in urls if url.rstrip("/") in text), urls[0] if len(urls) == 1 else None)


def _count(known: ServerTrouble | None, cause: Cause, now: float) -> ServerTrouble:
    first_at = known.first_at if known else now
    return ServerTrouble(
        server=cause.server, cause=cause, count=known.count + 1 if known else 1, first_at=first_at, last_at=now
    )
