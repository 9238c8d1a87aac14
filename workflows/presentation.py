"""What a person sees of a run in the web UI: current details in Markdown, and search attributes."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from temporalio.common import (
    SearchAttributeKey,
    SearchAttributePair,
    SearchAttributeUpdate,
    TypedSearchAttributes,
)

from everroll.contracts import names
from everroll.contracts.health import Waiting
from everroll.contracts.training import Phase, RunStatus, StepRecord

_RUN = SearchAttributeKey.for_keyword(names.SEARCH_RUN)
_STEP = SearchAttributeKey.for_int(names.SEARCH_STEP)
_PHASE = SearchAttributeKey.for_keyword(names.SEARCH_PHASE)
_REWARD = SearchAttributeKey.for_float(names.SEARCH_REWARD)
_STEPS_SHOWN = 10
_EVALUATIONS_SHOWN = 6
_GROUPS_SHOWN = 12


def build_search_attributes(run: str, step: int) -> TypedSearchAttributes:
    """Of a group: its run, and the step at which it was started."""
    return TypedSearchAttributes([SearchAttributePair(_RUN, run), SearchAttributePair(_STEP, step)])


def update_search_attributes(
    run: str, step: int, phase: Phase, reward: float | None
) -> list[SearchAttributeUpdate[Any]]:
    """Of a run: where it stands."""
    updates: list[SearchAttributeUpdate[Any]] = [
        _RUN.value_set(run),
        _STEP.value_set(step),
        _PHASE.value_set(phase.value),
    ]
    return updates if reward is None else [*updates, _REWARD.value_set(reward)]


def render_details(status: RunStatus) -> str:
    """The run in words: where it stands, what was lost and why, the last steps."""
    lines = [
        f"**Run {status.run}**: step {status.step} of {status.num_steps}, {status.phase.value}"
        + (" (stop requested)" if status.stop_requested else ""),
        "",
        f"- weights: version {status.weight_version}",
        f"- groups: {status.groups_ready} of {status.groups_wanted} ready, "
        f"{len(status.groups_in_flight)} in flight{_list_groups(status.groups_in_flight)}",
        f"- settled: {status.trained_groups} groups trained, dropped {_list_counts(status.dropped_groups)}",
        f"- episodes: {status.num_episodes} played, unusable {_list_counts(status.unusable_episodes)}",
    ]
    if status.last_cause is not None:
        lines.append(f"- latest cause: {status.last_cause}")
    if status.pause is not None:
        ending = f"goes on by itself when {status.pause.server} answers" if status.pause.server else "waits for resume"
        lines.insert(1, f"\n**Paused** since {_show_time(status.pause.since)}, {ending}: {status.pause.message}")
    if status.survey is not None:
        lines += ["", f"No progress for a while. Waiting for {status.survey.num_waiting} tasks:", ""]
        lines += [_render_waiting(waiting, status.survey.taken_at) for waiting in status.survey.waiting]
    if status.recent_steps:
        lines += ["", "Latest steps:", ""]
        lines += [_render_step(record) for record in reversed(status.recent_steps[-_STEPS_SHOWN:])]
    if status.evaluations or status.evaluations_in_flight:
        lines += ["", "Evaluations:", ""]
        lines += [
            f"- {start.name}, version {start.version}: runs since {_show_time(start.started_at)}"
            for start in status.evaluations_in_flight
        ]
        lines += [f"- {record.describe()}" for record in reversed(status.evaluations[-_EVALUATIONS_SHOWN:])]
    return "\n".join(lines)


def _render_step(record: StepRecord) -> str:
    # A list, because the web UI runs the cells of a Markdown table together.
    return (
        f"- step {record.step}: reward {record.mean_reward:.3f}, {record.num_episodes} episodes, "
        f"{record.num_sampled_tokens} tokens sampled; rollout {record.rollout_seconds:.1f} s, "
        f"train {record.train_seconds:.1f} s, publish {record.publish_seconds:.1f} s"
    )


def _render_waiting(waiting: Waiting, now: float) -> str:
    text = f"- {waiting.subject}: {waiting.stage}, for {now - waiting.since:.0f} s"
    if waiting.attempt > 1:
        text += f", attempt {waiting.attempt}"
    return f"{text}; last failure: {waiting.last_failure}" if waiting.last_failure else text


def _show_time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def _list_groups(groups: list[int]) -> str:
    if not groups:
        return ""
    more = f", and {len(groups) - _GROUPS_SHOWN} more" if len(groups) > _GROUPS_SHOWN else ""
    return f" ({', '.join(map(str, groups[:_GROUPS_SHOWN]))}{more})"


def _list_counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{count} {cause}" for cause, count in sorted(counts.items())) or "none"
