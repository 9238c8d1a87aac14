"""Small real runs whose histories stand for a release: every path of the workflow code that a history can show."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from temporalio.exceptions import ApplicationError

from everroll.client import EverrollClient, RunFailedError
from everroll.contracts import names
from everroll.contracts.evaluation import EvaluateRequest
from everroll.contracts.health import EpisodesReport
from everroll.contracts.outcomes import ErrorType
from everroll.contracts.rollout import CollectResult, EpisodeKey, EpisodeReport, EpisodeRequest
from everroll.contracts.spec import RunSpec
from everroll.contracts.training import ResumeRequest
from everroll.evaluate import evaluate_run
from tests.resume_helpers import RecordingSimulation
from tests.simulation import Simulation, abort, build_spec, fail, succeed

_SECONDS = 120.0
_SIGNALS_TO_GROW = 80
Play = Callable[[EverrollClient, str, str], Awaitable[None]]


@asynccontextmanager
async def _running(client: EverrollClient, spec: RunSpec, simulation: Simulation) -> AsyncIterator[None]:
    """A run under way; it is awaited at the end."""
    async with simulation.workers(client.temporal, spec.services.task_queue):
        await client.start(spec)
        yield
        await asyncio.wait_for(client.result(spec.run.name), _SECONDS)


async def _wait(client: EverrollClient, run: str, is_there: Callable[[], bool]) -> None:
    async with asyncio.timeout(_SECONDS):
        while not is_there():
            await client.status(run)


async def play_normal(client: EverrollClient, run: str, task_queue: str) -> None:
    """Two steps, synchronous; nothing happens."""
    async with _running(client, build_spec(run, task_queue), Simulation()):
        pass


async def play_wide(client: EverrollClient, run: str, task_queue: str) -> None:
    """More groups at once than may be starting at once."""
    async with _running(client, build_spec(run, task_queue, rollout={"groups_per_step": 12}), Simulation()):
        pass


async def play_losses(client: EverrollClient, run: str, task_queue: str) -> None:
    """Overlap; a member is sampled again, a group is dropped, one is stale and sampled again, one a straggler."""
    simulation = Simulation()

    def play(request: EpisodeRequest) -> EpisodeReport:
        return fail(request) if request.key.group == 1 else succeed(request)

    def collect(key: EpisodeKey) -> CollectResult:
        if (key.group, key.member, key.attempt) == (0, 0, 0):
            return abort(key)
        collected = simulation.build_collected(key)
        if key.group == 4 and key.attempt == 0 and collected.samples is not None:
            samples = collected.samples.model_copy(update={"min_weight_version": -9})
            return collected.model_copy(update={"samples": samples})
        return collected

    simulation.play, simulation.collect = play, collect
    rollout = {
        "max_staleness": 1,
        "max_refills": 1,
        "refill_backoff_seconds": 0.1,
        "on_stale": "refill",
        "oversample_groups": 1,
        "stragglers": {"policy": "drop"},
    }
    async with _running(client, build_spec(run, task_queue, run={"num_steps": 4}, rollout=rollout), simulation):
        pass


async def play_pause(client: EverrollClient, run: str, task_queue: str) -> None:
    """Paused and resumed by request while groups play."""
    gate = asyncio.Event()
    simulation = Simulation(gate=gate)
    async with _running(client, build_spec(run, task_queue), simulation):
        await _wait(client, run, lambda: len(simulation.episodes) == 4)
        await client.pause(run, "to be recorded")
        gate.set()
        await client.resume(run, "recorded")


async def play_continued(client: EverrollClient, run: str, task_queue: str) -> None:
    """Continued as new with groups in flight, which are re-attached."""
    gate = asyncio.Event()
    simulation = Simulation(gate=gate)
    async with _running(client, build_spec(run, task_queue, rollout={"max_staleness": 1}), simulation):
        await _wait(client, run, lambda: len(simulation.episodes) == 8)
        handle = client.temporal.get_workflow_handle(names.run_workflow_id(run))
        first = (await handle.describe()).run_id
        for _ in range(_SIGNALS_TO_GROW):
            await handle.signal(names.SIGNAL_REPORT, EpisodesReport(group=0, num_collected=0))
        async with asyncio.timeout(_SECONDS):
            while (await handle.describe()).run_id == first:
                await handle.signal(names.SIGNAL_REPORT, EpisodesReport(group=0, num_collected=0))
        gate.set()


async def play_failed(client: EverrollClient, run: str, task_queue: str) -> None:
    """A terminal failure in one group ends the run and the other groups."""
    simulation = Simulation()

    def collect(key: EpisodeKey) -> CollectResult:
        if key.group == 1:
            raise ApplicationError("answered 500", type=ErrorType.SERVER.value, non_retryable=True)
        return simulation.build_collected(key)

    simulation.collect = collect
    with suppress(RunFailedError):
        async with _running(client, build_spec(run, task_queue), simulation):
            pass


async def play_evaluated(client: EverrollClient, run: str, task_queue: str) -> None:
    """Evaluated by schedule, long enough that an evaluation continues as new, and on demand; one episode is aborted."""
    simulation = Simulation(train_gate=asyncio.Event())
    simulation.collect = lambda key: (
        abort(key) if key.evaluation and key.group == key.attempt == 0 else simulation.build_collected(key)
    )
    with tempfile.TemporaryDirectory() as directory:
        prompts = _write_prompts(Path(directory, "eval.jsonl"), 16)
        spec = build_spec(
            run,
            task_queue,
            run={"num_steps": 1},
            services={"task_queue": task_queue, "store_url": f"{directory}/store"},
            eval={"every": 1, "at_start": False, "path": str(prompts), "episodes_per_prompt": 2, "concurrency": 8},
        )
        async with _running(client, spec, simulation):
            await _wait(client, run, lambda: len(simulation.trained) == 1)
            await evaluate_run(client, run, EvaluateRequest(max_prompts=2, by="somebody"))
            if simulation.train_gate is not None:
                simulation.train_gate.set()


def _write_prompts(path: Path, number: int) -> Path:
    path.write_text("".join(f'{{"text": "{index}"}}\n' for index in range(number)))
    return path


async def play_steered(client: EverrollClient, run: str, task_queue: str) -> None:
    """Other settings, a group that plays and one that is ready are skipped, and it is asked to stop."""
    gate = asyncio.Event()
    simulation = Simulation(gate=gate, is_gated=lambda key: key.group > 0)
    spec = build_spec(run, task_queue, run={"num_steps": 3}, rollout={"max_staleness": 1})
    async with _running(client, spec, simulation):
        await _wait(client, run, lambda: len(simulation.episodes) == 8 and 0 in simulation.stored)
        await client.set_values(run, {"learning_rate": 0.5, "max_groups_in_flight": 3, "temperature": 0.5})
        await _skip_when_ready(client, run, 0)
        await client.skip(run, 1)
        await client.stop(run)
        gate.set()


async def _skip_when_ready(client: EverrollClient, run: str, group: int) -> None:
    async with asyncio.timeout(_SECONDS):
        while (status := (await client.status(run)).status) is None or not status.groups_ready:
            continue
    await client.skip(run, group)


async def play_resumed(client: EverrollClient, run: str, task_queue: str) -> None:
    """Cancelled while groups play, and resumed from its directory."""
    with tempfile.TemporaryDirectory() as directory:
        simulation = RecordingSimulation(client.temporal, Path(directory))
        simulation.held_from = 3
        spec = simulation.build_spec(run, task_queue, run={"num_steps": 3}, rollout={"max_staleness": 1})
        async with simulation.workers(client.temporal, task_queue):
            await client.start(spec)
            await _wait(client, run, lambda: any(request.key.group == 4 for request in simulation.episodes))
            await client.cancel(run, "to be recorded")
            with suppress(RunFailedError):
                await asyncio.wait_for(client.result(run), _SECONDS)
            simulation.held_from = None
            await client.resume_ended(spec, ResumeRequest(changes={"learning_rate": 0.5}))
            await asyncio.wait_for(client.result(run), _SECONDS)


async def play_one_side(client: EverrollClient, run: str, task_queue: str) -> None:
    """Played without a trainer; then another run trains what was played."""
    with tempfile.TemporaryDirectory() as directory:
        simulation = RecordingSimulation(client.temporal, Path(directory))
        played = simulation.build_spec(run, task_queue, run={"num_steps": 2, "mode": "rollout"})
        batches = {"num_steps": 2, "mode": "train", "batches_from": str(simulation.run_dir(run))}
        async with simulation.workers(client.temporal, task_queue):
            for spec in (played, simulation.build_spec(f"{run}-trained", task_queue, run=batches)):
                await client.start(spec)
                await asyncio.wait_for(client.result(spec.run.name), _SECONDS)


@dataclass(frozen=True)
class Scenario:
    name: str
    play: Play


SCENARIOS = [
    Scenario("normal", play_normal),
    Scenario("wide", play_wide),
    Scenario("losses", play_losses),
    Scenario("pause", play_pause),
    Scenario("continued", play_continued),
    Scenario("failed", play_failed),
    Scenario("evaluated", play_evaluated),
    Scenario("steered", play_steered),
    Scenario("resumed", play_resumed),
    Scenario("one-side", play_one_side),
]
