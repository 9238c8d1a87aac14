"""The journal: what is written is there, groups of writes, one bad write among good ones."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest

from everroll.contracts.spec import SamplingSpec
from everroll.sessions.errors import JournalError
from everroll.sessions.journal import SqliteJournal, open_journal
from everroll.sessions.records import Session, SessionRecord, Turn, compute_digest
from everroll.tokens.assembly import TurnTokens


def make_turn(index: int, text: str = "x") -> Turn:
    count = index + 2
    tokens = TurnTokens(
        index=index,
        follows=index - 1 if index else None,
        extends=index > 0,
        prompt_key=b"p%d" % index,
        added_ids=np.arange(count, dtype=np.int32),
        completion_ids=np.arange(count, dtype=np.int32) + 5,
        logprobs=np.float32(np.linspace(-1, -1e-7, count)),
        weight_versions=np.full(count, 3, dtype=np.int32),
        finish_reason="stop",
    )
    return Turn(
        tokens=tokens,
        depth=index,
        request_key=b"r%d" % index,
        history_key=b"h%d" % index,
        messages=[{"role": "user", "content": text}],
        tools=[{"type": "function"}] if index else None,
        reply={"role": "assistant", "content": "naïve ☕"},
        num_prompt_tokens=count,
        num_cached_tokens=1,
        seed=2**31 - 1,
        created_at=12.5,
        note="why",
    )


@pytest.fixture
async def journal(tmp_path: Path) -> AsyncIterator[SqliteJournal]:
    journal = open_journal(tmp_path / "deep" / "journal.db")
    yield journal
    await journal.close()


RECORD = SessionRecord("s", SamplingSpec(temperature=0.3), seed=7, created_at=1.5)


def as_dict(turn: Turn) -> dict[str, object]:
    values = {**vars(turn), **vars(turn.tokens)}
    del values["tokens"]
    return {
        name: (value.dtype.str, value.tolist()) if isinstance(value, np.ndarray) else value
        for name, value in values.items()
    }


async def load(journal: SqliteJournal, session_id: str = "s") -> Session:
    session = await journal.load_session(session_id)
    assert session is not None
    return session


async def test_what_is_written_is_read_again_bit_for_bit(journal: SqliteJournal) -> None:
    await journal.create_session(RECORD)
    turns = [make_turn(0), make_turn(1)]
    for turn in turns:
        await journal.append_turn("s", turn, attempt=0)
    await journal.touch_turn("s", 1, attempt=4)
    await journal.set_attempt("s", 4)
    session = await load(journal)
    assert session.record == SessionRecord("s", RECORD.sampling, 7, 1.5, attempt=4)
    assert [as_dict(turn) for turn in session.turns.values()] == [as_dict(turn) for turn in turns]
    assert session.attempts == {0: 0, 1: 4}
    assert session.next_index == 2
    assert compute_digest(list(session.turns.values())) == compute_digest(turns)


async def test_an_answered_write_is_in_the_file(journal: SqliteJournal) -> None:
    """I7: another connection sees it at once, as it would after a kill."""
    await journal.create_session(RECORD)
    await journal.append_turn("s", make_turn(0), attempt=0)
    with sqlite3.connect(journal.path) as other:
        assert other.execute("SELECT turn_index FROM turns").fetchall() == [(0,)]
    other.close()


async def test_creating_again_changes_nothing(journal: SqliteJournal) -> None:
    await journal.create_session(RECORD)
    await journal.create_session(SessionRecord("s", SamplingSpec(), seed=1, created_at=9))
    assert (await load(journal)).record == RECORD
    assert await journal.load_session("other") is None


async def test_one_bad_write_in_a_group_fails_alone(journal: SqliteJournal) -> None:
    await journal.create_session(RECORD)
    await journal.append_turn("s", make_turn(3), attempt=0)
    writes = [journal.append_turn("s", make_turn(index), attempt=0) for index in (4, 3, 5, 6)]
    outcomes = await asyncio.gather(*writes, return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [type(None), JournalError, type(None), type(None)]
    assert sorted((await load(journal)).turns) == [3, 4, 5, 6]


async def test_many_writers_share_few_commits(journal: SqliteJournal) -> None:
    await journal.create_session(RECORD)
    commits: list[str] = []
    journal._writer.set_trace_callback(lambda sql: commits.append(sql) if sql == "COMMIT" else None)
    await asyncio.gather(*(journal.append_turn("s", make_turn(index), attempt=0) for index in range(200)))
    assert len((await load(journal)).turns) == 200
    assert len(commits) < 50


async def test_release_and_digest(journal: SqliteJournal) -> None:
    await journal.create_session(RECORD)
    await journal.release_session("s", 99.0)
    assert (await load(journal)).record.released_at == 99.0
    assert await journal.load_digest("s") is None
    await journal.write_digest("s", "abc", 0)
    assert await journal.load_digest("s") == "abc"


async def test_closing_finishes_what_is_queued_and_refuses_more(tmp_path: Path) -> None:
    journal = open_journal(tmp_path / "journal.db", "normal")
    await journal.create_session(RECORD)
    write = asyncio.create_task(journal.append_turn("s", make_turn(0), attempt=0))
    await asyncio.sleep(0)
    await journal.close()
    await write
    with pytest.raises(JournalError, match="closed"):
        await journal.append_turn("s", make_turn(1), attempt=0)
    again = open_journal(tmp_path / "journal.db", "normal")
    assert list((await load(again)).turns) == [0]
    await again.close()


async def test_a_file_that_is_no_journal(tmp_path: Path) -> None:
    path = tmp_path / "journal.db"
    path.write_text("this is no database, but it is long enough to be taken for one at first sight" * 20)
    with pytest.raises(JournalError, match=r"journal\.db cannot be opened"):
        open_journal(path)


async def test_a_journal_of_another_version(tmp_path: Path) -> None:
    path = tmp_path / "journal.db"
    await open_journal(path).close()
    with sqlite3.connect(path) as connection:
        connection.execute("UPDATE meta SET value = '99'")
    connection.close()
    with pytest.raises(JournalError, match="schema 99"):
        open_journal(path)


async def test_a_journal_serves_one_process_at_a_time(journal: SqliteJournal) -> None:
    with pytest.raises(JournalError, match="in use by another session server"):
        open_journal(journal.path)
