"""The calculator's task and agent: right play earns 1, each flaw costs its half, and nonsense raises nothing."""

from __future__ import annotations

import json
import re
from collections.abc import Awaitable, Callable
from random import Random
from typing import Any

import httpx
import pytest
from aiohttp import web

from everroll.agents import AgentClients, Episode
from everroll.contracts.rollout import EpisodeKey
from everroll.prompts import Prompt
from examples.calculator.agent import ToolUse, compute_reward, run
from examples.calculator.task import (
    MISTAKEN_FOR,
    PHRASES,
    RIGHT_CALL_SHARE,
    RIGHT_REPLY_SHARE,
    Problem,
    build_demonstration,
    draw_demonstrations,
    draw_problems,
)
from examples.calculator.tools import call_tool

Play = Callable[[list[dict[str, Any]]], Awaitable[dict[str, float]]]

PROBLEM = Problem(tool="subtract", phrase="From {a} take {b}.", a=48, b=7)
LABEL = {"tool": "subtract", "answer": 41}


def grade(demonstration: list[dict[str, Any]], label: dict[str, Any]) -> dict[str, float]:
    """What the agent would give for a demonstration."""
    function = demonstration[1]["tool_calls"][0]["function"]
    use = ToolUse(function["name"], call_tool(function["name"], function["arguments"]))
    return compute_reward(label, [use], demonstration[3]["content"])


def find_right_tool(text: str) -> str:
    """Read a problem's tool from its words."""
    wanted = re.sub(r"\d+", "#", text)
    phrases = {phrase.format(a="#", b="#"): tool for tool, known in PHRASES.items() for phrase in known}
    return phrases[wanted]


def test_right_demonstrations_earn_the_whole_reward() -> None:
    for problem in draw_problems(Random(1), 60):
        demonstration = build_demonstration(problem, problem.tool)
        assert grade(demonstration, problem.to_prompt()["label"])["reward"] == 1.0, problem


def test_wrong_tool_earns_nothing() -> None:
    demonstration = build_demonstration(PROBLEM, MISTAKEN_FOR["subtract"])
    assert grade(demonstration, LABEL) == {"reward": 0.0, "tool_correct": 0.0, "answer_correct": 0.0}


@pytest.mark.parametrize(
    "reply", ["I do not know.", "The answer is 41 or 48.", "The answer is 411.", "The answer is -41.", ""]
)
def test_wrong_reply_costs_half(reply: str) -> None:
    assert grade(build_demonstration(PROBLEM, "subtract", reply), LABEL)["reward"] == 0.5


@pytest.mark.parametrize("uses", [[], [ToolUse("subtract", "41")] * 2, [ToolUse("add", "41")]])
def test_missing_or_doubled_call_costs_half(uses: list[ToolUse]) -> None:
    assert compute_reward(LABEL, uses, "The answer is 41.")["reward"] == 0.5


def test_flaws_have_the_shares_that_are_promised() -> None:
    demonstrations = draw_demonstrations(Random(2), 840)
    right_calls = [
        messages[1]["tool_calls"][0]["function"]["name"] == find_right_tool(messages[0]["content"])
        for messages in demonstrations
    ]
    right_replies = [
        messages[3]["content"] == f"The answer is {messages[2]['content']}." for messages in demonstrations
    ]
    assert sum(right_calls) / 840 == pytest.approx(RIGHT_CALL_SHARE, abs=0.005)
    assert sum(right_replies) / 840 == pytest.approx(RIGHT_REPLY_SHARE, abs=0.005)
    both = sum(call and reply for call, reply in zip(right_calls, right_replies, strict=True)) / 840
    assert both == pytest.approx(RIGHT_CALL_SHARE * RIGHT_REPLY_SHARE, abs=0.05)


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("divide", '{"a": 1, "b": 2}'),
        ("add", "{"),
        ("add", "[1, 2]"),
        ("add", '{"a": 1}'),
        ("add", '{"a": 1, "b": 2, "c": 3}'),
        ("add", '{"a": "1", "b": 2}'),
        ("add", '{"a": true, "b": 2}'),
        ("add", '{"a": 1.5, "b": 2}'),
        ("multiply", f'{{"a": {10**400}, "b": 2}}'),
        ("add", f'{{"a": {"9" * 5000}, "b": 2}}'),
    ],
)
def test_tool_answers_nonsense_with_an_error_to_read(name: str, arguments: str) -> None:
    assert call_tool(name, arguments).startswith("error: ")


@pytest.fixture
async def play() -> Any:
    """Plays an episode against a server on loopback that answers the given messages, one after the other."""
    runners: list[web.AppRunner] = []

    async def play_episode(replies: list[dict[str, Any]]) -> dict[str, float]:
        left = list(replies)

        async def answer(request: web.Request) -> web.Response:
            body = await request.json()
            reply = left.pop(0)
            roles = [message["role"] for message in body["messages"]]
            assert roles == ["user", "assistant", "tool"][: len(roles)]
            choice = {"index": 0, "message": reply["message"], "finish_reason": reply["finish_reason"]}
            return web.json_response(
                {"id": "1", "object": "chat.completion", "created": 0, "model": body["model"], "choices": [choice]}
            )

        app = web.Application()
        app.router.add_post("/v1/chat/completions", answer)
        runner = web.AppRunner(app)
        runners.append(runner)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        host, port = runner.addresses[0][:2]
        clients = AgentClients(httpx.AsyncClient())
        try:
            result = await run(
                Episode(
                    key=EpisodeKey(run="r", group=0, member=0),
                    prompt=Prompt(0, [{"role": "user", "content": PROBLEM.text}], LABEL),
                    base_url=f"http://{host}:{port}/v1",
                    api_key="key",
                    seed=0,
                    args={},
                    clients=clients,
                )
            )
        finally:
            await clients.close()
            await clients.http.aclose()
        assert not left, "the agent made too few calls"
        return result

    yield play_episode
    for runner in runners:
        await runner.cleanup()


def say(text: str, finish_reason: str = "stop") -> dict[str, Any]:
    return {"message": {"role": "assistant", "content": text}, "finish_reason": finish_reason}


def call(name: str, arguments: str, finish_reason: str = "tool_calls") -> dict[str, Any]:
    call = {"id": "c", "type": "function", "function": {"name": name, "arguments": arguments}}
    return {"message": {"role": "assistant", "content": None, "tool_calls": [call]}, "finish_reason": finish_reason}


ARGUMENTS = json.dumps({"a": 48, "b": 7})


async def test_agent_plays_two_turns_and_grades_them(play: Play) -> None:
    result = await play([call("subtract", ARGUMENTS), say("The answer is 41.")])
    assert result == {"reward": 1.0, "tool_correct": 1.0, "answer_correct": 1.0}


@pytest.mark.parametrize(
    ("replies", "reward"),
    [
        ([say('{"name": "subtract", "arguments": {"a": 48')], 0.0),
        ([say("The answer is 41.")], 0.5),
        ([call("subtract", "not JSON"), say("The answer is 41.")], 0.5),
        ([call("subtract", ARGUMENTS), call("subtract", ARGUMENTS)], 0.0),
        ([call("subtract", ARGUMENTS, "length")], 0.0),
        ([say("", "length")], 0.0),
    ],
)
async def test_agent_survives_bad_play(play: Play, replies: list[dict[str, Any]], reward: float) -> None:
    assert (await play(replies))["reward"] == reward
