"""How fast the session server is, rendering, checks and journal included.

    python benchmarks/sessions.py [--connections 1 16 64 256] [--seconds 5] [--json]

Starts an upstream that answers every call at once with 64 tokens, and a session server in a process of its own. Each
connection plays conversations of four turns (a first message of 200 words, then short tool results). Rows: `direct`
calls the upstream with ready token ids, `sessions` goes through the server; only model calls are counted. With
`--json` the last line of output is an object with a list `rows`.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import multiprocessing
import os
import random
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import aiohttp
import uvloop
from pydantic_core import from_json, to_json

from everroll.sessions.keys import load_admin_key
from everroll.sessions.server import SessionServerSettings, serve
from tests.session_helpers import find_free_port, model_section, train_tokenizer, write_model_dir

NUM_COMPLETION_TOKENS = 64
TURNS_PER_SESSION = 4
WORDS = Path(__file__).read_text().split()
FIRST_MESSAGE = " ".join(random.Random(0).choices(WORDS, k=200))
REPLY_WORDS = random.Random(1).choices(WORDS, k=200)
TEXTS = [" ".join(WORDS)]


@dataclass(frozen=True)
class Row:
    target: str
    connections: int
    requests_per_second: float
    p50_ms: float
    p99_ms: float
    memory_mb: float
    """Resident memory of the server after the measurement; 0 for `direct`."""
    cpu_ms: float
    """The server's processor time per request, which other load on the machine hardly changes; 0 for `direct`."""


class UpstreamProtocol(asyncio.Protocol):
    """The least HTTP server that can answer `/generate`."""

    template = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport: Any = transport
        self.buffer = b""

    def data_received(self, data: bytes) -> None:
        self.buffer += data
        while (end := self.buffer.find(b"\r\n\r\n")) >= 0:
            head = self.buffer[:end].lower()
            start = head.find(b"content-length:")
            length = int(head[start + 15 :].split(b"\r\n", 1)[0]) if start >= 0 else 0
            if len(self.buffer) < end + 4 + length:
                return
            body = from_json(self.buffer[end + 4 : end + 4 + length])
            self.buffer = self.buffer[end + 4 + length :]
            answer = self.template.replace(b'"PROMPT_TOKENS"', b"%d" % len(body["input_ids"]))
            answer = answer.replace(b"REQUEST_ID", body["rid"].encode())
            head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(answer)
            self.transport.write(head + answer)


def build_upstream_answer() -> bytes:
    tokenizer = train_tokenizer(TEXTS)
    ids = [
        *tokenizer.encode(" ".join(REPLY_WORDS)).ids[: NUM_COMPLETION_TOKENS - 1],
        tokenizer.token_to_id("<|im_end|>"),
    ]
    assert len(ids) == NUM_COMPLETION_TOKENS
    text = " ".join(REPLY_WORDS)
    meta = {
        "id": "REQUEST_ID",
        "prompt_tokens": "PROMPT_TOKENS",
        "completion_tokens": len(ids),
        "cached_tokens": 0,
        "weight_version": "1",
        "finish_reason": {"type": "stop", "matched": ids[-1]},
        "output_token_logprobs": [[-0.123456789, token, None] for token in ids],
    }
    return to_json({"text": text, "output_ids": ids, "meta_info": meta})


def run_upstream(port: int) -> None:
    async def main() -> None:
        UpstreamProtocol.template = build_upstream_answer()
        server = await asyncio.get_running_loop().create_server(UpstreamProtocol, "127.0.0.1", port)
        await server.serve_forever()

    uvloop.run(main())


async def play_session(
    http: aiohttp.ClientSession, base_url: str, deadline: float, latencies: list[float], serial: int
) -> None:
    """One conversation; the latency of each model call in seconds is appended."""
    admin = {"Authorization": f"Bearer {load_admin_key()}"}
    async with http.post(f"{base_url}/sessions", json={"session_id": f"bench-{serial}"}, headers=admin) as response:
        handle = await response.json()
    headers = {"Authorization": f"Bearer {handle['api_key']}", "Content-Type": "application/json"}
    url = f"{base_url}/sessions/{handle['session_id']}/v1/chat/completions"
    messages: list[dict[str, Any]] = [{"role": "user", "content": FIRST_MESSAGE}]
    for _ in range(TURNS_PER_SESSION):
        if time.perf_counter() > deadline:
            return
        start = time.perf_counter()
        async with http.post(url, data=to_json({"model": "m", "messages": messages}), headers=headers) as response:
            body = await response.read()
        latencies.append(time.perf_counter() - start)
        if response.status != 200:
            raise RuntimeError(body.decode())
        messages.append(from_json(body)["choices"][0]["message"])
        messages.append({"role": "user", "content": "The result is 42."})


