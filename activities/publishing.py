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
from everroll.contracts.training import PublishRequest, PublishResult
from everroll.engines.base import Engine, EngineError, EngineUnavailableError, Serving, WeightUpdateError
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
    """An engine was told to load. How long ago is what attempts have waited for it: no wall clock is asked."""

    old_version: int
    """What it served then."""
    waited_before: float = 0.0
    """Seconds, in earlier attempts."""
    since: float = field(default_factory=time.monotonic)
    """When this attempt began to wait."""

    @property
    def waited_seconds(self) -> float:
        return self.waited_before + time.monotonic() - self.since


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
            log.posts = {str(url): Post(int(old), float(waited)) for url, (waited, old) in marks.items()}
        return log

    def beat(self) -> None:
        marks = {url: (post.waited_seconds, post.old_version) for url, post in self.posts.items()}
        activity.heartbeat(self.stage, marks)

    def note_post(self, url: str, old_version: int) -> Post:
        self.posts[url] = Post(old_version)
        self.stage = f"{url} loads version {self.version}"
        self.beat()
        return self.posts[url]

    def forget_post(self, url: str) -> None:
        if self.posts.pop(url, None) is not None:
            self.beat()


class PublishingActivities:
    """Idempotent by version: an engine that has the version is only told to go on.

    A run's first publish compares the path as well, and loads where the engine does not tell it.
    """

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
            updates = [EngineUpdate(engine, request, log) for engine in engines]
            results = await asyncio.gather(*(update.run() for update in updates), return_exceptions=True)
        _raise_failures([result for result in results if isinstance(result, BaseException)], len(engines))
        seconds = [result for result in results if not isinstance(result, BaseException)]
        updated = {url: spent for url, spent in zip(request.engine_urls, seconds, strict=True) if spent > 0}
        return PublishResult(version=request.weights.version, seconds_by_engine=updated)


class EngineUpdate:
    """One engine's way to a weight version."""

    def __init__(self, engine: Engine, request: PublishRequest, log: PublishLog) -> None:
        self._engine, self._log = engine, log
        self._weights, self._timeout_seconds, self._first = request.weights, request.timeout_seconds, request.first

    async def run(self) -> float:
        """Pause in place, update, continue; returns the seconds it took, 0 if the engine had the version already.

        An attempt that died between pause and continue leaves the engine paused, so continuing is always part of it.
        """
        started = time.monotonic()
        post = self._log.posts.get(self._url)
        try:
            serving = await self._ask(post)
            if serving is not None and self._has_weights(serving) and (post is not None or self._is_sure(serving)):
                await self._engine.resume()
                return 0.0
            loaded = False
            if post is not None and (serving is None or await self._is_at_it(post, serving.version)):
                patience = self._timeout_seconds * _LOADING_PATIENCE
                loaded = await self._await_weights(post, patience - post.waited_seconds)
            while not loaded:
                loaded = await self._load()
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

    def _has_weights(self, serving: Serving) -> bool:
        """Version numbers are a run's own: at its first publish, another model or run may have left the same one."""
        if serving.version != self._weights.version:
            return False
        return not self._first or serving.path in (None, self._weights.path)

    def _is_sure(self, serving: Serving) -> bool:
        """Whether the number alone, or the path with it, says that these are the weights."""
        return not self._first or serving.path is not None

    async def _ask(self, post: Post | None) -> Serving | None:
        """None if it does not say, which is an error unless it may be busy with a load."""
        try:
            return await self._engine.serving()
        except EngineUnavailableError as error:
            if post is None or error.trouble == "unreachable":
                raise
            return None

    async def _load(self) -> bool:
        """Post the load; where its answer is lost, wait for the version instead. False: it is to be posted again."""
        serving = await self._engine.serving()
        await self._engine.pause("in_place")
        post = self._log.note_post(self._url, serving.version)
        try:
            await self._engine.update_weights(self._weights.path, self._weights.version)
        except EngineUnavailableError as error:
            if not error.may_have_arrived:
                raise
            # A lost connection mostly means a dead engine; one that is only slow gets all the time there is.
            patience = _LOADING_PATIENCE if error.trouble == "timeout" else 1
            return await self._await_weights(post, self._timeout_seconds * patience)
        return True

    async def _is_at_it(self, post: Post, version: int) -> bool:
        """Whether an engine that was told to load can still be loading.

        It was paused then, and nobody else tells it to go on: one that samples, or that serves another version than it
        did, has been started anew. An engine that does not tell (None) is taken to be loading.
        """
        return version == post.old_version and await self._engine.is_paused() is not False

    async def _await_weights(self, post: Post, seconds: float) -> bool:
        """Ask what the engine serves until it is the weights, for so long. False once it was started anew: what it was
        told is lost, however soon it was back, and whatever stands between (a balancer answers for a dead engine).

        Raises:
            EngineUnavailableError: nobody listens there any more: what it was loading is lost.
            WeightUpdateError: it still serves another version.
        """
        self._log.stage = f"waiting until {self._url} has loaded version {self._weights.version}"
        serving: Serving | None = None
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            try:
                serving = await self._engine.serving()
                if self._has_weights(serving):
                    return True
                is_lost = not await self._is_at_it(post, serving.version)
            except EngineUnavailableError as error:
                if error.trouble == "unreachable":
                    raise
                is_lost = False
            await asyncio.sleep(_POLL_SECONDS)
            if is_lost:
                return False
        said = "has not told its version" if serving is None else f"still serves version {serving.version}"
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
