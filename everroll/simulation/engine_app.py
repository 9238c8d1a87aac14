"""The simulated engine's HTTP side: the part of SGLang's wire that Everroll uses."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from typing import Any

from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from everroll.engines.embedded.door import RequireKey, unless_disconnected
from everroll.engines.embedded.wire import (
    AbortBody,
    BadRequestError,
    GenerateBody,
    ModelLimits,
    PauseBody,
    UpdateBody,
    build_answer,
    build_sequence,
    parse_body,
)
from everroll.simulation.engine import SimulatedEngine

_CLIENT_GONE = 499


class SimulatedEngineApp:
    """Handlers over one simulated engine."""

    def __init__(self, engine: SimulatedEngine, limits: ModelLimits) -> None:
        self._engine = engine
        self._limits = limits

    async def generate(self, request: Request) -> Response:
        body = parse_body(GenerateBody, await request.body())
        sequence = build_sequence(body, self._limits)
        finished = await unless_disconnected(request, self._engine.generate(sequence, self._choose_stop(body)))
        if finished is None:
            return Response(status_code=_CLIENT_GONE)
        return _json(build_answer(body, finished, self._engine.weight_version, None))

    def _choose_stop(self, body: GenerateBody) -> int | None:
        """The token that ends a completion: the first of those asked for, else the model's own."""
        asked = body.sampling_params.stop_token_ids or ()
        return next(iter((*asked, *sorted(self._limits.eos_token_ids))), None)

    async def pause(self, request: Request) -> Response:
        self._engine.pause(parse_body(PauseBody, await request.body()).mode)
        return _json({"status": "ok"})

    async def resume(self, request: Request) -> Response:
        self._engine.resume()
        return _json({"status": "ok"})

    async def update_weights(self, request: Request) -> Response:
        body = parse_body(UpdateBody, await request.body())
        version = None if body.weight_version is None else int(body.weight_version)
        await self._engine.update_weights(body.model_path, version)
        if body.abort_all_requests:
            self._engine.abort(None)
        return _json({"success": True, "message": "simulated", "num_paused_requests": self._engine.num_running})

    async def abort(self, request: Request) -> Response:
        body = parse_body(AbortBody, await request.body())
        if body.rid is None and not body.abort_all:
            raise BadRequestError("give `rid` or `abort_all: true`")
        self._engine.abort(None if body.abort_all else body.rid)
        return _json({"status": "ok"})

    async def acknowledge(self, request: Request) -> Response:
        return _json({"status": "ok"})

    async def model_info(self, request: Request) -> Response:
        engine = self._engine
        return _json(
            {
                "model_path": engine.model_path,
                "tokenizer_path": engine.model_path,
                "is_generation": True,
                "is_simulated": True,
                "weight_version": str(engine.weight_version),
                "max_context_tokens": self._limits.max_context,
                "num_running": engine.num_running,
                "num_waiting": engine.num_waiting,
                "is_paused": engine.is_paused,
            }
        )


def build_app(handlers: SimulatedEngineApp, api_key: str | None) -> ASGIApp:
    """The ASGI application."""
    posts: list[tuple[str, Callable[[Request], Awaitable[Response]]]] = [
        ("/generate", handlers.generate),
        ("/pause_generation", handlers.pause),
        ("/continue_generation", handlers.resume),
        ("/update_weights_from_disk", handlers.update_weights),
        ("/abort_request", handlers.abort),
        ("/flush_cache", handlers.acknowledge),
    ]
    gets = [
        ("/health", handlers.acknowledge),
        ("/health_generate", handlers.acknowledge),
        ("/model_info", handlers.model_info),
        ("/get_model_info", handlers.model_info),
    ]
    routes = [Route(path, handler, methods=["POST"]) for path, handler in posts]
    routes += [Route(path, handler, methods=["GET"]) for path, handler in gets]
    app = Starlette(
        routes=routes, exception_handlers={BadRequestError: _on_bad_request, ClientDisconnect: _on_disconnect}
    )
    return (
        app
        if api_key is None
        else RequireKey(app, api_key, _json({"error": {"message": "a valid API key is required"}}, 401))
    )


async def _on_bad_request(request: Request, error: Exception) -> Response:
    return _json({"error": {"message": str(error), "code": 400}}, 400)


async def _on_disconnect(request: Request, error: Exception) -> Response:
    return Response(status_code=_CLIENT_GONE)


def _json(value: dict[str, Any], status: int = 200) -> Response:
    return Response(json.dumps(value, separators=(",", ":")), status, media_type="application/json")
