"""Which recorded turn a request continues: keys over messages.

A key is a hash chain over tools and messages, so that equal conversations have equal keys and a prefix's key is found
on the way. Equal means: role, content, names and ids equal, tool-call arguments equal as JSON. Reasoning is not part
of it, because many clients do not send it back. Messages are in the normal form that the wires produce.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

from everroll.tokens.renderer import Message, Tool

REASONING = "reasoning_content"


def compute_tools_key(tools: list[Tool] | None) -> bytes:
    """Key of the empty conversation."""
    return _hash(b"", json.dumps(tools or [], sort_keys=True))


def chain_key(key: bytes, message: Message) -> bytes:
    """Key of a conversation after one more message."""
    return _hash(key, json.dumps(_canonical(message), sort_keys=True))


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
    return _hash(prompt_key, json.dumps([reasoning, label]))


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


def _canonical(message: Message) -> dict[str, Any]:
    kept = {key: value for key, value in message.items() if key not in (REASONING, "tool_calls")}
    if calls := message.get("tool_calls"):
        kept["tool_calls"] = [
            [call.get("id"), call["function"]["name"], _canonical_arguments(call["function"]["arguments"])]
            for call in calls
        ]
    return kept


def _canonical_arguments(arguments: str) -> Any:
    """Arguments as JSON, or as the text they are where the model wrote no JSON."""
    try:
        return {"json": json.loads(arguments)}
    except ValueError:
        return {"text": arguments}


def _hash(key: bytes, text: str) -> bytes:
    return hashlib.blake2b(key + text.encode("utf-8", "surrogatepass"), digest_size=16).digest()
