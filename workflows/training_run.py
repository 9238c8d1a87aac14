"""`TrainingRun`: rollout, train, publish, again and again.

One mechanism serves all modes. Groups are admitted while those in flight, ready and in training number fewer than
(max_staleness + 1) x batch, so with `max_staleness = 0` the next ones start when the new weights are out, and with
S > 0 they run while the trainer works.

Here are a run's life and what can be asked of it; its parts are `run_steps` (the algorithm), `run_groups`,
`preparation`, `publishing`, `pausing`, `evaluations`, `run_display`, and `run_core`, which they share.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import NoReturn

from temporalio import workflow
from temporalio.exceptions import ActivityError, FailureError, is_cancelled_exception

with workflow.unsafe.imports_passed_through():
    from everroll.contracts import names
    from everroll.contracts.evaluation import EvaluateRequest, EvaluateResult
    from everroll.contracts.health import EpisodesReport, Pause, Survey
    from everroll.contracts.spec import RunSpec
    from everroll.contracts.steering import SetRequest, SkipRequest, SteeringRecord, SteerRequest
    from everroll.contracts.training import Phase, RunState, RunStatus, TrainingRunRequest, TrainingRunResult
    from workflows import policies
    from workflows.engine_watch import EngineWatch
    from workflows.evaluations import Evaluations
    from workflows.pausing import PauseControl
    from workflows.preparation import Preparation
    from workflows.publishing import Publisher
    from workflows.run_core import RunCore, raise_root
    from workflows.run_display import RunDisplay
    from workflows.run_groups import RunGroups
    from workflows.run_steps import RunSteps, is_history_long
    from workflows.steering import Steering, build_skip_cause
    from workflows.versions import continue_on_newest_version, is_newer_version_out
    from workflows.watchdog import Watchdog


@workflow.defn(name=names.TRAINING_RUN, failure_exception_types=policies.FAILURE_EXCEPTION_TYPES)
class TrainingRun:
    """One training job."""

    @workflow.init
    def __init__(self, request: TrainingRunRequest) -> None:
        core = self.core = RunCore(request)
        self.steering = Steering(core.state)
        self.pauses = PauseControl(core, self._republish, self._on_pause_change)
        self.publisher = Publisher(core.spec, core.calls, self.pauses, core.state.weights)
        self.watchdog = Watchdog(core.state.watch, self._take_survey, lambda: self.display.show())
        self.display = RunDisplay(core, self.pauses, self.watchdog)
        self.engine_watch = EngineWatch(
            core.calls,
            get_version=lambda: core.ledger.weight_version,
            spawn=core.follow,
            publish_again=self._republish,
        )
        self.evaluations = Evaluations(
            core.state,
            get_spec=lambda: core.spec,
            follow=core.follow,
            get_hold=lambda: self.pauses.hold,
            on_change=self.display.show,
        )
        self.groups = RunGroups(
            core, self.pauses, self.watchdog, on_settled=self.display.show, on_lost_weights=self._publish_again
        )
        self.preparation = Preparation(core, self.publisher, self.watchdog, request, self._continue_as_new)
        self.steps = RunSteps(
            core,
            self.groups,
            self.publisher,
            self.evaluations,
            self.pauses,
            self.watchdog,
            enter=self.display.enter,
            continue_as_new=self._continue_as_new,
        )
        self.evicted = False
        """Whether the workflow left its worker's cache: this is then no end of the run."""

    @workflow.run
    async def run(self, request: TrainingRunRequest) -> TrainingRunResult:
        try:
            await self._begin()
            while not self._is_finished():
                await self._take_step()
            await self._finish_evaluations()
            await self.steps.settle_surplus()
        except asyncio.CancelledError:
            self._note_cancel()
            raise
        except FailureError as error:
            # A cancellation that met an activity arrives as the activity's failure.
            if is_cancelled_exception(error):
                self._note_cancel()
            else:
                self.display.enter(Phase.FAILED)
            raise_root(error)
        except Exception:
            self.display.enter(Phase.FAILED)
            raise
        except GeneratorExit:
            self.evicted = True
            raise
        finally:
            if not self.evicted:
                await self._end_all()
                await self._record_the_rest()
        if self.core.spec.run.mode != "train":
            await self.core.calls.end_sessions()
        result = self.display.build_result()
        self.display.enter(Phase.STOPPED if result.stopped else Phase.COMPLETED)
        return result

    async def _begin(self) -> None:
        """Take up what goes on from the generation before, and prepare what was not."""
        self.core.follow(self.watchdog.watch())
        self.pauses.restore()
        self.groups.begin()
        if self.core.state.num_resumes:
            self.core.ledger.use(self.core.spec)  # the bounds hold at once
        self.evaluations.reattach()
        if self.core.state.weights is None:
            self.display.enter(Phase.PREPARING)
            await self.preparation.prepare()
        self.evaluations.start_due()

    def _is_finished(self) -> bool:
        self.core.raise_if_fatal()
        return self.core.state.stop_requested or self.core.state.step >= self.core.spec.run.num_steps

    async def _take_step(self) -> None:
        if self.core.spec.run.mode != "train":
            self.engine_watch.begin()
        await self.steps.take()
        self.evaluations.start_due(last=self._is_finished())
        if self._is_finished():
            await self._finish_evaluations()
        if (is_history_long() or is_newer_version_out()) and not self._is_finished():
            await self._continue_as_new()

    async def _finish_evaluations(self) -> None:
        """The run's result waits for what is still being evaluated."""
        if self.core.state.evaluations_in_flight:
            self.display.enter(Phase.EVALUATING)
            await self.evaluations.wait_until_done()

    # What its parts have in common

    def _on_pause_change(self) -> None:
        if not self.pauses.paused:
            self.watchdog.note_progress()
        self.evaluations.tell_hold()
        self.groups.admit()
        self.display.enter(self.display.phase)

    async def _take_survey(self) -> Survey | None:
        """What is waited for. It may be weights that an engine lost by a restart: agents that patiently ask their
        session server again tell nobody, so engines are given them once more."""
        survey = await self.core.calls.take_survey(sorted(self.core.state.in_flight))
        if self.display.phase is Phase.ROLLOUT and not self.pauses.paused:
            self._publish_again()
        return survey

    def _publish_again(self) -> None:
        """Bring engines that lost the weights, by a restart, back to the version that is out. Idempotent."""
        if not self.publisher.busy:
            self.core.follow(self._republish())

    async def _republish(self) -> None:
        try:
            await self.publisher.publish_again()
        except ActivityError as error:
            self.core.fail(error)

    # The end, and the end of a generation

    def _note_cancel(self) -> None:
        """Whoever cancels says who and why in the cancellation's reason."""
        reason = "".join(letter for letter in workflow.cancellation_reason() or "" if letter.isprintable())[:300]
        self.steering.note("cancel", SteerRequest(reason=reason))
        self.display.enter(Phase.CANCELED)

    async def _end_all(self) -> None:
        """The run is over: no group and no evaluation goes on without it."""
        self.core.closing = True
        await self.pauses.close()
        orphans = [*self.groups.list_orphans(), *self.evaluations.list_orphans()]
        for task in list(self.core.tasks):
            task.cancel()
        handles = map(workflow.get_external_workflow_handle, orphans)
        await asyncio.gather(*self.core.tasks, *(handle.cancel() for handle in handles), return_exceptions=True)

    async def _record_the_rest(self) -> None:
        """At the end, whatever it is: what the run knows and its directory does not."""
        try:
            await self.core.recorder.flush()
        except ActivityError as error:
            workflow.logger.warning("the run directory lacks the latest records: %s", error.cause)
        with contextlib.suppress(TimeoutError):
            await workflow.wait_condition(workflow.all_handlers_finished, timeout=policies.LIGHT_START_TO_CLOSE)

    async def _continue_as_new(self, spec: RunSpec | None = None, state: RunState | None = None) -> NoReturn:
        """Carry the whole state on, or begin with another. Groups in flight go on by themselves and are re-attached."""
        core = self.core
        core.closing = True
        await workflow.wait_condition(self._can_close)
        core.tasks.clear()
        self.groups.forget_reattached()
        core.state.generation += 1
        continue_on_newest_version(TrainingRunRequest(spec=spec or core.spec, state=state or core.state))

    def _can_close(self) -> bool:
        busy = self.evaluations.starting or self.groups.busy or self.publisher.busy
        return not busy and workflow.all_handlers_finished()

    # What people see and say

    @workflow.query(name=names.QUERY_STATUS, description="Where the run stands")
    def status(self) -> RunStatus:
        return self.display.build_status()

    @workflow.signal(name=names.SIGNAL_REPORT, description="A group reports aborted episodes")
    def report_episodes(self, report: EpisodesReport) -> None:
        self.groups.take_report(report)
        self.display.show()

    @workflow.update(name=names.UPDATE_PAUSE, description="Start no new group and no new episode")
    async def pause(self, request: SteerRequest) -> None:
        by, reason = f" by {request.by}" if request.by else "", f": {request.reason}" if request.reason else ""
        self.steering.note("pause", request)
        self.pauses.begin(Pause(message=f"paused by request{by}{reason}", since=workflow.time(), requested=True))
        await self._keep_steering()

    @pause.validator
    def _validate_pause(self, request: SteerRequest) -> None:
        self._refuse_while_restoring()
        if self.core.state.pause is not None:
            raise ValueError(f"the run is paused already: {self.core.state.pause.message}")

    @workflow.update(name=names.UPDATE_RESUME, description="Go on")
    async def resume(self, request: SteerRequest) -> None:
        self.steering.note("resume", request)
        self.pauses.end()
        await self._keep_steering()

    @resume.validator
    def _validate_resume(self, request: SteerRequest) -> None:
        self._refuse_while_restoring()
        if self.core.state.pause is None:
            raise ValueError("the run is running and not paused")

    @workflow.signal(name=names.SIGNAL_STOP, description="Stop after the step the run is in")
    def stop_by_signal(self) -> None:
        self.core.state.stop_requested = True

    @workflow.update(name=names.UPDATE_STOP, description="Stop after the step the run is in")
    async def stop(self, request: SteerRequest) -> None:
        self.steering.note("stop", request)
        self.core.state.stop_requested = True
        await self._keep_steering()

    @stop.validator
    def _validate_stop(self, request: SteerRequest) -> None:
        self._refuse_while_restoring()
        if self.core.state.stop_requested:
            raise ValueError(f"the run stops after step {self.core.state.step + 1} already")

    @workflow.update(name=names.UPDATE_SET, description="Change settings of the run, such as train.learning_rate")
    async def set_values(self, request: SetRequest) -> SteeringRecord:
        spec, changes = self.steering.plan_changes(self.core.spec, request)
        record = self.steering.note("set", request, changes=changes)
        self.core.use(spec)
        self.groups.admit()
        await self._keep_steering()
        return record

    @set_values.validator
    def _validate_set(self, request: SetRequest) -> None:
        self._refuse_while_restoring()
        self.steering.plan_changes(self.core.spec, request)

    @workflow.update(name=names.UPDATE_SKIP, description="Drop a group that is not being trained yet")
    async def skip(self, request: SkipRequest) -> None:
        self.steering.note("skip", request, group=request.group)
        self.groups.skip(request.group, build_skip_cause(request))
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
        return EvaluateResult(version=self.core.ledger.weight_version, workflow_ids=workflow_ids)

    @evaluate.validator
    def _validate_evaluate(self, request: EvaluateRequest) -> None:
        self._refuse_while_restoring()
        fault = "the run is about to end" if self.core.closing else self.evaluations.find_fault(request)
        if fault is not None:
            raise ValueError(fault)

    async def _keep_steering(self) -> None:
        """Answer only when it is on disk."""
        self.display.show()
        await self.core.recorder.flush()

    def _refuse_while_restoring(self) -> None:
        if self.preparation.restoring:
            raise ValueError("the run is being resumed; try again in a moment")
