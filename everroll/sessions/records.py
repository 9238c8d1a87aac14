"""What a session records: its pinned values and its turns."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from everroll.contracts.outcomes import Cause
from everroll.contracts.spec import SamplingSpec
from everroll.tokens.assembly import TurnTokens
from everroll.tokens.renderer import Message, Tool

NO_ATTEMPT = -1
"""Stands for the attempt of a turn whose client had gone before it was answered."""


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
    series: tuple[tuple[str, int], ...] = ()
    """Where attempts are numbered by series (see `attempts`): each series in turn, with the latest number in it."""
    released_at: float | None = None
    min_weight_version: int = 0
    """No turn may be sampled by older weights."""
    run: str = ""
    """Name of the run it belongs to; empty if it belongs to none."""
    max_seq_len: int | None = None
    """What its samples were truncated to when they were collected last."""
    sealed_attempt: int = NO_ATTEMPT
    """The attempt whose samples were collected to be trained; it takes no further turns. A later one does."""

    @property
    def is_sealed(self) -> bool:
        return self.sealed_attempt == self.attempt


@dataclass(frozen=True)
class Claim:
    """A server's hold on a session: good until somebody claims the session in a later epoch."""

    session_id: str
    epoch: int


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
    epoch: int
    """In which this server holds it; 0 when it was only read."""
    turns: dict[int, Turn] = field(default_factory=dict)
    attempts: dict[int, int] = field(default_factory=dict)
    """Turn index to the latest attempt in which the turn was sampled or served again; `NO_ATTEMPT` if it reached
    nobody."""
    arrived: set[int] = field(default_factory=set)
    """Turns that a client was there to receive; kept in memory only."""
    next_index: int = 0
    num_tokens: int = 0
    """Tokens that all its turns added and sampled."""
    engine_trouble: Cause | None = None
    """Set while the latest model call failed in the engines, or was refused by one; kept in memory only."""
    by_request: dict[bytes, int] = field(default_factory=dict)
    by_history: dict[bytes, list[int]] = field(default_factory=dict)

    @property
    def claim(self) -> Claim:
        return Claim(self.record.session_id, self.epoch)

    def add(self, turn: Turn, attempt: int) -> None:
        self.turns[turn.index] = turn
        self.attempts[turn.index] = attempt
        self.next_index = max(self.next_index, turn.index + 1)
        self.num_tokens += int(turn.tokens.added_ids.size + turn.tokens.completion_ids.size)
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


def describe_session(session: Session, digest: Any) -> dict[str, Any]:
    """A session with its turns, for people; `digest` as the journal keeps it, None if there is none."""
    record = session.record
    live = {turn.index for turn in session.live_turns()}
    return {
        "session_id": record.session_id,
        "sampling": record.sampling.model_dump(),
        "seed": record.seed,
        "created_at": record.created_at,
        "min_weight_version": record.min_weight_version,
        "run": record.run,
        "released_at": record.released_at,
        "digest": digest,
        "attempt": record.attempt,
        "num_turns": len(session.turns),
        "turns": [
            {**describe_turn(turn, session.attempts[index]), "live": index in live}
            for index, turn in sorted(session.turns.items())
        ],
    }


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
