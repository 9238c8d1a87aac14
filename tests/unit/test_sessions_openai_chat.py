"""OpenAI chat requests: normal form, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from everroll.sessions.errors import BadRequestError
from everroll.sessions.turns import compute_keys
from everroll.sessions.wires.openai_chat import parse_chat_request
from tests.session_helpers import TOOLS

USER = {"role": "user", "content": "hi"}


def parse(*messages: dict[str, Any], **fields: Any) -> Any:
    return parse_chat_request({"messages": list(messages), **fields}).request


def key(*messages: dict[str, Any], **fields: Any) -> bytes:
    return compute_keys(parse(*messages, **fields)).request_key


def call(arguments: Any, **fields: Any) -> dict[str, Any]:
    function = {"name": "add", "arguments": arguments}
    calls = [{"id": "c1", "type": "function", "function": function}]
    return {"role": "assistant", "tool_calls": calls, **fields}


RESULT = {"role": "tool", "tool_call_id": "c1", "content": "3"}


def test_normal_form_drops_what_clients_add() -> None:
    reply = call('{"a": 1}', content=None, refusal=None, annotations=[], audio=None, function_call=None)
    request = parse(
        {"role": "developer", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}, reply, RESULT
    )
    assert request.messages[0] == {"role": "system", "content": "ab"}
    assert request.messages[1] == call('{"a": 1}', content="")


@pytest.mark.parametrize(
    ("left", "right"),
    [
        (call('{"a": 1, "b": 2}', content=None), call('{"b":2,"a":1}', content="")),
        (call('{"a": 1}'), call({"a": 1})),
        (call("{}", reasoning_content=None), call("{}", reasoning="")),
    ],
)
def test_equal_histories_have_equal_keys(left: dict[str, Any], right: dict[str, Any]) -> None:
    assert key(USER, left, RESULT) == key(USER, right, RESULT)


@pytest.mark.parametrize(
    "other",
    [
        call('{"a": 2}'),
        call('{"a": "1"}'),
        call("not json"),
        call('{"a": 1}', content="text"),
        {"role": "assistant", "content": ""},
    ],
)
def test_different_histories_have_different_keys(other: dict[str, Any]) -> None:
    assert key(USER, call('{"a": 1}'), RESULT) != key(USER, other, RESULT)


def test_tools_and_seed_are_part_of_the_request() -> None:
    keys = {key(USER), key(USER, tools=TOOLS), key(USER, seed=1), key(USER, seed=2)}
    assert len(keys) == 4
    assert key(USER, temperature=0.1, max_tokens=5, user="x") == key(USER)


def test_sampling_wishes_are_accepted() -> None:
    parse(USER, temperature=0.1, top_p=0.5, max_tokens=5, max_completion_tokens=5, presence_penalty=1, n=1, stop=None)


@pytest.mark.parametrize(
    "fields",
    [
        {"n": 2},
        {"logprobs": True},
        {"top_logprobs": 5},
        {"stop": ["\n"]},
        {"stop": "x"},
        {"response_format": {"type": "json_object"}},
        {"tool_choice": "required"},
        {"parallel_tool_calls": False},
        {"logit_bias": {"5": 1}},
        {"functions": [{"name": "f"}]},
        {"audio": {"voice": "x"}},
        {"modalities": ["text", "audio"]},
        {"chat_template_kwargs": {"enable_thinking": True}},
        {"continue_final_message": True},
        {"structured_outputs": {"json": {}}},
        {"guided_choice": ["a"]},
        {"seed": "x"},
        {"tools": "x"},
        {"tools": [{"type": "function", "function": {}}]},
        {"tools": [{"type": "web_search"}]},
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
        "hi",
        ["hi"],
        [{"content": "no role"}],
        [{"role": "robot", "content": "x"}],
        [{"role": ["user"], "content": "x"}],
        [{"role": "user", "content": 5}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
        [{"role": "user", "content": [{"type": "text", "text": 5}]}],
        [{"role": "tool", "content": "3"}],
        [USER, {"role": "assistant", "content": "the last"}],
        [USER, {"role": "assistant", "tool_calls": "x"}, USER],
        [USER, {"role": "assistant", "tool_calls": [{"id": "c"}]}, USER],
        [USER, {"role": "assistant", "function_call": {"name": "f"}}, USER],
    ],
)
def test_malformed_messages_are_refused(messages: Any) -> None:
    with pytest.raises(BadRequestError, match="message"):
        parse_chat_request({"messages": messages})


def test_tools_have_one_form_and_are_left_out_when_the_agent_wants_none() -> None:
    function = {"strict": True, "parameters": {"type": "object"}, "description": "d", "name": "f"}
    request = parse(USER, tools=[{"function": function, "type": "function"}])
    assert list(request.tools[0]["function"]) == ["name", "description", "parameters"]
    assert parse(USER, tools=TOOLS, tool_choice="none").tools is None
