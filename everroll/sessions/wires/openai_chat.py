"""OpenAI chat completions: request to normal form, answer to JSON or server-sent events. No I/O.

Values that steer sampling (temperature, top_p, max_tokens, ...) are accepted and have no effect: the run's pinned ones
win, and the answer's `everroll` object shows them. What cannot be honoured and would change the answer's shape or
meaning is refused (`everroll.sessions.wires.base` has the whole policy).
"""

from __future__ import annotations

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
    build_extra,
    build_openai_error,
    build_request,
    build_tool,
    encode_event,
    parse_text_parts,
    refuse_unsupported,
)
from everroll.tokens.renderer import Message, Tool

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
_TEXT_PARTS = {"text": "text", "refusal": "refusal"}

_CONSTRAINTS = (
    *("guided_json", "guided_regex", "guided_choice", "guided_grammar", "structured_outputs"),
    *("json_schema", "regex", "ebnf", "min_tokens", "ignore_eos"),
)
"""Engines' own names for constrained sampling."""

_NOT_SUPPORTED: Refusals = {
    "n": (lambda value: value == 1, "only one choice is sampled per request"),
    "logprobs": (lambda value: value is False, "log-probabilities are recorded, not sent to agents"),
    "top_logprobs": (lambda value: value == 0, "log-probabilities are recorded, not sent to agents"),
    "stop": (lambda value: value == [], "turns end at the chat format's stop tokens"),
    "logit_bias": (lambda value: value == {}, "it would change the sampled distribution"),
    "response_format": (lambda value: value == {"type": "text"}, "sampling is not constrained"),
    "tool_choice": (lambda value: value in ("auto", "none"), "sampling is not constrained"),
    "parallel_tool_calls": (lambda value: value is True, "sampling is not constrained"),
    "functions": (lambda value: value == [], "use tools"),
    "function_call": (lambda value: value in ("auto", "none"), "use tools"),
    "modalities": (lambda value: value == ["text"], "only text is supported"),
    "audio": (lambda _: False, "only text is supported"),
    "web_search_options": (lambda _: False, "there is no web search"),
    "chat_template_kwargs": (lambda value: value == {}, "the chat template is pinned by the run"),
    "add_generation_prompt": (lambda value: value is True, "the assistant's turn is always opened"),
    "continue_final_message": (lambda value: value is False, "an assistant's message cannot be continued"),
    "echo": (lambda value: value is False, "prompts are not sent back"),
    "prompt_logprobs": (lambda _: False, "log-probabilities are recorded, not sent to agents"),
    **{name: (lambda _: False, "sampling is not constrained") for name in _CONSTRAINTS},
}
"""Fields that are refused unless null or harmless, and why."""


@dataclass(frozen=True)
class ChatCall:
    """A chat completion as it was asked for."""

    request: ChatRequest
    stream: bool
    include_usage: bool
    """Whether a stream ends with a chunk that holds the usage."""

    def build_answer(self, answer: TurnAnswer, model: str) -> Json:
        return build_chat_answer(answer, model)

    def build_stream(self, answer: TurnAnswer, model: str) -> bytes:
        return build_chat_stream(answer, model, self.include_usage)


class ChatWire:
    """`POST /v1/chat/completions`."""

    keep_alive = b": still sampling\n\n"

    async def read(self, body: Json, recall: Recall) -> ChatCall:
        return parse_chat_request(body)

    def build_error(self, error: SessionError) -> Json:
        return build_openai_error(error)

    def build_stream_error(self, error: SessionError) -> bytes:
        return encode_event(build_openai_error(error)) + b"data: [DONE]\n\n"


def parse_chat_request(body: Json) -> ChatCall:
    """The request in normal form, and how it is to be answered.

    Raises:
        BadRequestError: malformed, or asks for what is not supported; names the field.
    """
    refuse_unsupported(body, _NOT_SUPPORTED)
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise BadRequestError("messages must be a list of at least one message")
    parsed = [_parse_message(message, f"messages[{index}]") for index, message in enumerate(messages)]
    tools = _parse_tools(body.get("tools"))
    without_tools = body.get("tool_choice") == "none"
    request = build_request(parsed, None if without_tools else tools, body.get("seed"))
    options = body.get("stream_options")
    include_usage = isinstance(options, dict) and options.get("include_usage") is True
    return ChatCall(request, body.get("stream") is True, include_usage)


