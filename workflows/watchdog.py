"""The watchdog: a run that does not get on says by name what it waits for, and since when."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from temporalio import workflow

with workflow.unsafe.imports_passed_through():
    from everroll.contracts.health import Survey
    from everroll.contracts.training import WatchState
    from workflows import policies


class Watchdog:
    """Surveys the run after a while without progress, then ever more rarely: a long outage makes a short history.

    It looks at the end of each wait whether there was progress meanwhile, so that a survey comes one to two waits after
    the last progress.
    """

    def __init__(
        self, state: WatchState, take_survey: Callable[[], Awaitable[Survey | None]], on_survey: Callable[[], None]
    ) -> None:
        self._state = state
        self._take_survey = take_survey
        self._on_survey = on_survey
        self._num_progress = 0

    @property
    def survey(self) -> Survey | None:
        return self._state.survey

    def note_progress(self) -> None:
        """Something was settled, trained or published, or the run went on."""
        self._num_progress += 1
        self._state.patience_seconds = None
        self._state.survey = None

    async def watch(self) -> None:
        """Until cancelled."""
        while True:
            before = self._num_progress
            await asyncio.sleep(self._patience())
            if self._num_progress != before:
                continue
            survey = await self._take_survey()
            if self._num_progress != before:
                continue
            self._state.patience_seconds = min(self._patience() * 2, policies.SURVEY_MAX.total_seconds())
            if survey is not None:
                self._state.survey = survey
                self._on_survey()

    def _patience(self) -> float:
        return self._state.patience_seconds or policies.SURVEY_FIRST.total_seconds()
