"""The field cases D1-D10 and C9, and what else a session promises: a real app over a real journal and engine socket."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from everroll.contracts.outcomes import CauseKind
from everroll.contracts.spec import ModelSection, SamplingSpec
from everroll.failures import ServerStatusError
from everroll.sessions.client import CollectedSamples, EmptySamples, SessionHandle
from everroll.sessions.digest import digest_samples
from everroll.tokens.renderer import ChatRenderer, load_renderer
from tests.session_helpers import (
    ADMIN_KEY,
    SAMPLING,
    USER,
    FakeEngine,
    Stack,
    run_fake_engine,
    run_stack,
    write_model_dir,
)


async def test_d1_the_same_request_again_gets_the_recorded_reply(stack: Stack) -> None:
    handle = await stack.open()
    first = await stack.post(handle, USER)
    again = await stack.post(handle, USER)
    assert again.json()["choices"] == first.json()["choices"]
    assert again.json()["id"] == first.json()["id"]
    assert (first.json()["everroll"]["replayed"], again.json()["everroll"]["replayed"]) == (False, True)
    assert len(stack.engine.requests) == 1
    reply = first.json()["choices"][0]["message"]
    await stack.chat(handle, USER, reply, {"role": "user", "content": "more"})
    assert await stack.texts() == ["one|two|"]


async def test_d1_a_reply_that_got_lost_is_recorded_and_served_to_the_retry(stack: Stack) -> None:
    """The client hangs up while the engine samples; the call goes on."""
    handle = await stack.open()
    stack.engine.gate = asyncio.Event()
    lost = asyncio.create_task(stack.post(handle, USER))
    await stack.engine.await_requests(1)
    lost.cancel()
    await asyncio.gather(lost, return_exceptions=True)
    retry = asyncio.create_task(stack.post(handle, USER))
    stack.engine.gate.set()
    assert (await retry).json()["choices"][0]["message"]["content"] == "one"
    assert len(stack.engine.requests) == 1


async def test_copies_in_flight_are_sampled_once(stack: Stack) -> None:
    handle = await stack.open()
    stack.engine.gate = asyncio.Event()
    calls = [asyncio.create_task(stack.post(handle, USER)) for _ in range(5)]
    await stack.engine.await_requests(1)
    stack.engine.gate.set()
    answers = await asyncio.gather(*calls)
    assert {answer.json()["choices"][0]["message"]["content"] for answer in answers} == {"one"}
    assert sum(not answer.json()["everroll"]["replayed"] for answer in answers) == 1
    assert len(stack.engine.requests) == 1


async def test_d2_of_two_replies_to_one_prompt_only_the_continued_one_is_trained(stack: Stack) -> None:
    handle = await stack.open()
    await stack.chat(handle, USER, seed=1)
    second = await stack.chat(handle, USER, seed=2)
    assert second["content"] == "two"
    await stack.chat(handle, USER, second, {"role": "user", "content": "more"})
    assert await stack.texts() == ["two|three|"]


async def test_d3_an_invalid_retry_changes_nothing(stack: Stack) -> None:
    handle = await stack.open()
    reply = await stack.chat(handle, USER)
    before = await stack.client.describe("s")
    for broken in ({"n": 2}, {"tools": "x"}, {"messages": [{"role": "robot"}]}):
        assert (await stack.post(handle, USER, **broken)).status_code == 400
    assert await stack.client.describe("s") == before
    await stack.chat(handle, USER, reply, USER)
    assert await stack.texts() == ["one|two|"]


def drop_logprob(answer: dict[str, Any]) -> dict[str, Any]:
    answer["meta_info"]["output_token_logprobs"].pop()
    return answer


def miscount(answer: dict[str, Any]) -> dict[str, Any]:
    answer["meta_info"]["completion_tokens"] += 1
    return answer


def poison(answer: dict[str, Any]) -> dict[str, Any]:
    answer["meta_info"]["output_token_logprobs"][0][0] = float("nan")
    return answer


def overflow(answer: dict[str, Any]) -> dict[str, Any]:
    answer["meta_info"]["output_token_logprobs"][0][0] = float("inf")
    return answer


def abort(answer: dict[str, Any]) -> dict[str, Any]:
    answer["meta_info"]["finish_reason"] = {"type": "abort", "message": "paused", "status_code": 503}
    return answer


@pytest.mark.parametrize(
    ("mangle", "status"),
    [(drop_logprob, 502), (miscount, 502), (poison, 502), (overflow, 502), (abort, 503), (lambda _: {"x": 1}, 502)],
)
async def test_d5_d6_d7_a_broken_answer_leaves_no_trace(stack: Stack, mangle: Any, status: int) -> None:
    handle = await stack.open()
    stack.engine.mangle = mangle
    response = await stack.post(handle, USER)
    assert response.status_code == status
    assert response.json()["error"]["message"]
    assert await stack.num_turns() == 0
    collected = await stack.client.collect("s", None, {})
    assert isinstance(collected, EmptySamples)
    assert collected.cause_kind is CauseKind.NO_RECORDS
    stack.engine.mangle = None
    assert (await stack.chat(handle, USER))["content"] == "two"


@pytest.mark.parametrize(("engine_status", "status"), [(500, 503), (400, 400)])
async def test_engine_errors(stack: Stack, engine_status: int, status: int) -> None:
    handle = await stack.open()
    stack.engine.status = engine_status
    for stream in (False, True):
        response = await stack.post(handle, USER, stream=stream)
        assert (response.status_code, response.headers["content-type"]) == (status, "application/json")
    assert await stack.num_turns() == 0


async def test_a_turn_that_loses_its_engine_goes_to_another(
    renderer: ChatRenderer, model_dir: Path, tmp_path: Path
) -> None:
    async with (
        run_fake_engine("a") as first,
        run_fake_engine("a") as second,
        run_stack(renderer, model_dir, tmp_path / "j.db", [first, second]) as stack,
    ):
        handle = await stack.open()
        reply = await stack.chat(handle, USER)
        home, other = (first, second) if first.requests else (second, first)
        home.status = 500
        await stack.chat(handle, USER, reply, USER)
        assert other.requests[0]["input_ids"] == home.requests[1]["input_ids"]
        assert other.requests[0]["sampling_params"] == home.requests[1]["sampling_params"]


async def test_d8_d10_pinned_sampling_wins_and_is_shown(stack: Stack) -> None:
    handle = await stack.open(sampling=SamplingSpec(temperature=0.7, top_p=0.9, max_tokens=50, stop_token_ids=[7]))
    response = await stack.post(handle, USER, temperature=0.1, top_p=0.2, max_tokens=3, max_completion_tokens=3)
    sent = stack.engine.requests[0]["sampling_params"]
    assert (sent["temperature"], sent["top_p"], sent["max_new_tokens"]) == (0.7, 0.9, 50)
    ends = [stack.engine.tokenizer.token_to_id(token) for token in ("<|im_end|>", "<|endoftext|>")]
    assert sorted(sent["stop_token_ids"]) == sorted([7, *ends])
    shown = response.json()["everroll"]["sampling"]
    assert (shown["temperature"], shown["max_tokens"]) == (0.7, 50)
    collected = await stack.client.collect("s", None, {})
    assert isinstance(collected, CollectedSamples)
    assert collected.sample_set.samples[0].temperature == 0.7


async def test_a_generation_that_ended_at_its_length_limit_is_not_continued(stack: Stack) -> None:
    handle = await stack.open(sampling=SamplingSpec(max_tokens=2))
    response = await stack.post(handle, USER)
    assert response.json()["choices"][0]["finish_reason"] == "length"
    more = await stack.post(handle, USER, response.json()["choices"][0]["message"], USER)
    assert more.status_code == 409
    assert "length limit" in more.json()["error"]["message"]
    assert await stack.num_turns() == 1


async def test_a_branch_shares_its_prefix_and_is_visible(stack: Stack) -> None:
    handle = await stack.open()
    first = await stack.chat(handle, USER)
    await stack.chat(handle, USER, first, {"role": "user", "content": "left"})
    await stack.chat(handle, USER, first, {"role": "user", "content": "right"})
    assert await stack.texts() == ["one|two|", "three|"]
    turns = (await stack.client.describe("s"))["turns"]
    assert [(turn["follows"], turn["extends"]) for turn in turns] == [(None, False), (0, True), (0, True)]


async def test_an_unknown_history_starts_a_new_tree_and_is_visible(stack: Stack) -> None:
    handle = await stack.open()
    await stack.chat(handle, USER)
    await stack.chat(handle, USER, {"role": "assistant", "content": "never said"}, USER)
    turn = (await stack.client.describe("s"))["turns"][1]
    assert (turn["follows"], turn["note"]) == (None, "no recorded conversation matches")
    assert await stack.texts() == ["one|", "two|"]


async def test_seeds_differ_by_turn_and_session_and_repeat_on_replay(stack: Stack) -> None:
    for session_id, seed in (("a", 1), ("b", 1), ("c", 2)):
        handle = await stack.open(session_id, seed)
        stack.engine.replies = ["x"]
        await stack.chat(handle, USER, await stack.chat(handle, USER), USER)
    seeds = [request["sampling_params"]["sampling_seed"] for request in stack.engine.requests]
    assert seeds[0:2] == seeds[2:4]
    assert len({seeds[0], seeds[1], seeds[4], seeds[5]}) == 4


async def test_replay_serves_recorded_turns_and_trains_the_last_attempt_only(stack: Stack) -> None:
    """An episode that is started over: at no engine cost as far as its messages agree, then it branches."""
    stack.engine.replies = ["one", "two", "three", "new three", "x"]
    handle = await stack.open()
    one = await stack.chat(handle, USER)
    two = await stack.chat(handle, USER, one, USER)
    await stack.chat(handle, USER, one, USER, two, {"role": "user", "content": "weather at 9"})
    again = await stack.open(attempt=1)
    assert again.num_turns == 3
    stale, handle = handle, again
    assert await stack.chat(handle, USER) == one
    assert await stack.chat(handle, USER, one, USER) == two
    assert len(stack.engine.requests) == 3
    assert await stack.texts() == ["one|two|"]
    await stack.chat(handle, USER, one, USER, two, {"role": "user", "content": "weather at 10"})
    assert await stack.texts() == ["one|two|new three|"]
    turns = (await stack.client.describe("s"))["turns"]
    assert [turn["live"] for turn in turns] == [True, True, False, True]
    # A12: what the attempt that was given up still says is refused, and changes nothing.
    late = await stack.post(stale, USER, one, USER, two, {"role": "user", "content": "late"})
    assert late.status_code == 409
    assert "later one has taken over" in late.text
    with pytest.raises(ServerStatusError, match="409"):
        await stack.open(attempt=0)
    assert await stack.texts() == ["one|two|new three|"]


_AGENT = """import json, sys, urllib.request
url, key = sys.argv[1:]
messages = [{"role": "user", "content": "hi"}]
opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
for turn in range(50):
    body = json.dumps({"model": "m", "messages": messages}).encode()
    headers = {"Authorization": "Bearer " + key, "Content-Type": "application/json"}
    request = urllib.request.Request(url + "/chat/completions", body, headers)
    with opener.open(request, timeout=60) as answer:
        messages.append(json.load(answer)["choices"][0]["message"])
    messages.append({"role": "user", "content": "turn %d" % turn})
