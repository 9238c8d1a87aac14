"""`RolloutGroup`: G episodes of one prompt, settled together."""

from __future__ import annotations

import asyncio
from datetime import timedelta

from temporalio import workflow
from temporalio.exceptions import ActivityError, is_cancelled_exception
from temporalio.exceptions import TimeoutError as TemporalTimeoutError

with workflow.unsafe.imports_passed_through():
    from everroll.contracts import names
    from everroll.contracts.health import HoldRequest
    from everroll.contracts.outcomes import Cause, CauseKind, SampleStatus
    from everroll.contracts.rollout import (
        BlobRef,
        CollectRequest,
        CollectResult,
        EpisodeKey,
        EpisodeOutcome,
        EpisodeReport,
        EpisodeRequest,
        GroupRequest,
        GroupResult,
        ReleaseRequest,
        StoreGroupRequest,
    )
    from everroll.seeds import derive_seed
    from workflows import policies
    from workflows.reporting import GroupReporter


@workflow.defn(name=names.ROLLOUT_GROUP, failure_exception_types=policies.FAILURE_EXCEPTION_TYPES)
class RolloutGroup:
    """Plays every member, samples unusable ones again if the policy says so, and stores the group."""

    @workflow.init
    def __init__(self, request: GroupRequest) -> None:
        self.request = request
        self.unusable: list[EpisodeOutcome] = []
        self.session_ids: list[str] = []
        self.num_episodes = 0
        self.hold_request = request.hold
        self.reporter = GroupReporter(names.run_workflow_id(request.run), request.group)

    @workflow.run
    async def run(self, request: GroupRequest) -> GroupResult:
        started = workflow.time()
        workflow.set_current_details(f"Group {request.group} of run {request.run}: episodes running")
        timeout = request.rollout.group_timeout_seconds
        try:
            outcomes = await self._play_members_within(timeout)
        except TimeoutError:
            text = f"the group ran past its deadline of {timeout} s, time on hold not counted"
            result = self._build_dropped([], Cause(kind=CauseKind.DEADLINE, message=text))
        else:
            result = await self._settle(outcomes)
        await self._release_sessions()
        await self.reporter.finish()
        self._show(result)
        return result.model_copy(update={"duration_seconds": workflow.time() - started, "report": self.reporter.take()})

    @workflow.signal(name=names.SIGNAL_HOLD, description="Start no new episode while true")
    def hold(self, request: HoldRequest) -> None:
        if request.number > self.hold_request.number:
            self.hold_request = request

    @property
    def held(self) -> bool:
        return self.hold_request.held

    async def _play_members_within(self, timeout_seconds: float) -> list[EpisodeOutcome]:
        """Play all members; time on hold does not count, but is bounded too.

        Raises:
            TimeoutError: the deadline has passed.
        """
        playing = asyncio.create_task(self._play_members())
        remaining = timedelta(seconds=timeout_seconds)
        try:
            while not playing.done():
                if self.held:
                    limit = self.request.rollout.abort_budget.max_pause_seconds
                    await workflow.wait_condition(lambda: playing.done() or not self.held, timeout=limit)
                    continue
                since = workflow.now()
                await workflow.wait_condition(lambda: playing.done() or self.held, timeout=remaining)
                remaining -= workflow.now() - since
            return await playing
        finally:
            playing.cancel()
            await asyncio.gather(playing, return_exceptions=True)

    async def _play_members(self) -> list[EpisodeOutcome]:
        """One outcome per member, ordered by member. The first terminal failure ends the group."""
        members = range(self.request.rollout.episodes_per_group)
        tasks = [asyncio.create_task(self._play_member(member)) for member in members]
        try:
            return list(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()

    async def _play_member(self, member: int) -> EpisodeOutcome:
        rollout = self.request.rollout
        num_attempts = 1 + (rollout.max_refills if rollout.on_unusable == "refill" else 0)
        for attempt in range(num_attempts):
            await workflow.wait_condition(lambda: not self.held)
            outcome = await self._play_episode(member, attempt)
            self.reporter.note(outcome)
            if outcome.is_trainable:
                break
            self.unusable.append(outcome)
            if outcome.status is SampleStatus.ABORTED and attempt + 1 < num_attempts:
                await asyncio.sleep(policies.refill_backoff_seconds(rollout.refill_backoff_seconds, attempt))
        return outcome

    async def _play_episode(self, member: int, attempt: int) -> EpisodeOutcome:
        key = EpisodeKey(run=self.request.run, group=self.request.group, member=member, attempt=attempt)
        self.num_episodes += 1
        self.session_ids.append(key.session_id)
        try:
            report = await self._run_episode(key)
        except ActivityError as error:
            report = EpisodeReport(key=key, status=SampleStatus.ABORTED, cause=self._build_timeout(error))
        if report.status is SampleStatus.ABORTED:
            return merge_outcome(report, None)
        try:
            collected = await self._collect_samples(key)
        except ActivityError as error:
            collected = CollectResult(key=key, status=SampleStatus.ABORTED, cause=self._build_timeout(error))
        return merge_outcome(report, collected)

    def _build_timeout(self, error: ActivityError) -> Cause:
        """An activity that ran out of time, its retries included, costs one sample; any other failure is raised."""
        if not isinstance(error.cause, TemporalTimeoutError):
            raise error
        text = f"activity {error.activity_id}: {error.cause}; is a rollout worker running, and not stuck?"
        return Cause(kind=CauseKind.TIMEOUT, error="TimeoutError", message=text, server=self.request.session_url)

    async def _run_episode(self, key: EpisodeKey) -> EpisodeReport:
        request, rollout = self.request, self.request.rollout
        report: EpisodeReport = await workflow.execute_activity(
            names.RUN_EPISODE,
            EpisodeRequest(
                key=key,
                dataset=request.dataset,
                agent=rollout.agent,
                sampling=rollout.sampling,
                seed=derive_seed(request.seed, request.run, key.group, key.member, key.attempt),
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
            summary=f"group {key.group} member {key.member}" + (f" refill {key.attempt}" if key.attempt else ""),
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
            ),
            result_type=CollectResult,
            task_queue=names.rollout_queue(request.task_queue),
            activity_id=f"collect-{key.member}-{key.attempt}",
            start_to_close_timeout=policies.calls_limit(rollout),
            schedule_to_close_timeout=policies.calls_limit(rollout) * policies.ATTEMPTS_ALLOWANCE,
            heartbeat_timeout=timedelta(seconds=rollout.heartbeat_timeout_seconds),
            retry_policy=policies.RETRY,
            summary=f"session {key.session_id}",
        )
        return collected

    async def _settle(self, outcomes: list[EpisodeOutcome]) -> GroupResult:
        """Drop the group for a named cause, or store it."""
        lost = next((outcome for outcome in outcomes if not outcome.is_trainable), None)
        if lost is not None:
            cause = lost.cause or Cause(kind=CauseKind.NO_REWARD, message=f"status {lost.status.value}")
            message = f"member {lost.key.member} after {lost.key.attempt + 1} attempts: {cause.message}"
            return self._build_dropped(outcomes, cause.model_copy(update={"message": message}))
        rewards = [outcome.reward for outcome in outcomes]
        if self.request.rollout.drop_zero_variance and len(set(rewards)) == 1:
            cause = Cause(kind=CauseKind.ZERO_VARIANCE, message=f"all rewards are {rewards[0]}")
            return self._build_dropped(outcomes, cause)
        return self._build_result(outcomes, await self._store(outcomes), None)

    async def _store(self, outcomes: list[EpisodeOutcome]) -> BlobRef:
        request = self.request
        manifest: BlobRef = await workflow.execute_activity(
            names.STORE_GROUP,
            StoreGroupRequest(run=request.run, group=request.group, store_url=request.store_url, outcomes=outcomes),
            result_type=BlobRef,
            task_queue=request.task_queue,
            start_to_close_timeout=policies.LIGHT_START_TO_CLOSE,
            schedule_to_close_timeout=policies.LIGHT_SCHEDULE_TO_CLOSE,
            retry_policy=policies.RETRY,
            summary=f"manifest of group {request.group}",
        )
        return manifest

    async def _release_sessions(self) -> None:
        """Best effort: the group is settled, so nothing that happens here may fail it."""
        try:
            await workflow.execute_activity(
                names.RELEASE_SESSIONS,
                ReleaseRequest(session_url=self.request.session_url, session_ids=self.session_ids),
                task_queue=self.request.task_queue,
                start_to_close_timeout=policies.LIGHT_START_TO_CLOSE,
                schedule_to_close_timeout=policies.RELEASE_SCHEDULE_TO_CLOSE,
                retry_policy=policies.RETRY,
                summary=f"{len(self.session_ids)} sessions",
            )
        except ActivityError as error:
            if is_cancelled_exception(error):
                raise
            workflow.logger.warning("sessions of group %d were not released: %s", self.request.group, error.cause)

    def _build_dropped(self, outcomes: list[EpisodeOutcome], cause: Cause) -> GroupResult:
        return self._build_result(outcomes, None, cause)

    def _build_result(
        self, outcomes: list[EpisodeOutcome], manifest: BlobRef | None, dropped: Cause | None
    ) -> GroupResult:
        samples = [outcome.samples for outcome in outcomes if outcome.samples is not None]
        rewards = [outcome.reward for outcome in outcomes if outcome.reward is not None]
        return GroupResult(
            group=self.request.group,
            prompt_index=outcomes[0].prompt_index if outcomes else None,
            manifest=manifest,
            dropped=dropped,
            num_episodes=self.num_episodes,
            num_tokens=sum(ref.num_tokens for ref in samples),
            num_sampled_tokens=sum(ref.num_sampled_tokens for ref in samples),
            mean_reward=sum(rewards) / len(rewards) if rewards else None,
            min_weight_version=min((ref.min_weight_version for ref in samples), default=None),
            unusable=count_causes(self.unusable),
            last_cause=self.unusable[-1].cause if self.unusable else None,
            agent_metrics=mean_metrics(outcomes),
        )

    def _show(self, result: GroupResult) -> None:
        reward = "none" if result.mean_reward is None else f"{result.mean_reward:.3f}"
        fate = f"dropped ({result.dropped})" if result.dropped else "stored"
        workflow.set_current_details(
            f"**Group {result.group}**, prompt {result.prompt_index}: {fate}\n\n"
            f"- mean reward: {reward}\n- episodes played: {result.num_episodes}\n"
            f"- sampled tokens: {result.num_sampled_tokens}\n- unusable by cause: {result.unusable or 'none'}"
        )


def merge_outcome(report: EpisodeReport, collected: CollectResult | None) -> EpisodeOutcome:
    """Report and collection taken together.

    Infrastructure outweighs the agent: when its session or every engine was away, neither its failure nor the reward
    that it made of that is a verdict.
    """
    status, cause = report.status, report.cause
    if collected is not None:
        if collected.cause is not None and collected.cause.server is not None:
            status, cause = collected.status, collected.cause
        elif collected.engine_cause is not None and collected.engine_cause.kind is CauseKind.ENGINE:
            status, cause = SampleStatus.ABORTED, collected.engine_cause
        elif collected.engine_cause is not None and status is SampleStatus.FAILED:
            cause = collected.engine_cause
        elif status is SampleStatus.COMPLETED:
            status, cause = collected.status, collected.cause
    return EpisodeOutcome(
        key=report.key,
        status=status,
        prompt_index=report.prompt_index,
        reward=report.reward,
        metrics=report.metrics,
        samples=collected.samples if collected else None,
        cause=cause,
        duration_seconds=report.duration_seconds,
    )


def count_causes(outcomes: list[EpisodeOutcome]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for outcome in outcomes:
        if outcome.cause is not None:
            counts[outcome.cause.kind.value] = counts.get(outcome.cause.kind.value, 0) + 1
    return counts


def mean_metrics(outcomes: list[EpisodeOutcome]) -> dict[str, float]:
    values: dict[str, list[float]] = {}
    for outcome in outcomes:
        for name, value in outcome.metrics.items():
            values.setdefault(name, []).append(value)
    return {name: sum(numbers) / len(numbers) for name, numbers in sorted(values.items())}
