"""Engines that were started anew come back with the weights they were started with: they are given the run's again."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from temporalio import workflow

with workflow.unsafe.imports_passed_through():
    from workflows import policies
    from workflows.calls import RunCalls


class EngineWatch:
    """One long activity looks at the engines; nothing hangs on it but how soon a loss is noticed.

    Before the first step there is nothing to lose: version 0 is what engines are started with.
    """

    def __init__(
        self,
        calls: RunCalls,
        *,
        get_version: Callable[[], int],
        spawn: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]],
        publish_again: Callable[[], Awaitable[None]],
    ) -> None:
        self._calls = calls
        self._get_version = get_version
        self._spawn = spawn
        self._publish_again = publish_again
        self._begun = False

    def begin(self) -> None:
        """Watch until the run ends, once it has weights to lose. Asked again, it does nothing."""
        if not self._begun and self._get_version() > 0:
            self._begun = True
            self._spawn(self._watch())

    async def _watch(self) -> None:
        """Until cancelled. An engine that keeps falling back is given its weights ever more rarely."""
        num_losses = 0
        while True:
            started = workflow.time()
            watched = await self._calls.watch_engines(self._get_version())
            if workflow.time() - started > 2 * policies.watch_backoff_seconds(num_losses):
                num_losses = 0
            if num_losses:
                await asyncio.sleep(policies.watch_backoff_seconds(num_losses))
            num_losses += 1
            if watched is not None:
                workflow.logger.warning("engines have lost the weights: %s", watched.lost)
                await self._publish_again()
