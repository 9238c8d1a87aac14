"""Several session servers over one journal, behind one address: a request goes to the server that holds its session.

An ASGI layer around the application. The application answers 421 for a session that another server holds; then the
request is relayed to that one, as it came and as its answer comes. A server that cannot be reached has its lease ended:
whoever is asked next claims its sessions. That this may be a mistake does no harm, because the journal takes no write
of an earlier owner; the worst that follows is a call that is sampled once more.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections import OrderedDict
from collections.abc import MutableMapping
from enum import Enum
from typing import Any

import aiohttp
from pydantic_core import from_json, to_json
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from yarl import URL

from everroll.engines.http import wrap_body
from everroll.sessions.errors import JournalError, NotOwnerError
from everroll.sessions.journal import Journal, Owner
from everroll.sessions.metrics import SessionMetrics

_SERVER_HEADER = "x-everroll-server"
"""In a relayed request: whom it is for. In its answer: who answered."""
_SESSION_PATH = re.compile(r"^/sessions/([^/]+)(?:/|$)")
_MAX_HINTS = 16384
_CONNECT_SECONDS = 2.0
_FIRST_PAUSE_SECONDS = 0.02
_LONGEST_PAUSE_SECONDS = 1.0
_PATIENCE_SECONDS = 10.0
"""Beyond a lease: how long a request waits for somebody to hold its session."""
_HOP_HEADERS = frozenset(
    {"connection", "keep-alive", "transfer-encoding", "te", "trailer", "upgrade", "host", "content-length", "expect"}
)

_log = logging.getLogger(__name__)


class _Outcome(Enum):
    ANSWERED = "answered"
    NOT_OWNER = "not the owner"
    DEAD = "dead"
    LOST = "lost"


class _Body:
    """A request's body as far as it was read, to be read again by whoever is asked next."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._messages: list[Message] = []
        self.complete = False

    def replay(self) -> Receive:
        position = 0

        async def receive() -> Message:
            nonlocal position
            if position == len(self._messages):
                await self._read()
                if position == len(self._messages):
                    return {"type": "http.disconnect"}
            position += 1
            return self._messages[position - 1]

        return receive

    async def read(self, max_bytes: int, timeout_seconds: float) -> bytes | None:
        """All of it; None when it is too large, does not come in time, or its client is gone."""
        try:
            async with asyncio.timeout(timeout_seconds):
                while not self.complete and self._size() <= max_bytes:
                    await self._read()
        except TimeoutError:
            return None
        if self._size() > max_bytes or any(message["type"] != "http.request" for message in self._messages):
            return None
        return b"".join(message.get("body", b"") for message in self._messages)

    async def _read(self) -> None:
        """One more message; past the end of the body they tell of the client and are not kept."""
        message = await self._receive()
        if self.complete:
            return
        self._messages.append(message)
        self.complete = not message.get("more_body", False)

    def _size(self) -> int:
        return sum(len(message.get("body", b"")) for message in self._messages)


