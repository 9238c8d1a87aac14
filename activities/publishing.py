"""`publish_weights`: bring every engine to a weight version, in place, while requests are in flight.

An engine is told to load a version once. When no answer comes, or the attempt that asked has died, the engine is asked
for its version until it has it: loading may take longer than any deadline, and the same load must never be posted into
an engine that is still loading. What was posted where travels in the heartbeat's details from attempt to attempt.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

import aiohttp
from temporalio import activity

from everroll.contracts import names
from everroll.contracts.training import PublishRequest, PublishResult, Weights
from everroll.engines.base import Engine, EngineError, EngineUnavailableError, WeightUpdateError
from everroll.engines.http import EngineTimeouts
from everroll.engines.open import open_engine

_ASK_SECONDS = 10.0
_POLL_SECONDS = 0.5
_LOADING_PATIENCE = 8
"""Times the publish's timeout that an engine may load; after that the run is told, loudly."""
_BEATS_PER_TIMEOUT = 3.0
_DEFAULT_BEAT_SECONDS = 5.0


@dataclass(frozen=True)
class Post:
    """An engine was told to load."""

    at: float
    """Unix seconds."""
    old_version: int
    """What it served then."""


@dataclass
class PublishLog:
    """Which engines were told to load the version, and what is being done; kept across attempts."""

    version: int
    posts: dict[str, Post] = field(default_factory=dict)
    """By engine URL."""
    stage: str = "asking engines for their version"

    @staticmethod
    def read(details: Sequence[object], version: int) -> PublishLog:
        """From the heartbeat of the attempt before, if there was one."""
        log = PublishLog(version)
        marks = details[1] if len(details) > 1 else None
        if isinstance(marks, dict):
            log.posts = {str(url): Post(float(at), int(old)) for url, (at, old) in marks.items()}
        return log

    def beat(self) -> None:
        activity.heartbeat(self.stage, {url: (post.at, post.old_version) for url, post in self.posts.items()})

    def note_post(self, url: str, old_version: int) -> None:
        self.posts[url] = Post(time.time(), old_version)
        self.stage = f"{url} loads version {self.version}"
        self.beat()

    def forget_post(self, url: str) -> None:
        if self.posts.pop(url, None) is not None:
            self.beat()


class PublishingActivities:
    """Idempotent by version: an engine that has the version is only told to go on."""

    def __init__(self, session: aiohttp.ClientSession) -> None:
        self._session = session

    @activity.defn(name=names.PUBLISH_WEIGHTS)
    async def publish_weights(self, request: PublishRequest) -> PublishResult:
        """
        Raises:
            WeightUpdateError: an engine refused the weights, or has not loaded them in many times the timeout.
            EngineUnavailableError: an engine is away. With several engines the text names each that failed, and the
                others have been updated all the same.
        """
        timeouts = EngineTimeouts(control_seconds=_ASK_SECONDS, update_seconds=request.timeout_seconds)
        engines = [
            open_engine(request.engine_kind, url, self._session, timeouts=timeouts) for url in request.engine_urls
        ]
        log = PublishLog.read(activity.info().heartbeat_details, request.weights.version)
        async with _beating(log):
            updates = [EngineUpdate(engine, request.weights, request.timeout_seconds, log) for engine in engines]
            results = await asyncio.gather(*(update.run() for update in updates), return_exceptions=True)
        _raise_failures([result for result in results if isinstance(result, BaseException)], len(engines))
        seconds = [result for result in results if not isinstance(result, BaseException)]
        updated = {url: spent for url, spent in zip(request.engine_urls, seconds, strict=True) if spent > 0}
        return PublishResult(version=request.weights.version, seconds_by_engine=updated)


