"""A journal in PostgreSQL reads as the same one in SQLite does."""

from __future__ import annotations

import asyncio
import dataclasses
import sqlite3
from contextlib import closing
from pathlib import Path

import asyncpg
import pytest

from everroll.sessions.journal import open_journal
from everroll.sessions.reading import JournalReader, JournalReadError, open_journal_reader
from tests.integration.test_session_show import SESSION, record_sessions
from tests.postgres_helpers import create_database

TABLES = ("sessions", "turns", "digests")


async def _copy(source: Path, url: str) -> None:
    """Every row of the three tables, by column name."""
    journal = await open_journal(url)
    await journal.close()
    connection = await asyncpg.connect(url, timeout=60)
    with closing(sqlite3.connect(source)) as old:
        for table in TABLES:
            rows = old.execute(f"SELECT * FROM {table}")
            columns = [column[0] for column in rows.description]
            places = ", ".join(f"${number}" for number in range(1, len(columns) + 1))
            sql = f"INSERT INTO {table} ({', '.join(columns)}) VALUES ({places})"
            await connection.executemany(sql, rows.fetchall(), timeout=60)
    await connection.close(timeout=60)


async def _read_all(reader: JournalReader) -> list[object]:
    try:
        session = await reader.read_session(SESSION)
        assert session is not None
        turns = []
        for turn in session.turns:
            values = {key: getattr(turn, key) for key in turn.__dataclass_fields__ if key != "tokens"}
            arrays = dataclasses.asdict(turn.tokens)
            turns.append(
                (values, {key: getattr(value, "tolist", lambda v=value: v)() for key, value in arrays.items()})
            )
        facts = dataclasses.asdict(dataclasses.replace(session, turns=[]))
        missing = await reader.read_session("nobody"), await reader.read_digest("nobody")
        digest = await reader.read_digest(SESSION)
        listings = [await reader.list_sessions(prefix, 10) for prefix in ("", "shown-", "s%")]
        return [facts, turns, missing, digest, listings]
    finally:
        await reader.close()


def test_both_kinds_read_the_same(tmp_path: Path) -> None:
    asyncio.run(record_sessions(tmp_path))
    url = create_database()
    asyncio.run(_copy(tmp_path / "sessions.sqlite", url))
    sqlite = asyncio.run(_read_all(open_journal_reader(str(tmp_path / "sessions.sqlite"))))
    postgres = asyncio.run(_read_all(open_journal_reader(url)))
    assert postgres == sqlite
    assert sqlite[3] is not None, "the session was released and has a digest"


def test_a_database_that_is_away_is_said() -> None:
    async def read() -> None:
        reader = open_journal_reader("postgresql://user:secret@127.0.0.1:1/sessions")
        try:
            await reader.read_session("s")
        finally:
            await reader.close()

    with pytest.raises(JournalReadError, match=r"127\.0\.0\.1/sessions cannot be read") as caught:
        asyncio.run(read())
    assert "secret" not in str(caught.value)
    with pytest.raises(JournalReadError, match="give a path, or a postgresql:// URL"):
        open_journal_reader("mysql://user:secret@host/sessions")
