"""How a group tells its run about aborts, as they happen and not only when it is settled."""

from __future__ import annotations

import asyncio

from temporalio import workflow
from temporalio.exceptions import FailureError

with workflow.unsafe.imports_passed_through():
    from everroll.contracts import names
    from everroll.contracts.health import AbortSummary, EpisodesReport
    from everroll.contracts.outcomes import Cause, SampleStatus
    from everroll.contracts.rollout import EpisodeOutcome


class GroupReporter:
    """Gathers outcomes; sends a signal when there are aborts, at most one at a time, and a last one at the end."""

    def __init__(self, run_workflow_id: str, group: int) -> None:
        self._run_workflow_id = run_workflow_id
        self._group = group
        self._num_collected = 0
        self._failed: dict[str, int] = {}
        self._aborts: dict[tuple[str | None, str], AbortSummary] = {}
        self._sending: asyncio.Task[None] | None = None
        self.run_is_gone = False
        """True once a report found no run: it was terminated, and nobody will train what its groups play."""

    def note(self, outcome: EpisodeOutcome) -> None:
        """Count an episode; an abort is reported at once, together with what came in meanwhile."""
        if outcome.status is not SampleStatus.ABORTED or outcome.cause is None:
            self._num_collected += 1
            if outcome.cause is not None:
                kind = outcome.cause.kind.value
                self._failed[kind] = self._failed.get(kind, 0) + 1
            return
        self._add_abort(outcome.cause, workflow.time())
        if self._sending is None or self._sending.done():
            self._sending = asyncio.create_task(self._send_while_aborts())

    def take(self) -> EpisodesReport:
        """What was not reported yet."""
        report = EpisodesReport(
            group=self._group,
            num_collected=self._num_collected,
            failed=self._failed,
            aborts=list(self._aborts.values()),
        )
        self._num_collected, self._failed, self._aborts = 0, {}, {}
        return report

    async def flush(self) -> None:
        """Send everything that was not reported yet, before the group continues as new."""
        await self.finish()
        if self._num_collected or self._failed or self._aborts:
            await self._send()

    async def finish(self) -> None:
        """Wait until what is under way has been sent."""
        if self._sending is not None:
            await self._sending

    def _add_abort(self, cause: Cause, now: float) -> None:
        key = (cause.server, cause.kind.value)
        known = self._aborts.get(key)
        self._aborts[key] = AbortSummary(
            cause=cause,
            count=known.count + 1 if known else 1,
            first_at=known.first_at if known else now,
            last_at=now,
        )

    async def _send_while_aborts(self) -> None:
        while self._aborts:
            await self._send()

    async def _send(self) -> None:
        run = workflow.get_external_workflow_handle(self._run_workflow_id)
        try:
            await run.signal(names.SIGNAL_REPORT, self.take())
        except FailureError as error:
            self.run_is_gone = True
            workflow.logger.warning("group %d could not report to its run: %s", self._group, error)
