"""A simulated agent: turns with an engine, tools that take their time, a reward by chance.

Named in a run file as any agent:

    [rollout.agent]
    function = "everroll.simulation.agent:play"
    args = { turns = 6, tool_seconds = 2.0, tool_p95_seconds = 20.0, failure_rate = 0.01 }
"""

from __future__ import annotations

import asyncio
import random
from typing import Annotated

from pydantic import Field, model_validator

from everroll.agents import Episode
from everroll.contracts.base import Spec
from everroll.simulation.distributions import Distribution, build_distribution

_WORDS = ("alpha", "beta", "gamma", "delta", "kappa", "lambda", "omega", "sigma")


class AgentArgs(Spec):
    """`rollout.agent.args`: what the agent's world is like. The same seed gives the same episode."""

    turns: Annotated[float, Field(ge=1)] = 4
    """Median number of model calls in an episode."""
    turns_p95: Annotated[float, Field(ge=1)] | None = None
    start_seconds: Annotated[float, Field(ge=0)] = 0.0
    """Median time until the environment is up, before the first call."""
    start_p95_seconds: Annotated[float, Field(ge=0)] | None = None
    tool_seconds: Annotated[float, Field(ge=0)] = 1.0
    """Median time of the tools between two calls."""
    tool_p95_seconds: Annotated[float, Field(ge=0)] | None = None
    tool_words: Annotated[int, Field(ge=1)] = 100
    """Words in the text that tools answer with."""
    failure_rate: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Share of episodes whose environment breaks after the last call."""
    success_rate: Annotated[float, Field(ge=0, le=1)] = 0.5
    """Share of the other episodes with reward 1; the rest get 0."""

    @model_validator(mode="after")
    def _check_distributions(self) -> AgentArgs:
        self.num_turns_distribution(), self.start_distribution(), self.tool_distribution()
        return self

    def num_turns_distribution(self) -> Distribution:
        return build_distribution(self.turns, self.turns_p95)

    def start_distribution(self) -> Distribution:
        return build_distribution(self.start_seconds, self.start_p95_seconds)

    def tool_distribution(self) -> Distribution:
        return build_distribution(self.tool_seconds, self.tool_p95_seconds)


class EnvironmentBrokenError(Exception):
    """The simulated environment broke, as `failure_rate` has it."""


async def play(episode: Episode) -> dict[str, float]:
    """One episode.

    Raises:
        pydantic.ValidationError: the arguments are not those of `AgentArgs`.
        EnvironmentBrokenError: drawn by `failure_rate`.
    """
    args = AgentArgs.model_validate(episode.args)
    generator = random.Random(episode.seed)
    num_turns = max(1, round(args.num_turns_distribution().draw(generator)))
    await asyncio.sleep(args.start_distribution().draw(generator))
    messages = list(episode.prompt.messages)
    waited = 0.0
    for turn in range(num_turns):
        (choice,) = (await episode.chat(messages))["choices"]
        if turn + 1 == num_turns or choice["finish_reason"] == "length":
            break
        messages.append({name: value for name, value in choice["message"].items() if value is not None})
        seconds = args.tool_distribution().draw(generator)
        waited += seconds
        await asyncio.sleep(seconds)
        messages.append({"role": "user", "content": " ".join(generator.choices(_WORDS, k=args.tool_words))})
    if generator.random() < args.failure_rate:
        raise EnvironmentBrokenError(f"after {turn + 1} turns")
    return {"reward": float(generator.random() < args.success_rate), "turns": turn + 1, "tool_seconds": waited}
