"""The embedded engine over its real wire: numbers, reproducibility, and requests that come and go."""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import pytest

from everroll.engines.base import Completion, EngineRejectedError, GenerateRequest
from everroll.engines.embedded.runner import ModelRunner
from everroll.engines.embedded.scheduler import Forward
from everroll.engines.sglang import SGLangEngine, build_generate_body
from tests.engine_helpers import (
    MAX_CONTEXT,
    VOCAB_SIZE,
    Reference,
    engine_client,
    make_checkpoint,
    running_engine,
    wait_for_info,
)

ARCHITECTURES = ["qwen3", "llama", "gpt2", "mistral", "qwen3_sliding"]
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("engine") / "qwen3")


@pytest.fixture(scope="module")
def url(checkpoint: Path) -> Iterator[str]:
    with running_engine(checkpoint) as address:
        yield address


def make_requests(count: int, seed: int) -> list[GenerateRequest]:
    """Prompts of many lengths that partly begin alike, and different temperatures and lengths."""
    rng = random.Random(seed)
    stem = [rng.randrange(VOCAB_SIZE) for _ in range(400)]
    requests = []
    for index in range(count):
        shared = rng.choice([0, 0, 16, 40, 100, 250])
        own = rng.choice([1, 2, 15, 16, 17, 33, 90])
        requests.append(
            GenerateRequest(
                rid=f"{seed}-{index}",
                token_ids=stem[:shared] + [rng.randrange(VOCAB_SIZE) for _ in range(own)],
                max_new_tokens=rng.randrange(1, 40),
                temperature=rng.choice([0.6, 1.0, 1.0, 1.5]),
                seed=rng.randrange(2**62),
            )
        )
    return requests


async def generate_staggered(
    engine: SGLangEngine, requests: list[GenerateRequest], spread_seconds: float
) -> list[Completion]:
    """Send requests spread over time, so that they join and leave each other's batches."""
    rng = random.Random(len(requests))

    async def one(request: GenerateRequest) -> Completion:
        await asyncio.sleep(rng.random() * spread_seconds)
        return await engine.generate(request)

    return list(await asyncio.gather(*map(one, requests)))


def check_logprobs(reference: Reference, requests: list[GenerateRequest], completions: list[Completion]) -> None:
    for request, completion in zip(requests, completions, strict=True):
        expected = reference.logprobs(request.token_ids, completion.token_ids, request.temperature)
        assert completion.logprobs == pytest.approx(expected, abs=TOLERANCE), request.rid


@pytest.mark.parametrize("architecture", ARCHITECTURES)
async def test_logprobs_equal_a_plain_forward_pass(architecture: str, tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path / architecture, architecture)
    requests = make_requests(24, seed=1)
    with running_engine(checkpoint) as url:
        async with engine_client(url) as engine:
            first = await generate_staggered(engine, requests, 0.1)
            again = await generate_staggered(engine, requests, 0.1)
    reference = Reference(checkpoint)
    check_logprobs(reference, requests, first)
    check_logprobs(reference, requests, again)
    assert sum(completion.num_cached_tokens for completion in again) > 1000
    assert {completion.finish_reason for completion in first} == {"length"}


async def test_a_conversation_finds_its_own_past(url: str, checkpoint: Path) -> None:
    rng = random.Random(7)
    prompt = [rng.randrange(VOCAB_SIZE) for _ in range(50)]
    async with engine_client(url) as engine:
        one = GenerateRequest("turn1", prompt, 30, seed=1)
        first = await engine.generate(one)
        extended = prompt + first.token_ids + [5, 6, 7]
        two = GenerateRequest("turn2", extended, 10, seed=2)
        second = await engine.generate(two)
    assert second.num_cached_tokens == (50 + 30 - 1) // 16 * 16
    check_logprobs(Reference(checkpoint), [one, two], [first, second])


async def test_a_seed_decides_the_tokens_whatever_else_runs(url: str, checkpoint: Path) -> None:
    request = GenerateRequest("seeded", [3, 1, 4, 1, 5], 40, seed=42)
    with running_engine(checkpoint) as other_url:
        async with engine_client(url) as engine, engine_client(other_url) as other:
            alone = await other.generate(request)
            crowd = asyncio.gather(*map(engine.generate, make_requests(16, seed=2)))
            crowded = await engine.generate(request)
            await crowd
            unseeded = [await engine.generate(GenerateRequest("free", [3, 1, 4, 1, 5], 40)) for _ in range(2)]
    assert crowded.token_ids == alone.token_ids
    assert crowded.logprobs == pytest.approx(alone.logprobs, abs=TOLERANCE)
    assert unseeded[0].token_ids != unseeded[1].token_ids


