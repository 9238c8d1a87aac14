"""What holds on every wire: the same tokens, the field cases, keys, and streams that show signs of life."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from everroll.contracts.spec import SamplingSpec
from everroll.tokens.renderer import ChatRenderer
from tests.session_helpers import (
    ADMIN_KEY,
    TOOL_CALL_TEXT,
    USER,
    FakeEngine,
    Stack,
    run_fake_engine,
    run_stack,
)
from tests.wire_helpers import WIRES, ChatClient, MessagesClient, ResponsesByIdClient, ResponsesClient, WireClient

REPLIES = ["fine", TOOL_CALL_TEXT, "<think>\nhm\n</think>\n\nyes", f"I see.\n{TOOL_CALL_TEXT}\n{TOOL_CALL_TEXT}", ""]


@pytest.fixture
async def engine() -> AsyncIterator[FakeEngine]:
    async with run_fake_engine("one", "two", "three") as engine:
        yield engine


@pytest.fixture
async def stack(engine: FakeEngine, renderer: ChatRenderer, model_dir: Path, tmp_path: Path) -> AsyncIterator[Stack]:
    keepalive = {"stream_keepalive_seconds": 0.05}
    async with run_stack(renderer, model_dir, tmp_path / "journal.db", [engine], **keepalive) as stack:
        yield stack


async def connect(stack: Stack, wire: type[WireClient], **options: Any) -> WireClient:
    return wire(stack.http, await stack.open(), **options)


@pytest.fixture(params=WIRES, ids=lambda wire: wire.__name__)
async def agent(request: pytest.FixtureRequest, stack: Stack) -> WireClient:
    return await connect(stack, request.param)


Script = tuple[str, bool, list[tuple[int, str]]]
SCRIPTS = st.tuples(
    st.sampled_from(["", "Be brief."]),
    st.booleans(),
    st.lists(st.tuples(st.integers(0, len(REPLIES) - 1), st.text(max_size=5)), min_size=2, max_size=4),
)


def test_the_same_conversation_has_the_same_prompts_on_every_wire(
    renderer: ChatRenderer, model_dir: Path, tmp_path: Path
) -> None:
    session_ids = map(str, itertools.count())
    with asyncio.Runner() as runner:

        @settings(max_examples=10, deadline=None)
        @given(script=SCRIPTS)
        def compare(script: Script) -> None:
            runner.run(compare_wires(stack, script, session_ids))

        opened = open_stack(renderer, model_dir, tmp_path)
        stack = runner.run(anext(opened))
        try:
            compare()
        finally:
            runner.run(opened.aclose())


async def open_stack(renderer: ChatRenderer, model_dir: Path, directory: Path) -> AsyncGenerator[Stack]:
    fast = {"journal_synchronous": "normal"}
    async with (
        run_fake_engine() as engine,
        run_stack(renderer, model_dir, directory / "j.db", [engine], **fast) as stack,
    ):
        yield stack


async def compare_wires(stack: Stack, script: Script, session_ids: Iterator[str]) -> None:
    """Each wire in a session of its own; ids of tool calls hold no session, so that they agree too."""
    system, tools, turns = script
    prompts = []
    for wire in WIRES:
        stack.engine.requests.clear()
        stack.engine.replies = [REPLIES[reply] for reply, _ in turns] + ["end"]
        handle = await stack.open(next(session_ids))
        await play(wire(stack.http, handle, system, tools), [text for _, text in turns])
        prompts.append([request["input_ids"] for request in stack.engine.requests])
        described: Any = await stack.client.describe(handle.session_id)
        assert [turn["note"] for turn in described["turns"]] == [""] * len(turns)
    assert len(prompts[0]) == len(turns)
    assert all(other == prompts[0] for other in prompts)


async def play(agent: WireClient, texts: list[str]) -> None:
    new = [USER]
    for text in texts:
        _, calls = await agent.ask(*new)
        new = [{"role": "tool", "tool_call_id": call_id, "content": text} for call_id, _, _ in calls]
        new = new or [{"role": "user", "content": text}]


async def test_a_conversation_can_change_wires_on_the_way(stack: Stack) -> None:
    chat = await connect(stack, ChatClient, system="Be brief.", tools=True)
    stack.engine.replies = [TOOL_CALL_TEXT, "It is 3.", "Bye."]
    _, [(call_id, _, arguments)] = await chat.ask(USER)
    messages = MessagesClient(stack.http, chat.handle, "Be brief.", tools=True)
    use = {"type": "tool_use", "id": call_id, "name": "add", "input": {"b": 2, "a": arguments["a"]}}
    messages.history = [USER, {"role": "assistant", "content": [use]}]
    assert await messages.ask({"role": "tool", "tool_call_id": call_id, "content": "3"}) == ("It is 3.", [])
    last = (await messages.send()).status_code
    assert last == 400  # nothing to answer
    assert len(await stack.texts()) == 1
    assert await stack.num_turns() == 2


async def test_d1_a_retry_gets_the_recorded_answer(stack: Stack, agent: WireClient) -> None:
    first, again = await agent.send(USER), await agent.send(USER)
    assert (first.json()["everroll"]["replayed"], again.json()["everroll"]["replayed"]) == (False, True)
    assert {**first.json(), "everroll": 0} == {**again.json(), "everroll": 0}
    assert len(stack.engine.requests) == 1
    await agent.ask(USER)
    await agent.ask({"role": "user", "content": "more"})
    assert await stack.texts() == ["one|two|"]


async def test_d1_the_other_wires_get_it_too(stack: Stack) -> None:
    handle = await stack.open()
    answers = [await wire(stack.http, handle).ask(USER) for wire in WIRES]
    assert answers == [("one", [])] * len(WIRES)
    assert len(stack.engine.requests) == 1


async def test_d2_another_seed_asks_for_another_answer(stack: Stack, agent: WireClient) -> None:
    assert (await agent.send(USER, seed=1)).status_code == 200
    assert await agent.ask(USER, seed=2) == ("two", [])
    await agent.ask({"role": "user", "content": "more"})
    assert await stack.texts() == ["two|three|"]


async def test_d3_a_refused_request_changes_nothing(stack: Stack, agent: WireClient) -> None:
    await agent.ask(USER)
    before = await stack.client.describe("s")
    for broken in ({"tools": "x"}, {"tools": [{"type": "web_search_20250305"}]}, {"tool_choice": "any"}, {"seed": "x"}):
        response = await agent.send(USER, **broken)
        assert (response.status_code, response.headers["x-should-retry"]) == (400, "false")
        assert next(iter(broken)) in agent.error_text(response.json())
    assert await stack.client.describe("s") == before
    await agent.ask({"role": "user", "content": "more"})
    assert await stack.texts() == ["one|two|"]


def abort(answer: dict[str, Any]) -> dict[str, Any]:
    answer["meta_info"]["finish_reason"] = {"type": "abort", "message": "paused", "status_code": 503}
    return answer


@pytest.mark.parametrize("stream", [False, True])
async def test_d6_an_aborted_call_is_503_and_leaves_no_trace(
    engine: FakeEngine, renderer: ChatRenderer, model_dir: Path, tmp_path: Path, stream: bool
) -> None:
    impatient = {"engine_patience_seconds": 0.0}
    async with run_stack(renderer, model_dir, tmp_path / "j.db", [engine], **impatient) as stack:
        handle = await stack.open()
        for wire in WIRES:
            agent = wire(stack.http, handle)
            engine.mangle = abort
            response = await agent.send(USER, stream=stream)
            assert (response.status_code, response.headers["content-type"]) == (503, "application/json")
            assert "x-should-retry" not in response.headers
            assert agent.error_text(response.json())
        assert await stack.num_turns() == 0
        engine.mangle = None
        assert await agent.ask(USER)


async def test_d10_the_runs_sampling_wins(stack: Stack, agent: WireClient) -> None:
    wishes = {"temperature": 0.1, "top_p": 0.2, "top_k": 5, "max_tokens": 3, "max_output_tokens": 3}
    response = await agent.send(USER, **wishes)
    sent = stack.engine.requests[0]["sampling_params"]
    assert (sent["temperature"], sent["top_p"], sent["max_new_tokens"]) == (0.7, 1.0, 200)
    assert response.json()["everroll"]["sampling"]["temperature"] == 0.7


async def test_a_reply_that_was_cut_says_so_and_is_not_continued(stack: Stack) -> None:
    reasons = []
    for wire in WIRES:
        handle = await stack.open(wire.__name__, sampling=SamplingSpec(max_tokens=2))
        agent = wire(stack.http, handle)
        answer = (await agent.send(USER)).json()
        reasons.append(answer.get("stop_reason") or answer.get("status") or answer["choices"][0]["finish_reason"])
        await agent.ask(USER)
        more = await agent.send({"role": "user", "content": "more"})
        assert (more.status_code, "length limit" in agent.error_text(more.json())) == (409, True)
    assert reasons == ["length", "max_tokens", "incomplete", "incomplete"]


async def test_keys_and_limits_hold_on_every_wire(
    engine: FakeEngine, renderer: ChatRenderer, model_dir: Path, tmp_path: Path
) -> None:
    limits = {"max_body_bytes": 2000, "max_turns": 1}
    async with run_stack(renderer, model_dir, tmp_path / "j.db", [engine], **limits) as stack:
        other = await stack.open("other")
        handle = await stack.open()
        for wire in (ChatClient, MessagesClient, ResponsesClient):
            agent = wire(stack.http, handle)
            url = f"{handle.base_url}/{agent.path}"
            for header in ("x-api-key", "Authorization"):
                for key in (other.api_key, "", "wrong"):
                    value = f"Bearer {key}" if header == "Authorization" else key
                    answer = await stack.http.post(url, json=agent.build_body([USER]), headers={header: value})
                    assert answer.status_code == 401
                    assert "session's own API key" in agent.error_text(answer.json())
            assert (await agent.send({"role": "user", "content": "x" * 2000})).status_code == 413
            assert (await agent.send(USER)).status_code == 200
            full = await agent.send({"role": "user", "content": "another"})
            assert (full.status_code, "limit of 1 turns" in full.text) == (400, True)


async def test_a_key_in_either_header_opens_the_session_and_nothing_else(stack: Stack) -> None:
    handle = await stack.open()
    url, body = f"{handle.base_url}/messages", {"messages": [USER], "max_tokens": 5}
    accepted: list[dict[str, str]] = [
        {"x-api-key": handle.api_key},
        {"Authorization": f"Bearer {handle.api_key}"},
        {"Authorization": "Bearer unset", "x-api-key": handle.api_key},
        {"x-api-key": ADMIN_KEY},
    ]
    for headers in accepted:
        assert (await stack.http.post(url, json=body, headers=headers)).status_code == 200
    for headers in ({"x-api-key": handle.api_key}, {"x-api-key": ADMIN_KEY}):
        assert (await stack.http.get(f"{stack.client.base_url}/sessions/s", headers=headers)).status_code == 401


async def test_a_long_turn_shows_signs_of_life_and_nothing_of_the_turn_before_it_is_recorded(
    stack: Stack, agent: WireClient
) -> None:
    whole = await agent.send({"role": "user", "content": "whole"}, stream=True)
    stack.engine.gate = asyncio.Event()
    stack.engine.replies = ["late"]
    body = {"model": "m", **agent.build_body([USER]), "stream": True}
    url = f"{agent.handle.base_url}/{agent.path}"
    async with stack.http.stream("POST", url, json=body, headers=agent.headers()) as response:
        assert (response.status_code, response.headers["content-type"][:17]) == (200, "text/event-stream")
        parts = response.aiter_bytes()
        seen = b"".join([await anext(parts) for _ in range(3)])
        sign = b"event: ping\ndata: {" if agent.path == "messages" else b": still sampling\n\n"
        assert seen.startswith(sign)
        assert seen.count(b"ping" if agent.path == "messages" else b"sampling") >= 3
        assert seen.count(b"\n\n") == seen.count(sign)
        stack.engine.gate.set()
        rest = b"".join([part async for part in parts])
    assert await stack.num_turns() == 2
    assert b"late" in rest
    assert count_events(rest) == count_events(whole.content)


def count_events(stream: bytes) -> int:
    return sum(line.startswith(b"data:") and b'{"type":"ping"}' not in line for line in stream.splitlines())


async def test_a_client_that_hangs_up_on_a_long_stream_finds_the_answer_later(stack: Stack, agent: WireClient) -> None:
    stack.engine.gate = asyncio.Event()
    body = {"model": "m", **agent.build_body([USER]), "stream": True}
    url = f"{agent.handle.base_url}/{agent.path}"
    async with stack.http.stream("POST", url, json=body, headers=agent.headers()) as response:
        await anext(response.aiter_bytes())
    retry = asyncio.create_task(agent.ask(USER))
    stack.engine.gate.set()
    assert await retry == ("one", [])
    assert len(stack.engine.requests) == 1


async def test_counting_tokens_samples_nothing(stack: Stack) -> None:
    agent = await connect(stack, MessagesClient, system="Be brief.", tools=True)
    counts = []
    for new in ([USER], [{"role": "user", "content": "more"}]):
        url = f"{agent.handle.base_url}/messages/count_tokens"
        counted = await stack.http.post(url, json=agent.build_body(new), headers=agent.headers())
        counts.append(counted.json())
        await agent.ask(*new)
    assert counts == [{"input_tokens": len(request["input_ids"])} for request in stack.engine.requests]
    refused = await stack.http.post(url, json={"messages": 5}, headers=agent.headers())
    assert (refused.status_code, refused.json()["type"]) == (400, "error")


async def test_models_and_what_is_not_served(stack: Stack) -> None:
    handle = await stack.open()
    headers = {"Authorization": f"Bearer {handle.api_key}"}

    async def get(path: str) -> Any:
        return await stack.http.get(f"{handle.base_url}/{path}", headers=headers)

    (model,) = (await get("models")).json()["data"]
    assert (await get(f"models/{model['id']}")).json() == model
    for path, status in (("models/gpt-5", 404), ("embeddings", 404), ("messages", 405)):
        response = await get(path)
        assert (response.status_code, bool(response.json()["error"]["message"])) == (status, True)


async def test_previous_response_ids_of_others_are_refused(stack: Stack) -> None:
    agent = await connect(stack, ResponsesByIdClient)
    for unknown in ("resp_" + "0" * 32, "resp_x", 5):
        response = await agent.send(USER, previous_response_id=unknown)
        assert (response.status_code, await stack.num_turns()) == (400, 0)


async def test_instructions_stay_with_the_conversation_and_new_ones_replace_them(stack: Stack) -> None:
    agent = await connect(stack, ResponsesByIdClient)
    await agent.ask(USER, instructions="Be brief.")
    await agent.ask({"role": "user", "content": "more"}, instructions=None)
    await agent.ask({"role": "user", "content": "again"}, instructions="Be long.")
    texts = [stack.engine.tokenizer.decode(r["input_ids"], skip_special_tokens=False) for r in stack.engine.requests]
    assert texts[1].startswith(texts[0] + "one<|im_end|>")
    assert texts[2].count("<|im_start|>system\n") == 1
    assert "Be long." in texts[2]
    turns: Any = (await stack.client.describe("s"))["turns"]
    assert [turn["follows"] for turn in turns] == [None, 0, None]
