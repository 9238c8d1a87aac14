"""The journal over both databases: what is written is there, groups of writes, one bad write, owners and epochs."""

from __future__ import annotations

import asyncio
import dataclasses
import sqlite3
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from everroll.contracts.spec import SamplingSpec
from everroll.sessions.database import Statement
from everroll.sessions.errors import JournalError, NotOwnerError
from everroll.sessions.journal import Journal, open_journal
from everroll.sessions.journal_schema import MIGRATIONS
from everroll.sessions.records import Claim, Session, SessionRecord, Turn
from everroll.sessions.sqlite_database import DIALECT, SqliteDatabase, lock_sqlite
from everroll.tokens.assembly import TurnTokens
from tests.postgres_helpers import create_database, execute


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


@pytest.fixture(params=["sqlite", "postgres"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return str(tmp_path / "deep" / "journal.db") if request.param == "sqlite" else create_database()


@pytest.fixture
async def journal(url: str) -> AsyncIterator[Journal]:
    journal = await open_journal(url)
    yield journal
    await journal.close()


RECORD = SessionRecord("s", SamplingSpec(temperature=0.3), seed=7, created_at=1.5, run="r", min_weight_version=2)
FIRST = Claim("s", 1)


def as_dict(turn: Turn) -> dict[str, object]:
    values = {**vars(turn), **vars(turn.tokens)}
    del values["tokens"]
    return {
        name: (value.dtype.str, value.tolist()) if isinstance(value, np.ndarray) else value
        for name, value in values.items()
    }


async def load(journal: Journal, session_id: str = "s") -> Session:
    session = await journal.read_session(session_id)
    assert session is not None
    return session


async def test_what_is_written_is_read_again_bit_for_bit(journal: Journal) -> None:
    created = await journal.create_session(RECORD)
    assert created is not None
    assert created.claim == FIRST
    turns = [make_turn(0), make_turn(1)]
    for turn in turns:
        await journal.append_turn(FIRST, turn, attempt=0)
    await journal.touch_turn(FIRST, 1, attempt=4)
    await journal.touch_turn(FIRST, 1, attempt=3)
    taken_over = dataclasses.replace(RECORD, attempt=4, series=(("execution/activity", 2),))
    await journal.set_attempt(FIRST, taken_over)
    await journal.set_max_seq_len(FIRST, 99)
    session = await load(journal)
    assert session.record == dataclasses.replace(taken_over, max_seq_len=99)
    assert [as_dict(turn) for turn in session.turns.values()] == [as_dict(turn) for turn in turns]
    assert session.attempts == {0: 0, 1: 4}
    assert session.next_index == 2
    assert session.num_tokens == 10


async def test_an_answered_write_is_in_the_database(journal: Journal, url: str) -> None:
    """I7: another connection sees it at once, as it would after a kill."""
    await journal.create_session(RECORD)
    await journal.append_turn(FIRST, make_turn(0), attempt=0)
    if "://" in url:
        assert await execute(url, "SELECT turn_index FROM turns") == [(0,)]
    else:
        with sqlite3.connect(url) as other:
            assert other.execute("SELECT turn_index FROM turns").fetchall() == [(0,)]
        other.close()


async def test_creating_again_changes_nothing(journal: Journal) -> None:
    await journal.create_session(RECORD)
    assert await journal.create_session(SessionRecord("s", SamplingSpec(), seed=1, created_at=9)) is None
    assert (await load(journal)).record == RECORD
    assert await journal.read_session("other") is None
    assert await journal.claim_session("other") is None


async def test_one_bad_write_in_a_group_fails_alone(journal: Journal) -> None:
    await journal.create_session(RECORD)
    await journal.append_turn(FIRST, make_turn(3), attempt=0)
    writes = [journal.append_turn(FIRST, make_turn(index, "another"), attempt=0) for index in (4, 3, 5, 6)]
    writes[1].close()
    other = dataclasses.replace(make_turn(3), request_key=b"another")
    writes[1] = journal.append_turn(FIRST, other, attempt=0)
    outcomes = await asyncio.gather(*writes, return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [type(None), JournalError, type(None), type(None)]
    session = await load(journal)
    assert sorted(session.turns) == [3, 4, 5, 6]
    assert session.turns[3].request_key == b"r3"


async def test_a_value_that_no_column_holds_fails_alone_and_the_journal_goes_on(tmp_path: Path) -> None:
    journal = await open_journal(str(tmp_path / "journal.db"))
    with pytest.raises(OverflowError):
        await journal.database.write(Statement("INSERT INTO runs (run, ended_at) VALUES ('r', $1)", (2**70,)))
    await journal.renew_lease()
    await journal.close()


async def test_the_same_write_again_is_no_error(journal: Journal) -> None:
    """After a lost connection nobody knows whether a commit went through; it is sent again."""
    await journal.create_session(RECORD)
    for _ in range(2):
        await journal.append_turn(FIRST, make_turn(0), attempt=0)
    assert list((await load(journal)).turns) == [0]


async def test_many_writers_share_few_commits(journal: Journal) -> None:
    await journal.create_session(RECORD)
    if isinstance(journal.database, SqliteDatabase):
        commits: list[str] = []
        journal.database._writer.set_trace_callback(lambda sql: commits.append(sql) if sql == "COMMIT" else None)
        num_commits = lambda: len(commits)  # noqa: E731
    else:
        begins: list[int] = []
        commit = journal.database._commit_together  # type: ignore[attr-defined]

        async def counted(jobs: list) -> None:
            begins.append(len(jobs))
            await commit(jobs)

        journal.database._commit_together = counted  # type: ignore[attr-defined]
        num_commits = lambda: len(begins)  # noqa: E731
    await asyncio.gather(*(journal.append_turn(FIRST, make_turn(index), attempt=0) for index in range(200)))
    assert len((await load(journal)).turns) == 200
    assert num_commits() < 50


async def test_release_and_digest(journal: Journal) -> None:
    await journal.create_session(RECORD)
    await journal.release_session(FIRST, 99.0)
    assert (await load(journal)).record.released_at == 99.0
    assert await journal.load_digest("s") is None
    await journal.write_digest("s", "abc", 0)
    await journal.write_digest("s", "never changes", 0)
    assert await journal.load_digest("s") == "abc"


WRITES: list[Callable[[Journal, Claim], Any]] = [
    lambda journal, claim: journal.append_turn(claim, make_turn(1), attempt=0),
    lambda journal, claim: journal.touch_turn(claim, 0, attempt=9),
    lambda journal, claim: journal.set_attempt(claim, dataclasses.replace(RECORD, attempt=9)),
    lambda journal, claim: journal.set_max_seq_len(claim, 9),
    lambda journal, claim: journal.release_session(claim, 9.0),
]


async def test_an_owner_that_was_deposed_cannot_write(journal: Journal, url: str) -> None:
    await journal.create_session(RECORD)
    await journal.append_turn(FIRST, make_turn(0), attempt=0)
    other = await open_journal(url)  # the first one holds no lease, so its sessions are free
    session = await other.claim_session("s")
    assert session is not None
    assert session.claim == Claim("s", 2)
    assert await other.holds(session.claim)
    assert not await journal.holds(FIRST)
    before = await load(journal)
    for write in WRITES:
        with pytest.raises(NotOwnerError):
            await write(journal, FIRST)
    after = await load(journal)
    assert (after.record, after.attempts) == (before.record, before.attempts)
    for write in WRITES:
        await write(other, session.claim)
    await other.close()


async def test_a_session_is_held_by_whoever_has_a_lease(journal: Journal, url: str) -> None:
    await journal.renew_lease()
    await journal.create_session(RECORD)
    other = await open_journal(url, peer_url="http://other")
    with pytest.raises(NotOwnerError):
        await other.claim_session("s")
    owner = await other.find_owner("s")
    assert owner is not None
    assert owner.server_id == journal.server_id
    await other.end_lease(journal.server_id)
    assert await other.find_owner("s") is None
    claims = await asyncio.gather(other.claim_session("s"), journal.claim_session("s"), return_exceptions=True)
    held = [await journal.holds(c.claim) or await other.holds(c.claim) for c in claims if isinstance(c, Session)]
    assert sum(held) == 1  # however the race went, one holds it
    await other.close()


async def test_a_lease_runs_out_by_itself(journal: Journal, url: str) -> None:
    brief = await open_journal(url, lease_seconds=0.3)
    await brief.renew_lease()
    await brief.create_session(RECORD)
    async with asyncio.timeout(60):
        while True:
            try:
                session = await journal.claim_session("s")
                break
            except NotOwnerError:
                await asyncio.sleep(0.05)
    assert session is not None
    assert not await brief.holds(FIRST)
    await brief.close()


async def test_a_claim_waits_for_a_write_under_way(journal: Journal, url: str) -> None:
    """Whoever claims a session reads every turn that an earlier owner was told of."""
    await journal.create_session(RECORD)
    other = await open_journal(url)
    for index in range(30):
        claim = (await load_claim(journal)).claim
        written, claimed = await asyncio.gather(
            journal.append_turn(claim, make_turn(index), attempt=0), other.claim_session("s"), return_exceptions=True
        )
        assert isinstance(claimed, Session)
        assert isinstance(written, NotOwnerError) != (index in claimed.turns)
    await other.close()


async def load_claim(journal: Journal) -> Session:
    session = await journal.claim_session("s")
    assert session is not None
    return session


async def test_closing_finishes_what_is_queued_and_refuses_more(url: str) -> None:
    journal = await open_journal(url, "normal")
    await journal.create_session(RECORD)
    write = asyncio.create_task(journal.append_turn(FIRST, make_turn(0), attempt=0))
    await asyncio.sleep(0)
    await journal.close()
    await write
    with pytest.raises(JournalError, match="closed"):
        await journal.append_turn(FIRST, make_turn(1), attempt=0)
    again = await open_journal(url, "normal")
    assert list((await load(again)).turns) == [0]
    await again.close()


async def test_a_journal_of_a_later_version(url: str) -> None:
    await (await open_journal(url)).close()
    if "://" in url:
        await execute(url, "UPDATE meta SET value = '99'")
    else:
        with sqlite3.connect(url) as connection:
            connection.execute("UPDATE meta SET value = '99'")
        connection.close()
    with pytest.raises(JournalError, match="schema 99"):
        await open_journal(url)


async def test_a_journal_of_the_first_version_is_brought_up_to_date(tmp_path: Path) -> None:
    path = tmp_path / "journal.db"
    with sqlite3.connect(path) as old:
        old.execute("CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL)")
        old.execute("INSERT INTO meta VALUES ('schema_version', '1')")
        for sql in MIGRATIONS[0]:
            old.execute(DIALECT.format(sql))
        old.execute("INSERT INTO sessions VALUES ('s', '{}', 7, 1.5, 0, NULL)")
    old.close()
    journal = await open_journal(str(path))
    session = await journal.claim_session("s")
    assert session is not None
    assert session.record == SessionRecord("s", SamplingSpec(), seed=7, created_at=1.5)
    await journal.append_turn(session.claim, make_turn(0), attempt=0)
    await journal.close()


async def test_a_file_that_is_no_journal(tmp_path: Path) -> None:
    path = tmp_path / "journal.db"
    path.write_text("this is no database, but it is long enough to be taken for one at first sight" * 20)
    with pytest.raises(JournalError, match=r"journal\.db cannot be opened"):
        await open_journal(str(path))


async def test_a_file_serves_one_server_at_a_time(tmp_path: Path) -> None:
    with (
        lock_sqlite(tmp_path / "journal.db"),
        pytest.raises(JournalError, match="in use by another session server"),
    ):
        lock_sqlite(tmp_path / "journal.db")