@pytest.mark.parametrize("architecture", ["qwen3", "gpt2"])
async def test_deterministic_results_do_not_depend_on_the_batch_bit_for_bit(architecture: str, tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path / "model", architecture)
    requests = make_requests(12, seed=3)
    with running_engine(checkpoint, deterministic=True, max_batch_size=24) as url:
        async with engine_client(url) as engine:
            alone = [await engine.generate(request) for request in requests]
    with running_engine(checkpoint, deterministic=True, max_batch_size=24) as url:
        async with engine_client(url) as engine:
            crowded = await generate_staggered(engine, requests, 0.2)
            cached = await generate_staggered(engine, list(reversed(requests)), 0.05)
    assert any(completion.num_cached_tokens for completion in cached)
    for one, other, third in zip(alone, crowded, reversed(cached), strict=True):
        assert one.token_ids == other.token_ids == third.token_ids
        assert one.logprobs == other.logprobs == third.logprobs
    check_logprobs(Reference(checkpoint), requests, alone)


async def test_deterministic_turns_do_not_depend_on_what_the_engine_remembers(tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path / "model")
    prompt = [index % VOCAB_SIZE for index in range(100)]
    with running_engine(checkpoint, deterministic=True) as url:
        async with engine_client(url) as engine:
            first = await engine.generate(GenerateRequest("turn1", prompt, 60, seed=1))
            follow_up = GenerateRequest("turn2", [*prompt, *first.token_ids, 5, 6], 30, seed=2)
            remembered = await engine.generate(follow_up)
    with running_engine(checkpoint, deterministic=True) as url:
        async with engine_client(url) as engine:
            fresh = await engine.generate(follow_up)
    assert remembered.num_cached_tokens > fresh.num_cached_tokens == 0
    assert remembered.token_ids == fresh.token_ids
    assert remembered.logprobs == fresh.logprobs


async def test_stop_tokens_end_a_completion_and_belong_to_it(url: str) -> None:
    async with engine_client(url) as engine:
        free = await engine.generate(GenerateRequest("free", [1, 2, 3], 30, seed=9))
        stop = free.token_ids[10]
        stopped = await engine.generate(GenerateRequest("stop", [1, 2, 3], 30, seed=9, stop_token_ids=(stop,)))
    assert stopped.token_ids == free.token_ids[: free.token_ids.index(stop) + 1]
    assert stopped.finish_reason == "stop"


async def test_greedy_and_top_k_one_agree(url: str) -> None:
    async with engine_client(url) as engine:
        greedy = await engine.generate(GenerateRequest("a", [1, 2, 3], 20, temperature=0.0))
        top = await engine.generate(GenerateRequest("b", [1, 2, 3], 20, top_k=1))
    assert greedy.token_ids == top.token_ids
    assert greedy.logprobs == pytest.approx(top.logprobs, abs=TOLERANCE)


async def test_more_requests_than_rows_queue_and_all_finish(checkpoint: Path) -> None:
    requests = make_requests(12, seed=4)
    with running_engine(checkpoint, max_batch_size=3) as url:
        async with engine_client(url) as engine:
            completions = await asyncio.gather(*map(engine.generate, requests))
    check_logprobs(Reference(checkpoint), requests, completions)


async def test_long_prompts_in_chunks_beside_running_requests(checkpoint: Path) -> None:
    requests = make_requests(16, seed=5)
    with running_engine(checkpoint, prefill_chunk_tokens=32) as url:
        async with engine_client(url) as engine:
            completions = await generate_staggered(engine, requests, 0.1)
    check_logprobs(Reference(checkpoint), requests, completions)


