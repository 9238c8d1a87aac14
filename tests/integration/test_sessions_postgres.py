"""The session server over PostgreSQL when that fails: connections cut, the server away, addresses that are wrong."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from everroll.sessions import postgres_database
from everroll.sessions.errors import JournalError
from everroll.sessions.journal import open_journal
from everroll.tokens.renderer import ChatRenderer
from tests.postgres_helpers import create_database, cut_connections, start_postgres
from tests.session_helpers import FakeEngine, Stack, run_fake_engine, run_stack


@pytest.fixture
def url() -> str:
    return create_database()


@pytest.fixture
async def engine() -> AsyncIterator[FakeEngine]:
    async with run_fake_engine("a reply") as engine:
        yield engine


@pytest.fixture
async def stack(engine: FakeEngine, renderer: ChatRenderer, model_dir: Path, url: str) -> AsyncIterator[Stack]:
    async with run_stack(renderer, model_dir, url, [engine]) as stack:
        yield stack


async def play(stack: Stack, name: str, num_turns: int) -> None:
    handle = await stack.open(name)
    messages: list = [{"role": "user", "content": "hi"}]
    for turn in range(num_turns):
        messages += [await stack.chat(handle, *messages), {"role": "user", "content": f"turn {turn}"}]


async def test_cut_connections_are_opened_again_and_no_call_notices(stack: Stack, url: str) -> None:
    names = [f"s{index}" for index in range(6)]
    async with asyncio.TaskGroup() as group:
        episodes = [group.create_task(play(stack, name, 6)) for name in names]
        while not all(episode.done() for episode in episodes):
            await cut_connections(url)
            await asyncio.wait(episodes, timeout=0.05)
    for name in names:
        turns = (await stack.client.describe(name))["turns"]
        assert isinstance(turns, list)
        assert [turn["follows"] for turn in turns] == [None, 0, 1, 2, 3, 4]
        assert await stack.texts(name) == ["a reply|" * 6]


async def test_a_turn_that_cannot_be_made_durable_is_503_and_leaves_nothing(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(postgres_database, "_RECONNECT_SECONDS", 0.5)
    monkeypatch.setattr("everroll.sessions.peers._PATIENCE_SECONDS", -9.0)
    user = {"role": "user", "content": "hi"}
    handle = await stack.open()
    stack.engine.gate = asyncio.Event()
    call = asyncio.create_task(stack.post(handle, user))
    await stack.engine.await_requests(1)
    server = start_postgres()
    await asyncio.to_thread(server.stop)
    try:
        stack.engine.gate.set()
        response = await call
        assert (response.status_code, response.json()["error"]["type"]) == (503, "journal_error")
        assert (await stack.post(handle, user)).status_code == 503
    finally:
        await asyncio.to_thread(server.ensure_postgres_running)
    await stack.chat(handle, user)
    assert await stack.num_turns() == 1
    assert await stack.texts() == ["a reply|"]


@pytest.mark.parametrize(
    ("bad", "text"),
    [
        ("postgresql://someone:hunter2@127.0.0.1:1/db", "postgresql://127.0.0.1:1/db cannot be opened"),
        ("postgresql://someone:hunter2@127.0.0.1:port/db", "cannot be opened"),
        ("mysql://someone:hunter2@host/db", "mysql://...: not supported"),
    ],
)
async def test_a_wrong_address_is_named_without_its_password(bad: str, text: str) -> None:
    with pytest.raises(JournalError) as caught:
        await open_journal(bad)
    assert text in str(caught.value)
    assert "hunter2" not in repr(caught.value)


async def test_wrong_credentials_are_named(url: str) -> None:
    with pytest.raises(JournalError, match="nobody") as caught:
        await open_journal(url.replace("postgres:@", "nobody:hunter2@"))
    assert "hunter2" not in str(caught.value)
