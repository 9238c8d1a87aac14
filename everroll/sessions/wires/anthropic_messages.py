"""Anthropic messages: request to normal form, answer to JSON or server-sent events. No I/O.

`max_tokens`, `temperature` and their like are accepted and have no effect; `cache_control`, `metadata` and beta options
likewise (`everroll.sessions.wires.base` has the whole policy). Thinking is shown to clients that ask for it, and
recorded in any case.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

from everroll.sessions.core import TurnAnswer
from everroll.sessions.errors import BadRequestError, SessionError
from everroll.sessions.history import REASONING
from everroll.sessions.turns import ChatRequest
from everroll.sessions.wires.base import (
    Json,
    Recall,
    Refusals,
    as_list,
    build_extra,
    build_request,
    build_tool,
    encode_event,
    parse_text_parts,
    refuse_unsupported,
)
from everroll.tokens.renderer import Message, Tool

_TEXT_BLOCKS = {"text": "text"}
_BILLING_LINE = re.compile(r"^x-anthropic-billing-header:[^\n]*\n?")
"""Claude Code's note to its own service at the head of the system prompt; it differs in every request."""
_RAW_ARGUMENTS = "__arguments__"
"""Carries a tool call's arguments where the model wrote no JSON object, which is all that `input` can hold."""

_NOT_SUPPORTED: Refusals = {
    "stop_sequences": (lambda value: value == [], "turns end at the chat format's stop tokens"),
    "output_format": (lambda _: False, "sampling is not constrained"),
    "output_config": (
        lambda value: isinstance(value, dict) and value.get("format") is None,
        "sampling is not constrained",
    ),
    "mcp_servers": (lambda value: value == [], "tools run at the agent"),
    "container": (lambda _: False, "tools run at the agent"),
}
_ERROR_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    408: "timeout_error",
    409: "invalid_request_error",
    410: "not_found_error",
    413: "request_too_large",
    422: "invalid_request_error",
    503: "overloaded_error",
}
_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens"}


@dataclass(frozen=True)
class MessagesCall:
    """A message as it was asked for."""

    request: ChatRequest
    stream: bool
    show_thinking: bool

    def build_answer(self, answer: TurnAnswer, model: str) -> Json:
        return {
            **_build_head(answer, model),
            "content": _build_blocks(answer, self.show_thinking),
            "stop_reason": _stop_reason(answer),
            "usage": _build_usage(answer),
            "everroll": build_extra(answer),
        }

    def build_stream(self, answer: TurnAnswer, model: str) -> bytes:
        usage = _build_usage(answer)
        head = {**_build_head(answer, model), "content": [], "usage": {**usage, "output_tokens": 0}}
        events: list[Json] = [{"type": "message_start", "message": head}, {"type": "ping"}]
        for index, block in enumerate(_build_blocks(answer, self.show_thinking)):
            empty, deltas = _split_block(block)
            events.append({"type": "content_block_start", "index": index, "content_block": empty})
            events += [{"type": "content_block_delta", "index": index, "delta": delta} for delta in deltas]
            events.append({"type": "content_block_stop", "index": index})
        delta = {"stop_reason": _stop_reason(answer), "stop_sequence": None}
        events.append({"type": "message_delta", "delta": delta, "usage": usage, "everroll": build_extra(answer)})
        events.append({"type": "message_stop"})
        return b"".join(encode_event(event, event["type"]) for event in events)


class MessagesWire:
    """`POST /v1/messages`."""

    keep_alive = encode_event({"type": "ping"}, "ping")

    async def read(self, body: Json, recall: Recall) -> MessagesCall:
        return parse_messages_request(body)

    def build_error(self, error: SessionError) -> Json:
        kind = _ERROR_TYPES.get(error.status, "api_error")
        return {"type": "error", "error": {"type": kind, "message": str(error)}, "request_id": None}

    def build_stream_error(self, error: SessionError) -> bytes:
        return encode_event(self.build_error(error), "error")


