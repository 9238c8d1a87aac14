"""`TrainingRun`: rollout, train, publish, again and again.

One mechanism serves all modes. Groups are admitted while those in flight, ready and in training number fewer than
(max_staleness + 1) x batch, so with `max_staleness = 0` the next ones start when the new weights are out, and with
S > 0 they run while the trainer works. A batch is the lowest-numbered ready groups, in order.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
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
    from everroll.contracts.evaluation import EvaluateRequest, EvaluateResult
    from everroll.contracts.health import EpisodesReport, Pause, Survey
    from everroll.contracts.outcomes import Cause, CauseKind, ErrorType
    from everroll.contracts.rollout import GroupRequest, GroupResult
    from everroll.contracts.spec import RunSpec
    from everroll.contracts.steering import SetRequest, SkipRequest, SteeringRecord, SteerRequest
    from everroll.contracts.training import (
        Phase,
        RunState,
        RunStatus,
        TrainingRunRequest,
        TrainingRunResult,
        Weights,
    )
    from workflows import policies
    from workflows.calls import RunCalls
    from workflows.curriculum import Curriculum
    from workflows.early_end import EarlyEnd
    from workflows.engine_watch import EngineWatch
    from workflows.evaluations import Evaluations
    from workflows.ledger import Ledger
    from workflows.metrics import RunMetrics
    from workflows.pausing import PauseControl
    from workflows.presentation import build_search_attributes, render_details, update_search_attributes
    from workflows.publishing import Publisher
    from workflows.recording import Recorder
    from workflows.steering import Steering, build_skip_cause
    from workflows.versions import continue_on_newest_version, is_newer_version_out
    from workflows.watchdog import Watchdog


_STEERINGS_SHOWN = 10


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
        self.phase_since: float | None = None
        self.calls = RunCalls(self.spec)
        self.recorder = Recorder(self.state, self.calls, lambda: self.spec)
        self.steering = Steering(self.state)
        self.begun = False
        """Updates and signals can come in before `run` does."""
        self.restoring = request.resume is not None or request.fork is not None
        self.curriculum = Curriculum(self.spec, self.state)
        self.pauses = PauseControl(self.spec, self.state, self._republish, self._on_pause_change)
        self.publisher = Publisher(self.spec, self.calls, self.pauses, self.state.weights)
        self.watchdog = Watchdog(self.state.watch, self._take_survey, self._show)
        self.engine_watch = EngineWatch(
            self.calls,
            get_version=lambda: self.ledger.weight_version,
            spawn=self._follow,
            publish_again=self._republish,
        )
        self.evaluations = Evaluations(
            self.state,
            get_spec=lambda: self.spec,
            follow=self._follow,
            get_hold=lambda: self.pauses.hold,
            on_change=self._show,
        )
        self.early_end = EarlyEnd(self.spec, self.ledger, lambda: self.pauses.paused, self._follow)
        self.group_failure: BaseException | None = None
        self.followers: dict[asyncio.Task[None], None] = {}  # ordered, so that replays cancel in the same order
        self.reattached: list[int] = []
        """Groups of an earlier generation, which only an external handle reaches."""
        self.starting: set[int] = set()
        """Groups whose start the server has not confirmed."""
        self.closing = False
        self.evicted = False
        """Whether the workflow left its worker's cache: this is then no end of the run."""

    @workflow.run
    async def run(self, request: TrainingRunRequest) -> TrainingRunResult:
        try:
            self._follow(self.watchdog.watch())
            self.pauses.restore()
            self._reattach_groups()
            self.begun = True
            if self.state.num_resumes:
                self.ledger.use(self.spec)  # the bounds hold at once
            self.evaluations.reattach()
            await self._prepare(request)
            self.evaluations.start_due()
            while not self._is_finished():
                if self.spec.run.mode != "train":
                    self.engine_watch.begin()
                await self._take_step()
                self.evaluations.start_due(last=self._is_finished())
                if self._is_finished():
                    await self._finish_evaluations()
                if (self._is_history_long() or is_newer_version_out()) and not self._is_finished():
                    await self._continue_as_new()
            await self._finish_evaluations()
            await self._settle_surplus()
        except asyncio.CancelledError:
            self._note_cancel()
            raise
        except FailureError as error:
            # A cancellation that met an activity arrives as the activity's failure.
            if is_cancelled_exception(error):
                self._note_cancel()
            else:
                self._enter(Phase.FAILED)
            raise_root(error)
        except Exception:
            self._enter(Phase.FAILED)
            raise
        except GeneratorExit:
            self.evicted = True
            raise
        finally:
            if not self.evicted:
                await self._cancel_groups()
                await self._record_the_rest()
        if self.spec.run.mode != "train":
            await self.calls.end_sessions()
        result = self._build_result()
        self._enter(Phase.STOPPED if result.stopped else Phase.COMPLETED)
        return result

    def _note_cancel(self) -> None:
        """Whoever cancels says who and why in the cancellation's reason."""
        reason = "".join(letter for letter in workflow.cancellation_reason() or "" if letter.isprintable())[:300]
        self.steering.note("cancel", SteerRequest(reason=reason))
        self._enter(Phase.CANCELED)

    def _is_finished(self) -> bool:
        if self.fatal is not None:
            raise self.fatal
        return self.state.stop_requested or self.state.step >= self.spec.run.num_steps

    # The algorithm

    async def _prepare(self, request: TrainingRunRequest) -> None:
        if self.state.weights is not None:
            return
        self._enter(Phase.PREPARING)
        self.state.dataset = (await self.calls.prepare_run(request)).dataset
        self.watchdog.note_progress()
        weights = await self.calls.prepare_trainer()
        self.watchdog.note_progress()
        if self.restoring and self.spec.run.mode == "rollout":
            self._refuse_start(
                f"run {self.spec.run.name} only played, and is not resumed: start another; what it stored stays of use"
            )
        if self.restoring:
            await self._restore(request, weights)
        if self.spec.run.mode == "train" and weights.version == 0:
            await self.calls.read_batch(self.spec.run.num_steps)  # all that it will need is there
            self.state.weights = weights
            return
        if weights.version > 0:
            self._refuse_start(
                f"{self.spec.run.output_dir}/{self.spec.run.name} holds an earlier run of this name, at step "
                f"{weights.version}; go on with it by `everroll resume`, or choose another run.name"
            )
        await self.publisher.publish(weights)
        self.watchdog.note_progress()
        self.state.weights = weights

    def _refuse_start(self, text: str) -> NoReturn:
        raise ApplicationError(text, type=ErrorType.CONFIGURATION.value, non_retryable=True)

    async def _restore(self, request: TrainingRunRequest, weights: Weights) -> NoReturn:
        """Go on as a new execution from the state that lies in the run directory.

        The trainer has been prepared before: no step that an earlier execution asked for is under way any more.
        """
        # With a new run file, groups of the old one would go on by the old one.
        end_groups = request.fork is not None or (request.resume is not None and request.resume.from_file)
        restored = await self.calls.restore_run(weights.version, end_groups)
        self.watchdog.note_progress()
        if restored.spec.run.mode == "train":
            await RunCalls(restored.spec).read_batch(restored.spec.run.num_steps)
        else:
            await self.publisher.publish(weights)
        # What came in meanwhile from groups that are still under way, and from people.
        kept = {"weights": weights, "stop_requested": self.state.stop_requested, "budget": self.state.budget}
        await self._continue_as_new(restored.spec, restored.state.model_copy(update=kept))

    async def _train_stored(self) -> None:
        """A step of a run that plays nothing: the batch of the same number that another run has stored."""
        limit = timedelta(seconds=self.spec.rollout.abort_budget.max_pause_seconds) + policies.PAUSE_GRACE
        await workflow.wait_condition(lambda: not self.pauses.paused or self.fatal is not None, timeout=limit)
        if self.fatal is not None:
            raise self.fatal
        self._enter(Phase.TRAINING)
        stored = await self.calls.read_batch(self.state.step + 1)
        batch, started = stored.build_results(), workflow.time()
        trained = await self.calls.train(self.state.step + 1, batch, None, stored)
        self.watchdog.note_progress()
        self.metrics.count_trained(len(batch))
        seconds = workflow.time() - started
        self.ledger.finish_step(batch, trained, rollout_seconds=0.0, train_seconds=seconds, publish_seconds=0.0)
        self._record_soon()

    async def _take_step(self) -> None:
        if self.spec.run.mode == "train":
            await self._train_stored()
            return
        self._enter(Phase.ROLLOUT)
        started = self.state.rollout_started_at or workflow.time()
        self.state.rollout_started_at = started
        self._admit_groups()
        watch = self.early_end.watch_step()
        await self._wait_for_batch()
        if watch is not None:
            watch.cancel()
        self.early_end.end_stragglers()
        batch = self.ledger.take_batch()
        mark = self.ledger.take_mark()
        self.state.rollout_started_at = None
        gathered = workflow.time()
        self._enter(Phase.TRAINING)
        self._admit_groups()
        trained = await self.calls.train(self.state.step + 1, batch, mark)
        self.watchdog.note_progress()
        applied = workflow.time()
        await self.evaluations.before_publish()
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
        self._record_soon()

    def _record_soon(self) -> None:
        if self.recorder.is_due:
            self._follow(self._record())

    async def _record(self) -> None:
        try:
            await self.recorder.flush()
        except ActivityError as error:
            self._fail(error)

    async def _record_the_rest(self) -> None:
        """At the end, whatever it is: what the run knows and its directory does not."""
        try:
            await self.recorder.flush()
        except ActivityError as error:
            workflow.logger.warning("the run directory lacks the latest records: %s", error.cause)
        with contextlib.suppress(TimeoutError):
            await workflow.wait_condition(workflow.all_handlers_finished, timeout=policies.LIGHT_START_TO_CLOSE)

    async def _settle_surplus(self) -> None:
        """All steps are taken: what was started in excess of them is settled too, so that no prompt is left open."""
        if self.state.step < self.spec.run.num_steps:
            return  # stopped: the run may be resumed
        self.ledger.drop_surplus()
        self.early_end.end_groups(sorted(self.state.in_flight), CauseKind.SURPLUS, "the run completed without it")
        with contextlib.suppress(TimeoutError):
            await workflow.wait_condition(
                lambda: not self.state.in_flight or self.fatal is not None, timeout=self._group_limit()
            )
        self.ledger.drop_surplus()

    async def _finish_evaluations(self) -> None:
        """The run's result waits for what is still being evaluated."""
        if self.state.evaluations_in_flight:
            self._enter(Phase.EVALUATING)
            await self.evaluations.wait_until_done()

    def _on_pause_change(self) -> None:
        if not self.pauses.paused:
            self.watchdog.note_progress()
        self.evaluations.tell_hold()
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
        return workflow.info().is_continue_as_new_suggested()

    async def _take_survey(self) -> Survey | None:
        """What is waited for. It may be weights that an engine lost by a restart: agents that patiently ask their
        session server again tell nobody, so engines are given them once more."""
        survey = await self.calls.take_survey(sorted(self.state.in_flight))
        if self.phase is Phase.ROLLOUT and not self.pauses.paused:
            self._publish_again()
        return survey

    def _admit_groups(self) -> None:
        if not self.begun or self.fatal is not None or self.closing or self.pauses.paused:
            return
        if self.spec.run.mode == "train" or self.state.weights is None:
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
        num_awaits = min(policies.MAX_AWAITS, math.ceil(len(self.reattached) / policies.GROUPS_PER_AWAIT))
        for number in range(num_awaits):
            self._follow(self._await_groups(self.reattached[number::num_awaits]))

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
            self.early_end.note_started(group)
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

    async def _await_groups(self, groups: list[int]) -> None:
        try:
            while groups:
                results = await self.calls.await_groups(groups, self._group_limit())
                ended = {result.group for result in results}
                groups = [group for group in groups if group not in ended]
                for result in results:
                    self._settle(result)
        except Exception as error:
            self._fail(error)

    def _settle(self, result: GroupResult) -> None:
        if self.ledger.is_behind(result):
            self._publish_again()
        skipped = self.state.skipping.pop(result.group, None)
        if skipped is not None:
            result = result.model_copy(update={"manifest": None, "dropped": skipped})
        # A group that was ended from outside could not record it.
        self.ledger.settle(result, recorded=result.dropped is None or result.dropped.kind is not CauseKind.SKIPPED)
        self.early_end.note_settled(result.group)
        self._record_soon()
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
        handles = map(workflow.get_external_workflow_handle, self.evaluations.list_orphans())
        await asyncio.gather(
            *self.followers,
            *map(self._cancel_group, orphans),
            *(handle.cancel() for handle in handles),
            return_exceptions=True,
        )

    async def _cancel_group(self, group: int) -> None:
        handle = workflow.get_external_workflow_handle(names.group_workflow_id(self.spec.run.name, group))
        await handle.cancel()

    async def _continue_as_new(self, spec: RunSpec | None = None, state: RunState | None = None) -> NoReturn:
        """Carry the whole state on, or begin with another. Groups in flight go on by themselves and are re-attached."""
        self.closing = True
        await workflow.wait_condition(self._can_close)
        self.followers.clear()
        self.reattached.clear()
        self.state.generation += 1
        continue_on_newest_version(TrainingRunRequest(spec=spec or self.spec, state=state or self.state))

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
            run_dir=self.calls.run_dir,
            first_attempt=self.ledger.find_first_attempt(group),
        )

    def _group_limit(self) -> timedelta:
        return policies.group_limit(self.spec.rollout)

    def _can_close(self) -> bool:
        if self.evaluations.starting:
            return False
        idle = not (self.starting or self.publisher.busy or self.curriculum.planning or self.early_end.busy)
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
            phase_since=self._shown_since(),
            num_resumes=state.num_resumes,
            steerings=state.steerings[-_STEERINGS_SHOWN:],
            evaluations=state.evaluations,
            evaluations_in_flight=list(state.evaluations_in_flight.values()),
        )

    def _shown_since(self) -> float | None:
        """The step's rollout goes on through continue-as-new, and a pause has a beginning of its own."""
        if self._shown_phase() is Phase.PAUSED and self.state.pause is not None:
            return self.state.pause.since
        return self.state.rollout_started_at if self.phase is Phase.ROLLOUT else self.phase_since

    def _shown_phase(self) -> Phase:
        """Paused is what holds the run up: what is under way when a pause begins ends first."""
        held_up = self.pauses.blocking or (self.pauses.paused and self.phase is Phase.ROLLOUT)
        return Phase.PAUSED if held_up else self.phase

    @workflow.signal(name=names.SIGNAL_REPORT, description="A group reports aborted episodes")
    def report_episodes(self, report: EpisodesReport) -> None:
        self._take_report(report)
        self._show()

    @workflow.update(name=names.UPDATE_PAUSE, description="Start no new group and no new episode")
    async def pause(self, request: SteerRequest) -> None:
        by, reason = f" by {request.by}" if request.by else "", f": {request.reason}" if request.reason else ""
        self.steering.note("pause", request)
        self.pauses.begin(Pause(message=f"paused by request{by}{reason}", since=workflow.time(), requested=True))
        await self._keep_steering()

    @pause.validator
    def _validate_pause(self, request: SteerRequest) -> None:
        self._refuse_while_restoring()
        if self.state.pause is not None:
            raise ValueError(f"the run is paused already: {self.state.pause.message}")

    @workflow.update(name=names.UPDATE_RESUME, description="Go on")
    async def resume(self, request: SteerRequest) -> None:
        self.steering.note("resume", request)
        self.pauses.end()
        await self._keep_steering()

    @resume.validator
    def _validate_resume(self, request: SteerRequest) -> None:
        self._refuse_while_restoring()
        if self.state.pause is None:
            raise ValueError("the run is running and not paused")

    @workflow.signal(name=names.SIGNAL_STOP, description="Stop after the step the run is in")
    def stop_by_signal(self) -> None:
        self.state.stop_requested = True

    @workflow.update(name=names.UPDATE_STOP, description="Stop after the step the run is in")
    async def stop(self, request: SteerRequest) -> None:
        self.steering.note("stop", request)
        self.state.stop_requested = True
        await self._keep_steering()

    @stop.validator
    def _validate_stop(self, request: SteerRequest) -> None:
        self._refuse_while_restoring()
        if self.state.stop_requested:
            raise ValueError(f"the run stops after step {self.state.step + 1} already")

    @workflow.update(name=names.UPDATE_SET, description="Change settings of the run, such as train.learning_rate")
    async def set_values(self, request: SetRequest) -> SteeringRecord:
        spec, changes = self.steering.plan_changes(self.spec, request)
        record = self.steering.note("set", request, changes=changes)
        self.spec = spec
        self.calls.use(spec)
        self.ledger.use(spec)
        self._admit_groups()
        await self._keep_steering()
        return record

    @set_values.validator
    def _validate_set(self, request: SetRequest) -> None:
        self._refuse_while_restoring()
        self.steering.plan_changes(self.spec, request)

    @workflow.update(name=names.UPDATE_SKIP, description="Drop a group that is not being trained yet")
    async def skip(self, request: SkipRequest) -> None:
        self.steering.note("skip", request, group=request.group)
        cause = build_skip_cause(request)
        if request.group in self.state.in_flight:
            self.state.skipping[request.group] = cause
            self._follow(self._end_group(request.group))
        else:
            self.ledger.drop_ready(request.group, cause)
            self._admit_groups()
        await self._keep_steering()

    @skip.validator
    def _validate_skip(self, request: SkipRequest) -> None:
        self._refuse_while_restoring()
        self.steering.check_skip(request)

    @workflow.update(name=names.UPDATE_EVALUATE, description="Evaluate the weights that are out now")
    async def evaluate(self, request: EvaluateRequest) -> EvaluateResult:
        workflow_ids = self.evaluations.start_requested(request)
        self.steering.note("evaluate", request)
        await self._keep_steering()
        return EvaluateResult(version=self.ledger.weight_version, workflow_ids=workflow_ids)

    @evaluate.validator
    def _validate_evaluate(self, request: EvaluateRequest) -> None:
        self._refuse_while_restoring()
        fault = "the run is about to end" if self.closing else self.evaluations.find_fault(request)
        if fault is not None:
            raise ValueError(fault)

    async def _end_group(self, group: int) -> None:
        try:
            await workflow.wait_condition(lambda: group not in self.starting, timeout=policies.LIGHT_START_TO_CLOSE)
            await self._cancel_group(group)
        except FailureError as error:
            workflow.logger.info("group %d ended before it was cancelled: %s", group, error)
        except TimeoutError:
            workflow.logger.warning("group %d did not start in time to be cancelled", group)

    async def _keep_steering(self) -> None:
        """Answer only when it is on disk."""
        self._show()
        await self.recorder.flush()

    def _refuse_while_restoring(self) -> None:
        if self.restoring:
            raise ValueError("the run is being resumed; try again in a moment")

    def _enter(self, phase: Phase) -> None:
        if phase is not self.phase or self.phase_since is None:
            self.phase_since = workflow.time()
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
            evaluations=self.state.evaluations,
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
