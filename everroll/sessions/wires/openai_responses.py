"""OpenAI responses: request to normal form. No I/O; answers are built in `openai_responses_answer`.

The conversation comes as items in `input`, or by `previous_response_id`, which stands for the recorded conversation up
to that response: it is found in the session's record, so it survives restarts and needs no `store`. `instructions` are
the first system message. New ones take the place of those that the conversation began with; a request without any keeps
them (OpenAI's service would drop them, and with them the recorded prefix).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from pydantic_core import to_json

from everroll.sessions.core import TurnAnswer
from everroll.sessions.errors import BadRequestError, SessionError
from everroll.sessions.history import REASONING
from everroll.sessions.turns import ChatRequest
from everroll.sessions.wires.base import (
    Json,
    Recall,
    Refusals,
    as_list,
    build_openai_error,
    build_request,
    build_tool,
    encode_event,
    parse_text_parts,
    refuse_unsupported,
)
from everroll.sessions.wires.openai_responses_answer import Asked, build_response, build_response_events
from everroll.tokens.renderer import Message, Tool

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
_TEXT_PARTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}
_RESPONSE_ID = re.compile(r"^resp_([0-9a-f]{32})(i?)$")

_NOT_SUPPORTED: Refusals = {
    "background": (lambda value: value is False, "a response is answered in its own request"),
    "conversation": (lambda _: False, "use previous_response_id or send the items"),
    "prompt": (lambda _: False, "there are no stored prompts"),
    "truncation": (lambda value: value == "disabled", "recorded conversations are never cut"),
    "context_management": (lambda value: value == [], "recorded conversations are never cut"),
    "text": (
        lambda value: isinstance(value, dict) and value.get("format") in (None, {"type": "text"}),
        "sampling is not constrained",
    ),
    "tool_choice": (lambda value: value in ("auto", "none"), "sampling is not constrained"),
    "parallel_tool_calls": (lambda value: value is True, "sampling is not constrained"),
    "max_tool_calls": (lambda _: False, "sampling is not constrained"),
    "top_logprobs": (lambda value: value == 0, "log-probabilities are recorded, not sent to agents"),
    "stop": (lambda value: value == [], "turns end at the chat format's stop tokens"),
}


@dataclass(frozen=True)
class ResponsesCall:
    """A response as it was asked for."""

    request: ChatRequest
    stream: bool
    asked: Asked

    def build_answer(self, answer: TurnAnswer, model: str) -> Json:
        return build_response(answer, model, self.asked)

    def build_stream(self, answer: TurnAnswer, model: str) -> bytes:
        events = build_response_events(answer, model, self.asked)
        return b"".join(encode_event(event, event["type"]) for event in events)


class ResponsesWire:
    """`POST /v1/responses`."""

    keep_alive = b": still sampling\n\n"

    async def read(self, body: Json, recall: Recall) -> ResponsesCall:
        refuse_unsupported(body, _NOT_SUPPORTED)
        instructions = body.get("instructions")
        if instructions is not None and not isinstance(instructions, str):
            raise BadRequestError("instructions must be a string")
        items = parse_items(body.get("input"))
        tools = _parse_tools(body.get("tools"))
        previous_id = body.get("previous_response_id")
        history, has_instructions = await _recall(previous_id, recall)
        if instructions:
            rest = history[1:] if has_instructions else history
            history = [{"role": "system", "content": instructions}, *rest]
        asked = Asked(
            instructions=instructions,
            opens_with_instructions=bool(instructions) or has_instructions,
            previous_response_id=previous_id,
            tools=body.get("tools") or [],
            tool_choice=body.get("tool_choice") or "auto",
            metadata=body.get("metadata") or {},
        )
        shown = None if asked.tool_choice == "none" else tools
        request = build_request([*history, *items], shown, body.get("seed"))
        return ResponsesCall(request, body.get("stream") is True, asked)

    def build_error(self, error: SessionError) -> Json:
        return build_openai_error(error)

    def build_stream_error(self, error: SessionError) -> bytes:
        event = {"type": "error", "sequence_number": 0, "code": error.kind, "message": str(error), "param": None}
        return encode_event({**event, **build_openai_error(error)}, "error")


async def _recall(response_id: Any, recall: Recall) -> tuple[list[Message], bool]:
    """The recorded conversation, and whether its first message is the `instructions` of then."""
    if response_id is None:
        return [], False
    match = _RESPONSE_ID.match(response_id) if isinstance(response_id, str) else None
    if match is None:
        raise BadRequestError(f"previous_response_id = {response_id!r:.100} is no id that this server gave")
    return await recall(bytes.fromhex(match[1])), match[2] == "i"


def parse_items(value: Any) -> list[Message]:
    """Items in normal form: what an assistant said in one turn, reasoning, text and calls, is one message.

    Raises:
        BadRequestError: malformed or not supported; names the item.
    """
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    messages: list[Message] = []
    for index, item in enumerate(as_list([] if value is None else value, "input")):
        where = f"input[{index}]"
        kind = item.get("type", "message")
        if kind == "message":
            _add_message(messages, item, where)
        elif kind == "reasoning":
            _add_reasoning(messages, item, where)
        elif kind == "function_call":
            _add_call(messages, item, where)
        elif kind == "function_call_output":
            messages.append(_parse_output(item, where))
        else:
            raise BadRequestError(f"{where} is of type {kind!r:.100}, which is not supported")
    return messages


def _add_message(messages: list[Message], item: Json, where: str) -> None:
    role = _ROLES.get(item["role"]) if isinstance(item.get("role"), str) else None
    if role is None:
        raise BadRequestError(f"{where}.role = {item.get('role')!r:.100} is none of {', '.join(_ROLES)}")
    content = parse_text_parts(item.get("content"), f"{where}.content", _TEXT_PARTS)
    last = messages[-1] if messages else {}
    if role == "assistant" and _is_only_reasoning(last):
        last["content"] = content
    else:
        messages.append({"role": role, "content": content})


def _is_only_reasoning(message: Message) -> bool:
    return REASONING in message and not message["content"] and "tool_calls" not in message


def _add_reasoning(messages: list[Message], item: Json, where: str) -> None:
    """A reasoning item opens an assistant's turn; one without text (encrypted, or a summary) says nothing here."""
    parts = item.get("content")
    text = parse_text_parts(parts, f"{where}.content", {"reasoning_text": "text", "text": "text"})
    if text:
        messages.append({"role": "assistant", "content": "", REASONING: text})


