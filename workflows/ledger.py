"""The ledger of a run: which group may start, which is ready, what was settled. Pure; it mutates one `RunState`."""

from __future__ import annotations

from collections.abc import Callable

from everroll.contracts.health import EpisodesReport
from everroll.contracts.outcomes import Cause, CauseKind
from everroll.contracts.rollout import GroupResult
from everroll.contracts.spec import RunSpec
from everroll.contracts.training import MAX_RECENT_STEPS, RunState, StepRecord, TrainResult

# Infrastructure is the abort budget's business: it pauses, where too many empty rounds fail the run.
_INFRASTRUCTURE = (CauseKind.TRANSPORT, CauseKind.TIMEOUT, CauseKind.ENGINE)
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

        `stopping`: the run ends with the step that it is in, which may still lack groups.
        """
        outstanding = len(self._state.in_flight) + len(self._state.ready) + self._num_in_training
        steps_left = min(self._spec.run.num_steps - self._state.step, 1 if stopping else self._spec.run.num_steps)
        limit = min(self._spec.rollout.max_staleness + 1, steps_left) * self._batch_size
        return outstanding < limit

    def admit(self) -> int:
        """Dispense the next prompt: the index of the group to start."""
        group = self._state.next_group
        self._state.next_group += 1
        self._state.in_flight[group] = self.weight_version
        return group

    def settle(self, result: GroupResult) -> None:
        """Take a finished group in: ready to be trained, or dropped for its cause."""
        state = self._state
        del state.in_flight[result.group]
        state.planned.pop(result.group, None)
        state.num_episodes += result.num_episodes
        state.num_sampled_tokens += result.num_sampled_tokens
        state.last_cause = result.dropped or result.last_cause or state.last_cause
        if result.dropped is not None:
            self._drop(result.dropped)
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

    def find_no_progress(self) -> str | None:
        """What to say when so many groups in a row were dropped that waiting on is pointless."""
        state = self._state
        if state.consecutive_dropped < self._spec.rollout.max_empty_rounds * self._batch_size:
            return None
        return (
            f"the last {state.consecutive_dropped} groups were all dropped (by cause: {state.dropped_groups}); "
            f"the latest: {state.last_cause}"
        )

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
        fresh = []
        for result in self._state.ready:
            oldest = self.weight_version if result.min_weight_version is None else result.min_weight_version
            staleness = self.weight_version - oldest
            if staleness <= self._spec.rollout.max_staleness:
                fresh.append(result)
                continue
            self._drop(Cause(kind=CauseKind.STALE, message=f"group {result.group} is {staleness} versions old"))
        self._state.ready = fresh

    def _drop(self, cause: Cause) -> None:
        state = self._state
        if cause.kind not in _INFRASTRUCTURE:
            state.consecutive_dropped += 1
        state.last_cause = cause
        _add(state.dropped_groups, cause.kind.value, 1)
        _add(state.pending_dropped, cause.kind.value, 1)
        if self._on_drop is not None:
            self._on_drop(cause)


def _add(counts: dict[str, int], key: str, count: int) -> None:
    counts[key] = counts.get(key, 0) + count
