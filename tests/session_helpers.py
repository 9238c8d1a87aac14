"""Real small things to test sessions with: a checkpoint's tokenizer, an engine on a socket, a server process."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import openai
import uvicorn
from aiohttp import web
from starlette.types import ASGIApp
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from everroll.contracts.spec import ModelSection, SamplingSpec
from everroll.http_client import build_http_client
from everroll.sessions.client import CollectedSamples, SessionClient, SessionHandle
from everroll.sessions.server import SessionServerSettings, open_app
from everroll.tokens.renderer import ChatRenderer

SAMPLING = SamplingSpec(temperature=0.7, max_tokens=200)
USER = {"role": "user", "content": "hi"}
SPECIAL_TOKENS = [
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
]
ADMIN_KEY = "everroll-local"
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Add two numbers.",
            "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
        },
    }
]
_SERVE = """import sys
from everroll.sessions.server import SessionServerSettings, serve
serve(SessionServerSettings.model_validate_json(sys.argv[1]))"""
TOOL_CALL_TEXT = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'


def build_tokenizer() -> Tokenizer:
    """Byte-level, with Qwen3's special tokens at the end of the vocabulary."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    return _finish(Tokenizer(models.BPE(vocab={char: index for index, char in enumerate(alphabet)}, merges=[])), False)


def train_tokenizer(texts: list[str], vocab_size: int = 2000) -> Tokenizer:
    """Byte pairs merged as in a real vocabulary, about one token a word; for measurements."""
    tokenizer = _finish(Tokenizer(models.BPE()), True)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    return _finish(tokenizer, True)


def _finish(tokenizer: Tokenizer, split_words: bool) -> Tokenizer:
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split_words)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    return tokenizer


