"""What all wires share: the normal form they read requests into, and the parts of answers that are the same.

A wire turns a request's body into a `Call`: a `ChatRequest` in normal form, which is all that the core, the journal and
the engines see, and the ways to write the answer back. So a conversation has the same prompt token ids, keys and record
whichever wire it came over, and may even change wires on the way. No I/O.

Options, on every wire:
- what steers sampling (temperature, max_tokens, ...) is accepted and has no effect: the run's pinned values win;
- what cannot be honoured and would change the answer's form or meaning is refused, unless null or harmless;
- whatever else is unknown is accepted and has no effect, so that clients may be newer than this server.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Protocol

from pydantic_core import to_json

from everroll.sessions.core import TurnAnswer
from everroll.sessions.errors import BadRequestError, SessionError
from everroll.sessions.turns import ChatRequest
from everroll.tokens.renderer import Message, Tool

Json = dict[str, Any]
Refusals = Mapping[str, tuple[Callable[[Any], bool], str]]
"""Field to a test for harmless values, and the reason why others are refused."""
Recall = Callable[[bytes], Awaitable[list[Message]]]
"""From a request's key to the recorded conversation up to and including its answer."""


class Call(Protocol):
    """A model call as a wire has read it."""

    @property
    def request(self) -> ChatRequest: ...

    @property
    def stream(self) -> bool: ...

    def build_answer(self, answer: TurnAnswer, model: str) -> Json:
        """The body of an answer."""

    def build_stream(self, answer: TurnAnswer, model: str) -> bytes:
        """The whole answer as server-sent events."""


class Wire(Protocol):
    """One protocol that agents speak."""

    keep_alive: bytes
    """A sign of life in a stream, which clients of this wire pass over."""

    async def read(self, body: Json, recall: Recall) -> Call:
        """Raises BadRequestError: malformed, or asks for what is not supported; names the field."""

    def build_error(self, error: SessionError) -> Json:
        """The body of an error."""

    def build_stream_error(self, error: SessionError) -> bytes:
        """An error after the stream has begun, as the event that makes clients of this wire raise."""


def refuse_unsupported(body: Json, refusals: Refusals) -> None:
    """Raises BadRequestError: names the field, its value and the reason."""
    for name, (is_harmless, reason) in refusals.items():
        value = body.get(name)
        if value is not None and not is_harmless(value):
            raise BadRequestError(f"{name} = {value!r:.200} is not supported: {reason}")


def build_request(messages: list[Message], tools: list[Tool] | None, seed: Any) -> ChatRequest:
    """The last check that all wires share.

    Raises:
        BadRequestError: nothing to answer, or `seed` is no integer.
    """
    if not messages:
        raise BadRequestError("there is no message to answer")
    if messages[-1]["role"] == "assistant":
        raise BadRequestError("the last message is the assistant's; there is nothing to answer")
    if seed is not None and (not isinstance(seed, int) or isinstance(seed, bool)):
        raise BadRequestError(f"seed = {seed!r:.100} is no integer")
    return ChatRequest(messages=messages, tools=tools, label=seed)


def build_tool(where: str, name: Any, description: Any, parameters: Any, more: Json | None = None) -> Tool:
    """A function tool in normal form; templates print its keys in this order.

    Raises:
        BadRequestError: it has no name, or its parameters are no object.
    """
    if not isinstance(name, str) or not name:
        raise BadRequestError(f"{where} has no name")
    if parameters is not None and not isinstance(parameters, dict):
        raise BadRequestError(f"{where}: its parameters are no JSON schema object")
    function: Json = {"name": name}
    if isinstance(description, str):
        function["description"] = description
    if parameters is not None:
        function["parameters"] = parameters
    return {"type": "function", "function": {**function, **(more or {})}}


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


def build_openai_error(error: SessionError) -> Json:
    return {"error": {"message": str(error), "type": error.kind, "code": error.kind, "param": None}}


def encode_event(data: Json, event: str | None = None) -> bytes:
    """One server-sent event."""
    head = b"" if event is None else b"event: " + event.encode() + b"\n"
    return head + b"data: " + to_json(data) + b"\n\n"


def parse_text_parts(value: Any, where: str, kinds: Mapping[str, str]) -> str:
    """Content as one string: null is empty, text parts are joined as they are.

    Args:
        kinds: type of a part to the key of its text; other types are refused.
    """
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise BadRequestError(f"{where} must be a string or a list of text parts")
    texts = []
    for index, part in enumerate(value):
        kind = part.get("type") if isinstance(part, dict) else None
        if not isinstance(kind, str) or kind not in kinds or not isinstance(text := part.get(kinds[kind]), str):
            raise BadRequestError(f"{where}[{index}] is of type {kind!r:.100}; only text is supported")
        texts.append(text)
    return "".join(texts)


def as_list(value: Any, where: str) -> list[Json]:
    """Raises BadRequestError: no list of objects."""
    if not isinstance(value, list):
        raise BadRequestError(f"{where} must be a list")
    for index, item in enumerate(value):
        if not isinstance(item, dict):
            raise BadRequestError(f"{where}[{index}] is no object")
    return value