async def call_directly(
    http: aiohttp.ClientSession, base_url: str, deadline: float, latencies: list[float], serial: int
) -> None:
    body = to_json({"rid": "direct", "input_ids": list(range(64)) * 16, "sampling_params": {"max_new_tokens": 64}})
    start = time.perf_counter()
    async with http.post(f"{base_url}/generate", data=body) as response:
        await response.read()
    latencies.append(time.perf_counter() - start)


_Play = Callable[[aiohttp.ClientSession, str, float, list[float], int], Awaitable[None]]


async def measure(target: str, play: _Play, base_url: str, connections: int, seconds: float, pid: int | None) -> Row:
    latencies: list[float] = []
    serials = itertools.count(time.time_ns())
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=connections)) as http:

        async def keep_playing(deadline: float) -> None:
            while time.perf_counter() < deadline:
                await play(http, base_url, deadline, latencies, next(serials))

        cpu = 0.0 if pid is None else _cpu_seconds(pid)
        start = time.perf_counter()
        await asyncio.gather(*(keep_playing(start + seconds) for _ in range(connections)))
        elapsed = time.perf_counter() - start
    cpu = 0.0 if pid is None else _cpu_seconds(pid) - cpu
    latencies.sort()
    return Row(
        target=target,
        connections=connections,
        requests_per_second=round(len(latencies) / elapsed, 1),
        p50_ms=round(latencies[len(latencies) // 2] * 1000, 2),
        p99_ms=round(latencies[int(len(latencies) * 0.99)] * 1000, 2),
        memory_mb=0.0 if pid is None else _resident_mb(pid),
        cpu_ms=round(cpu / len(latencies) * 1000, 3),
    )


def _cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _resident_mb(pid: int) -> float:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return round(pages * 4096 / 2**20, 1)


async def await_port(port: int) -> None:
    for _ in range(600):
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", port)
        except ConnectionError:
            await asyncio.sleep(0.05)
            continue
        writer.close()
        return
    raise RuntimeError(f"nothing listens on port {port}")


async def run_benchmark(arguments: argparse.Namespace, directory: Path) -> list[Row]:
    upstream_port, server_port = find_free_port(), find_free_port()
    settings = SessionServerSettings(
        model=model_section(write_model_dir(directory / "model", train_tokenizer(TEXTS))),
        engine_urls=[f"http://127.0.0.1:{upstream_port}"],
        engine_kind="sglang",
        journal_path=str(directory / "journal.db"),
        journal_synchronous=arguments.synchronous,
        port=server_port,
    )
    context = multiprocessing.get_context("spawn")
    processes = [
        context.Process(target=run_upstream, args=(upstream_port,), daemon=True),
        context.Process(target=serve, args=(settings,), daemon=True),
    ]
    for process in processes:
        process.start()
    try:
        await await_port(upstream_port)
        await await_port(server_port)
        rows = []
        for connections in arguments.connections:
            direct_url, server_url = f"http://127.0.0.1:{upstream_port}", f"http://127.0.0.1:{server_port}"
            rows.append(await measure("direct", call_directly, direct_url, connections, arguments.seconds / 2, None))
            pid = processes[1].pid
            rows.append(await measure("sessions", play_session, server_url, connections, arguments.seconds, pid))
            for row in rows[-2:]:
                print(format_row(row), flush=True)
        return rows
    finally:
        for process in processes:
            process.terminate()
            process.join(10)


def format_row(row: Row) -> str:
    speed = f"{row.requests_per_second:9.1f} requests/s  p50 {row.p50_ms:7.2f} ms  p99 {row.p99_ms:7.2f} ms"
    return f"{row.target:9} {row.connections:4} connections {speed}  {row.memory_mb:6.1f} MB  {row.cpu_ms:6.3f} ms cpu"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--connections", type=int, nargs="+", default=[1, 16, 64, 256])
    parser.add_argument("--seconds", type=float, default=5.0, help="length of each measurement")
    parser.add_argument("--synchronous", choices=["full", "normal"], default="full", help="the journal's setting")
    parser.add_argument("--json", action="store_true", help="print an object with the rows as the last line")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        rows = uvloop.run(run_benchmark(arguments, Path(directory)))
    if arguments.json:
        print(json.dumps({"rows": [asdict(row) for row in rows]}))


if __name__ == "__main__":
    main()
