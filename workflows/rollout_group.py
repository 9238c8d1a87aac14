"""`RolloutGroup`: G episodes of one prompt, settled together."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import NoReturn

from temporalio import workflow
from temporalio.exceptions import ActivityError, FailureError, is_cancelled_exception
from temporalio.exceptions import TimeoutError as TemporalTimeoutError
from temporalio.workflow import ActivityCancellationType

with workflow.unsafe.imports_passed_through():
    from everroll.contracts import names
    from everroll.contracts.health import HoldRequest
    from everroll.contracts.outcomes import Cause, CauseKind, SampleStatus
    from everroll.contracts.rollout import (
        BlobRef,
        CollectRequest,
        CollectResult,
        EndGroupRequest,
        EpisodeKey,
        EpisodeOutcome,
        EpisodeReport,
        EpisodeRequest,
        GroupProgress,
        GroupRequest,
        GroupResult,
        ReleaseRequest,
        StoreGroupRequest,
    )
    from everroll.contracts.training import RecordRunRequest
    from everroll.seeds import derive_seed
    from workflows import policies
    from workflows.group_results import build_group_result, merge_outcome, next_draw, render_group
    from workflows.reporting import GroupReporter
    from workflows.versions import continue_on_newest_version


@workflow.defn(name=names.ROLLOUT_GROUP, failure_exception_types=policies.FAILURE_EXCEPTION_TYPES)
class RolloutGroup:
    """Plays every member, samples unusable ones again if the policy says so, and stores the group."""

    @workflow.init
    def __init__(self, request: GroupRequest) -> None:
        self.request = request
        self.progress = request.progress or self._start_progress()
        self.hold_request = request.hold
        self.reporter = GroupReporter(names.run_workflow_id(request.run), request.group)
        self.ended: Cause | None = None
        """Why the run no longer waits for this group."""
        self.closing = False
        """True once no member may begin anything more."""
        self.episodes_left = False
        """Whether an episode goes on in spite of its cancellation: its session is left to the sweep."""

    @workflow.run
    async def run(self, request: GroupRequest) -> GroupResult:
        workflow.set_current_details(f"Group {request.group} of run {request.run}: episodes running")
        try:
            result = await self._play_and_settle()
        except (FailureError, asyncio.CancelledError):
            # The run ends, or a person ended the group: nobody will ask its sessions for anything.
            await self._release_sessions(policies.RELEASE_AFTER_FAILURE)
            raise
        await self._release_sessions(policies.RELEASE_SCHEDULE_TO_CLOSE)
        await self.reporter.finish()
        workflow.set_current_details(render_group(result))
        duration = workflow.time() - self.progress.started_at
        return result.model_copy(update={"duration_seconds": duration, "report": self.reporter.take()})

    def _start_progress(self) -> GroupProgress:
        request = self.request
        keys = [
            EpisodeKey(run=request.run, group=request.group, member=member, attempt=request.first_attempt)
            for member in range(request.rollout.episodes_per_group)
        ]
        return GroupProgress(
            members=[EpisodeOutcome(key=key, status=SampleStatus.PENDING) for key in keys],
            started_at=workflow.time(),
            remaining_seconds=request.rollout.group_timeout_seconds,
        )

    async def _play_and_settle(self) -> GroupResult:
        try:
            await self._play_members_within()
        except TimeoutError:
            timeout = self.request.rollout.group_timeout_seconds
            text = f"the group ran past its deadline of {timeout} s, time on hold not counted"
            return await self._drop([], Cause(kind=CauseKind.DEADLINE, message=text))
        if self.ended is not None:
            return await self._drop(self.progress.members, self.ended)
        if any(member.status is SampleStatus.PENDING for member in self.progress.members):
            await self._continue_as_new()
        return await self._settle(self.progress.members)

    async def _continue_as_new(self) -> NoReturn:
        """Members that are settled stay so; the others go on with their next attempt."""
        await self.reporter.flush()
        update = {"progress": self.progress, "hold": self.hold_request}
        continue_on_newest_version(self.request.model_copy(update=update))

    @workflow.signal(name=names.SIGNAL_HOLD, description="Start no new episode while true")
    def hold(self, request: HoldRequest) -> None:
        if request.number > self.hold_request.number:
            self.hold_request = request

    @workflow.signal(name=names.SIGNAL_END, description="End the episodes, and settle as dropped")
    def end_early(self, request: EndGroupRequest) -> None:
        self.ended = self.ended or request.cause

    @property
    def held(self) -> bool:
        return self.hold_request.held

    async def _play_members_within(self) -> None:
        """Play all members, unless the run ends the group; time on hold does not count, but is bounded too.

        Returns or raises once no episode is under way: until then their sessions are in use.

        Raises:
            TimeoutError: the deadline has passed.
        """
        playing = asyncio.create_task(self._play_members())
        try:
            while not playing.done() and self.ended is None:
                held, since = self.held, workflow.time()
                limit = self.request.rollout.abort_budget.max_pause_seconds if held else self.progress.remaining_seconds
                await workflow.wait_condition(
                    lambda held=held: playing.done() or self.ended is not None or self.held != held,  # type: ignore[misc]
                    timeout=max(limit, 0.0),
                    timeout_summary="longest hold" if held else "deadline of the group",
                )
                if not held:
                    self.progress.remaining_seconds -= workflow.time() - since
            if playing.done():
                await playing
                self.ended = None  # it came too late
        except (Exception, asyncio.CancelledError):  # not what ends a coroutine whose workflow leaves the cache
            await self._end_playing(playing)
            raise
        await self._end_playing(playing)

    async def _end_playing(self, playing: asyncio.Task[None]) -> None:
        """Return once no member is being played."""
        self.closing = True
        playing.cancel()
        await asyncio.gather(playing, return_exceptions=True)

    async def _play_members(self) -> None:
        """Settle every member. The first terminal failure ends the group."""
        tasks = [asyncio.create_task(self._play_member(member)) for member in range(len(self.progress.members))]
        try:
            # A cancelled gather would end with its first child only: never, where all are deaf to cancellation.
            done, _ = await workflow.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
            for task in done:
                task.result()
        except (Exception, asyncio.CancelledError):  # not what ends a coroutine whose workflow leaves the cache
            self.closing = True
            for task in tasks:
                task.cancel()
            ended, running = await workflow.wait(tasks, timeout=policies.CANCEL_GRACE.total_seconds())
            self.episodes_left = bool(running)
            for task in ended:
                if not task.cancelled():
                    task.exception()  # asked for, or asyncio reports each as never retrieved
            raise

    async def _play_member(self, member: int) -> None:
        """Play a member until it is usable or has no attempt left; it stays pending where the history grows long."""
        rollout = self.request.rollout
        max_refills = rollout.max_refills if rollout.on_unusable == "refill" else 0
        while (pending := self.progress.members[member]).status is SampleStatus.PENDING:
            await workflow.wait_condition(lambda: not self.held)
            if workflow.info().is_continue_as_new_suggested():
                return
            outcome = await self._play_episode(pending)
            self._stop_if_closing()
            self.reporter.note(outcome)
            refill = self._count_refills(pending.key)
            if not outcome.is_trainable:
                self._count_unusable(outcome)
            if outcome.is_trainable or refill >= max_refills or self.reporter.run_is_gone:
                self.progress.members[member] = outcome
                return
            if outcome.status is SampleStatus.ABORTED:
                await asyncio.sleep(policies.refill_backoff_seconds(rollout.refill_backoff_seconds, refill))
            key = pending.key.model_copy(update={"attempt": pending.key.attempt + 1})
            self.progress.members[member] = pending.model_copy(update={"key": key, "draw": next_draw(outcome)})

    def _stop_if_closing(self) -> None:
        """An activity that ends well in spite of its cancellation takes the cancellation with it."""
        if self.closing:
            raise asyncio.CancelledError

    def _count_refills(self, key: EpisodeKey) -> int:
        """0 for the first attempt that this group makes."""
        return key.attempt - self.request.first_attempt

    def _count_unusable(self, outcome: EpisodeOutcome) -> None:
        if outcome.cause is None:
            return
        kind, counts = outcome.cause.kind.value, self.progress.unusable
        counts[kind] = counts.get(kind, 0) + 1
        self.progress.last_cause = outcome.cause

    async def _play_episode(self, pending: EpisodeOutcome) -> EpisodeOutcome:
        key = pending.key
        self.progress.num_episodes += 1
        try:
            report = await self._run_episode(pending)
        except ActivityError as error:
            report = EpisodeReport(key=key, status=SampleStatus.ABORTED, cause=self._build_timeout(error))
        self._stop_if_closing()
        if report.status is SampleStatus.ABORTED:
            return merge_outcome(pending, report, None)
        try:
            collected = await self._collect_samples(key)
        except ActivityError as error:
            collected = CollectResult(key=key, status=SampleStatus.ABORTED, cause=self._build_timeout(error))
        return merge_outcome(pending, report, collected)

    def _build_timeout(self, error: ActivityError) -> Cause:
        """An activity that ran out of time, its retries included, costs one sample; any other failure is raised."""
        if not isinstance(error.cause, TemporalTimeoutError):
            raise error
        text = f"activity {error.activity_id}: {error.cause}; is a rollout worker running, and not stuck?"
        return Cause(kind=CauseKind.TIMEOUT, error="TimeoutError", message=text, server=self.request.session_url)

    async def _run_episode(self, pending: EpisodeOutcome) -> EpisodeReport:
        key, request, rollout = pending.key, self.request, self.request.rollout
        refill = self._count_refills(key)
        report: EpisodeReport = await workflow.execute_activity(
            names.RUN_EPISODE,
            EpisodeRequest(
                key=key,
                dataset=request.dataset,
                agent=rollout.agent,
                sampling=rollout.sampling,
                # A group that is played again after a resume draws what it would have drawn before.
                seed=derive_seed(request.seed, request.run, key.group, key.member, pending.draw),
                session_url=request.session_url,
                timeout_seconds=rollout.episode_timeout_seconds,
                transport_attempts=rollout.collect_attempts,
                prompt_index=request.prompt_index,
                min_weight_version=request.weight_version,
            ),
            result_type=EpisodeReport,
            task_queue=names.rollout_queue(request.task_queue),
            activity_id=f"episode-{key.member}-{key.attempt}",
            start_to_close_timeout=policies.episode_start_to_close(rollout),
            schedule_to_close_timeout=policies.episode_schedule_to_close(rollout),
            heartbeat_timeout=timedelta(seconds=rollout.heartbeat_timeout_seconds),
            retry_policy=policies.RETRY,
            cancellation_type=ActivityCancellationType.WAIT_CANCELLATION_COMPLETED,
            summary=f"group {key.group} member {key.member}" + (f" refill {refill}" if refill else ""),
        )
        return report

    async def _collect_samples(self, key: EpisodeKey) -> CollectResult:
        request, rollout = self.request, self.request.rollout
        collected: CollectResult = await workflow.execute_activity(
            names.COLLECT_SAMPLES,
            CollectRequest(
                key=key,
                session_url=request.session_url,
                store_url=request.store_url,
                max_seq_len=rollout.max_seq_len,
                transport_attempts=rollout.collect_attempts,
                min_weight_version=request.weight_version,
            ),
            result_type=CollectResult,
            task_queue=names.rollout_queue(request.task_queue),
            activity_id=f"collect-{key.member}-{key.attempt}",
            start_to_close_timeout=policies.calls_limit(rollout),
            schedule_to_close_timeout=policies.calls_limit(rollout) * policies.ATTEMPTS_ALLOWANCE,
            heartbeat_timeout=timedelta(seconds=rollout.heartbeat_timeout_seconds),
            retry_policy=policies.RETRY,
            cancellation_type=ActivityCancellationType.WAIT_CANCELLATION_COMPLETED,
            summary=key.session_id,
        )
        return collected

    async def _settle(self, outcomes: list[EpisodeOutcome]) -> GroupResult:
        """Drop the group for a named cause, or store it."""
        lost = next((outcome for outcome in outcomes if not outcome.is_trainable), None)
        if lost is not None:
            cause = lost.cause or Cause(kind=CauseKind.NO_REWARD, message=f"status {lost.status.value}")
            num_attempts = self._count_refills(lost.key) + 1
            message = f"member {lost.key.member} after {num_attempts} attempts: {cause.message}"
            return await self._drop(outcomes, cause.model_copy(update={"message": message}))
        rewards = [outcome.reward for outcome in outcomes]
        if self.request.rollout.drop_zero_variance and len(set(rewards)) == 1:
            cause = Cause(kind=CauseKind.ZERO_VARIANCE, message=f"all rewards are {rewards[0]}")
            return await self._drop(outcomes, cause)
        return self._build_result(outcomes, await self._store(outcomes), None)

    async def _drop(self, outcomes: list[EpisodeOutcome], cause: Cause) -> GroupResult:
        """Settled as dropped; on record before the run hears of it, as a stored group is."""
        result = self._build_result(outcomes, None, cause)
        if self.request.run_dir is not None:
            await workflow.execute_activity(
                names.RECORD_RUN,
                RecordRunRequest(run_dir=self.request.run_dir, settled=[result]),
                task_queue=self.request.task_queue,
                start_to_close_timeout=policies.LIGHT_START_TO_CLOSE,
                schedule_to_close_timeout=policies.LIGHT_SCHEDULE_TO_CLOSE,
                heartbeat_timeout=policies.LIGHT_HEARTBEAT,
                retry_policy=policies.RETRY,
                summary=f"group {self.request.group} is dropped: {cause.kind.value}",
            )
        return result

    async def _store(self, outcomes: list[EpisodeOutcome]) -> BlobRef:
        request = self.request
        manifest: BlobRef = await workflow.execute_activity(
            names.STORE_GROUP,
            StoreGroupRequest(
                run=request.run,
                group=request.group,
                store_url=request.store_url,
                outcomes=outcomes,
                run_dir=request.run_dir,
                result=self._build_result(outcomes, None, None),
            ),
            result_type=BlobRef,
            task_queue=request.task_queue,
            start_to_close_timeout=policies.LIGHT_START_TO_CLOSE,
            schedule_to_close_timeout=policies.LIGHT_SCHEDULE_TO_CLOSE,
            heartbeat_timeout=policies.LIGHT_HEARTBEAT,
            retry_policy=policies.RETRY,
            summary=f"manifest of group {request.group}",
        )
        return manifest

    async def _release_sessions(self, limit: timedelta) -> None:
        """Best effort: what happens here may not change what became of the group. Sessions in use are left alone."""
        if self.episodes_left:
            return
        sessions = [
            names.session_id(member.key.run, member.key.group, member.key.member, attempt)
            for member in self.progress.members
            for attempt in range(self.request.first_attempt, member.key.attempt + 1)
        ]
        try:
            await workflow.execute_activity(
                names.RELEASE_SESSIONS,
                ReleaseRequest(session_url=self.request.session_url, session_ids=sessions),
                task_queue=self.request.task_queue,
                start_to_close_timeout=min(limit, policies.LIGHT_START_TO_CLOSE),
                schedule_to_close_timeout=limit,
                heartbeat_timeout=policies.LIGHT_HEARTBEAT,
                retry_policy=policies.RETRY,
                summary=f"{len(sessions)} sessions",
            )
        except ActivityError as error:
            if is_cancelled_exception(error):
                raise
            workflow.logger.warning("sessions of group %d were not released: %s", self.request.group, error.cause)

    def _build_result(
        self, outcomes: list[EpisodeOutcome], manifest: BlobRef | None, dropped: Cause | None
    ) -> GroupResult:
        return build_group_result(self.request.group, self.progress, outcomes, manifest, dropped)
