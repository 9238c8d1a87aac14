"""The client against servers that answer wrongly: over real sockets."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any

import numpy as np
import pytest
from aiohttp import web

from everroll.contracts.outcomes import BadAnswerError, SampleStatus
from everroll.contracts.spec import SamplingSpec
from everroll.failures import Outcome, ServerStatusError, classify
from everroll.http_client import build_http_client
from everroll.sessions.client import CollectedSamples, SessionClient
from everroll.tokens.samples import MalformedSamplesError, Sample, SampleSet, encode_samples
from tests.session_helpers import serve_aiohttp

Serve = Callable[[web.Response], Any]


class Canned:
    """Answers every request with the same response."""

    def __init__(self) -> None:
        self.response: Callable[[], web.Response] = web.Response
        self.requests: list[web.Request] = []

    async def answer(self, request: web.Request) -> web.Response:
        self.requests.append(request)
        await request.read()
        return self.response()


@pytest.fixture
async def canned() -> AsyncIterator[tuple[Canned, SessionClient]]:
    server = Canned()
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", server.answer)
    async with serve_aiohttp(app) as url, build_http_client() as http:
        yield server, SessionClient(http, url + "/", "key")


def build_body(session_id: str = "s") -> bytes:
    sample = Sample(
        token_ids=np.array([1, 2], dtype=np.int32),
        loss_mask=np.array([False, True]),
        sampler_logprobs=np.array([0, -0.5], dtype=np.float32),
        weight_versions=np.array([-1, 0], dtype=np.int32),
        status=SampleStatus.COMPLETED,
        finish_reason="stop",
        temperature=1.0,
        num_turns=1,
    )
    return encode_samples(SampleSet(session_id, (sample,)))


async def test_samples_come_through(canned: tuple[Canned, SessionClient]) -> None:
    server, client = canned
    server.response = lambda: web.Response(body=build_body(), content_type="application/octet-stream")
    collected = await client.collect("s", 7, {})
    assert isinstance(collected, CollectedSamples)
    assert collected.body == build_body()
    assert server.requests[0].path == "/sessions/s/samples"
    assert server.requests[0].headers["Authorization"] == "Bearer key"


@pytest.mark.parametrize(
    "response",
    [
        lambda: web.Response(body=build_body()[:-3], content_type="application/octet-stream"),
        lambda: web.Response(body=b"", content_type="application/octet-stream"),
        lambda: web.Response(body=build_body("other"), content_type="application/octet-stream"),
        lambda: web.Response(body=build_body().replace(np.float32(-0.5).tobytes(), np.float32("nan").tobytes())),
    ],
)
async def test_broken_samples_are_terminal(canned: tuple[Canned, SessionClient], response: Any) -> None:
    """CASES A10, D7."""
    server, client = canned
    server.response = response
    with pytest.raises(MalformedSamplesError) as caught:
        await client.collect("s", None, {})
    assert classify(caught.value).outcome is Outcome.TERMINAL


@pytest.mark.parametrize(
    "response",
    [
        lambda: web.Response(text="{", content_type="application/json"),
        lambda: web.json_response([]),
        lambda: web.json_response({}),
        lambda: web.json_response({"num_samples": 0, "cause": "transport"}),
        lambda: web.json_response({"num_samples": 3, "cause": "no_records"}),
    ],
)
async def test_broken_json_is_terminal(canned: tuple[Canned, SessionClient], response: Any) -> None:
    server, client = canned
    server.response = response
    with pytest.raises(BadAnswerError):
        await client.collect("s", None, {})
    with pytest.raises(BadAnswerError):
        await client.create("s", SamplingSpec(), 0)


async def test_any_other_status_is_an_error_with_everything_in_it(canned: tuple[Canned, SessionClient]) -> None:
    server, client = canned
    server.response = lambda: web.Response(status=500, text="token invariant broken")
    for call in (client.collect("s", None, {}), client.create("s", SamplingSpec(), 0), client.release("s")):
        with pytest.raises(ServerStatusError, match=r"/sessions.* answered 500: token invariant broken"):
            await call


async def test_session_ids_are_quoted(canned: tuple[Canned, SessionClient]) -> None:
    server, client = canned
    await client.release("a/b?c")
    assert server.requests[0].raw_path == "/sessions/a%2Fb%3Fc"
