"""Several session servers over one journal: relayed calls, take-overs, processes behind one address, kill -9 of one."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import httpx
import openai
import pytest

from everroll.http_client import build_http_client
from everroll.sessions.client import CollectedSamples, SessionClient
from everroll.sessions.journal import open_journal
from everroll.sessions.server import SessionServerSettings, listen, open_app
from everroll.tokens.renderer import ChatRenderer
from tests.postgres_helpers import create_database
from tests.session_helpers import (
    ADMIN_KEY,
    SAMPLING,
    USER,
    FakeEngine,
    Stack,
    find_free_port,
    model_section,
    open_openai,
    run_server_process,
    serve_on,
)

T = TypeVar("T")
NUM_TURNS = 6


@pytest.fixture(params=["sqlite", "postgres"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return str(tmp_path / "journal.db") if request.param == "sqlite" else create_database()


@dataclass
class Cluster:
    """Two servers in this process, each with its journal connections, and a way to cut one off."""

    renderer: ChatRenderer
    settings: SessionServerSettings
    engine: FakeEngine
    http: httpx.AsyncClient

    @contextlib.asynccontextmanager
    async def serve(self) -> AsyncIterator[Stack]:
        listener = listen("127.0.0.1", 0)
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        async with (
            open_app(self.settings, self.renderer, ADMIN_KEY, peer_url=url, alone=False) as app,
            serve_on(app, listener),
        ):
            yield Stack(self.engine, self.http, url)


@pytest.fixture
async def cluster(engine: FakeEngine, renderer: ChatRenderer, model_dir: Path, url: str) -> AsyncIterator[Cluster]:
    settings = SessionServerSettings(
        model=model_section(model_dir), engine_urls=[engine.base_url], journal=url, lease_seconds=1
    )
    async with build_http_client(read_seconds=60) as http:
        yield Cluster(renderer, settings, engine, http)


async def test_any_server_answers_for_any_session(cluster: Cluster) -> None:
    async with cluster.serve() as first, cluster.serve() as second:
        handle = await first.open()
        other = await second.open()  # opened again, through the other one
        assert other.api_key == handle.api_key
        reply = await second.chat(other, USER)
        assert await first.chat(handle, USER) == reply
        streamed = await second.post(other, USER, reply, USER, stream=True)
        assert streamed.headers["content-type"].startswith("text/event-stream")
        assert streamed.text.endswith("data: [DONE]\n\n")
        assert len(cluster.engine.requests) == 2
        assert (await second.post(other, USER, key="wrong")).status_code == 401
        assert (await second.post(other, USER, n=2)).status_code == 400
        assert await second.texts() == await first.texts() == ["one|two|"]
        await second.client.release("s")
        for stack, opened in ((first, handle), (second, other)):
            assert (await stack.post(opened, USER)).status_code == 410


async def test_copies_in_flight_through_two_servers_are_sampled_once(cluster: Cluster) -> None:
    cluster.engine.gate = asyncio.Event()
    async with cluster.serve() as first, cluster.serve() as second:
        handles = [await first.open(), await second.open()]
        calls = [
            asyncio.create_task(stack.post(handle, USER))
            for _ in range(3)
            for stack, handle in zip((first, second), handles, strict=True)
        ]
        await cluster.engine.await_requests(1)
        await asyncio.wait(calls, timeout=0.3)
        cluster.engine.gate.set()
        answers = [(await call).json() for call in calls]
        assert sum(not answer["everroll"]["replayed"] for answer in answers) == 1
        assert {answer["id"] for answer in answers} == {answers[0]["id"]}
    assert len(cluster.engine.requests) == 1


async def test_a_server_that_ended_leaves_its_sessions_to_the_other(cluster: Cluster) -> None:
    async with cluster.serve() as second:
        async with cluster.serve() as first:
            reply = await first.chat(await first.open(), USER)
        handle = await second.open()
        assert handle.num_turns == 1
        await second.chat(handle, USER, reply, USER)
        assert await second.texts() == ["one|two|"]


async def test_an_owner_that_was_taken_for_dead_records_nothing_and_sends_its_agent_on(cluster: Cluster) -> None:
    """It fell silent with a call in flight; the other server has answered the agent's retry meanwhile."""
    cluster.engine.gate = asyncio.Event()
    async with cluster.serve() as first, cluster.serve() as second:
        handle = await first.open()
        late = asyncio.create_task(first.post(handle, USER))
        await cluster.engine.await_requests(1)
        await forget_servers(cluster.settings.journal, first.client.base_url)
        handle = await second.open()
        retry = asyncio.create_task(second.post(handle, USER))
        await cluster.engine.await_requests(2)
        cluster.engine.gate.set()
        answers = [(await call).json() for call in (late, retry)]
        assert answers[0]["id"] == answers[1]["id"]
        assert answers[0]["choices"] == answers[1]["choices"]
        assert await first.num_turns() == await second.num_turns() == 1
        assert await first.texts() == await second.texts()


