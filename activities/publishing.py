"""`publish_weights`: bring every engine to a weight version, in place, while requests are in flight."""

from __future__ import annotations

import asyncio
import time

import aiohttp
from temporalio import activity

from activities.heartbeats import Progress, heartbeating
from everroll.contracts import names
from everroll.contracts.training import PublishRequest, PublishResult, Weights
from everroll.engines.base import Engine
from everroll.engines.sglang import SGLangEngine


class PublishingActivities:
    """Idempotent by version: an engine that has the version is only told to go on."""

    def __init__(self, session: aiohttp.ClientSession) -> None:
        self._session = session

    @activity.defn(name=names.PUBLISH_WEIGHTS)
    async def publish_weights(self, request: PublishRequest) -> PublishResult:
        """
        Raises:
            PublishError: an engine refused the weights.
            EngineUnavailableError: an engine does not answer; retried until the deadline.
        """
        engines = [SGLangEngine(url, self._session) for url in request.engine_urls]
        async with heartbeating("asking engines for their version") as progress:
            seconds = await asyncio.gather(*(update_engine(engine, request.weights, progress) for engine in engines))
        updated = {url: spent for url, spent in zip(request.engine_urls, seconds, strict=True) if spent > 0}
        return PublishResult(version=request.weights.version, seconds_by_engine=updated)


async def update_engine(engine: Engine, weights: Weights, progress: Progress) -> float:
    """Pause in place, update, continue; returns the seconds it took, 0 if the engine had the version already.

    An attempt that died between pause and continue leaves the engine paused, so continuing is always part of it.
    """
    started = time.monotonic()
    if await engine.weight_version() == weights.version:
        await engine.resume()
        return 0.0
    progress.report(f"updating {engine.base_url} to version {weights.version}")
    await engine.pause("in_place")
    try:
        await engine.update_weights(weights.path, weights.version)
    finally:
        await engine.resume()
    return time.monotonic() - started