"""


async def test_a_worker_killed_at_turn_40_of_50_costs_no_token_but_the_one_in_flight(stack: Stack) -> None:
    """The agent is a process of its own, killed with a call in flight; its next attempt starts from the beginning."""
    stack.engine.replies = [f"reply {turn}" for turn in range(50)]
    gate = asyncio.Event()

    def hold_the_next(answer: dict[str, Any]) -> dict[str, Any]:
        stack.engine.gate = gate if len(stack.engine.requests) >= 40 else None
        return answer

    stack.engine.mangle = hold_the_next
    handle = await stack.open(attempt=0)
    worker = await asyncio.create_subprocess_exec(sys.executable, "-c", _AGENT, handle.base_url, handle.api_key)
    await stack.engine.await_requests(41)
    worker.kill()
    await worker.wait()
    handle = await stack.open(attempt=1)
    assert handle.num_turns == 40
    gate.set()
    worker = await asyncio.create_subprocess_exec(sys.executable, "-c", _AGENT, handle.base_url, handle.api_key)
    assert await worker.wait() == 0
    assert len(stack.engine.requests) == 50  # the one in flight was joined, or found recorded
    assert await stack.texts() == ["".join(f"reply {turn}|" for turn in range(50))]
    turns = (await stack.client.describe("s"))["turns"]
    assert isinstance(turns, list)
    assert {turn["attempt"] for turn in turns} == {1}


async def test_a_call_in_flight_belongs_to_its_attempt_unless_the_next_one_joins_it(stack: Stack) -> None:
    handle = await stack.open()
    await stack.chat(handle, {"role": "user", "content": "first"})
    stack.engine.gate = asyncio.Event()
    stale, joined = USER, {"role": "user", "content": "again"}
    calls = [asyncio.create_task(stack.post(handle, message)) for message in (stale, joined)]
    await stack.engine.await_requests(3)
    handle = await stack.open(attempt=1)
    calls.append(asyncio.create_task(stack.post(handle, joined)))
    await asyncio.wait(calls, timeout=0.1)
    stack.engine.gate.set()
    answers = [(await call).json()["everroll"]["replayed"] for call in calls]
    assert answers == [False, False, True]
    turns = (await stack.client.describe("s"))["turns"]
    live = {turn["messages"][0]["content"]: turn["live"] for turn in turns}
    assert live == {"first": False, "hi": False, "again": True}


async def test_opening_again_is_idempotent_and_a_later_attempt_starts_from_nothing(stack: Stack) -> None:
    handle = await stack.open()
    await stack.chat(handle, USER)
    assert (await stack.open()).api_key == handle.api_key
    assert await stack.texts() == ["one|"]
    await stack.open(attempt=5)
    empty = await stack.client.collect("s", None, {})
    assert isinstance(empty, EmptySamples)
    assert empty.cause_kind is CauseKind.NO_RECORDS


async def test_opening_again_with_other_values_is_refused(stack: Stack) -> None:
    await stack.open()
    for changed in ({"sampling": SamplingSpec(temperature=0.1)}, {"seed": 9}):
        with pytest.raises(ServerStatusError) as caught:
            await stack.open(**changed)  # type: ignore[arg-type]
        assert caught.value.status == 409


async def test_collecting_is_deterministic_and_carries_metadata(stack: Stack) -> None:
    handle = await stack.open()
    reply = await stack.chat(handle, USER)
    await stack.chat(handle, USER, reply, USER)
    collected = [await stack.client.collect("s", 50, {"b": 1, "a": [1.5]}) for _ in range(3)]
    assert len({entry.body for entry in collected if isinstance(entry, CollectedSamples)}) == 1
    empty = await stack.client.collect("s", 3, {})
    assert isinstance(empty, EmptySamples)
    assert empty.cause_kind is CauseKind.ALL_TRUNCATED


async def test_a_released_session_takes_no_turns_but_keeps_its_records(stack: Stack) -> None:
    handle = await stack.open()
    reply = await stack.chat(handle, USER)
    before = await stack.client.collect("s", None, {})
    assert isinstance(before, CollectedSamples)
    for session_id in ("s", "s", "never-seen"):
        await stack.client.release(session_id)
    for messages in ((USER,), (USER, reply, USER)):
        response = await stack.post(handle, *messages)
        assert (response.status_code, response.json()["error"]["type"]) == (410, "released_session")
    with pytest.raises(ServerStatusError, match="released"):
        await stack.open()
    after = await stack.client.collect("s", None, {})
    assert isinstance(after, CollectedSamples)
    assert after.body == before.body
    described = await stack.client.describe("s")
    expected = digest_samples("s", before.sample_set.samples, None)
    assert described["digest"] == expected.model_dump()
    assert described["released_at"] is not None


async def test_releasing_ends_a_call_in_flight(stack: Stack) -> None:
    handle = await stack.open()
    stack.engine.gate = asyncio.Event()
    call = asyncio.create_task(stack.post(handle, USER))
    await stack.engine.await_requests(1)
    await stack.client.release("s")
    assert (await call).status_code == 410
    assert await stack.num_turns() == 0


async def test_keys_open_their_own_session_only(stack: Stack, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "everroll")
    mine, other = await stack.open("mine"), await stack.open("other")
    assert mine.api_key != other.api_key
    assert (await stack.post(mine, USER, key=other.api_key)).status_code == 401
    assert (await stack.post(mine, USER, key="wrong")).status_code == 401
    assert (await stack.post(mine, USER, key=ADMIN_KEY)).status_code == 200
    base = stack.client.base_url
    for method, path in (
        ("POST", "/sessions"),
        ("GET", "/sessions/mine"),
        ("POST", "/sessions/mine/samples"),
        ("DELETE", "/sessions/mine"),
        ("GET", "/info"),
    ):
        for headers in ({"Authorization": f"Bearer {mine.api_key}"}, {}):
            answer = await stack.http.request(method, base + path, headers=headers)
            assert answer.status_code == 401, (method, path)
    assert mine.api_key not in repr(mine)
    assert "this needs the session's own API key" in caplog.text
    assert mine.api_key not in caplog.text
    assert other.api_key not in caplog.text


async def test_unknown_session(stack: Stack) -> None:
    handle = await stack.open("known")
    url = f"{stack.client.base_url}/sessions/unknown/v1/chat/completions"
    body = {"messages": [USER]}
    answer = await stack.http.post(url, json=body, headers={"Authorization": f"Bearer {ADMIN_KEY}"})
    assert answer.status_code == 404
    with pytest.raises(ServerStatusError, match="404"):
        await stack.client.collect("unknown", None, {})
    assert handle.num_turns == 0


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/sessions", b"no json"),
        ("/sessions", b"[]"),
        ("/sessions", b'{"session_id": "../x"}'),
        ("/sessions", b'{"sampling": {"temperature": 0}}'),
        ("/sessions", b'{"samplin": {}}'),
        ("/sessions/s/samples", b'{"max_seq_len": 0}'),
        ("/sessions/s/v1/chat/completions", b'{"messages": [{"role": "user", "content": NaN}]}'),
        ("/sessions/s/v1/chat/completions", b""),
    ],
)
async def test_malformed_bodies(stack: Stack, path: str, body: bytes) -> None:
    await stack.open()
    headers = {"Authorization": f"Bearer {ADMIN_KEY}"}
    answer = await stack.http.post(stack.client.base_url + path, content=body, headers=headers)
    assert answer.status_code == 400
    assert answer.json()["error"]["type"] == "invalid_request_error"


async def test_limits_on_bodies_and_turns(
    engine: FakeEngine, renderer: ChatRenderer, model_dir: Path, tmp_path: Path
) -> None:
    limits = {"max_body_bytes": 500, "max_turns": 2}
    async with run_stack(renderer, model_dir, tmp_path / "j.db", [engine], **limits) as stack:
        handle = await stack.open()
        assert (await stack.post(handle, {"role": "user", "content": "x" * 500})).status_code == 413

        async def chunks() -> AsyncIterator[bytes]:
            for _ in range(10):
                yield b"x" * 100

        headers = {"Authorization": f"Bearer {handle.api_key}"}
        answer = await stack.http.post(f"{handle.base_url}/chat/completions", content=chunks(), headers=headers)
        assert answer.status_code == 413
        for text in ("a", "b"):
            await stack.chat(handle, {"role": "user", "content": text})
        refused = await stack.post(handle, {"role": "user", "content": "c"})
        assert (refused.status_code, "limit of 2 turns" in refused.text) == (400, True)


async def test_a_body_that_does_not_arrive_is_given_up(
    engine: FakeEngine, renderer: ChatRenderer, model_dir: Path, tmp_path: Path
) -> None:
    """CASES B1, the other way round: no wait without a bound."""
    async with run_stack(renderer, model_dir, tmp_path / "j.db", [engine], body_timeout_seconds=0.2) as stack:
        host, port = stack.client.base_url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        head = (
            f"POST /sessions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {ADMIN_KEY}\r\nContent-Length: 10\r\n\r\n{{"
        )
        writer.write(head.encode())
        assert (await reader.readline()).startswith(b"HTTP/1.1 408")
        writer.close()


async def test_a_bug_is_loud_and_says_what_it_was(
    stack: Stack, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    handle = await stack.open()

    def broken(*_: Any) -> Any:
        raise KeyError("surprise")

    monkeypatch.setattr(ChatRenderer, "parse", broken)
    response = await stack.post(handle, USER)
    assert response.status_code == 500
    assert response.json()["error"]["message"] == "KeyError: 'surprise'"
    assert "Traceback" in caplog.text
    assert await stack.num_turns() == 0


async def test_sessions_beyond_the_cache_are_read_from_the_journal(
    engine: FakeEngine, renderer: ChatRenderer, model_dir: Path, tmp_path: Path
) -> None:
    async with run_stack(renderer, model_dir, tmp_path / "j.db", [engine], max_cached_sessions=1) as stack:
        handles = [await stack.open(f"s{index}") for index in range(3)]
        replies = [await stack.chat(handle, USER) for handle in handles]
        engine.replies = ["more"]
        for handle, reply in zip(handles, replies, strict=True):
            await stack.chat(handle, USER, reply, USER)
        assert [await stack.texts(f"s{index}") for index in range(3)] == [["one|more|"], ["two|more|"], ["three|more|"]]


async def test_info_and_models(stack: Stack, model_dir: Path) -> None:
    info = await stack.client.info()
    assert (info["model_path"], info["renderer"]) == (str(model_dir), "qwen3")
    assert len(str(info["tokenizer_fingerprint"])) == 64
    handle = await stack.open()
    headers = {"Authorization": f"Bearer {handle.api_key}"}
    models = (await stack.http.get(f"{handle.base_url}/models", headers=headers)).json()
    assert [model["id"] for model in models["data"]] == [model_dir.name]


async def test_streaming_tells_the_same_as_an_answer_in_one_piece(stack: Stack) -> None:
    handle = await stack.open()
    whole = (await stack.post(handle, USER)).json()
    response = await stack.post(handle, USER, stream=True, stream_options={"include_usage": True})
    assert response.headers["content-type"].startswith("text/event-stream")
    lines = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    chunks = [json.loads(line) for line in lines[:-1]]
    assert "".join(c["choices"][0]["delta"].get("content") or "" for c in chunks[:-1]) == "one"
    assert chunks[-2]["choices"][0]["finish_reason"] == "stop"
    assert (chunks[-1]["choices"], chunks[-1]["usage"]) == ([], whole["usage"])


REWRITING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{{ '...' if m.role == 'assistant' and not loop.last else m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


async def test_d4_a_rewriting_template_branches_visibly_once_rerendering_was_chosen(
    engine: FakeEngine, tmp_path: Path
) -> None:
    directory = write_model_dir(tmp_path / "model")
    (directory / "chat_template.jinja").write_text(REWRITING)
    section = ModelSection(path=str(directory), renderer="default", history="rerender")
    async with run_stack(load_renderer(section), directory, tmp_path / "j.db", [engine]) as stack:
        handle = await stack.open()
        reply = await stack.chat(handle, USER)
        await stack.chat(handle, USER, reply, {"role": "user", "content": "more"})
        turn = (await stack.client.describe("s"))["turns"][1]
        assert (turn["follows"], turn["extends"]) == (0, False)
        assert re.fullmatch(r"rendered again: differs from turn 0 at token \d+ of \d+", turn["note"])
        assert await stack.texts() == ["one|", "two|"]


async def test_a_template_of_the_checkpoints_own_extends(engine: FakeEngine, tmp_path: Path) -> None:
    directory = write_model_dir(tmp_path / "model")
    (directory / "chat_template.jinja").write_text(REWRITING.replace("'...' if", "m.content if"))
    section = ModelSection(path=str(directory), renderer="default")
    async with run_stack(load_renderer(section), directory, tmp_path / "j.db", [engine]) as stack:
        handle = await stack.open()
        reply = await stack.chat(handle, USER)
        await stack.chat(handle, USER, reply, {"role": "user", "content": "more"})
        assert await stack.texts() == ["one|two|"]


async def test_attempts_are_told_apart_without_a_clock(stack: Stack) -> None:
    """A workflow that was reset counts from 1 again, and takes over; what it took over from is refused, and its key."""

    async def open_attempt(number: int, series: str) -> SessionHandle:
        return await stack.client.create("s", SAMPLING, 1, number, series=series)

    stack.engine.replies = ["one", "x"]
    first = await open_attempt(1, "a")
    third = await open_attempt(3, "a")
    await stack.chat(third, USER)
    assert (await open_attempt(3, "a")).api_key == third.api_key
    reset = await open_attempt(1, "b")
    assert len({first.api_key, third.api_key, reset.api_key}) == 3
    with pytest.raises(ServerStatusError, match="409"):
        await open_attempt(4, "a")
    assert (await stack.post(third, USER)).status_code == 409
    await stack.chat(reset, USER)
    assert len(stack.engine.requests) == 1, "what was recorded is served again"
    assert await stack.texts() == ["one|"]
