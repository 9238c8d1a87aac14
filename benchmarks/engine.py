"""Tokens per second of the embedded engine at several concurrencies, over its real HTTP wire.

    python -m benchmarks.engine [--model DIR] [--deterministic] [--json]

The engine runs in a process of its own with one torch thread; the client is this process. Each stream sends one request
after the other. Prompts come in groups of 8 that share a prompt, as in training. `--json` prints one JSON object as the
last line. Without `--model` a random Qwen3 of 2 layers and hidden size 128 is made (about 360k parameters).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import random
import socket
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from everroll.engines.base import EngineUnavailableError, GenerateRequest
from everroll.engines.embedded.server import EngineSettings, serve
from everroll.engines.http import open_client_session
from everroll.engines.sglang import SGLangEngine

GROUP_SIZE = 8
START_SECONDS = 120.0


@dataclass(frozen=True)
class Measurement:
    """One concurrency."""

    concurrency: int
    requests: int
    seconds: float
    tokens_per_second: float
    tokens_per_cpu_second: float | None
    """Per second of the engine's CPU time, which a busy machine distorts less; None where the system does not tell."""
    cached_share: float
    """Share of prompt tokens that the prefix cache held."""
    p50_ms: float
    p99_ms: float


def main() -> None:
    options = parse_options()
    with tempfile.TemporaryDirectory() as directory:
        model = options.model or str(make_tiny_model(Path(directory) / "model"))
        settings = EngineSettings(
            model_path=model,
            port=find_free_port(),
            num_threads=options.threads,
            deterministic=options.deterministic,
            device=options.device,
        )
        with running_engine(settings) as pid:
            results = asyncio.run(measure_all(f"http://127.0.0.1:{settings.port}", pid, options))
    single = results[0].tokens_per_second
    for result in results:
        print(describe(result, single))
    if options.json:
        settings_used = {key: value for key, value in vars(options).items() if key != "json"}
        print(json.dumps({"benchmark": "engine", **settings_used, "results": [asdict(result) for result in results]}))


def describe(result: Measurement, single: float) -> str:
    per_cpu = "" if result.tokens_per_cpu_second is None else f"{result.tokens_per_cpu_second:7.0f} per CPU second"
    return (
        f"{result.concurrency:4d} concurrent {result.tokens_per_second:8.0f} tokens/s "
        f"{result.tokens_per_second / single:5.1f}x {per_cpu}  p50 {result.p50_ms:6.0f} ms  "
        f"p99 {result.p99_ms:6.0f} ms  {result.cached_share:4.0%} of the prompts cached"
    )


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="checkpoint directory; left out, a tiny random one is made")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--deterministic", action="store_true")
    parser.add_argument("--threads", type=int, default=1, help="torch threads")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8, 32, 64])
    parser.add_argument("--prompt-tokens", type=int, default=96)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=4, help="requests per stream")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    return parser.parse_args()


async def measure_all(url: str, pid: int, options: argparse.Namespace) -> list[Measurement]:
    async with open_client_session() as session:
        engine = SGLangEngine(url, session)
        await wait_until_healthy(engine)
        vocab_size = 256  # token ids below this exist in every model worth measuring
        await measure(engine, pid, 8, 1, vocab_size, options, seed=0)
        return [
            await measure(engine, pid, concurrency, options.rounds, vocab_size, options, seed=concurrency)
            for concurrency in options.concurrency
        ]


async def measure(
    engine: SGLangEngine,
    pid: int,
    concurrency: int,
    rounds: int,
    vocab_size: int,
    options: argparse.Namespace,
    seed: int,
) -> Measurement:
    """Run `concurrency` streams of `rounds` requests each."""
    rng = random.Random(seed)
    num_groups = -(-concurrency * rounds // GROUP_SIZE)
    prompts = [[rng.randrange(vocab_size) for _ in range(options.prompt_tokens)] for _ in range(num_groups)]
    latencies: list[float] = []
    cached: list[int] = []

    async def stream(number: int) -> int:
        num_tokens = 0
        for turn in range(rounds):
            index = turn * concurrency + number
            request = GenerateRequest(f"{seed}-{index}", prompts[index // GROUP_SIZE], options.new_tokens, seed=index)
            started = time.perf_counter()
            completion = await engine.generate(request)
            latencies.append(time.perf_counter() - started)
            cached.append(completion.num_cached_tokens)
            num_tokens += len(completion.token_ids)
        return num_tokens

    cpu_before = read_cpu_seconds(pid)
    started = time.perf_counter()
    num_tokens = sum(await asyncio.gather(*(stream(number) for number in range(concurrency))))
    seconds = time.perf_counter() - started
    cpu_after = read_cpu_seconds(pid)
    cpu_seconds = None if cpu_before is None or cpu_after is None else cpu_after - cpu_before
    latencies.sort()
    return Measurement(
        concurrency=concurrency,
        requests=len(latencies),
        seconds=seconds,
        tokens_per_second=num_tokens / seconds,
        tokens_per_cpu_second=num_tokens / cpu_seconds if cpu_seconds else None,
        cached_share=sum(cached) / (len(cached) * options.prompt_tokens),
        p50_ms=latencies[len(latencies) // 2] * 1e3,
        p99_ms=latencies[min(len(latencies) - 1, int(len(latencies) * 0.99))] * 1e3,
    )


async def wait_until_healthy(engine: SGLangEngine) -> None:
    deadline = time.monotonic() + START_SECONDS
    while True:
        try:
            await engine.check_health()
        except EngineUnavailableError:
            if time.monotonic() > deadline:
                raise
            await asyncio.sleep(0.1)
        else:
            return


@contextmanager
def running_engine(settings: EngineSettings) -> Iterator[int]:
    """The engine as a process of its own, ended with SIGTERM."""
    process = multiprocessing.get_context("spawn").Process(target=serve, args=(settings,))
    process.start()
    try:
        yield process.pid or 0
    finally:
        process.terminate()
        process.join(timeout=20)
        if process.is_alive():
            process.kill()


def read_cpu_seconds(pid: int) -> float | None:
    """CPU time of a process so far, from /proc."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def make_tiny_model(directory: Path) -> Path:
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=512,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
    )
    Qwen3ForCausalLM(config).save_pretrained(directory)
    return directory


def find_free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


if __name__ == "__main__":
    main()
