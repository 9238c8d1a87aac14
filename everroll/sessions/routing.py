"""From a path and a method to the handler that answers it: the least that an ASGI application needs.

Requests carry a whole conversation and come by the thousand each second, so that what surrounds a handler counts. The
routes are tried in the order given; those that are asked for most stand first.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

Handler = Callable[[Request], Awaitable[Response]]
"""Answers whatever happens: it raises nothing."""
Unrouted = Callable[[Request, int, str], Response]
"""Answers a request that no route takes, with this status for this reason."""

_PARAMETER = re.compile(r"\\{(\w+)(:path)?\\}")


@dataclass(frozen=True)
class Route:
    """One call. In `path`, `{name}` stands for one segment and `{name:path}` for the rest."""

    path: str
    method: str
    handler: Handler


class Router:
    """The ASGI application over some routes."""

    def __init__(self, routes: Sequence[Route], unrouted: Unrouted) -> None:
        self._routes = [(compile_path(route.path), route.method, route.handler) for route in routes]
        self._unrouted = unrouted

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        path, method = scope["path"], scope["method"]
        wanted = "GET" if method == "HEAD" else method
        known = False
        for pattern, offered, handler in self._routes:
            found = pattern.match(path)
            if found is None:
                continue
            known = True
            if offered == wanted:
                scope["path_params"] = found.groupdict()
                response = await handler(Request(scope, receive))
                await response(scope, receive, send)
                return
        status, reason = (405, "Method Not Allowed") if known else (404, "Not Found")
        await self._unrouted(Request(scope, receive), status, reason)(scope, receive, send)


def compile_path(path: str) -> re.Pattern[str]:
    """The pattern of a whole path."""

    def build_group(found: re.Match[str]) -> str:
        return f"(?P<{found[1]}>{'.*' if found[2] else '[^/]+'})"

    return re.compile(_PARAMETER.sub(build_group, re.escape(path)) + r"\Z")
