"""The journal's tables, and records as rows.

Arrays are little-endian blobs: token ids and weight versions as int32, log-probabilities as float32. A turn's row holds
only what the turn added, so a conversation of n turns takes space in proportion to its length.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from pydantic_core import from_json, to_json

from everroll.contracts.spec import SamplingSpec
from everroll.sessions.records import SessionRecord, Turn
from everroll.tokens.assembly import TurnTokens

SCHEMA_VERSION = "2"
SCHEMA = (
    "CREATE TABLE IF NOT EXISTS meta (key TEXT PRIMARY KEY, value TEXT NOT NULL)",
    f"INSERT OR IGNORE INTO meta VALUES ('schema_version', '{SCHEMA_VERSION}')",
    """CREATE TABLE IF NOT EXISTS sessions (
        session_id TEXT PRIMARY KEY, sampling TEXT NOT NULL, seed INTEGER NOT NULL, created_at REAL NOT NULL,
        attempt INTEGER NOT NULL, released_at REAL, min_weight_version INTEGER NOT NULL
    ) WITHOUT ROWID""",
    """CREATE TABLE IF NOT EXISTS turns (
        session_id TEXT NOT NULL, turn_index INTEGER NOT NULL, attempt INTEGER NOT NULL,
        follows INTEGER, extends INTEGER NOT NULL, depth INTEGER NOT NULL,
        prompt_key BLOB NOT NULL, request_key BLOB NOT NULL, history_key BLOB NOT NULL,
        added_ids BLOB NOT NULL, completion_ids BLOB NOT NULL, logprobs BLOB NOT NULL, weight_versions BLOB NOT NULL,
        finish_reason TEXT NOT NULL, messages TEXT NOT NULL, tools TEXT NOT NULL, reply TEXT NOT NULL,
        num_prompt_tokens INTEGER NOT NULL, num_cached_tokens INTEGER NOT NULL, seed INTEGER NOT NULL,
        created_at REAL NOT NULL, note TEXT NOT NULL,
        PRIMARY KEY (session_id, turn_index)
    )""",
    """CREATE TABLE IF NOT EXISTS digests (
        session_id TEXT PRIMARY KEY, digest TEXT NOT NULL, num_turns INTEGER NOT NULL
    ) WITHOUT ROWID""",
)
INSERT_SESSION = "INSERT OR IGNORE INTO sessions VALUES (?, ?, ?, ?, ?, ?, ?)"
INSERT_TURN = f"INSERT INTO turns VALUES ({', '.join('?' * 22)})"

_Row = tuple[Any, ...]


def encode_session(record: SessionRecord) -> _Row:
    return (
        record.session_id,
        record.sampling.model_dump_json(),
        record.seed,
        record.created_at,
        record.attempt,
        record.released_at,
        record.min_weight_version,
    )


def decode_session(row: _Row) -> SessionRecord:
    session_id, sampling, seed, created_at, attempt, released_at, min_weight_version = row
    return SessionRecord(
        session_id=session_id,
        sampling=SamplingSpec.model_validate_json(sampling),
        seed=seed,
        created_at=created_at,
        attempt=attempt,
        released_at=released_at,
        min_weight_version=min_weight_version,
    )


def encode_turn(session_id: str, turn: Turn, attempt: int) -> _Row:
    tokens = turn.tokens
    return (
        *(session_id, tokens.index, attempt, tokens.follows, tokens.extends, turn.depth),
        *(tokens.prompt_key, turn.request_key, turn.history_key),
        *(_blob(tokens.added_ids), _blob(tokens.completion_ids), _blob(tokens.logprobs), _blob(tokens.weight_versions)),
        *(tokens.finish_reason, _text(turn.messages), _text(turn.tools), _text(turn.reply)),
        *(turn.num_prompt_tokens, turn.num_cached_tokens, turn.seed, turn.created_at, turn.note),
    )


def decode_turn(row: _Row) -> tuple[Turn, int]:
    """A turn and the latest attempt that used it."""
    _, index, attempt, follows, extends, depth, prompt_key, request_key, history_key = row[:9]
    added_ids, completion_ids, logprobs, weight_versions, finish_reason, messages, tools, reply = row[9:17]
    num_prompt_tokens, num_cached_tokens, seed, created_at, note = row[17:]
    tokens = TurnTokens(
        index=index,
        follows=follows,
        extends=bool(extends),
        prompt_key=prompt_key,
        added_ids=np.frombuffer(added_ids, dtype="<i4"),
        completion_ids=np.frombuffer(completion_ids, dtype="<i4"),
        logprobs=np.frombuffer(logprobs, dtype="<f4"),
        weight_versions=np.frombuffer(weight_versions, dtype="<i4"),
        finish_reason=finish_reason,
    )
    turn = Turn(
        tokens=tokens,
        depth=depth,
        request_key=request_key,
        history_key=history_key,
        messages=from_json(messages),
        tools=from_json(tools),
        reply=from_json(reply),
        num_prompt_tokens=num_prompt_tokens,
        num_cached_tokens=num_cached_tokens,
        seed=seed,
        created_at=created_at,
        note=note,
    )
    return turn, attempt


def _text(value: Any) -> str:
    return to_json(value).decode()


def _blob(array: npt.NDArray[Any]) -> bytes:
    return array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes()
