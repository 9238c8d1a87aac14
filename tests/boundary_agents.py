"""Agents of the tests of the failure boundary: well-behaved ones, and each kind of bad one."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from pathlib import Path
from typing import Any

import httpx

from everroll.agents import Episode

stubborn: list[bool] = []
"""While not empty, `ignore_cancellation` does not end."""


async def ask_once(episode: Episode) -> dict[str, float]:
    """One model call; the reward depends on the member, so that groups have something to learn from."""
    body = {"model": episode.model, "messages": episode.prompt.messages}
    headers = {"Authorization": f"Bearer {episode.api_key}"}
    response = await episode.http.post(f"{episode.base_url}/chat/completions", json=body, headers=headers)
    response.raise_for_status()
    return {"reward": episode.key.member % 2, "length": len(response.json()["choices"][0]["message"]["content"])}


async def raise_for_group_0(episode: Episode) -> dict[str, float]:
    result = await ask_once(episode)
    if episode.key.group == 0:
        raise KeyError("tool")
    return result


async def never_return(episode: Episode) -> float:
    if (episode.key.group, episode.key.member, episode.key.attempt) == (0, 1, 0):
        await asyncio.sleep(3600)
    return (await ask_once(episode))["reward"]


async def call_nothing(episode: Episode) -> float:
    return 1.0


async def return_text(episode: Episode) -> Any:
    return "0.5" if episode.key.attempt == 0 else (await ask_once(episode))["reward"]


async def hide_failure(episode: Episode) -> float:
    """An agent that takes every error for a bad answer."""
    try:
        return (await ask_once(episode))["reward"]
    except httpx.HTTPError:
        return 0.0


async def ignore_cancellation(episode: Episode) -> float:
    """An agent that takes its cancellation for one more error to go on after."""
    while (episode.key.group, episode.key.member, episode.key.attempt) == (0, 1, 0) and stubborn:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(0.1)
    return (await ask_once(episode))["reward"]


async def cancel_itself(episode: Episode) -> float:
    if episode.key.attempt == 0:
        raise asyncio.CancelledError
    return (await ask_once(episode))["reward"]


def block_the_thread(episode: Episode) -> float:
    """A plain function, which nothing can cancel."""
    if (episode.key.group, episode.key.member, episode.key.attempt) == (0, 1, 0):
        time.sleep(4)
    headers = {"Authorization": f"Bearer {episode.api_key}"}
    body = {"model": episode.model, "messages": episode.prompt.messages}
    httpx.post(f"{episode.base_url}/chat/completions", json=body, headers=headers, timeout=60).raise_for_status()
    return float(episode.key.member % 2)


def play_two_turns(episode: Episode) -> float:
    """Two turns, with a wait in between until the test lets this process go on; nothing can cancel it.

    Files in `args["directory"]` tell the test how far each process got: `began-PID-MEMBER`, and `ended-PID-MEMBER` with
    the status of the second turn.
    """
    directory, member = Path(episode.args["directory"]), episode.key.member
    messages = list(episode.prompt.messages)
    first = _ask(episode, messages)
    messages += [first.json()["choices"][0]["message"], {"role": "user", "content": "go on"}]
    (directory / f"began-{os.getpid()}-{member}").write_text("turn 1")
    while not (directory / f"go-{os.getpid()}").exists():
        time.sleep(0.02)
    second = _ask(episode, messages)
    (directory / f"ended-{os.getpid()}-{member}").write_text(str(second.status_code))
    second.raise_for_status()
    return member / 2


def _ask(episode: Episode, messages: list[dict[str, Any]]) -> httpx.Response:
    headers = {"Authorization": f"Bearer {episode.api_key}"}
    body = {"model": episode.model, "messages": messages}
    url = f"{episode.base_url}/chat/completions"
    return httpx.post(url, json=body, headers=headers, timeout=60, trust_env=False)
