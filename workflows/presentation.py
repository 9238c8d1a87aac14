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
from workflows.tables import render_table, show_count

_RUN = SearchAttributeKey.for_keyword(names.SEARCH_RUN)
_STEP = SearchAttributeKey.for_int(names.SEARCH_STEP)
_PHASE = SearchAttributeKey.for_keyword(names.SEARCH_PHASE)
_REWARD = SearchAttributeKey.for_float(names.SEARCH_REWARD)
_STEPS_SHOWN = 10
_EVALUATIONS_SHOWN = 6
_GROUPS_SHOWN = 12
_STEERINGS_SHOWN = 5


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
    """The run in words: where it stands, what it waits for, what was lost and why, the last steps."""
    since = f" since {_show_time(status.phase_since)}" if status.phase_since is not None else ""
    headline = f"**Run {status.run}**: step {status.step} of {status.num_steps}, {status.phase.value}{since}"
    parts = [
        [headline + (" (stop requested)" if status.stop_requested else "")],
        _render_pause(status),
        _render_state(status),
        _render_survey(status),
        _render_losses(status),
        _render_steps(status),
        _render_evaluations(status),
        _render_steerings(status),
    ]
    return "\n\n".join("\n".join(part) for part in parts if part)


def _render_pause(status: RunStatus) -> list[str]:
    pause = status.pause
    if pause is None:
        return []
    ending = f"goes on by itself when {pause.server} answers" if pause.server else "waits for resume"
    return [f"**Paused** since {_show_time(pause.since)}, {ending}: {pause.message}"]


def _render_state(status: RunStatus) -> list[str]:
    lines = [
        f"- weights: version {status.weight_version}",
        f"- groups: {status.groups_ready} of {status.groups_wanted} ready, "
        f"{len(status.groups_in_flight)} in flight{_list_groups(status.groups_in_flight)}",
        f"- settled: {status.trained_groups} groups trained, dropped {_list_counts(status.dropped_groups)}",
        f"- episodes: {status.num_episodes} played, unusable {_list_counts(status.unusable_episodes)}",
    ]
    return lines if status.last_cause is None else [*lines, f"- latest cause: {status.last_cause}"]


def _render_survey(status: RunStatus) -> list[str]:
    survey = status.survey
    if survey is None:
        return []
    title = f"**No progress for a while**. At {_show_time(survey.taken_at)} it waited for {survey.num_waiting} tasks:"
    return [title, "", *(_render_waiting(waiting, survey.taken_at) for waiting in survey.waiting)]


def _render_losses(status: RunStatus) -> list[str]:
    dropped, unusable = status.dropped_groups, status.unusable_episodes
    if not dropped and not unusable:
        return []
    rows = [[kind, str(dropped.get(kind, 0)), str(unusable.get(kind, 0))] for kind in sorted({*dropped, *unusable})]
    header = ["cause", "groups dropped", "episodes unusable"]
    return ["**Lost, by cause**", "", *render_table(header, rows, num_left=1)]


def _render_steps(status: RunStatus) -> list[str]:
    if not status.recent_steps:
        return []
    header = ["step", "reward", "episodes", "tokens", "dropped", "rollout", "train", "publish"]
    rows = [_list_cells(record) for record in reversed(status.recent_steps[-_STEPS_SHOWN:])]
    return ["**Latest steps** (tokens sampled; groups dropped; seconds)", "", *render_table(header, rows)]


def _list_cells(record: StepRecord) -> list[str]:
    seconds = [f"{value:.1f}" for value in record.seconds] if record.seconds else ["-"] * 3
    counts = [str(record.num_episodes), show_count(record.num_sampled_tokens), str(sum(record.dropped.values()))]
    return [str(record.step), f"{record.mean_reward:.3f}", *counts, *seconds]


def _render_evaluations(status: RunStatus) -> list[str]:
    if not status.evaluations and not status.evaluations_in_flight:
        return []
    running = [
        f"- {start.name}, version {start.version}: runs since {_show_time(start.started_at)}"
        for start in status.evaluations_in_flight
    ]
    done = [f"- {record.describe()}" for record in reversed(status.evaluations[-_EVALUATIONS_SHOWN:])]
    return ["**Evaluations**", "", *running, *done]


def _render_steerings(status: RunStatus) -> list[str]:
    if not status.steerings:
        return []
    latest = reversed(status.steerings[-_STEERINGS_SHOWN:])
    return ["**Asked of it**", "", *(f"- {_show_time(record.at)}: {record.describe()}" for record in latest)]


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
