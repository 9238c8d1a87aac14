"""Which attempt at an episode is the latest: no clock is asked."""

from __future__ import annotations

import pytest

from everroll.contracts.spec import SamplingSpec
from everroll.sessions.attempts import admit_attempt
from everroll.sessions.errors import ConflictError
from everroll.sessions.records import SessionRecord

NEW = SessionRecord("s", SamplingSpec(), seed=1, created_at=0.0)


def open_all(*attempts: tuple[int, str | None]) -> SessionRecord:
    record = NEW
    for attempt, series in attempts:
        record = admit_attempt(record, attempt, series)
    return record


def test_each_later_attempt_takes_over_and_the_same_one_may_come_again() -> None:
    assert [open_all(*[(n, "a") for n in numbers]).attempt for numbers in ([1], [1, 1], [1, 2], [1, 2, 5, 5])] == [
        1,
        1,
        2,
        3,
    ]


def test_an_attempt_that_was_given_up_is_refused() -> None:
    with pytest.raises(ConflictError, match="later attempt than 1"):
        open_all((1, "a"), (2, "a"), (1, "a"))


def test_a_workflow_that_was_reset_counts_from_one_and_takes_over() -> None:
    record = open_all((1, "a"), (3, "a"), (1, "b"))
    assert record.attempt == 3
    for late in (3, 4, 9):
        with pytest.raises(ConflictError):
            admit_attempt(record, late, "a")
    assert admit_attempt(record, 1, "b") == record


def test_a_session_of_attempts_that_a_clock_numbered_goes_on() -> None:
    """As earlier versions did."""
    record = open_all((1_764_000_000_000, None), (2, "a"))
    assert record.attempt == 1_764_000_000_001
    with pytest.raises(ConflictError):
        admit_attempt(record, 1_764_000_000_000, None)


def test_whoever_names_no_attempt_goes_on_with_the_latest() -> None:
    record = open_all((2, "a"))
    assert admit_attempt(record, None, None) is record
