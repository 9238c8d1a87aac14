"""`TrainingRun`: rollout, train, publish, again and again.

One mechanism serves all modes. Groups are admitted while those in flight, ready and in training number fewer than
(max_staleness + 1) x batch, so with `max_staleness = 0` the next ones start when the new weights are out, and with
S > 0 they run while the trainer works. A batch is the lowest-numbered ready groups, in order.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine
from datetime import timedelta
from typing import Any, NoReturn

from temporalio import workflow
from temporalio.exceptions import (
    ActivityError,
    ApplicationError,
    CancelledError,
    ChildWorkflowError,
    FailureError,
    TerminatedError,
    is_cancelled_exception,
)
from temporalio.workflow import ChildWorkflowCancellationType, ChildWorkflowHandle, ParentClosePolicy

with workflow.unsafe.imports_passed_through():
    from everroll.contracts import names
    from everroll.contracts.health import EpisodesReport, Pause, Survey
    from everroll.contracts.outcomes import Cause, CauseKind, ErrorType
    from everroll.contracts.rollout import AwaitGroupRequest, GroupRequest, GroupResult
    from everroll.contracts.steering import SteerRequest
    from everroll.contracts.training import (
        Phase,
        RunState,
        RunStatus,
        TrainingRunRequest,
        TrainingRunResult,
    )
    from workflows import policies
    from workflows.calls import RunCalls
    from workflows.curriculum import Curriculum
    from workflows.ledger import Ledger
    from workflows.metrics import RunMetrics
    from workflows.pausing import PauseControl
    from workflows.presentation import build_search_attributes, render_details, update_search_attributes
    from workflows.publishing import Publisher
    from workflows.watchdog import Watchdog


@workflow.defn(name=names.TRAINING_RUN, failure_exception_types=policies.FAILURE_EXCEPTION_TYPES)
class TrainingRun:
    """One training job."""

    @workflow.init
    def __init__(self, request: TrainingRunRequest) -> None:
        self.spec = request.spec
        self.state = request.state or RunState()
        self.metrics = RunMetrics(self.spec.run.name)
        self.ledger = Ledger(self.spec, self.state, self.metrics.count_drop)
        self.phase = Phase.PREPARING
        self.calls = RunCalls(self.spec)
        self.curriculum = Curriculum(self.spec, self.state)
        self.pauses = PauseControl(self.spec, self.state, self._republish, self._on_pause_change)
        self.publisher = Publisher(self.spec, self.calls, self.pauses, self.state.weights)
        self.watchdog = Watchdog(self.state.watch, self._take_survey, self._show)
        self.group_failure: BaseException | None = None
        self.followers: dict[asyncio.Task[None], None] = {}  # ordered, so that replays cancel in the same order
        self.reattached: list[int] = []
        """Groups of an earlier generation, which only an external handle reaches."""
        self.starting: set[int] = set()
        """Groups whose start the server has not confirmed."""
        self.closing = False

    @workflow.run
    async def run(self, request: TrainingRunRequest) -> TrainingRunResult:
        try:
            self._follow(self.watchdog.watch())
            self.pauses.restore()
            self._reattach_groups()
            await self._prepare()
            while not self._is_finished():
                await self._take_step()
                if self._is_history_long() and not self._is_finished():
                    await self._continue_as_new()
        except asyncio.CancelledError:
            self._enter(Phase.CANCELED)
            raise
        except FailureError as error:
            # A cancellation that met an activity arrives as the activity's failure.
            self._enter(Phase.CANCELED if is_cancelled_exception(error) else Phase.FAILED)
            raise_root(error)
        except Exception:
            self._enter(Phase.FAILED)
            raise
        finally:
            await self._cancel_groups()
        result = self._build_result()
        self._enter(Phase.STOPPED if result.stopped else Phase.COMPLETED)
        return result

    def _is_finished(self) -> bool:
        if self.fatal is not None:
            raise self.fatal
        return self.state.stop_requested or self.state.step >= self.spec.run.num_steps

    # The algorithm

    async def _prepare(self) -> None:
        if self.state.weights is not None:
            return
        self._enter(Phase.PREPARING)
        self.state.dataset = (await self.calls.prepare_run()).dataset
        self.watchdog.note_progress()
        weights = await self.calls.prepare_trainer()
        self.watchdog.note_progress()
        if weights.version > 0:
            raise ApplicationError(
                f"{self.spec.run.output_dir}/{self.spec.run.name} holds an earlier run of this name, at step "
                f"{weights.version}; choose another run.name, or move that directory away",
                type=ErrorType.CONFIGURATION.value,
                non_retryable=True,
            )
        await self.publisher.publish(weights)
        self.watchdog.note_progress()
        self.state.weights = weights

    async def _take_step(self) -> None:
        self._enter(Phase.ROLLOUT)
        started = self.state.rollout_started_at or workflow.time()
        self.state.rollout_started_at = started
        self._admit_groups()
        await self._wait_for_batch()
        batch = self.ledger.take_batch()
        self.state.rollout_started_at = None
        gathered = workflow.time()
        self._enter(Phase.TRAINING)
        self._admit_groups()
        trained = await self.calls.train(self.state.step + 1, batch)
        self.watchdog.note_progress()
        applied = workflow.time()
        self._enter(Phase.PUBLISHING)
        await self.publisher.publish(trained.weights)
        self.watchdog.note_progress()
        self.metrics.count_trained(len(batch))
        self.ledger.finish_step(
            batch,
            trained,
            rollout_seconds=gathered - started,
            train_seconds=applied - gathered,
            publish_seconds=workflow.time() - applied,
        )

    def _on_pause_change(self) -> None:
        if not self.pauses.paused:
            self.watchdog.note_progress()
        self._admit_groups()
        self._enter(self.phase)

    @property
    def fatal(self) -> BaseException | None:
        """What must end the run."""
        return self.group_failure or self.pauses.fatal or self._find_no_progress()

    def _fail(self, error: BaseException) -> None:
        """End the run, whatever it waits for; the first failure is the one that counts."""
        self.group_failure = self.group_failure or error
        self.pauses.fatal = self.pauses.fatal or error

    def _find_no_progress(self) -> ApplicationError | None:
        text = self.ledger.find_no_progress()
        return ApplicationError(text, type=ErrorType.NO_PROGRESS.value, non_retryable=True) if text else None

    async def _wait_for_batch(self) -> None:
        """Wait until enough groups are ready; a history that grows long meanwhile is continued as new.

        Every group settles within its own deadline, and the watchdog says what is waited for.
        """
        while not self.ledger.has_batch():
            with contextlib.suppress(TimeoutError):
                await workflow.wait_condition(
                    lambda: self.ledger.has_batch() or self.fatal is not None or self._is_history_long(),
                    timeout=self._group_limit(),
                )
            if self.fatal is None and not self.ledger.has_batch() and self._is_history_long():
                await self._continue_as_new()
            if self.fatal is not None:
                raise self.fatal

    def _is_history_long(self) -> bool:
        """Whether to continue as new: when the server says so, and re-attaching groups was not most of it."""
        info = workflow.info()
        enough = policies.EVENTS_PER_REATTACHED_GROUP * len(self.reattached)
        return info.is_continue_as_new_suggested() and info.get_current_history_length() > enough

    async def _take_survey(self) -> Survey | None:
        return await self.calls.take_survey(sorted(self.state.in_flight))

    def _admit_groups(self) -> None:
        if self.fatal is not None or self.closing or self.pauses.paused:
            return
        while self.ledger.can_admit(self.state.stop_requested):
            if len(self.starting) >= policies.MAX_STARTING_GROUPS:
                return  # `_play_group` goes on when one has started
            if not self.curriculum.covers_next_group:
                self._plan_block()
                return
            group = self.ledger.admit()
            self.starting.add(group)
            self._follow(self._play_group(group))

    def _plan_block(self) -> None:
        if not self.curriculum.planning:
            self.curriculum.planning = True
            self._follow(self._admit_when_planned())

    async def _admit_when_planned(self) -> None:
        try:
            await self.curriculum.plan()
            self._admit_groups()
        except Exception as error:
            self._fail(error)

    def _reattach_groups(self) -> None:
        """Groups that were in flight when the run continued as new still are."""
        self.reattached = sorted(self.state.in_flight)
        for group in self.reattached:
            self._follow(self._await_group(group))

    def _follow(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self.followers[task] = None
        task.add_done_callback(lambda done: self.followers.pop(done, None))
        return task

    async def _play_group(self, group: int) -> None:
        try:
            hold = self.pauses.hold
            child = await self._start_group(group)
            self.starting.discard(group)
            self._admit_groups()
            if self.pauses.hold != hold:
                self.pauses.tell_group(group)
            self._settle(await child)
        except ChildWorkflowError as error:
            self._settle_failure(group, error)
        except Exception as error:
            self._fail(error)

    async def _start_group(self, group: int) -> ChildWorkflowHandle[object, GroupResult]:
        return await workflow.start_child_workflow(
            names.ROLLOUT_GROUP,
            self._build_group_request(group),
            id=names.group_workflow_id(self.spec.run.name, group),
            result_type=GroupResult,
            task_queue=self.spec.services.task_queue,
            # Abandoned, so that continue-as-new leaves groups in flight; `_cancel_groups` ends them otherwise.
            parent_close_policy=ParentClosePolicy.ABANDON,
            # The server drops a cancellation whose sender has closed, so the run waits until it is delivered.
            cancellation_type=ChildWorkflowCancellationType.WAIT_CANCELLATION_REQUESTED,
            search_attributes=build_search_attributes(self.spec.run.name, self.state.step),
            static_summary=f"group {group}, weights {self.ledger.weight_version}",
        )

    async def _await_group(self, group: int) -> None:
        try:
            result: GroupResult = await workflow.execute_activity(
                names.AWAIT_GROUP,
                AwaitGroupRequest(workflow_id=names.group_workflow_id(self.spec.run.name, group), group=group),
                result_type=GroupResult,
                task_queue=self.spec.services.task_queue,
                start_to_close_timeout=self._group_limit(),
                schedule_to_close_timeout=self._group_limit(),
                heartbeat_timeout=policies.AWAIT_GROUP_HEARTBEAT,
                retry_policy=policies.RETRY,
                summary=f"re-attached to group {group}",
            )
            self._settle(result)
        except Exception as error:
            self._fail(error)

    def _settle(self, result: GroupResult) -> None:
        if self.ledger.is_behind(result):
            self._publish_again()
        self.ledger.settle(result)
        self.metrics.count_group(result)
        self.watchdog.note_progress()
        if result.report is not None:
            self._take_report(result.report)
        self._admit_groups()
        self._show()

    def _take_report(self, report: EpisodesReport) -> None:
        self.ledger.note_report(report)
        self.metrics.count_report(report)
        self.pauses.take(report)
        if any(abort.cause.kind is CauseKind.ENGINE for abort in report.aborts):
            self._publish_again()

    def _publish_again(self) -> None:
        """Bring engines that lost the weights, by a restart, back to the version that is out. Idempotent."""
        if not self.publisher.busy:
            self._follow(self._republish())

    async def _republish(self) -> None:
        try:
            await self.publisher.publish_again()
        except ActivityError as error:
            self._fail(error)

    def _settle_failure(self, group: int, error: ChildWorkflowError) -> None:
        """A group that a person ended is dropped; one that failed fails the run."""
        if self.closing:
            return
        if isinstance(error.cause, (CancelledError, TerminatedError)):
            cause = Cause(kind=CauseKind.SKIPPED, error=type(error.cause).__name__, message=f"group {group} was ended")
            self._settle(GroupResult(group=group, dropped=cause))
        else:
            self._fail(error)

    async def _cancel_groups(self) -> None:
        """The run is over: no group goes on without it."""
        self.closing = True
        await self.pauses.close()
        orphans = [group for group in self.reattached if group in self.state.in_flight]
        for task in list(self.followers):
            task.cancel()
        await asyncio.gather(*self.followers, *map(self._cancel_group, orphans), return_exceptions=True)

    async def _cancel_group(self, group: int) -> None:
        handle = workflow.get_external_workflow_handle(names.group_workflow_id(self.spec.run.name, group))
        await handle.cancel()

    async def _continue_as_new(self) -> NoReturn:
        """Carry the whole state on. Groups in flight go on by themselves and are re-attached."""
        self.closing = True
        await workflow.wait_condition(self._can_close)
        self.followers.clear()
        self.reattached.clear()
        self.state.generation += 1
        workflow.continue_as_new(TrainingRunRequest(spec=self.spec, state=self.state))

    def _build_group_request(self, group: int) -> GroupRequest:
        if self.state.dataset is None:
            raise RuntimeError("groups are admitted only after the run was prepared")
        return GroupRequest(
            run=self.spec.run.name,
            group=group,
            weight_version=self.ledger.weight_version,
            dataset=self.state.dataset,
            rollout=self.spec.rollout,
            seed=self.spec.run.seed,
            session_url=self.spec.services.session_url,
            store_url=self.spec.services.store_url,
            task_queue=self.spec.services.task_queue,
            hold=self.pauses.hold,
            prompt_index=self.curriculum.find_prompt(group),
        )

    def _group_limit(self) -> timedelta:
        """Longest life of a group: its deadline, and the longest time on hold."""
        rollout = self.spec.rollout
        return timedelta(seconds=rollout.group_timeout_seconds + rollout.abort_budget.max_pause_seconds)

    def _can_close(self) -> bool:
        idle = not self.starting and not self.publisher.busy and not self.curriculum.planning
        return idle and workflow.all_handlers_finished()

    # What people see and say

    @workflow.query(name=names.QUERY_STATUS, description="Where the run stands")
    def status(self) -> RunStatus:
        state = self.state
        return RunStatus(
            run=self.spec.run.name,
            phase=self._shown_phase(),
            step=state.step,
            num_steps=self.spec.run.num_steps,
            weight_version=self.ledger.weight_version,
            groups_in_flight=sorted(state.in_flight),
            groups_ready=len(state.ready),
            groups_wanted=self.spec.rollout.groups_per_step,
            next_group=state.next_group,
            trained_groups=state.trained_groups,
            dropped_groups=state.dropped_groups,
            unusable_episodes=state.unusable_episodes,
            last_cause=state.last_cause,
            num_episodes=state.num_episodes,
            num_sampled_tokens=state.num_sampled_tokens,
            mean_reward=state.recent_steps[-1].mean_reward if state.recent_steps else None,
            recent_steps=state.recent_steps,
            generation=state.generation,
            stop_requested=state.stop_requested,
            pause=state.pause,
            survey=self.watchdog.survey,
        )

    def _shown_phase(self) -> Phase:
        """Paused is what holds the run up: what is under way when a pause begins ends first."""
        held_up = self.pauses.blocking or (self.pauses.paused and self.phase is Phase.ROLLOUT)
        return Phase.PAUSED if held_up else self.phase

    @workflow.signal(name=names.SIGNAL_REPORT, description="A group reports aborted episodes")
    def report_episodes(self, report: EpisodesReport) -> None:
        self._take_report(report)
        self._show()

    @workflow.update(name=names.UPDATE_PAUSE, description="Start no new group and no new episode")
    def pause(self, request: SteerRequest) -> None:
        reason = f"paused by request{f': {request.reason}' if request.reason else ''}"
        self.pauses.begin(Pause(message=reason, since=workflow.time(), requested=True))
        self._show()

    @pause.validator
    def _validate_pause(self, request: SteerRequest) -> None:
        if self.state.pause is not None:
            raise ValueError(f"the run is paused already: {self.state.pause.message}")

    @workflow.update(name=names.UPDATE_RESUME, description="Go on")
    def resume(self, request: SteerRequest) -> None:
        self.pauses.end()

    @resume.validator
    def _validate_resume(self, request: SteerRequest) -> None:
        if self.state.pause is None:
            raise ValueError("the run is not paused")

    @workflow.signal(name=names.SIGNAL_STOP, description="Stop after the step the run is in")
    def stop(self) -> None:
        self.state.stop_requested = True

    def _enter(self, phase: Phase) -> None:
        self.phase = phase
        status = self.status()
        workflow.upsert_search_attributes(
            update_search_attributes(status.run, status.step, status.phase, status.mean_reward)
        )
        self._show()

    def _show(self) -> None:
        status = self.status()
        self.metrics.show(status)
        workflow.set_current_details(render_details(status))

    def _build_result(self) -> TrainingRunResult:
        return TrainingRunResult(
            run=self.spec.run.name,
            steps=self.state.step,
            weights=self.state.weights,
            trained_groups=self.state.trained_groups,
            dropped_groups=self.state.dropped_groups,
            unusable_episodes=self.state.unusable_episodes,
            stopped=self.state.stop_requested and self.state.step < self.spec.run.num_steps,
        )


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
