"""What becomes of sessions in time, and limits: runs that end, sweeps, deletion, digests for good, a full journal."""

from __future__ import annotations

import asyncio
import resource
import sqlite3
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from temporalio.testing import ActivityEnvironment

from activities.collection import CollectionActivities
from everroll.contracts.rollout import ReleaseRequest
from everroll.contracts.spec import SamplingSpec
from everroll.failures import ServerStatusError
from everroll.http_client import build_http_client
from everroll.sessions.client import CollectedSamples, Swept
from everroll.sessions.digest import digest_samples
from everroll.sessions.errors import StorageFullError
from everroll.sessions.journal import open_journal
from everroll.sessions.reading import open_journal_reader
from everroll.sessions.records import SessionRecord
from everroll.sessions.server import SessionServerSettings
from everroll.sessions.sqlite_database import SqliteDatabase
from everroll.tokens.renderer import ChatRenderer
from tests.postgres_helpers import create_database
from tests.session_helpers import (
    ADMIN_KEY,
    USER,
    FakeEngine,
    Stack,
    find_free_port,
    model_section,
    run_fake_engine,
    run_server_process,
    run_stack,
)

NOW: dict[str, Any] = {"retention_days": 0, "run_grace_hours": 0}
"""A policy by which everything is due at once."""


@pytest.fixture
async def engine() -> AsyncIterator[FakeEngine]:
    async with run_fake_engine("one") as engine:
        yield engine


