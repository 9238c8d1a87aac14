"""The calculator that the agent offers to the model, as OpenAI tools."""

from __future__ import annotations

import json
import operator
from collections.abc import Callable
from typing import Any

OPERATIONS: dict[str, Callable[[int, int], int]] = {
    "add": operator.add,
    "subtract": operator.sub,
    "multiply": operator.mul,
}
_LIMIT = 10**9
"""Operands are smaller than this, so that no answer of the model can keep the calculator busy."""


def _describe_tool(name: str) -> dict[str, Any]:
    integer = {"type": "integer"}
    parameters = {"type": "object", "properties": {"a": integer, "b": integer}, "required": ["a", "b"]}
    return {"type": "function", "function": {"name": name, "description": f"{name} a, b", "parameters": parameters}}


TOOLS = [_describe_tool(name) for name in OPERATIONS]


def call_tool(name: str, arguments: str) -> str:
    """The tool's answer as text. A call that makes no sense is answered with an error for the model to read."""
    if name not in OPERATIONS:
        return f"error: there is no tool {name!r}"
    try:
        values = json.loads(arguments)
    except ValueError:
        return "error: the arguments are not JSON"
    if not isinstance(values, dict) or set(values) != {"a", "b"}:
        return "error: the arguments are a and b"
    if not all(type(value) is int and abs(value) < _LIMIT for value in values.values()):
        return f"error: a and b must be integers below {_LIMIT}"
    return str(OPERATIONS[name](values["a"], values["b"]))
