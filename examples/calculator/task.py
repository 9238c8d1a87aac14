"""The task: sums put in words, and demonstrations of how they are solved, most of them flawed."""

from __future__ import annotations

import json
from dataclasses import dataclass
from random import Random
from typing import Any

from examples.calculator.tools import OPERATIONS, call_tool

PHRASES = {
    "add": ("What is {a} plus {b}?", "Add {a} and {b}.", "Find the sum of {a} and {b}."),
    "subtract": ("What is {a} minus {b}?", "From {a} take {b}.", "How much is {a} less {b}?"),
    "multiply": ("What is {a} times {b}?", "Multiply {a} by {b}.", "Find the product of {a} and {b}."),
}
MISTAKEN_FOR = {"add": "subtract", "subtract": "multiply", "multiply": "add"}
"""The tool that flawed demonstrations call instead of the right one."""
RIGHT_CALL_SHARE = 0.45
RIGHT_REPLY_SHARE = 0.5


@dataclass(frozen=True)
class Problem:
    """One sum, put in words."""

    tool: str
    a: int
    b: int
    text: str

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


def draw_problem(rng: Random) -> Problem:
    """The first operand and the answer have two digits, the second operand has one."""
    tool = rng.choice(list(PHRASES))
    phrase = rng.choice(PHRASES[tool])
    while True:
        a, b = rng.randint(10, 99), rng.randint(2, 9)
        if 10 <= OPERATIONS[tool](a, b) <= 99:
            return Problem(tool=tool, a=a, b=b, text=phrase.format(a=a, b=b))


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
        {"role": "assistant", "content": format_reply(answer) if reply is None else reply},
    ]


def format_reply(answer: object) -> str:
    return f"The answer is {answer}."


def draw_demonstration(rng: Random) -> list[dict[str, Any]]:
    """A demonstration whose call and whose reply are each right in fewer than half of the cases.

    A flawed call names the wrong tool; a flawed reply hedges with a second number, or refuses.
    """
    problem = draw_problem(rng)
    tool, reply = problem.tool, None
    if rng.random() >= RIGHT_CALL_SHARE:
        tool = MISTAKEN_FOR[problem.tool]
    if rng.random() >= RIGHT_REPLY_SHARE:
        answer = OPERATIONS[tool](problem.a, problem.b)
        hedge = f"{format_reply(answer)[:-1]} or {problem.a}."
        reply = rng.choice((hedge, hedge, "I do not know."))
    return build_demonstration(problem, tool, reply)
