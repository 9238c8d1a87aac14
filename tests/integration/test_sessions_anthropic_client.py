"""The stock Anthropic clients against a session: tool loops, streams, errors, a server that is killed in between."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anthropic
import pytest

from everroll.http_client import build_http_client
from everroll.sessions.client import SessionClient, SessionHandle
from everroll.sessions.server import SessionServerSettings
from everroll.tokens.renderer import load_renderer
from tests.session_helpers import (
    ADMIN_KEY,
    SAMPLING,
    TOOL_CALL_TEXT,
    FakeEngine,
    ServerProcess,
    Stack,
    find_free_port,
    model_section,
    run_fake_engine,
    run_server_process,
    run_stack,
    write_model_dir,
)
from tests.wire_helpers import check_masked_tokens, record_given

TOOLS: Any = [
    {
        "name": "add",
        "description": "Add two numbers.",
        "input_schema": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
        "cache_control": {"type": "ephemeral"},
    }
]
SYSTEM: Any = [
    {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1; cch=00000;"},
    {"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}},
]


@pytest.fixture
async def engine() -> AsyncIterator[FakeEngine]:
    async with run_fake_engine() as engine:
        yield engine


@pytest.fixture
async def stack(engine: FakeEngine, tmp_path: Path) -> AsyncIterator[Stack]:
    directory = write_model_dir(tmp_path / "model")
    options = {"stream_keepalive_seconds": 0.2, "engine_patience_seconds": 0.0}
    renderer = load_renderer(model_section(directory))
    async with run_stack(renderer, directory, tmp_path / "journal.db", [engine], **options) as stack:
        yield stack


def open_anthropic(handle: SessionHandle) -> anthropic.AsyncAnthropic:
    base_url = handle.base_url.removesuffix("/v1")
    return anthropic.AsyncAnthropic(base_url=base_url, api_key=handle.api_key, max_retries=0, timeout=60)


async def test_a_tool_loop_with_streams_and_a_kill_in_between(engine: FakeEngine, tmp_path: Path) -> None:
    settings = SessionServerSettings(
        model=model_section(write_model_dir(tmp_path / "model")),
        engine_urls=[engine.base_url],
        journal=str(tmp_path / "journal.db"),
        port=find_free_port(),
    )
    with run_server_process(settings, tmp_path / "server.log") as server:
        async with build_http_client() as http:
            await hold_a_tool_conversation(server, SessionClient(http, server.base_url, ADMIN_KEY), engine)


async def hold_a_tool_conversation(server: ServerProcess, client: SessionClient, engine: FakeEngine) -> None:
    engine.replies = [f"<think>\nhm\n</think>\n\nLet me see.\n{TOOL_CALL_TEXT}", "It is 3.", "Bye."]
    given = record_given(engine)
    handle = await client.create("s", SAMPLING, seed=5)
    messages: list[Any] = [{"role": "user", "content": "1 + 2?"}]
    asked: Any = {"model": "any", "max_tokens": 9, "system": SYSTEM, "tools": TOOLS, "metadata": {"user_id": "u"}}
    asked["thinking"] = {"type": "enabled", "budget_tokens": 1024}
    async with open_anthropic(handle) as agent:
        async with agent.messages.stream(messages=messages, **asked) as stream:
            kinds = [event.type async for event in stream]
            first = await stream.get_final_message()
        assert kinds[0] == "message_start"
        assert kinds[-1] == "message_stop"
        thinking, text, call = first.content
        assert (thinking.type, thinking.thinking) == ("thinking", "hm")
        assert (text.type, text.text) == ("text", "Let me see.")
        assert (call.type, call.name, call.input) == ("tool_use", "add", {"a": 1, "b": 2})
        assert first.stop_reason == "tool_use"

        await asyncio.to_thread(server.restart)
        whole = await agent.messages.create(messages=messages, **asked)
        shown = [block.model_dump(exclude_none=True) for block in first.content]
        assert [block.model_dump(exclude_none=True) for block in whole.content] == shown
        assert (whole.usage.input_tokens, whole.usage.output_tokens) == (
            len(engine.requests[0]["input_ids"]),
            first.usage.output_tokens,
        )
        result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "3"}]}
        messages += [{"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
        asked["system"] = [{"type": "text", "text": SYSTEM[0]["text"].replace("0", "9") + "\nBe brief."}]
        second = await agent.messages.create(messages=messages, **asked)
        assert (second.content[0].text, second.stop_reason) == ("It is 3.", "end_turn")  # type: ignore[union-attr]
        messages += [{"role": "assistant", "content": second.content}, {"role": "user", "content": "bye"}]
        async with agent.messages.stream(messages=messages, **asked) as stream:
            assert "".join([text async for text in stream.text_stream]) == "Bye."
    assert len(engine.requests) == 3
    await check_masked_tokens(client, "s", engine, given)


async def test_the_blocking_client(stack: Stack) -> None:
    """Without thinking asked for, none is shown; the record has it all the same."""
    stack.engine.replies = ["<think>\nhm\n</think>\n\nyes", "no"]
    given = record_given(stack.engine)
    handle = await stack.open()
    await asyncio.to_thread(talk, handle)
    await check_masked_tokens(stack.client, "s", stack.engine, given)


def talk(handle: SessionHandle) -> None:
    base_url = handle.base_url.removesuffix("/v1")
    with anthropic.Anthropic(base_url=base_url, api_key=handle.api_key, timeout=60) as agent:
        messages: list[Any] = [{"role": "user", "content": "hi"}]
        first = agent.messages.create(model="m", max_tokens=5, messages=messages)
        assert [block.type for block in first.content] == ["text"]
        messages += [{"role": "assistant", "content": first.content}, {"role": "user", "content": "more"}]
        with agent.messages.stream(model="m", max_tokens=5, messages=messages) as stream:
            assert stream.get_final_text() == "no"
        count = agent.messages.count_tokens(model="m", messages=messages)
        assert count.input_tokens > 0
        assert [model.id for model in agent.models.list()] == ["model"]


async def test_errors_are_the_clients_own_classes(stack: Stack) -> None:
    handle = await stack.open()
    hi: Any = [{"role": "user", "content": "hi"}]
    image: Any = [{"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": "x"}}]}]
    async with open_anthropic(handle) as agent:
        with pytest.raises(anthropic.BadRequestError, match="'image', which is not supported"):
            await agent.messages.create(model="m", max_tokens=5, messages=image)
        with pytest.raises(anthropic.BadRequestError, match="stop_sequences"):
            await agent.messages.create(model="m", max_tokens=5, messages=hi, stop_sequences=["x"])
        with pytest.raises(anthropic.AuthenticationError):
            await agent.with_options(api_key="wrong").messages.create(model="m", max_tokens=5, messages=hi)
        stack.engine.status = 500
        with pytest.raises(anthropic.InternalServerError) as caught:
            await agent.messages.create(model="m", max_tokens=5, messages=hi, stream=True)
        assert (caught.value.status_code, caught.value.body["error"]["type"]) == (503, "overloaded_error")  # type: ignore[index]

        stack.engine.gate = asyncio.Event()  # the error comes after the first sign of life
        stream = await agent.messages.create(model="m", max_tokens=5, messages=hi, stream=True)
        stack.engine.gate.set()
        with pytest.raises(anthropic.APIStatusError, match="told to fail"):
            await anext(aiter(stream))
