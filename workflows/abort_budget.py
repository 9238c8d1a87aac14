"""The abort budget: when infrastructure failures are no longer routine. Pure; it mutates one `BudgetState`."""

from __future__ import annotations

from datetime import UTC, datetime

from everroll.contracts.health import AbortSummary, BudgetState, EpisodesReport, ServerTrouble
from everroll.contracts.spec import AbortBudgetSpec

_ABORTED, _COLLECTED = "a", "c"


class AbortBudget:
    """Counts over a sliding window of episodes, and over time for each server."""

    def __init__(self, spec: AbortBudgetSpec, state: BudgetState) -> None:
        self._spec = spec
        self._state = state

    def add(self, report: EpisodesReport) -> None:
        """Take a group's report in. A success clears every server: with it, the whole path was walked."""
        if report.num_collected:
            self._state.troubles = []
            self.note_success()
        for abort in report.aborts:
            self._blame(abort)
        num_aborted = sum(abort.count for abort in report.aborts)
        window = self._state.window + _COLLECTED * report.num_collected + _ABORTED * num_aborted
        self._state.window = window[-self._spec.window :]

    def find_excess(self) -> ServerTrouble | None:
        """The server to blame when the budget is exceeded."""
        troubles = self._state.troubles
        if not troubles:
            return None
        worst = max(troubles, key=lambda trouble: trouble.count)
        if self._state.window.count(_ABORTED) > self._spec.max_share * self._spec.window:
            return worst
        return next((t for t in troubles if t.server and t.last_at - t.first_at >= self._spec.dead_seconds), None)

    def describe(self, trouble: ServerTrouble) -> str:
        """Server, cause, first and last occurrence, and count, in words."""
        num_aborted = self._state.window.count(_ABORTED)
        return (
            f"abort budget exceeded: {num_aborted} of the last {len(self._state.window)} episodes were aborted. "
            f"{trouble.server or 'No server'} is named by {trouble.count} of them without a success in between, "
            f"{_describe_times(trouble)}"
        )

    def describe_relapses(self) -> str:
        """What to add when pauses follow each other without a success in between; empty otherwise."""
        state = self._state
        if not state.relapses or state.paused_at is None:
            return ""
        return (
            f". Since {_show_time(state.paused_at)} it has answered its probe {state.relapses} times and not worked "
            f"all the same: the run waits longer each time before it tries again"
        )

    def note_pause(self, now: float) -> None:
        """The budget has paused the run."""
        self._state.paused_at = self._state.paused_at or now

    def note_success(self) -> None:
        """Something worked, or a person says that it will: the next pause is the first of its kind."""
        self._state.relapses = 0
        self._state.paused_at = None

    def reset(self) -> None:
        """Start counting anew, after a pause."""
        self._state.window = ""
        self._state.troubles = []

    def _blame(self, abort: AbortSummary) -> None:
        known = next((t for t in self._state.troubles if t.server == abort.cause.server), None)
        if known is None:
            known = ServerTrouble(server=abort.cause.server, cause=abort.cause, first_at=abort.first_at)
            self._state.troubles.append(known)
        known.cause = abort.cause
        known.count += abort.count
        known.first_at = min(known.first_at, abort.first_at)
        known.last_at = max(known.last_at, abort.last_at)


def describe_trouble(trouble: ServerTrouble) -> str:
    """A server that did not answer: which, how often, first and last occurrence, and the latest cause."""
    return f"{trouble.server or 'an engine'} did not answer, {trouble.count} times in a row, {_describe_times(trouble)}"


def _describe_times(trouble: ServerTrouble) -> str:
    return (
        f"first at {_show_time(trouble.first_at)}, last at {_show_time(trouble.last_at)}; the latest: {trouble.cause}"
    )


def _show_time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
