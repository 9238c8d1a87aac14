"""The stock OpenAI clients on the responses wire: streams, tool loops, conversations by id, errors."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest

from everroll.sessions.client import SessionHandle
from everroll.tokens.renderer import ChatRenderer, load_renderer
from tests.session_helpers import (
    TOOL_CALL_TEXT,
    TOOLS,
    USER,
    FakeEngine,
    Stack,
    model_section,
    open_openai,
    run_fake_engine,
    run_stack,
    write_model_dir,
)
from tests.wire_helpers import check_masked_tokens, record_given

FUNCTIONS: Any = [{"type": "function", "strict": True, **TOOLS[0]["function"]}]  # type: ignore[dict-item]


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    return write_model_dir(tmp_path / "model")


@pytest.fixture
def renderer(model_dir: Path) -> ChatRenderer:
    return load_renderer(model_section(model_dir))


@pytest.fixture
async def engine() -> AsyncIterator[FakeEngine]:
    async with run_fake_engine() as engine:
        yield engine


@pytest.fixture
async def stack(engine: FakeEngine, renderer: ChatRenderer, model_dir: Path, tmp_path: Path) -> AsyncIterator[Stack]:
    options = {"stream_keepalive_seconds": 0.2, "engine_patience_seconds": 0.0}
    async with run_stack(renderer, model_dir, tmp_path / "journal.db", [engine], **options) as stack:
        yield stack


async def test_a_streamed_tool_loop(stack: Stack) -> None:
    stack.engine.replies = [f"<think>\nhm\n</think>\n\nLet me see.\n{TOOL_CALL_TEXT}", "It is 3."]
    given = record_given(stack.engine)
    items: list[Any] = [USER]
    asked: Any = {"model": "any", "instructions": "Be brief.", "tools": FUNCTIONS, "store": False}
    async with open_openai(await stack.open()) as agent:
        async with agent.responses.stream(input=items, **asked) as stream:
            events = [event async for event in stream]
            first = await stream.get_final_response()
        assert [event.sequence_number for event in events] == list(range(len(events)))
        assert [event.type for event in events] == [
            *("response.created", "response.in_progress"),
            *("response.output_item.added", "response.content_part.added"),
            *("response.reasoning_text.delta", "response.reasoning_text.done"),
            *("response.content_part.done", "response.output_item.done"),
            *("response.output_item.added", "response.content_part.added"),
            *("response.output_text.delta", "response.output_text.done"),
            *("response.content_part.done", "response.output_item.done"),
            *("response.output_item.added", "response.function_call_arguments.delta"),
            *("response.function_call_arguments.done", "response.output_item.done", "response.completed"),
        ]
        reasoning, message, call = first.output
        assert reasoning.content[0].text == "hm"  # type: ignore[union-attr,index]
        assert (message.content[0].text, first.output_text) == ("Let me see.", "Let me see.")  # type: ignore[union-attr,index]
        assert (call.name, call.arguments) == ("add", '{"a": 1, "b": 2}')  # type: ignore[union-attr]
        assert (first.temperature, first.max_output_tokens, first.status) == (0.7, 200, "completed")

        whole = await agent.responses.create(input=items, **asked)
        assert whole.id == first.id
        assert [item.to_dict() for item in whole.output] == [shown(item) for item in first.output]
        assert whole.usage == first.usage
        result = {"type": "function_call_output", "call_id": call.call_id, "output": "3"}  # type: ignore[union-attr]
        second = await agent.responses.create(input=[*items, *whole.output, result], **asked)
        assert second.output_text == "It is 3."
    await check_masked_tokens(stack.client, "s", stack.engine, given)


def shown(item: Any) -> dict[str, Any]:
    """An item of a stream without what the client adds to it."""
    entry: dict[str, Any] = item.to_dict()
    entry.pop("parsed_arguments", None)
    for part in entry.get("content", ()):
        part.pop("parsed", None)
    return entry


async def test_a_conversation_by_id_survives_the_server(
    engine: FakeEngine, renderer: ChatRenderer, model_dir: Path, tmp_path: Path
) -> None:
    """C9 on this wire: the id of a response is found again in the journal."""
    engine.replies = [TOOL_CALL_TEXT, "It is 3.", "Bye."]
    given = record_given(engine)
    asked: Any = {"model": "m", "instructions": "Be brief.", "tools": FUNCTIONS}
    new: list[Any] = [USER]
    previous = None
    for turn in range(3):
        async with run_stack(renderer, model_dir, tmp_path / "journal.db", [engine]) as stack:
            async with open_openai(await stack.open()) as agent:
                for _ in range(2):  # and the same request again
                    answer = await agent.responses.create(input=new, previous_response_id=previous, **asked)
            assert await stack.num_turns() == turn + 1
            previous = answer.id
            new = [{"role": "user", "content": "bye"}]
            if turn == 0:
                new = [{"type": "function_call_output", "call_id": answer.output[0].call_id, "output": "3"}]  # type: ignore[union-attr]
            if turn == 2:
                await check_masked_tokens(stack.client, "s", engine, given)


async def test_the_blocking_client(stack: Stack) -> None:
    stack.engine.replies = ["yes", "no"]
    given = record_given(stack.engine)
    await asyncio.to_thread(talk, await stack.open())
    await check_masked_tokens(stack.client, "s", stack.engine, given)


def talk(handle: SessionHandle) -> None:
    with openai.OpenAI(base_url=handle.base_url, api_key=handle.api_key, timeout=60) as agent:
        first = agent.responses.create(model="m", input="hi")
        with agent.responses.stream(model="m", input="more", previous_response_id=first.id) as stream:
            assert stream.get_final_response().output_text == "no"
        assert [model.id for model in agent.models.list()] == ["model"]
        assert agent.models.retrieve("model").id == "model"


async def test_errors_are_the_clients_own_classes(stack: Stack) -> None:
    async with open_openai(await stack.open()) as agent:
        for refused in ({"background": True}, {"truncation": "auto"}, {"max_tool_calls": 1}):
            with pytest.raises(openai.BadRequestError, match=next(iter(refused))):
                await agent.responses.create(model="m", input="hi", **refused)  # type: ignore[call-overload]
        stack.engine.status = 500
        with pytest.raises(openai.InternalServerError) as caught:
            await agent.responses.create(model="m", input="hi", stream=True)
        assert caught.value.status_code == 503

        stack.engine.gate = asyncio.Event()  # the error comes after the first sign of life
        stream = await agent.responses.create(model="m", input="hi", stream=True)
        chat = await agent.chat.completions.create(model="m", messages=[USER, USER], stream=True)  # type: ignore[list-item]
        stack.engine.gate.set()
        for late in (stream, chat):
            with pytest.raises(openai.APIError, match="told to fail"):
                await anext(aiter(late))
