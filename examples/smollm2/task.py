"""The task: sums of two numbers, answered with the number and nothing else; and the agent that plays it."""

from __future__ import annotations

import re
from random import Random
from typing import Any

from everroll.agents import Episode

TEXT = "What is {a} + {b}? Answer with the number only."


def build_prompts(seed: int, count: int) -> list[dict[str, Any]]:
    """Lines of the data set."""
    rng = Random(seed)
    pairs = [(rng.randint(1, 20), rng.randint(1, 20)) for _ in range(count)]
    return [{"messages": [{"role": "user", "content": TEXT.format(a=a, b=b)}], "label": a + b} for a, b in pairs]


async def run(episode: Episode) -> dict[str, float]:
    """One question, one answer."""
    completion = await episode.openai().chat.completions.create(model=episode.model, messages=episode.prompt.messages)
    return compute_reward(int(episode.prompt.label), completion.choices[0].message.content or "")


def compute_reward(answer: int, text: str) -> dict[str, float]:
    """Most of the reward for the right number as the first and only one, the rest for few words around it."""
    correct = float(re.findall(r"\d+", text) == [str(answer)])
    brevity = 1.0 / max(1, len(text.split()))
    return {"reward": 0.8 * correct + 0.2 * brevity, "correct": correct, "brevity": brevity}
