"""The activities that a run calls, with their deadlines."""

from __future__ import annotations

import asyncio
from datetime import timedelta

from temporalio import workflow
from temporalio.exceptions import ActivityError, is_cancelled_exception

with workflow.unsafe.imports_passed_through():
    from everroll.contracts import names
    from everroll.contracts.batches import ReadBatchRequest, StoredBatch
    from everroll.contracts.health import Survey, SurveyRequest, WatchEnginesRequest, WatchEnginesResult
    from everroll.contracts.rollout import AwaitGroupsRequest, AwaitGroupsResult, GroupResult, ReleaseRequest
    from everroll.contracts.spec import RunSpec
    from everroll.contracts.steering import SteeringRecord
    from everroll.contracts.training import (
        GroupBatchItem,
        LedgerMark,
        PrepareRunRequest,
        PrepareRunResult,
        PrepareTrainerRequest,
        PublishRequest,
        PublishResult,
        RecordRunRequest,
        RestoreRunRequest,
        RestoreRunResult,
        TrainingRunRequest,
        TrainRequest,
        TrainResult,
        Weights,
    )
    from workflows import policies


class RunCalls:
    """Activities of one run."""

    def __init__(self, spec: RunSpec) -> None:
        self._spec = spec
        self.run_dir = f"{spec.run.output_dir}/{spec.run.name}"

    def use(self, spec: RunSpec) -> None:
        """Call with other settings from now on."""
        self._spec = spec

    async def prepare_run(self, request: TrainingRunRequest) -> PrepareRunResult:
        result: PrepareRunResult = await workflow.execute_activity(
            names.PREPARE_RUN,
            PrepareRunRequest(
                spec=self._spec,
                execution_id=workflow.info().first_execution_run_id,
                resume=request.resume,
                fork=request.fork,
            ),
            result_type=PrepareRunResult,
            start_to_close_timeout=policies.PREPARE_START_TO_CLOSE,
            schedule_to_close_timeout=policies.PREPARE_SCHEDULE_TO_CLOSE,
            heartbeat_timeout=policies.PREPARE_HEARTBEAT,
            retry_policy=policies.RETRY,
            summary="check services, read the data set",
        )
        return result

    async def restore_run(self, version: int, end_groups: bool) -> RestoreRunResult:
        """The state that lies in the run directory, whose newest step is `version`."""
        result: RestoreRunResult = await workflow.execute_activity(
            names.RESTORE_RUN,
            RestoreRunRequest(run=self._spec.run.name, run_dir=self.run_dir, version=version, end_groups=end_groups),
            result_type=RestoreRunResult,
            start_to_close_timeout=policies.PREPARE_START_TO_CLOSE,
            schedule_to_close_timeout=policies.PREPARE_SCHEDULE_TO_CLOSE,
            heartbeat_timeout=policies.PREPARE_HEARTBEAT,
            retry_policy=policies.RETRY,
            summary=f"read what is settled up to step {version}",
        )
        return result

    async def record(self, settled: list[GroupResult], steerings: list[SteeringRecord], spec: RunSpec | None) -> None:
        """Write into the run directory what must outlive Temporal's history."""
        await workflow.execute_activity(
            names.RECORD_RUN,
            RecordRunRequest(run_dir=self.run_dir, settled=settled, steerings=steerings, spec=spec),
            start_to_close_timeout=policies.LIGHT_START_TO_CLOSE,
            schedule_to_close_timeout=policies.LIGHT_SCHEDULE_TO_CLOSE,
            heartbeat_timeout=policies.LIGHT_HEARTBEAT,
            retry_policy=policies.RETRY,
            summary=f"{len(settled)} dropped groups, {len(steerings)} steering requests",
        )

    async def prepare_trainer(self) -> Weights:
        if self._spec.run.mode == "rollout":
            return Weights(version=0, path=self._spec.model.path)
        weights: Weights = await workflow.execute_activity(
            names.PREPARE_TRAINER,
            PrepareTrainerRequest(
                run=self._spec.run.name,
                run_dir=self.run_dir,
                seed=self._spec.run.seed,
                model=self._spec.model,
                train=self._spec.train,
            ),
            result_type=Weights,
            task_queue=names.train_queue(self._spec.services.task_queue),
            start_to_close_timeout=policies.PREPARE_SCHEDULE_TO_CLOSE,
            schedule_to_close_timeout=policies.PREPARE_TRAINER_SCHEDULE_TO_CLOSE,
            heartbeat_timeout=timedelta(seconds=self._spec.train.heartbeat_timeout_seconds),
            retry_policy=policies.RETRY,
            summary="load the model",
        )
        return weights

    async def train(
        self, step: int, batch: list[GroupResult], mark: LedgerMark | None, stored: StoredBatch | None = None
    ) -> TrainResult:
        """Train a batch; a run that only plays writes it down. `stored`: where it is from, if another run played it."""
        request = TrainRequest(
            run=self._spec.run.name,
            run_dir=self.run_dir,
            step=step,
            seed=self._spec.run.seed,
            store_url=stored.store_url if stored else self._spec.services.store_url,
            batch=[
                GroupBatchItem(group=result.group, manifest=result.manifest)
                for result in batch
                if result.manifest is not None
            ],
            model=self._spec.model,
            train=self._spec.train,
            mark=mark,
            played_by=stored.run if stored else None,
        )
        return await (self._record_batch(request) if self._spec.run.mode == "rollout" else self._train(request))

    async def read_batch(self, step: int) -> StoredBatch:
        """A batch that another run has stored."""
        stored: StoredBatch = await workflow.execute_activity(
            names.READ_BATCH,
            ReadBatchRequest(directory=self._spec.run.batches_from or "", step=step),
            result_type=StoredBatch,
            start_to_close_timeout=policies.PREPARE_START_TO_CLOSE,
            schedule_to_close_timeout=policies.PREPARE_SCHEDULE_TO_CLOSE,
            heartbeat_timeout=policies.LIGHT_HEARTBEAT,
            retry_policy=policies.RETRY,
            summary=f"batch {step}",
        )
        return stored

    async def _record_batch(self, request: TrainRequest) -> TrainResult:
        recorded: TrainResult = await workflow.execute_activity(
            names.RECORD_BATCH,
            request,
            result_type=TrainResult,
            start_to_close_timeout=policies.PREPARE_START_TO_CLOSE,
            schedule_to_close_timeout=policies.PREPARE_SCHEDULE_TO_CLOSE,
            heartbeat_timeout=policies.LIGHT_HEARTBEAT,
            retry_policy=policies.RETRY,
            summary=f"batch {request.step}: {len(request.batch)} groups",
        )
        return recorded

    async def _train(self, request: TrainRequest) -> TrainResult:
        deadline = timedelta(seconds=self._spec.train.step_timeout_seconds)
        trained: TrainResult = await workflow.execute_activity(
            names.TRAIN_STEP,
            request,
            result_type=TrainResult,
            task_queue=names.train_queue(self._spec.services.task_queue),
            start_to_close_timeout=deadline,
            schedule_to_close_timeout=deadline * policies.ATTEMPTS_ALLOWANCE,
            heartbeat_timeout=timedelta(seconds=self._spec.train.heartbeat_timeout_seconds),
            retry_policy=policies.RETRY,
            summary=f"step {request.step}: {len(request.batch)} groups",
        )
        return trained

    async def publish(self, weights: Weights, first: bool = False) -> None:
        """One try at all engines; only lost workers and an attempt that ran out of time are tried again.

        Raises:
            ActivityError: its cause is an `ApplicationError` whose type is a cause kind when an engine did not answer,
                or a terminal one when it refused the weights.
        """
        services = self._spec.services
        deadline = timedelta(seconds=services.publish_timeout_seconds)
        await workflow.execute_activity(
            names.PUBLISH_WEIGHTS,
            PublishRequest(
                weights=weights,
                engine_urls=services.engine_urls,
                timeout_seconds=services.publish_timeout_seconds,
                engine_kind=services.engine_kind,
                first=first,
            ),
            result_type=PublishResult,
            start_to_close_timeout=deadline,
            schedule_to_close_timeout=deadline * policies.ATTEMPTS_ALLOWANCE,
            heartbeat_timeout=policies.PUBLISH_HEARTBEAT,
            retry_policy=policies.RETRY_LOST_WORKERS,
            summary=f"version {weights.version} to {len(services.engine_urls)} engines",
        )

    async def watch_engines(self, version: int) -> WatchEnginesResult | None:
        """Return when an engine has lost the weights, which may be never; None where it cannot be told.

        Raises:
            asyncio.CancelledError: the run ends.
        """
        services = self._spec.services
        try:
            watched: WatchEnginesResult = await workflow.execute_activity(
                names.WATCH_ENGINES,
                WatchEnginesRequest(
                    engine_urls=services.engine_urls,
                    engine_kind=services.engine_kind,
                    version=version,
                    poll_seconds=services.engine_poll_seconds,
                ),
                result_type=WatchEnginesResult,
                start_to_close_timeout=policies.WATCH_ENGINES_LIMIT,
                schedule_to_close_timeout=policies.WATCH_ENGINES_LIMIT,
                heartbeat_timeout=policies.WATCH_ENGINES_HEARTBEAT,
                retry_policy=policies.RETRY_WATCH,
                summary=f"{len(services.engine_urls)} engines, version {version} or newer",
            )
        except ActivityError as error:
            if is_cancelled_exception(error):
                raise asyncio.CancelledError from error
            workflow.logger.warning("engines are not watched: %s", error.cause)
            return None
        return watched

    async def await_groups(self, groups: list[int], limit: timedelta) -> list[GroupResult]:
        """Results of those of these groups that have ended, at least one, however an earlier generation of the run
        started them.

        Raises:
            ActivityError: one of them failed.
        """
        awaited: AwaitGroupsResult = await workflow.execute_activity(
            names.AWAIT_GROUPS,
            AwaitGroupsRequest(run=self._spec.run.name, groups=groups),
            result_type=AwaitGroupsResult,
            start_to_close_timeout=limit,
            schedule_to_close_timeout=limit,
            heartbeat_timeout=policies.AWAIT_GROUP_HEARTBEAT,
            retry_policy=policies.RETRY,
            summary=f"{len(groups)} groups from {groups[0]}",
        )
        return awaited.results

    async def end_sessions(self) -> None:
        """Tell the session server that the run has ended. Best effort: it notices idleness by itself."""
        try:
            await workflow.execute_activity(
                names.RELEASE_SESSIONS,
                ReleaseRequest(
                    session_url=self._spec.services.session_url, session_ids=[], ended_run=self._spec.run.name
                ),
                start_to_close_timeout=policies.RELEASE_AFTER_FAILURE,
                schedule_to_close_timeout=policies.RELEASE_AFTER_FAILURE,
                heartbeat_timeout=policies.LIGHT_HEARTBEAT,
                retry_policy=policies.RETRY,
                summary="the run has ended",
            )
        except ActivityError as error:
            if is_cancelled_exception(error):
                raise
            workflow.logger.warning("the session server was not told that the run has ended: %s", error.cause)

    async def take_survey(self, groups: list[int]) -> Survey | None:
        """Ask Temporal what the run and its groups in flight wait for, by name. Best effort."""
        try:
            survey: Survey = await workflow.execute_activity(
                names.SURVEY_GROUPS,
                SurveyRequest(run=self._spec.run.name, groups=groups),
                result_type=Survey,
                start_to_close_timeout=policies.LIGHT_START_TO_CLOSE,
                schedule_to_close_timeout=policies.LIGHT_START_TO_CLOSE * 2,
                heartbeat_timeout=policies.LIGHT_HEARTBEAT,
                retry_policy=policies.RETRY,
                summary="no progress for a while",
            )
        except ActivityError as error:
            if is_cancelled_exception(error):
                raise asyncio.CancelledError from error  # the run ends, and waits for the watchdog
            workflow.logger.warning("no survey could be taken: %s", error.cause)
            return None
        return survey
