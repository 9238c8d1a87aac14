"""The simulated engine as a process, and a run of the simulated agent through real sessions and real collection."""

from __future__ import annotations

import asyncio
import contextlib
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import pytest

from activities.collection import CollectionActivities, store_group
from activities.episodes import EpisodeActivities
from everroll.agents import AgentClients
from everroll.client import EverrollClient
from everroll.contracts.rollout import DatasetRef, GroupManifest
from everroll.engines.base import EngineUnavailableError, GenerateRequest
from everroll.engines.http import open_client_session
from everroll.engines.sglang import SGLangEngine
from everroll.http_client import build_http_client
from everroll.prompts import DatasetCache, load_dataset
from everroll.store import open_store
from everroll.tokens.renderer import load_renderer
from tests.session_helpers import ADMIN_KEY, FakeEngine, model_section, run_stack, write_model_dir
from tests.simulation import Simulation, build_spec

FIRST_TOKEN = 0.15


@contextlib.contextmanager
def run_engine(model_dir: Path, **options: object) -> Iterator[str]:
    """`everroll simulated-engine`; yields its URL."""
    flags = [part for name, value in options.items() for part in ("--" + name.replace("_", "-"), str(value))]
    command = [sys.executable, "-m", "everroll.cli", "simulated-engine", "--model-path", str(model_dir), "--port", "0"]
    with subprocess.Popen([*command, *flags], stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            found = None
            while found is None:
                line = process.stderr.readline()
                assert line, "the engine ended without a word about its address"
                found = re.search(r"on (http://127\.0\.0\.1:\d+)", line)
            yield found[1]
            process.terminate()
            assert process.wait(20) == 0
        finally:
            if process.poll() is None:
                process.kill()


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model_dir(tmp_path_factory.mktemp("model"))


def ask(rid: str, seed: int, max_new_tokens: int = 200) -> GenerateRequest:
    return GenerateRequest(
        rid=rid,
        token_ids=[1, 2, 3],
        temperature=1.0,
        top_p=1.0,
        top_k=-1,
        max_new_tokens=max_new_tokens,
        stop_token_ids=(5,),
        seed=seed,
    )


async def measure(engine: SGLangEngine, request: GenerateRequest) -> float:
    started = time.monotonic()
    await engine.generate(request)
    return time.monotonic() - started


async def test_it_behaves_as_it_is_told(model_dir: Path) -> None:
    options = {"first_token_seconds": FIRST_TOKEN, "completion_tokens": 20, "completion_p95_tokens": 60}
    with run_engine(model_dir, **options, tokens_per_second=200, max_batch_size=2, update_seconds=0) as url:
        async with open_client_session() as session:
            engine = SGLangEngine(url, session)
            await engine.check_health()
            first, again, other = [await engine.generate(ask(str(n), seed)) for n, seed in enumerate((1, 1, 2))]
            assert first.token_ids == again.token_ids != other.token_ids
            assert first.finish_reason == "stop"
            assert first.token_ids[-1] == 5
            cut = await engine.generate(ask("cut", 1, max_new_tokens=3))
            assert (cut.token_ids, cut.finish_reason) == (first.token_ids[:3], "length")
            expected = FIRST_TOKEN + (len(first.token_ids) - 1) / 200
            assert await measure(engine, ask("timed", 1)) >= expected
            # Four requests over two places take twice as long.
            started = time.monotonic()
            await asyncio.gather(*(engine.generate(ask(f"queued {n}", 1)) for n in range(4)))
            assert time.monotonic() - started >= 2 * expected
            # While it is paused, nothing comes; new weights are those of the tokens that come after.
            await engine.pause("in_place")
            waiting = asyncio.create_task(engine.generate(ask("paused", 1)))
            await engine.update_weights("/weights/7", 7)
            assert not (await asyncio.wait({waiting}, timeout=2 * expected))[0]
            await engine.resume()
            assert (await waiting).weight_versions[0] == 7
            assert await engine.weight_version() == 7
            # A pause that aborts ends what runs.
            waiting = asyncio.create_task(engine.generate(ask("aborted", 1)))
            await _wait_until_running(url, session)
            await engine.pause("abort")
            with pytest.raises(EngineUnavailableError, match="aborted by request"):
                await waiting


async def _wait_until_running(url: str, session: aiohttp.ClientSession) -> None:
    async with asyncio.timeout(60):
        while True:
            async with session.get(f"{url}/model_info") as response:
                if (await response.json())["num_running"]:
                    return


async def test_failures(model_dir: Path) -> None:
    with run_engine(model_dir, first_token_seconds=0, failure_rate=1) as url:
        async with open_client_session() as session:
            with pytest.raises(EngineUnavailableError, match="a simulated failure"):
                await SGLangEngine(url, session).generate(ask("a", 1, 2))


def test_numbers_that_do_not_go_together_are_refused(model_dir: Path) -> None:
    command = [sys.executable, "-m", "everroll.cli", "simulated-engine", "--model-path", str(model_dir)]
    done = subprocess.run(
        [*command, "--completion-tokens", "100", "--completion-p95-tokens", "50"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2
    assert "completion: a median of 100 and a 95th percentile of 50" in done.stderr


async def test_a_run_goes_through_real_sessions_and_collection(
    client: EverrollClient, run_name: str, task_queue: str, model_dir: Path, tmp_path: Path
) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join('{"text": "do it"}\n' for _ in range(4)))
    dataset = DatasetRef(
        path=str(prompts), fingerprint=load_dataset(prompts).fingerprint, num_prompts=4, seed=0, shuffle=False
    )
    options = {"first_token_seconds": 0.01, "tokens_per_second": 2000, "completion_tokens": 10}
    with run_engine(model_dir, **options) as engine_url:
        engine = FakeEngine(base_url=engine_url)
        async with (
            run_stack(
                load_renderer(model_section(model_dir)), model_dir, tmp_path / "journal.sqlite", [engine]
            ) as stack,
            build_http_client() as http,
        ):
            clients = AgentClients(http)
            episodes = EpisodeActivities(clients, DatasetCache(), ADMIN_KEY)
            collection = CollectionActivities(http, ADMIN_KEY)
            simulation = Simulation(
                dataset=dataset,
                rollout_activities=[episodes.run_episode, collection.collect_samples],
                light_activities=[store_group, collection.release_sessions],
            )
            args = {"turns": 3, "tool_seconds": 0.02, "tool_p95_seconds": 0.05, "tool_words": 5, "success_rate": 0.5}
            spec = build_spec(
                run_name,
                task_queue,
                run={"num_steps": 1},
                rollout={
                    "agent": {"function": "everroll.simulation.agent:play", "args": args},
                    "episodes_per_group": 4,
                },
                services={"session_url": stack.client.base_url, "store_url": str(tmp_path / "store")},
            )
            async with simulation.workers(client.temporal, task_queue):
                await client.start(spec)
                result = await asyncio.wait_for(client.result(run_name), 60)
            await clients.close()
    assert result.unusable_episodes == {}
    (request,) = simulation.trained
    store = open_store(str(tmp_path / "store"))
    outcomes = [
        outcome
        for item in request.batch
        for outcome in GroupManifest.model_validate_json(store.get(item.manifest)).outcomes
    ]
    assert len(outcomes) == 8
    assert {outcome.reward for outcome in outcomes} <= {0.0, 1.0}
    assert all(outcome.metrics["turns"] == 3 and outcome.metrics["tool_seconds"] > 0 for outcome in outcomes)
    assert all(outcome.samples and outcome.samples.num_sampled_tokens == 30 for outcome in outcomes)
