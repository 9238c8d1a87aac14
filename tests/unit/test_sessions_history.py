"""What makes a message the recorded one: built-in choices, and functions of users."""

from __future__ import annotations

import re
from typing import Any

import pytest

from everroll.failures import ConfigurationError
from everroll.sessions.errors import UnexpectedError
from everroll.sessions.history import load_history_match
from everroll.tokens.renderer import Message

HERE = "tests.unit.test_sessions_history"
_answers = iter(range(100))


def forget_times(message: Message) -> Any:
    message["content"] = re.sub(r"took \d+ ms", "", message["content"])
    return message


def fail(message: Message) -> Any:
    raise KeyError("name")


def change_its_mind(message: Message) -> Any:
    return next(_answers)


def answer_no_json(message: Message) -> Any:
    return object()


NO_FUNCTION = 5


def call(arguments: str) -> Message:
    function = {"name": "f", "arguments": arguments}
    return {"role": "assistant", "content": "", "tool_calls": [{"id": "c", "type": "function", "function": function}]}


@pytest.mark.parametrize(
    ("name", "left", "right", "equal"),
    [
        ("json", '{"a": 1, "b": [2.0]}', '{"b":[2],"a":1.0}', True),
        ("json", '{"a": 1}', '{"a": "1"}', False),
        ("json", '{"a": 1}', '{"a": true}', False),
        ("json", '{"a": 0.1}', '{"a": 0.10}', True),
        ("json", "{not json", "{not  json", False),
        ("strict", '{"a": 1}', '{"a": 1}', True),
        ("strict", '{"a": 1}', '{"a":1}', False),
    ],
)
def test_tool_call_arguments(name: str, left: str, right: str, equal: bool) -> None:
    match = load_history_match(name)
    assert (match(call(left)) == match(call(right))) is equal


def test_a_users_function_decides_and_cannot_change_the_message() -> None:
    match = load_history_match(f"{HERE}:forget_times")
    first, second = ({"role": "tool", "tool_call_id": "c", "content": f"ok, took {n} ms"} for n in (1, 22))
    assert match(first) == match(second)
    assert first["content"] == "ok, took 1 ms"
    assert match(first) != match({**first, "tool_call_id": "d"})


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("no_such_package:match", "cannot be imported by the session server"),
        (f"{HERE}:nothing", "cannot be imported by the session server"),
        (f"{HERE}:NO_FUNCTION", "is not callable"),
        (f"{HERE}:fail", "failed on a message of role system: KeyError"),
        (f"{HERE}:answer_no_json", "not JSON serializable"),
        (f"{HERE}:change_its_mind", "answers differently for the same message"),
    ],
)
def test_functions_that_cannot_serve_are_refused_at_the_start(name: str, text: str) -> None:
    with pytest.raises(ConfigurationError, match=text):
        load_history_match(name)


def fail_on_shouts(message: Message) -> Any:
    if message["content"].isupper():
        raise ValueError("too loud")
    return message


def test_a_function_that_fails_later_is_named() -> None:
    match = load_history_match(f"{HERE}:fail_on_shouts")
    with pytest.raises(UnexpectedError, match=r"fail_on_shouts failed on a message of role user: .*too loud"):
        match({"role": "user", "content": "HI"})