def _parse_message(value: Any, where: str) -> Message:
    if not isinstance(value, dict):
        raise BadRequestError(f"{where} is no object")
    role = _ROLES.get(value["role"]) if isinstance(value.get("role"), str) else None
    if role is None:
        raise BadRequestError(f"{where}.role = {value.get('role')!r:.100} is none of {', '.join(_ROLES)}")
    message: Message = {
        "role": role,
        "content": parse_text_parts(value.get("content"), f"{where}.content", _TEXT_PARTS),
    }
    if isinstance(name := value.get("name"), str):
        message["name"] = name
    if role == "tool":
        if not isinstance(call_id := value.get("tool_call_id"), str):
            raise BadRequestError(f"{where}.tool_call_id is missing")
        message["tool_call_id"] = call_id
    if role == "assistant":
        reasoning = value.get(REASONING) or value.get("reasoning")
        if isinstance(reasoning, str) and reasoning:
            message[REASONING] = reasoning
        if calls := value.get("tool_calls"):
            message["tool_calls"] = _parse_tool_calls(calls, f"{where}.tool_calls")
        if value.get("function_call") is not None:
            raise BadRequestError(f"{where}.function_call is not supported: use tool_calls")
    return message


def _parse_tool_calls(value: Any, where: str) -> list[Json]:
    if not isinstance(value, list):
        raise BadRequestError(f"{where} must be a list")
    calls = []
    for index, call in enumerate(value):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(name := function.get("name"), str):
            raise BadRequestError(f"{where}[{index}].function.name is missing")
        arguments = function.get("arguments")
        text = arguments if isinstance(arguments, str) else to_json(arguments or {}).decode()
        parsed: Json = {"type": "function", "function": {"name": name, "arguments": text}}
        if isinstance(call_id := call.get("id"), str):
            parsed["id"] = call_id
        calls.append(parsed)
    return calls


def _parse_tools(value: Any) -> list[Tool] | None:
    if value is None or value == []:
        return None
    tools = []
    for index, tool in enumerate(as_list(value, "tools")):
        function = tool.get("function") if tool.get("type") == "function" else None
        if not isinstance(function, dict):
            raise BadRequestError(f"tools[{index}] is no function tool; others are not supported")
        known = ("name", "description", "parameters", "strict")  # strict asks for constrained sampling
        more = {name: item for name, item in function.items() if name not in known}
        name, description, parameters = (function.get(field) for field in known[:3])
        tools.append(build_tool(f"tools[{index}].function", name, description, parameters, more))
    return tools


def build_chat_answer(answer: TurnAnswer, model: str) -> Json:
    """The body of a chat completion."""
    return {
        **_build_head(answer, model, "chat.completion"),
        "choices": [
            {
                "index": 0,
                "message": _build_message(answer.turn.reply),
                "finish_reason": _finish_reason(answer),
                "logprobs": None,
            }
        ],
        "usage": _build_usage(answer),
        "everroll": build_extra(answer),
    }


def build_chat_stream(answer: TurnAnswer, model: str, include_usage: bool) -> bytes:
    """The whole answer as server-sent events: role, reasoning, content, tool calls, finish, usage, `[DONE]`."""
    head = _build_head(answer, model, "chat.completion.chunk")
    reply = answer.turn.reply
    deltas: list[Json] = [{"role": "assistant", "content": ""}]
    if REASONING in reply:
        deltas.append({REASONING: reply[REASONING]})
    if reply["content"]:
        deltas.append({"content": reply["content"]})
    calls = reply.get("tool_calls", ())
    deltas += [{"tool_calls": [{"index": index, **call}]} for index, call in enumerate(calls)]
    chunks: list[Json] = [{**head, "choices": [_build_chunk_choice(delta, None)]} for delta in deltas]
    finish = {**head, "choices": [_build_chunk_choice({}, _finish_reason(answer))], "everroll": build_extra(answer)}
    chunks.append(finish)
    if include_usage:
        chunks = [{**chunk, "usage": None} for chunk in chunks]
        chunks.append({**head, "choices": [], "usage": _build_usage(answer)})
    return b"".join([*map(encode_event, chunks), b"data: [DONE]\n\n"])


def _build_head(answer: TurnAnswer, model: str, kind: str) -> Json:
    turn = answer.turn
    return {
        "id": f"chatcmpl-{turn.request_key.hex()}",
        "object": kind,
        "created": int(turn.created_at),
        "model": model,
    }


def _build_message(reply: Message) -> Json:
    """OpenAI's convention: content is null when there are only tool calls."""
    empty = not reply["content"] and "tool_calls" in reply
    return {**reply, "content": None if empty else reply["content"]}


def _build_chunk_choice(delta: Json, finish_reason: str | None) -> Json:
    return {"index": 0, "delta": delta, "finish_reason": finish_reason, "logprobs": None}


def _finish_reason(answer: TurnAnswer) -> str:
    reason = answer.turn.tokens.finish_reason
    return "tool_calls" if reason == "stop" and "tool_calls" in answer.turn.reply else reason


def _build_usage(answer: TurnAnswer) -> Json:
    turn = answer.turn
    num_completion = int(turn.tokens.completion_ids.size)
    return {
        "prompt_tokens": turn.num_prompt_tokens,
        "completion_tokens": num_completion,
        "total_tokens": turn.num_prompt_tokens + num_completion,
        "prompt_tokens_details": {"cached_tokens": turn.num_cached_tokens},
    }
