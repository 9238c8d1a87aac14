"""`Evaluation`: one weight version on one set of prompts.

Its episodes are those of training in all but name: the same activities, the same outcomes, the same refills. They come
at a lower priority, a bounded number at a time, and what infrastructure does to them is this workflow's business alone:
the run hears of the result only.
"""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import NoReturn

from temporalio import workflow
from temporalio.exceptions import ActivityError, ApplicationError, FailureError, is_cancelled_exception

with workflow.unsafe.imports_passed_through():
    from everroll.contracts import names
    from everroll.contracts.evaluation import EvaluationProgress, EvaluationRecord, EvaluationRequest
    from everroll.contracts.health import HoldRequest
    from everroll.contracts.outcomes import CauseKind, SampleStatus
    from everroll.contracts.rollout import EpisodeKey, EpisodeOutcome
    from workflows import policies
    from workflows.evaluation_calls import EvaluationCalls

_PART = 100
"""Outcomes stored together: about 60 kB."""


@workflow.defn(name=names.EVALUATION, failure_exception_types=policies.FAILURE_EXCEPTION_TYPES)
class Evaluation:
    """Plays every prompt k times and writes the result down."""

    @workflow.init
    def __init__(self, request: EvaluationRequest) -> None:
        self.request = request
        self.calls = EvaluationCalls(request)
        self.hold_request = request.hold
        self.progress = request.progress or EvaluationProgress(
            started_at=workflow.time(), remaining_seconds=request.eval.timeout_seconds
        )
        self.unstored: list[EpisodeOutcome] = []
        self.storing = False

    @workflow.run
    async def run(self, request: EvaluationRequest) -> EvaluationRecord:
        self._show("reads its prompts")
        try:
            return await self._evaluate()
        except FailureError as error:
            if not is_cancelled_exception(error):
                await self._record_failure(error)
            raise

    async def _evaluate(self) -> EvaluationRecord:
        progress = self.progress
        if progress.dataset is None:
            if self.request.weights_path is not None:
                await self.calls.publish(self.request.weights_path)
            progress.dataset = await self.calls.open_prompts()
            progress.num_prompts = min(
                progress.dataset.num_prompts, self.request.eval.max_prompts or progress.dataset.num_prompts
            )
        complete = True
        try:
            await self._play_within()
        except TimeoutError:
            complete = False
        await self._store_outcomes()
        if complete and self._is_work_left():
            self._continue_as_new()
        record = await self.calls.finish(self._build_record(complete), progress.parts)
        workflow.set_current_details(f"**Evaluation** {record.describe()}")
        return record

    @workflow.signal(name=names.SIGNAL_HOLD, description="Start no new episode while true")
    def hold(self, request: HoldRequest) -> None:
        if request.number > self.hold_request.number:
            self.hold_request = request

    @property
    def held(self) -> bool:
        return self.hold_request.held

    @property
    def _num_wanted(self) -> int:
        return self.progress.num_prompts * self.request.eval.episodes_per_prompt

    def _is_work_left(self) -> bool:
        return bool(self.progress.again) or self.progress.next_episode < self._num_wanted

    async def _play_within(self) -> None:
        """Play what is left, or until the history grows long. Time on hold does not count, but is bounded too.

        Raises:
            TimeoutError: the deadline has passed.
        """
        playing = asyncio.create_task(self._play())
        try:
            while not playing.done():
                if self.held:
                    limit = self.request.rollout.abort_budget.max_pause_seconds
                    await workflow.wait_condition(lambda: playing.done() or not self.held, timeout=limit)
                    continue
                since, remaining = workflow.time(), self.progress.remaining_seconds
                try:
                    await workflow.wait_condition(lambda: playing.done() or self.held, timeout=max(remaining, 0.0))
                finally:
                    self.progress.remaining_seconds = remaining - (workflow.time() - since)
            await playing
        finally:
            playing.cancel()
            await asyncio.gather(playing, return_exceptions=True)

    async def _play(self) -> None:
        """In so many lanes, each an episode after the other. The first terminal failure ends the evaluation."""
        lanes = [
            asyncio.create_task(self._play_lane()) for _ in range(min(self.request.eval.concurrency, self._num_wanted))
        ]
        try:
            await asyncio.gather(*lanes)
        finally:
            for lane in lanes:
                lane.cancel()

    async def _play_lane(self) -> None:
        while not workflow.info().is_continue_as_new_suggested():
            await self._wait_while_held()
            key = self._take_next()
            if key is None:
                return
            outcome = await self._play_until_settled(key)
            if outcome is None:
                return
            self._settle(outcome)
            if len(self.unstored) >= _PART:
                await self._store_outcomes()
            self._show("plays")

    async def _wait_while_held(self) -> None:
        limit = self.request.rollout.abort_budget.max_pause_seconds
        await workflow.wait_condition(lambda: not self.held, timeout=limit)

    def _take_next(self) -> EpisodeKey | None:
        """Every prompt's first episode, then every prompt's second: what a deadline leaves is balanced."""
        progress = self.progress
        if progress.again:
            return progress.again.pop(0)
        if progress.next_episode >= self._num_wanted:
            return None
        member, prompt = divmod(progress.next_episode, progress.num_prompts)
        progress.next_episode += 1
        return EpisodeKey(run=self.request.run, group=prompt, member=member, evaluation=self.request.label)

    async def _play_until_settled(self, key: EpisodeKey) -> EpisodeOutcome | None:
        """Until it has a verdict or no attempt is left; None where the history grows long first."""
        rollout = self.request.rollout
        last_attempt = rollout.max_refills if rollout.on_unusable == "refill" else 0
        while True:
            outcome = await self.calls.play(key, self.progress.dataset)
            if not outcome.is_trainable:
                self._count_unusable(outcome)
            if outcome.is_trainable or key.attempt >= last_attempt:
                return outcome
            if outcome.status is SampleStatus.ABORTED:
                backoff = policies.refill_backoff_seconds(rollout.refill_backoff_seconds, key.attempt)
                await asyncio.sleep(backoff)
            key = key.model_copy(update={"attempt": key.attempt + 1})
            if workflow.info().is_continue_as_new_suggested():
                self.progress.again.append(key)
                return None
            await self._wait_while_held()

    def _count_unusable(self, outcome: EpisodeOutcome) -> None:
        if outcome.cause is not None:
            _add(self.progress.unusable, outcome.cause.kind.value, 1)
            self.progress.last_cause = outcome.cause

    def _settle(self, outcome: EpisodeOutcome) -> None:
        progress = self.progress
        progress.num_settled += 1
        if outcome.is_trainable and outcome.reward is not None:
            progress.num_verdicts += 1
            progress.sum_rewards += outcome.reward
        else:
            _add(progress.lost, outcome.cause.kind.value if outcome.cause else CauseKind.NO_REWARD.value, 1)
        self.unstored.append(outcome)

    async def _store_outcomes(self) -> None:
        """Write down what came in; from then on nobody asks the sessions for anything."""
        if self.storing:
            return
        self.storing = True
        try:
            while outcomes := self.unstored[:_PART]:
                part = await self.calls.store(outcomes)
                # Only now, so that what a deadline interrupts is stored again.
                self.progress.parts.append(part)
                del self.unstored[: len(outcomes)]
                await self.calls.release(outcomes)
        finally:
            self.storing = False

    def _continue_as_new(self) -> NoReturn:
        update = {"progress": self.progress, "hold": self.hold_request, "weights_path": None}
        workflow.continue_as_new(self.request.model_copy(update=update))

    def _build_record(self, complete: bool) -> EvaluationRecord:
        """All but the numbers, which are computed where the outcomes lie."""
        progress, request = self.progress, self.request
        lost = dict(progress.lost)
        if not complete:
            _add(lost, CauseKind.DEADLINE.value, self._num_wanted - progress.num_settled)
        return EvaluationRecord(
            name=request.name,
            version=request.version,
            requested=request.requested,
            complete=complete,
            fingerprint=progress.dataset.fingerprint if progress.dataset else "",
            num_prompts=progress.num_prompts,
            episodes_per_prompt=request.eval.episodes_per_prompt,
            lost=lost,
            unusable=progress.unusable,
            last_cause=progress.last_cause,
            pass_reward=request.eval.pass_reward,
            started_at=progress.started_at,
            duration_seconds=workflow.time() - progress.started_at,
        )

    async def _record_failure(self, error: FailureError) -> None:
        """Best effort: it fails all the same, and says why on its own page."""
        record = self._build_record(complete=False).model_copy(update={"failure": describe_root(error)})
        workflow.set_current_details(f"**Evaluation** {record.describe()}")
        try:
            await self.calls.finish(record, [])
        except ActivityError as trouble:
            workflow.logger.warning("the failure of %s was not written down: %s", self.request.workflow_id, trouble)

    def _show(self, stage: str) -> None:
        progress = self.progress
        mean = f"{progress.sum_rewards / progress.num_verdicts:.3f}" if progress.num_verdicts else "none yet"
        workflow.set_current_details(
            f"**Evaluation {self.request.name}** of weights {self.request.version}: {stage}"
            f"{' (on hold)' if self.held else ''}\n\n"
            f"- episodes: {progress.num_settled} of {self._num_wanted}\n- mean reward: {mean}\n"
            f"- unusable by cause: {progress.unusable or 'none'}"
        )


def describe_root(error: BaseException) -> str:
    """The text of the failure at the root."""
    root = error
    while isinstance(root, FailureError) and root.cause is not None and not isinstance(root, ApplicationError):
        root = root.cause
    return root.message if isinstance(root, FailureError) else str(root)


def limit_evaluation(request: EvaluationRequest) -> timedelta:
    """Longest life of an evaluation: its deadline, the longest time on hold, and what comes before and after."""
    seconds = request.eval.timeout_seconds + request.rollout.abort_budget.max_pause_seconds
    return timedelta(seconds=seconds + request.services.publish_timeout_seconds) + policies.EVALUATION_GRACE


def _add(counts: dict[str, int], key: str, count: int) -> None:
    counts[key] = counts.get(key, 0) + count
