"""A conversation for agents of tests. Each worker imports it, so it imports neither torch nor transformers."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from openai import AsyncOpenAI
from openai.types.chat import ChatCompletion

from everroll.agents import Episode


async def converse(episode: Episode, client: AsyncOpenAI, num_turns: int) -> AsyncIterator[ChatCompletion]:
    """The answers of one conversation of so many turns, or fewer where one runs into its length."""
    messages: list[Any] = list(episode.prompt.messages)
    for turn in range(num_turns):
        answer = await client.chat.completions.create(model=episode.model, messages=messages)
        yield answer
        if answer.choices[0].finish_reason == "length":
            return
        reply = answer.choices[0].message.model_dump(exclude_none=True)
        messages += [reply, {"role": "user", "content": f"go on, {turn}"}]
