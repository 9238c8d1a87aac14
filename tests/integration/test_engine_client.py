"""The SGLang client against a server that speaks the wire with faults (cases D5, D6, D7, A9 and B1)."""

from __future__ import annotations

import asyncio
import copy
import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from everroll.engines.base import (
    Completion,
    EngineAnswerError,
    EngineError,
    EngineRejectedError,
    EngineUnavailableError,
    GenerateRequest,
    WeightUpdateError,
)
from everroll.engines.http import EngineTimeouts, open_client_session
from everroll.engines.open import open_engine
from everroll.engines.sglang import SGLangEngine, build_generate_body

REQUEST = GenerateRequest(rid="r1", token_ids=[1, 2, 3], max_new_tokens=4, temperature=0.7, stop_token_ids=(9,), seed=5)
GOOD = {
    "text": "",
    "output_ids": [11, 12],
    "meta_info": {
        "id": "r1",
        "prompt_tokens": 3,
        "completion_tokens": 2,
        "cached_tokens": 1,
        "weight_version": "17",
        "finish_reason": {"type": "stop", "matched": 12},
        "output_token_logprobs": [[-0.25, 11, None], [-0.5, 12, None]],
    },
}
Reply = Callable[[asyncio.StreamReader, asyncio.StreamWriter, bytes, dict[str, Any]], Awaitable[None]]


class FaultyServer:
    """Reads requests byte by byte as HTTP/1.1 and answers each with what the test wants."""

    def __init__(self) -> None:
        self.url = ""
        self.requests: list[tuple[str, dict[str, Any]]] = []
        self.headers: list[str] = []
        self.reply: Reply = answer(200, GOOD)

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                fields = dict(line.lower().split(": ", 1) for line in head.split("\r\n")[1:] if ": " in line)
                body = await reader.readexactly(int(fields.get("content-length", 0)))
                parsed = json.loads(body) if body else {}
                self.requests.append((head.split(" HTTP/")[0], parsed))
                self.headers.append(head)
                await self.reply(reader, writer, head.encode(), parsed)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()


def answer(status: int, body: object) -> Reply:
    """A complete answer; `body` is sent as JSON, or as it is when it is bytes."""
    payload = body if isinstance(body, bytes) else json.dumps(body).encode()

    async def reply(_: object, writer: asyncio.StreamWriter, *__: object) -> None:
        writer.write(f"HTTP/1.1 {status} X\r\ncontent-length: {len(payload)}\r\n\r\n".encode() + payload)
        await writer.drain()

    return reply


