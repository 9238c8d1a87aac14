"""Anthropic messages: normal form, and what is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from everroll.sessions.errors import BadRequestError
from everroll.sessions.wires.anthropic_messages import parse_messages_request

USER = {"role": "user", "content": "hi"}
USE = {"type": "tool_use", "id": "c1", "name": "add", "input": {"a": 1}}
RESULT = {"type": "tool_result", "tool_use_id": "c1", "content": "3"}


def parse(*messages: Any, **fields: Any) -> Any:
    return parse_messages_request({"messages": list(messages), **fields}).request


def text(value: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": value, **more}


def test_normal_form() -> None:
    thought = {"type": "thinking", "thinking": "hm", "signature": "s"}
    request = parse(
        {"role": "user", "content": [text("a", cache_control={"type": "ephemeral"}), text("b")]},
        {"role": "assistant", "content": [thought, text("c"), USE]},
        {"role": "user", "content": [{**RESULT, "content": [text("3")]}, text("d"), text("e")]},
        system=[text("x-anthropic-billing-header: cch=1;"), text("S")],
        tools=[{"name": "add", "input_schema": {"type": "object"}, "cache_control": {"type": "ephemeral"}}],
        metadata={"user_id": "u"},
    )
    (call,) = request.messages[2]["tool_calls"]
    assert json.loads(call["function"].pop("arguments")) == {"a": 1}
    assert request.messages == [
        {"role": "system", "content": "S"},
        {"role": "user", "content": "ab"},
        {
            "role": "assistant",
            "content": "c",
            "reasoning_content": "hm",
            "tool_calls": [{"type": "function", "function": {"name": "add"}, "id": "c1"}],
        },
        {"role": "tool", "content": "3", "tool_call_id": "c1"},
        {"role": "user", "content": "de"},
    ]
    assert request.tools == [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]


@pytest.mark.parametrize(
    ("block", "content"),
    [
        (RESULT, "3"),
        ({**RESULT, "content": None}, ""),
        ({**RESULT, "content": "no such file", "is_error": True}, "no such file"),
        ({**RESULT, "content": [], "is_error": True}, "error"),
    ],
)
def test_tool_results(block: dict[str, Any], content: str) -> None:
    assert parse({"role": "user", "content": [block]}).messages[0]["content"] == content


def test_arguments_that_are_no_object_come_back_as_the_model_wrote_them() -> None:
    use = {**USE, "input": {"__arguments__": "[1, 2"}}
    request = parse(USER, {"role": "assistant", "content": [use]}, {"role": "user", "content": [RESULT]})
    assert request.messages[1]["tool_calls"][0]["function"]["arguments"] == "[1, 2"


def test_tools_are_left_out_when_the_agent_wants_none() -> None:
    tools = [{"name": "add", "input_schema": {}}]
    assert parse(USER, tools=tools, tool_choice={"type": "auto"}).tools is not None
    assert parse(USER, tools=tools, tool_choice={"type": "none"}).tools is None


@pytest.mark.parametrize(
    "fields",
    [
        {"stop_sequences": ["x"]},
        {"tool_choice": {"type": "any"}},
        {"tool_choice": {"type": "tool", "name": "add"}},
        {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}},
        {"output_config": {"format": {"type": "json_schema"}}},
        {"mcp_servers": [{"url": "x"}]},
        {"tools": [{"type": "bash_20250124", "name": "bash"}]},
        {"tools": [{"input_schema": {}}]},
        {"tools": [{"name": "f", "input_schema": []}]},
        {"system": 5},
        {"seed": True},
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(fields: dict[str, Any]) -> None:
    with pytest.raises(BadRequestError, match=next(iter(fields))):
        parse(USER, **fields)


@pytest.mark.parametrize(
    "messages",
    [
        None,
        [],
        ["hi"],
        [{"role": "tool", "content": "x"}],
        [{"role": "user", "content": [{"type": "image", "source": {}}]}],
        [{"role": "user", "content": [{"type": "tool_result", "content": "x"}]}],
        [{"role": "user", "content": [{**RESULT, "content": [{"type": "image", "source": {}}]}]}],
        [USER, {"role": "assistant", "content": [{"type": "redacted_thinking", "data": "x"}]}, USER],
        [USER, {"role": "assistant", "content": [{**USE, "input": "x"}]}, USER],
        [USER, {"role": "assistant", "content": "prefill"}],
    ],
)
def test_malformed_messages_are_refused(messages: Any) -> None:
    with pytest.raises(BadRequestError, match="message"):
        parse_messages_request({"messages": messages})
