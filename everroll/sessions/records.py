"""What a session records: its pinned values and its turns."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from everroll.contracts.outcomes import Cause
from everroll.contracts.spec import SamplingSpec
from everroll.tokens.assembly import TurnTokens
from everroll.tokens.renderer import Message, Tool


@dataclass(frozen=True)
class SessionRecord:
    """A session as the journal knows it, turns apart."""

    session_id: str
    sampling: SamplingSpec
    seed: int
    created_at: float
    """Seconds since 1970, as all times here."""
    attempt: int = 0
    """The attempt that opened the session last; grows."""
    released_at: float | None = None
    min_weight_version: int = 0
    """No turn may be sampled by older weights."""


@dataclass(frozen=True, eq=False)
class Turn:
    """One recorded model call: everything needed to answer it again, to extend it, and to train on it."""

    tokens: TurnTokens
    depth: int
    """Turns before this one in its conversation."""
    request_key: bytes
    history_key: bytes
    """Key of the conversation up to and including the reply."""
    messages: list[Message]
    """What the request added to the conversation of `tokens.follows`; all of it for a new conversation."""
    tools: list[Tool] | None
    reply: Message
    num_prompt_tokens: int
    num_cached_tokens: int
    seed: int
    """The engine's sampling seed."""
    created_at: float
    note: str = ""
    """Why the turn does not extend recorded tokens, where one might expect it to."""

    @property
    def index(self) -> int:
        return self.tokens.index

    @property
    def weight_version(self) -> int:
        """The newest weights that sampled a token of this turn."""
        return int(self.tokens.weight_versions.max())


@dataclass(eq=False)
class Session:
    """A session in memory: record, turns and the indices over them. Logic is in `core`."""

    record: SessionRecord
    turns: dict[int, Turn] = field(default_factory=dict)
    attempts: dict[int, int] = field(default_factory=dict)
    """Turn index to the latest attempt in which the turn was sampled or served again."""
    next_index: int = 0
    engine_trouble: Cause | None = None
    """Set while the latest model call failed in the engines, or was refused by one; kept in memory only."""
    by_request: dict[bytes, int] = field(default_factory=dict)
    by_history: dict[bytes, list[int]] = field(default_factory=dict)

    def add(self, turn: Turn, attempt: int) -> None:
        self.turns[turn.index] = turn
        self.attempts[turn.index] = attempt
        self.next_index = max(self.next_index, turn.index + 1)
        self.by_request[turn.request_key] = turn.index
        self.by_history.setdefault(turn.history_key, []).append(turn.index)

    def take_index(self) -> int:
        """The index of the next turn to be recorded."""
        self.next_index += 1
        return self.next_index - 1

    def live_turns(self) -> list[Turn]:
        """The turns that the latest attempt made or was served, with all that these follow.

        An episode that was started over takes its recorded turns with it as far as its messages agree; turns of the
        broken-off attempt beyond that point led to no reward.
        """
        latest = self.record.attempt
        live: set[int] = set()
        for index, attempt in self.attempts.items():
            step: int | None = index if attempt == latest else None
            while step is not None and step not in live:
                live.add(step)
                step = self.turns[step].tokens.follows
        return [self.turns[index] for index in sorted(live)]

    def token_ids(self, index: int | None) -> list[int]:
        """The token sequence up to the end of a turn's completion; empty for None."""
        path = []
        while index is not None:
            turn = self.turns[index].tokens
            path.append(turn)
            index = turn.parent
        ids: list[int] = []
        for turn in reversed(path):
            ids += turn.added_ids.tolist()
            ids += turn.completion_ids.tolist()
        return ids

    def messages(self, index: int | None) -> list[Message]:
        """The conversation up to and including a turn's reply; empty for None."""
        path = []
        while index is not None:
            path.append(self.turns[index])
            index = self.turns[index].tokens.follows
        return [message for turn in reversed(path) for message in (*turn.messages, turn.reply)]


def compute_digest(turns: list[Turn]) -> str:
    """sha256 over all recorded tokens and log-probabilities; it outlives the journal."""
    digest = hashlib.sha256()
    for turn in sorted(turns, key=lambda turn: turn.index):
        tokens = turn.tokens
        digest.update(repr((tokens.index, tokens.parent)).encode())
        for array in (tokens.added_ids, tokens.completion_ids, tokens.logprobs, tokens.weight_versions):
            digest.update(np.int64(array.size).tobytes())
            digest.update(array.tobytes())
    return digest.hexdigest()


def describe_turn(turn: Turn, attempt: int) -> dict[str, Any]:
    """A turn for people; token ids are left to the journal."""
    tokens = turn.tokens
    return {
        "index": turn.index,
        "follows": tokens.follows,
        "extends": tokens.extends,
        "note": turn.note,
        "depth": turn.depth,
        "attempt": attempt,
        "messages": turn.messages,
        "reply": turn.reply,
        "finish_reason": tokens.finish_reason,
        "num_prompt_tokens": turn.num_prompt_tokens,
        "num_completion_tokens": int(tokens.completion_ids.size),
        "num_cached_tokens": turn.num_cached_tokens,
        "weight_version": turn.weight_version,
        "seed": turn.seed,
        "created_at": turn.created_at,
    }
