"""What a call of the model costs an agent, by the three ways that an episode offers.

    python -m benchmarks.agent_calls [--agents 128] [--calls 6] [--rounds 3] [--json]

So many agents at once, as in one rollout worker, call a server of another process that answers after 0.3 s, and wait
half a second in between. Measured is the processor time of the calling process per call: by `episode.chat()`, by
`episode.openai()`, and by OpenAI's client as it is by itself. The ways take turns, round after round; the medians of
the rounds are shown.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import time
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web
from openai import AsyncOpenAI

from everroll.agents import AgentClients, Episode
from everroll.contracts.rollout import EpisodeKey
from everroll.http_client import build_http_client
from everroll.prompts import Prompt

_ANSWER_SECONDS = 0.3
_PAUSE_SECONDS = 0.5
_ASKED = {"role": "user", "content": "alpha " * 100}
_ANSWERED = {"role": "assistant", "content": "hello " * 60}
_MESSAGES: list[Any] = [_ASKED, _ANSWERED, _ASKED, _ANSWERED, _ASKED]
Call = Callable[[], Awaitable[object]]


def serve() -> None:
    """Answer every chat completion with the same one; the port is the first line of standard output."""

    async def answer(request: web.Request) -> web.Response:
        await request.read()
        await asyncio.sleep(_ANSWER_SECONDS)
        choice = {"index": 0, "finish_reason": "stop", "message": _ANSWERED}
        return web.json_response(
            {"id": "x", "object": "chat.completion", "created": 1, "model": "policy", "choices": [choice]}
        )

    async def run() -> None:
        app = web.Application()
        app.router.add_post("/v1/chat/completions", answer)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        print(runner.addresses[0][1], flush=True)
        await asyncio.to_thread(sys.stdin.read)  # until the benchmark ends

    asyncio.run(run())


async def measure(call: Call, agents: int, calls: int) -> float:
    """Milliseconds of this process' processor time per call."""

    async def play() -> None:
        for _ in range(calls):
            await call()
            await asyncio.sleep(_PAUSE_SECONDS)

    await call()
    before = time.process_time()
    await asyncio.gather(*(play() for _ in range(agents)))
    return 1000 * (time.process_time() - before) / (agents * calls)


async def compare(base_url: str, agents: int, calls: int, rounds: int) -> dict[str, float]:
    """The median of each way."""
    async with build_http_client() as http, AsyncOpenAI(base_url=base_url, api_key="key") as plain:
        clients = AgentClients(http)
        key = EpisodeKey(run="benchmark", group=0, member=0)
        prompt = Prompt(index=0, messages=[_ASKED])
        episode = Episode(key=key, prompt=prompt, base_url=base_url, api_key="key", seed=0, args={}, clients=clients)
        openai = episode.openai()
        ways: dict[str, Call] = {
            "episode.chat()": lambda: episode.chat(_MESSAGES),
            "episode.openai()": lambda: openai.chat.completions.create(model="policy", messages=_MESSAGES),
            "OpenAI's client by itself": lambda: plain.chat.completions.create(model="policy", messages=_MESSAGES),
        }
        measured: dict[str, list[float]] = {way: [] for way in ways}
        for _ in range(rounds):
            for way, call in ways.items():
                measured[way].append(await measure(call, agents, calls))
        await clients.close()
    return {way: statistics.median(values) for way, values in measured.items()}


async def run(options: argparse.Namespace) -> None:
    server = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "benchmarks.agent_calls", "--serve"),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert server.stdin is not None
    assert server.stdout is not None
    try:
        port = int(await asyncio.wait_for(server.stdout.readline(), 60))
        medians = await compare(f"http://127.0.0.1:{port}/v1", options.agents, options.calls, options.rounds)
    finally:
        server.stdin.close()
        await asyncio.wait_for(server.wait(), 60)
    if options.json:
        settings = {"agents": options.agents, "calls": options.calls, "rounds": options.rounds}
        print(json.dumps({"settings": settings, "cpu_ms_per_call": medians}))
        return
    for way, milliseconds in medians.items():
        print(f"{way:30}{milliseconds:8.2f} ms of processor time per call")


def main() -> None:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--agents", type=int, default=128)
    parser.add_argument("--calls", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve()
    else:
        asyncio.run(run(options))


if __name__ == "__main__":
    main()
