"""New weights and pauses, with requests in flight."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest
import torch

from everroll.engines.base import (
    Completion,
    EngineError,
    EngineRejectedError,
    EngineUnavailableError,
    GenerateRequest,
    PauseMode,
    WeightUpdateError,
)
from everroll.engines.embedded.runner import ModelRunner
from everroll.engines.sglang import SGLangEngine
from tests.engine_helpers import (
    Reference,
    StepGate,
    change_checkpoint,
    engine_client,
    logprobs_after_update,
    make_checkpoint,
    running_engine,
    wait_for_info,
)

PROMPT = list(range(40, 75))
LONG = 250
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two versions of the same model."""
    root = tmp_path_factory.mktemp("versions")
    return make_checkpoint(root / "0", seed=0), make_checkpoint(root / "1", seed=1)


@pytest.fixture(scope="module")
def references(checkpoints: tuple[Path, Path]) -> tuple[Reference, Reference]:
    return Reference(checkpoints[0]), Reference(checkpoints[1])


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> StepGate:
    return StepGate(monkeypatch)


@pytest.fixture
async def engine(checkpoints: tuple[Path, Path], gate: StepGate) -> AsyncIterator[SGLangEngine]:
    with running_engine(checkpoints[0]) as url:
        async with engine_client(url) as client:
            yield client


def start_long(engine: SGLangEngine, gate: StepGate, count: int = 1) -> list[asyncio.Task[Completion]]:
    """Requests that are in the middle of their tokens when the test has something to do to them."""
    gate.arm(count)
    return [
        asyncio.ensure_future(engine.generate(GenerateRequest(f"long-{index}", [*PROMPT, index], LONG, seed=index)))
        for index in range(count)
    ]


async def test_in_place_requests_go_on_with_new_weights_over_their_old_keys(
    engine: SGLangEngine, gate: StepGate, checkpoints: tuple[Path, Path], references: tuple[Reference, Reference]
) -> None:
    calls = start_long(engine, gate, 3)
    await gate.open()
    await engine.pause("in_place")
    assert not any(call.done() for call in calls)
    await engine.update_weights(str(checkpoints[1]), 1)
    assert await engine.weight_version() == 1
    await engine.resume()
    for index, completion in enumerate(await asyncio.gather(*calls)):
        versions = completion.weight_versions
        num_old = versions.count(0)
        assert versions == [0] * num_old + [1] * (LONG - num_old)
        assert 0 < num_old < LONG
        assert completion.weight_version == 1
        prompt, tokens = [*PROMPT, index], completion.token_ids
        old, new = references
        assert completion.logprobs[:num_old] == pytest.approx(old.logprobs(prompt, tokens[:num_old]), abs=TOLERANCE)
        sequence, num_computed = prompt + tokens, len(prompt) + num_old - 1
        expected = logprobs_after_update(old, new, sequence[:num_computed], sequence[num_computed:])
        assert completion.logprobs[num_old:] == pytest.approx(expected, abs=TOLERANCE)


async def test_an_update_needs_no_pause(engine: SGLangEngine, gate: StepGate, checkpoints: tuple[Path, Path]) -> None:
    (call,) = start_long(engine, gate)
    await gate.open()
    await engine.update_weights(str(checkpoints[1]), 1)
    assert set((await call).weight_versions) == {0, 1}


async def test_retracted_requests_are_computed_anew_with_new_weights(
    engine: SGLangEngine, gate: StepGate, checkpoints: tuple[Path, Path], references: tuple[Reference, Reference]
) -> None:
    calls = start_long(engine, gate, 2)
    await gate.open()
    await engine.pause("retract")
    info = await wait_for_info(engine.base_url, lambda info: info["is_paused"])
    assert (info["num_running"], info["num_waiting"]) == (0, 2)
    await engine.update_weights(str(checkpoints[1]), 1)
    await engine.resume()
    for index, completion in enumerate(await asyncio.gather(*calls)):
        num_old = completion.weight_versions.count(0)
        assert 0 < num_old < LONG
        prompt = [*PROMPT, index]
        expected = references[1].logprobs(prompt, completion.token_ids)
        assert completion.logprobs[num_old:] == pytest.approx(expected[num_old:], abs=TOLERANCE)


