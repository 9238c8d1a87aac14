"""`model.history_match` through a server: what counts as the recorded conversation is the run's choice."""

from __future__ import annotations

import contextlib
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from everroll.failures import ConfigurationError
from everroll.http_client import build_http_client
from everroll.sessions.server import SessionServerSettings, open_app, serve
from everroll.tokens.renderer import Message, load_renderer
from tests.session_helpers import (
    ADMIN_KEY,
    TOOL_CALL_TEXT,
    TOOLS,
    USER,
    Stack,
    model_section,
    run_fake_engine,
    serve_app,
    write_model_dir,
)


def ignore_durations(message: Message) -> Message:
    return {**message, "content": re.sub(r"took \d+ ms", "", message["content"])}


def fail_on_shouts(message: Message) -> Message:
    if message["content"].isupper():
        raise ValueError("too loud")
    return message


def build_settings(directory: Path, engine_url: str, history_match: str) -> SessionServerSettings:
    model = model_section(write_model_dir(directory / "model"))
    return SessionServerSettings(
        model=model.model_copy(update={"history_match": history_match}),
        engine_urls=[engine_url],
        journal=str(directory / "journal.db"),
        port=0,
    )


@contextlib.asynccontextmanager
async def run_matching(directory: Path, history_match: str) -> AsyncIterator[Stack]:
    async with run_fake_engine(TOOL_CALL_TEXT, "It is 3.", "Bye.") as engine:
        settings = build_settings(directory, engine.base_url, history_match)
        async with (
            open_app(settings, load_renderer(settings.model), ADMIN_KEY) as app,
            serve_app(app) as base_url,
            build_http_client(read_seconds=60) as http,
        ):
            yield Stack(engine, http, base_url)


@pytest.mark.parametrize(
    ("history_match", "arguments", "duration", "follows"),
    [
        ("json", '{"b":2,"a":1.0}', 5, [None, 0, 1]),
        ("json", '{"b":2,"a":1.0}', 6, [None, 0, 0]),
        ("strict", '{"a": 1, "b": 2}', 5, [None, 0, 1]),
        ("strict", '{"b":2,"a":1}', 5, [None, 0, None]),
        (f"{__name__}:ignore_durations", '{"a": 1, "b": 2}', 6, [None, 0, 1]),
        (f"{__name__}:ignore_durations", '{"b":2,"a":1}', 6, [None, 0, None]),
    ],
)
async def test_a_conversation_goes_on_where_what_counts_is_equal(
    tmp_path: Path, history_match: str, arguments: str, duration: int, follows: list[int | None]
) -> None:
    async with run_matching(tmp_path, history_match) as stack:
        handle = await stack.open()
        call = await stack.chat(handle, USER, tools=TOOLS)
        result: Any = {"role": "tool", "tool_call_id": call["tool_calls"][0]["id"], "content": "3, took 5 ms"}
        answer = await stack.chat(handle, USER, call, result, tools=TOOLS)
        call["tool_calls"][0]["function"]["arguments"] = arguments
        result["content"] = f"3, took {duration} ms"
        await stack.chat(handle, USER, call, result, answer, USER, tools=TOOLS)
        turns: Any = (await stack.client.describe("s"))["turns"]
        assert [turn["follows"] for turn in turns] == follows
        assert (await stack.client.info())["history_match"] == history_match


async def test_a_function_serves_retries_and_its_failure_is_the_answer(tmp_path: Path) -> None:
    async with run_matching(tmp_path, f"{__name__}:ignore_durations") as stack:
        handle = await stack.open()
        first = await stack.chat(handle, {"role": "user", "content": "took 5 ms"})
        assert await stack.chat(handle, {"role": "user", "content": "took 6 ms"}) == first
        assert len(stack.engine.requests) == 1
    (tmp_path / "other").mkdir()
    async with run_matching(tmp_path / "other", f"{__name__}:fail_on_shouts") as stack:
        response = await stack.post(await stack.open(), {"role": "user", "content": "HI"})
        assert (response.status_code, "fail_on_shouts failed" in response.text) == (500, True)
        assert await stack.num_turns() == 0


def test_a_function_that_is_not_there_stops_the_server_at_its_start(tmp_path: Path) -> None:
    settings = build_settings(tmp_path, "http://127.0.0.1:1", "no_such_module:match")
    with pytest.raises(ConfigurationError, match=r"history_match: 'no_such_module:match' cannot be imported"):
        serve(settings)
