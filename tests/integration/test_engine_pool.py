"""Several engines behind the session server: who is asked, who is left out, and how long a turn waits for whom."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from temporalio.testing import ActivityEnvironment

from activities.collection import CollectionActivities
from everroll.contracts.rollout import CollectRequest, CollectResult, EpisodeKey
from everroll.engines.base import GenerateRequest
from everroll.engines.http import EngineTimeouts, open_client_session
from everroll.engines.sglang import SGLangEngine
from everroll.failures import Outcome, classify
from everroll.sessions.client import SessionHandle
from everroll.sessions.errors import BrokenAnswerError, EngineAwayError, PromptRefusedError
from everroll.sessions.upstream import Patience, Upstream
from everroll.tokens.renderer import load_renderer
from everroll.tokens.samples import MalformedSamplesError
from tests.engine_wires import REQUEST, SGLANG, WireServer, run_wire_server
from tests.fault_proxy import Kind, run_fault_proxy
from tests.session_helpers import (
    ADMIN_KEY,
    SAMPLING,
    USER,
    FakeEngine,
    Stack,
    model_section,
    run_fake_engine,
    run_stack,
    write_model_dir,
)

NO_PATIENCE = Patience(busy_seconds=0, turn_seconds=10)


@asynccontextmanager
async def open_upstream(
    urls: list[str], patience: Patience = NO_PATIENCE, threshold: int = 2, call_seconds: float = 5.0
) -> AsyncIterator[Upstream]:
    async with open_client_session() as session:
        timeouts = EngineTimeouts(1.0, call_seconds, 1.0, 1.0)
        yield Upstream([SGLangEngine(url, session, timeouts=timeouts) for url in urls], patience, threshold)


def find_session(upstream: Upstream, url: str) -> str:
    """A session whose first engine this is."""
    return next(name for name in (f"s{index}" for index in range(1000)) if upstream.engine_url(name) == url)


async def wait_until(wanted: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while True:
            if wanted():
                return
            await asyncio.sleep(0.005)


async def test_an_engine_that_leaves_moves_its_own_sessions_only() -> None:
    urls = [f"http://127.0.0.1:{port}" for port in (1, 2, 3, 4)]
    names = [f"run-{index}" for index in range(400)]
    async with open_upstream(urls) as all_four, open_upstream(urls[:3]) as three:
        before = [all_four.engine_url(name) for name in names]
        after = [three.engine_url(name) for name in names]
    assert all(old == new for old, new in zip(before, after, strict=True) if old != urls[3])
    assert all(60 < before.count(url) < 140 for url in urls)
    moved = [new for old, new in zip(before, after, strict=True) if old == urls[3]]
    assert set(moved) == set(urls[:3])


async def test_a_turn_that_loses_its_engine_goes_to_another_with_the_same_tokens() -> None:
    async with (
        run_wire_server(SGLANG) as first,
        run_wire_server(SGLANG) as second,
        run_fault_proxy(first.url) as proxy,
        open_upstream([proxy.url, second.url]) as upstream,
    ):
        session = find_session(upstream, proxy.url)
        for _ in range(2):
            await upstream.generate(session, REQUEST)
        assert (len(first.bodies), len(second.bodies)) == (2, 0)
        proxy.fault(Kind.RESET_IN_BODY, "/generate", times=-1)
        assert (await upstream.generate(session, REQUEST)).token_ids == [11, 12]
    names = [body.pop("rid") for body in (*first.bodies, *second.bodies)]
    assert len(set(names)) == len(names)
    assert second.bodies == first.bodies[:1]


async def test_an_unhealthy_engine_is_asked_last_and_comes_back_after_a_success() -> None:
    async with (
        run_wire_server(SGLANG) as first,
        run_wire_server(SGLANG) as second,
        run_fault_proxy(first.url) as proxy,
        open_upstream([proxy.url, second.url]) as upstream,
    ):
        session = find_session(upstream, proxy.url)
        state = next(state for state in upstream.pool.states if state.url == proxy.url)
        async with upstream.pool.checking(0.01):
            await wait_until(lambda: state.weight_version == 17)
            await proxy.refuse()
            await wait_until(lambda: not state.is_healthy)
            assert "Cannot connect" in state.describe()["last_error"]
            await upstream.generate(session, REQUEST)
            assert state.num_calls == 0
            await proxy.listen()
            await wait_until(lambda: state.is_healthy)
            await upstream.generate(session, REQUEST)
    assert (len(first.bodies), len(second.bodies)) == (1, 1)


async def test_calls_that_fail_make_an_engine_unhealthy_too() -> None:
    async with (
        run_wire_server(SGLANG, status=500) as first,
        run_wire_server(SGLANG) as second,
        open_upstream([first.url, second.url]) as upstream,
    ):
        session = find_session(upstream, first.url)
        for _ in range(4):
            await upstream.generate(session, REQUEST)
        assert upstream.engine_url(session) == second.url
    assert len(first.bodies) == 2


def be_busy(server: WireServer, times: int, abort: bool) -> None:
    """Answer so many calls as an engine does that is paused for new weights."""
    complete = server._complete
    left = times

    async def answer(body: dict[str, object], request: object) -> object:
        nonlocal left
        left -= 1
        server.status = 503 if left >= 0 and not abort else 200
        busy = left >= 0 and abort
        server.answer = SGLANG.changed(lambda good: SGLANG.set_finish(good, "abort")) if busy else None
        return await complete(body, request)  # type: ignore[arg-type]

    server._complete = answer  # type: ignore[method-assign, assignment]


@pytest.mark.parametrize("abort", [False, True])
async def test_an_engine_that_is_updating_is_waited_for_with_the_same_tokens(abort: bool) -> None:
    async with run_wire_server(SGLANG) as server:
        be_busy(server, 3, abort)
        async with open_upstream([server.url], Patience(5, 10)) as upstream:
            completion = await upstream.generate("s", REQUEST)
            assert completion.token_ids == [11, 12]
            assert upstream.pool.states[0].is_healthy
    assert len(server.bodies) == 4
    names = {body.pop("rid") for body in server.bodies}
    assert len(names) == len(server.bodies)
    assert all(body == server.bodies[0] for body in server.bodies)


@pytest.mark.parametrize("abort", [False, True])
async def test_the_wait_for_a_busy_engine_is_bounded(abort: bool) -> None:
    """By the patience with busy engines: that of the whole turn is ten minutes."""
    async with run_wire_server(SGLANG) as server:
        be_busy(server, 1000, abort)
        async with open_upstream([server.url], Patience(0.5, 600)) as upstream, asyncio.timeout(60):
            with pytest.raises(EngineAwayError, match="aborted the call" if abort else "503") as caught:
                await upstream.generate("s", REQUEST)
    assert caught.value.engine_url == server.url
    assert len(server.bodies) > 1


async def test_a_connection_that_breaks_under_an_update_is_tried_again() -> None:
    async with run_wire_server(SGLANG) as server, run_fault_proxy(server.url) as proxy:
        proxy.fault(Kind.RESET_AFTER_SERVER, "/generate", times=2)
        async with open_upstream([proxy.url], Patience(5, 10), threshold=3) as upstream:
            assert (await upstream.generate("s", REQUEST)).token_ids == [11, 12]
    names = [body["rid"] for body in server.bodies]
    assert len(names) == 3
    assert len(set(names)) == 3  # SGLang refuses, or dies of, a second call of a name that it still works on


async def test_a_broken_connection_is_tried_once_more_even_without_patience() -> None:
    async with run_wire_server(SGLANG) as server, run_fault_proxy(server.url) as proxy:
        fault = proxy.fault(Kind.RESET_IN_BODY, "/generate", times=1)
        async with open_upstream([proxy.url], threshold=5) as upstream:
            assert (await upstream.generate("s", REQUEST)).token_ids == [11, 12]
            fault.times = -1
            with pytest.raises(EngineAwayError):
                await upstream.generate("s", REQUEST)
    assert len(fault.hits) == 3


async def test_an_engine_that_is_gone_is_not_waited_for() -> None:
    async with run_wire_server(SGLANG) as server:
        url = server.url
    async with open_upstream([url], Patience(600, 600)) as upstream, asyncio.timeout(60):
        with pytest.raises(EngineAwayError, match=url):
            await upstream.generate("s", REQUEST)


async def test_a_turn_ends_in_time_whatever_the_engines_do() -> None:
    async with run_wire_server(SGLANG) as server, run_fault_proxy(server.url) as proxy:
        proxy.fault(Kind.STALL, "/generate", times=-1)
        async with open_upstream([proxy.url], Patience(600, 0.5), call_seconds=600) as upstream, asyncio.timeout(60):
            with pytest.raises(EngineAwayError, match=r"within 0\.5 s"):
                await upstream.generate("s", REQUEST)


async def test_older_weights_than_the_session_needs_count_as_away() -> None:
    async with (
        run_wire_server(SGLANG, version=0) as old,
        run_wire_server(SGLANG, version=17) as new,
        open_upstream([old.url, new.url]) as both,
        open_upstream([old.url], Patience(60, 60)) as alone,
    ):
        assert (await both.generate(find_session(both, old.url), REQUEST, 5)).weight_version == 17
        text = f"engine {old.url} serves version 0, the session needs at least 5"
        with pytest.raises(EngineAwayError, match=text) as caught:
            await alone.generate("s", REQUEST, 5)
    assert caught.value.engine_url == old.url
    assert (old.bodies, len(new.bodies)) == ([], 1)


async def test_a_completion_by_older_weights_is_discarded() -> None:
    async with run_wire_server(SGLANG, version=20) as server:
        server.answer = SGLANG.changed(lambda answer: answer["meta_info"].update(token_weight_versions=[19, 20]))
        async with open_upstream([server.url]) as upstream:
            assert (await upstream.generate("s", REQUEST, 19)).weight_versions == [19, 20]
            with pytest.raises(EngineAwayError, match="serves version 19, the session needs at least 20"):
                await upstream.generate("s", REQUEST, 20)


async def test_new_weights_are_seen_before_the_next_check() -> None:
    async with run_wire_server(SGLANG) as server, open_upstream([server.url]) as upstream:
        await upstream.generate("s", REQUEST, 17)
        server.version = 18
        server.answer = SGLANG.changed(lambda answer: answer["meta_info"].update(weight_version="18"))
        many = await asyncio.gather(*(upstream.generate(f"s{index}", REQUEST, 18) for index in range(20)))
    assert {completion.weight_version for completion in many} == {18}
    assert server.calls.count("GET /model_info") <= 2


@pytest.mark.parametrize(
    ("status", "expected"),
    [(400, PromptRefusedError), (422, PromptRefusedError), (401, BrokenAnswerError), (404, BrokenAnswerError)],
)
async def test_a_refused_prompt_is_told_from_a_wrong_set_up(status: int, expected: type[Exception]) -> None:
    async with run_wire_server(SGLANG, status=status) as server, open_upstream([server.url]) as upstream:
        with pytest.raises(expected, match=str(status)):
            await upstream.generate("s", GenerateRequest("r1", [1], 4))


async def test_the_session_server_shows_its_engines_and_keeps_the_floor_of_a_session(tmp_path: Path) -> None:
    model_dir = write_model_dir(tmp_path / "model")
    renderer = load_renderer(model_section(model_dir))
    async with run_fake_engine() as engine, run_stack(renderer, model_dir, tmp_path / "j.db", [engine]) as stack:
        handle = await stack.client.create("floored", SAMPLING, 1, min_weight_version=4)
        refused = await stack.post(handle, USER)
        assert refused.status_code == 503
        assert "serves version 3, the session needs at least 4" in refused.text
        assert engine.requests == []
        (shown,) = await stack.client.engines()
        assert (shown["url"], shown["healthy"], shown["weight_version"]) == (engine.base_url, True, 3)
        engine.weight_version = 4
        assert (await stack.chat(handle, USER))["content"] == "hello"
        assert (await stack.client.engines())[0]["weight_version"] == 4
        assert (await stack.client.describe("floored"))["min_weight_version"] == 4
        unauthorized = await stack.http.get(f"{stack.client.base_url}/engines")
        assert unauthorized.status_code == 401
    async with run_fake_engine() as old, run_stack(renderer, model_dir, tmp_path / "j.db", [old]) as stack:
        handle = await stack.client.create("floored", SAMPLING, 1, min_weight_version=4)
        assert (await stack.post(handle, {"role": "user", "content": "again"})).status_code == 503


_KEY = EpisodeKey(run="r", group=0, member=0)


@asynccontextmanager
async def open_episode(directory: Path) -> AsyncIterator[tuple[FakeEngine, Stack, SessionHandle]]:
    """The session of one episode, on a server and an engine of its own."""
    model_dir = write_model_dir(directory / "model")
    renderer = load_renderer(model_section(model_dir))
    async with run_fake_engine() as engine, run_stack(renderer, model_dir, directory / "j.db", [engine]) as stack:
        yield engine, stack, await stack.open(_KEY.session_id)


async def collect(stack: Stack, directory: Path, min_weight_version: int = 0) -> CollectResult:
    request = CollectRequest(
        key=_KEY,
        session_url=stack.client.base_url,
        store_url=str(directory / "store"),
        min_weight_version=min_weight_version,
    )
    return await ActivityEnvironment().run(CollectionActivities(stack.http, ADMIN_KEY).collect_samples, request)


async def test_collection_refuses_tokens_of_older_weights_than_the_group_started_at(tmp_path: Path) -> None:
    async with open_episode(tmp_path) as (_, stack, handle):
        await stack.chat(handle, USER)
        collected = await collect(stack, tmp_path, min_weight_version=3)
        assert collected.samples is not None
        assert collected.samples.min_weight_version == 3
        with pytest.raises(MalformedSamplesError, match="tokens of weight version 3, the group started at 4"):
            await collect(stack, tmp_path, min_weight_version=4)
    assert classify(MalformedSamplesError("x")).outcome is Outcome.TERMINAL


async def test_an_episode_is_as_old_as_its_oldest_token(tmp_path: Path) -> None:
    """Weights move under it, between its turns; what is reported is what staleness is measured by."""
    async with open_episode(tmp_path) as (engine, stack, handle):
        reply = await stack.chat(handle, USER)
        engine.weight_version = 5
        await stack.chat(handle, USER, reply, {"role": "user", "content": "go on"})
        collected = await collect(stack, tmp_path)
    assert collected.samples is not None
    assert collected.samples.num_samples == 1, "the second turn continues the first"
    assert (collected.samples.min_weight_version, collected.samples.max_weight_version) == (3, 5)
