"""How fast the session server is, rendering, checks and journal included.

    python -m benchmarks.sessions [--connections 1 16 64 256] [--processes 2] [--json]

Starts an upstream that answers every call at once with 64 tokens, and a session server. Each connection plays
conversations of four turns: a first message of 200 words, then short tool results; the server renders the first and
extends the others. Sessions are created over connections of their own, so that with several processes turns reach the
wrong one as often as in use. Only model calls are counted. Rows:

- `direct` calls the upstream with ready token ids, `sessions` goes through the server.
- `sessions, while 200k tokens are collected`: the same, while the samples of one long session are fetched over and
  over; `nothing collected` is that at the same number of connections for comparison.
- `peer`, with `--peer-command`: another gateway. `{upstream}` in the command stands for the upstream's URL, which
  speaks SGLang's `/generate` and OpenAI's `/v1/chat/completions`, and `{port}` for the port to listen on; `--peer-url`
  is where it takes chat completions, `{session}` in it stands for a session's name. Without a command, `--peer-url`
  may name one that runs.

With `--json` the last line of output is an object with a list `rows`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import multiprocessing
import os
import shlex
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import uvloop
from pydantic_core import to_json
from tokenizers import Tokenizer

from benchmarks.sessions_load import TURNS_PER_SESSION, Connection, Target, play, run_upstream
from everroll.sessions.keys import load_admin_key
from everroll.sessions.settings import SessionServerSettings
from tests.session_helpers import find_free_port, model_section, run_server_process, train_tokenizer, write_model_dir

NUM_COMPLETION_TOKENS = 64
LONG_TOKENS = 200_000
_LONG_TURNS = 20
_VOCABULARY = 8000
_DOCS = Path(__file__).resolve().parent.parent / "docs"


@dataclass(frozen=True)
class Row:
    target: str
    connections: int
    requests_per_second: float
    p50_ms: float
    p99_ms: float
    memory_mb: float = 0.0
    """Resident memory of all the target's processes after the measurement."""
    cpu_ms: float = 0.0
    """The target's processor time per request, which other load on the machine changes less than the rest."""
    collections: int = 0
    """How often the long session was collected meanwhile."""


def build_answers(tokenizer: Tokenizer, words: list[str]) -> dict[bytes, bytes]:
    """What the upstream says, by path."""
    text = " ".join(words[:200])
    end = tokenizer.token_to_id("<|im_end|>")
    assert end is not None
    ids = [*tokenizer.encode(text).ids[: NUM_COMPLETION_TOKENS - 1], end]
    assert len(ids) == NUM_COMPLETION_TOKENS
    text = tokenizer.decode(ids)
    meta = {
        "id": "REQUEST_ID",
        "prompt_tokens": "PROMPT_TOKENS",
        "completion_tokens": len(ids),
        "cached_tokens": 0,
        "weight_version": "1",
        "finish_reason": {"type": "stop", "matched": ids[-1]},
        "output_token_logprobs": [[-0.123456789, token, None] for token in ids],
    }
    content = [{"token": f"token_id:{token}", "logprob": -0.123456789, "bytes": None} for token in ids]
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": text},
        "finish_reason": "stop",
        "logprobs": {"content": content},
        "token_ids": ids,
    }
    usage = {"prompt_tokens": 300, "completion_tokens": len(ids), "total_tokens": 300 + len(ids)}
    chat = {"id": "c", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice], "usage": usage}
    return {
        b"/generate": to_json({"text": text, "output_ids": ids, "meta_info": meta}),
        b"/v1/chat/completions": to_json({**chat, "prompt_token_ids": ids}),
        b"/v1/models": to_json({"object": "list", "data": [{"id": "m", "object": "model"}]}),
        b"/model_info": to_json({"weight_version": "1"}),
        b"/get_model_info": to_json({"weight_version": "1"}),
    }


