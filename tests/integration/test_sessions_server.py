"""The session server as a process: killed, ended, refused."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import openai
import pytest

from everroll.cli.errors import CommandError
from everroll.cli.settings_options import read_settings
from everroll.failures import ConfigurationError
from everroll.http_client import build_http_client
from everroll.sessions.client import CollectedSamples, SessionClient, SessionHandle
from everroll.sessions.keys import check_bind, load_admin_key
from everroll.sessions.server import SessionServerSettings, serve
from tests.session_helpers import (
    ADMIN_KEY,
    SAMPLING,
    FakeEngine,
    ServerProcess,
    find_free_port,
    model_section,
    open_openai,
    run_fake_engine,
    run_server_process,
    write_model_dir,
)


@pytest.fixture
async def engine() -> AsyncIterator[FakeEngine]:
    async with run_fake_engine() as engine:
        yield engine


@pytest.fixture
async def server(engine: FakeEngine, tmp_path: Path) -> AsyncIterator[ServerProcess]:
    settings = SessionServerSettings(
        model=model_section(write_model_dir(tmp_path / "model")),
        engine_urls=[engine.base_url],
        journal=str(tmp_path / "journal.db"),
        port=find_free_port(),
    )
    with run_server_process(settings, tmp_path / "server.log") as server:
        yield server


@pytest.fixture
async def client(server: ServerProcess) -> AsyncIterator[SessionClient]:
    async with build_http_client() as http:
        yield SessionClient(http, server.base_url, ADMIN_KEY)


async def test_c9_a_killed_server_loses_nothing_that_an_agent_saw(
    server: ServerProcess, client: SessionClient, engine: FakeEngine, tmp_path: Path
) -> None:
    engine.replies = ["one", "two"]
    handle = await client.create("s", SAMPLING, seed=5)
    messages: list = [{"role": "user", "content": "hi"}]
    async with open_openai(handle) as agent:
        first = await agent.chat.completions.create(model="m", messages=messages)
        await asyncio.to_thread(server.restart)
        again = await agent.chat.completions.create(model="m", messages=messages)
        assert again.choices == first.choices
        messages += [first.choices[0].message, {"role": "user", "content": "more"}]
        await agent.chat.completions.create(model="m", messages=messages)
    assert len(engine.requests) == 2
    before = await client.collect("s", None, {})
    await asyncio.to_thread(server.restart)
    after = await client.collect("s", None, {})
    assert isinstance(before, CollectedSamples)
    assert isinstance(after, CollectedSamples)
    assert before.body == after.body
    assert [sample.num_turns for sample in after.sample_set.samples] == [2]
    assert await client.create("s", SAMPLING, seed=5) == SessionHandle("s", handle.base_url, handle.api_key, 2)
    assert await asyncio.to_thread(server.terminate) == 0
    assert not (tmp_path / "journal.db-wal").exists()  # closed, not just abandoned


async def test_a_call_in_flight_when_the_server_is_killed_is_sampled_once_more(
    server: ServerProcess, client: SessionClient, engine: FakeEngine
) -> None:
    handle = await client.create("s", SAMPLING, seed=5)
    engine.gate = asyncio.Event()
    async with open_openai(handle) as agent:

        async def ask() -> str | None:
            messages: list = [{"role": "user", "content": "hi"}]
            return (await agent.chat.completions.create(model="m", messages=messages)).choices[0].message.content

        lost = asyncio.create_task(ask())
        await engine.await_requests(1)
        await asyncio.to_thread(server.kill)
        with pytest.raises(openai.APIConnectionError):
            await lost
        engine.gate.set()
        await asyncio.to_thread(server.start)
        assert await ask() == "hello"
    first, second = engine.requests
    assert first.pop("rid") != second.pop("rid")  # the engine may still work on the first
    assert first == second  # the same tokens, seed and sampling values
    assert (await client.describe("s"))["num_turns"] == 1


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "example.com"])
def test_no_public_address_without_a_key(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("EVERROLL_ADMIN_KEY", raising=False)
    with pytest.raises(ConfigurationError, match="EVERROLL_ADMIN_KEY"):
        check_bind(host, load_admin_key())
    monkeypatch.setenv("EVERROLL_ADMIN_KEY", "a secret")
    check_bind(host, load_admin_key())


def test_settings_that_are_refused_do_not_show_a_password() -> None:
    options = ["--model-path", "m", "--engine-urls", "http://e", "--journal", "postgresql://u:hunter2@h/d"]
    with pytest.raises(CommandError, match="processes") as caught:
        read_settings(SessionServerSettings, "everroll session-server", "", [*options, "--processes", "0"], {})
    assert "hunter2" not in str(caught.value)
    settings = read_settings(SessionServerSettings, "everroll session-server", "", options, {})
    assert "hunter2" not in repr(settings)


def test_a_taken_port_is_named(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        settings = SessionServerSettings(
            model=model_section(write_model_dir(tmp_path / "model")),
            engine_urls=["http://127.0.0.1:1"],
            journal=str(tmp_path / "j.db"),
            port=listener.getsockname()[1],
        )
        with pytest.raises(ConfigurationError, match="cannot listen on"):
            serve(settings)