class EngineUpdate:
    """One engine's way to a weight version."""

    def __init__(self, engine: Engine, weights: Weights, timeout_seconds: float, log: PublishLog) -> None:
        self._engine, self._weights, self._timeout_seconds, self._log = engine, weights, timeout_seconds, log

    async def run(self) -> float:
        """Pause in place, update, continue; returns the seconds it took, 0 if the engine had the version already.

        An attempt that died between pause and continue leaves the engine paused, so continuing is always part of it.
        """
        started = time.monotonic()
        post = self._log.posts.get(self._url)
        try:
            version = await self._ask_version(post)
            if version == self._weights.version:
                await self._engine.resume()
                return 0.0
            if post is not None and (version is None or await self._is_at_it(post, version)):
                await self._await_version(post.at + self._timeout_seconds * _LOADING_PATIENCE)
            else:
                await self._load(version or 0)
        except asyncio.CancelledError:
            if _is_run_cancelled():
                await self._try_to_resume()
            raise
        except EngineError:
            self._log.forget_post(self._url)
            await self._try_to_resume()
            raise
        await self._engine.resume()
        return time.monotonic() - started

    @property
    def _url(self) -> str:
        return self._engine.base_url

    async def _ask_version(self, post: Post | None) -> int | None:
        """None if it does not say, which is an error unless it may be busy with a load."""
        try:
            return await self._engine.weight_version()
        except EngineUnavailableError as error:
            if post is None or error.trouble == "unreachable":
                raise
            return None

    async def _load(self, old_version: int) -> None:
        """Post the load; where its answer is lost, wait for the version instead."""
        await self._engine.pause("in_place")
        self._log.note_post(self._url, old_version)
        try:
            await self._engine.update_weights(self._weights.path, self._weights.version)
        except EngineUnavailableError as error:
            if not error.may_have_arrived:
                raise
            # A lost connection mostly means a dead engine; one that is only slow gets all the time there is.
            patience = _LOADING_PATIENCE if error.trouble == "timeout" else 1
            await self._await_version(time.time() + self._timeout_seconds * patience)

    async def _is_at_it(self, post: Post, version: int) -> bool:
        """Whether an engine that was told to load by an earlier attempt can still be loading.

        It was paused then, and nobody else tells it to go on: one that samples, or that serves another version than it
        did, has been started anew. An engine that does not tell (None) is taken to be loading.
        """
        return version == post.old_version and await self._engine.is_paused() is not False

    async def _await_version(self, until: float) -> None:
        """Ask for the version until the engine has it; `until` in Unix seconds.

        Raises:
            EngineUnavailableError: nobody listens there any more: what it was loading is lost.
            WeightUpdateError: it still serves another version.
        """
        self._log.stage = f"waiting until {self._url} has loaded version {self._weights.version}"
        version: int | None = None
        while time.time() < until:
            try:
                version = await self._engine.weight_version()
            except EngineUnavailableError as error:
                if error.trouble == "unreachable":
                    raise
            if version == self._weights.version:
                return
            await asyncio.sleep(_POLL_SECONDS)
        said = "has not told its version" if version is None else f"still serves version {version}"
        problem = f"was told to load version {self._weights.version} from {self._weights.path} long ago and {said}"
        raise WeightUpdateError("POST", self._url, problem)

    async def _try_to_resume(self) -> None:
        with contextlib.suppress(EngineError):
            await self._engine.resume()


@contextlib.asynccontextmanager
async def _beating(log: PublishLog) -> AsyncIterator[None]:
    """Heartbeat in the background. Its first beat comes late: one that tells of a post must not be held back by it."""
    timeout = activity.info().heartbeat_timeout
    seconds = timeout.total_seconds() / _BEATS_PER_TIMEOUT if timeout else _DEFAULT_BEAT_SECONDS

    async def beat() -> None:
        while True:
            await asyncio.sleep(seconds)
            log.beat()

    task = asyncio.create_task(beat())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def _is_run_cancelled() -> bool:
    """Whether somebody asked for it, as against an attempt that ran out of time and will be followed by another."""
    details = activity.cancellation_details()
    return details is not None and details.cancel_requested


def _raise_failures(failures: list[BaseException], num_engines: int) -> None:
    """One failure as it is; several as one, of the kind that weighs most, which names them all."""
    if not failures:
        return
    other = next((error for error in failures if not isinstance(error, EngineError)), None)
    if other is not None:
        raise other
    errors = [error for error in failures if isinstance(error, EngineError)]
    worst = next((error for error in errors if not error.can_retry), errors[0])
    if len(errors) == 1:
        raise worst
    problem = f"{len(errors)} of {num_engines} engines failed: " + "; ".join(str(error) for error in errors)
    raise type(worst)(worst.method, worst.url, problem)