async def test_requests_share_their_forward_passes(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    decode, num_rows = ModelRunner.decode, []

    def counted(runner: ModelRunner, forward: Forward) -> tuple[list[int], list[float]]:
        num_rows.append(len(forward.sequences))
        return decode(runner, forward)

    monkeypatch.setattr(ModelRunner, "decode", counted)
    requests = [GenerateRequest(f"fast-{index}", [index, 1, 2], 24, seed=index) for index in range(32)]
    async with engine_client(url) as engine:
        completions = await asyncio.gather(*map(engine.generate, requests))
    num_tokens = sum(len(completion.token_ids) for completion in completions)
    assert sum(num_rows) == num_tokens
    assert len(num_rows) <= num_tokens / 5


async def test_prompts_up_to_the_context_and_not_beyond(url: str) -> None:
    async with engine_client(url) as engine:
        last = await engine.generate(GenerateRequest("long", [1] * (MAX_CONTEXT - 1), 10))
        assert len(last.token_ids) == 1
        assert last.finish_reason == "length"
        with pytest.raises(EngineRejectedError, match="input_ids has 512 tokens; the context is 512 tokens"):
            await engine.generate(GenerateRequest("longer", [1] * MAX_CONTEXT, 1))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"input_ids": []}, "input_ids"),
        ({"input_ids": [1, VOCAB_SIZE]}, r"input_ids\[1\] is 97; the vocabulary has 97"),
        ({"input_ids": [[1], [2]]}, "input_ids"),
        ({"input_ids": ["1"]}, "input_ids"),
        ({"input_ids": [-1]}, "input_ids"),
        ({"stream": True}, "stream"),
        ({"logprob_start_len": 0}, "logprob_start_len"),
        ({"sampling_params": {"min_p": 0.1}}, "min_p"),
        ({"sampling_params": {"temperture": 1.0}}, "temperture"),
        ({"sampling_params": {"n": 2}}, "n: "),
        ({"sampling_params": {"max_new_tokens": 0}}, "max_new_tokens"),
        ({"sampling_params": {"temperature": float("nan")}}, "temperature"),
    ],
)
async def test_requests_that_cannot_be_served_say_why(url: str, change: dict[str, object], reason: str) -> None:
    body = build_generate_body(GenerateRequest("bad", [1], 1)) | change
    async with aiohttp.ClientSession() as session, session.post(f"{url}/generate", json=body) as response:
        assert response.status == 400
        message = (await response.json())["error"]["message"]
    assert re.search(reason, message), message


async def test_the_body_that_sglang_would_send(url: str) -> None:
    body = build_generate_body(GenerateRequest("r7", [1, 2, 3], 5, stop_token_ids=(96,), seed=1))
    async with aiohttp.ClientSession() as session, session.post(f"{url}/generate", json=body) as response:
        answer = await response.json()
    meta = answer["meta_info"]
    assert set(answer) == {"text", "output_ids", "meta_info"}
    assert answer["text"] == ""
    assert meta["id"] == "r7"
    assert meta["prompt_tokens"] == 3
    assert meta["completion_tokens"] == len(answer["output_ids"]) == len(meta["output_token_logprobs"])
    assert [row[1] for row in meta["output_token_logprobs"]] == answer["output_ids"]
    assert {row[2] for row in meta["output_token_logprobs"]} == {None}
    assert meta["weight_version"] == "0"
    assert meta["finish_reason"] == {"type": "length", "length": 5}


async def test_health_and_model_info_under_both_names(url: str, checkpoint: Path) -> None:
    async with aiohttp.ClientSession() as session:
        for path in ("/health", "/health_generate"):
            async with session.get(url + path) as response:
                assert response.status == 200
        infos = []
        for path in ("/model_info", "/get_model_info"):
            async with session.get(url + path) as response:
                infos.append(await response.json())
    assert infos[0] == infos[1]
    assert infos[0]["model_path"] == str(checkpoint)
    assert infos[0]["is_generation"] is True


async def test_a_client_that_leaves_frees_its_row(url: str) -> None:
    async with engine_client(url) as engine:
        await engine.pause("in_place")
        try:
            calls = [
                asyncio.ensure_future(engine.generate(GenerateRequest(f"gone-{index}", [1, 2], 400)))
                for index in range(3)
            ]
            await wait_for_info(url, lambda info: info["num_waiting"] == 3)
            calls[0].cancel()
            await wait_for_info(url, lambda info: info["num_waiting"] == 2)
        finally:
            await engine.resume()
        await wait_for_info(url, lambda info: info["num_running"] == 2)
        await engine.pause("in_place")
        for call in calls:
            call.cancel()
        info = await wait_for_info(url, lambda info: info["num_running"] == 0)
        assert info["num_waiting"] == 0
        await engine.resume()
        assert len((await engine.generate(GenerateRequest("next", [1, 2], 3))).token_ids) == 3
    await asyncio.gather(*calls, return_exceptions=True)


async def test_a_full_queue_aborts_instead_of_growing(checkpoint: Path) -> None:
    with running_engine(checkpoint, max_queued_requests=1) as url:
        async with engine_client(url) as engine, aiohttp.ClientSession() as session:
            await engine.pause("in_place")
            call = asyncio.ensure_future(engine.generate(GenerateRequest("first", [1], 2)))
            await wait_for_info(url, lambda info: info["num_waiting"] == 1)
            body = build_generate_body(GenerateRequest("second", [1], 2))
            async with session.post(f"{url}/generate", json=body) as response:
                reason = (await response.json())["meta_info"]["finish_reason"]
            await engine.resume()
            await call
    assert reason == {"type": "abort", "message": "the queue is full (1 requests)", "status_code": 503}
