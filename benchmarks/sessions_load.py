"""The two ends around a session server under load: an upstream that answers at once, and agents that cost little.

Both are as small as they can be, since they share the machine with what is measured.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar
from urllib.parse import urlsplit

import uvloop
from pydantic_core import from_json, to_json

TURNS_PER_SESSION = 4
WORDS_OF_FIRST_MESSAGE = 200
_TIMEOUT_SECONDS = 60.0
_TOOL_RESULT = {"role": "user", "content": "The result is 42."}


class UpstreamProtocol(asyncio.Protocol):
    """The least HTTP server that can answer `/generate`, OpenAI chat completions, and an engine's small questions."""

    answers: ClassVar[dict[bytes, bytes]] = {}
    """Path to the body of its answer; `REQUEST_ID` and `"PROMPT_TOKENS"` in it are filled in."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport: Any = transport
        self.buffer = b""

    def data_received(self, data: bytes) -> None:
        self.buffer += data
        while (end := self.buffer.find(b"\r\n\r\n")) >= 0:
            head = self.buffer[:end]
            length = _read_length(head)
            if len(self.buffer) < end + 4 + length:
                return
            content = self.buffer[end + 4 : end + 4 + length]
            self.buffer = self.buffer[end + 4 + length :]
            answer = self.answers.get(head.split(b" ", 2)[1], b"{}")
            if content:
                body = from_json(content)
                answer = answer.replace(b'"PROMPT_TOKENS"', b"%d" % len(body.get("input_ids", ())))
                answer = answer.replace(b"REQUEST_ID", body.get("rid", "").encode())
            self.transport.write(
                b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(answer)
                + answer
            )


def run_upstream(port: int, answers: dict[bytes, bytes]) -> None:
    """Body of the upstream's process."""

    async def serve() -> None:
        UpstreamProtocol.answers = answers
        server = await asyncio.get_running_loop().create_server(UpstreamProtocol, "127.0.0.1", port)
        await server.serve_forever()

    uvloop.run(serve())


class Connection:
    """One keep-alive connection to one server."""

    def __init__(self, base_url: str) -> None:
        parts = urlsplit(base_url)
        self._host, self._port = parts.hostname or "127.0.0.1", parts.port or 80
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def post(self, path: str, body: bytes, key: str = "") -> bytes:
        """Raises RuntimeError: any status but 200."""
        head = f"POST {path} HTTP/1.1\r\nHost: {self._host}\r\nAuthorization: Bearer {key}\r\n"
        head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        async with asyncio.timeout(_TIMEOUT_SECONDS):
            if self._streams is None:
                self._streams = await asyncio.open_connection(self._host, self._port, limit=2**26)
            reader, writer = self._streams
            writer.write(head.encode() + body)
            answer_head = await reader.readuntil(b"\r\n\r\n")
            if b"chunked" in answer_head.lower():
                content = await _read_chunks(reader)
            else:
                content = await reader.readexactly(_read_length(answer_head))
        if answer_head.split(b" ", 2)[1] != b"200":
            raise RuntimeError(f"POST {path}: {answer_head.decode()}{content.decode()}")
        return content

    def close(self) -> None:
        if self._streams is not None:
            self._streams[1].close()


@dataclass
class Target:
    """What is asked, and how."""

    name: str
    base_url: str
    admin_key: str = ""
    """With one, each session is created first, and its own key used."""
    chat_path: str = "/sessions/{session}/v1/chat/completions"
    generate: bytes = b""
    """If given, calls are this body to `/generate`."""
    words: list[str] = field(default_factory=list)


async def play(target: Target, deadline: float, latencies: list[float], serials: itertools.count[int]) -> None:
    """One agent after the other on one connection, until the deadline; sessions are created over another one.

    The latency of each model call, in seconds, is appended.
    """
    agent, admin = Connection(target.base_url), Connection(target.base_url)
    try:
        while time.perf_counter() < deadline:
            if target.generate:
                await _time_call(lambda: agent.post("/generate", target.generate), latencies)
            else:
                await _play_session(target, agent, admin, deadline, latencies, next(serials))
    finally:
        agent.close()
        admin.close()


async def _play_session(
    target: Target, agent: Connection, admin: Connection, deadline: float, latencies: list[float], serial: int
) -> None:
    session, key = f"bench-{serial}", ""
    if target.admin_key:
        content = await admin.post("/sessions", to_json({"session_id": session}), target.admin_key)
        key = from_json(content)["api_key"]
    path = target.chat_path.format(session=session)
    first = " ".join(random.Random(serial).choices(target.words, k=WORDS_OF_FIRST_MESSAGE))
    messages: list[dict[str, Any]] = [{"role": "user", "content": first}]
    for _ in range(TURNS_PER_SESSION):
        if time.perf_counter() > deadline:
            return
        body = to_json({"model": "m", "messages": messages})
        content = await _time_call(lambda body=body: agent.post(path, body, key), latencies)  # type: ignore[misc]
        messages += [from_json(content)["choices"][0]["message"], _TOOL_RESULT]


async def _time_call(call: Callable[[], Any], latencies: list[float]) -> bytes:
    start = time.perf_counter()
    content: bytes = await call()
    latencies.append(time.perf_counter() - start)
    return content


def _read_length(head: bytes) -> int:
    _, _, rest = head.lower().partition(b"\r\ncontent-length:")
    return int(rest.split(b"\r\n", 1)[0]) if rest else 0


async def _read_chunks(reader: asyncio.StreamReader) -> bytes:
    chunks = []
    while size := int((await reader.readline()).split(b";")[0], 16):
        chunks.append(await reader.readexactly(size))
        await reader.readexactly(2)
    await reader.readline()
    return b"".join(chunks)
