"""kill -9 of the session server, again and again, while many episodes play."""

from __future__ import annotations

import asyncio
from pathlib import Path

import openai
import pytest

from everroll.http_client import build_http_client
from everroll.sessions.client import CollectedSamples, SessionClient, SessionHandle
from everroll.sessions.server import SessionServerSettings
from tests.postgres_helpers import create_database
from tests.session_helpers import (
    ADMIN_KEY,
    SAMPLING,
    FakeEngine,
    find_free_port,
    model_section,
    run_fake_engine,
    run_server_process,
    write_model_dir,
)

NUM_TURNS = 6


async def play_episode(handle: SessionHandle, progress: asyncio.Semaphore) -> None:
    """A stock client that retries as its users configure it; each turn waits for leave, so that kills fall between."""
    messages: list = [{"role": "user", "content": f"hello from {handle.session_id}"}]
    async with openai.AsyncOpenAI(
        base_url=handle.base_url, api_key=handle.api_key, max_retries=1000, timeout=60
    ) as agent:
        for turn in range(NUM_TURNS):
            await progress.acquire()
            answer = await agent.chat.completions.create(model="m", messages=messages)
            messages += [answer.choices[0].message, {"role": "user", "content": f"turn {turn}"}]


def expected_tokens(engine: FakeEngine, session_id: str) -> list[int]:
    """The longest prompt that the engine saw for a session, and the reply to it."""
    prompts = [request["input_ids"] for request in engine.requests if request["rid"].startswith(f"{session_id}/")]
    reply: list[int] = engine.tokenizer.encode("a reply<|im_end|>").ids
    return max(prompts, key=len) + reply


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("kind", "num_kills", "num_episodes"), [("sqlite", 20, 64), ("postgres", 5, 16)])
async def test_no_episode_fails_and_no_token_is_lost_or_doubled(
    tmp_path: Path, kind: str, num_kills: int, num_episodes: int
) -> None:
    journal = str(tmp_path / "journal.db") if kind == "sqlite" else await asyncio.to_thread(create_database)
    async with run_fake_engine("a reply") as engine:
        settings = SessionServerSettings(
            model=model_section(write_model_dir(tmp_path / "model")),
            engine_urls=[engine.base_url],
            journal=journal,
            port=find_free_port(),
        )
        with run_server_process(settings, tmp_path / "server.log") as server:
            progress = asyncio.Semaphore(0)
            names = [f"run-0-{member}-0" for member in range(num_episodes)]
            async with build_http_client() as http:
                client = SessionClient(http, server.base_url, ADMIN_KEY)
                handles = [await client.create(name, SAMPLING, seed=1) for name in names]
            episodes = [asyncio.create_task(play_episode(handle, progress)) for handle in handles]
            turns_between_kills = num_episodes * NUM_TURNS // (num_kills + 1)
            for _ in range(num_kills):
                for _ in range(turns_between_kills):
                    progress.release()
                await asyncio.to_thread(server.restart)
            for _ in range(num_episodes * NUM_TURNS):
                progress.release()
            await asyncio.gather(*episodes)
            async with build_http_client() as http:
                client = SessionClient(http, server.base_url, ADMIN_KEY)
                for name in names:
                    collected = await client.collect(name, None, {})
                    assert isinstance(collected, CollectedSamples)
                    (sample,) = collected.sample_set.samples
                    assert sample.num_turns == NUM_TURNS
                    assert sample.token_ids.tolist() == expected_tokens(engine, name)
                    assert (await client.describe(name))["num_turns"] == NUM_TURNS
