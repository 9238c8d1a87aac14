"""HTTP around the session core: routes, keys, body limits, and errors as answers. No logic.

POST   /sessions                              admin    create or open again
GET    /sessions/{id}                         admin    records, for people
DELETE /sessions/{id}                         admin    release
POST   /sessions/{id}/samples                 admin    assembled samples, one safetensors body
POST   /sessions/{id}/v1/chat/completions     session  one turn, in OpenAI's chat form
POST   /sessions/{id}/v1/responses            session  one turn, in OpenAI's responses form
POST   /sessions/{id}/v1/messages             session  one turn, in Anthropic's form
POST   /sessions/{id}/v1/messages/count_tokens  session  tokens of a prompt; nothing is sampled
GET    /sessions/{id}/v1/models               session
GET    /sessions/{id}/v1/models/{model}       session
POST   /runs/{run}/ended                      admin    no more sessions of this run: its retention begins
POST   /sweep                                 admin    delete what has expired, list what nobody released
GET    /info                                  admin    what this server serves
GET    /engines                               admin    the engines: health, weight version, last error
GET    /metrics                               admin    Prometheus' text form, of the process that answers
GET    /health                                -
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from pydantic import Field, ValidationError
from pydantic_core import from_json, to_json
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse

from everroll.contracts.base import Spec, list_faults
from everroll.contracts.names import ENGINE_TROUBLE_HEADER
from everroll.contracts.spec import SamplingSpec
from everroll.sessions.core import SessionCore, TurnAnswer
from everroll.sessions.errors import (
    BadRequestError,
    BodyTooLargeError,
    JournalError,
    NotOwnerError,
    SessionError,
    SlowBodyError,
    UnauthorizedError,
    UnexpectedError,
    UnknownModelError,
)
from everroll.sessions.keys import derive_session_key, is_key, read_attempt
from everroll.sessions.metrics import MEDIA_TYPE as METRICS_MEDIA_TYPE
from everroll.sessions.metrics import MetricsPage, SessionMetrics
from everroll.sessions.retention import Retention
from everroll.sessions.routing import Handler, Route, Router
from everroll.sessions.wires.anthropic_messages import MessagesWire
from everroll.sessions.wires.base import Call, Json, Wire, build_openai_error
from everroll.sessions.wires.models import build_model, build_models
from everroll.sessions.wires.openai_chat import ChatWire
from everroll.sessions.wires.openai_responses import ResponsesWire
from everroll.tokens.assembly import NothingToTrain

SAMPLES_MEDIA_TYPE = "application/vnd.safetensors"

_log = logging.getLogger(__name__)
_S = TypeVar("_S", bound=Spec)
_BuildError = Callable[[SessionError], Json]
_STREAM_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}
_RETRYABLE = {408, 421, 502, 503}
"""Statuses of failures that heal; stock clients would retry all above 408 but for the header that says so."""


class CreateBody(Spec):
    """Body of `POST /sessions`."""

    session_id: str | None = None
    sampling: SamplingSpec | None = None
    seed: int | None = Field(default=None, ge=0, lt=2**63)
    attempt: int | None = Field(default=None, ge=0, lt=2**53)
    series: str | None = Field(default=None, min_length=1, max_length=200)
    min_weight_version: int | None = Field(default=None, ge=0, lt=2**31)
    run: str | None = Field(default=None, max_length=200)


class SweepBody(Spec):
    """Body of `POST /sweep`."""

    idle_seconds: float | None = Field(default=None, ge=0)


class SamplesBody(Spec):
    """Body of `POST /sessions/{id}/samples`."""

    max_seq_len: int | None = Field(default=None, ge=1)
    metadata: dict[str, Any] = Field(default_factory=dict)


@dataclass(frozen=True)
class SessionApp:
    """The handlers, and what they need."""

    core: SessionCore
    retention: Retention
    admin_key: str
    model: str
    """Name of the model as agents see it."""
    info: Mapping[str, Any]
    describe_engines: Callable[[], list[dict[str, Any]]]
    metrics: SessionMetrics
    server_id: str
    max_body_bytes: int
    body_timeout_seconds: float
    stream_keepalive_seconds: float
    calls: set[asyncio.Task[TurnAnswer]] = field(default_factory=set)
    """Calls of streams; they go on when the client hangs up, and asyncio alone would forget them."""

    async def create(self, request: Request) -> Response:
        self._admit_admin(request)
        body = _validate(CreateBody, await self._read_object(request, empty_is_object=True))
        session = await self.core.create(
            body.session_id, body.sampling, body.seed, body.attempt, body.min_weight_version, body.run, body.series
        )
        session_id = session.record.session_id
        api_key = derive_session_key(self.admin_key, session_id, session.record.attempt)
        return _json({"session_id": session_id, "api_key": api_key, "num_turns": len(session.turns)})

    async def answer(self, wire: Wire, request: Request) -> Response:
        """One turn over one wire."""
        session_id, attempt = self._admit_session(request)
        body = await self._read_object(request)
        call = await wire.read(body, functools.partial(self.core.recall, session_id))
        turn = self.core.turn(session_id, call.request, attempt)
        if call.stream:
            return await self._stream(wire, call, session_id, turn, request)
        answer = await turn
        await self.core.note_arrival(session_id, answer, not await request.is_disconnected())
        return _json(call.build_answer(answer, self.model))

    async def _stream(
        self, wire: Wire, call: Call, session_id: str, turn: Awaitable[TurnAnswer], request: Request
    ) -> Response:
        """Nothing of a turn is sent before it is recorded; while it takes long, only signs of life are."""

        async def make() -> TurnAnswer:
            answer = await turn
            await self.core.note_arrival(session_id, answer, not gone.is_set() and not await request.is_disconnected())
            return answer

        gone = asyncio.Event()
        task = asyncio.ensure_future(make())
        self.calls.add(task)
        task.add_done_callback(self._forget)
        done, _ = await asyncio.wait([task], timeout=self.stream_keepalive_seconds)
        if done:
            body = call.build_stream(task.result(), self.model)
            return Response(body, media_type="text/event-stream", headers=_STREAM_HEADERS)
        body_parts = self._keep_alive(wire, call, task, gone)
        return StreamingResponse(body_parts, media_type="text/event-stream", headers=_STREAM_HEADERS)

    async def _keep_alive(
        self, wire: Wire, call: Call, task: asyncio.Task[TurnAnswer], gone: asyncio.Event
    ) -> AsyncIterator[bytes]:
        try:
            while not task.done():
                yield wire.keep_alive
                await asyncio.wait([task], timeout=self.stream_keepalive_seconds)
        finally:
            if not task.done():
                gone.set()
        try:
            yield call.build_stream(task.result(), self.model)
        except Exception as error:
            known = _as_session_error(error)
            _log_error("a stream that had begun", known)
            self.metrics.note_error(known)
            yield wire.build_stream_error(known)

    def _forget(self, task: asyncio.Task[TurnAnswer]) -> None:
        self.calls.discard(task)
        if not task.cancelled():
            task.exception()  # seen: whoever listens gets it, and if nobody does, nothing was recorded

    async def count_tokens(self, request: Request) -> Response:
        session_id, _ = self._admit_session(request)
        body = await self._read_object(request)
        call = await MessagesWire().read(body, functools.partial(self.core.recall, session_id))
        return _json({"input_tokens": await self.core.count_prompt_tokens(session_id, call.request)})

    async def models(self, request: Request) -> Response:
        self._admit_session(request)
        return _json(build_models(self.model))

    async def show_model(self, request: Request) -> Response:
        self._admit_session(request)
        name = request.path_params["model"]
        if name != self.model:
            raise UnknownModelError(f"no model {name!r:.250}; this session serves {self.model!r}")
        return _json(build_model(self.model))

    async def samples(self, request: Request) -> Response:
        self._admit_admin(request)
        body = _validate(SamplesBody, await self._read_object(request, empty_is_object=True))
        session_id = request.path_params["session_id"]
        if request.query_params.get("seal") == "true":
            await self.core.seal(session_id)
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

    async def end_run(self, request: Request) -> Response:
        self._admit_admin(request)
        await self.retention.end_run(request.path_params["run"])
        return Response(status_code=204)

    async def sweep(self, request: Request) -> Response:
        self._admit_admin(request)
        body = _validate(SweepBody, await self._read_object(request, empty_is_object=True))
        deleted = await self.retention.delete_expired()
        return _json({"deleted": deleted, "unused": await self.retention.list_unused(body.idle_seconds)})

    async def show_info(self, request: Request) -> Response:
        self._admit_admin(request)
        return _json(dict(self.info))

    async def show_engines(self, request: Request) -> Response:
        self._admit_admin(request)
        return _json({"engines": self.describe_engines()})

    async def show_metrics(self, request: Request) -> Response:
        self._admit_admin(request)
        page = MetricsPage(
            self.server_id,
            self.metrics,
            count_sessions=lambda: self.core.num_held,
            count_calls=lambda: self.core.num_in_flight,
            describe_engines=self.describe_engines,
        )
        return Response(page.build(), media_type=METRICS_MEDIA_TYPE)

    async def health(self, request: Request) -> Response:
        return _json({"status": "ok"})

    def _admit_admin(self, request: Request) -> None:
        if not is_key(_bearer(request), self.admin_key):
            raise UnauthorizedError("this needs the admin key: Authorization: Bearer $EVERROLL_ADMIN_KEY")

    def _admit_session(self, request: Request) -> tuple[str, int | None]:
        """The session, and the attempt that the key belongs to (None for the admin key)."""
        session_id: str = request.path_params["session_id"]
        for key in (_bearer(request), request.headers.get("x-api-key", "")):
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
                more = True
                while more:
                    message = await request.receive()
                    if message["type"] == "http.disconnect":
                        raise ClientDisconnect
                    chunks.append(message.get("body", b""))
                    more = message.get("more_body", False)
                    size += len(chunks[-1])
                    if size > self.max_body_bytes:
                        raise BodyTooLargeError(f"the body has more than {self.max_body_bytes} bytes")
        except TimeoutError as error:
            raise SlowBodyError(f"the body did not arrive within {self.body_timeout_seconds:g} s") from error
        return b"".join(chunks)


def build_app(handlers: SessionApp) -> Router:
    """The ASGI application."""
    session = "/sessions/{session_id}"
    wires: dict[str, Wire] = {
        "chat/completions": ChatWire(),
        "responses": ResponsesWire(),
        "messages": MessagesWire(),
    }
    route = functools.partial(_route, handlers.metrics)
    routes = [
        *(
            route(f"{session}/v1/{path}", functools.partial(handlers.answer, wire), "POST", wire.build_error)
            for path, wire in wires.items()
        ),
        route(f"{session}/v1/messages/count_tokens", handlers.count_tokens, "POST", MessagesWire().build_error),
        route("/sessions", handlers.create, "POST"),
        route(f"{session}/samples", handlers.samples, "POST"),
        route(session, handlers.describe, "GET"),
        route(session, handlers.release, "DELETE"),
        route(f"{session}/v1/models", handlers.models, "GET"),
        route(f"{session}/v1/models/{{model:path}}", handlers.show_model, "GET"),
        route("/runs/{run}/ended", handlers.end_run, "POST"),
        route("/sweep", handlers.sweep, "POST"),
        route("/info", handlers.show_info, "GET"),
        route("/engines", handlers.show_engines, "GET"),
        route("/metrics", handlers.show_metrics, "GET"),
        route("/health", handlers.health, "GET"),
    ]
    return Router(routes, _answer_unrouted)


def _route(
    metrics: SessionMetrics, path: str, handler: Handler, method: str, build_error: _BuildError = build_openai_error
) -> Route:
    async def guarded(request: Request) -> Response:
        try:
            return await handler(request)
        except ClientDisconnect:
            return Response(status_code=499)  # nobody reads it
        except Exception as error:
            known = _as_session_error(error)
            if not isinstance(known, NotOwnerError):  # of no interest: `peers` asks the owner
                metrics.note_error(known)
                _log_error(f"{request.method} {request.url.path}", known)
            return _answer_error(known, build_error)

    return Route(path, method, guarded)


def _as_session_error(error: BaseException) -> SessionError:
    """Any other exception is a bug: loud in the log, and its text in the caller's failure."""
    if isinstance(error, SessionError):
        return error
    _log.error("unexpected error", exc_info=error)
    return UnexpectedError(f"{type(error).__name__}: {error}")


