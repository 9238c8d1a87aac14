"""The groups of a run: admitted within its bounds, played as child workflows, settled exactly once."""

from __future__ import annotations

import math
from collections.abc import Callable

from temporalio import workflow
from temporalio.exceptions import CancelledError, ChildWorkflowError, FailureError, TerminatedError
from temporalio.workflow import ChildWorkflowCancellationType, ChildWorkflowHandle, ParentClosePolicy

with workflow.unsafe.imports_passed_through():
    from everroll.contracts import names
    from everroll.contracts.health import EpisodesReport
    from everroll.contracts.outcomes import Cause, CauseKind
    from everroll.contracts.rollout import GroupRequest, GroupResult
    from workflows import policies
    from workflows.curriculum import Curriculum
    from workflows.early_end import EarlyEnd
    from workflows.pausing import PauseControl
    from workflows.presentation import build_search_attributes
    from workflows.run_core import RunCore
    from workflows.watchdog import Watchdog


class RunGroups:
    """Starts, follows and settles them; the ledger keeps the accounts."""

    def __init__(
        self,
        core: RunCore,
        pauses: PauseControl,
        watchdog: Watchdog,
        *,
        on_settled: Callable[[], None],
        on_lost_weights: Callable[[], None],
    ) -> None:
        self._core = core
        self._pauses = pauses
        self._watchdog = watchdog
        self._on_settled = on_settled
        self._on_lost_weights = on_lost_weights
        self._curriculum = Curriculum(core.spec, core.state)
        self.early_end = EarlyEnd(core.spec, core.ledger, lambda: pauses.paused, core.follow)
        self._begun = False
        """Updates and signals can come in before the run begins."""
        self._reattached: list[int] = []
        """Groups of an earlier generation, which only an external handle reaches."""
        self._starting: set[int] = set()
        """Groups whose start the server has not confirmed."""

    @property
    def busy(self) -> bool:
        """Whether something is under way that would be lost if the run continued as new now."""
        return bool(self._starting) or self._curriculum.planning or self.early_end.busy

    def begin(self) -> None:
        """Groups that were in flight when the run continued as new still are."""
        self._reattached = sorted(self._core.state.in_flight)
        num_awaits = min(policies.MAX_AWAITS, math.ceil(len(self._reattached) / policies.GROUPS_PER_AWAIT))
        for number in range(num_awaits):
            self._core.follow(self._await(self._reattached[number::num_awaits]))
        # The server drops a cancellation whose sender has closed: one of just then may not have arrived.
        for group in sorted(self._core.state.skipping):
            self._core.follow(self._end(group))
        self._begun = True

    def admit(self) -> None:
        """Start as many as may be in flight."""
        core = self._core
        if not self._begun or core.fatal is not None or core.closing or self._pauses.paused:
            return
        if core.spec.run.mode == "train" or core.state.weights is None:
            return
        while core.ledger.can_admit(core.state.stop_requested):
            if len(self._starting) >= self._find_most_starting():
                return  # `_play` goes on when one has started
            if not self._curriculum.covers_next_group:
                self._plan_block()
                return
            group = core.ledger.admit()
            self._starting.add(group)
            core.follow(self._play(group))

    def skip(self, group: int, cause: Cause) -> None:
        """Drop a group because a person says so."""
        if group in self._core.state.in_flight:
            self._core.state.skipping[group] = cause
            self._core.follow(self._end(group))
        else:
            self._core.ledger.drop_ready(group, cause)
            self.admit()

    def take_report(self, report: EpisodesReport) -> None:
        """How episodes ended, as a group tells it."""
        self._core.ledger.note_report(report)
        self._core.metrics.count_report(report)
        self._pauses.take(report)
        if any(abort.cause.kind is CauseKind.ENGINE for abort in report.aborts):
            self._on_lost_weights()

    def list_orphans(self) -> list[str]:
        """Workflows in flight that only an external handle reaches; the tasks that wait for the others cancel them."""
        flying = self._core.state.in_flight
        return [self._find_workflow_id(group) for group in self._reattached if group in flying]

    def forget_reattached(self) -> None:
        """The next generation of the run attaches to them."""
        self._reattached.clear()

    def _find_most_starting(self) -> int:
        """Runs that were begun before there was a lower bound go on by the old one."""
        few = workflow.patched(policies.FEW_STARTING_GROUPS)
        return policies.MAX_STARTING_GROUPS if few else policies.MAX_STARTING_GROUPS_ONCE

    def _plan_block(self) -> None:
        if not self._curriculum.planning:
            self._curriculum.planning = True
            self._core.follow(self._admit_when_planned())

    async def _admit_when_planned(self) -> None:
        try:
            await self._curriculum.plan()
            self.admit()
        except Exception as error:
            self._core.fail(error)

    async def _play(self, group: int) -> None:
        try:
            hold = self._pauses.hold
            child = await self._start(group)
            self._starting.discard(group)
            self.early_end.note_started(group)
            self.admit()
            if self._pauses.hold != hold:
                self._pauses.tell_group(group)
            self._settle(await child)
        except ChildWorkflowError as error:
            self._settle_failure(group, error)
        except Exception as error:
            self._core.fail(error)

    async def _start(self, group: int) -> ChildWorkflowHandle[object, GroupResult]:
        core = self._core
        return await workflow.start_child_workflow(
            names.ROLLOUT_GROUP,
            self._build_request(group),
            id=self._find_workflow_id(group),
            result_type=GroupResult,
            task_queue=core.spec.services.task_queue,
            # Abandoned, so that continue-as-new leaves groups in flight; the run ends them otherwise.
            parent_close_policy=ParentClosePolicy.ABANDON,
            # The server drops a cancellation whose sender has closed, so the run waits until it is delivered.
            cancellation_type=ChildWorkflowCancellationType.WAIT_CANCELLATION_REQUESTED,
            search_attributes=build_search_attributes(core.spec.run.name, core.state.step),
            static_summary=f"group {group}, weights {core.ledger.weight_version}",
        )

    async def _await(self, groups: list[int]) -> None:
        try:
            while groups:
                results = await self._core.calls.await_groups(groups, policies.group_limit(self._core.spec.rollout))
                ended = {result.group for result in results}
                groups = [group for group in groups if group not in ended]
                for result in results:
                    self._settle(result)
        except Exception as error:
            self._core.fail(error)

    def _settle(self, result: GroupResult) -> None:
        core = self._core
        if core.ledger.is_behind(result):
            self._on_lost_weights()
        skipped = core.state.skipping.pop(result.group, None)
        if skipped is not None:
            result = result.model_copy(update={"manifest": None, "dropped": skipped})
        # A group that was ended from outside could not record it.
        core.ledger.settle(result, recorded=result.dropped is None or result.dropped.kind is not CauseKind.SKIPPED)
        self.early_end.note_settled(result.group)
        core.record_soon()
        core.metrics.count_group(result)
        self._watchdog.note_progress()
        if result.report is not None:
            self.take_report(result.report)
        self.admit()
        self._on_settled()

    def _settle_failure(self, group: int, error: ChildWorkflowError) -> None:
        """A group that a person ended is dropped; one that failed fails the run."""
        if self._core.closing:
            return
        if isinstance(error.cause, (CancelledError, TerminatedError)):
            cause = Cause(kind=CauseKind.SKIPPED, error=type(error.cause).__name__, message=f"group {group} was ended")
            self._settle(GroupResult(group=group, dropped=cause))
        else:
            self._core.fail(error)

    async def _end(self, group: int) -> None:
        try:
            await workflow.wait_condition(lambda: group not in self._starting, timeout=policies.LIGHT_START_TO_CLOSE)
            await workflow.get_external_workflow_handle(self._find_workflow_id(group)).cancel()
        except FailureError as error:
            workflow.logger.info("group %d ended before it was cancelled: %s", group, error)
        except TimeoutError:
            workflow.logger.warning("group %d did not start in time to be cancelled", group)

    def _find_workflow_id(self, group: int) -> str:
        return names.group_workflow_id(self._core.spec.run.name, group)

    def _build_request(self, group: int) -> GroupRequest:
        spec, ledger = self._core.spec, self._core.ledger
        if self._core.state.dataset is None:
            raise RuntimeError("groups are admitted only after the run was prepared")
        return GroupRequest(
            run=spec.run.name,
            group=group,
            weight_version=ledger.weight_version,
            dataset=self._core.state.dataset,
            rollout=spec.rollout,
            seed=spec.run.seed,
            session_url=spec.services.session_url,
            store_url=spec.services.store_url,
            task_queue=spec.services.task_queue,
            hold=self._pauses.hold,
            prompt_index=self._curriculum.find_prompt(group),
            run_dir=self._core.calls.run_dir,
            first_attempt=ledger.find_first_attempt(group),
        )