def changed(change: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
    """The good answer after `change(answer)`."""
    value = copy.deepcopy(GOOD)
    change(value)
    return value


def meta(**fields: object) -> dict[str, Any]:
    return changed(lambda value: value["meta_info"].update(fields))


@pytest.fixture
async def server() -> AsyncIterator[FaultyServer]:
    faulty = FaultyServer()
    listening = await asyncio.start_server(faulty.handle, "127.0.0.1", 0)
    faulty.url = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
    yield faulty
    listening.close()


@asynccontextmanager
async def client(url: str, seconds: float = 5.0, api_key: str | None = None) -> AsyncIterator[SGLangEngine]:
    timeouts = EngineTimeouts(1.0, seconds, seconds, seconds)
    async with open_client_session() as session:
        engine = open_engine("sglang", url, session, timeouts=timeouts, api_key=api_key)
        assert isinstance(engine, SGLangEngine)
        yield engine
        await engine.close()


async def fail(server: FaultyServer, expected: type[EngineError]) -> str:
    """Run one generate call that must fail; returns the text."""
    async with client(server.url) as engine:
        with pytest.raises(expected) as caught:
            await engine.generate(REQUEST)
    assert type(caught.value) is expected
    assert "POST" in str(caught.value)
    assert f"{server.url}/generate" in str(caught.value)
    return str(caught.value)


async def test_a_good_answer(server: FaultyServer) -> None:
    async with client(server.url + "/", api_key="secret") as engine:
        completion = await engine.generate(REQUEST)
    assert completion == Completion([11, 12], [-0.25, -0.5], [17, 17], "stop", 17, 1)
    ((line, body),) = server.requests
    assert line == "POST /generate"
    assert body == build_generate_body(REQUEST)
    assert body["sampling_params"]["sampling_seed"] == 5
    assert "logprob_start_len" not in body
    assert "authorization: bearer secret" in server.headers[0].lower()


async def test_versions_per_token_are_used_when_they_are_there(server: FaultyServer) -> None:
    server.reply = answer(200, meta(token_weight_versions=[16, 17]))
    async with client(server.url) as engine:
        assert (await engine.generate(REQUEST)).weight_versions == [16, 17]


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        (meta(output_token_logprobs=[[-0.25, 11, None]]), "1 log-probabilities for 2 tokens"),
        (meta(output_token_logprobs=None), "no log-probabilities for 2 tokens"),
        (meta(completion_tokens=3), "completion_tokens is 3, expected 2"),
        (meta(prompt_tokens=4), "prompt_tokens is 4, expected 3"),
        (meta(output_token_logprobs=[[-0.25, 11, None], [-0.5, 13, None]]), r"\[1\] is of token 13, output_ids has 12"),
        (meta(output_token_logprobs=[[-0.25, 11, None], [float("nan"), 12, None]]), r"\[1\] = nan is no log-prob"),
        (meta(output_token_logprobs=[[float("inf"), 11, None], [-0.5, 12, None]]), r"\[0\] = inf is no log-prob"),
        (meta(output_token_logprobs=[[float("-inf"), 11, None], [-0.5, 12, None]]), r"\[0\] = -inf is no log-prob"),
        (meta(output_token_logprobs=[[0.5, 11, None], [-0.5, 12, None]]), r"\[0\] = 0.5 is no log-prob"),
        (meta(output_token_logprobs=[[None, 11, None], [-0.5, 12, None]]), r"\[0\] = None is no log-prob"),
        (meta(output_token_logprobs=[[True, 11, None], [-0.5, 12, None]]), r"\[0\] = True is no log-prob"),
        (meta(output_token_logprobs=[-0.25, -0.5]), "expected .logprob, token id, text."),
        (meta(weight_version="abc"), "weight_version is 'abc'"),
        (meta(weight_version=None), "weight_version is None"),
        (meta(token_weight_versions=[17]), "token_weight_versions does not hold 2"),
        (meta(finish_reason={"type": "banana"}), "finish_reason"),
        (meta(finish_reason=None), "finish_reason is None"),
        (meta(id="r2"), "id is 'r2', expected 'r1'"),
        (changed(lambda value: value.pop("meta_info")), "no meta_info"),
        (changed(lambda value: value.pop("output_ids")), "output_ids is no list"),
        (changed(lambda value: value.update(output_ids=[11, "12"])), "output_ids is no list"),
        (changed(lambda value: value.update(output_ids=[])), "0 tokens, asked for 1 to 4"),
        (changed(lambda value: value.update(output_ids=[1, 2, 3, 4, 5])), "5 tokens, asked for 1 to 4"),
        (["no", "object"], "no JSON object"),
        (b'{"output_ids": [11,', "no JSON"),
        (b"\xff\xfe", "no JSON"),
        (b"[" * 100_000, "no JSON"),
    ],
)
async def test_an_answer_that_cannot_be_trusted_is_refused(server: FaultyServer, body: object, problem: str) -> None:
    server.reply = answer(200, body)
    text = await fail(server, EngineAnswerError)
    assert re.search(problem, text), text
    assert (EngineAnswerError.http_status, EngineAnswerError.can_retry) == (502, False)


async def test_an_abort_with_http_200_is_no_completion(server: FaultyServer) -> None:
    reason = {"type": "abort", "message": "paused for new weights", "status_code": 503}
    server.reply = answer(200, changed(lambda value: value["meta_info"].update(finish_reason=reason)))
    assert "paused for new weights" in await fail(server, EngineUnavailableError)
    assert (EngineUnavailableError.http_status, EngineUnavailableError.can_retry) == (503, True)


@pytest.mark.parametrize(
    ("status", "expected"),
    [
        (400, EngineRejectedError),
        (404, EngineRejectedError),
        (302, EngineRejectedError),
        (429, EngineUnavailableError),
        (500, EngineUnavailableError),
        (503, EngineUnavailableError),
    ],
)
async def test_statuses(server: FaultyServer, status: int, expected: type[EngineError]) -> None:
    server.reply = answer(status, {"error": {"message": "the reason"}})
    text = await fail(server, expected)
    assert f"answered {status}" in text
    assert "the reason" in text