def write_model_dir(path: Path, tokenizer: Tokenizer | None = None) -> Path:
    """A checkpoint directory without weights: enough for the session server."""
    path.mkdir(parents=True, exist_ok=True)
    (tokenizer or build_tokenizer()).save(str(path / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    (path / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    return path


def model_section(path: Path) -> ModelSection:
    return ModelSection(path=str(path), renderer="qwen3", chat_template={"enable_thinking": False})


@dataclass
class FakeEngine:
    """An engine that speaks SGLang's `/generate`, says what it is told to, and can fail on demand."""

    tokenizer: Tokenizer = field(default_factory=build_tokenizer)
    replies: list[str] = field(default_factory=list)
    """Text of the next answers, in order; the last one stays."""
    mangle: Callable[[dict[str, Any]], dict[str, Any]] | None = None
    """Changes an answer before it is sent."""
    status: int = 200
    refuse: Callable[[dict[str, Any]], bool] | None = None
    """Which requests are answered 400, as a prompt that is too long is."""
    gate: asyncio.Event | None = None
    """Answers wait for it."""
    requests: list[dict[str, Any]] = field(default_factory=list)
    weight_version: int = 3
    base_url: str = ""
    _arrived: asyncio.Condition = field(default_factory=asyncio.Condition)

    async def await_requests(self, count: int, seconds: float = 60) -> None:
        """Wait until that many requests have come in all."""
        async with asyncio.timeout(seconds), self._arrived:
            await self._arrived.wait_for(lambda: len(self.requests) >= count)

    async def generate(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.requests.append(body)
        async with self._arrived:
            self._arrived.notify_all()
        if self.gate is not None:
            await self.gate.wait()
        if self.refuse is not None and self.refuse(body):
            return web.json_response({"error": {"message": "too long for this model"}}, status=400)
        if self.status != 200:
            return web.json_response({"error": "told to fail"}, status=self.status)
        answer = self.build_answer(body)
        return web.json_response(self.mangle(answer) if self.mangle else answer)

    async def health(self, request: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})

    async def model_info(self, request: web.Request) -> web.Response:
        return web.json_response({"weight_version": str(self.weight_version)})

    def build_answer(self, body: dict[str, Any]) -> dict[str, Any]:
        text = self.replies.pop(0) if len(self.replies) > 1 else self.replies[0]
        ids = self.tokenizer.encode(text + "<|im_end|>").ids
        limit = body["sampling_params"]["max_new_tokens"]
        finish = {"type": "stop", "matched": ids[-1]} if len(ids) <= limit else {"type": "length", "length": limit}
        ids = ids[:limit]
        return {
            "text": text,
            "output_ids": ids,
            "meta_info": {
                "id": body["rid"],
                "prompt_tokens": len(body["input_ids"]),
                "completion_tokens": len(ids),
                "cached_tokens": 0,
                "weight_version": str(self.weight_version),
                "finish_reason": finish,
                "output_token_logprobs": [[-0.1 - 0.001 * index, token, None] for index, token in enumerate(ids)],
            },
        }


@contextlib.asynccontextmanager
async def run_fake_engine(*replies: str) -> AsyncIterator[FakeEngine]:
    engine = FakeEngine(replies=list(replies) or ["hello"])
    app = web.Application(client_max_size=2**28)
    app.router.add_post("/generate", engine.generate)
    app.router.add_get("/health", engine.health)
    app.router.add_get("/model_info", engine.model_info)
    async with serve_aiohttp(app) as url:
        engine.base_url = url
        yield engine


@contextlib.asynccontextmanager
async def serve_aiohttp(app: web.Application) -> AsyncIterator[str]:
    """Serve on a free port; gives the base URL."""
    runner = web.AppRunner(app, shutdown_timeout=1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


def find_free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


class ServerProcess:
    """A session server in a process of its own, that can be killed and started again on the same journal and port."""

    def __init__(self, settings: SessionServerSettings, log: Path) -> None:
        self.settings = settings
        self.base_url = f"http://{settings.host}:{settings.port}"
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _SERVE, self.settings.model_dump_json()],
                stdout=log,
                stderr=log,
                env={**os.environ},
            )
        self._await_health()

    def kill(self) -> None:
        """kill -9."""
        assert self._process is not None
        self._process.kill()
        self._process.wait(10)

    def restart(self) -> None:
        """kill -9, and start again on the same journal."""
        self.kill()
        self.start()

    def terminate(self) -> int:
        """SIGTERM; gives the exit code."""
        assert self._process is not None
        self._process.send_signal(signal.SIGTERM)
        return self._process.wait(20)

    def stop(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self.kill()

    def _await_health(self) -> None:
        deadline = time.monotonic() + 90
        while time.monotonic() < deadline:
            assert self._process is not None
            if self._process.poll() is not None:
                break
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(f"{self.base_url}/health", timeout=1, trust_env=False).is_success:
                    return
            time.sleep(0.05)
        raise RuntimeError(f"the session server did not start:\n{self._log.read_text()}")


@contextlib.contextmanager
def run_server_process(settings: SessionServerSettings, log: Path) -> Iterator[ServerProcess]:
    server = ServerProcess(settings, log)
    server.start()
    try:
        yield server
    finally:
        server.stop()


@contextlib.asynccontextmanager
async def serve_app(app: ASGIApp) -> AsyncIterator[str]:
    """Serve in this process on a free port; gives the base URL."""
    listener = socket.create_server(("127.0.0.1", 0))  # connections wait in its queue until the server runs
    async with serve_on(app, listener):
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


@contextlib.asynccontextmanager
async def serve_on(app: ASGIApp, listener: socket.socket) -> AsyncIterator[None]:
    server = uvicorn.Server(uvicorn.Config(app, lifespan="off", log_config=None, timeout_graceful_shutdown=1))
    server.capture_signals = contextlib.nullcontext  # type: ignore[method-assign]
    task = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        yield
    finally:
        server.should_exit = True
        await task


class Stack:
    """Session server and engine, and how to talk to them."""

    def __init__(self, engine: FakeEngine, http: httpx.AsyncClient, base_url: str) -> None:
        self.engine = engine
        self.http = http
        self.client = SessionClient(http, base_url, ADMIN_KEY)

    async def open(
        self, session_id: str = "s", seed: int = 1, sampling: SamplingSpec = SAMPLING, attempt: int | None = None
    ) -> SessionHandle:
        return await self.client.create(session_id, sampling, seed, attempt)

    async def post(
        self, handle: SessionHandle, *messages: Any, key: str | None = None, **fields: Any
    ) -> httpx.Response:
        headers = {"Authorization": f"Bearer {key or handle.api_key}"}
        body = {"model": "m", "messages": messages, **fields}
        return await self.http.post(f"{handle.base_url}/chat/completions", json=body, headers=headers)

    async def chat(self, handle: SessionHandle, *messages: Any, **fields: Any) -> dict[str, Any]:
        """The assistant's message."""
        response = await self.post(handle, *messages, **fields)
        assert response.status_code == 200, response.text
        return response.json()["choices"][0]["message"]

    async def texts(self, session_id: str = "s") -> list[str]:
        """Text of each sample's trained tokens."""
        collected = await self.client.collect(session_id, None, {})
        assert isinstance(collected, CollectedSamples)
        decode = self.engine.tokenizer.decode
        return [
            decode(sample.token_ids[sample.loss_mask].tolist(), skip_special_tokens=False).replace("<|im_end|>", "|")
            for sample in collected.sample_set.samples
        ]

    async def num_turns(self, session_id: str = "s") -> int:
        return int((await self.client.describe(session_id))["num_turns"])


@contextlib.asynccontextmanager
async def run_stack(
    renderer: ChatRenderer, model_dir: Path, journal: Path | str, engines: list[FakeEngine], **settings: Any
) -> AsyncIterator[Stack]:
    values = SessionServerSettings(
        model=model_section(model_dir),
        engine_urls=[engine.base_url for engine in engines],
        journal=str(journal),
        **{"engine_patience_seconds": 0, **settings},
    )
    async with (
        open_app(values, renderer, ADMIN_KEY) as app,
        serve_app(app) as base_url,
        build_http_client(read_seconds=60) as http,
    ):
        yield Stack(engines[0], http, base_url)


def open_openai(handle: SessionHandle) -> openai.AsyncOpenAI:
    """The stock client, without retries of its own."""
    return openai.AsyncOpenAI(base_url=handle.base_url, api_key=handle.api_key, max_retries=0, timeout=60)
