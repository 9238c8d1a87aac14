"""Which attempt at an episode is the latest. Pure, and independent of clocks.

Attempts are numbered within a series: the tries at one activity of one workflow execution, as Temporal counts them. In
a series the higher number is the later one. A series that the session has not seen before is later than all it has
seen (a workflow that was reset plays the episode again, and counts from 1), and one that was followed by another is
over. So an attempt that was given up is refused whenever it comes, whatever any clock shows.

The session's own `attempt` counts those that took over.
"""

from __future__ import annotations

import dataclasses

from everroll.sessions.errors import ConflictError
from everroll.sessions.records import SessionRecord


def admit_attempt(record: SessionRecord, attempt: int | None, series: str | None) -> SessionRecord:
    """The record when this attempt has opened the session: unchanged if it is the latest already.

    Without a series, `attempt` is the session's own count itself; with None, the latest attempt goes on.

    Raises:
        ConflictError: a later attempt has opened the session.
    """
    if attempt is None:
        return record
    if series is None:
        if attempt < record.attempt:
            raise _refuse(record, attempt)
        return dataclasses.replace(record, attempt=attempt)
    before, last = record.series[:-1], record.series[-1:]
    if any(series == name for name, _ in before):
        raise _refuse(record, attempt)
    if not last or last[0][0] != series:
        before = record.series
    elif attempt < last[0][1]:
        raise _refuse(record, attempt)
    elif attempt == last[0][1]:
        return record
    return dataclasses.replace(record, attempt=record.attempt + 1, series=(*before, (series, attempt)))


def _refuse(record: SessionRecord, attempt: int) -> ConflictError:
    return ConflictError(f"session {record.session_id} was opened by a later attempt than {attempt}")
