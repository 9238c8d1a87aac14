"""How one turn is made: match the history, build the prompt, sample, parse the reply. Nothing is recorded here."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from everroll.engines.base import Completion, GenerateRequest
from everroll.sessions.errors import BadRequestError, ConflictError, TokenInvariantError
from everroll.sessions.history import (
    REASONING,
    Canonicalize,
    canonicalize,
    chain_key,
    chain_keys,
    compute_request_key,
    compute_tools_key,
    name_tool_results,
)
from everroll.sessions.records import Session, Turn
from everroll.sessions.upstream import Upstream
from everroll.tokens.assembly import TurnTokens
from everroll.tokens.renderer import ChatRenderer, Message, Reply, Tool

_LONG_PROMPT_CHARS = 16_384
"""From here on a prompt is built on a thread; tokenizing takes about 0.2 ms per 1,000 characters."""


@dataclass(frozen=True)
class ChatRequest:
    """A model call in the normal form that every wire produces.

    Messages have `role` and, all optional, `content` (one string), `tool_calls` (id, function name, arguments as JSON
    text), `tool_call_id`, `name`, `reasoning_content`; no other keys, no None. The last message is no assistant's.
    """

    messages: list[Message]
    tools: list[Tool] | None = None
    label: int | None = None
    """Tells apart requests that are to be sampled separately though they are equal otherwise."""


@dataclass(frozen=True)
class RequestKeys:
    prefix_keys: list[bytes]
    """Key of the conversation after each message."""
    request_key: bytes

    @property
    def prompt_key(self) -> bytes:
        return self.prefix_keys[-1]


def compute_keys(request: ChatRequest, match: Canonicalize = canonicalize) -> RequestKeys:
    prefix_keys = chain_keys(compute_tools_key(request.tools), request.messages, match)
    return RequestKeys(prefix_keys, compute_request_key(prefix_keys[-1], request.messages, request.label))


@dataclass(frozen=True)
class Prompt:
    """Where a turn stands in the tree, and the token ids it is sampled from."""

    follows: int | None
    extends: bool
    messages: list[Message]
    """Those after the conversation of `follows`."""
    token_ids: list[int]
    num_recorded: int
    """Tokens at the front that are already recorded."""
    note: str


class TurnMaker:
    """Makes turns over one renderer and the engines; `match` says which messages are the same."""

    def __init__(self, renderer: ChatRenderer, upstream: Upstream, match: Canonicalize = canonicalize) -> None:
        self._renderer = renderer
        self._upstream = upstream
        self._match = match
        self.engine_url = upstream.engine_url

    def compute_keys(self, request: ChatRequest) -> RequestKeys:
        return compute_keys(request, self._match)

    async def count_prompt_tokens(self, session: Session, request: ChatRequest) -> int:
        """How many tokens a request's prompt has; nothing is sampled.

        Raises:
            BadRequestError, ConflictError, TokenInvariantError: as `make` does.
        """
        return len((await self._prepare_prompt(session, request, self.compute_keys(request))).token_ids)

    async def make(self, session: Session, request: ChatRequest, keys: RequestKeys) -> Turn:
        """Sample the answer to a request that has no recorded one.

        Raises:
            BadRequestError: the messages cannot be rendered, or the engine refused the prompt.
            ConflictError: continues a generation that ended at its length limit.
            TokenInvariantError: the renderer broke its contract.
            BrokenAnswerError, EngineAwayError: the engines failed.
        """
        prompt = await self._prepare_prompt(session, request, keys)
        depth = 0 if prompt.follows is None else session.turns[prompt.follows].depth + 1
        seed = derive_seed(session.record.seed, depth, request.label)
        generate = self._build_generate_request(session, prompt, keys, seed)
        completion = await self._upstream.generate(
            session.record.session_id, generate, session.record.min_weight_version
        )
        reply = self._renderer.parse(completion.token_ids, prompt.token_ids, request.tools)
        message = build_reply_message(reply, keys.request_key)
        return Turn(
            tokens=_build_tokens(session.take_index(), prompt, completion, keys.prompt_key),
            depth=depth,
            request_key=keys.request_key,
            history_key=chain_key(keys.prompt_key, message, self._match),
            messages=prompt.messages,
            tools=request.tools,
            reply=message,
            num_prompt_tokens=len(prompt.token_ids),
            num_cached_tokens=min(completion.num_cached_tokens, len(prompt.token_ids)),
            seed=seed,
            created_at=time.time(),
            note=prompt.note,
        )

    def _build_generate_request(
        self, session: Session, prompt: Prompt, keys: RequestKeys, seed: int
    ) -> GenerateRequest:
        sampling = session.record.sampling
        return GenerateRequest(
            rid=f"{session.record.session_id}/{keys.request_key.hex()}",
            token_ids=prompt.token_ids,
            max_new_tokens=sampling.max_tokens,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            stop_token_ids=tuple(sorted({*self._renderer.stop_token_ids, *sampling.stop_token_ids})),
            seed=seed,
        )

    async def _prepare_prompt(self, session: Session, request: ChatRequest, keys: RequestKeys) -> Prompt:
        """On a thread where it takes long: the tokenizer lets other sessions go on meanwhile.

        A session only grows, so that what is read there of it stays true.
        """
        if sum(len(message["content"]) for message in request.messages) < _LONG_PROMPT_CHARS:
            return self._build_prompt(session, request, keys)
        return await asyncio.to_thread(self._build_prompt, session, request, keys)

    def _build_prompt(self, session: Session, request: ChatRequest, keys: RequestKeys) -> Prompt:
        found = find_followed(session, request.messages, keys.prefix_keys)
        if found is None:
            note = "no recorded conversation matches" if session.turns else ""
            return Prompt(None, False, request.messages, self._render(request), 0, note)
        turn, num_known = found
        new = request.messages[num_known:]
        if turn.tokens.finish_reason == "length":
            raise ConflictError(
                f"turn {turn.index} ended at its length limit (max_tokens {session.record.sampling.max_tokens}); "
                "its unfinished reply cannot be continued"
            )
        recorded = session.token_ids(turn.index)
        token_ids = self._extend(session, turn, recorded, new, request.tools)
        note = ""
        if token_ids is None:
            token_ids = self._render(request)
            if token_ids[: len(recorded)] != recorded:
                index = find_first_difference(token_ids, recorded)
                note = f"rendered again: differs from turn {turn.index} at token {index} of {len(recorded)}"
        if note:
            return Prompt(turn.index, False, new, token_ids, 0, note)
        if len(token_ids) <= len(recorded):
            raise TokenInvariantError(f"the prompt after turn {turn.index} adds no token to what is recorded")
        return Prompt(turn.index, True, new, token_ids, len(recorded), "")

    def _extend(
        self, session: Session, turn: Turn, recorded: list[int], new: list[Message], tools: list[Tool] | None
    ) -> list[int] | None:
        """Recorded tokens plus the new messages; None when only a full render will do."""
        completion = turn.tokens.completion_ids.size
        history = session.messages(turn.index)
        messages = name_tool_results(new, [turn.reply])
        with _refusing_inexpressible():
            token_ids = self._renderer.extend(recorded[:-completion], recorded[-completion:], history, messages, tools)
        if token_ids is not None and token_ids[: len(recorded)] != recorded:
            index = find_first_difference(token_ids, recorded)
            raise TokenInvariantError(
                f"renderer {self._renderer.name} changed recorded tokens: turn {turn.index}, token {index}"
            )
        return token_ids

    def _render(self, request: ChatRequest) -> list[int]:
        with _refusing_inexpressible():
            return self._renderer.render(name_tool_results(request.messages, []), request.tools)


@contextlib.contextmanager
def _refusing_inexpressible() -> Iterator[None]:
    """What chat templates and renderers raise for messages that they have no form for is the request's fault."""
    try:
        yield
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise BadRequestError(f"the chat template cannot express these messages: {error!r}") from error


