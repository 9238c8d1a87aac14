"""Ids that a model writes itself, which some clients clean before they send a call back."""

from __future__ import annotations

from typing import Any

import pytest

from everroll.sessions.history import canonicalize, canonicalize_strictly, name_tool_results
from everroll.sessions.turns import ChatRequest, compute_keys


def build_conversation(*ids: str) -> list[dict[str, Any]]:
    calls = [{"id": each, "type": "function", "function": {"name": "add", "arguments": "{}"}} for each in ids]
    results = [{"role": "tool", "tool_call_id": each, "content": "3"} for each in ids]
    return [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "", "tool_calls": calls}, *results]


@pytest.mark.parametrize("sent", [("functions.add:0", "functions.add:1"), ("functions_add_0", "functions_add_1")])
def test_cleaned_ids_stand_for_the_same_calls(sent: tuple[str, str]) -> None:
    recorded = ChatRequest(build_conversation("functions.add:0", "functions.add:1"))
    again = ChatRequest(build_conversation(*sent))
    assert compute_keys(again, canonicalize) == compute_keys(recorded, canonicalize)


def test_other_ids_do_not_and_strictly_neither_do_cleaned_ones() -> None:
    recorded = ChatRequest(build_conversation("functions.add:0"))
    for sent, match in (("functions_add_1", canonicalize), ("functions_add_0", canonicalize_strictly)):
        again = compute_keys(ChatRequest(build_conversation(sent)), match)
        assert again.prefix_keys[1:] != compute_keys(recorded, match).prefix_keys[1:]


def test_the_model_sees_its_own_id_again() -> None:
    reply = build_conversation("functions.add:0")[1]
    (result,) = name_tool_results([{"role": "tool", "tool_call_id": "functions_add_0", "content": "3"}], [reply])
    assert result == {"role": "tool", "tool_call_id": "functions.add:0", "name": "add", "content": "3"}