@pytest.fixture(params=["sqlite", "postgres"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return str(tmp_path / "journal.db") if request.param == "sqlite" else create_database()


async def is_released(stack: Stack, session_id: str) -> bool:
    return (await stack.client.describe(session_id))["released_at"] is not None


async def test_a_run_that_ended_is_released_then_deleted_but_for_its_digests(
    engine: FakeEngine, renderer: ChatRenderer, model_dir: Path, url: str
) -> None:
    async with run_stack(renderer, model_dir, url, [engine], **NOW) as stack:
        for name in ("mine-0-0-0", "other-0-0-0"):
            await stack.chat(await stack.open(name), USER)
        collected = await stack.client.collect("mine-0-0-0", 30, {})
        assert isinstance(collected, CollectedSamples)
        assert await stack.client.sweep() == Swept(0, 0)
        activities = CollectionActivities(stack.http, ADMIN_KEY)  # as a run does at its end
        await ActivityEnvironment().run(
            activities.release_sessions,
            ReleaseRequest(session_url=stack.client.base_url, session_ids=[], ended_run="mine"),
        )
        await stack.client.end_run("mine")
        assert await stack.client.sweep() == Swept(1, 1)
        assert not await is_released(stack, "other-0-0-0")
        for call in (stack.open("mine-0-0-0"), stack.client.describe("mine-0-0-0")):
            with pytest.raises(ServerStatusError, match=r"410.*only its digest"):
                await call
        await stack.client.release("mine-0-0-0")  # harmless, as ever
    reader = open_journal_reader(url)
    assert await reader.read_session("mine-0-0-0") is None
    assert await reader.read_digest("mine-0-0-0") == digest_samples("mine-0-0-0", collected.sample_set.samples, 30)
    await reader.close()


async def test_a_released_session_stays_until_its_run_has_ended_and_its_retention_has_passed(
    engine: FakeEngine, renderer: ChatRenderer, model_dir: Path, url: str
) -> None:
    async with run_stack(renderer, model_dir, url, [engine], **NOW) as stack:
        await stack.chat(await stack.open("mine-0-0-0"), USER)
        await stack.client.release("mine-0-0-0")
        assert await stack.client.sweep() == Swept(0, 0)
        assert await stack.num_turns("mine-0-0-0") == 1
    async with run_stack(renderer, model_dir, url, [engine], **{**NOW, "retention_days": 1}) as stack:
        await stack.client.end_run("mine")
        assert await stack.client.sweep() == Swept(0, 0)
        assert await stack.num_turns("mine-0-0-0") == 1


async def test_a_session_that_is_opened_again_takes_the_end_of_its_run_back(
    engine: FakeEngine, renderer: ChatRenderer, model_dir: Path, url: str
) -> None:
    async with run_stack(renderer, model_dir, url, [engine], **NOW) as stack:
        await stack.open("mine-0-0-0", attempt=0)
        await stack.client.end_run("mine")
        handle = await stack.open("mine-0-0-0", attempt=1)
        assert await stack.client.sweep() == Swept(0, 0)
        await stack.chat(handle, USER)


async def test_housekeeping_releases_what_goes_unused_and_ends_silent_runs(
    engine: FakeEngine, renderer: ChatRenderer, model_dir: Path, url: str
) -> None:
    policy = {**NOW, "session_idle_limit_hours": 2 / 3600, "housekeeping_seconds": 0.1}
    async with run_stack(renderer, model_dir, url, [engine], **policy) as stack:
        await stack.chat(await stack.open("idle-0-0-0"), USER)
        busy = await stack.open("busy-0-0-0")
        async with asyncio.timeout(60):
            while True:
                assert (await stack.post(busy, USER)).is_success  # replays count as use
                try:
                    await stack.client.describe("idle-0-0-0")
                except ServerStatusError as error:
                    gone = str(error)
                    break
                await asyncio.sleep(0.05)
        assert "only its digest" in gone


async def test_a_sweep_reaches_sessions_of_every_limit_it_is_given(
    engine: FakeEngine, renderer: ChatRenderer, model_dir: Path, tmp_path: Path
) -> None:
    async with run_stack(renderer, model_dir, tmp_path / "j.db", [engine]) as stack:
        for index in range(3):
            await stack.open(f"s{index}")
        assert await stack.client.sweep() == Swept(0, 0)
        command = [sys.executable, "-m", "everroll.cli", "session", "sweep", "--url", stack.client.base_url]
        swept = await asyncio.to_thread(
            subprocess.run, [*command, "--idle-hours", "0"], capture_output=True, text=True, timeout=60, check=False
        )
        assert swept.stdout == "released 3 sessions, deleted 0 whose retention has passed\n", swept.stderr
        assert await is_released(stack, "s1")


async def test_deleting_gives_space_back(
    engine: FakeEngine, renderer: ChatRenderer, model_dir: Path, tmp_path: Path
) -> None:
    path = tmp_path / "journal.db"
    async with run_stack(renderer, model_dir, path, [engine], **NOW) as stack:
        for index in range(20):
            handle = await stack.open(f"mine-0-{index}-0")
            await stack.chat(handle, {"role": "user", "content": "x" * 20_000})
        before = count_pages(path)
        await stack.client.end_run("mine")
        assert await stack.client.sweep() == Swept(20, 20)
        assert count_pages(path) < before / 2


def count_pages(path: Path) -> int:
    connection = sqlite3.connect(path)
    (pages,) = connection.execute("PRAGMA page_count").fetchone()
    connection.close()
    return int(pages)


async def test_a_journal_at_its_limit_takes_no_new_sessions_and_goes_on_with_the_others(
    engine: FakeEngine, renderer: ChatRenderer, model_dir: Path, url: str
) -> None:
    limits = {"max_journal_bytes": 200_000, "housekeeping_seconds": 0.1}
    if "://" in url:
        limits["max_journal_bytes"] = 1
        text = "takes no new sessions: it takes"
        async with run_stack(renderer, model_dir, url, [engine], **limits) as stack:
            with pytest.raises(ServerStatusError, match=f"507.*{text}"):
                await stack.open("new")
        return
    async with run_stack(renderer, model_dir, url, [engine], **limits) as stack:
        handle = await stack.open()
        reply = await stack.chat(handle, {"role": "user", "content": "x" * 200_000})
        async with asyncio.timeout(60):
            for index in range(10**6):
                try:
                    await stack.open(f"new{index}")
                except ServerStatusError as error:
                    refused = str(error)
                    break
        assert "507" in refused
        assert "takes no new sessions: it takes" in refused
        await stack.open()  # opened again
        await stack.chat(handle, {"role": "user", "content": "x" * 200_000}, reply, USER)


async def test_a_nearly_full_disk_takes_no_new_sessions(
    engine: FakeEngine, renderer: ChatRenderer, model_dir: Path, tmp_path: Path
) -> None:
    async with run_stack(renderer, model_dir, tmp_path / "j.db", [engine], min_free_bytes=10**18) as stack:
        with pytest.raises(ServerStatusError, match=r"507.*its disk has"):
            await stack.open("new")


async def test_a_session_has_a_limit_of_tokens(
    engine: FakeEngine, renderer: ChatRenderer, model_dir: Path, tmp_path: Path
) -> None:
    async with run_stack(renderer, model_dir, tmp_path / "j.db", [engine], max_session_tokens=10) as stack:
        handle = await stack.open()
        reply = await stack.chat(handle, USER)
        refused = await stack.post(handle, USER, reply, USER)
        assert (refused.status_code, "limit of 10 tokens" in refused.text) == (400, True)
        assert await stack.chat(handle, USER) == reply


async def test_a_disk_that_fills_up_loses_nothing(engine: FakeEngine, model_dir: Path, tmp_path: Path) -> None:
    """The file may not grow any more (as under a quota); what was recorded stays, and it goes on once there is room."""
    settings = SessionServerSettings(
        model=model_section(model_dir),
        engine_urls=[engine.base_url],
        journal=str(tmp_path / "journal.db"),
        port=find_free_port(),
    )
    engine.replies = ["one", "two", "three"]
    async with build_http_client() as http:
        with run_server_process(settings, tmp_path / "server.log") as server:
            stack = Stack(engine, http, server.base_url)
            handle = await stack.open()
            reply = await stack.chat(handle, USER)
            size = (tmp_path / "journal.db-wal").stat().st_size
            _, hard = resource.prlimit(server.pid, resource.RLIMIT_FSIZE, (size + 100, resource.RLIM_INFINITY))
            refused = await stack.post(handle, USER, reply, {"role": "user", "content": "x" * 20_000})
            assert refused.status_code in (503, 507)
            assert "cannot be written" in refused.text
            resource.prlimit(server.pid, resource.RLIMIT_FSIZE, (hard, hard))
            await stack.chat(handle, USER, reply, USER)
            assert await stack.num_turns() == 2
            await asyncio.to_thread(server.restart)
            assert await stack.num_turns() == 2
            assert await stack.texts() == ["one|three|"]


async def test_a_full_database_says_so(tmp_path: Path) -> None:
    journal = await open_journal(str(tmp_path / "journal.db"))
    assert isinstance(journal.database, SqliteDatabase)
    (pages,) = journal.database._writer.execute("PRAGMA page_count").fetchone()
    journal.database._writer.execute(f"PRAGMA max_page_count = {pages}").fetchall()
    record = SessionRecord("s", SamplingSpec(stop_token_ids=list(range(50_000))), seed=0, created_at=1.0)
    with pytest.raises(StorageFullError, match="full"):
        await journal.create_session(record)
    await journal.close()