async def forget_servers(journal: str, peer_url: str) -> None:
    """End a server's lease behind its back, as when it could not renew it in time."""
    other = await open_journal(journal)
    rows = await other.database.read("SELECT server_id FROM servers WHERE url = $1", peer_url)
    await other.end_lease(rows[0][0])
    await other.close()


def list_children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


async def test_one_of_two_processes_is_killed_and_agents_go_on(
    engine: FakeEngine, model_dir: Path, url: str, tmp_path: Path
) -> None:
    """kill -9 of whichever process, again and again, while agents with ordinary retries talk through one address."""
    engine.replies = ["a reply"]
    settings = SessionServerSettings(
        model=model_section(model_dir),
        engine_urls=[engine.base_url],
        journal=url,
        processes=2,
        port=find_free_port(),
        lease_seconds=3,
    )
    with run_server_process(settings, tmp_path / "server.log") as server:
        async with build_http_client() as http:
            client = SessionClient(http, server.base_url, ADMIN_KEY)
            names = [f"run-0-{member}-0" for member in range(8)]
            async with asyncio.TaskGroup() as group:
                episodes = [group.create_task(play(client, name)) for name in names]
                for kill in range(1, 4):
                    await engine.await_requests(NUM_TURNS * len(names) * kill // 4, seconds=60)
                    os.kill(list_children(server.pid)[kill % 2], signal.SIGKILL)
            assert all(episode.done() for episode in episodes)
            for name in names:
                collected = await client.collect(name, None, {})
                assert isinstance(collected, CollectedSamples)
                (sample,) = collected.sample_set.samples
                assert sample.num_turns == NUM_TURNS
                prompts = [r["input_ids"] for r in engine.requests if r["rid"].startswith(f"{name}/")]
                reply: list[int] = engine.tokenizer.encode("a reply<|im_end|>").ids
                assert sample.token_ids.tolist() == max(prompts, key=len) + reply
                assert (await client.describe(name))["num_turns"] == NUM_TURNS
        assert await asyncio.to_thread(server.terminate) == 0
    assert "Fatal Python error" not in (tmp_path / "server.log").read_text()


async def play(client: SessionClient, name: str) -> None:
    """An agent that asks again when its call failed, as stock clients do, only sooner."""
    handle = await insist(lambda: client.create(name, SAMPLING, seed=1))
    messages: list[Any] = [{"role": "user", "content": f"hello from {name}"}]
    async with open_openai(handle) as agent:
        ask = functools.partial(agent.chat.completions.create, model="m", messages=messages)
        for turn in range(NUM_TURNS):
            answer = await insist(ask)
            messages += [answer.choices[0].message, {"role": "user", "content": f"turn {turn}"}]


async def insist(call: Callable[[], Awaitable[T]]) -> T:
    async with asyncio.timeout(100):
        while True:
            try:
                return await call()
            except (httpx.TransportError, openai.APIConnectionError, openai.InternalServerError):
                await asyncio.sleep(0.1)
