"""Samples that were collected to be trained are all that is kept of an attempt: it takes no further turns."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx
import pytest
from temporalio.testing import ActivityEnvironment

from activities.collection import CollectionActivities
from everroll.contracts.outcomes import CauseKind
from everroll.contracts.rollout import CollectRequest, EpisodeKey
from everroll.sessions.client import CollectedSamples
from everroll.sessions.digest import digest_samples
from everroll.sessions.journal import Journal
from everroll.sessions.records import Claim, Turn
from everroll.tokens.renderer import ChatRenderer
from tests.session_helpers import (
    ADMIN_KEY,
    USER,
    FakeEngine,
    Stack,
    run_stack,
)

LATE = {"role": "user", "content": "one more thing"}


async def collect(stack: Stack, *, seal: bool = True) -> CollectedSamples:
    collected = await stack.client.collect("s", None, {}, seal=seal)
    assert isinstance(collected, CollectedSamples)
    return collected


def is_refused(response: httpx.Response) -> bool:
    return (response.status_code, response.json()["error"]["type"]) == (410, "released_session")


async def test_a_turn_that_comes_after_collection_is_refused(stack: Stack) -> None:
    """What an agent left running behind it adds nothing: collection, journal and digest tell the same."""
    handle = await stack.open()
    reply = await stack.chat(handle, USER)
    before = await collect(stack)
    for messages in ((USER,), (USER, reply, LATE), (LATE,)):
        response = await stack.post(handle, *messages)
        assert is_refused(response)
        assert "were collected" in response.json()["error"]["message"]
    assert (await collect(stack)).body == before.body
    assert await stack.num_turns() == 1
    await stack.client.release("s")
    described = await stack.client.describe("s")
    assert described["digest"] == digest_samples("s", before.sample_set.samples, None).model_dump()


async def test_looking_at_a_session_does_not_seal_it(stack: Stack) -> None:
    handle = await stack.open()
    reply = await stack.chat(handle, USER)
    await collect(stack, seal=False)
    await stack.client.describe("s")
    await stack.chat(handle, USER, reply, LATE)
    assert await stack.num_turns() == 2


async def test_a_seal_outlives_the_server_and_ends_with_a_later_attempt(
    engine: FakeEngine, renderer: ChatRenderer, model_dir: Path, tmp_path: Path
) -> None:
    journal = tmp_path / "journal.db"
    async with run_stack(renderer, model_dir, journal, [engine]) as stack:
        handle = await stack.open(attempt=1)
        reply = await stack.chat(handle, USER)
        await collect(stack)
    async with run_stack(renderer, model_dir, journal, [engine]) as stack:
        again = await stack.open(attempt=1)
        assert is_refused(await stack.post(again, USER, reply, LATE))
        later = await stack.open(attempt=2)
        await stack.chat(later, USER)
        await stack.chat(later, USER, reply, LATE)
        await collect(stack)
        assert is_refused(await stack.post(later, LATE))


async def test_what_collects_for_a_run_seals(stack: Stack, tmp_path: Path) -> None:
    key = EpisodeKey(run="run", group=0, member=0)
    handle = await stack.open(key.session_id)
    await stack.chat(handle, USER)
    request = CollectRequest(key=key, session_url=stack.client.base_url, store_url=str(tmp_path / "store"))
    activities = CollectionActivities(stack.http, ADMIN_KEY)
    first = await ActivityEnvironment().run(activities.collect_samples, request)
    assert is_refused(await stack.post(handle, LATE))
    assert await ActivityEnvironment().run(activities.collect_samples, request) == first


async def test_a_call_under_way_is_given_up_and_stays_known(stack: Stack) -> None:
    """It counts as one without an answer however often samples are collected, and leaves no turn behind."""
    handle = await stack.open()
    reply = await stack.chat(handle, USER)
    stack.engine.gate = asyncio.Event()
    left = asyncio.create_task(stack.post(handle, USER, reply, LATE))
    await stack.engine.await_requests(2)
    collected = [await collect(stack) for _ in range(2)]
    stack.engine.gate.set()
    assert is_refused(await asyncio.wait_for(left, 30))
    assert [entry.engine_trouble and entry.engine_trouble.kind for entry in collected] == [CauseKind.ENGINE] * 2
    assert collected[0].body == collected[1].body
    assert await stack.num_turns() == 1


async def test_a_call_that_is_given_up_while_its_turn_is_written_is_not_trained(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The journal has it; no agent does."""
    handle = await stack.open()
    reply = await stack.chat(handle, USER)
    before = await collect(stack, seal=False)
    append, written = Journal.append_turn, asyncio.Event()

    async def append_and_hang(journal: Journal, claim: Claim, turn: Turn, attempt: int) -> None:
        await append(journal, claim, turn, attempt)
        written.set()
        await asyncio.sleep(60)

    monkeypatch.setattr(Journal, "append_turn", append_and_hang)
    left = asyncio.create_task(stack.post(handle, USER, reply, LATE))
    await asyncio.wait_for(written.wait(), 60)
    assert (await collect(stack)).body == before.body
    assert is_refused(await asyncio.wait_for(left, 60))
    assert await stack.num_turns() == 2, "it stays on record"
