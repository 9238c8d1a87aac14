"""Calls of the model without a client library: JSON over connections that a worker's episodes share.

What broke off, or was answered with a status that says so, is tried again as stock clients do it: after pauses that
double. Each try may take as long as the connections allow, 600 s in a worker.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Mapping, Sequence
from typing import Any

import httpx

MODEL_CALL_RETRIES = 5
"""After pauses that double from half a second to 8 s: a session server that was killed is back in seconds with all that
it had recorded, where the clients' own two tries would be over in less than two."""
_FIRST_PAUSE_SECONDS = 0.5
_LONGEST_PAUSE_SECONDS = 8.0
_JITTER = 0.25
_TRIED_AGAIN = frozenset({408, 409, 429})
_CANNOT_HEAL = (httpx.LocalProtocolError, httpx.UnsupportedProtocol)
_OPTIONS_OF_CLIENTS = frozenset({"extra_body", "extra_headers", "extra_query", "max_retries", "timeout"})
_SHOWN_CHARACTERS = 2000


class ModelCallError(Exception):
    """The session server refused a call, or still failed at the last try."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(f"the session server answered {status}: {text[:_SHOWN_CHARACTERS]}")
        self.status = status


async def complete_chat(
    http: httpx.AsyncClient, base_url: str, api_key: str, body: Mapping[str, Any]
) -> dict[str, Any]:
    """POST `body` to `<base_url>/chat/completions`; returns the answer's JSON object.

    Raises:
        ModelCallError: it was refused, or failed each time.
        httpx.TransportError: no answer came, at the last try either.
    """
    url, headers = f"{base_url}/chat/completions", {"authorization": f"Bearer {api_key}"}
    for retries_left in range(MODEL_CALL_RETRIES, -1, -1):
        try:
            answer = await http.post(url, json=body, headers=headers)
            if answer.is_success:
                return _read_object(answer)
            error: Exception = ModelCallError(answer.status_code, answer.text)
            if not _may_try_again(answer):
                raise error
        except _CANNOT_HEAL:
            raise
        except httpx.TransportError as lost:
            error = lost
        if not retries_left:
            raise error
        await asyncio.sleep(_pause_seconds(MODEL_CALL_RETRIES - retries_left))
    raise AssertionError("the last try returns or raises")


def build_chat_body(model: str, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any]) -> dict[str, Any]:
    """The body of a chat completion that is not streamed.

    Raises:
        ValueError: a stream was asked for, or something that no request has.
    """
    if options.get("stream"):
        raise ValueError("a stream needs a client: episode.openai() or episode.anthropic()")
    if foreign := sorted(_OPTIONS_OF_CLIENTS & options.keys()):
        raise ValueError(f"{', '.join(foreign)}: an option of clients, and no part of a request: use episode.openai()")
    return {"model": model, "messages": list(messages), **options}


def _read_object(answer: httpx.Response) -> dict[str, Any]:
    with contextlib.suppress(ValueError):
        value = answer.json()
        if isinstance(value, dict):
            return value
    raise ModelCallError(answer.status_code, f"no JSON object: {answer.text}")


def _may_try_again(answer: httpx.Response) -> bool:
    asked = answer.headers.get("x-should-retry")
    if asked in ("true", "false"):
        return bool(asked == "true")
    return answer.status_code in _TRIED_AGAIN or answer.status_code >= 500


def _pause_seconds(num_tries: int) -> float:
    pause = min(_FIRST_PAUSE_SECONDS * 2.0**num_tries, _LONGEST_PAUSE_SECONDS)
    return float(pause * (1 - _JITTER * random.random()))  # not all episodes of a worker at once
