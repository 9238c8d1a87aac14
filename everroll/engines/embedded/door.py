"""What stands before an engine's handlers, embedded or simulated: its API key, and clients that hang up."""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Awaitable

from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from everroll.engines.embedded.sequence import Sequence

_OPEN_PATHS = frozenset({"/health"})


class RequireKey:
    """Answers `refusal` (a 401) to requests without the API key, except for the health check."""

    def __init__(self, app: ASGIApp, api_key: str, refusal: ASGIApp) -> None:
        self._app = app
        self._expected = f"Bearer {api_key}".encode()
        self._refusal = refusal

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in _OPEN_PATHS:
            given = dict(scope["headers"]).get(b"authorization", b"")
            if not hmac.compare_digest(given, self._expected):
                await self._refusal(scope, receive, send)
                return
        await self._app(scope, receive, send)


async def unless_disconnected(request: Request, work: Awaitable[Sequence]) -> Sequence | None:
    """The result of `work`, or None once the client is gone, in which case the work is cancelled."""
    running = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_wait_for_disconnect(request.receive))
    try:
        await asyncio.wait((running, gone), return_when=asyncio.FIRST_COMPLETED)
        return running.result() if running.done() else None
    finally:
        for task in (running, gone):
            task.cancel()


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
