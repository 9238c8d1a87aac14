"""What must hold of every client, in one table: over the recorded wire, with faults, and over a live engine."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from everroll.engines.base import (
    Completion,
    Engine,
    EngineAnswerError,
    EngineError,
    EngineRejectedError,
    EngineUnavailableError,
    GenerateRequest,
    Trouble,
    WeightUpdateError,
)
from everroll.engines.http import EngineTimeouts, open_client_session
from everroll.engines.open import open_engine
from everroll.engines.vllm import VllmEngine
from tests.engine_helpers import Reference, make_checkpoint, running_engine, wait_for_info
from tests.engine_wires import (
    REQUEST,
    SGLANG,
    VLLM_COMPLETIONS,
    VLLM_GENERATE,
    WIRES,
    Answer,
    Wire,
    WireServer,
    run_wire_server,
)
from tests.fault_proxy import Kind, run_fault_proxy

all_wires = pytest.mark.parametrize("wire", WIRES, ids=lambda wire: wire.name)


@asynccontextmanager
async def client(wire: Wire, url: str, seconds: float = 5.0, api_key: str | None = None) -> AsyncIterator[Engine]:
    async with open_client_session() as session:
        yield wire.open(url, session, EngineTimeouts(1.0, seconds, seconds, seconds), api_key)


async def fail(wire: Wire, url: str, expected: type[EngineError], seconds: float = 5.0) -> EngineError:
    """One generate call that must fail in this way."""
    async with client(wire, url, seconds) as engine:
        with pytest.raises(expected) as caught:
            await engine.generate(REQUEST)
    assert type(caught.value) is expected
    assert url in str(caught.value)
    return caught.value


@all_wires
async def test_a_good_answer(wire: Wire) -> None:
    async with run_wire_server(wire) as server, client(wire, server.url) as engine:
        assert await engine.generate(REQUEST) == Completion([11, 12], [-0.25, -0.5], [17, 17], "stop", 17, 1)
    (body,) = server.bodies
    assert [1, 2, 3] in (body.get("input_ids"), body.get("token_ids"), body.get("prompt"))
    sampling = body.get("sampling_params", body)
    assert sampling["temperature"] == 0.7
    assert sampling["stop_token_ids"] == [9]
    assert 5 in (sampling.get("seed"), sampling.get("sampling_seed"))
    assert body["stream"] is False
    assert body.get("cache_salt") == (None if wire is SGLANG else "17")


@all_wires
async def test_a_completion_that_ends_at_its_limit(wire: Wire) -> None:
    async with run_wire_server(wire) as server, client(wire, server.url) as engine:
        server.answer = wire.changed(lambda answer: wire.set_finish(answer, "length"))
        assert (await engine.generate(REQUEST)).finish_reason == "length"


BROKEN: list[tuple[str, Callable[[Wire, Answer], object], str]] = [
    ("one log-probability for two tokens", lambda wire, answer: wire.set_logprobs(answer, [-0.25]), "1 log-prob"),
    ("three for two", lambda wire, answer: wire.set_logprobs(answer, [-1, -1, -1]), "3 log-prob"),
    ("nan", lambda wire, answer: wire.set_logprobs(answer, [-0.25, float("nan")]), "nan is no log-prob"),
    ("inf", lambda wire, answer: wire.set_logprobs(answer, [float("inf"), -0.5]), "inf is no log-prob"),
    ("-inf", lambda wire, answer: wire.set_logprobs(answer, [float("-inf"), -0.5]), "-inf is no log-prob"),
    ("above zero", lambda wire, answer: wire.set_logprobs(answer, [0.5, -0.5]), "0.5 is no log-prob"),
    ("null", lambda wire, answer: wire.set_logprobs(answer, [None, -0.5]), "None is no log-prob"),
    ("true", lambda wire, answer: wire.set_logprobs(answer, [True, -0.5]), "True is no log-prob"),
    ("no tokens", lambda wire, answer: wire.set_tokens(answer, []), "0 tokens, asked for 1 to 4"),
    ("too many", lambda wire, answer: wire.set_tokens(answer, [1, 2, 3, 4, 5]), "5 tokens, asked for 1 to 4"),
    ("a token that is text", lambda wire, answer: wire.set_tokens(answer, [11, "12"]), "no list of token ids"),
    ("tokens missing", lambda wire, answer: wire.set_tokens(answer, None), "no list of token ids"),
    ("unknown finish", lambda wire, answer: wire.set_finish(answer, "banana"), "banana"),
    ("counts differ", lambda wire, answer: _count(wire, answer, "completion_tokens", 3), "completion_tokens is 3"),
    ("prompt differs", lambda wire, answer: _count(wire, answer, "prompt_tokens", 4), "prompt_tokens is 4"),
]


def _count(wire: Wire, answer: Answer, name: str, value: int) -> None:
    answer["meta_info" if wire is SGLANG else "usage"][name] = value


@all_wires
@pytest.mark.parametrize(("name", "change", "problem"), BROKEN, ids=[row[0] for row in BROKEN])
async def test_an_answer_that_contradicts_itself(
    wire: Wire, name: str, change: Callable[[Wire, Answer], object], problem: str
) -> None:
    async with run_wire_server(wire) as server:
        server.answer = wire.changed(lambda answer: change(wire, answer))
        error = await fail(wire, server.url, EngineAnswerError)
    assert problem in str(error)
    assert (error.http_status, error.can_retry) == (502, False)


@all_wires
@pytest.mark.parametrize("body", [b'{"choices": [', b"\xff\xfe", b"[1]", b"null", b"{}", b"[" * 100_000])
async def test_an_answer_that_is_none(wire: Wire, body: bytes) -> None:
    async with run_wire_server(wire) as server:
        server.answer = body
        await fail(wire, server.url, EngineAnswerError)


@all_wires
async def test_an_abort_is_no_completion(wire: Wire) -> None:
    async with run_wire_server(wire) as server:
        server.answer = wire.changed(lambda answer: wire.set_finish(answer, "abort"))
        error = await fail(wire, server.url, EngineUnavailableError)
    assert isinstance(error, EngineUnavailableError)
    assert error.trouble == "busy"
    assert "aborted" in str(error)


@all_wires
@pytest.mark.parametrize(
    ("status", "expected", "trouble"),
    [
        (400, EngineRejectedError, None),
        (401, EngineRejectedError, None),
        (302, EngineRejectedError, None),
        (429, EngineUnavailableError, "busy"),
        (503, EngineUnavailableError, "busy"),
        (500, EngineUnavailableError, "failed"),
    ],
)
async def test_statuses(wire: Wire, status: int, expected: type[EngineError], trouble: Trouble | None) -> None:
    async with run_wire_server(wire, status=status) as server:
        error = await fail(wire, server.url, expected)
    assert error.status == status
    assert "the reason" in str(error)
    assert (error.trouble if isinstance(error, EngineUnavailableError) else None) == trouble


@all_wires
@pytest.mark.parametrize(
    ("kind", "expected", "trouble"),
    [
        (Kind.RESET_BEFORE_SERVER, EngineUnavailableError, "lost"),
        (Kind.RESET_AFTER_SERVER, EngineUnavailableError, "lost"),
        (Kind.RESET_IN_HEADERS, EngineUnavailableError, "lost"),
        (Kind.RESET_IN_BODY, EngineUnavailableError, "lost"),
        (Kind.HALF_CLOSE, EngineUnavailableError, "lost"),
        (Kind.CLOSE_QUIETLY, EngineUnavailableError, "lost"),
        (Kind.STALL, EngineUnavailableError, "timeout"),
        (Kind.STALL_IN_BODY, EngineUnavailableError, "timeout"),
        (Kind.CORRUPT, EngineAnswerError, None),
        (Kind.BAD_GZIP, EngineAnswerError, None),
    ],
    ids=lambda value: value.name if isinstance(value, Kind) else "",
)
async def test_broken_connections(wire: Wire, kind: Kind, expected: type[EngineError], trouble: Trouble | None) -> None:
    async with run_wire_server(wire) as server, run_fault_proxy(server.url) as proxy:
        proxy.fault(kind, wire.route, times=-1)
        error = await fail(wire, proxy.url, expected, seconds=0.3 if trouble == "timeout" else 60)
    assert ("no answer within 0.3 s" in str(error)) == (trouble == "timeout")
    assert (error.trouble if isinstance(error, EngineUnavailableError) else None) == trouble


@all_wires
async def test_nothing_listens(wire: Wire) -> None:
    async with run_wire_server(wire) as server:
        url = server.url
    error = await fail(wire, url, EngineUnavailableError)
    assert isinstance(error, EngineUnavailableError)
    assert error.trouble == "unreachable"


@all_wires
async def test_the_key_goes_with_every_call(wire: Wire) -> None:
    async with run_wire_server(wire, api_key="secret") as server:
        async with client(wire, server.url, api_key="secret") as engine:
            await engine.generate(REQUEST)
            await engine.pause("in_place")
            await engine.update_weights("/weights/18", 18)
            await engine.resume()
            await engine.check_health()
            assert (await engine.weight_version(), await engine.is_paused()) == (18, False)
        async with client(wire, server.url, api_key="Secret") as engine:
            with pytest.raises(EngineRejectedError, match="401"):
                await engine.generate(REQUEST)


@all_wires
async def test_weights_pause_load_resume(wire: Wire) -> None:
    async with run_wire_server(wire) as server, client(wire, server.url) as engine:
        await engine.pause("in_place")
        assert await engine.is_paused() is True
        await engine.update_weights("/weights/18", 18)
        await engine.resume()
        assert await engine.weight_version() == 18
    assert server.loads == ["/weights/18"]
    assert any(call.startswith(wire.pause_call) for call in server.calls)
    assert wire.resume_call in server.calls


@all_wires
async def test_refused_weights(wire: Wire) -> None:
    async with run_wire_server(wire, refuse_load=True) as server, client(wire, server.url) as engine:
        with pytest.raises(WeightUpdateError, match="shapes differ") as caught:
            await engine.update_weights("/weights/18", 18)
        assert wire.load_route in caught.value.url
        assert await engine.weight_version() == 17


@pytest.mark.parametrize("wire", [VLLM_GENERATE, VLLM_COMPLETIONS], ids=lambda wire: wire.name)
async def test_a_call_that_lived_through_an_update_is_labelled_with_the_older_weights(wire: Wire) -> None:
    async with run_wire_server(wire) as server, client(wire, server.url) as engine:
        complete = server._complete

        async def update_meanwhile(body: Answer, request: Any) -> Any:
            server.version = 18
            return await complete(body, request)

        server._complete = update_meanwhile  # type: ignore[method-assign]
        completion = await engine.generate(REQUEST)
    assert (completion.weight_versions, completion.weight_version) == ([17, 17], 18)


@pytest.mark.parametrize("has_generate", [True, False])
async def test_vllm_s_first_door_that_is_there_is_used(has_generate: bool) -> None:
    wire = VLLM_GENERATE if has_generate else VLLM_COMPLETIONS
    async with run_wire_server(wire, has_generate=has_generate) as server, open_client_session() as session:
        engine = VllmEngine(server.url, session)
        await engine.generate(REQUEST)
        await engine.generate(REQUEST)
    assert server.calls.count("POST /inference/v1/generate") == (3 if has_generate else 1)
    assert server.calls.count("POST /v1/completions") == (0 if has_generate else 2)


async def test_vllm_without_weight_versions_is_refused_with_what_to_do() -> None:
    async with run_wire_server(VLLM_GENERATE) as server, client(VLLM_GENERATE, server.url) as engine:
        routes = server._routes()
        del routes["GET", "/weight_info"]
        server._routes = lambda: routes  # type: ignore[method-assign]
        with pytest.raises(EngineRejectedError, match="VLLM_SERVER_DEV_MODE=1"):
            await engine.generate(REQUEST)


@all_wires
async def test_auto_asks_the_server_what_it_is(wire: Wire) -> None:
    async with (
        run_wire_server(wire, has_generate=wire is not VLLM_COMPLETIONS) as server,
        open_client_session() as session,
    ):
        engine = open_engine("auto", server.url, session)
        assert (await engine.generate(REQUEST)).token_ids == [11, 12]
        assert await engine.weight_version() == 17


async def test_auto_says_so_when_it_is_neither() -> None:
    async with run_wire_server(SGLANG) as server, open_client_session() as session:
        server._routes = dict  # type: ignore[method-assign]
        with pytest.raises(EngineRejectedError, match="neither SGLang nor vLLM"):
            await open_engine("auto", server.url, session).weight_version()


async def test_auto_asks_again_after_an_engine_that_was_away() -> None:
    async with (
        run_wire_server(VLLM_GENERATE) as server,
        run_fault_proxy(server.url) as proxy,
        open_client_session() as session,
    ):
        engine = open_engine("auto", proxy.url, session)
        fault = proxy.fault(Kind.RESET_BEFORE_SERVER, times=-1)
        with pytest.raises(EngineUnavailableError):
            await engine.generate(REQUEST)
        fault.times = 0
        assert (await engine.generate(REQUEST)).token_ids == [11, 12]


# The same clients against the embedded engine.

PROMPT = list(range(1, 40))


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    directory = tmp_path_factory.mktemp("conformance")
    return make_checkpoint(directory / "a"), make_checkpoint(directory / "b", seed=1)


@pytest.fixture(scope="module")
def live_url(checkpoints: tuple[Path, Path]) -> Any:
    with running_engine(checkpoints[0]) as url:
        yield url


@all_wires
async def test_a_live_engine_samples_what_the_model_says(
    wire: Wire, live_url: str, checkpoints: tuple[Path, Path]
) -> None:
    request = GenerateRequest("live", PROMPT, 12, temperature=0.7, seed=3)
    async with client(wire, live_url, 60) as engine:
        await engine.update_weights(str(checkpoints[0]), 1)
        completion = await engine.generate(request)
        assert completion.logprobs == pytest.approx(
            Reference(checkpoints[0]).logprobs(PROMPT, completion.token_ids, 0.7), abs=1e-4
        )
        assert (completion.weight_versions, completion.finish_reason) == ([1] * 12, "length")
        again = await engine.generate(request)
        assert (again.token_ids, again.num_cached_tokens) == (completion.token_ids, 32)
        stopped = await engine.generate(
            GenerateRequest("s", PROMPT, 12, temperature=0.7, seed=3, stop_token_ids=(completion.token_ids[4],))
        )
        assert stopped.finish_reason == "stop"
        assert stopped.token_ids == completion.token_ids[: len(stopped.token_ids)]
        with pytest.raises(EngineRejectedError, match=re.compile("context")) as caught:
            await engine.generate(GenerateRequest("long", [1] * 600, 4))
        assert caught.value.status == 400


@all_wires
async def test_a_live_engine_is_updated_in_place(wire: Wire, live_url: str, checkpoints: tuple[Path, Path]) -> None:
    async with client(wire, live_url, 60) as engine:
        await engine.update_weights(str(checkpoints[0]), 1)
        call = asyncio.ensure_future(engine.generate(GenerateRequest("long", PROMPT, 300, seed=1)))
        await wait_for_info(live_url, lambda info: info["num_running"] == 1)
        await engine.pause("in_place")
        assert await engine.is_paused() is True
        await engine.update_weights(str(checkpoints[1]), 2)
        assert not call.done()
        await engine.resume()
        completion = await call
        assert completion.weight_version == 2
        assert completion.weight_versions[0] == 1
        with pytest.raises(WeightUpdateError, match="no such directory"):
            await engine.update_weights("/nowhere", 3)
        assert await engine.weight_version() == 2
        call = asyncio.ensure_future(engine.generate(GenerateRequest("gone", PROMPT, 300)))
        await wait_for_info(live_url, lambda info: info["num_running"] == 1)
        await engine.pause("abort")
        with pytest.raises(EngineUnavailableError, match="abort") as caught:
            await call
        assert caught.value.trouble == "busy"
        await engine.resume()


def test_the_server_of_every_wire_is_driven() -> None:
    assert {wire.name for wire in WIRES} == {"sglang", "vllm-generate", "vllm-completions"}
    assert WireServer(SGLANG)._routes().keys() >= {("POST", "/generate")}