def parse_messages_request(body: Json) -> MessagesCall:
    """The request in normal form, and how it is to be answered.

    Raises:
        BadRequestError: malformed, or asks for what is not supported; names the field.
    """
    refuse_unsupported(body, _NOT_SUPPORTED)
    without_tools = _parse_tool_choice(body.get("tool_choice"))
    tools = _parse_tools(body.get("tools"))
    messages = _parse_system(body.get("system"))
    for index, message in enumerate(as_list(body.get("messages"), "messages")):
        messages += _parse_message(message, f"messages[{index}]")
    thinking = body.get("thinking")
    return MessagesCall(
        request=build_request(messages, None if without_tools else tools, body.get("seed")),
        stream=body.get("stream") is True,
        show_thinking=isinstance(thinking, dict) and thinking.get("type") in ("enabled", "adaptive"),
    )


def _parse_system(value: Any) -> list[Message]:
    if isinstance(value, list):  # the line may stand in a block of its own, or at the head of the first
        value = [_strip_billing_line(block) for block in value]
    text = _BILLING_LINE.sub("", parse_text_parts(value, "system", _TEXT_BLOCKS))
    return [{"role": "system", "content": text}] if text else []


def _strip_billing_line(block: Any) -> Any:
    if not isinstance(block, dict) or not isinstance(text := block.get("text"), str):
        return block
    return {**block, "text": _BILLING_LINE.sub("", text)}


def _parse_message(value: Json, where: str) -> list[Message]:
    """One message of this wire can be several in normal form: each tool result is a message of its own."""
    role, content = value.get("role"), value.get("content")
    if role == "assistant":
        return [_parse_assistant(content, f"{where}.content")]
    if role == "system":
        return [{"role": "system", "content": parse_text_parts(content, f"{where}.content", _TEXT_BLOCKS)}]
    if role != "user":
        raise BadRequestError(f"{where}.role = {role!r:.100} is none of user, assistant, system")
    if not isinstance(content, list):
        return [{"role": "user", "content": parse_text_parts(content, f"{where}.content", _TEXT_BLOCKS)}]
    return _parse_user_blocks(content, f"{where}.content")


def _parse_user_blocks(blocks: list[Any], where: str) -> list[Message]:
    """Texts that stand together are one user's message; the order of texts and tool results is kept."""
    messages: list[Message] = []
    for index, block in enumerate(as_list(blocks, where)):
        if block.get("type") == "tool_result":
            messages.append(_parse_tool_result(block, f"{where}[{index}]"))
            continue
        text = _parse_text_block(block, f"{where}[{index}]")
        if messages and messages[-1]["role"] == "user":
            messages[-1]["content"] += text
        else:
            messages.append({"role": "user", "content": text})
    return messages or [{"role": "user", "content": ""}]


def _parse_tool_result(block: Json, where: str) -> Message:
    if not isinstance(call_id := block.get("tool_use_id"), str):
        raise BadRequestError(f"{where}.tool_use_id is missing")
    content = parse_text_parts(block.get("content"), f"{where}.content", _TEXT_BLOCKS)
    if not content and block.get("is_error") is True:
        content = "error"  # chat formats have no place for the flag; texts of errors speak for themselves
    return {"role": "tool", "content": content, "tool_call_id": call_id}


def _parse_assistant(content: Any, where: str) -> Message:
    if not isinstance(content, list):
        return {"role": "assistant", "content": parse_text_parts(content, where, _TEXT_BLOCKS)}
    texts, thoughts, calls = [], [], []
    for index, block in enumerate(as_list(content, where)):
        if block.get("type") == "tool_use":
            calls.append(_parse_tool_use(block, f"{where}[{index}]"))
        elif block.get("type") == "thinking" and isinstance(block.get("thinking"), str):
            thoughts.append(block["thinking"])
        else:
            texts.append(_parse_text_block(block, f"{where}[{index}]"))
    message: Message = {"role": "assistant", "content": "".join(texts)}
    if reasoning := "".join(thoughts):
        message[REASONING] = reasoning
    if calls:
        message["tool_calls"] = calls
    return message


def _parse_text_block(block: Json, where: str) -> str:
    if block.get("type") != "text" or not isinstance(text := block.get("text"), str):
        raise BadRequestError(f"{where} is of type {block.get('type')!r:.100}, which is not supported here")
    return text


