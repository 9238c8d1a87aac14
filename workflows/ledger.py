"""The ledger of a run: which group may start, which is ready, what was settled. Pure; it mutates one `RunState`."""

from __future__ import annotations

import math
from collections.abc import Callable

from everroll.contracts.health import EpisodesReport
from everroll.contracts.names import ATTEMPTS_PER_RESUME
from everroll.contracts.outcomes import Cause, CauseKind
from everroll.contracts.rollout import GroupResult
from everroll.contracts.spec import RunSpec
from everroll.contracts.training import MAX_RECENT_STEPS, LedgerMark, RunState, StepRecord, TrainResult

# Infrastructure is the abort budget's business: it pauses, where too many empty rounds fail the run.
_INFRASTRUCTURE = (CauseKind.TRANSPORT, CauseKind.TIMEOUT, CauseKind.ENGINE)
# The run's own choice, and so no sign that it gets nowhere.
_IN_EXCESS = (CauseKind.STRAGGLER, CauseKind.SURPLUS)
MAX_GROUPS_IN_FLIGHT = 1900
"""Temporal refuses a workflow's 2,001st open child, again and again; evaluations are children too."""
MAX_STALE_REFILLS = 3
"""How often one group may be sampled again for being stale."""
# What of the trainer's metrics travels with the run's state; the rest is in <run_dir>/metrics.jsonl.
_SHOWN_METRICS = ("loss", "grad_norm", "entropy", "clip_fraction", "logprob_gap_mean", "learning_rate")


