"""OpenAI responses: items to normal form, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from everroll.sessions.errors import BadRequestError
from everroll.sessions.wires.openai_responses import ResponsesWire, parse_items
from everroll.tokens.renderer import Message

USER = {"role": "user", "content": "hi"}
CALL = {"type": "function_call", "call_id": "c1", "name": "add", "arguments": '{"a": 1}', "id": "fc_1", "status": "x"}
OUTPUT = {"type": "function_call_output", "call_id": "c1", "output": "3"}
PARSED_CALL = {"type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}, "id": "c1"}
REASONING = {"type": "reasoning", "id": "rs", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]}


def said(text: str) -> dict[str, Any]:
    part = {"type": "output_text", "text": text, "annotations": []}
    return {"type": "message", "role": "assistant", "content": [part], "id": "msg", "status": "completed"}


async def read(**body: Any) -> Any:
    async def recall(_: bytes) -> list[Message]:
        raise AssertionError("nothing to recall")

    return (await ResponsesWire().read({"input": "hi", **body}, recall)).request


@pytest.mark.parametrize(
    ("items", "messages"),
    [
        ("hi", [USER]),
        ([USER], [USER]),
        (
            [{"role": "developer", "content": [{"type": "input_text", "text": "a"}]}],
            [{"role": "system", "content": "a"}],
        ),
        ([said("a")], [{"role": "assistant", "content": "a"}]),
        ([REASONING, said("a")], [{"role": "assistant", "content": "a", "reasoning_content": "hm"}]),
        ([said("a"), CALL], [{"role": "assistant", "content": "a", "tool_calls": [PARSED_CALL]}]),
        (
            [REASONING, CALL, CALL, OUTPUT],
            [
                {
                    "role": "assistant",
                    "content": "",
                    "reasoning_content": "hm",
                    "tool_calls": [PARSED_CALL, PARSED_CALL],
                },
                {"role": "tool", "content": "3", "tool_call_id": "c1"},
            ],
        ),
        ([said("a"), said("b")], [{"role": "assistant", "content": "a"}, {"role": "assistant", "content": "b"}]),
        ([{"type": "reasoning", "summary": [], "encrypted_content": "x"}, USER], [USER]),
        ([{**OUTPUT, "output": [{"type": "input_text", "text": "3"}]}], [{**OUTPUT, "x": 0}]),
    ],
)
def test_items_in_normal_form(items: Any, messages: list[dict[str, Any]]) -> None:
    if messages[0].get("x") == 0:
        messages = [{"role": "tool", "content": "3", "tool_call_id": "c1"}]
    assert parse_items(items) == messages


@pytest.mark.parametrize(
    "item",
    [
        "text",
        {"role": "robot", "content": "x"},
        {"role": "user", "content": [{"type": "input_image", "image_url": "x"}]},
        {"type": "function_call", "name": "f"},
        {"type": "function_call_output", "output": "3"},
        {"type": "item_reference", "id": "x"},
        {"type": ["message"]},
    ],
)
def test_malformed_items_are_refused_by_place(item: Any) -> None:
    with pytest.raises(BadRequestError, match=r"input\[1\]"):
        parse_items([USER, item])


@pytest.mark.parametrize(
    "fields",
    [
        {"background": True},
        {"conversation": "c"},
        {"prompt": {"id": "x"}},
        {"truncation": "auto"},
        {"text": {"format": {"type": "json_object"}}},
        {"tool_choice": "required"},
        {"parallel_tool_calls": False},
        {"top_logprobs": 3},
        {"instructions": ["x"]},
        {"tools": [{"type": "web_search"}]},
        {"tools": [{"type": "function", "parameters": {}}]},
        {"previous_response_id": "other"},
        {"seed": 1.5},
    ],
)
async def test_what_cannot_be_honoured_is_refused_by_name(fields: dict[str, Any]) -> None:
    with pytest.raises(BadRequestError, match=next(iter(fields))):
        await read(**fields)


async def test_wishes_are_accepted() -> None:
    wishes: dict[str, Any] = {
        "temperature": 0.1,
        "max_output_tokens": 5,
        "reasoning": {"effort": "low"},
        "store": False,
    }
    wishes |= {"include": ["reasoning.encrypted_content"], "text": {"verbosity": "low"}, "metadata": {"a": "b"}}
    assert await read(**wishes) == await read()
