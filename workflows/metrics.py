"""Counters and gauges of a run, for Prometheus (workers export them; see docs/operations.md). Safe on replay."""

from __future__ import annotations

from temporalio import workflow

with workflow.unsafe.imports_passed_through():
    from everroll.contracts.health import EpisodesReport
    from everroll.contracts.outcomes import Cause
    from everroll.contracts.rollout import GroupResult
    from everroll.contracts.training import RunStatus


class RunMetrics:
    """Metrics of one run; every series carries its name."""

    def __init__(self, run: str) -> None:
        meter = workflow.metric_meter().with_additional_attributes({"run": run})
        self._groups = meter.create_counter("everroll_groups_settled", "Groups, by fate and cause")
        self._episodes = meter.create_counter("everroll_episodes_played", "Episodes played, refills included")
        self._unusable = meter.create_counter("everroll_episodes_unusable", "Aborted and failed episodes, by cause")
        self._tokens = meter.create_counter("everroll_sampled_tokens", "Tokens sampled in collected episodes")
        self._step = meter.create_gauge("everroll_step", "Optimizer steps applied and published")
        self._reward = meter.create_gauge_float("everroll_reward", "Mean reward of the last step")
        self._evaluation = meter.create_gauge_float("everroll_evaluation_reward", "Mean reward of the last evaluation")
        self._in_flight = meter.create_gauge("everroll_groups_in_flight", "Groups started and not settled")
        self._paused = meter.create_gauge("everroll_paused", "1 while the run is paused")

    def count_drop(self, cause: Cause) -> None:
        self._groups.add(1, {"fate": "dropped", "cause": cause.kind.value})

    def count_trained(self, num_groups: int) -> None:
        self._groups.add(num_groups, {"fate": "trained", "cause": ""})

    def count_group(self, result: GroupResult) -> None:
        self._episodes.add(result.num_episodes)
        self._tokens.add(result.num_sampled_tokens)

    def count_report(self, report: EpisodesReport) -> None:
        for kind, count in report.failed.items():
            self._unusable.add(count, {"cause": kind})
        for abort in report.aborts:
            self._unusable.add(abort.count, {"cause": abort.cause.kind.value})

    def show(self, status: RunStatus) -> None:
        self._step.set(status.step)
        self._in_flight.set(len(status.groups_in_flight))
        self._paused.set(0 if status.pause is None else 1)
        for record in status.evaluations:  # oldest first
            if record.mean_reward is not None:
                self._evaluation.set(record.mean_reward.value, {"set": record.name})
        if status.mean_reward is not None:
            self._reward.set(status.mean_reward)
