"""The agent: an OpenAI tool-use loop, written as for any OpenAI server, and the reward."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from everroll.agents import Episode
from examples.calculator.tools import TOOLS, call_tool

MAX_TURNS = 2


class ToolUse(NamedTuple):
    """One tool call of the model, and what the tool answered."""

    name: str
    answer: str


async def run(episode: Episode) -> dict[str, float]:
    """Play one episode: let the model call tools until it answers in words, and grade what it did."""
    client = episode.openai()
    messages = list(episode.prompt.messages)
    uses: list[ToolUse] = []
    text = ""
    for _ in range(MAX_TURNS):
        completion = await client.chat.completions.create(model=episode.model, messages=messages, tools=TOOLS)
        choice = completion.choices[0]
        message, text = choice.message, choice.message.content or ""
        if not message.tool_calls or choice.finish_reason == "length":
            break  # it has answered, or was cut off in the middle
        messages.append(message.model_dump(exclude_none=True))
        for call in message.tool_calls:
            answer = call_tool(call.function.name, call.function.arguments)
            uses.append(ToolUse(call.function.name, answer))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": answer})
    return compute_reward(episode.prompt.label, uses, text)


def compute_reward(label: dict[str, Any], uses: Sequence[ToolUse], text: str) -> dict[str, float]:
    """Half the reward for the right tool call and no other, half for the right number in the reply and no other.

    `label` is `{"tool": str, "answer": int}`.
    """
    answer = str(label["answer"])
    tool_correct = float(list(uses) == [ToolUse(label["tool"], answer)])
    answer_correct = float(re.findall(r"-?\d+", text) == [answer])
    return {
        "reward": 0.5 * tool_correct + 0.5 * answer_correct,
        "tool_correct": tool_correct,
        "answer_correct": answer_correct,
    }
