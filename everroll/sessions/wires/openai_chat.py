"""OpenAI chat completions: request to normal form, answer to JSON or server-sent events. No I/O.

Values that steer sampling (temperature, top_p, max_tokens, ...) are accepted and have no effect: the run's pinned ones
win, and the answer's `everroll` object shows them. What cannot be honoured and would change the answer's shape or
meaning is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pydantic_core import to_json

from everroll.sessions.core import TurnAnswer
from everroll.sessions.errors import BadRequestError
from everroll.sessions.history import REASONING
from everroll.sessions.turns import ChatRequest
from everroll.tokens.renderer import Message, Tool

Json = dict[str, Any]

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}

_NOT_SUPPORTED: dict[str, tuple[Callable[[Any], bool], str]] = {
    "n": (lambda value: value == 1, "only one choice is sampled per request"),
    "logprobs": (lambda value: value is False, "log-probabilities are recorded, not sent to agents"),
    "top_logprobs": (lambda value: value == 0, "log-probabilities are recorded, not sent to agents"),
    "stop": (lambda value: value == [], "turns end at the chat format's stop tokens"),
    "logit_bias": (lambda value: value == {}, "it would change the sampled distribution"),
    "response_format": (lambda value: value == {"type": "text"}, "sampling is not constrained"),
    "tool_choice": (lambda value: value == "auto", "sampling is not constrained"),
    "parallel_tool_calls": (lambda value: value is True, "sampling is not constrained"),
    "functions": (lambda value: value == [], "use tools"),
    "function_call": (lambda value: value in ("auto", "none"), "use tools"),
    "modalities": (lambda value: value == ["text"], "only text is supported"),
    "audio": (lambda _: False, "only text is supported"),
    "web_search_options": (lambda _: False, "there is no web search"),
    "chat_template_kwargs": (lambda value: value == {}, "the chat template is pinned by the run"),
    "add_generation_prompt": (lambda value: value is True, "the assistant's turn is always opened"),
    "continue_final_message": (lambda value: value is False, "an assistant's message cannot be continued"),
}
"""Fields that are refused unless null or harmless, and why."""


def parse_chat_request(body: Json) -> tuple[ChatRequest, bool, bool]:
    """The request in normal form, whether to stream, and whether the stream shall report usage.

    Raises:
        BadRequestError: malformed, or asks for what is not supported; names the field.
    """
    for name, (is_harmless, reason) in _NOT_SUPPORTED.items():
        value = body.get(name)
        if value is not None and not is_harmless(value):
            raise BadRequestError(f"{name} = {value!r:.200} is not supported: {reason}")
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise BadRequestError("messages must be a list of at least one message")
    parsed = [_parse_message(message, f"messages[{index}]") for index, message in enumerate(messages)]
    if parsed[-1]["role"] == "assistant":
        raise BadRequestError("the last message is the assistant's; there is nothing to answer")
    request = ChatRequest(messages=parsed, tools=_parse_tools(body.get("tools")), label=_parse_seed(body.get("seed")))
    options = body.get("stream_options")
    include_usage = isinstance(options, dict) and options.get("include_usage") is True
    return request, body.get("stream") is True, include_usage


def _parse_message(value: Any, where: str) -> Message:
    if not isinstance(value, dict):
        raise BadRequestError(f"{where} is no object")
    role = _ROLES.get(value["role"]) if isinstance(value.get("role"), str) else None
    if role is None:
        raise BadRequestError(f"{where}.role = {value.get('role')!r:.100} is none of {', '.join(_ROLES)}")
    message: Message = {"role": role, "content": _parse_content(value.get("content"), f"{where}.content")}
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


def _parse_content(value: Any, where: str) -> str:
    """Content as one string: null is empty, text parts are joined."""
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise BadRequestError(f"{where} must be a string or a list of text parts")
    texts = []
    for index, part in enumerate(value):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in ("text", "refusal") or not isinstance(text := part.get(kind), str):
            raise BadRequestError(f"{where}[{index}] is of type {kind!r}; only text is supported")
        texts.append(text)
    return "".join(texts)


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
    if not isinstance(value, list):
        raise BadRequestError("tools must be a list")
    for index, tool in enumerate(value):
        function = tool.get("function") if isinstance(tool, dict) and tool.get("type") == "function" else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise BadRequestError(f"tools[{index}] is no function tool with a name")
    return value


def _parse_seed(value: Any) -> int | None:
    if value is None or (isinstance(value, int) and not isinstance(value, bool)):
        return value
    raise BadRequestError(f"seed = {value!r:.100} is no integer")


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
    events = [b"data: " + to_json(chunk) + b"\n\n" for chunk in chunks]
    return b"".join([*events, b"data: [DONE]\n\n"])


def build_extra(answer: TurnAnswer) -> Json:
    """What Everroll adds to an answer: how it was sampled, and where it stands in the session."""
    turn = answer.turn
    return {
        "turn": turn.index,
        "follows": turn.tokens.follows,
        "extends": turn.tokens.extends,
        "replayed": answer.replayed,
        "weight_version": turn.weight_version,
        "seed": turn.seed,
        "sampling": answer.sampling.model_dump(),
    }


def build_models(model: str) -> Json:
    return {"object": "list", "data": [{"id": model, "object": "model", "created": 0, "owned_by": "everroll"}]}


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
