"""Calls of the model that agents make without a client library."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import httpx
import pytest
from aiohttp import web

from everroll.http_client import build_http_client
from everroll.model_calls import ModelCallError, build_chat_body, complete_chat

BODY = {"model": "policy", "messages": []}


@asynccontextmanager
async def serve(answers: Sequence[web.Response]) -> AsyncIterator[tuple[str, list[str]]]:
    """A server that gives these answers one after the other; its base URL, and the keys that it was shown."""
    left, keys = list(answers), []

    async def answer(request: web.Request) -> web.Response:
        assert await request.json() == BODY
        keys.append(request.headers["authorization"])
        return left.pop(0)

    app = web.Application()
    app.router.add_post("/v1/chat/completions", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}/v1", keys
    finally:
        await runner.cleanup()


def refuse(status: int, *, try_again: str | None = None) -> web.Response:
    return web.Response(status=status, text="why", headers={} if try_again is None else {"x-should-retry": try_again})


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("everroll.model_calls._FIRST_PAUSE_SECONDS", 0.001)


@pytest.mark.parametrize("first", [refuse(503), refuse(429), refuse(409), refuse(400, try_again="true")])
async def test_what_may_pass_is_tried_again(first: web.Response) -> None:
    async with serve([first, web.json_response({"choices": []})]) as (url, keys), build_http_client() as http:
        assert await complete_chat(http, url, "key", BODY) == {"choices": []}
        assert keys == ["Bearer key"] * 2


@pytest.mark.parametrize("first", [refuse(400), refuse(404), refuse(500, try_again="false")])
async def test_what_was_refused_is_not(first: web.Response) -> None:
    async with serve([first]) as (url, keys), build_http_client() as http:
        with pytest.raises(ModelCallError, match=f"answered {first.status}: why") as caught:
            await complete_chat(http, url, "key", BODY)
    assert (caught.value.status, len(keys)) == (first.status, 1)


async def test_the_last_failure_is_told() -> None:
    async with serve([refuse(503) for _ in range(6)]) as (url, keys), build_http_client() as http:
        with pytest.raises(ModelCallError, match="answered 503"):
            await complete_chat(http, url, "key", BODY)
    assert len(keys) == 6


@pytest.mark.parametrize("text", ["[1]", "<html>"])
async def test_an_answer_that_is_no_object_is_an_error(text: str) -> None:
    async with serve([web.Response(text=text)]) as (url, _), build_http_client() as http:
        with pytest.raises(ModelCallError, match="no JSON object"):
            await complete_chat(http, url, "key", BODY)


async def test_what_cannot_be_sent_is_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("everroll.model_calls._FIRST_PAUSE_SECONDS", 1000.0)
    monkeypatch.setattr("everroll.model_calls._LONGEST_PAUSE_SECONDS", 1000.0)
    async with build_http_client() as http:
        with pytest.raises(httpx.UnsupportedProtocol):
            await complete_chat(http, "nothing://127.0.0.1", "key", BODY)


def test_options_of_clients_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"max_retries, timeout: .* episode\.openai\(\)"):
        build_chat_body("policy", [], {"timeout": 5, "max_retries": 1})


def test_a_stream_needs_a_client() -> None:
    with pytest.raises(ValueError, match=r"episode\.openai\(\)"):
        build_chat_body("policy", [], {"stream": True})
