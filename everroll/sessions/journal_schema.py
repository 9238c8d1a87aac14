"""The journal's tables, version by version. A released version is never changed; a new one is added at the end.

Columns that the audit reads by name (`everroll.sessions.reading`): those of `sessions`, `turns` and `digests` in the
first version.
"""

from __future__ import annotations

from everroll.sessions.errors import JournalError

_VERSION_1 = (
    """CREATE TABLE IF NOT EXISTS sessions (
        session_id TEXT PRIMARY KEY, sampling TEXT NOT NULL, seed {integer} NOT NULL, created_at {real} NOT NULL,
        attempt {integer} NOT NULL, released_at {real}
    )""",
    """CREATE TABLE IF NOT EXISTS turns (
        session_id TEXT NOT NULL, turn_index {integer} NOT NULL, attempt {integer} NOT NULL,
        follows {integer}, extends {integer} NOT NULL, depth {integer} NOT NULL,
        prompt_key {blob} NOT NULL, request_key {blob} NOT NULL, history_key {blob} NOT NULL,
        added_ids {blob} NOT NULL, completion_ids {blob} NOT NULL, logprobs {blob} NOT NULL,
        weight_versions {blob} NOT NULL,
        finish_reason TEXT NOT NULL, messages TEXT NOT NULL, tools TEXT NOT NULL, reply TEXT NOT NULL,
        num_prompt_tokens {integer} NOT NULL, num_cached_tokens {integer} NOT NULL, seed {integer} NOT NULL,
        created_at {real} NOT NULL, note TEXT NOT NULL,
        PRIMARY KEY (session_id, turn_index)
    )""",
    """CREATE TABLE IF NOT EXISTS digests (
        session_id TEXT PRIMARY KEY, digest TEXT NOT NULL, num_turns {integer} NOT NULL
    )""",
)
# Owners (`owner` in the epoch `epoch`) and their leases, runs and their ends, and what retention goes by.
_VERSION_2 = (
    "ALTER TABLE sessions ADD COLUMN min_weight_version {integer} NOT NULL DEFAULT 0",
    "ALTER TABLE sessions ADD COLUMN run TEXT NOT NULL DEFAULT ''",
    "ALTER TABLE sessions ADD COLUMN owner TEXT NOT NULL DEFAULT ''",
    "ALTER TABLE sessions ADD COLUMN epoch {integer} NOT NULL DEFAULT 0",
    "ALTER TABLE sessions ADD COLUMN used_at {real} NOT NULL DEFAULT 0",
    "ALTER TABLE sessions ADD COLUMN max_seq_len {integer}",
    "UPDATE sessions SET used_at = {now}",
    "CREATE INDEX sessions_by_run ON sessions (run)",
    "CREATE TABLE servers (server_id TEXT PRIMARY KEY, url TEXT NOT NULL, expires_at {real} NOT NULL)",
    "CREATE TABLE runs (run TEXT PRIMARY KEY, ended_at {real} NOT NULL)",
)
# Whose attempts opened a session: JSON, a list of pairs (see `everroll.sessions.attempts`).
_VERSION_3 = ("ALTER TABLE sessions ADD COLUMN series TEXT NOT NULL DEFAULT '[]'",)
# The attempt that takes no further turns, because its samples were collected; -1 for none.
_VERSION_4 = ("ALTER TABLE sessions ADD COLUMN sealed_attempt {integer} NOT NULL DEFAULT -1",)
MIGRATIONS = (_VERSION_1, _VERSION_2, _VERSION_3, _VERSION_4)


def check_version(name: str, version: str | None) -> int:
    """How many migrations a journal already has; `version` is None for a new one.

    Raises:
        JournalError: it was written by a later version of Everroll.
    """
    found = int(version) if version is not None else 0
    if found > len(MIGRATIONS):
        raise JournalError(f"journal {name} has schema {found}, this version reads up to {len(MIGRATIONS)}")
    return found