async def test_a_reset_and_a_cut_answer_are_transport_failures(server: FaultyServer) -> None:
    async def reset(_: object, writer: asyncio.StreamWriter, *__: object) -> None:
        writer.transport.abort()

    async def cut(_: object, writer: asyncio.StreamWriter, *__: object) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 1000\r\n\r\n{")
        await writer.drain()
        raise ConnectionError

    async def not_http(_: object, writer: asyncio.StreamWriter, *__: object) -> None:
        writer.write(b"hello\r\n\r\n")
        await writer.drain()
        raise ConnectionError

    for reply in (reset, cut, not_http):
        server.reply = reply
        await fail(server, EngineUnavailableError)


async def test_a_broken_content_encoding_is_not_trusted(server: FaultyServer) -> None:
    async def corrupt(_: object, writer: asyncio.StreamWriter, *__: object) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-encoding: gzip\r\ncontent-length: 5\r\n\r\nhello")
        await writer.drain()

    server.reply = corrupt
    async with client(server.url) as engine:
        with pytest.raises(EngineAnswerError, match="cannot be decoded"):
            await engine.generate(REQUEST)


async def test_a_stalled_server_costs_its_timeout(server: FaultyServer) -> None:
    async def stall(reader: asyncio.StreamReader, *_: object) -> None:
        await reader.read()

    server.reply = stall
    async with client(server.url, seconds=0.3) as engine:
        calls: list[Callable[[], Awaitable[object]]] = [
            lambda: engine.generate(REQUEST),
            lambda: engine.update_weights("/w", 1),
            lambda: engine.pause("in_place"),
            engine.resume,
            engine.weight_version,
            engine.check_health,
        ]
        for call in calls:
            with pytest.raises(EngineUnavailableError, match=r"no answer within 0\.3 s"):
                await asyncio.wait_for(call(), 60)


async def test_nothing_listens(server: FaultyServer) -> None:
    listening = await asyncio.start_server(server.handle, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
    listening.close()
    await listening.wait_closed()
    async with client(url) as engine:
        with pytest.raises(EngineUnavailableError, match=url):
            await engine.check_health()


@pytest.mark.parametrize("url", ["htp://127.0.0.1:1", "127.0.0.1:1", "http://"])
async def test_a_url_that_can_never_work(url: str) -> None:
    async with client(url) as engine:
        with pytest.raises(EngineRejectedError, match="never work"):
            await engine.check_health()


@pytest.mark.parametrize(
    ("status", "body"),
    [
        (200, {"success": False, "message": "shapes differ", "num_paused_requests": 0}),
        (400, {"success": False, "message": "shapes differ", "num_paused_requests": 0}),
        (200, {"message": "shapes differ"}),
        (200, {"success": "yes", "message": "shapes differ"}),
    ],
)
async def test_a_refused_weight_update(server: FaultyServer, status: int, body: dict[str, object]) -> None:
    server.reply = answer(status, body)
    async with client(server.url) as engine:
        with pytest.raises(WeightUpdateError, match="shapes differ"):
            await engine.update_weights("/weights/3", 3)
    ((line, sent),) = server.requests
    assert line == "POST /update_weights_from_disk"
    assert sent == {
        "model_path": "/weights/3",
        "load_format": "auto",
        "weight_version": "3",
        "flush_cache": True,
        "abort_all_requests": False,
    }


async def test_an_update_while_the_engine_is_away(server: FaultyServer) -> None:
    server.reply = answer(503, {"detail": "loading"})
    async with client(server.url) as engine:
        with pytest.raises(EngineUnavailableError, match="loading"):
            await engine.update_weights("/weights/3", 3)


@pytest.mark.parametrize(("said", "version"), [("17", 17), ("default", 0), ("0", 0), (4, 4)])
async def test_weight_versions(server: FaultyServer, said: object, version: int) -> None:
    server.reply = answer(200, {"weight_version": said})
    async with client(server.url) as engine:
        assert await engine.weight_version() == version


async def test_servers_with_the_older_name_of_model_info(server: FaultyServer) -> None:
    async def old(
        reader: asyncio.StreamReader, writer: asyncio.StreamWriter, head: bytes, body: dict[str, Any]
    ) -> None:
        known = head.startswith(b"GET /get_model_info ")
        await (answer(200, {"weight_version": "3"}) if known else answer(404, {}))(reader, writer, head, body)

    server.reply = old
    async with client(server.url) as engine:
        assert [await engine.weight_version(), await engine.weight_version()] == [3, 3]
    assert [line for line, _ in server.requests] == ["GET /model_info", "GET /get_model_info", "GET /get_model_info"]


async def test_cancelling_closes_the_connection(server: FaultyServer) -> None:
    closed = asyncio.Event()
    arrived = asyncio.Event()

    async def wait_for_end(reader: asyncio.StreamReader, *_: object) -> None:
        arrived.set()
        assert await reader.read() == b""
        closed.set()

    server.reply = wait_for_end
    async with client(server.url) as engine:
        call = asyncio.ensure_future(engine.generate(REQUEST))
        await asyncio.wait_for(arrived.wait(), 60)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        await asyncio.wait_for(closed.wait(), 60)