def find_followed(session: Session, messages: list[Message], prefix_keys: list[bytes]) -> tuple[Turn, int] | None:
    """The recorded turn that a request continues, and how many of its messages that turn covers.

    The longest match wins; among equal replies the latest.
    """
    for num_known in range(len(messages) - 1, 0, -1):
        if messages[num_known - 1]["role"] != "assistant":
            continue
        reasoning = messages[num_known - 1].get(REASONING)
        for index in reversed(session.by_history.get(prefix_keys[num_known - 1], ())):
            turn = session.turns[index]
            if reasoning is None or reasoning == turn.reply.get(REASONING, ""):
                return turn, num_known
    return None


def find_first_difference(left: list[int], right: list[int]) -> int:
    pairs = zip(left, right, strict=False)
    return next((index for index, (a, b) in enumerate(pairs) if a != b), min(len(left), len(right)))


def derive_seed(session_seed: int, depth: int, label: int | None) -> int:
    """The engine's seed of a turn: the same wherever the conversation is replayed. In [0, 2**31)."""
    text = f"{session_seed}/{depth}" + ("" if label is None else f"/{label}")
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest(), "little") >> 1


def build_reply_message(reply: Reply, request_key: bytes) -> Message:
    """The assistant's message as the agent will see it and send it back."""
    message: Message = {"role": "assistant", "content": reply.content}
    if reply.reasoning is not None:
        message[REASONING] = reply.reasoning
    if reply.tool_calls:
        message["tool_calls"] = [
            {
                "id": call.native_id or f"call_{request_key.hex()[:20]}_{position}",
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for position, call in enumerate(reply.tool_calls)
        ]
    return message


def _build_tokens(index: int, prompt: Prompt, completion: Completion, prompt_key: bytes) -> TurnTokens:
    return TurnTokens(
        index=index,
        follows=prompt.follows,
        extends=prompt.extends,
        prompt_key=prompt_key,
        added_ids=np.asarray(prompt.token_ids[prompt.num_recorded :], dtype=np.int32),
        completion_ids=np.asarray(completion.token_ids, dtype=np.int32),
        logprobs=np.asarray(completion.logprobs, dtype=np.float32),
        weight_versions=np.asarray(completion.weight_versions, dtype=np.int32),
        finish_reason=completion.finish_reason,
    )
