"""HTTP to engines: one aiohttp session, finite timeouts, and every failure mapped onto the engine error tree.

Knows transport and JSON only; what the fields mean is the business of each engine's client.
"""

from __future__ import annotations

import io
from dataclasses import dataclass

import aiohttp
from aiohttp.http_exceptions import ContentEncodingError
from pydantic_core import from_json, to_json

from everroll.engines.base import EngineAnswerError, EngineRejectedError, EngineUnavailableError, Trouble

JsonObject = dict[str, object]

_RETRYABLE_4XX = frozenset({408, 425, 429})
_MAX_WHOLE_BYTES = 2**20
_BUSY = frozenset({503, *_RETRYABLE_4XX})
_JSON = {"Content-Type": "application/json"}


@dataclass(frozen=True, slots=True)
class EngineTimeouts:
    """Bounds on calls to an engine, in seconds."""

    connect_seconds: float = 5.0
    generate_seconds: float = 600.0
    """From sending a generate request to the end of its answer, queueing in the engine included."""
    control_seconds: float = 60.0
    """Health, model info, pause, resume."""
    update_seconds: float = 600.0
    """Loading new weights."""


def open_client_session(max_connections: int = 1024, api_key: str | None = None) -> aiohttp.ClientSession:
    """A session for engine traffic; `api_key` goes with every call.

    It bounds the connections, not the calls: put a semaphore in front for those.
    """
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else None
    connector = aiohttp.TCPConnector(limit=max_connections, ttl_dns_cache=60)
    return aiohttp.ClientSession(connector=connector, headers=headers, cookie_jar=aiohttp.DummyCookieJar())


class EngineHttp:
    """JSON calls to one engine."""

    def __init__(
        self, base_url: str, session: aiohttp.ClientSession, connect_seconds: float, api_key: str | None
    ) -> None:
        self.base_url = base_url.rstrip("/")
        self._session = session
        self._connect_seconds = connect_seconds
        self._headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}

    def url(self, path: str) -> str:
        return f"{self.base_url}{path}"

    async def send(self, method: str, path: str, body: JsonObject | None, seconds: float) -> tuple[int, bytes]:
        """Send one request and read its whole answer, whatever the status.

        Raises:
            EngineUnavailableError: no answer (refused, reset, cut short, timed out).
            EngineRejectedError: the URL or its scheme can never work.
            EngineAnswerError: the body's content encoding is broken.
        """
        url = self.url(path)
        # `sock_connect` bounds the connection itself, `total` everything else: an answer comes in one piece at the
        # end, so that a separate read timeout would only be a second name for the total.
        timeout = aiohttp.ClientTimeout(total=seconds, sock_connect=min(self._connect_seconds, seconds))
        payload = None if body is None else wrap_body(to_json(body))
        headers = self._headers if body is None else {**self._headers, **_JSON}
        try:
            async with self._session.request(
                method, url, data=payload, timeout=timeout, headers=headers, allow_redirects=False
            ) as response:
                return response.status, await response.read()
        except (aiohttp.InvalidURL, aiohttp.NonHttpUrlClientError) as error:
            raise EngineRejectedError(method, url, f"this URL can never work ({error!r})") from error
        except aiohttp.ClientPayloadError as error:
            if isinstance(error.__cause__, ContentEncodingError):
                raise EngineAnswerError(method, url, f"the body cannot be decoded ({error})") from error
            raise EngineUnavailableError(method, url, _describe(error, seconds), trouble="lost") from error
        except (TimeoutError, aiohttp.ClientError, OSError) as error:
            problem = _describe(error, seconds)
            raise EngineUnavailableError(method, url, problem, trouble=_find_trouble(error)) from error

    async def call(self, method: str, path: str, body: JsonObject | None, seconds: float) -> bytes:
        """Send one request and insist on a 2xx answer.

        Raises:
            EngineUnavailableError: no answer, 5xx, 408 or 429.
            EngineRejectedError: any other status that is not 2xx.
        """
        status, payload = await self.send(method, path, body, seconds)
        self.raise_for_status(method, path, status, payload)
        return payload

    def raise_for_status(self, method: str, path: str, status: int, payload: bytes) -> None:
        """Raise unless the status is 2xx; see `call`."""
        if 200 <= status < 300:
            return
        text = payload.decode("utf-8", "replace")
        if status >= 500 or status in _RETRYABLE_4XX:
            trouble: Trouble = "busy" if status in _BUSY else "failed"
            raise EngineUnavailableError(
                method, self.url(path), "the engine failed", status=status, body=text, trouble=trouble
            )
        raise EngineRejectedError(method, self.url(path), "the engine refused the request", status=status, body=text)

    def parse_object(self, method: str, path: str, payload: bytes) -> JsonObject:
        """The JSON object in an answer.

        Raises:
            EngineAnswerError: not JSON, or not an object.
        """
        try:
            value = from_json(payload)
        except ValueError as error:
            raise EngineAnswerError(
                method, self.url(path), f"no JSON ({error})", status=200, body=payload.decode("utf-8", "replace")
            ) from error
        if not isinstance(value, dict):
            raise EngineAnswerError(method, self.url(path), "no JSON object", status=200, body=repr(value))
        return value


def wrap_body(body: bytes) -> bytes | io.BytesIO:
    """A large body as a file, which is sent piece by piece; as bytes it would hold up the event loop."""
    return io.BytesIO(body) if len(body) > _MAX_WHOLE_BYTES else body


def _find_trouble(error: BaseException) -> Trouble:
    if isinstance(error, (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError)):
        return "unreachable"
    return "timeout" if isinstance(error, TimeoutError) else "lost"


def _describe(error: BaseException, seconds: float) -> str:
    if isinstance(error, aiohttp.ConnectionTimeoutError):
        return "no connection in time"
    if isinstance(error, TimeoutError):
        return f"no answer within {seconds:g} s"
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
