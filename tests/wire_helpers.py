"""One conversation as clients of each wire hold it: what they send, and what they keep of the answers."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

import httpx
import numpy as np

from everroll.sessions.client import CollectedSamples, SessionClient, SessionHandle
from tests.session_helpers import TOOLS, FakeEngine

Message = dict[str, Any]
Call = tuple[str, str, Any]
"""A tool call: id, name, arguments."""


@dataclass
class WireClient:
    """Base of one client per wire. `ask` takes what is new in OpenAI's chat form: user's messages and tool results."""

    http: httpx.AsyncClient
    handle: SessionHandle
    system: str = ""
    tools: bool = False
    options: dict[str, Any] = field(default_factory=dict)
    history: list[Any] = field(default_factory=list)
    path: str = ""

    async def send(self, *new: Message, **options: Any) -> httpx.Response:
        """Send without keeping anything."""
        body = {"model": "m", **self.build_body(list(new)), **self.options, **options}
        return await self.http.post(f"{self.handle.base_url}/{self.path}", json=body, headers=self.headers())

    async def ask(self, *new: Message, **options: Any) -> tuple[str, list[Call]]:
        """Send, keep the answer in the history, and give its text and tool calls."""
        response = await self.send(*new, **options)
        assert response.status_code == 200, response.text
        return self.keep(list(new), response.json())

    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.handle.api_key}"}

    def build_body(self, new: list[Message]) -> dict[str, Any]:
        raise NotImplementedError

    def keep(self, new: list[Message], answer: dict[str, Any]) -> tuple[str, list[Call]]:
        raise NotImplementedError

    def error_text(self, body: dict[str, Any]) -> str:
        return str(body["error"]["message"])


@dataclass
class ChatClient(WireClient):
    path: str = "chat/completions"

    def build_body(self, new: list[Message]) -> dict[str, Any]:
        system = [{"role": "system", "content": self.system}] if self.system else []
        return {"messages": [*system, *self.history, *new], "tools": TOOLS if self.tools else None}

    def keep(self, new: list[Message], answer: dict[str, Any]) -> tuple[str, list[Call]]:
        message = answer["choices"][0]["message"]
        self.history += [*new, message]
        calls = [
            (call["id"], call["function"]["name"], json.loads(call["function"]["arguments"]))
            for call in message.get("tool_calls", ())
        ]
        return message["content"] or "", calls


@dataclass
class MessagesClient(WireClient):
    path: str = "messages"

    def headers(self) -> dict[str, str]:
        return {"x-api-key": self.handle.api_key, "anthropic-version": "2023-06-01"}

    def build_body(self, new: list[Message]) -> dict[str, Any]:
        tools = [
            {
                "name": tool["function"]["name"],
                "description": tool["function"]["description"],
                "input_schema": tool["function"]["parameters"],
            }
            for tool in (TOOLS if self.tools else [])
        ]
        body = {"max_tokens": 1, "messages": [*self.history, *map(_to_anthropic, new)], "system": self.system}
        return {**body, "tools": tools, "thinking": {"type": "enabled", "budget_tokens": 1024}}

    def keep(self, new: list[Message], answer: dict[str, Any]) -> tuple[str, list[Call]]:
        blocks = answer["content"]
        self.history += [*map(_to_anthropic, new), {"role": "assistant", "content": blocks}]
        calls = [(block["id"], block["name"], block["input"]) for block in blocks if block["type"] == "tool_use"]
        return "".join(block["text"] for block in blocks if block["type"] == "text"), calls


@dataclass
class ResponsesClient(WireClient):
    """Sends the whole conversation as items."""

    path: str = "responses"

    def build_body(self, new: list[Message]) -> dict[str, Any]:
        tools = [{"type": "function", **tool["function"], "strict": True} for tool in (TOOLS if self.tools else [])]
        return {"input": [*self.history, *map(_to_item, new)], "instructions": self.system or None, "tools": tools}

    def keep(self, new: list[Message], answer: dict[str, Any]) -> tuple[str, list[Call]]:
        self.history += [*map(_to_item, new), *answer["output"]]
        return _read_output(answer["output"])


@dataclass
class ResponsesByIdClient(ResponsesClient):
    """Sends what is new, and the id of the response before."""

    previous_id: str | None = None

    def build_body(self, new: list[Message]) -> dict[str, Any]:
        return {**super().build_body(new), "previous_response_id": self.previous_id}

    def keep(self, new: list[Message], answer: dict[str, Any]) -> tuple[str, list[Call]]:
        self.previous_id = answer["id"]
        return _read_output(answer["output"])


WIRES: list[type[WireClient]] = [ChatClient, MessagesClient, ResponsesClient, ResponsesByIdClient]


def _to_anthropic(message: Message) -> dict[str, Any]:
    if message["role"] == "tool":
        block = {"type": "tool_result", "tool_use_id": message["tool_call_id"], "content": message["content"]}
        return {"role": "user", "content": [block]}
    return message


def _to_item(message: Message) -> dict[str, Any]:
    if message["role"] == "tool":
        return {"type": "function_call_output", "call_id": message["tool_call_id"], "output": message["content"]}
    return message


def _read_output(items: list[dict[str, Any]]) -> tuple[str, list[Call]]:
    texts = [part["text"] for item in items if item["type"] == "message" for part in item["content"]]
    calls = [
        (item["call_id"], item["name"], json.loads(item["arguments"]))
        for item in items
        if item["type"] == "function_call"
    ]
    return "".join(texts), calls


def record_given(engine: FakeEngine) -> list[list[int]]:
    """A list that fills with the token ids of each answer that the engine gives from now on."""
    given: list[list[int]] = []

    def record(answer: dict[str, Any]) -> dict[str, Any]:
        given.append(answer["output_ids"])
        return answer

    engine.mangle = record
    return given


async def check_masked_tokens(
    client: SessionClient, session_id: str, engine: FakeEngine, given: list[list[int]], num_samples: int = 1
) -> None:
    """Trained are exactly the tokens that the engine gave, once each, after the prompts they were sampled from."""
    collected = await client.collect(session_id, None, {})
    assert isinstance(collected, CollectedSamples)
    assert len(collected.sample_set.samples) == num_samples
    trained = []
    for sample in collected.sample_set.samples:
        edges = np.flatnonzero(np.diff(np.concatenate([[False], sample.loss_mask, [False]]))).reshape(-1, 2).tolist()
        ids = sample.token_ids.tolist()
        trained += [(ids[:start], ids[start:end]) for start, end in edges]
    prompts = [request["input_ids"] for request in engine.requests]
    assert sorted(trained) == sorted(zip(prompts, given, strict=True))
