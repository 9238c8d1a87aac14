"""Public agent harnesses, unchanged, against a session: what they say is sampled, recorded and masked exactly."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from everroll.agents import AgentClients, Episode, run_agent
from everroll.contracts.rollout import EpisodeKey
from everroll.contracts.spec import AgentSpec
from everroll.prompts import Prompt
from everroll.tokens.renderer import load_renderer
from tests.session_helpers import (
    TOOL_CALL_TEXT,
    Stack,
    model_section,
    run_fake_engine,
    run_stack,
    write_model_dir,
)
from tests.wire_helpers import check_masked_tokens, record_given

BASH = '<tool_call>\n{"name": "bash", "arguments": {"command": "%s"}}\n</tool_call>'
MINI_SWE_AGENT = """
import json, os, sys
from minisweagent.agents.default import DefaultAgent
from minisweagent.environments.local import LocalEnvironment
from minisweagent.models.litellm_model import LitellmModel
from minisweagent.models.litellm_response_model import LitellmResponseModel

kind, provider, directory = sys.argv[1:]
models = {"chat": LitellmModel, "responses": LitellmResponseModel}
task = json.loads(os.environ["EVERROLL_PROMPT"])["messages"][0]["content"]
agent = DefaultAgent(
    models[kind](model_name=f"{provider}/{os.environ['EVERROLL_MODEL']}", model_kwargs={"temperature": 0.0}),
    LocalEnvironment(cwd=directory),
    system_template="You work in a shell.",
    instance_template="{{task}}",
)
result = agent.run(task)
print(json.dumps({"reward": float(result["submission"].strip()), "calls": agent.n_calls}))
"""
OPENAI_LOOP = """
import json, os
import openai

prompt = json.loads(os.environ["EVERROLL_PROMPT"])
add = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
messages, client = prompt["messages"], openai.OpenAI()
while True:
    answer = client.chat.completions.create(model="gpt-5", messages=messages, tools=[add], max_tokens=5).choices[0]
    messages.append(answer.message)
    if not answer.message.tool_calls:
        break
    for call in answer.message.tool_calls:
        value = sum(json.loads(call.function.arguments).values())
        messages.append({"role": "tool", "tool_call_id": call.id, "content": str(value)})
print(float(answer.message.content == "It is 3."))
"""


@pytest.fixture
async def stack(tmp_path: Path) -> AsyncIterator[Stack]:
    directory = write_model_dir(tmp_path / "model")
    renderer = load_renderer(model_section(directory))
    async with (
        run_fake_engine() as engine,
        run_stack(renderer, directory, tmp_path / "journal.db", [engine]) as stack,
    ):
        yield stack


async def open_episode(stack: Stack, task: str) -> Episode:
    handle = await stack.open()
    return Episode(
        key=EpisodeKey(run="r", group=0, member=0),
        prompt=Prompt(index=0, messages=[{"role": "user", "content": task}]),
        base_url=handle.base_url,
        api_key=handle.api_key,
        seed=1,
        args={},
        clients=AgentClients(httpx.AsyncClient()),
    )


async def test_a_loop_over_the_openai_sdk(stack: Stack) -> None:
    """Nothing but the environment tells it where to go."""
    stack.engine.replies = [TOOL_CALL_TEXT, f"Once more.\n{TOOL_CALL_TEXT}\n{TOOL_CALL_TEXT}", "It is 3."]
    given = record_given(stack.engine)
    command = AgentSpec(command=[sys.executable, "-c", OPENAI_LOOP])
    result = await run_agent(command, await open_episode(stack, "1 + 2?"))
    assert result.reward == 1.0
    assert len(given) == 3
    await check_masked_tokens(stack.client, "s", stack.engine, given)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "provider"), [("chat", "openai"), ("chat", "anthropic"), ("responses", "openai")])
async def test_mini_swe_agent(
    stack: Stack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, provider: str
) -> None:
    pytest.importorskip("minisweagent")
    for name, value in {
        "MSWEA_GLOBAL_CONFIG_DIR": str(tmp_path / "config"),
        "MSWEA_SILENT_STARTUP": "1",
        "MSWEA_COST_TRACKING": "ignore_errors",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    }.items():
        monkeypatch.setenv(name, value)
    workplace = tmp_path / "workplace"
    workplace.mkdir()
    (workplace / "number.txt").write_text("3")
    stack.engine.replies = [
        f"<think>\nWhat is here?\n</think>\n\nI look around.\n{BASH % 'ls'}",
        "I forgot to call a tool.",
        BASH % "cat number.txt",
        BASH % "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT && cat number.txt",
    ]
    given = record_given(stack.engine)
    command = AgentSpec(command=[sys.executable, "-c", MINI_SWE_AGENT, kind, provider, str(workplace)])
    result = await run_agent(command, await open_episode(stack, "Which number is in the file?"))
    assert (result.reward, result.metrics) == (3.0, {"calls": 4.0})
    # It takes a reply without a tool call out of the history: that reply ends a sample of its own.
    await check_masked_tokens(stack.client, "s", stack.engine, given, num_samples=2)
    texts = [stack.engine.tokenizer.decode(r["input_ids"], skip_special_tokens=False) for r in stack.engine.requests]
    assert "number.txt" in texts[1]
