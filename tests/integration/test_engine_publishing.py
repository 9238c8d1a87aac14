"""Publishing weights: once per engine, awaited however long it takes, loud when it fails (case B4)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from temporalio.activity import ActivityCancellationDetails

from activities.publishing import PublishingActivities
from everroll.contracts.spec import EngineKind
from everroll.contracts.training import PublishRequest, PublishResult, Weights
from everroll.engines.base import EngineUnavailableError, GenerateRequest, WeightUpdateError
from everroll.engines.http import open_client_session
from everroll.engines.sglang import SGLangEngine
from tests.activity_attempts import ActivityAttempt
from tests.engine_helpers import make_checkpoint, wait_for_info
from tests.engine_wires import SGLANG, VLLM_GENERATE, Wire, run_wire_server
from tests.fault_proxy import Kind, run_fault_proxy
from tests.integration.test_engine_process import engine_process, wait_until_healthy

WEIGHTS = Weights(version=18, path="/weights/18")
both_kinds = pytest.mark.parametrize("wire", [SGLANG, VLLM_GENERATE], ids=lambda wire: wire.name)


class Attempt(ActivityAttempt):
    """One attempt at `publish_weights`, with what the attempt before had told in its heartbeat."""

    def __init__(self, details: Sequence[Any] = ()) -> None:
        super().__init__(details, heartbeat_timeout_seconds=0.3)

    async def publish(
        self,
        urls: list[str],
        *,
        seconds: float = 5.0,
        weights: Weights = WEIGHTS,
        kind: EngineKind = "auto",
        first: bool = False,
    ) -> PublishResult:
        request = PublishRequest(
            weights=weights, engine_urls=urls, timeout_seconds=seconds, engine_kind=kind, first=first
        )
        async with open_client_session() as session:
            activities = PublishingActivities(session)
            return await self.environment.run(activities.publish_weights, request)


@both_kinds
async def test_every_engine_is_paused_updated_and_goes_on_once(wire: Wire) -> None:
    async with run_wire_server(wire) as one, run_wire_server(wire) as other:
        other.version, other.paused = 18, True
        result = await Attempt().publish([one.url, other.url])
        assert list(result.seconds_by_engine) == [one.url]
        assert (one.version, one.paused, one.loads) == (18, False, ["/weights/18"])
        assert (other.paused, other.loads) == (False, [])
        assert (await Attempt().publish([one.url, other.url])).seconds_by_engine == {}
        assert one.loads == ["/weights/18"]


async def test_an_update_that_takes_three_times_its_timeout_is_awaited() -> None:
    async with run_wire_server(SGLANG, load_seconds=0.9) as server:
        attempt = Attempt()
        await attempt.publish([server.url], seconds=0.3)
        assert (server.version, server.paused, len(server.loads)) == (18, False, 1)
        assert any("waiting until" in heartbeat[0] for heartbeat in attempt.heartbeats)


@pytest.mark.parametrize("jump_seconds", [-86400.0, 86400.0])
async def test_a_load_is_awaited_whatever_the_wall_clock_shows(
    monkeypatch: pytest.MonkeyPatch, jump_seconds: float
) -> None:
    """The clock is set while the engine loads, within an attempt and between two."""
    true_time = time.time
    async with run_wire_server(SGLANG, load_seconds=0.8) as server:
        first = Attempt()
        lost = asyncio.ensure_future(first.publish([server.url], seconds=0.3))
        await wait_for_loads(server, 1)
        monkeypatch.setattr(time, "time", lambda: true_time() + jump_seconds)
        first.environment.cancel(ActivityCancellationDetails(timed_out=True))
        with pytest.raises(asyncio.CancelledError):
            await lost
        await Attempt(first.heartbeats[-1]).publish([server.url], seconds=0.3)
        assert (server.version, server.paused, len(server.loads)) == (18, False, 1)


async def test_an_attempt_goes_on_with_the_patience_that_is_left() -> None:
    async with run_wire_server(SGLANG, load_seconds=30) as server:
        first = Attempt()
        lost = asyncio.ensure_future(first.publish([server.url], seconds=5))
        await wait_for_loads(server, 1)
        first.environment.cancel(ActivityCancellationDetails(timed_out=True))
        with pytest.raises(asyncio.CancelledError):
            await lost
        stage, marks = first.heartbeats[-1]
        waited = {url: (waited + 39.9, version) for url, (waited, version) in marks.items()}  # of 8 x 5 s
        with pytest.raises(WeightUpdateError, match="long ago"):
            await asyncio.wait_for(Attempt([stage, waited]).publish([server.url], seconds=5), 60)


@pytest.mark.parametrize("tells_pause", [True, False])
async def test_an_attempt_that_died_after_its_post_is_taken_up_without_another(tells_pause: bool) -> None:
    async with run_wire_server(SGLANG, load_seconds=0.8, tells_pause=tells_pause) as server:
        first = Attempt()
        lost = asyncio.ensure_future(first.publish([server.url]))
        await wait_for_loads(server, 1)
        timed_out = ActivityCancellationDetails(timed_out=True)
        first.environment.cancel(timed_out)
        with pytest.raises(asyncio.CancelledError):
            await lost
        assert server.paused
        assert list(first.heartbeats[-1][1]) == [server.url]
        await Attempt(first.heartbeats[-1]).publish([server.url])
        assert (server.version, server.paused, len(server.loads)) == (18, False, 1)


@both_kinds
async def test_the_same_number_of_another_run_is_no_reason_to_skip_the_first_publish(wire: Wire) -> None:
    async with run_wire_server(wire, version=18) as server:
        await Attempt().publish([server.url], first=True)
        assert server.loads == ["/weights/18"]


async def test_a_first_publish_is_not_repeated_where_the_engine_tells_its_path() -> None:
    async with run_wire_server(SGLANG) as server:
        await Attempt().publish([server.url], first=True)
        assert (await Attempt().publish([server.url], first=True)).seconds_by_engine == {}
        assert server.loads == ["/weights/18"]


async def test_a_first_publish_whose_answer_is_late_waits_for_the_path() -> None:
    async with run_wire_server(SGLANG, version=18, load_seconds=0.9) as server:
        await Attempt().publish([server.url], seconds=0.3, first=True)
        assert (server.served_path, server.paused, len(server.loads)) == ("/weights/18", False, 1)


async def wait_for_loads(server: Any, count: int) -> None:
    async with asyncio.timeout(60):
        while True:
            if len(server.loads) >= count:
                return
            await asyncio.sleep(0.005)


@pytest.mark.parametrize(("tells_pause", "old_version"), [(True, 0), (False, 17)])
async def test_an_engine_that_was_started_anew_since_the_post_is_told_again(
    tells_pause: bool, old_version: int
) -> None:
    async with run_wire_server(SGLANG, version=0, tells_pause=tells_pause) as server:
        await Attempt(["loads", {server.url: [1.0e9, old_version]}]).publish([server.url])
        assert (server.version, len(server.loads)) == (18, 1)


async def test_a_cancelled_run_leaves_no_engine_paused() -> None:
    async with run_wire_server(SGLANG, load_seconds=1) as server:
        attempt = Attempt()
        publishing = asyncio.ensure_future(attempt.publish([server.url]))
        await wait_for_loads(server, 1)
        attempt.environment.cancel(ActivityCancellationDetails(cancel_requested=True))
        with pytest.raises(asyncio.CancelledError):
            await publishing
        assert not server.paused


async def test_an_engine_that_dies_while_it_loads_is_away() -> None:
    async with run_wire_server(SGLANG, load_seconds=1) as server, run_fault_proxy(server.url) as proxy:
        publishing = asyncio.ensure_future(Attempt().publish([proxy.url]))
        await wait_for_loads(server, 1)
        await proxy.refuse()
        with pytest.raises(EngineUnavailableError) as caught:
            await publishing
        assert caught.value.trouble == "unreachable"


@pytest.mark.parametrize(("tells_pause", "version"), [(True, 17), (True, 0), (False, 0)])
async def test_an_engine_that_is_back_before_anybody_missed_it_is_told_again(tells_pause: bool, version: int) -> None:
    """It died while it loaded, behind a balancer that takes connections for it; nobody ever refused one."""
    server = run_wire_server(SGLANG, load_seconds=600, tells_pause=tells_pause)
    async with server as engine, run_fault_proxy(engine.url) as proxy:
        publishing = asyncio.ensure_future(Attempt().publish([proxy.url], seconds=600))
        await wait_for_loads(engine, 1)
        engine.start_anew(version)
        proxy.break_connections()
        await asyncio.wait_for(publishing, 60)
        assert (engine.version, engine.paused, len(engine.loads)) == (18, False, 2)


async def test_an_engine_that_never_gets_there_is_no_endless_wait() -> None:
    async with run_wire_server(SGLANG, load_seconds=60) as server:
        with pytest.raises(WeightUpdateError, match="long ago and still serves version 17") as caught:
            await Attempt().publish([server.url], seconds=0.1)
        assert caught.value.url == server.url
        assert len(server.loads) == 1
        assert not server.paused


@both_kinds
async def test_refused_weights_are_loud_and_leave_the_engine_sampling(wire: Wire) -> None:
    async with run_wire_server(wire, refuse_load=True) as server:
        with pytest.raises(WeightUpdateError, match="shapes differ") as caught:
            await Attempt().publish([server.url])
        assert server.url in str(caught.value)
        assert not server.paused


async def test_with_several_engines_the_error_names_those_that_failed() -> None:
    async with AsyncExitStack() as stack:
        good = await stack.enter_async_context(run_wire_server(SGLANG))
        refusing = await stack.enter_async_context(run_wire_server(SGLANG, refuse_load=True))
        async with run_wire_server(SGLANG) as gone:
            away = gone.url
        with pytest.raises(EngineUnavailableError, match=away) as one:
            await Attempt().publish([good.url, away], kind="sglang")
        assert good.url not in str(one.value)
        assert good.version == 18
        with pytest.raises(WeightUpdateError, match="2 of 3 engines failed") as two:
            await Attempt().publish([good.url, away, refusing.url], kind="sglang")
        assert away in str(two.value)
        assert refusing.url in str(two.value)
        assert "shapes differ" in str(two.value)


async def test_a_lost_answer_to_the_post_is_no_second_post() -> None:
    async with run_wire_server(SGLANG) as server, run_fault_proxy(server.url) as proxy:
        fault = proxy.fault(Kind.RESET_AFTER_SERVER, "/update_weights_from_disk", times=-1)
        await Attempt().publish([proxy.url])
        assert len(fault.hits) == len(server.loads) == 1
        assert (server.version, server.paused) == (18, False)


async def test_a_real_engine_process_goes_on_with_its_requests(tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path / "a")
    newer = make_checkpoint(tmp_path / "b", seed=1)
    with engine_process(checkpoint) as (_, url):
        async with open_client_session() as session:
            engine = SGLangEngine(url, session)
            await wait_until_healthy(engine)
            kinds: list[EngineKind] = ["sglang", "vllm"]
            for version, kind in enumerate(kinds, start=1):
                call = asyncio.ensure_future(engine.generate(GenerateRequest("long", [1, 2, 3], 400, seed=1)))
                await wait_for_info(url, lambda info: info["num_running"] == 1)
                weights = Weights(version=version, path=str(newer))
                result = await Attempt().publish([url], weights=weights, kind=kind, seconds=60)
                assert list(result.seconds_by_engine) == [url]
                completion = await call
                assert (completion.weight_versions[0], completion.weight_version) == (version - 1, version)
                assert (await Attempt().publish([url], weights=weights, kind=kind)).seconds_by_engine == {}
                with pytest.raises(WeightUpdateError, match="no such directory"):
                    await Attempt().publish([url], weights=Weights(version=9, path="/nowhere"), kind=kind)
                assert len((await engine.generate(GenerateRequest("next", [1], 2))).token_ids) == 2
