"""A recorded session as people look at it: every token with its text, what it is, and how it was sampled. Pure.

Shared by the terminal form, the page and `--json` of `everroll session show`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import Any

from everroll.contracts.base import Payload
from everroll.contracts.spec import SamplingSpec
from everroll.sessions.reading import RecordedSession, RecordedTurn

Decode = Callable[[Sequence[int]], str]
"""From token ids to text, special tokens included."""
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_MAX_PENDING_TOKENS = 4
"""A character has at most four bytes: after so many tokens it will not become whole any more."""


class TokenKind(StrEnum):
    """What a token is; only sampled ones are trained."""

    TEMPLATE = "template"
    """Put there by the chat template: roles, markers, tool descriptions."""
    PROMPT = "prompt"
    """Text of a message that an agent sent."""
    SAMPLED = "sampled"


class TokenView(Payload):
    """One token."""

    id: int
    text: str
    """Empty for a token that only ends a character begun by the one before."""
    kind: TokenKind
    logprob: float | None = None
    """The sampler's; None unless sampled."""
    weight_version: int | None = None


class TurnView(Payload):
    """One turn: what it added to the sequence of the turn it extends, then its completion."""

    index: int
    parent: int | None
    """The turn whose tokens it extends; None for a sequence of its own."""
    follows: int | None
    """The turn whose conversation it continues."""
    live: bool
    """Whether the latest attempt made it or reached it: only then is it trained."""
    attempt: int
    note: str
    finish_reason: str
    num_prompt_tokens: int
    num_cached_tokens: int
    seed: int
    created_at: float
    weight_versions: list[int]
    """Those that sampled its tokens, each once, in order."""
    tokens: list[TokenView]
    messages: list[dict[str, Any]]
    reply: dict[str, Any]

    @property
    def num_sampled(self) -> int:
        return sum(token.kind is TokenKind.SAMPLED for token in self.tokens)


class SessionView(Payload):
    """A whole session."""

    session_id: str
    sampling: SamplingSpec
    seed: int
    attempt: int
    created_at: float
    released_at: float | None
    has_text: bool
    """False where no tokenizer was at hand and texts are token ids."""
    turns: list[TurnView]

    def children(self, parent: int | None) -> list[TurnView]:
        """The turns that extend a turn; those that begin a sequence for None."""
        return [turn for turn in self.turns if turn.parent == parent]


def build_view(session: RecordedSession, decode: Decode | None) -> SessionView:
    """`decode` None shows token ids in place of text."""
    live = {turn.index for turn in session.live_turns()}
    by_index = {turn.tokens.index: turn for turn in session.turns}
    return SessionView(
        session_id=session.session_id,
        sampling=session.sampling,
        seed=session.seed,
        attempt=session.attempt,
        created_at=session.created_at,
        released_at=session.released_at,
        has_text=decode is not None,
        turns=[
            _build_turn(turn, turn.tokens.index in live, _find_contents(turn, by_index), decode)
            for turn in session.turns
        ],
    )


def _build_turn(turn: RecordedTurn, live: bool, contents: list[str], decode: Decode | None) -> TurnView:
    tokens = turn.tokens
    versions = list(dict.fromkeys(tokens.weight_versions.tolist()))
    return TurnView(
        index=tokens.index,
        parent=tokens.parent,
        follows=tokens.follows,
        live=live,
        attempt=turn.attempt,
        note=turn.note,
        finish_reason=tokens.finish_reason,
        num_prompt_tokens=turn.num_prompt_tokens,
        num_cached_tokens=turn.num_cached_tokens,
        seed=turn.seed,
        created_at=turn.created_at,
        weight_versions=versions,
        tokens=[*_build_added(turn, contents, decode), *_build_sampled(turn, decode)],
        messages=turn.messages,
        reply=turn.reply,
    )


def _build_added(turn: RecordedTurn, contents: list[str], decode: Decode | None) -> list[TokenView]:
    ids = turn.tokens.added_ids.tolist()
    texts = split_text(ids, decode)
    kinds = tell_content(texts, contents) if decode else [TokenKind.PROMPT] * len(ids)
    return [TokenView(id=i, text=text, kind=kind) for i, text, kind in zip(ids, texts, kinds, strict=True)]


def _build_sampled(turn: RecordedTurn, decode: Decode | None) -> list[TokenView]:
    ids = turn.tokens.completion_ids.tolist()
    columns = (ids, split_text(ids, decode), turn.tokens.logprobs.tolist(), turn.tokens.weight_versions.tolist())
    return [
        TokenView(id=i, text=text, kind=TokenKind.SAMPLED, logprob=logprob, weight_version=version)
        for i, text, logprob, version in zip(*columns, strict=True)
    ]


def split_text(ids: Sequence[int], decode: Decode | None) -> list[str]:
    """The text of each token, such that together they are the text of all.

    A character that several tokens share stands at the first of them.
    """
    if decode is None:
        return [f"⟨{token}⟩" for token in ids]
    texts = [""] * len(ids)
    before, begin = 0, 0  # tokens from `before` give the context of those from `begin`, whose text is not out yet
    for index in range(len(ids)):
        known = decode(ids[before:begin])
        text = decode(ids[before : index + 1])
        if text.endswith(_REPLACEMENT) and index + 1 < len(ids) and index - begin < _MAX_PENDING_TOKENS - 1:
            continue
        texts[begin] = text[len(known) :]
        before, begin = begin, index + 1
    return texts


def _find_contents(turn: RecordedTurn, by_index: dict[int, RecordedTurn]) -> list[str]:
    """The texts of the messages that the turn's added tokens render, in order."""
    messages = list(turn.messages)
    tokens = turn.tokens
    follows = None if tokens.extends else tokens.follows
    while follows is not None:  # rendered as a whole
        earlier = by_index[follows]
        messages = [*earlier.messages, earlier.reply, *messages]
        follows = earlier.tokens.follows
    found = []
    for message in messages:
        found += [str(message[key]) for key in ("reasoning_content", "content") if message.get(key)]
        found += [str(call["function"]["arguments"]) for call in message.get("tool_calls") or ()]
    return found


def tell_content(texts: Sequence[str], contents: Sequence[str]) -> list[TokenKind]:
    """Which tokens of a prompt hold text of messages; the rest is the template's."""
    whole = "".join(texts)
    spans, start = [], 0
    for content in contents:
        wanted = content.strip()
        at = whole.find(wanted, start) if wanted else -1
        if at >= 0:
            start = at + len(wanted)
            spans.append((at, start))
    kinds: list[TokenKind] = []
    position, span = 0, 0
    for text in texts:
        if not text and kinds:
            kinds.append(kinds[-1])  # ends a character that the token before began
            continue
        while span < len(spans) and spans[span][1] <= position:
            span += 1
        end = position + len(text)
        inside = span < len(spans) and spans[span][0] < end and position < spans[span][1]
        kinds.append(TokenKind.PROMPT if inside else TokenKind.TEMPLATE)
        position = end
    return kinds
