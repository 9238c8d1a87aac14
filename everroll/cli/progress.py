"""What a followed run shows, as plain values and text: rewards by step, tokens per second, aborts by cause.

No terminal and no server here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime

from everroll.client import RunView
from everroll.contracts.health import Waiting
from everroll.contracts.training import RunStatus, StepRecord

_BLOCKS = "▁▂▃▄▅▆▇█"
_RATE_WINDOW_SECONDS = 20.0
_MAX_WAITING_SHOWN = 3


class TokenRate:
    """Sampled tokens per second over the last 20 seconds of looking."""

    def __init__(self) -> None:
        self._points: deque[tuple[float, int]] = deque()

    def add(self, now_seconds: float, num_tokens: int) -> None:
        """Note a count of all tokens so far; a smaller one than before starts anew."""
        if self._points and num_tokens < self._points[-1][1]:
            self._points.clear()
        self._points.append((now_seconds, num_tokens))
        while len(self._points) > 2 and now_seconds - self._points[1][0] > _RATE_WINDOW_SECONDS:
            self._points.popleft()

    def compute(self) -> float | None:
        """None until two looks lie at least a second apart."""
        if not self._points:
            return None
        seconds = self._points[-1][0] - self._points[0][0]
        return (self._points[-1][1] - self._points[0][1]) / seconds if seconds >= 1 else None


@dataclass
class Progress:
    """Everything seen of one run while following it."""

    steps: dict[int, StepRecord] = field(default_factory=dict)
    rate: TokenRate = field(default_factory=TokenRate)
    view: RunView | None = None
    status: RunStatus | None = None
    """The latest status that a worker gave; kept while none answers."""

    def add(self, now_seconds: float, view: RunView) -> None:
        self.view = view
        if view.status is None:
            return
        self.status = view.status
        self.rate.add(now_seconds, view.status.num_sampled_tokens)
        self.steps.update({record.step: record for record in view.status.recent_steps})

    @property
    def ordered_steps(self) -> list[StepRecord]:
        return [self.steps[step] for step in sorted(self.steps)]

    def describe(self) -> str:
        """One line: where the run stands."""
        if self.view is None or self.status is None:
            return "waiting for a worker to take the run"
        status = self.status
        parts = [
            f"step {status.step}/{status.num_steps}",
            status.phase.value,
            describe_groups(status),
            f"reward {format_reward(status.mean_reward)}",
            f"{format_rate(self.rate.compute())} tokens/s",
            f"aborts {format_counts(status.unusable_episodes)}",
        ]
        return "  ".join(parts)


def describe_groups(status: RunStatus) -> str:
    """Where the groups are: playing, ready for the next batch, settled."""
    num_dropped = sum(status.dropped_groups.values())
    settled = f"{status.trained_groups} trained" + (f", {num_dropped} dropped" if num_dropped else "")
    return (
        f"groups {len(status.groups_in_flight)} in flight, {status.groups_ready} of {status.groups_wanted} ready, "
        f"{settled}"
    )


def describe_indexed(view: RunView) -> str | None:
    """One line from Temporal's own record, for a run whose workers do not answer."""
    indexed = view.indexed
    if indexed is None or indexed.step is None:
        return None
    reward = format_reward(indexed.reward)
    return f"by Temporal's record: step {indexed.step}, {indexed.phase or 'no phase'}, reward {reward}"


def list_attention(view: RunView) -> list[str]:
    """What a person should know now: that no worker answers, why the run pauses, what it waits for and since when."""
    lines = [view.status_error] if view.status_error else []
    status = view.status
    if status is not None and status.pause is not None:
        lines.append(f"paused since {format_time(status.pause.since)}: {status.pause.message}")
    return lines + _list_waiting(view)


def list_evaluations(view: RunView) -> list[str]:
    """The latest evaluations, and those that run."""
    if view.status is None:
        return [f"evaluation {record.describe()}" for record in view.result.evaluations] if view.result else []
    running = [
        f"evaluation {start.name}, version {start.version}: runs since {format_time(start.started_at)}"
        for start in view.status.evaluations_in_flight
    ]
    return [*(f"evaluation {record.describe()}" for record in view.status.evaluations), *running]


def _list_waiting(view: RunView) -> list[str]:
    """What is stuck by a survey of this moment; by the run's own, which it takes when it does not get on, all."""
    own = view.status.survey if view.status is not None else None
    survey = view.survey or own
    if survey is None:
        return []
    waiting = [item for item in survey.waiting if item.stuck or own is not None]
    shown = waiting[:_MAX_WAITING_SHOWN]
    lines = [f"waits for {item.subject} since {format_time(item.since)}: {_describe_waiting(item)}" for item in shown]
    num_more = survey.num_waiting - len(shown) if own is not None else len(waiting) - len(shown)
    return [*lines, f"and {num_more} more"] if shown and num_more > 0 else lines


def _describe_waiting(item: Waiting) -> str:
    text = item.stage if item.attempt <= 1 else f"{item.stage}, attempt {item.attempt}"
    return f"{text}; last failure: {item.last_failure}" if item.last_failure else text


def format_time(unix_seconds: float) -> str:
    """Time of day where the person is."""
    return f"{datetime.fromtimestamp(unix_seconds, UTC).astimezone():%H:%M:%S}"


def format_reward(reward: float | None) -> str:
    return "-" if reward is None else f"{reward:.3f}"


def format_rate(rate: float | None) -> str:
    return "-" if rate is None else f"{rate:,.0f}"


def format_counts(counts: Mapping[str, int]) -> str:
    """`3 (timeout 1, transport 2)`, or `0`."""
    total = sum(counts.values())
    if not total:
        return "0"
    return f"{total} ({', '.join(f'{kind} {count}' for kind, count in sorted(counts.items()) if count)})"


def draw_sparkline(values: Sequence[float], low: float, high: float) -> str:
    """One character a value, scaled to low..high; values beyond are drawn at the end of the scale."""
    span = (high - low) or 1.0
    levels = (min(max((value - low) / span, 0.0), 1.0) for value in values)
    return "".join(_BLOCKS[round(level * (len(_BLOCKS) - 1))] for level in levels)


def draw_bar(value: float, high: float, width: int) -> str:
    """A horizontal bar for a value between 0 and `high`."""
    return "█" * round(width * min(max(value / high, 0.0), 1.0)) if high > 0 else ""


def reward_scale(steps: Sequence[StepRecord]) -> tuple[float, float]:
    """Range to draw rewards in: 0 to 1, widened by rewards beyond."""
    rewards = [record.mean_reward for record in steps]
    return min([0.0, *rewards]), max([1.0, *rewards])
