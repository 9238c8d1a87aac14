"""Which recorded turn a request continues: keys over messages.

A key is a hash chain over tools and messages, so that equal conversations have equal keys and a prefix's key is found
on the way. Equal means: role, content, names and ids equal, tool-call arguments equal as JSON. Reasoning is not part
of it, because many clients do not send it back. Messages are in the normal form that the wires produce.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

from pydantic_core import to_json

from everroll.tokens.renderer import Message, Tool

REASONING = "reasoning_content"


def compute_tools_key(tools: list[Tool] | None) -> bytes:
    """Key of the empty conversation."""
    return _hash(b"", json.dumps(tools, sort_keys=True).encode()) if tools else _hash(b"", b"[]")


def chain_key(key: bytes, message: Message) -> bytes:
    """Key of a conversation after one more message."""
    return _hash(key, to_json(_canonical(message)))


def chain_keys(key: bytes, messages: list[Message]) -> list[bytes]:
    """Keys after each message in turn; the last one stands for the whole conversation."""
    keys = []
    for message in messages:
        key = chain_key(key, message)
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
    """Give tool results the name of the function they answer, which some chat formats print."""
    names = {
        call["id"]: call["function"]["name"]
        for message in (*previous, *messages)
        for call in message.get("tool_calls", ())
        if "id" in call
    }
    return [
        {**message, "name": names[message["tool_call_id"]]}
        if message["role"] == "tool" and "name" not in message and message.get("tool_call_id") in names
        else message
        for message in messages
    ]


def _canonical(message: Message) -> list[Any]:
    """The parts of a message that count, in a fixed order."""
    calls = [
        [call.get("id"), call["function"]["name"], *_canonical_arguments(call["function"]["arguments"])]
        for call in message.get("tool_calls", ())
    ]
    return [message["role"], message["content"], message.get("name"), message.get("tool_call_id"), calls]


def _canonical_arguments(arguments: str) -> tuple[str, str]:
    """Arguments as JSON with sorted keys, or as the text they are where the model wrote no JSON."""
    try:
        return "json", json.dumps(json.loads(arguments), sort_keys=True)
    except ValueError:
        return "text", arguments


def _hash(key: bytes, text: bytes) -> bytes:
    return hashlib.blake2b(key + text, digest_size=16).digest()