class PeerRouting:
    """Routes the requests of one server."""

    def __init__(
        self,
        app: ASGIApp,
        journal: Journal,
        http: aiohttp.ClientSession,
        *,
        max_body_bytes: int,
        body_timeout_seconds: float,
        answer_timeout_seconds: float,
        metrics: SessionMetrics,
    ) -> None:
        self._app = app
        self._journal = journal
        self._http = http
        self._relays = metrics.relays
        self._max_body_bytes = max_body_bytes
        self._body_timeout_seconds = body_timeout_seconds
        self._answer_timeout = aiohttp.ClientTimeout(
            total=answer_timeout_seconds,
            connect=_CONNECT_SECONDS,
            sock_connect=_CONNECT_SECONDS,
            sock_read=answer_timeout_seconds,
        )
        self._owners: OrderedDict[str, Owner] = OrderedDict()
        """Who held a session when it was last asked for; a hint that saves a look into the journal."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("path", "")
        if scope["type"] != "http" or not path.startswith("/sessions"):
            await self._app(scope, receive, send)
            return
        addressee = _header(scope, _SERVER_HEADER)
        if addressee is not None:
            await self._answer_peer(addressee, scope, receive, send)
            return
        try:
            await self._route(scope, _Body(receive), send)
        except JournalError as error:
            await _send_error(send, error.status, error.kind, str(error))

    async def _answer_peer(self, addressee: str, scope: Scope, receive: Receive, send: Send) -> None:
        """A request that another server relayed: answered here, or not at all."""
        name = (_SERVER_HEADER.encode(), self._journal.server_id.encode())

        async def signed(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", ()), name]}
            await send(message)

        if addressee == self._journal.server_id:
            await self._app(scope, receive, signed)
        else:
            await _send_error(signed, NotOwnerError.status, NotOwnerError.kind, "this is another server by now")

    async def _route(self, scope: Scope, body: _Body, send: Send) -> None:
        """Ask this server or the session's owner until one of them answers, within a bound.

        Raises:
            JournalError: the journal is away, or nobody came to hold the session in time.
        """
        found = _SESSION_PATH.match(scope["path"])
        session_id = found[1] if found else None
        deadline = asyncio.get_running_loop().time() + self._journal.lease_seconds + _PATIENCE_SECONDS
        pause = _FIRST_PAUSE_SECONDS
        while asyncio.get_running_loop().time() < deadline:
            owner = self._owners.get(session_id or "")
            if owner is None:
                if await self._ask_app(scope, body, send):
                    return
                session_id = session_id or await self._read_session_id(body)
                owner = await self._journal.find_owner(session_id or "")
            if owner is not None and owner.server_id != self._journal.server_id and owner.url:
                content = await body.read(self._max_body_bytes, self._body_timeout_seconds)
                if content is None:
                    await self._app(scope, body.replay(), send)  # it words what is wrong with the body
                    return
                outcome = await self._relay(owner, scope, content, send)
                self._relays[outcome.value] += 1
                if outcome is _Outcome.ANSWERED:
                    self._remember(session_id, owner)
                    return
                self._owners.pop(session_id or "", None)
                if outcome is _Outcome.DEAD:
                    _log.warning("session server %s at %s is gone; its sessions are taken over", *_pair(owner))
                    await self._journal.end_lease(owner.server_id)
                    continue
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
        raise JournalError("the server that holds this session does not answer, and its lease has not run out yet")

    async def _ask_app(self, scope: Scope, body: _Body, send: Send) -> bool:
        """Let this server answer; False when it does not hold the session."""
        refused = False

        async def checked(message: Message) -> None:
            nonlocal refused
            if message["type"] == "http.response.start" and message["status"] == NotOwnerError.status:
                refused = True
            if not refused:
                await send(message)

        await self._app(scope, body.replay(), checked)
        return not refused

    async def _relay(self, owner: Owner, scope: Scope, content: bytes, send: Send) -> _Outcome:
        """Pass the request on, and its answer back piece by piece.

        Raises:
            aiohttp.ClientError: the owner was lost in the middle of its answer; the client's connection ends too.
        """
        query = scope["query_string"].decode("latin-1")
        url = URL(owner.url + scope["raw_path"].decode("latin-1") + (f"?{query}" if query else ""), encoded=True)
        headers = [(n.decode("latin-1"), v.decode("latin-1")) for n, v in scope["headers"]]
        headers = [pair for pair in headers if pair[0] not in _HOP_HEADERS]
        started = False
        try:
            async with self._http.request(
                scope["method"],
                url,
                data=wrap_body(content),
                headers=[*headers, (_SERVER_HEADER, owner.server_id)],
                timeout=self._answer_timeout,
                allow_redirects=False,
                auto_decompress=False,
            ) as response:
                if response.headers.get(_SERVER_HEADER) != owner.server_id:
                    return _Outcome.DEAD if _SERVER_HEADER in response.headers else _Outcome.LOST
                if response.status == NotOwnerError.status:
                    return _Outcome.NOT_OWNER
                started = True
                await send(_start(response))
                async for chunk in response.content.iter_any():
                    await send({"type": "http.response.body", "body": chunk, "more_body": True})
                await send({"type": "http.response.body", "body": b""})
                return _Outcome.ANSWERED
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            if started:
                raise
            refused = isinstance(error, aiohttp.ClientConnectorError) and isinstance(
                error.os_error, ConnectionRefusedError
            )
            return _Outcome.DEAD if refused else _Outcome.LOST

    async def _read_session_id(self, body: _Body) -> str | None:
        """Of `POST /sessions`, which the application has found to be for another server."""
        content = await body.read(self._max_body_bytes, self._body_timeout_seconds)
        value = from_json(content or b"{}")
        return value.get("session_id") if isinstance(value, dict) else None

    def _remember(self, session_id: str | None, owner: Owner) -> None:
        if session_id is None:
            return
        self._owners[session_id] = owner
        self._owners.move_to_end(session_id)
        if len(self._owners) > _MAX_HINTS:
            self._owners.popitem(last=False)


def _start(response: aiohttp.ClientResponse) -> Message:
    headers = [
        (name.lower(), value)
        for name, value in response.raw_headers
        if name.decode("latin-1").lower() not in _HOP_HEADERS - {"content-length"}
    ]
    return {"type": "http.response.start", "status": response.status, "headers": headers}


def _pair(owner: Owner) -> tuple[str, str]:
    return owner.server_id, owner.url


def _header(scope: MutableMapping[str, Any], name: str) -> str | None:
    wanted = name.encode()
    return next((value.decode("latin-1") for key, value in scope["headers"] if key == wanted), None)


async def _send_error(send: Send, status: int, kind: str, text: str) -> None:
    body = to_json({"error": {"message": text, "type": kind, "code": kind, "param": None}})
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
