"""What the failure boundary costs while nothing fails.

    python -m benchmarks.boundary [--collections 400] [--concurrency 16] [--rounds 5] [--json]

Collects the samples of one two-turn session from a real session server over loopback, `bare` (client call only) and
`guarded` (retries of lost calls around it, and the abort budget fed with every outcome, as a run does), in turn. The
medians of both and their ratio are printed; `bookkeeping_us` is the abort budget alone, per collection.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from activities.boundary import retry_transient
from everroll.contracts.health import BudgetState, EpisodesReport
from everroll.contracts.spec import AbortBudgetSpec
from everroll.tokens.renderer import load_renderer
from tests.session_helpers import Stack, model_section, run_fake_engine, run_stack, write_model_dir
from workflows.abort_budget import AbortBudget

SESSION = "benchmark"
SUCCESS = EpisodesReport(group=0, num_collected=1)


async def record_session(stack: Stack) -> None:
    handle = await stack.open(SESSION)
    question = {"role": "user", "content": "what is there? " * 20}
    reply = await stack.chat(handle, question)
    await stack.chat(handle, question, reply, {"role": "user", "content": "go on"})


async def measure(call: Callable[[], Awaitable[object]], collections: int, concurrency: int) -> float:
    """Collections per second."""
    remaining = iter(range(collections))

    async def work() -> None:
        for _ in remaining:
            await call()

    started = time.perf_counter()
    await asyncio.gather(*(work() for _ in range(concurrency)))
    return collections / (time.perf_counter() - started)


def measure_bookkeeping(collections: int) -> float:
    """Microseconds of the abort budget per collection, its window full."""
    budget = AbortBudget(AbortBudgetSpec(), BudgetState(window="c" * 200))
    started = time.perf_counter()
    for _ in range(collections):
        budget.add(SUCCESS)
        budget.find_excess()
    return (time.perf_counter() - started) / collections * 1e6


async def run_benchmark(collections: int, concurrency: int, rounds: int) -> dict[str, float]:
    rates: dict[str, list[float]] = {"bare": [], "guarded": []}
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        model_dir = write_model_dir(directory / "model")
        renderer = load_renderer(model_section(model_dir))
        async with (
            run_fake_engine("there is nothing to see here", "on and on") as engine,
            run_stack(renderer, model_dir, directory / "journal.sqlite", [engine]) as stack,
        ):
            await record_session(stack)
            budget = AbortBudget(AbortBudgetSpec(), BudgetState())

            async def bare() -> None:
                await stack.client.collect(SESSION, None, {})

            async def guarded() -> None:
                await retry_transient(bare, 3, stack.client.base_url)
                budget.add(SUCCESS)
                budget.find_excess()

            calls = {"bare": bare, "guarded": guarded}
            for call in calls.values():
                await measure(call, collections // 4 + 1, concurrency)
            for _ in range(rounds):
                for kind, call in calls.items():
                    rates[kind].append(await measure(call, collections, concurrency))
    ratios = [guarded / bare for bare, guarded in zip(rates["bare"], rates["guarded"], strict=True)]
    return {
        "bare_collections_per_second": statistics.median(rates["bare"]),
        "guarded_collections_per_second": statistics.median(rates["guarded"]),
        "ratio": statistics.median(ratios),
        "bookkeeping_us": measure_bookkeeping(20_000),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--collections", type=int, default=400)
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    options = parser.parse_args()
    result = asyncio.run(run_benchmark(options.collections, options.concurrency, options.rounds))
    for name, value in result.items():
        print(f"{name:32} {value:10.3f}")
    if options.json:
        print(json.dumps(result))


if __name__ == "__main__":
    main()
