"""Stock OpenAI clients against a session: tool loops, streams, errors."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import openai
import pytest

from everroll.sessions.client import CollectedSamples
from everroll.tokens.renderer import load_renderer
from tests.session_helpers import (
    SAMPLING,
    TOOL_CALL_TEXT,
    TOOLS,
    Stack,
    model_section,
    open_openai,
    run_fake_engine,
    run_stack,
    write_model_dir,
)


@pytest.fixture
async def stack(tmp_path: Path) -> AsyncIterator[Stack]:
    directory = write_model_dir(tmp_path / "model")
    renderer = load_renderer(model_section(directory))
    async with (
        run_fake_engine() as engine,
        run_stack(renderer, directory, tmp_path / "journal.db", [engine]) as stack,
    ):
        yield stack


async def test_stock_client_holds_a_tool_conversation_and_the_mask_covers_exactly_the_sampled_tokens(
    stack: Stack,
) -> None:
    stack.engine.replies = [TOOL_CALL_TEXT, "It is 3."]
    handle = await stack.client.create("run-0-0-0", SAMPLING, seed=5)
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

    collected = await stack.client.collect("run-0-0-0", None, {"reward": 1})
    assert isinstance(collected, CollectedSamples)
    (sample,) = collected.sample_set.samples
    first_call, second_call = stack.engine.requests
    replies = [stack.engine.tokenizer.encode(text + "<|im_end|>").ids for text in (TOOL_CALL_TEXT, "It is 3.")]
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


async def test_stock_client_streams_text_tool_calls_and_usage(stack: Stack) -> None:
    stack.engine.replies = ["Let me see." + TOOL_CALL_TEXT]
    handle = await stack.client.create("s", SAMPLING, seed=5)
    messages: list = [{"role": "user", "content": "1 + 2?"}]
    async with open_openai(handle) as agent:
        stream = agent.chat.completions.stream(
            model="any", messages=messages, tools=TOOLS, stream_options={"include_usage": True}
        )
        async with stream as events:
            final = await events.get_final_completion()
        whole = await agent.chat.completions.create(model="any", messages=messages, tools=TOOLS)
    message = final.choices[0].message
    assert (message.content, final.choices[0].finish_reason) == ("Let me see.", "tool_calls")
    assert [call.function.arguments for call in message.tool_calls or []] == ['{"a": 1, "b": 2}']
    assert (message.tool_calls or [])[0].id == (whole.choices[0].message.tool_calls or [])[0].id
    assert final.usage == whole.usage
    assert len(stack.engine.requests) == 1


async def test_stock_client_sees_an_error_before_the_first_byte_of_a_stream(stack: Stack) -> None:
    stack.engine.status = 500
    handle = await stack.client.create("s", SAMPLING, seed=5)
    async with open_openai(handle) as agent:
        with pytest.raises(openai.InternalServerError) as caught:
            await agent.chat.completions.create(model="m", messages=[{"role": "user", "content": "x"}], stream=True)
    assert caught.value.status_code == 503
