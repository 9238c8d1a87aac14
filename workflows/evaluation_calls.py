"""The activities that an evaluation calls, with their deadlines and their place in the queue."""

from __future__ import annotations

from datetime import timedelta

from temporalio import workflow
from temporalio.common import Priority
from temporalio.exceptions import ActivityError, is_cancelled_exception
from temporalio.exceptions import TimeoutError as TemporalTimeoutError

with workflow.unsafe.imports_passed_through():
    from everroll.contracts import names
    from everroll.contracts.evaluation import (
        EvaluationRecord,
        EvaluationRequest,
        FinishEvaluationRequest,
        OpenEvaluationRequest,
        StoreEpisodesRequest,
    )
    from everroll.contracts.outcomes import Cause, CauseKind, SampleStatus
    from everroll.contracts.rollout import (
        BlobRef,
        CollectRequest,
        CollectResult,
        DatasetRef,
        EpisodeKey,
        EpisodeOutcome,
        EpisodeReport,
        EpisodeRequest,
        ReleaseRequest,
    )
    from everroll.contracts.training import PublishRequest, PublishResult, Weights
    from everroll.seeds import derive_seed
    from workflows import policies
    from workflows.group_results import merge_outcome


class EvaluationCalls:
    """Activities of one evaluation."""

    def __init__(self, request: EvaluationRequest) -> None:
        self._request = request
        self._rollout = request.rollout
        self._rollout_queue = names.rollout_queue(request.services.task_queue)
        self._priority = Priority(priority_key=request.eval.priority)

    async def publish(self, path: str) -> None:
        """Bring the engines to the evaluated version. For a run that has ended: nobody else publishes."""
        services = self._request.services
        deadline = timedelta(seconds=services.publish_timeout_seconds)
        await workflow.execute_activity(
            names.PUBLISH_WEIGHTS,
            PublishRequest(
                weights=Weights(version=self._request.version, path=path),
                engine_urls=services.engine_urls,
                timeout_seconds=services.publish_timeout_seconds,
                first=True,
                engine_kind=services.engine_kind,
            ),
            result_type=PublishResult,
            start_to_close_timeout=deadline,
            schedule_to_close_timeout=deadline + policies.EVALUATION_GRACE,
            heartbeat_timeout=policies.PUBLISH_HEARTBEAT,
            retry_policy=policies.RETRY,
            summary=f"version {self._request.version} to {len(services.engine_urls)} engines",
        )

    async def open_prompts(self) -> DatasetRef:
        dataset: DatasetRef = await workflow.execute_activity(
            names.OPEN_EVALUATION,
            OpenEvaluationRequest(path=self._request.path),
            result_type=DatasetRef,
            task_queue=self._request.services.task_queue,
            start_to_close_timeout=policies.PREPARE_START_TO_CLOSE,
            schedule_to_close_timeout=policies.PREPARE_SCHEDULE_TO_CLOSE,
            heartbeat_timeout=policies.PREPARE_HEARTBEAT,
            retry_policy=policies.RETRY,
            summary=f"prompts of {self._request.name}",
        )
        return dataset

    async def play(self, key: EpisodeKey, dataset: DatasetRef | None) -> EpisodeOutcome:
        """One attempt at one episode, collected. Running out of time costs the episode; other failures are raised."""
        if dataset is None:
            raise RuntimeError("episodes are played after the prompts were read")
        pending = EpisodeOutcome(key=key, status=SampleStatus.PENDING)
        try:
            report = await self._run_episode(key, dataset)
        except ActivityError as error:
            report = EpisodeReport(key=key, status=SampleStatus.ABORTED, cause=self._build_timeout(error))
        if report.status is SampleStatus.ABORTED:
            return merge_outcome(pending, report, None)
        try:
            collected = await self._collect_samples(key)
        except ActivityError as error:
            collected = CollectResult(key=key, status=SampleStatus.ABORTED, cause=self._build_timeout(error))
        return merge_outcome(pending, report, collected)

    async def store(self, outcomes: list[EpisodeOutcome]) -> BlobRef:
        request = self._request
        blob: BlobRef = await workflow.execute_activity(
            names.STORE_EPISODES,
            StoreEpisodesRequest(
                run=request.run, label=request.label, store_url=request.services.store_url, outcomes=outcomes
            ),
            result_type=BlobRef,
            task_queue=request.services.task_queue,
            start_to_close_timeout=policies.LIGHT_START_TO_CLOSE,
            schedule_to_close_timeout=policies.LIGHT_SCHEDULE_TO_CLOSE,
            heartbeat_timeout=policies.LIGHT_HEARTBEAT,
            retry_policy=policies.RETRY,
            summary=f"{len(outcomes)} outcomes",
        )
        return blob

    async def release(self, outcomes: list[EpisodeOutcome]) -> None:
        """Best effort; a sweep catches the rest, and also the sessions of episodes that were cut off."""
        sessions = [
            outcome.key.model_copy(update={"attempt": attempt}).session_id
            for outcome in outcomes
            for attempt in range(outcome.key.attempt + 1)
        ]
        try:
            await workflow.execute_activity(
                names.RELEASE_SESSIONS,
                ReleaseRequest(session_url=self._request.services.session_url, session_ids=sessions),
                task_queue=self._request.services.task_queue,
                start_to_close_timeout=policies.LIGHT_START_TO_CLOSE,
                schedule_to_close_timeout=policies.RELEASE_SCHEDULE_TO_CLOSE,
                heartbeat_timeout=policies.LIGHT_HEARTBEAT,
                retry_policy=policies.RETRY,
                summary=f"{len(sessions)} sessions",
            )
        except ActivityError as error:
            if is_cancelled_exception(error):
                raise
            workflow.logger.warning("sessions of %s were not released: %s", self._request.workflow_id, error.cause)

    async def finish(self, record: EvaluationRecord, parts: list[BlobRef]) -> EvaluationRecord:
        request = self._request
        finished: EvaluationRecord = await workflow.execute_activity(
            names.FINISH_EVALUATION,
            FinishEvaluationRequest(
                run=request.run,
                run_dir=request.run_dir,
                store_url=request.services.store_url,
                parts=parts,
                record=record,
            ),
            result_type=EvaluationRecord,
            task_queue=request.services.task_queue,
            start_to_close_timeout=policies.PREPARE_START_TO_CLOSE,
            schedule_to_close_timeout=policies.PREPARE_SCHEDULE_TO_CLOSE,
            heartbeat_timeout=policies.PREPARE_HEARTBEAT,
            retry_policy=policies.RETRY,
            summary="compute and write down",
        )
        return finished

    async def _run_episode(self, key: EpisodeKey, dataset: DatasetRef) -> EpisodeReport:
        request, rollout = self._request, self._rollout
        report: EpisodeReport = await workflow.execute_activity(
            names.RUN_EPISODE,
            EpisodeRequest(
                key=key,
                dataset=dataset,
                agent=rollout.agent,
                sampling=rollout.sampling,
                # Without the version: every version is asked with the same seeds.
                seed=derive_seed(request.seed, request.run, "eval", request.name, key.group, key.member, key.attempt),
                session_url=request.services.session_url,
                timeout_seconds=rollout.episode_timeout_seconds,
                transport_attempts=rollout.collect_attempts,
                prompt_index=key.group,
                min_weight_version=request.version,
            ),
            result_type=EpisodeReport,
            task_queue=self._rollout_queue,
            activity_id=f"episode-{key.group}-{key.member}-{key.attempt}",
            start_to_close_timeout=policies.episode_start_to_close(rollout),
            schedule_to_close_timeout=self._limit,
            heartbeat_timeout=timedelta(seconds=rollout.heartbeat_timeout_seconds),
            retry_policy=policies.RETRY,
            priority=self._priority,
            summary=f"prompt {key.group} episode {key.member}" + (f" refill {key.attempt}" if key.attempt else ""),
        )
        return report

    async def _collect_samples(self, key: EpisodeKey) -> CollectResult:
        request, rollout = self._request, self._rollout
        collected: CollectResult = await workflow.execute_activity(
            names.COLLECT_SAMPLES,
            CollectRequest(
                key=key,
                session_url=request.services.session_url,
                store_url=request.services.store_url,
                max_seq_len=rollout.max_seq_len,
                transport_attempts=rollout.collect_attempts,
                min_weight_version=request.version,
            ),
            result_type=CollectResult,
            task_queue=self._rollout_queue,
            activity_id=f"collect-{key.group}-{key.member}-{key.attempt}",
            start_to_close_timeout=policies.calls_limit(rollout),
            schedule_to_close_timeout=self._limit,
            heartbeat_timeout=timedelta(seconds=rollout.heartbeat_timeout_seconds),
            retry_policy=policies.RETRY,
            priority=self._priority,
            summary=f"session {key.session_id}",
        )
        return collected

    @property
    def _limit(self) -> timedelta:
        """Of one activity: it may wait in the queue behind training for as long as the whole evaluation may take."""
        return timedelta(seconds=self._request.eval.timeout_seconds) + policies.calls_limit(self._rollout)

    def _build_timeout(self, error: ActivityError) -> Cause:
        if not isinstance(error.cause, TemporalTimeoutError):
            raise error
        text = f"activity {error.activity_id}: {error.cause}; is a rollout worker running, and not stuck?"
        server = self._request.services.session_url
        return Cause(kind=CauseKind.TIMEOUT, error="TimeoutError", message=text, server=server)
