"""HTTP around the session core: routes, keys, body limits, and errors as answers. No logic.

POST   /sessions                              admin    create or open again
GET    /sessions/{id}                         admin    records, for people
DELETE /sessions/{id}                         admin    release
POST   /sessions/{id}/samples                 admin    assembled samples, one safetensors body
POST   /sessions/{id}/v1/chat/completions     session  one turn
GET    /sessions/{id}/v1/models               session
GET    /info                                  admin    what this server serves
GET    /engines                               admin    the engines: health, weight version, last error
GET    /health                                -
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from pydantic import Field, ValidationError
from pydantic_core import from_json, to_json
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from everroll.contracts.base import Spec
from everroll.contracts.names import ENGINE_TROUBLE_HEADER
from everroll.contracts.spec import SamplingSpec
from everroll.sessions.core import SessionCore
from everroll.sessions.errors import (
    BadRequestError,
    BodyTooLargeError,
    SessionError,
    SlowBodyError,
    UnauthorizedError,
    UnexpectedError,
)
from everroll.sessions.keys import derive_session_key, is_key, read_attempt
from everroll.sessions.wires.openai_chat import (
    build_chat_answer,
    build_chat_stream,
    build_models,
    parse_chat_request,
)
from everroll.tokens.assembly import NothingToTrain

SAMPLES_MEDIA_TYPE = "application/vnd.safetensors"

_log = logging.getLogger(__name__)
_S = TypeVar("_S", bound=Spec)
_Handler = Callable[[Request], Awaitable[Response]]


class CreateBody(Spec):
    """Body of `POST /sessions`."""

    session_id: str | None = None
    sampling: SamplingSpec | None = None
    seed: int | None = Field(default=None, ge=0, lt=2**63)
    attempt: int | None = Field(default=None, ge=0, lt=2**53)
    min_weight_version: int | None = Field(default=None, ge=0, lt=2**31)


class SamplesBody(Spec):
    """Body of `POST /sessions/{id}/samples`."""

    max_seq_len: int | None = Field(default=None, ge=1)
    metadata: dict[str, Any] = Field(default_factory=dict)


@dataclass(frozen=True)
class SessionApp:
    """The handlers, and what they need."""

    core: SessionCore
    admin_key: str
    model: str
    """Name of the model as agents see it."""
    info: Mapping[str, Any]
    describe_engines: Callable[[], list[dict[str, Any]]]
    max_body_bytes: int
    body_timeout_seconds: float

    async def create(self, request: Request) -> Response:
        self._admit_admin(request)
        body = _validate(CreateBody, await self._read_object(request, empty_is_object=True))
        session = await self.core.create(
            body.session_id, body.sampling, body.seed, body.attempt, body.min_weight_version
        )
        session_id = session.record.session_id
        api_key = derive_session_key(self.admin_key, session_id, session.record.attempt)
        return _json({"session_id": session_id, "api_key": api_key, "num_turns": len(session.turns)})

    async def chat(self, request: Request) -> Response:
        session_id, attempt = self._admit_session(request)
        chat, stream, include_usage = parse_chat_request(await self._read_object(request))
        answer = await self.core.turn(session_id, chat, attempt)
        if stream:
            body = build_chat_stream(answer, self.model, include_usage)
            return Response(body, media_type="text/event-stream", headers={"cache-control": "no-cache"})
        return _json(build_chat_answer(answer, self.model))

    async def models(self, request: Request) -> Response:
        self._admit_session(request)
        return _json(build_models(self.model))

    async def samples(self, request: Request) -> Response:
        self._admit_admin(request)
        body = _validate(SamplesBody, await self._read_object(request, empty_is_object=True))
        session_id = request.path_params["session_id"]
        trouble = await self.core.engine_trouble(session_id)
        collected = await self.core.collect(session_id, body.max_seq_len, body.metadata)
        if isinstance(collected, NothingToTrain):
            response = _json({"num_samples": 0, "cause": collected.cause.value, "message": collected.message})
        else:
            response = Response(collected, media_type=SAMPLES_MEDIA_TYPE)
        if trouble is not None:
            response.headers[ENGINE_TROUBLE_HEADER] = trouble.model_dump_json(ensure_ascii=True)
        return response

    async def describe(self, request: Request) -> Response:
        self._admit_admin(request)
        return _json(await self.core.describe(request.path_params["session_id"]))

    async def release(self, request: Request) -> Response:
        self._admit_admin(request)
        await self.core.release(request.path_params["session_id"])
        return Response(status_code=204)

    async def show_info(self, request: Request) -> Response:
        self._admit_admin(request)
        return _json(dict(self.info))

    async def show_engines(self, request: Request) -> Response:
        self._admit_admin(request)
        return _json({"engines": self.describe_engines()})

    async def health(self, request: Request) -> Response:
        return _json({"status": "ok"})

    def _admit_admin(self, request: Request) -> None:
        if not is_key(_bearer(request), self.admin_key):
            raise UnauthorizedError("this needs the admin key: Authorization: Bearer $EVERROLL_ADMIN_KEY")

    def _admit_session(self, request: Request) -> tuple[str, int | None]:
        """The session, and the attempt that the key belongs to (None for the admin key)."""
        session_id: str = request.path_params["session_id"]
        key = _bearer(request)
        attempt = read_attempt(key)
        if attempt is not None and is_key(key, derive_session_key(self.admin_key, session_id, attempt)):
            return session_id, attempt
        if is_key(key, self.admin_key):
            return session_id, None
        raise UnauthorizedError("this needs the session's own API key")

    async def _read_object(self, request: Request, empty_is_object: bool = False) -> dict[str, Any]:
        """The JSON object in a request's body.

        Raises:
            BodyTooLargeError: more than the limit; the rest is not read.
            SlowBodyError: it did not arrive in time.
            BadRequestError: no JSON object.
        """
        body = await self._read_body(request)
        if not body and empty_is_object:
            return {}
        try:
            value = from_json(body, allow_inf_nan=False)
        except ValueError as error:
            raise BadRequestError(f"the body is no JSON: {error}") from error
        if not isinstance(value, dict):
            raise BadRequestError("the body is no JSON object")
        return value

    async def _read_body(self, request: Request) -> bytes:
        announced = request.headers.get("content-length", "0")
        if announced.isdigit() and int(announced) > self.max_body_bytes:
            raise BodyTooLargeError(f"the body has {announced} bytes, the limit is {self.max_body_bytes}")
        chunks, size = [], 0
        try:
            async with asyncio.timeout(self.body_timeout_seconds):
                async for chunk in request.stream():
                    chunks.append(chunk)
                    size += len(chunk)
                    if size > self.max_body_bytes:
                        raise BodyTooLargeError(f"the body has more than {self.max_body_bytes} bytes")
        except TimeoutError as error:
            raise SlowBodyError(f"the body did not arrive within {self.body_timeout_seconds:g} s") from error
        return b"".join(chunks)


def build_app(handlers: SessionApp) -> Starlette:
    """The ASGI application."""
    session = "/sessions/{session_id}"
    routes = [
        _route(f"{session}/v1/chat/completions", handlers.chat, "POST"),
        _route("/sessions", handlers.create, "POST"),
        _route(f"{session}/samples", handlers.samples, "POST"),
        _route(session, handlers.describe, "GET"),
        _route(session, handlers.release, "DELETE"),
        _route(f"{session}/v1/models", handlers.models, "GET"),
        _route("/info", handlers.show_info, "GET"),
        _route("/engines", handlers.show_engines, "GET"),
        _route("/health", handlers.health, "GET"),
    ]
    return Starlette(routes=routes)


def _route(path: str, handler: _Handler, method: str) -> Route:
    async def guarded(request: Request) -> Response:
        try:
            return await handler(request)
        except ClientDisconnect:
            return Response(status_code=499)  # nobody reads it
        except SessionError as error:
            return _answer_error(request, error)
        except Exception as error:  # a bug: loud in the log, and its text in the caller's failure
            _log.exception("%s %s: unexpected error", request.method, request.url.path)
            return _answer_error(request, UnexpectedError(f"{type(error).__name__}: {error}"))

    return Route(path, guarded, methods=[method])


def _answer_error(request: Request, error: SessionError) -> Response:
    """The one place where an error becomes an answer, in OpenAI's form."""
    level = logging.ERROR if error.status == 500 else logging.WARNING
    _log.log(level, "%s %s: %d %s", request.method, request.url.path, error.status, error)
    body = {"error": {"message": str(error), "type": error.kind, "code": error.kind, "param": None}}
    return _json(body, error.status)


def _bearer(request: Request) -> str:
    scheme, _, key = request.headers.get("authorization", "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else ""


def _validate(model: type[_S], value: dict[str, Any]) -> _S:
    try:
        return model.model_validate(value)
    except ValidationError as error:
        details = "; ".join(f"{'.'.join(map(str, item['loc']))}: {item['msg']}" for item in error.errors())
        raise BadRequestError(details) from error


def _json(value: dict[str, Any], status: int = 200) -> Response:
    return Response(to_json(value), status_code=status, media_type="application/json")
