"""The engine's HTTP side: routes, authentication, disconnects and status codes. All logic is elsewhere."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from typing import Any

from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from everroll.engines.embedded.core import EngineCore, EngineStoppedError
from everroll.engines.embedded.door import RequireKey, unless_disconnected
from everroll.engines.embedded.sequence import Finish, FinishKind, SamplingParams, Sequence
from everroll.engines.embedded.weights import WeightsRefusedError, load_weights
from everroll.engines.embedded.wire import (
    AbortBody,
    BadRequestError,
    GenerateBody,
    ModelLimits,
    PauseBody,
    TextDecoder,
    UpdateBody,
    build_answer,
    build_sequence,
    parse_body,
)

_LOGGER = logging.getLogger(__name__)
_HEALTH_GENERATE_SECONDS = 20.0
_CLIENT_GONE = 499


class EngineApp:
    """Handlers over one engine core."""

    def __init__(
        self,
        core: EngineCore,
        limits: ModelLimits,
        decoder: TextDecoder | None,
        max_unfinished: int,
    ) -> None:
        self.core = core
        self._limits = limits
        self._decoder = decoder
        self._max_unfinished = max_unfinished
        self._num_unfinished = 0
        self._update_lock = asyncio.Lock()

    async def generate(self, request: Request) -> Response:
        body = parse_body(GenerateBody, await request.body())

        def build(sequence: Sequence) -> Response:
            return json_response(build_answer(body, sequence, self.core.weight_version, self._decoder))

        return await self.run(request, body, build)

    async def run(self, request: Request, body: GenerateBody, build: Callable[[Sequence], Response]) -> Response:
        """Run one request to its end, whatever wire it came by; `build` makes its answer."""
        sequence = build_sequence(body, self._limits)
        if self._num_unfinished >= self._max_unfinished:
            message = f"the queue is full ({self._max_unfinished} requests)"
            sequence.finish = Finish(FinishKind.ABORT, message=message)
            return build(sequence)
        self._num_unfinished += 1
        try:
            finished = await unless_disconnected(request, self.core.generate(sequence))
        finally:
            self._num_unfinished -= 1
        if finished is None:
            return Response(status_code=_CLIENT_GONE)
        return build(finished)

    async def pause(self, request: Request) -> Response:
        mode = parse_body(PauseBody, await request.body()).mode
        left = await self.core.pause(mode)
        return json_response({"status": "ok", "message": f"paused in mode {mode}, {left} requests unfinished"})

    async def resume(self, request: Request) -> Response:
        await self.core.resume()
        return json_response({"status": "ok", "message": "generation goes on"})

    async def update_weights(self, request: Request) -> Response:
        """All or nothing. Reading and checking happen beside the running batch, only the copy stops it."""
        body = parse_body(UpdateBody, await request.body())
        problem = await self.load(body)
        if problem is not None:
            return json_response({"success": False, "message": problem, "num_paused_requests": 0}, 400)
        message = f"serving {body.model_path} as weight version {self.core.weight_version}"
        left = (await self.core.inspect()).num_unfinished
        _LOGGER.info("%s, %d requests in flight", message, left)
        return json_response({"success": True, "message": message, "num_paused_requests": left})

    async def load(self, body: UpdateBody) -> str | None:
        """Serve new weights; what is wrong with them, if they are refused."""
        async with self._update_lock:
            try:
                weights = await asyncio.to_thread(load_weights, self.core.targets, body.model_path)
            except WeightsRefusedError as error:
                _LOGGER.warning("weights refused: %s", error)
                return str(error)
            version = None if body.weight_version is None else int(body.weight_version)
            await self.core.update_weights(weights, version, body.abort_all_requests)
        return None

    async def abort(self, request: Request) -> Response:
        body = parse_body(AbortBody, await request.body())
        if body.rid is None and not body.abort_all:
            raise BadRequestError("give `rid` or `abort_all: true`")
        await self.core.abort(lambda sequence: body.abort_all or sequence.rid == body.rid, "aborted by request")
        return json_response({"status": "ok"})

    async def flush_cache(self, request: Request) -> Response:
        if await self.core.flush_cache():
            return json_response({"status": "ok", "message": "prefix cache flushed"})
        raise BadRequestError("the cache cannot be flushed while requests are unfinished")

    async def health(self, request: Request) -> Response:
        failure = self.core.failure
        return json_response({"status": "ok"}) if failure is None else _error(503, failure)

    async def health_generate(self, request: Request) -> Response:
        """Sample one token, unless generation is paused."""
        if (await self.core.inspect()).is_paused:
            return await self.health(request)
        probe = Sequence("health", [0], SamplingParams(max_new_tokens=1, temperature=0))
        async with asyncio.timeout(_HEALTH_GENERATE_SECONDS):
            finish = (await self.core.generate(probe)).finish
        if finish is not None and finish.kind is FinishKind.ABORT:
            return _error(503, finish.message)
        return json_response({"status": "ok"})

    async def model_info(self, request: Request) -> Response:
        state = await self.core.inspect()
        return json_response(
            {
                "model_path": self.core.model_path,
                "tokenizer_path": self.core.model_path,
                "is_generation": True,
                "weight_version": str(self.core.weight_version),
                "max_context_tokens": self._limits.max_context,
                "num_running": state.num_running,
                "num_waiting": state.num_waiting,
                "is_paused": state.is_paused,
            }
        )


def build_app(handlers: EngineApp, core: EngineCore, api_key: str | None, more_routes: Iterable[Route] = ()) -> ASGIApp:
    """The ASGI application; it starts the core with its lifespan and stops it at the end."""

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        core.start()
        try:
            yield
        finally:
            await core.stop()

    posts: list[tuple[str, Callable[[Request], Awaitable[Response]]]] = [
        ("/generate", handlers.generate),
        ("/pause_generation", handlers.pause),
        ("/continue_generation", handlers.resume),
        ("/update_weights_from_disk", handlers.update_weights),
        ("/abort_request", handlers.abort),
        ("/flush_cache", handlers.flush_cache),
    ]
    gets = [
        ("/health", handlers.health),
        ("/health_generate", handlers.health_generate),
        ("/model_info", handlers.model_info),
        ("/get_model_info", handlers.model_info),
    ]
    routes = [Route(path, handler, methods=["POST"]) for path, handler in posts]
    routes += [Route(path, handler, methods=["GET"]) for path, handler in gets]
    app = Starlette(
        routes=[*routes, *more_routes],
        lifespan=lifespan,
        exception_handlers={
            BadRequestError: _on_bad_request,
            EngineStoppedError: _on_unavailable,
            TimeoutError: _on_unavailable,
            ClientDisconnect: _on_disconnect,
        },
    )
    return (
        app if api_key is None else RequireKey(app, api_key, _error(401, "a valid API key is required as bearer token"))
    )


async def _on_bad_request(request: Request, error: Exception) -> Response:
    return _error(400, str(error))


async def _on_unavailable(request: Request, error: Exception) -> Response:
    return _error(503, str(error) or type(error).__name__)


async def _on_disconnect(request: Request, error: Exception) -> Response:
    """The client left in the middle of its request; nobody reads this answer."""
    return Response(status_code=_CLIENT_GONE)


def _error(status: int, message: str) -> Response:
    return json_response({"error": {"message": message, "code": status}}, status)


def json_response(value: dict[str, Any], status: int = 200) -> Response:
    return Response(json.dumps(value, separators=(",", ":")), status, media_type="application/json")
