"""The clients that agents are given, while the session server is away."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from everroll.agents import AgentClients, Episode
from everroll.contracts.rollout import EpisodeKey
from everroll.prompts import Prompt
from everroll.sessions.keys import derive_session_key
from everroll.sessions.server import open_app
from everroll.sessions.settings import SessionServerSettings
from everroll.tokens.renderer import load_renderer
from tests.session_helpers import (
    ADMIN_KEY,
    USER,
    find_free_port,
    model_section,
    run_fake_engine,
    serve_on,
    write_model_dir,
)


async def ask_openai(episode: Episode) -> str | None:
    messages: Any = [USER]
    answer = await episode.openai().chat.completions.create(model=episode.model, messages=messages)
    return answer.choices[0].message.content


async def ask_anthropic(episode: Episode) -> str | None:
    messages: Any = [USER]
    answer = await episode.anthropic().messages.create(model=episode.model, messages=messages, max_tokens=9)
    (block,) = answer.content
    return str(block.text) if block.type == "text" else None


async def ask_without_client(episode: Episode) -> str | None:
    answer = await episode.chat([USER])
    return str(answer["choices"][0]["message"]["content"])


@pytest.mark.parametrize("ask", [ask_openai, ask_anthropic, ask_without_client])
async def test_an_agent_outlives_a_session_server_that_is_started_anew(
    tmp_path: Path, ask: Callable[[Episode], Awaitable[str | None]]
) -> None:
    """Three of its tries meet a server that breaks off, as many as stock clients make; the next one is answered."""
    directory = write_model_dir(tmp_path / "model")
    port = find_free_port()
    async with httpx.AsyncClient() as http:
        clients = AgentClients(http)
        episode = Episode(
            key=EpisodeKey(run="r", group=0, member=0),
            prompt=Prompt(index=0, messages=[USER]),
            base_url=f"http://127.0.0.1:{port}/sessions/s/v1",
            api_key=derive_session_key(ADMIN_KEY, "s", 0),
            seed=1,
            args={},
            clients=clients,
        )
        async with run_fake_engine("hello") as engine:
            settings = SessionServerSettings(
                model=model_section(directory), engine_urls=[engine.base_url], journal=str(tmp_path / "journal.db")
            )
            async with open_app(settings, load_renderer(settings.model), ADMIN_KEY) as app:
                call = asyncio.create_task(_as_coroutine(ask(episode)))
                await break_off(port, times=3)
                assert not call.done()
                with socket.create_server(("127.0.0.1", port)) as listener:
                    async with serve_on(app, listener):
                        admin = {"Authorization": f"Bearer {ADMIN_KEY}"}
                        created = await http.post(
                            f"http://127.0.0.1:{port}/sessions", json={"session_id": "s"}, headers=admin
                        )
                        assert created.status_code == 200
                        assert await call == "hello"
        await clients.close()


async def break_off(port: int, times: int) -> None:
    """Accept so many connections, and close each at once."""
    left = asyncio.Semaphore(0)

    async def close(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()
        left.release()

    async with await asyncio.start_server(close, "127.0.0.1", port):
        async with asyncio.timeout(60):
            for _ in range(times):
                await left.acquire()


async def _as_coroutine(call: Awaitable[str | None]) -> str | None:
    return await call