def _answer_error(error: SessionError, build_error: _BuildError) -> Response:
    """The one place where an error becomes an answer, in the form of the wire that was spoken."""
    response = _json(build_error(error), error.status)
    if error.status not in _RETRYABLE and not isinstance(error, JournalError):
        response.headers["x-should-retry"] = "false"
    return response


def _log_error(what: str, error: SessionError) -> None:
    level = logging.ERROR if error.status == 500 else logging.WARNING
    _log.log(level, "%s: %d %s", what, error.status, error)


def _answer_unrouted(request: Request, status: int, reason: str) -> Response:
    """404 and 405 in words: an agent may have asked for a call that is not offered."""
    text = f"{request.method} {request.url.path}: {reason}; see docs/sessions.md for what is served"
    body = {"error": {"message": text, "type": "not_found", "code": "not_found", "param": None}}
    return _json(body, status)


def _bearer(request: Request) -> str:
    scheme, _, key = request.headers.get("authorization", "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else ""


def _validate(model: type[_S], value: dict[str, Any]) -> _S:
    try:
        return model.model_validate(value)
    except ValidationError as error:
        raise BadRequestError("; ".join(list_faults(error))) from error


def _json(value: dict[str, Any], status: int = 200) -> Response:
    return Response(to_json(value), status_code=status, media_type="application/json")
