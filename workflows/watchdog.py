"""The watchdog: a run that does not get on says by name what it waits for, and since when."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from temporalio import workflow

with workflow.unsafe.imports_passed_through():
    from everroll.contracts.health import Survey
    from everroll.contracts.training import WatchState
    from workflows import policies

_SHORTEST_SECONDS = 1.0


class Watchdog:
    """Surveys the run after 40 s without progress, then ever more rarely: a long outage makes a short history."""

    def __init__(
        self, state: WatchState, take_survey: Callable[[], Awaitable[Survey | None]], on_survey: Callable[[], None]
    ) -> None:
        self._state = state
        self._take_survey = take_survey
        self._on_survey = on_survey

    @property
    def survey(self) -> Survey | None:
        return self._state.survey

    def note_progress(self) -> None:
        """Something was settled, trained or published, or the run went on."""
        self._state.progress_at = workflow.time()
        self._state.asked_at = None
        self._state.patience_seconds = None
        self._state.survey = None

    async def watch(self) -> None:
        """Until cancelled."""
        if self._state.progress_at is None:
            self.note_progress()
        while True:
            if (remaining := self._due_at() - workflow.time()) > 0:
                await asyncio.sleep(max(remaining, _SHORTEST_SECONDS))
                continue
            progress_at = self._state.progress_at
            survey = await self._take_survey()
            if self._state.progress_at != progress_at:
                continue
            self._state.patience_seconds = min(self._patience() * 2, policies.SURVEY_MAX.total_seconds())
            self._state.asked_at = workflow.time()
            if survey is not None:
                self._state.survey = survey
                self._on_survey()

    def _patience(self) -> float:
        return self._state.patience_seconds or policies.SURVEY_FIRST.total_seconds()

    def _due_at(self) -> float:
        """Counted from the last survey, or from the last progress where there was none since."""
        since = self._state.asked_at or self._state.progress_at or 0.0
        return since + self._patience()
