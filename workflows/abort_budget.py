"""The abort budget: when infrastructure failures are no longer routine. Pure; it mutates one `BudgetState`."""

from __future__ import annotations

from datetime import UTC, datetime
from itertools import count

from everroll.contracts.health import AbortSummary, BudgetState, EpisodesReport, ServerTrouble
from everroll.contracts.spec import AbortBudgetSpec

_COLLECTED = "c"
_FIRST_LETTER = 0x100
"""Letters of servers begin beyond those of ASCII."""


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
        window = self._state.window + _COLLECTED * report.num_collected
        for abort in report.aborts:
            _count(_find_or_add(self._state.troubles, abort), abort)
            window += self._find_letter(abort) * abort.count
        self._state.window = window[-self._spec.window :]
        for letter in list(self._state.blamed):
            self._state.blamed[letter].count = self._state.window.count(letter)
            if not self._state.blamed[letter].count:
                del self._state.blamed[letter]

    def find_excess(self) -> ServerTrouble | None:
        """The server to blame when the budget is exceeded: the worst of the window, or one that has been dead for long.

        Never right after a success, whatever came before.
        """
        troubles = self._state.troubles
        if not troubles:
            return None
        if self._is_share_exceeded:
            return max(self._state.blamed.values(), key=lambda trouble: trouble.count)
        return next((t for t in troubles if t.server and t.last_at - t.first_at >= self._spec.dead_seconds), None)

    def describe(self, trouble: ServerTrouble) -> str:
        """Server, cause, first and last occurrence, and count, in words."""
        named = f"{trouble.server or 'No server'} is named by {trouble.count} of them"
        if not self._is_share_exceeded:
            named += " without a success in between"
        return (
            f"abort budget exceeded: {self._num_aborted} of the last {len(self._state.window)} episodes were aborted. "
            f"{named}, {_describe_times(trouble)}"
        )

    @property
    def _num_aborted(self) -> int:
        return len(self._state.window) - self._state.window.count(_COLLECTED)

    @property
    def _is_share_exceeded(self) -> bool:
        return bool(self._state.blamed) and self._num_aborted > self._spec.max_share * self._spec.window

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
        self._state.blamed = {}
        self._state.troubles = []

    def _find_letter(self, abort: AbortSummary) -> str:
        """The letter of the server that an abort blames, which is known from now on."""
        blamed = self._state.blamed
        letter = next((known for known, trouble in blamed.items() if trouble.server == abort.cause.server), None)
        if letter is None:
            letter = next(letter for letter in map(chr, count(_FIRST_LETTER)) if letter not in blamed)
            blamed[letter] = _build_trouble(abort)
        _count(blamed[letter], abort)
        return letter


def _find_or_add(troubles: list[ServerTrouble], abort: AbortSummary) -> ServerTrouble:
    known = next((trouble for trouble in troubles if trouble.server == abort.cause.server), None)
    if known is None:
        known = _build_trouble(abort)
        troubles.append(known)
    return known


def _build_trouble(abort: AbortSummary) -> ServerTrouble:
    """None counted yet."""
    return ServerTrouble(server=abort.cause.server, cause=abort.cause, first_at=abort.first_at)


def _count(trouble: ServerTrouble, abort: AbortSummary) -> None:
    trouble.cause = abort.cause
    trouble.count += abort.count
    trouble.first_at = min(trouble.first_at, abort.first_at)
    trouble.last_at = max(trouble.last_at, abort.last_at)


def describe_trouble(trouble: ServerTrouble) -> str:
    """A server that did not answer: which, how often, first and last occurrence, and the latest cause."""
    return f"{trouble.server or 'an engine'} did not answer, {trouble.count} times in a row, {_describe_times(trouble)}"


def _describe_times(trouble: ServerTrouble) -> str:
    return (
        f"first at {_show_time(trouble.first_at)}, last at {_show_time(trouble.last_at)}; the latest: {trouble.cause}"
    )


def _show_time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