async def test_pausing_in_mode_abort_ends_what_runs_and_holds_what_comes(engine: SGLangEngine, gate: StepGate) -> None:
    calls = start_long(engine, gate, 2)
    await gate.open()
    await engine.pause("abort")
    for call in calls:
        with pytest.raises(EngineUnavailableError, match="paused in mode abort"):
            await call
    late = asyncio.ensure_future(engine.generate(GenerateRequest("late", [1, 2], 3)))
    await wait_for_info(engine.base_url, lambda info: info["num_waiting"] == 1)
    assert not late.done()
    await engine.resume()
    assert len((await late).token_ids) == 3


@pytest.mark.parametrize("mode", ["in_place", "retract"])
async def test_a_pause_changes_nothing_but_time(engine: SGLangEngine, gate: StepGate, mode: PauseMode) -> None:
    request = GenerateRequest("same", PROMPT, LONG, seed=3)
    undisturbed = await engine.generate(request)
    gate.arm(1)
    call = asyncio.ensure_future(engine.generate(request))
    await gate.open()
    await engine.pause(mode)
    await engine.resume()
    paused = await call
    assert paused.token_ids == undisturbed.token_ids
    assert paused.logprobs == pytest.approx(undisturbed.logprobs, abs=TOLERANCE)


async def test_new_requests_never_use_keys_of_older_weights(
    engine: SGLangEngine, gate: StepGate, checkpoints: tuple[Path, Path], references: tuple[Reference, Reference]
) -> None:
    request = GenerateRequest("again", PROMPT, 20, seed=1)
    await engine.generate(request)
    assert (await engine.generate(request)).num_cached_tokens == 32
    (call,) = start_long(engine, gate)
    await gate.open()
    await engine.update_weights(str(checkpoints[1]), 1)
    after = await engine.generate(request)
    assert after.num_cached_tokens == 0
    assert after.logprobs == pytest.approx(references[1].logprobs(PROMPT, after.token_ids), abs=TOLERANCE)
    # The request that lived through the update has mixed keys: they must not be found by its own continuation.
    mixed = await call
    prompt = [*PROMPT, 0, *mixed.token_ids[:100]]
    follower = await engine.generate(GenerateRequest("follower", prompt, 5, seed=1))
    assert follower.num_cached_tokens == 32
    assert follower.logprobs == pytest.approx(references[1].logprobs(prompt, follower.token_ids), abs=TOLERANCE)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (None, "no such directory"),
        ({"model.norm.weight": torch.ones(7)}, r"shape \[7\]"),
        ({"model.norm.weight": torch.full((32,), float("nan"))}, "not finite"),
    ],
)
async def test_refused_weights_leave_the_old_ones_serving(
    engine: SGLangEngine,
    checkpoints: tuple[Path, Path],
    tmp_path: Path,
    changes: dict[str, torch.Tensor] | None,
    reason: str,
) -> None:
    request = GenerateRequest("same", PROMPT, 20, seed=1)
    before = await engine.generate(request)
    bad = tmp_path / "bad"
    if changes is not None:
        change_checkpoint(checkpoints[1], bad, changes)
    with pytest.raises(WeightUpdateError, match=reason) as caught:
        await engine.update_weights(str(bad), 5)
    assert caught.value.status == 400
    after = await engine.generate(request)
    assert after.token_ids == before.token_ids
    assert after.weight_versions == [0] * 20
    assert await engine.weight_version() == 0


async def test_a_version_that_is_no_number_is_refused(engine: SGLangEngine, checkpoints: tuple[Path, Path]) -> None:
    body = {"model_path": str(checkpoints[1]), "weight_version": "step-5"}
    url = f"{engine.base_url}/update_weights_from_disk"
    async with aiohttp.ClientSession() as session, session.post(url, json=body) as response:
        assert response.status == 400
        assert "weight_version" in (await response.json())["error"]["message"]
    assert await engine.weight_version() == 0


