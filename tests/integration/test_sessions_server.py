"""The session server as a process, with stock clients, over a real socket."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import openai
import pytest

from everroll.contracts.spec import SamplingSpec
from everroll.http_client import build_http_client
from everroll.sessions.client import CollectedSamples, SessionClient, SessionHandle
from everroll.sessions.server import SessionServerSettings
from tests.session_helpers import (
    ADMIN_KEY,
    TOOL_CALL_TEXT,
    TOOLS,
    FakeEngine,
    ServerProcess,
    find_free_port,
    model_section,
    run_fake_engine,
    run_server_process,
    write_model_dir,
)

SAMPLING = SamplingSpec(temperature=0.7, max_tokens=200)


@pytest.fixture
async def engine() -> AsyncIterator[FakeEngine]:
    async with run_fake_engine() as engine:
        yield engine


@pytest.fixture
async def server(engine: FakeEngine, tmp_path: Path) -> AsyncIterator[ServerProcess]:
    settings = SessionServerSettings(
        model=model_section(write_model_dir(tmp_path / "model")),
        engine_urls=[engine.base_url],
        journal_path=str(tmp_path / "journal.db"),
        port=find_free_port(),
    )
    with run_server_process(settings, tmp_path / "server.log") as server:
        yield server


@pytest.fixture
async def client(server: ServerProcess) -> AsyncIterator[SessionClient]:
    async with build_http_client() as http:
        yield SessionClient(http, server.base_url, ADMIN_KEY)


def open_openai(handle: SessionHandle) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=handle.base_url, api_key=handle.api_key, max_retries=0, timeout=20)


async def test_stock_client_holds_a_tool_conversation_and_the_mask_covers_exactly_the_sampled_tokens(
    client: SessionClient, engine: FakeEngine
) -> None:
    engine.replies = [TOOL_CALL_TEXT, "It is 3."]
    handle = await client.create("run-0-0-0", SAMPLING, seed=5)
    messages: list = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1 + 2?"}]
    async with open_openai(handle) as agent:
        first = await agent.chat.completions.create(model="any", messages=messages, tools=TOOLS)
        call = first.choices[0].message.tool_calls[0]
        assert first.choices[0].finish_reason == "tool_calls"
        assert (call.function.name, call.function.arguments) == ("add", '{"a": 1, "b": 2}')
        messages += [first.choices[0].message, {"role": "tool", "tool_call_id": call.id, "content": "3"}]
        second = await agent.chat.completions.create(model="any", messages=messages, tools=TOOLS)
        assert second.choices[0].message.content == "It is 3."
        assert second.choices[0].finish_reason == "stop"

    collected = await client.collect("run-0-0-0", None, {"reward": 1})
    assert isinstance(collected, CollectedSamples)
    (sample,) = collected.sample_set.samples
    first_call, second_call = engine.requests
    replies = [engine.tokenizer.encode(text + "<|im_end|>").ids for text in (TOOL_CALL_TEXT, "It is 3.")]
    assert sample.token_ids.tolist() == second_call["input_ids"] + replies[1]
    expected = np.zeros(sample.num_tokens, dtype=bool)
    start = len(first_call["input_ids"])
    expected[start : start + len(replies[0])] = True
    expected[len(second_call["input_ids"]) :] = True
    assert (sample.loss_mask == expected).all()
    assert sample.token_ids[start : start + len(replies[0])].tolist() == replies[0]
    logprobs = [-0.1 - 0.001 * index for ids in replies for index in range(len(ids))]
    assert sample.sampler_logprobs[expected].tolist() == np.float32(logprobs).tolist()
    assert (sample.weight_versions[expected] == 3).all()
    assert (sample.weight_versions[~expected] == -1).all()
    assert sample.temperature == 0.7
    assert sample.num_turns == 2
    assert collected.sample_set.metadata == {"reward": 1}
