"""Servers that speak the recorded wire of each engine on a real socket; the table that conformance tests run over."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from aiohttp import web

from everroll.engines.base import Engine, GenerateRequest
from everroll.engines.http import EngineTimeouts
from everroll.engines.sglang import SGLangEngine
from everroll.engines.vllm import VllmEngine

REQUEST = GenerateRequest(rid="r1", token_ids=[1, 2, 3], max_new_tokens=4, temperature=0.7, stop_token_ids=(9,), seed=5)
Answer = dict[str, Any]


@dataclass(frozen=True)
class Wire:
    """One client and the wire that it speaks."""

    name: str
    route: str
    """Where completions come from."""
    good: Answer
    """Tokens 11 and 12 with log-probabilities -0.25 and -0.5, stopped, one prompt token from the cache."""
    open: Callable[[str, aiohttp.ClientSession, EngineTimeouts, str | None], Engine]
    set_logprobs: Callable[[Answer, list[Any]], None]
    set_tokens: Callable[[Answer, Any], None]
    set_finish: Callable[[Answer, str], None]
    pause_call: str
    resume_call: str
    load_route: str
    version_route: str

    def changed(self, change: Callable[[Answer], object]) -> Answer:
        answer = copy.deepcopy(self.good)
        change(answer)
        return answer


def _set_sglang_logprobs(answer: Answer, values: list[Any]) -> None:
    tokens = answer["output_ids"]
    rows = [[value, tokens[index] if index < 2 else 0, None] for index, value in enumerate(values)]
    answer["meta_info"]["output_token_logprobs"] = rows


def _set_generate_logprobs(answer: Answer, values: list[Any]) -> None:
    choice = answer["choices"][0]
    tokens = [*choice["token_ids"], 0, 0]
    rows = [{"token": f"token_id:{tokens[index]}", "logprob": value} for index, value in enumerate(values)]
    choice["logprobs"] = {"content": rows}


def _set_completions_logprobs(answer: Answer, values: list[Any]) -> None:
    answer["choices"][0]["logprobs"] = {"token_logprobs": values}


def _set_vllm_tokens(answer: Answer, tokens: Any) -> None:
    answer["choices"][0]["token_ids"] = tokens


def _set_vllm_finish(answer: Answer, kind: str) -> None:
    answer["choices"][0]["finish_reason"] = kind


_VLLM = {
    "set_tokens": _set_vllm_tokens,
    "set_finish": _set_vllm_finish,
    "pause_call": "POST /pause",
    "resume_call": "POST /resume",
    "load_route": "/collective_rpc",
    "version_route": "/weight_info",
}
_USAGE = {"prompt_tokens": 3, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 1}}

SGLANG = Wire(
    name="sglang",
    route="/generate",
    good={
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
    },
    open=lambda url, session, timeouts, key: SGLangEngine(url, session, timeouts=timeouts, api_key=key),
    set_logprobs=_set_sglang_logprobs,
    set_tokens=lambda answer, tokens: answer.update(output_ids=tokens),
    set_finish=lambda answer, kind: answer["meta_info"].update(finish_reason={"type": kind}),
    pause_call="POST /pause_generation",
    resume_call="POST /continue_generation",
    load_route="/update_weights_from_disk",
    version_route="/model_info",
)
VLLM_GENERATE = Wire(
    name="vllm-generate",
    route="/inference/v1/generate",
    good={
        "request_id": "r1",
        "choices": [
            {
                "index": 0,
                "token_ids": [11, 12],
                "finish_reason": "stop",
                "logprobs": {
                    "content": [
                        {"token": "token_id:11", "logprob": -0.25, "bytes": None, "top_logprobs": []},
                        {"token": "token_id:12", "logprob": -0.5, "bytes": None, "top_logprobs": []},
                    ]
                },
            }
        ],
        "usage": _USAGE,
        "prompt_logprobs": None,
        "kv_transfer_params": None,
    },
    open=lambda url, session, timeouts, key: VllmEngine(url, session, timeouts=timeouts, api_key=key, door="generate"),
    set_logprobs=_set_generate_logprobs,
    **_VLLM,  # type: ignore[arg-type]
)
VLLM_COMPLETIONS = Wire(
    name="vllm-completions",
    route="/v1/completions",
    good={
        "id": "cmpl-r1",
        "object": "text_completion",
        "model": "m",
        "choices": [
            {
                "index": 0,
                "text": "ab",
                "token_ids": [11, 12],
                "prompt_token_ids": [1, 2, 3],
                "finish_reason": "stop",
                "stop_reason": 12,
                "logprobs": {"text_offset": [0, 1], "token_logprobs": [-0.25, -0.5], "tokens": ["a", "b"]},
            }
        ],
        "usage": _USAGE,
    },
    open=lambda url, session, timeouts, key: VllmEngine(
        url, session, timeouts=timeouts, api_key=key, door="completions"
    ),
    set_logprobs=_set_completions_logprobs,
    **_VLLM,  # type: ignore[arg-type]
)
WIRES = (SGLANG, VLLM_GENERATE, VLLM_COMPLETIONS)


def _name_answer(answer: Answer, body: Answer) -> Answer:
    """With the name of its request in place of `r1`, where it has one."""
    answer = copy.deepcopy(answer)
    for holder, key, name in ((answer.get("meta_info"), "id", "rid"), (answer, "request_id", "request_id")):
        if isinstance(holder, dict) and holder.get(key) == REQUEST.rid:
            holder[key] = body[name]
    return answer


@dataclass
class WireServer:
    """Speaks one wire, both doors for vLLM, and does what it is told to."""

    wire: Wire
    url: str = ""
    answer: Answer | bytes | None = None
    """Of the next completions; None for the good one."""
    status: int = 200
    version: int = 17
    paused: bool = False
    load_seconds: float = 0.0
    """How long a load takes; it goes on when its client is gone."""
    refuse_load: bool = False
    has_generate: bool = True
    """Whether vLLM's first door is there."""
    api_key: str = ""
    tells_pause: bool = True
    calls: list[str] = field(default_factory=list)
    bodies: list[Answer] = field(default_factory=list)
    """Of completions."""
    loads: list[str] = field(default_factory=list)
    """Paths that were posted to be loaded."""
    served_path: str = "m"
    _loading: set[asyncio.Task[None]] = field(default_factory=set)

    async def handle(self, request: web.Request) -> web.Response:
        self.calls.append(f"{request.method} {request.path_qs}")
        if self.api_key and request.headers.get("Authorization") != f"Bearer {self.api_key}":
            return web.json_response({"error": "no key"}, status=401)
        text = await request.text()
        body = json.loads(text) if text else {}
        handler = self._routes().get((request.method, request.path))
        if handler is None:
            return web.json_response({"error": "no such route"}, status=404)
        response: web.Response = await handler(body, request)
        return response

    def _routes(self) -> dict[tuple[str, str], Callable[[Answer, web.Request], Any]]:
        shared: dict[tuple[str, str], Callable[[Answer, web.Request], Any]] = {("GET", "/health"): self._ok}
        if self.wire is SGLANG:
            return shared | {
                ("POST", "/generate"): self._complete,
                ("GET", "/model_info"): self._model_info,
                ("POST", "/pause_generation"): self._pause,
                ("POST", "/continue_generation"): self._resume,
                ("POST", "/update_weights_from_disk"): self._load_sglang,
            }
        routes = shared | {
            ("POST", "/v1/completions"): self._complete,
            ("GET", "/v1/models"): self._models,
            ("GET", "/version"): self._version,
            ("GET", "/weight_info"): self._weight_info,
            ("GET", "/is_paused"): self._is_paused,
            ("POST", "/pause"): self._pause,
            ("POST", "/resume"): self._resume,
            ("POST", "/collective_rpc"): self._load_vllm,
            ("POST", "/reset_prefix_cache"): self._ok,
            ("POST", "/update_weight_version"): self._announce,
        }
        if self.has_generate:
            routes["POST", "/inference/v1/generate"] = self._complete
        return routes

    async def _complete(self, body: Answer, request: web.Request) -> web.Response:
        if not body:
            return web.json_response({"error": "token_ids: field required"}, status=422)
        self.bodies.append(body)
        if self.status != 200:
            return web.json_response({"error": {"message": "the reason"}}, status=self.status)
        answer = self.wire.good if self.answer is None else self.answer
        payload = answer if isinstance(answer, bytes) else json.dumps(_name_answer(answer, body)).encode()
        return web.Response(body=payload, content_type="application/json")

    async def _ok(self, body: Answer, request: web.Request) -> web.Response:
        return web.json_response({})

    async def _model_info(self, body: Answer, request: web.Request) -> web.Response:
        info: Answer = {"model_path": self.served_path, "weight_version": str(self.version)}
        return web.json_response(info | ({"is_paused": self.paused} if self.tells_pause else {}))

    async def _models(self, body: Answer, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "m", "max_model_len": 100}]})

    async def _version(self, body: Answer, request: web.Request) -> web.Response:
        return web.json_response({"version": "0.28.0"})

    async def _weight_info(self, body: Answer, request: web.Request) -> web.Response:
        return web.json_response({"weight_version": "default" if self.version == 0 else str(self.version)})

    async def _is_paused(self, body: Answer, request: web.Request) -> web.Response:
        return web.json_response({"is_paused": self.paused})

    async def _pause(self, body: Answer, request: web.Request) -> web.Response:
        self.paused = True
        return web.json_response({"status": "paused"})

    async def _resume(self, body: Answer, request: web.Request) -> web.Response:
        self.paused = False
        return web.json_response({"status": "resumed"})

    async def _load_sglang(self, body: Answer, request: web.Request) -> web.Response:
        if self.refuse_load:
            self.loads.append(body["model_path"])
            return web.json_response({"success": False, "message": "shapes differ"}, status=400)
        await self._load(body["model_path"], int(body["weight_version"]))
        return web.json_response({"success": True, "message": "", "num_paused_requests": 0})

    async def _load_vllm(self, body: Answer, request: web.Request) -> web.Response:
        if self.refuse_load:
            self.loads.append(body["kwargs"]["weights_path"])
            return web.json_response({"error": {"message": "shapes differ"}}, status=500)
        await self._load(body["kwargs"]["weights_path"], None)
        return web.json_response({"results": [None]})

    async def _announce(self, body: Answer, request: web.Request) -> web.Response:
        self.version = int(body["new_version"])
        return web.json_response({"success": True})

    async def _load(self, path: str, version: int | None) -> None:
        self.loads.append(path)
        task = asyncio.create_task(self._finish_load(path, version))
        self._loading.add(task)
        await asyncio.shield(task)

    def start_anew(self, version: int = 0) -> None:
        """As a process that takes the place of this one: what was being loaded is lost, and it samples."""
        for task in self._loading:
            task.cancel()
        self._loading.clear()
        self.paused, self.version, self.load_seconds = False, version, 0.0

    async def _finish_load(self, path: str, version: int | None) -> None:
        await asyncio.sleep(self.load_seconds)
        self.served_path = path
        self.version = self.version if version is None else version


@contextlib.asynccontextmanager
async def run_wire_server(wire: Wire, **values: Any) -> AsyncIterator[WireServer]:
    server = WireServer(wire, **values)
    runner = web.ServerRunner(web.Server(server.handle), shutdown_timeout=0.1)  # type: ignore[arg-type]
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    server.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield server
    finally:
        await runner.cleanup()