def _parse_tool_use(block: Json, where: str) -> Json:
    name, call_id, value = block.get("name"), block.get("id"), block.get("input", {})
    if not isinstance(name, str) or not isinstance(call_id, str) or not isinstance(value, dict):
        raise BadRequestError(f"{where} needs a name, an id and an input object")
    raw = value.get(_RAW_ARGUMENTS)
    arguments = raw if isinstance(raw, str) else json.dumps(value, ensure_ascii=False)
    return {"type": "function", "function": {"name": name, "arguments": arguments}, "id": call_id}


def _parse_tool_choice(value: Any) -> bool:
    """Whether the tools are to be left out."""
    kind = value.get("type") if isinstance(value, dict) else value
    if kind not in (None, "auto", "none"):
        raise BadRequestError(f"tool_choice = {value!r:.200} is not supported: sampling is not constrained")
    if isinstance(value, dict) and value.get("disable_parallel_tool_use") is True:
        raise BadRequestError("tool_choice.disable_parallel_tool_use is not supported: sampling is not constrained")
    return kind == "none"


def _parse_tools(value: Any) -> list[Tool] | None:
    if value is None or value == []:
        return None
    tools = []
    for index, tool in enumerate(as_list(value, "tools")):
        where = f"tools[{index}]"
        if tool.get("type") not in (None, "custom"):
            raise BadRequestError(
                f"{where} is of type {tool['type']!r:.100}; tools that a service runs are not supported"
            )
        tools.append(build_tool(where, tool.get("name"), tool.get("description"), tool.get("input_schema")))
    return tools


def _build_head(answer: TurnAnswer, model: str) -> Json:
    return {
        "id": f"msg_{answer.turn.request_key.hex()}",
        "type": "message",
        "role": "assistant",
        "model": model,
        "stop_reason": None,
        "stop_sequence": None,
    }


def _build_blocks(answer: TurnAnswer, show_thinking: bool) -> list[Json]:
    reply = answer.turn.reply
    blocks: list[Json] = []
    if show_thinking and REASONING in reply:
        signature = answer.turn.request_key.hex()  # clients expect one; nobody here checks it
        blocks.append({"type": "thinking", "thinking": reply[REASONING], "signature": signature})
    if reply["content"]:
        blocks.append({"type": "text", "text": reply["content"]})
    for call in reply.get("tool_calls", ()):
        function = call["function"]
        value = _read_arguments(function["arguments"])
        blocks.append({"type": "tool_use", "id": call["id"], "name": function["name"], "input": value})
    return blocks


def _read_arguments(text: str) -> Json:
    """What `input` can hold: an object, without numbers that are none (1e400) and halves of surrogate pairs."""
    try:
        value = json.loads(text, parse_constant=_refuse_constant)
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError):
        value = None
    return value if isinstance(value, dict) else {_RAW_ARGUMENTS: text}


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def _split_block(block: Json) -> tuple[Json, list[Json]]:
    """A block as streams open it, and what fills it."""
    if block["type"] == "thinking":
        deltas: list[Json] = [
            {"type": "thinking_delta", "thinking": block["thinking"]},
            {"type": "signature_delta", "signature": block["signature"]},
        ]
        return {**block, "thinking": "", "signature": ""}, deltas
    if block["type"] == "text":
        return {**block, "text": ""}, [{"type": "text_delta", "text": block["text"]}]
    text = json.dumps(block["input"], ensure_ascii=False)
    return {**block, "input": {}}, [{"type": "input_json_delta", "partial_json": text}]


def _stop_reason(answer: TurnAnswer) -> str:
    reason = answer.turn.tokens.finish_reason
    return "tool_use" if reason == "stop" and "tool_calls" in answer.turn.reply else _STOP_REASONS.get(reason, reason)


def _build_usage(answer: TurnAnswer) -> Json:
    """On this wire cached tokens are not part of `input_tokens`."""
    turn = answer.turn
    return {
        "input_tokens": turn.num_prompt_tokens - turn.num_cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": turn.num_cached_tokens,
        "output_tokens": int(turn.tokens.completion_ids.size),
    }
