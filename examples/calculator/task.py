"""The task: sums put in words, and demonstrations of how they are solved, most of them flawed."""

from __future__ import annotations

import json
from dataclasses import dataclass
from random import Random
from typing import Any

from examples.calculator.tools import OPERATIONS, call_tool

PHRASES = {
    "add": ("What is {a} plus {b}?", "Add {a} and {b}."),
    "subtract": ("What is {a} minus {b}?", "From {a} take {b}."),
    "multiply": ("What is {a} times {b}?", "Multiply {a} by {b}."),
}
MISTAKEN_FOR = {"add": "subtract", "subtract": "multiply", "multiply": "add"}
"""The tool that flawed demonstrations call instead of the right one."""
RIGHT_CALL_SHARE = 0.45
RIGHT_REPLY_SHARE = 0.45


@dataclass(frozen=True)
class Problem:
    """One sum, put in words."""

    tool: str
    phrase: str
    a: int
    b: int

    @property
    def text(self) -> str:
        return self.phrase.format(a=self.a, b=self.b)

    @property
    def answer(self) -> int:
        return OPERATIONS[self.tool](self.a, self.b)

    def to_prompt(self) -> dict[str, Any]:
        """A line of the data set."""
        return {
            "messages": [{"role": "user", "content": self.text}],
            "label": {"tool": self.tool, "answer": self.answer},
            "metadata": {"a": self.a, "b": self.b},
        }


def draw_problems(rng: Random, count: int) -> list[Problem]:
    """`count` problems, each phrase equally often, in an order that tells nothing."""
    phrases = [(tool, phrase) for tool, tool_phrases in PHRASES.items() for phrase in tool_phrases]
    problems = [_draw_problem(rng, *phrases[index % len(phrases)]) for index in range(count)]
    rng.shuffle(problems)
    return problems


def _draw_problem(rng: Random, tool: str, phrase: str) -> Problem:
    """The first operand and the answer have two digits, the second operand has one."""
    while True:
        a, b = rng.randint(10, 99), rng.randint(2, 9)
        if 10 <= OPERATIONS[tool](a, b) <= 99:
            return Problem(tool=tool, phrase=phrase, a=a, b=b)


def build_demonstration(problem: Problem, tool: str, reply: str | None = None) -> list[dict[str, Any]]:
    """The conversation in which the model calls `tool` with the problem's operands, and then replies.

    Without `reply`, it replies with the tool's answer.
    """
    arguments = json.dumps({"a": problem.a, "b": problem.b})
    answer = call_tool(tool, arguments)
    call = {"id": "call", "type": "function", "function": {"name": tool, "arguments": arguments}}
    return [
        {"role": "user", "content": problem.text},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call", "content": answer},
        {"role": "assistant", "content": f"The answer is {answer}." if reply is None else reply},
    ]


def draw_demonstrations(rng: Random, count: int) -> list[list[dict[str, Any]]]:
    """Demonstrations in which the calls and the replies are right in the shares above, independently.

    The shares hold for each phrase, so that no seed gives a model which hardly ever tries the right one.
    """
    demonstrations = []
    problems = sorted(draw_problems(rng, count), key=lambda problem: problem.phrase)
    right_calls = _spread(rng, count, RIGHT_CALL_SHARE)
    right_replies = _spread(rng, count, RIGHT_REPLY_SHARE)
    for problem, call_is_right, reply_is_right in zip(problems, right_calls, right_replies, strict=True):
        tool = problem.tool if call_is_right else MISTAKEN_FOR[problem.tool]
        reply = None if reply_is_right else _draw_flawed_reply(rng, problem, tool)
        demonstrations.append(build_demonstration(problem, tool, reply))
    rng.shuffle(demonstrations)
    return demonstrations


def _draw_flawed_reply(rng: Random, problem: Problem, tool: str) -> str:
    """A reply that hedges with a second number, or refuses."""
    hedge = f"The answer is {OPERATIONS[tool](problem.a, problem.b)} or {problem.a}."
    return rng.choice((hedge, hedge, "I do not know."))


def _spread(rng: Random, count: int, share: float) -> list[bool]:
    """`count` flags; of any 20 that begin at a multiple of 20, the same number is true."""
    flags: list[bool] = []
    while len(flags) < count:
        num_true = round(20 * share)
        block = [True] * num_true + [False] * (20 - num_true)
        rng.shuffle(block)
        flags += block
    return flags[:count]