class Ledger:
    """Settles every dispensed prompt exactly once (I1) and keeps the bounds on staleness and concurrency (I5)."""

    def __init__(self, spec: RunSpec, state: RunState, on_drop: Callable[[Cause], None] | None = None) -> None:
        self._on_drop = on_drop
        self._spec = spec
        self._state = state
        self._num_in_training = 0

    @property
    def weight_version(self) -> int:
        return self._state.weights.version if self._state.weights else 0

    @property
    def _batch_size(self) -> int:
        return self._spec.rollout.groups_per_step

    def can_admit(self, stopping: bool = False) -> bool:
        """Whether another group may start: within (S + 1) x batch, and never more than the run still needs.

        While a batch is gathered, `oversample_groups` more may.
        `stopping`: the run ends with the step that it is in, which may still lack groups.
        """
        cap = min(self._spec.rollout.max_groups_in_flight or MAX_GROUPS_IN_FLIGHT, MAX_GROUPS_IN_FLIGHT)
        if len(self._state.in_flight) >= cap:
            return False
        outstanding = len(self._state.in_flight) + len(self._state.ready) + self._num_in_training
        steps_left = min(self._spec.run.num_steps - self._state.step, 1 if stopping else self._spec.run.num_steps)
        limit = min(self._spec.rollout.max_staleness + 1, steps_left) * self._batch_size
        excess = 0 if self._num_in_training or not steps_left else self._spec.rollout.oversample_groups
        return outstanding < limit + excess

    def admit(self) -> int:
        """Dispense the next prompt: the index of the group to start.

        Those that are to be played again come first.
        """
        group = self.next_to_admit
        if self._state.replay:
            self._state.replay.pop(0)
        else:
            self._state.next_group += 1
        self._state.in_flight[group] = self.weight_version
        return group

    @property
    def next_to_admit(self) -> int:
        """The group that starts next."""
        return self._state.replay[0] if self._state.replay else self._state.next_group

    def find_first_attempt(self, group: int) -> int:
        """Where a group's attempts begin, so that each time it is played it has sessions of its own."""
        per_time = self._spec.rollout.max_refills + 1
        return self._state.num_resumes * ATTEMPTS_PER_RESUME + self._state.resampled.get(group, 0) * per_time

    def use(self, spec: RunSpec) -> None:
        """Go by other settings from now on: admission, and what is stale."""
        self._spec = spec
        self._drop_stale()

    def settle(self, result: GroupResult, *, recorded: bool = True) -> None:
        """Take a finished group in: ready to be trained, or dropped for its cause.

        `recorded`: the group itself has written to the run directory how it was settled.
        """
        state = self._state
        del state.in_flight[result.group]
        state.num_episodes += result.num_episodes
        state.num_sampled_tokens += result.num_sampled_tokens
        state.last_cause = result.dropped or result.last_cause or state.last_cause
        if result.dropped is not None:
            self._drop(result, result.dropped, recorded=recorded)
            return
        state.ready = sorted([*state.ready, result], key=lambda ready: ready.group)
        self._drop_stale()
        if result in state.ready:
            state.consecutive_dropped = 0

    def note_report(self, report: EpisodesReport) -> None:
        """Count aborted and failed episodes as they are reported."""
        counts = dict(report.failed)
        for abort in report.aborts:
            _add(counts, abort.cause.kind.value, abort.count)
            self._state.last_cause = abort.cause
        for kind, count in counts.items():
            _add(self._state.unusable_episodes, kind, count)
            _add(self._state.pending_unusable, kind, count)

    def is_behind(self, result: GroupResult) -> bool:
        """Whether an engine served this group older weights than were out when it started: it lost them."""
        started_at = self._state.in_flight[result.group]
        return result.min_weight_version is not None and result.min_weight_version < started_at

    def has_batch(self) -> bool:
        """Whether enough groups are ready."""
        return len(self._state.ready) >= self._batch_size

    def has_share(self) -> bool:
        """Whether so much of a batch is ready that the other groups of its step count as stragglers."""
        return len(self._state.ready) >= math.ceil(self._spec.rollout.stragglers.after_share * self._batch_size)

    def find_stragglers(self) -> list[int]:
        """Groups that were started for the next batch and still play: the lowest-numbered that are not settled."""
        num_started = self._batch_size + self._spec.rollout.oversample_groups
        started = sorted([*self._state.in_flight, *(result.group for result in self._state.ready)])[:num_started]
        return [group for group in started if group in self._state.in_flight]

    def drop_surplus(self) -> None:
        """The run needs no further group: those that are ready, or were to be played again, are dropped."""
        for group in sorted([*(result.group for result in self._state.ready), *self._state.replay]):
            self.drop_ready(group, Cause(kind=CauseKind.SURPLUS, message=f"the run completed without group {group}"))

    def find_no_progress(self) -> str | None:
        """What to say when so many groups in a row were dropped that waiting on is pointless."""
        state = self._state
        if state.consecutive_dropped < self._spec.rollout.max_empty_rounds * self._batch_size:
            return None
        return (
            f"the last {state.consecutive_dropped} groups were all dropped (by cause: {state.dropped_groups}); "
            f"the latest: {state.last_cause}"
        )

    def drop_ready(self, group: int, cause: Cause) -> None:
        """Drop a group that is ready, or that waits to be played again."""
        state = self._state
        result = next((ready for ready in state.ready if ready.group == group), GroupResult(group=group))
        state.ready = [ready for ready in state.ready if ready.group != group]
        state.replay = [waiting for waiting in state.replay if waiting != group]
        self._drop(result, cause, recorded=False)

    def take_mark(self) -> LedgerMark:
        """Where the ledger stands, for the step whose batch was just taken."""
        mark = LedgerMark(next_group=self._state.next_group, dropped=sorted(self._state.unmarked_dropped))
        self._state.unmarked_dropped = []
        return mark

    def take_batch(self) -> list[GroupResult]:
        """The lowest-numbered ready groups, ordered by group index (I3)."""
        batch = self._state.ready[: self._batch_size]
        self._state.ready = self._state.ready[self._batch_size :]
        self._num_in_training = len(batch)
        return batch

    def finish_step(
        self,
        batch: list[GroupResult],
        trained: TrainResult,
        *,
        rollout_seconds: float,
        train_seconds: float,
        publish_seconds: float,
    ) -> None:
        """Settle a batch as trained; the new version is out."""
        state = self._state
        state.step = trained.step
        state.weights = trained.weights
        state.trained_groups += len(batch)
        self._num_in_training = 0
        for result in batch:
            self._forget(result.group)
        rewards = [result.mean_reward for result in batch if result.mean_reward is not None]
        record = StepRecord(
            step=trained.step,
            weight_version=trained.weights.version,
            groups=[result.group for result in batch],
            mean_reward=sum(rewards) / len(rewards),
            num_episodes=sum(result.num_episodes for result in batch),
            num_tokens=sum(result.num_tokens for result in batch),
            num_sampled_tokens=sum(result.num_sampled_tokens for result in batch),
            dropped=state.pending_dropped,
            unusable=state.pending_unusable,
            rollout_seconds=rollout_seconds,
            train_seconds=train_seconds,
            publish_seconds=publish_seconds,
            metrics={name: trained.metrics[name] for name in _SHOWN_METRICS if name in trained.metrics},
        )
        self._drop_stale()
        state.recent_steps = [*state.recent_steps, record][-MAX_RECENT_STEPS:]
        state.pending_dropped, state.pending_unusable = {}, {}

    def _drop_stale(self) -> None:
        """Drop what is too old to be trained, or have it played again, as the policy says."""
        fresh = []
        for result in self._state.ready:
            oldest = self.weight_version if result.min_weight_version is None else result.min_weight_version
            staleness = self.weight_version - oldest
            if staleness <= self._spec.rollout.max_staleness:
                fresh.append(result)
                continue
            cause = Cause(kind=CauseKind.STALE, message=f"group {result.group} is {staleness} versions old")
            if self._may_sample_again(result.group):
                self._sample_again(result.group, cause)
            else:
                self._drop(result, cause, recorded=False)
        self._state.ready = fresh

    def _may_sample_again(self, group: int) -> bool:
        policy, times = self._spec.rollout.on_stale, self._state.resampled.get(group, 0)
        fits = (times + 2) * (self._spec.rollout.max_refills + 1) <= ATTEMPTS_PER_RESUME
        return policy == "refill" and times < MAX_STALE_REFILLS and fits

    def _sample_again(self, group: int, cause: Cause) -> None:
        state = self._state
        state.resampled[group] = state.resampled.get(group, 0) + 1
        state.replay = sorted([*state.replay, group])
        state.last_cause = cause

    def _forget(self, group: int) -> None:
        """A group is settled for good."""
        self._state.planned.pop(group, None)
        self._state.resampled.pop(group, None)

    def _drop(self, result: GroupResult, cause: Cause, *, recorded: bool) -> None:
        state = self._state
        self._forget(result.group)
        state.unmarked_dropped.append(result.group)
        if not recorded:
            state.unrecorded.append(result.model_copy(update={"manifest": None, "dropped": cause, "report": None}))
        if cause.kind not in (*_INFRASTRUCTURE, *_IN_EXCESS):
            state.consecutive_dropped += 1
        state.last_cause = cause
        _add(state.dropped_groups, cause.kind.value, 1)
        _add(state.pending_dropped, cause.kind.value, 1)
        if self._on_drop is not None:
            self._on_drop(cause)


def _add(counts: dict[str, int], key: str, count: int) -> None:
    counts[key] = counts.get(key, 0) + count
