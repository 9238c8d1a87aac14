"""The calculator agent, with an environment that takes its time, as real ones do; for `benchmarks.overlap`."""

from __future__ import annotations

import asyncio
import random

from everroll.agents import Episode
from everroll.simulation.distributions import build_distribution
from examples.calculator.agent import run


async def play(episode: Episode) -> dict[str, float]:
    """An episode of the calculator, after `median_seconds` to `p95_seconds` (95th percentile) of waiting.

    The same episode of the same run waits equally long, whatever else differs.
    """
    distribution = build_distribution(float(episode.args["median_seconds"]), float(episode.args["p95_seconds"]))
    await asyncio.sleep(distribution.draw(random.Random(episode.seed)))
    return await run(episode)
