"""Through a server that does not hold the session: every wire, its keys, streams; and what each server counts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest

from everroll.http_client import build_http_client
from everroll.sessions.server import listen, open_app
from everroll.sessions.settings import SessionServerSettings
from everroll.tokens.renderer import load_renderer
from tests.session_helpers import (
    ADMIN_KEY,
    USER,
    FakeEngine,
    Stack,
    model_section,
    open_openai,
    run_fake_engine,
    serve_on,
    write_model_dir,
)

ADMIN = {"Authorization": f"Bearer {ADMIN_KEY}"}


@pytest.fixture
async def servers(tmp_path: Path) -> AsyncIterator[tuple[Stack, Stack]]:
    """Two over one journal."""
    model_dir = write_model_dir(tmp_path / "model")
    renderer = load_renderer(model_section(model_dir))
    first_listener, second_listener = listen("127.0.0.1", 0), listen("127.0.0.1", 0)
    urls = [f"http://127.0.0.1:{each.getsockname()[1]}" for each in (first_listener, second_listener)]
    async with run_fake_engine("one", "two", "three", "four") as engine, build_http_client(read_seconds=60) as http:
        settings = SessionServerSettings(
            model=model_section(model_dir),
            engine_urls=[engine.base_url],
            journal=str(tmp_path / "journal.db"),
            stream_keepalive_seconds=0.3,
        )
        async with (
            open_app(settings, renderer, ADMIN_KEY, peer_url=urls[0], alone=False) as first,
            open_app(settings, renderer, ADMIN_KEY, peer_url=urls[1], alone=False) as second,
            serve_on(first, first_listener),
            serve_on(second, second_listener),
        ):
            yield Stack(engine, http, urls[0]), Stack(engine, http, urls[1])


def asked(engine: FakeEngine) -> int:
    return len(engine.requests)


async def test_anthropic_clients_are_relayed(servers: tuple[Stack, Stack]) -> None:
    owner, other = servers
    await owner.open()
    handle = await other.open()
    base_url = handle.base_url.removesuffix("/v1")
    async with anthropic.AsyncAnthropic(base_url=base_url, api_key=handle.api_key, max_retries=0, timeout=60) as agent:
        ask: Any = {"model": "m", "max_tokens": 100, "messages": [{"role": "user", "content": "hi"}]}
        async with agent.messages.stream(**ask) as stream:  # its key goes as x-api-key
            assert [text async for text in stream.text_stream] == ["one"]
        assert (await agent.messages.create(**ask)).content[0].text == "one"
        assert (await agent.messages.count_tokens(model="m", messages=ask["messages"])).input_tokens > 0
        assert (await agent.models.list()).data[0].id == "model"
    assert asked(owner.engine) == 1
    async with anthropic.AsyncAnthropic(base_url=base_url, api_key="es-0-0", max_retries=0, timeout=60) as stranger:
        with pytest.raises(anthropic.AuthenticationError):
            await stranger.messages.create(**ask)
    assert await owner.texts() == ["one|"]


async def test_openai_responses_and_streams_are_relayed(servers: tuple[Stack, Stack]) -> None:
    owner, other = servers
    await owner.open()
    handle = await other.open()
    async with open_openai(handle) as agent:
        first = await agent.responses.create(model="m", input="hi")
        assert first.output_text == "one"
        events = [
            event
            async for event in await agent.responses.create(
                model="m", input="go on", previous_response_id=first.id, stream=True
            )
        ]
        assert events[-1].type == "response.completed"
        assert events[-1].response.output_text == "two"
        messages: list[Any] = [{"role": "user", "content": "another"}]
        chunks = [c async for c in await agent.chat.completions.create(model="m", messages=messages, stream=True)]
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "three"
        with pytest.raises(openai.BadRequestError):
            await agent.chat.completions.create(model="m", messages=messages, n=2)
    assert await owner.texts() == ["one|two|", "three|"]


async def test_a_stream_that_takes_long_shows_signs_of_life_through_a_relay(servers: tuple[Stack, Stack]) -> None:
    """Piece by piece: the relay does not wait for the end of the answer."""
    owner, other = servers
    await owner.open()
    handle = await other.open()
    owner.engine.gate = asyncio.Event()
    body, lines = {"model": "m", "messages": [USER], "stream": True}, []
    async with other.http.stream(
        "POST", f"{handle.base_url}/chat/completions", json=body, headers={"x-api-key": handle.api_key}
    ) as response:
        async for line in response.aiter_lines():
            lines.append(line)
            owner.engine.gate.set()  # nothing is sampled before the first of them has come
    assert lines[0] == ": still sampling"
    assert [line for line in lines if line][-1] == "data: [DONE]"


async def test_each_server_counts_what_it_does(servers: tuple[Stack, Stack]) -> None:
    owner, other = servers
    await owner.open()
    handle = await other.open()
    await other.chat(handle, USER)
    await other.chat(handle, USER)
    assert (await other.post(handle, USER, n=2)).status_code == 400
    held, relayed = await read_metrics(owner), await read_metrics(other)
    assert held['everroll_session_turns_total{source="sampled"}'] == 1
    assert held['everroll_session_turns_total{source="replayed"}'] == 1
    assert held['everroll_session_tokens_total{kind="completion"}'] == 4  # "one" in bytes, and the end of the turn
    assert held['everroll_session_errors_total{kind="invalid_request_error",status="400"}'] == 1
    assert held["everroll_sessions_open"] == 1
    assert held["everroll_session_journal_seconds_count"] == 1
    assert held['everroll_session_journal_seconds_bucket{le="+Inf"}'] == 1
    assert held[f'everroll_engine_calls_total{{engine="{owner.engine.base_url}"}}'] == 1
    assert held[f'everroll_engine_healthy{{engine="{owner.engine.base_url}"}}'] == 1
    assert held[f'everroll_engine_weight_version{{engine="{owner.engine.base_url}"}}'] == 3
    assert relayed['everroll_session_relays_total{outcome="answered"}'] == 4
    assert relayed["everroll_sessions_open"] == 0
    assert (await owner.http.get(f"{owner.client.base_url}/metrics")).status_code == 401


async def read_metrics(stack: Stack) -> dict[str, float]:
    """Name and labels, the server's own apart, to value."""
    response = await stack.http.get(f"{stack.client.base_url}/metrics", headers=ADMIN)
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    return parse_metrics(response)


def parse_metrics(response: httpx.Response) -> dict[str, float]:
    values = {}
    for line in response.text.splitlines():
        if not line.startswith("#"):
            name, _, value = line.rpartition(" ")
            head, _, _ = name.rpartition('server="')
            head = head.removesuffix(",").removesuffix("{")
            values[head + ("}" if "{" in head else "")] = float(value)
    return values
