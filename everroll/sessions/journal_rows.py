"""Records as rows of the journal, and back.

Arrays are little-endian blobs: token ids and weight versions as int32, log-probabilities as float32. A turn's row holds
only what the turn added, so a conversation of n turns takes space in proportion to its length.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from pydantic_core import from_json, to_json

from everroll.contracts.spec import SamplingSpec
from everroll.sessions.database import Row
from everroll.sessions.records import SessionRecord, Turn
from everroll.tokens.assembly import TurnTokens

SESSION_COLUMNS = (
    "session_id, sampling, seed, created_at, attempt, released_at, min_weight_version, run, max_seq_len, series, "
    "sealed_attempt"
)
NUM_SESSION_COLUMNS = 11
TURN_COLUMNS = (
    "turn_index, attempt, follows, extends, depth, prompt_key, request_key, history_key, added_ids, completion_ids, "
    "logprobs, weight_versions, finish_reason, messages, tools, reply, num_prompt_tokens, num_cached_tokens, seed, "
    "created_at, note"
)
NUM_TURN_COLUMNS = 21


def encode_session(record: SessionRecord) -> Row:
    """Values of `SESSION_COLUMNS`."""
    return (
        record.session_id,
        record.sampling.model_dump_json(),
        record.seed,
        record.created_at,
        record.attempt,
        record.released_at,
        record.min_weight_version,
        record.run,
        record.max_seq_len,
        encode_series(record),
        record.sealed_attempt,
    )


def encode_series(record: SessionRecord) -> str:
    return to_json(record.series).decode()


def decode_session(row: Row) -> SessionRecord:
    session_id, sampling, seed, created_at, attempt, released_at, min_weight_version, run, *later = row
    max_seq_len, series, sealed_attempt = later
    return SessionRecord(
        session_id=session_id,
        sampling=SamplingSpec.model_validate_json(sampling),
        seed=seed,
        created_at=created_at,
        attempt=attempt,
        released_at=released_at,
        min_weight_version=min_weight_version,
        run=run,
        max_seq_len=max_seq_len,
        series=tuple((name, number) for name, number in from_json(series)),
        sealed_attempt=sealed_attempt,
    )


def encode_turn(turn: Turn, attempt: int) -> Row:
    """Values of `TURN_COLUMNS`."""
    tokens = turn.tokens
    return (
        *(tokens.index, attempt, tokens.follows, int(tokens.extends), turn.depth),
        *(tokens.prompt_key, turn.request_key, turn.history_key),
        *(_blob(tokens.added_ids), _blob(tokens.completion_ids), _blob(tokens.logprobs), _blob(tokens.weight_versions)),
        *(tokens.finish_reason, _text(turn.messages), _text(turn.tools), _text(turn.reply)),
        *(turn.num_prompt_tokens, turn.num_cached_tokens, turn.seed, turn.created_at, turn.note),
    )


def decode_turn(row: Row) -> tuple[Turn, int]:
    """A turn and the latest attempt that used it."""
    index, attempt, follows, extends, depth, prompt_key, request_key, history_key = row[:8]
    added_ids, completion_ids, logprobs, weight_versions, finish_reason, messages, tools, reply = row[8:16]
    num_prompt_tokens, num_cached_tokens, seed, created_at, note = row[16:]
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
