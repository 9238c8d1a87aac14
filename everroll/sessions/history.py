"""Which recorded turn a request continues: keys over messages.

A key is a hash chain over tools and messages, so that equal conversations have equal keys and a prefix's key is found
on the way. What makes two messages equal is the run's choice (`model.history_match`): a function from a message to the
part of it that counts. Reasoning is not part of the built-in ones, because many clients do not send it back; where a
client does, it has to be the recorded one. Messages are in the normal form that the wires produce.
"""

from __future__ import annotations

import copy
import hashlib
import importlib
import json
import os
import re
import sys
from collections.abc import Callable
from typing import Any

from pydantic_core import to_json

from everroll.failures import ConfigurationError
from everroll.sessions.errors import UnexpectedError
from everroll.tokens.renderer import Message, Tool

REASONING = "reasoning_content"

Canonicalize = Callable[[Message], Any]
"""From a message to the JSON value that stands for it: messages with equal values are taken for the same."""

_EXACT_INTEGERS = 2**53
_UNCLEAN = re.compile(r"[^A-Za-z0-9_-]")
_PROBE_MESSAGES: list[Message] = [
    {"role": "system", "content": "a"},
    {"role": "user", "content": ""},
    {
        "role": "assistant",
        "content": "b",
        "reasoning_content": "c",
        "tool_calls": [{"id": "call_0", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}],
    },
    {"role": "tool", "tool_call_id": "call_0", "content": "d"},
]


def load_history_match(name: str) -> Canonicalize:
    """The function that `model.history_match` names: `strict`, `json`, or a user's `module:function`.

    Raises:
        ConfigurationError: it cannot be imported, is not callable, or does not answer JSON for usual messages.
    """
    if name == "strict":
        return canonicalize_strictly
    if name == "json":
        return canonicalize
    function = _import_function(name)
    match = _guard(function, name)
    try:
        for message in _PROBE_MESSAGES:
            if match(message) != match(message):
                raise ConfigurationError(f"model.history_match: {name} answers differently for the same message")
    except UnexpectedError as error:
        raise ConfigurationError(f"model.history_match: {error}") from error
    return match


def _import_function(path: str) -> Callable[[Message], Any]:
    module_name, _, name = path.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # a console script leaves the current directory out
    try:
        target: Any = importlib.import_module(module_name)
        for part in name.split("."):
            target = getattr(target, part)
    except Exception as error:  # the module is the user's: whatever its import raises belongs into the message
        raise ConfigurationError(
            f"model.history_match: {path!r} cannot be imported by the session server: {error!r}. Is its package "
            "installed there, or in the directory that the server was started from?"
        ) from error
    if not callable(target):
        raise ConfigurationError(f"model.history_match: {path!r} is not callable")
    return target  # type: ignore[no-any-return]


def _guard(function: Callable[[Message], Any], name: str) -> Canonicalize:
    """The user's function on a copy of the message, its answer as JSON text with sorted keys."""

    def match(message: Message) -> str:
        try:
            return json.dumps(function(copy.deepcopy(message)), sort_keys=True)
        except Exception as error:
            raise UnexpectedError(f"{name} failed on a message of role {message['role']}: {error!r}") from error

    return match


def canonicalize(message: Message) -> list[Any]:
    """Role, content and names as they are, ids as clients may have cleaned them, tool-call arguments as JSON values."""
    return _build_canonical(message, _canonical_arguments, clean_id)


def canonicalize_strictly(message: Message) -> list[Any]:
    """Role, content, names, ids and the text of tool-call arguments."""
    return _build_canonical(message, lambda arguments: ("text", arguments), lambda call_id: call_id)


def compute_tools_key(tools: list[Tool] | None) -> bytes:
    """Key of the empty conversation."""
    return _hash(b"", json.dumps(tools, sort_keys=True).encode()) if tools else _hash(b"", b"[]")


def chain_key(key: bytes, message: Message, match: Canonicalize = canonicalize) -> bytes:
    """Key of a conversation after one more message."""
    return _hash(key, to_json(match(message)))


def chain_keys(key: bytes, messages: list[Message], match: Canonicalize = canonicalize) -> list[bytes]:
    """Keys after each message in turn; the last one stands for the whole conversation."""
    keys = []
    for message in messages:
        key = chain_key(key, message, match)
        keys.append(key)
    return keys


def compute_request_key(prompt_key: bytes, messages: list[Message], label: int | None) -> bytes:
    """Identity of a request: equal requests get the same answer.

    Args:
        prompt_key: key of the conversation that is to be answered.
        messages: its messages; reasoning that the client sent back counts here.
        label: the request's own `seed`; an agent that wants several answers to one prompt sends several.
    """
    reasoning = [message[REASONING] for message in messages if REASONING in message]
    return _hash(prompt_key, to_json([reasoning, label]))


def name_tool_results(messages: list[Message], previous: list[Message]) -> list[Message]:
    """Give tool results the name of the function they answer, which some chat formats print, and its call's own id.

    Of calls of one id, `previous` ones give way to those in `messages`.
    """
    calls = {
        clean_id(call["id"]): call
        for message in (*previous, *messages)
        for call in message.get("tool_calls", ())
        if "id" in call
    }
    return [_name_tool_result(message, calls) if message["role"] == "tool" else message for message in messages]


def _name_tool_result(message: Message, calls: dict[str | None, Any]) -> Message:
    call = calls.get(clean_id(message.get("tool_call_id")))
    if call is None:
        return message
    return {"name": call["function"]["name"], **message, "tool_call_id": call["id"]}


def clean_id(call_id: str | None) -> str | None:
    """A tool call's id with the characters that some clients allow.

    Models of some families write ids like `functions.add:0`; clients that allow letters, digits, `_` and `-` only put
    others in their place before they send the call back.
    """
    return None if call_id is None else _UNCLEAN.sub("_", call_id)


def _build_canonical(
    message: Message,
    read_arguments: Callable[[str], tuple[str, str]],
    read_id: Callable[[str | None], str | None],
) -> list[Any]:
    """The parts of a message that count, in a fixed order."""
    calls = [
        [read_id(call.get("id")), call["function"]["name"], *read_arguments(call["function"]["arguments"])]
        for call in message.get("tool_calls", ())
    ]
    return [message["role"], message["content"], message.get("name"), read_id(message.get("tool_call_id")), calls]


def _canonical_arguments(arguments: str) -> tuple[str, str]:
    """Arguments as JSON with sorted keys, or as the text they are where the model wrote no JSON."""
    try:
        return "json", json.dumps(json.loads(arguments, parse_float=_parse_number), sort_keys=True)
    except (ValueError, RecursionError):  # a number of thousands of digits, brackets thousands deep: models do that
        return "text", arguments


def _parse_number(text: str) -> float | int:
    """1.0 as 1: clients in languages with one kind of number send it back so."""
    value = float(text)
    return int(value) if value.is_integer() and abs(value) < _EXACT_INTEGERS else value


def _hash(key: bytes, text: bytes) -> bytes:
    return hashlib.blake2b(key + text, digest_size=16).digest()
