"""When activities send their first heartbeat: each costs the server as much as a step of an episode."""

from __future__ import annotations

import asyncio
import dataclasses
from datetime import timedelta
from typing import Any

import httpx
import pytest
from temporalio.testing import ActivityEnvironment

from activities.episodes import EpisodeActivities
from activities.heartbeats import heartbeating
from everroll.agents import AgentClients
from everroll.contracts.outcomes import SampleStatus
from everroll.contracts.rollout import DatasetRef, EpisodeKey, EpisodeReport, EpisodeRequest
from everroll.contracts.spec import AgentSpec, SamplingSpec
from everroll.prompts import DatasetCache, Prompt

_SECONDS = 1.3
"""Longer than the second after which other activities say what they do."""


def open_environment() -> tuple[ActivityEnvironment, list[Any]]:
    beats: list[Any] = []
    environment = ActivityEnvironment()
    environment.info = dataclasses.replace(environment.info, heartbeat_timeout=timedelta(minutes=4))
    environment.on_heartbeat = lambda *details: beats.append(details)
    return environment, beats


async def test_an_episode_sends_no_heartbeat_before_one_is_due(monkeypatch: pytest.MonkeyPatch) -> None:
    """Thousands begin in a minute, and the web UI shows what the others do."""
    key = EpisodeKey(run="r", group=0, member=0)

    async def find_prompt(*_: object) -> Prompt:
        return Prompt(index=0, messages=[])

    async def play(*_: object) -> EpisodeReport:
        await asyncio.sleep(_SECONDS)
        return EpisodeReport(key=key, status=SampleStatus.COMPLETED, prompt_index=0, reward=1.0)

    async def do_something_else() -> None:
        async with heartbeating("something else"):
            await asyncio.sleep(_SECONDS)

    monkeypatch.setattr(DatasetCache, "find_prompt", find_prompt)
    monkeypatch.setattr(EpisodeActivities, "_play", play)
    (episode, its_beats), (other, other_beats) = open_environment(), open_environment()
    async with httpx.AsyncClient() as http:
        activities = EpisodeActivities(AgentClients(http), DatasetCache(), "key")
        await asyncio.gather(episode.run(activities.run_episode, build_request(key)), other.run(do_something_else))
    assert (its_beats, other_beats) == ([], [("something else",)])


def build_request(key: EpisodeKey) -> EpisodeRequest:
    return EpisodeRequest(
        key=key,
        dataset=DatasetRef(path="p", fingerprint="f", num_prompts=1, seed=0, shuffle=False),
        agent=AgentSpec(function="m:f"),
        sampling=SamplingSpec(max_tokens=1),
        seed=0,
        session_url="http://127.0.0.1:1",
        timeout_seconds=60,
    )
