"""`watch_engines`: notice at once that an engine has lost a run's weights, because it was started anew.

Whoever runs the engine and starts it again, it comes back with the weights that it was started with. Nobody samples
with those, so without this the run would notice only by its agents' failures, or by the watchdog.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import aiohttp
from temporalio import activity

from everroll.contracts import names
from everroll.contracts.health import WatchEnginesRequest, WatchEnginesResult
from everroll.engines.base import Engine, EngineError
from everroll.engines.http import EngineTimeouts
from everroll.engines.open import open_engine

_ASK_SECONDS = 5.0
_BEATS_PER_TIMEOUT = 3.0
_DEFAULT_BEAT_SECONDS = 5.0


class EngineWatchActivities:
    """Asks engines for their version, again and again, and does nothing about it: publishing is the run's business."""

    def __init__(self, session: aiohttp.ClientSession) -> None:
        self._session = session

    @activity.defn(name=names.WATCH_ENGINES)
    async def watch_engines(self, request: WatchEnginesRequest) -> WatchEnginesResult:
        """Return when an engine serves an older version than it has, or than the run had published when this began.

        Versions that were seen travel in the heartbeat's details from attempt to attempt: worker and engine may have
        been lost together. An engine that does not answer is waited for.
        """
        timeouts = EngineTimeouts(control_seconds=_ASK_SECONDS, update_seconds=_ASK_SECONDS)
        seen = _read_seen(activity.info().heartbeat_details, request)
        tasks: dict[asyncio.Task[int], str] = {}
        for url in request.engine_urls:
            engine = open_engine(request.engine_kind, url, self._session, timeouts=timeouts)
            tasks[asyncio.create_task(_watch(engine, url, seen, request.poll_seconds))] = url
        beat = activity.info().heartbeat_timeout
        seconds = beat.total_seconds() / _BEATS_PER_TIMEOUT if beat else _DEFAULT_BEAT_SECONDS
        try:
            done: set[asyncio.Task[int]] = set()
            while not done:
                activity.heartbeat("watching that engines keep their weights", dict(seen))
                done, _ = await asyncio.wait(tasks, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            return WatchEnginesResult(lost={tasks[task]: task.result() for task in done})
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


def _read_seen(details: Sequence[object], request: WatchEnginesRequest) -> dict[str, int]:
    """The newest version that each engine is known to have served, by URL."""
    marks = details[1] if len(details) > 1 else None
    known = {str(url): int(version) for url, version in marks.items()} if isinstance(marks, dict) else {}
    return {url: max(request.version, known.get(url, 0)) for url in request.engine_urls}


async def _watch(engine: Engine, url: str, seen: dict[str, int], poll_seconds: float) -> int:
    """Return the version that an engine has fallen back to."""
    while True:
        try:
            version = await engine.weight_version()
        except EngineError:
            pass  # it is away, or busy: that is for those to tell who want something of it
        else:
            if version < seen[url]:
                return version
            seen[url] = version
        await asyncio.sleep(poll_seconds)