async def measure(target: Target, connections: int, seconds: float, pid: int | None) -> Row:
    """Load a target for so long; `pid` is its first process."""
    latencies: list[float] = []
    serials = itertools.count(time.time_ns())
    cpu = _cpu_seconds(pid)
    start = time.perf_counter()
    await asyncio.gather(*(play(target, start + seconds, latencies, serials) for _ in range(connections)))
    elapsed = time.perf_counter() - start
    cpu = _cpu_seconds(pid) - cpu
    latencies.sort()
    return Row(
        target=target.name,
        connections=connections,
        requests_per_second=round(len(latencies) / elapsed, 1),
        p50_ms=round(latencies[len(latencies) // 2] * 1000, 2),
        p99_ms=round(latencies[int(len(latencies) * 0.99)] * 1000, 2),
        memory_mb=_resident_mb(pid),
        cpu_ms=round(cpu / len(latencies) * 1000, 3),
    )


async def record_long_session(target: Target) -> str:
    """A session of 200k tokens; gives its name."""
    session = f"long-{time.time_ns()}"
    connection = Connection(target.base_url)
    await connection.post("/sessions", to_json({"session_id": session}), target.admin_key)
    text = " ".join(itertools.islice(itertools.cycle(target.words), LONG_TOKENS // _LONG_TURNS))
    messages: list[dict[str, Any]] = []
    for _ in range(_LONG_TURNS):
        messages.append({"role": "user", "content": text})
        path = target.chat_path.format(session=session)
        content = await connection.post(path, to_json({"model": "m", "messages": messages}), target.admin_key)
        messages.append(json.loads(content)["choices"][0]["message"])
    connection.close()
    return session


async def measure_while_collecting(target: Target, connections: int, seconds: float, pid: int) -> list[Row]:
    """Chats alone, and chats while a long session is collected over and over."""
    session = await record_long_session(target)
    alone = await measure(replace(target, name="sessions, nothing collected"), connections, seconds, pid)
    task = asyncio.create_task(_collect_forever(target, session))
    name = f"sessions, while {LONG_TOKENS // 1000}k tokens are collected"
    busy = await measure(replace(target, name=name), connections, seconds, pid)
    task.cancel()
    (outcome,) = await asyncio.gather(task, return_exceptions=True)
    if isinstance(outcome, Exception):
        raise outcome
    return [alone, replace(busy, collections=_num_collected)]


_num_collected = 0


async def _collect_forever(target: Target, session: str) -> None:
    global _num_collected
    _num_collected, connection = 0, Connection(target.base_url)
    while True:
        samples = await connection.post(f"/sessions/{session}/samples", b"{}", target.admin_key)
        assert len(samples) > LONG_TOKENS * 4
        _num_collected += 1


def _list_processes(pid: int) -> Iterator[int]:
    yield pid
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        yield from _list_processes(int(child))


def _cpu_seconds(pid: int | None) -> float:
    ticks = 0
    for each in () if pid is None else _list_processes(pid):
        fields = Path(f"/proc/{each}/stat").read_text().rsplit(")", 1)[1].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def _resident_mb(pid: int | None) -> float:
    processes = () if pid is None else _list_processes(pid)
    pages = sum(int(Path(f"/proc/{each}/statm").read_text().split()[1]) for each in processes)
    return round(pages * os.sysconf("SC_PAGE_SIZE") / 2**20, 1)


async def await_port(port: int) -> None:
    async with asyncio.timeout(120):
        while True:
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", port)
            except ConnectionError:
                await asyncio.sleep(0.05)
                continue
            writer.close()
            return


@contextlib.asynccontextmanager
async def running_upstream(answers: dict[bytes, bytes]) -> AsyncIterator[str]:
    """The upstream in a process of its own; gives its URL."""
    port = find_free_port()
    process = multiprocessing.get_context("spawn").Process(target=run_upstream, args=(port, answers), daemon=True)
    process.start()
    try:
        await await_port(port)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.join(10)


@contextlib.asynccontextmanager
async def running_peer(arguments: argparse.Namespace, upstream: str) -> AsyncIterator[tuple[Target, int | None]]:
    """The peer's gateway, started if there is a command for it; gives its target and process."""
    port = find_free_port()
    url = arguments.peer_url.replace("{port}", str(port))
    parts = urlsplit(url)
    target = Target("peer", url, chat_path=f"{parts.path.rstrip('/')}/chat/completions")
    if not arguments.peer_command:
        yield target, None
        return
    command = arguments.peer_command.replace("{upstream}", upstream).replace("{port}", str(port))
    process = await asyncio.create_subprocess_exec(*shlex.split(command))
    try:
        await await_port(parts.port or port)
        yield target, process.pid
    finally:
        process.terminate()
        async with asyncio.timeout(20):
            await process.wait()


async def run_benchmark(arguments: argparse.Namespace, directory: Path) -> list[Row]:
    texts = [path.read_text() for path in sorted(_DOCS.glob("*.md"))]
    words = [word for text in texts for word in text.split() if word.isalpha()]
    tokenizer = train_tokenizer(texts, _VOCABULARY)
    rows: list[Row] = []

    def add(*more: Row) -> None:
        rows.extend(more)
        for row in more:
            print(format_row(row), flush=True)

    async with running_upstream(build_answers(tokenizer, words)) as upstream:
        prompt = tokenizer.encode(" ".join(words[:300])).ids
        direct = Target("direct", upstream, generate=to_json({"rid": "direct", "input_ids": prompt}))
        settings = SessionServerSettings(
            model=model_section(write_model_dir(directory / "model", tokenizer)),
            engine_urls=[upstream],
            engine_kind="sglang",
            journal=str(directory / "journal.sqlite"),
            journal_synchronous=arguments.synchronous,
            processes=arguments.processes,
            port=find_free_port(),
        )
        with run_server_process(settings, directory / "server.log") as server:
            sessions = Target("sessions", server.base_url, load_admin_key(), words=words)
            for connections in arguments.connections:
                add(await measure(direct, connections, arguments.seconds / 2, None))
                add(await measure(sessions, connections, arguments.seconds, server.pid))
            if not arguments.skip_long:
                add(*await measure_while_collecting(sessions, 64, arguments.seconds, server.pid))
        if arguments.peer_url:
            async with running_peer(arguments, upstream) as (peer, pid):
                for connections in arguments.connections:
                    add(await measure(replace(peer, words=words), connections, arguments.seconds, pid))
    return rows


def format_row(row: Row) -> str:
    speed = f"{row.requests_per_second:8.1f} requests/s  p50 {row.p50_ms:7.2f} ms  p99 {row.p99_ms:7.2f} ms"
    more = f"  {row.collections} collections" if row.collections else ""
    cost = f"{row.memory_mb:6.1f} MB  {row.cpu_ms:6.3f} ms cpu"
    return f"{row.target:8} {row.connections:4} connections {speed}  {cost}{more}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--connections", type=int, nargs="+", default=[1, 16, 64, 256])
    parser.add_argument("--seconds", type=float, default=5.0, help="length of each measurement")
    parser.add_argument("--processes", type=int, default=1, help="processes of the session server")
    parser.add_argument("--synchronous", choices=["full", "normal"], default="full", help="the journal's setting")
    parser.add_argument("--skip-long", action="store_true", help="leave out the collection of a long session")
    parser.add_argument("--peer-command", default="", help="starts another gateway, see above")
    parser.add_argument("--peer-url", default="", help="where it takes chat completions, for instance .../v1")
    parser.add_argument("--json", action="store_true", help="print an object with the rows as the last line")
    arguments = parser.parse_args()
    if arguments.peer_command and not arguments.peer_url:
        arguments.peer_url = "http://127.0.0.1:{port}/v1"
    with tempfile.TemporaryDirectory() as directory:
        rows = uvloop.run(run_benchmark(arguments, Path(directory)))
    if arguments.json:
        print(json.dumps({"turns_per_session": TURNS_PER_SESSION, "rows": [asdict(row) for row in rows]}))


if __name__ == "__main__":
    main()