async def test_the_answer_counts_requests_in_flight(
    engine: SGLangEngine, gate: StepGate, checkpoints: tuple[Path, Path]
) -> None:
    calls = start_long(engine, gate, 2)
    await gate.open()
    await engine.pause("in_place")
    body = {"model_path": str(checkpoints[1]), "weight_version": "1", "abort_all_requests": False}
    url = f"{engine.base_url}/update_weights_from_disk"
    async with aiohttp.ClientSession() as session:
        async with session.post(url, json=body) as response:
            answer = await response.json()
        async with session.post(url, json=body | {"abort_all_requests": True}) as response:
            aborting = await response.json()
    assert (answer["success"], answer["num_paused_requests"]) == (True, 2)
    assert (aborting["success"], aborting["num_paused_requests"]) == (True, 0)
    results = await asyncio.gather(*calls, return_exceptions=True)
    assert [type(result) for result in results] == [EngineUnavailableError] * 2
    await engine.resume()


async def test_abort_by_id_spares_the_others(engine: SGLangEngine, gate: StepGate) -> None:
    calls = start_long(engine, gate, 2)
    await gate.open()
    await engine.abort_request("long-1")
    await engine.abort_request("unknown")
    with pytest.raises(EngineUnavailableError, match="aborted by request"):
        await calls[1]
    assert len((await calls[0]).token_ids) == LONG


async def test_flushing_the_cache_waits_for_no_one(engine: SGLangEngine, gate: StepGate) -> None:
    url = f"{engine.base_url}/flush_cache"
    request = GenerateRequest("again", PROMPT, 5, seed=1)
    await engine.generate(request)
    async with aiohttp.ClientSession() as session:
        async with session.post(url) as response:
            assert response.status == 200
        assert (await engine.generate(request)).num_cached_tokens == 0
        (call,) = start_long(engine, gate)
        await gate.open()
        await engine.pause("in_place")
        async with session.post(url) as response:
            assert response.status == 400
            assert "unfinished" in await response.text()
    await engine.resume()
    assert len((await call).token_ids) == LONG


@pytest.mark.parametrize("name", ["model.norm.weight", "model.layers.1.input_layernorm.weight"])
async def test_weights_that_blow_up_abort_loudly_and_leave_no_trace(
    engine: SGLangEngine,
    checkpoints: tuple[Path, Path],
    references: tuple[Reference, Reference],
    tmp_path: Path,
    name: str,
) -> None:
    huge = change_checkpoint(checkpoints[0], tmp_path / "huge", {name: torch.full((32,), 3e38)})
    await engine.update_weights(str(huge), 1)
    with pytest.raises(EngineError, match="not finite"):
        await engine.generate(GenerateRequest("nan", PROMPT * 3, 5))
    await engine.update_weights(str(checkpoints[0]), 2)
    fine = await engine.generate(GenerateRequest("fine", PROMPT, 5))
    assert fine.logprobs == pytest.approx(references[0].logprobs(PROMPT, fine.token_ids), abs=TOLERANCE)


@pytest.mark.parametrize("method", ["prefill", "decode"])
async def test_a_forward_that_raises_fails_its_requests_and_not_the_engine(
    engine: SGLangEngine, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    request = GenerateRequest("same", PROMPT, 5, seed=1)
    before = await engine.generate(request)
    with monkeypatch.context() as broken:
        broken.setattr(ModelRunner, method, _raise_out_of_memory)
        for _ in range(3):
            calls = [engine.generate(GenerateRequest(f"r{index}", [*PROMPT, index, 1], 5)) for index in range(4)]
            results = await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), 60)
            assert [type(result) for result in results] == [EngineUnavailableError] * 4
            assert all("out of memory" in str(result) and result.trouble == "failed" for result in results)  # type: ignore[union-attr]
        with pytest.raises(EngineUnavailableError, match="steps failed"):
            await engine.check_health()
    after = await engine.generate(request)
    assert after.token_ids == before.token_ids
    assert after.logprobs == pytest.approx(before.logprobs, abs=TOLERANCE)
    await engine.check_health()


def _raise_out_of_memory(*_: object) -> None:
    raise RuntimeError("out of memory")


async def test_a_bad_pause_mode_is_refused(engine: SGLangEngine) -> None:
    with pytest.raises(EngineRejectedError, match="mode"):
        await engine.pause("sideways")  # type: ignore[arg-type]