def _add_call(messages: list[Message], item: Json, where: str) -> None:
    name, call_id, arguments = item.get("name"), item.get("call_id"), item.get("arguments")
    if not isinstance(name, str) or not isinstance(call_id, str):
        raise BadRequestError(f"{where} needs a name and a call_id")
    text = arguments if isinstance(arguments, str) else to_json(arguments or {}).decode()
    call = {"type": "function", "function": {"name": name, "arguments": text}, "id": call_id}
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": ""})
    messages[-1].setdefault("tool_calls", []).append(call)


def _parse_output(item: Json, where: str) -> Message:
    if not isinstance(call_id := item.get("call_id"), str):
        raise BadRequestError(f"{where}.call_id is missing")
    content = parse_text_parts(item.get("output"), f"{where}.output", _TEXT_PARTS)
    return {"role": "tool", "content": content, "tool_call_id": call_id}


def _parse_tools(value: Any) -> list[Tool] | None:
    if value is None or value == []:
        return None
    tools = []
    for index, tool in enumerate(as_list(value, "tools")):
        where = f"tools[{index}]"
        if tool.get("type") != "function":
            raise BadRequestError(f"{where} is of type {tool.get('type')!r:.100}; only functions are supported")
        tools.append(build_tool(where, tool.get("name"), tool.get("description"), tool.get("parameters")))
    return tools
