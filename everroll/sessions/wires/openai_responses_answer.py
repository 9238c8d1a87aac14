"""OpenAI responses: a turn as a response object, and as the events of its stream. No I/O."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from everroll.sessions.core import TurnAnswer
from everroll.sessions.history import REASONING
from everroll.sessions.wires.base import Json, build_extra


@dataclass(frozen=True)
class Asked:
    """What a response repeats of its request."""

    instructions: str | None
    opens_with_instructions: bool
    """Whether the conversation's first message is its `instructions`; the response's id carries it on."""
    previous_response_id: str | None
    tools: list[Json]
    tool_choice: str
    metadata: Json


def build_response(answer: TurnAnswer, model: str, asked: Asked) -> Json:
    """The body of a response that is over."""
    cut = answer.turn.tokens.finish_reason == "length"
    return {
        **_build_head(answer, model, asked),
        "status": "incomplete" if cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "output": _build_items(answer),
        "usage": _build_usage(answer),
        "everroll": build_extra(answer),
    }


def build_response_events(answer: TurnAnswer, model: str, asked: Asked) -> list[Json]:
    """The events of a stream in order, numbered."""
    response = build_response(answer, model, asked)
    begun = {**_build_head(answer, model, asked), "status": "in_progress", "output": [], "usage": None}
    events: list[Json] = [
        {"type": "response.created", "response": begun},
        {"type": "response.in_progress", "response": begun},
    ]
    for index, item in enumerate(response["output"]):
        place = {"output_index": index}
        events.append({"type": "response.output_item.added", **place, "item": _empty_item(item)})
        events += _build_item_events(item, {**place, "item_id": item["id"]})
        events.append({"type": "response.output_item.done", **place, "item": item})
    events.append({"type": f"response.{response['status']}", "response": response})
    return [{**event, "sequence_number": number} for number, event in enumerate(events)]


def _build_head(answer: TurnAnswer, model: str, asked: Asked) -> Json:
    """Sampling values are those that were used, not those that were asked for."""
    turn, sampling = answer.turn, answer.sampling
    return {
        "id": f"resp_{turn.request_key.hex()}{'i' if asked.opens_with_instructions else ''}",
        "object": "response",
        "created_at": int(turn.created_at),
        "model": model,
        "error": None,
        "incomplete_details": None,
        "instructions": asked.instructions,
        "previous_response_id": asked.previous_response_id,
        "tools": asked.tools,
        "tool_choice": asked.tool_choice,
        "parallel_tool_calls": True,
        "metadata": asked.metadata,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "max_output_tokens": sampling.max_tokens,
        "text": {"format": {"type": "text"}},
        "truncation": "disabled",
        "background": False,
        "store": True,
    }


def _build_items(answer: TurnAnswer) -> list[Json]:
    reply, key = answer.turn.reply, answer.turn.request_key.hex()
    status = "incomplete" if answer.turn.tokens.finish_reason == "length" else "completed"
    items: list[Json] = []
    if REASONING in reply:
        content = [{"type": "reasoning_text", "text": reply[REASONING]}]
        items.append({"type": "reasoning", "id": f"rs_{key}", "summary": [], "content": content, "status": status})
    calls = reply.get("tool_calls", ())
    if reply["content"] or not calls:
        content = [{"type": "output_text", "text": reply["content"], "annotations": [], "logprobs": []}]
        message = {"type": "message", "id": f"msg_{key}", "role": "assistant", "status": status, "content": content}
        items.append(message)
    for index, call in enumerate(calls):
        function = call["function"]
        item = {"type": "function_call", "id": f"fc_{key}_{index}", "call_id": call["id"], **function, "status": status}
        items.append(item)
    return items


def _empty_item(item: Json) -> Json:
    """An item as it is added, before its content comes."""
    empty: Json = {"arguments": ""} if item["type"] == "function_call" else {"content": []}
    return {**item, **empty, "status": "in_progress"}


def _build_item_events(item: Json, place: Json) -> Iterator[Json]:
    if item["type"] == "function_call":
        text = item["arguments"]
        yield {"type": "response.function_call_arguments.delta", **place, "delta": text}
        yield {"type": "response.function_call_arguments.done", **place, "name": item["name"], "arguments": text}
        return
    (part,) = item["content"]
    name = f"response.{part['type']}"  # response.output_text or response.reasoning_text
    more: dict[str, Any] = {"logprobs": []} if part["type"] == "output_text" else {}
    place = {**place, "content_index": 0}
    yield {"type": "response.content_part.added", **place, "part": {**part, "text": ""}}
    yield {"type": f"{name}.delta", **place, "delta": part["text"], **more}
    yield {"type": f"{name}.done", **place, "text": part["text"], **more}
    yield {"type": "response.content_part.done", **place, "part": part}


def _build_usage(answer: TurnAnswer) -> Json:
    turn = answer.turn
    num_output = int(turn.tokens.completion_ids.size)
    return {
        "input_tokens": turn.num_prompt_tokens,
        "input_tokens_details": {"cached_tokens": turn.num_cached_tokens},
        "output_tokens": num_output,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": turn.num_prompt_tokens + num_output,
    }
