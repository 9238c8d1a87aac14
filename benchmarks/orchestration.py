"""What orchestration costs: Everroll's workflows over activities that do nothing, next to a bare program.

    python -m benchmarks.orchestration [--groups 48] [--episodes 8] [--steps 1] [--rounds 3] [--json]

Both have the same shape (`benchmarks.orchestration_workflows`) and run in turn, on the same server and with the same
workers, which this process hosts. All groups of a step are in flight at once. `--groups 512` is the full scale;
`--steps 2` continues as new in the middle of it. It fails when a workflow task failed or was lost, a payload is above
256 KiB or a history above 10,000 events. A workflow task that waited longer than `EVERROLL_STICKY_TIMEOUT_SECONDS` for
its worker is handed out anew, which is no failure; it is counted as moved. CPU is that of this process and the server,
per episode; on a machine that does other things too, wall time says little, and `cpu_ratio` is the figure to look at.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import logging
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import NoReturn

from temporalio.client import Client
from temporalio.worker import Worker

from activities.boundary import BoundaryInterceptor
from activities.runs import GroupActivities, HealthActivities
from benchmarks.orchestration_history import Histories, read_histories
from benchmarks.orchestration_workflows import (
    EVERROLL_LIGHT,
    EVERROLL_ROLLOUT,
    EVERROLL_TRAIN,
    BareGroup,
    BareRun,
    bare_activity,
)
from everroll.client import EverrollClient
from everroll.contracts import names
from everroll.contracts.spec import RunSpec
from everroll.http_client import build_http_client
from everroll.local.plan import TEMPORAL_TUNING
from everroll.local.ports import choose_port
from everroll.local.temporal_binary import find_temporal
from everroll.payloads import MAX_PAYLOAD_BYTES
from everroll.temporal import install_runtime
from worker.build import LIGHT_ACTIVITIES, MAX_CACHED_WORKFLOWS, MAX_WORKFLOW_TASKS, POLLERS
from worker.settings import load_settings
from workflows.rollout_group import RolloutGroup
from workflows.training_run import TrainingRun

QUEUE = "benchmark"
MAX_EVENTS = 10_000
_RUN_SECONDS = 1800.0
_FAILURES_SHOWN = 10


@dataclass(frozen=True)
class Size:
    groups: int
    episodes: int
    steps: int

    @property
    def num_episodes(self) -> int:
        return self.groups * self.episodes * self.steps


@dataclass(frozen=True)
class Measured:
    """One run."""

    seconds: float
    worker_cpu_seconds: float
    server_cpu_seconds: float
    histories: Histories

    @property
    def cpu_seconds(self) -> float:
        return self.worker_cpu_seconds + self.server_cpu_seconds


@contextlib.contextmanager
def run_server(directory: Path) -> Iterator[tuple[str, int]]:
    """A Temporal server as `everroll up` starts it; yields its address and process id."""
    port = choose_port(0)
    command = [
        str(find_temporal()),
        *("server", "start-dev", "--headless", "--ip", "127.0.0.1", "--port", str(port)),
        *("--db-filename", str(directory / "temporal.sqlite"), "--log-level", "error", *TEMPORAL_TUNING),
    ]
    with open(directory / "server.log", "wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    signal.signal(signal.SIGTERM, lambda *_: _end_at_once(process))
    try:
        yield f"127.0.0.1:{port}", process.pid
    finally:
        process.terminate()
        process.wait(timeout=20)


def _end_at_once(server: subprocess.Popen[bytes]) -> NoReturn:
    """Workers that end in order wait for the server."""
    server.kill()
    os._exit(1)


@contextlib.asynccontextmanager
async def run_workers(client: Client) -> AsyncIterator[None]:
    """Workers for both programs, set up as those of `worker.build`."""
    settings = load_settings()
    http = build_http_client()
    light: list[Callable[..., object]] = [
        GroupActivities(client).await_groups,
        HealthActivities(client, http).survey_groups,
        bare_activity,
    ]
    queues: dict[str, list[Callable[..., object]]] = {
        QUEUE: [*EVERROLL_LIGHT, *light],
        names.rollout_queue(QUEUE): [*EVERROLL_ROLLOUT, bare_activity],
        names.train_queue(QUEUE): [*EVERROLL_TRAIN, bare_activity],
    }
    async with contextlib.AsyncExitStack() as stack:
        await stack.enter_async_context(http)
        for queue, activities in queues.items():
            worker = Worker(
                client,
                task_queue=queue,
                workflows=[TrainingRun, RolloutGroup, BareRun, BareGroup] if queue == QUEUE else [],
                activities=activities,
                interceptors=[BoundaryInterceptor()],
                max_cached_workflows=MAX_CACHED_WORKFLOWS,
                max_concurrent_workflow_tasks=MAX_WORKFLOW_TASKS,
                max_concurrent_activities=LIGHT_ACTIVITIES if queue == QUEUE else 2 * settings.max_episodes,
                sticky_queue_schedule_to_start_timeout=timedelta(seconds=settings.sticky_timeout_seconds),
                max_heartbeat_throttle_interval=timedelta(seconds=settings.heartbeat_throttle_seconds),
                workflow_task_poller_behavior=POLLERS,
                activity_task_poller_behavior=POLLERS,
            )
            await stack.enter_async_context(worker)
        yield


def read_cpu_seconds(pid: int) -> float:
    """CPU time of a process so far; 0 where the system does not tell."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


class Benchmark:
    """Runs both programs in turn."""

    def __init__(self, client: EverrollClient, server_pid: int, size: Size) -> None:
        self._client = client
        self._server_pid = server_pid
        self._size = size

    async def measure(self, kind: str, number: int) -> Measured:
        run_id = f"everroll/{kind}-{number}"
        programs: dict[str, Callable[[str], Awaitable[object]]] = {"everroll": self._everroll, "bare": self._bare}
        worker, server = time.process_time(), read_cpu_seconds(self._server_pid)
        started = time.perf_counter()
        await asyncio.wait_for(programs[kind](run_id), _RUN_SECONDS)
        seconds = time.perf_counter() - started
        worker, server = time.process_time() - worker, read_cpu_seconds(self._server_pid) - server
        histories = await read_histories(self._client.temporal, run_id, self._size.groups * self._size.steps)
        return Measured(seconds, worker, server, histories)

    async def _everroll(self, run_id: str) -> None:
        size = self._size
        spec = RunSpec.model_validate(
            {
                "run": {"name": run_id.removeprefix("everroll/"), "num_steps": size.steps},
                "model": {"path": "/models/policy"},
                "data": {"path": "/data/prompts.jsonl"},
                "rollout": {
                    "agent": {"function": "agents.search:run"},
                    "groups_per_step": size.groups,
                    "episodes_per_group": size.episodes,
                },
                "services": {"task_queue": QUEUE},
            }
        )
        await self._client.start(spec)
        await self._client.temporal.get_workflow_handle(run_id).result()

    async def _bare(self, run_id: str) -> None:
        size = self._size
        await self._client.temporal.execute_workflow(
            BareRun.run, args=[QUEUE, size.steps, size.groups, size.episodes], id=run_id, task_queue=QUEUE
        )


async def run_benchmark(size: Size, rounds: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as directory, run_server(Path(directory)) as (address, pid):
        client = await EverrollClient.connect(address, "default", 30.0)
        await client.register_search_attributes()
        async with run_workers(client.temporal):
            warm_up = Benchmark(client, pid, Size(min(8, size.groups), size.episodes, 1))
            benchmark = Benchmark(client, pid, size)
            measured: dict[str, list[Measured]] = {"everroll": [], "bare": []}
            for kind in measured:
                await warm_up.measure(kind, 0)
            for number in range(1, rounds + 1):
                for kind, runs in measured.items():
                    runs.append(await benchmark.measure(kind, number))
                    rate = size.num_episodes / runs[-1].seconds
                    print(f"round {number}: {kind:8} {rate:7.1f} episodes/s", file=sys.stderr, flush=True)
                    _show_failures(runs[-1].histories)
    return summarize(size, measured["everroll"], measured["bare"])


def _show_failures(found: Histories) -> None:
    for kind, tasks in {"failed": found.failed_tasks, "lost": found.lost_tasks}.items():
        for text in tasks[:_FAILURES_SHOWN]:
            print(f"    {kind} workflow task: {text}", file=sys.stderr, flush=True)


def summarize(size: Size, ours: list[Measured], floor: list[Measured]) -> dict[str, float]:
    """Medians over the rounds; the ratio is that of neighbouring runs."""

    def median(runs: list[Measured], value: Callable[[Measured], float]) -> float:
        return statistics.median(value(run) for run in runs)

    def cpu_ms(runs: list[Measured], value: Callable[[Measured], float]) -> float:
        return 1000 * median(runs, value) / size.num_episodes

    groups = size.groups * size.steps
    return {
        "episodes_per_second": median(ours, lambda run: size.num_episodes / run.seconds),
        "floor_episodes_per_second": median(floor, lambda run: size.num_episodes / run.seconds),
        "ratio": statistics.median(bare.seconds / own.seconds for own, bare in zip(ours, floor, strict=True)),
        "events_per_group": median(ours, lambda run: run.histories.events_per_group),
        "floor_events_per_group": median(floor, lambda run: run.histories.events_per_group),
        "run_events_per_group": median(ours, lambda run: run.histories.run_events * run.histories.generations / groups),
        "cpu_ms_per_episode": cpu_ms(ours, lambda run: run.cpu_seconds),
        "floor_cpu_ms_per_episode": cpu_ms(floor, lambda run: run.cpu_seconds),
        "cpu_ratio": statistics.median(
            bare.cpu_seconds / own.cpu_seconds for own, bare in zip(ours, floor, strict=True)
        ),
        "worker_cpu_ms_per_episode": cpu_ms(ours, lambda run: run.worker_cpu_seconds),
        "floor_worker_cpu_ms_per_episode": cpu_ms(floor, lambda run: run.worker_cpu_seconds),
        "episode_latency_p50_seconds": median(ours, lambda run: run.histories.percentile(0.5)),
        "episode_latency_p95_seconds": median(ours, lambda run: run.histories.percentile(0.95)),
        "floor_episode_latency_p50_seconds": median(floor, lambda run: run.histories.percentile(0.5)),
        "floor_episode_latency_p95_seconds": median(floor, lambda run: run.histories.percentile(0.95)),
        "max_payload_bytes": max(run.histories.max_payload_bytes for run in ours),
        "max_history_events": max(run.histories.max_events for run in ours),
        "failed_workflow_tasks": sum(len(run.histories.failed_tasks) for run in ours),
        "late_closes": sum(run.histories.num_late_closes for run in ours),
        "lost_workflow_tasks": sum(len(run.histories.lost_tasks) for run in ours),
        "floor_lost_workflow_tasks": sum(len(run.histories.lost_tasks) for run in floor),
        "moved_workflow_tasks": sum(run.histories.num_moved_tasks for run in ours),
        "generations": max(run.histories.generations for run in ours),
    }


def find_faults(result: dict[str, float]) -> list[str]:
    """What no run may do at any size."""
    faults = []
    if result["failed_workflow_tasks"]:
        faults.append(f"{result['failed_workflow_tasks']:.0f} workflow tasks failed")
    if result["lost_workflow_tasks"]:
        lost, floor_lost = result["lost_workflow_tasks"], result["floor_lost_workflow_tasks"]
        faults.append(
            f"{lost:.0f} workflow tasks were begun and not answered in time, {floor_lost:.0f} of the bare program: the "
            "machine does too much else"
        )
    if result["max_payload_bytes"] > MAX_PAYLOAD_BYTES:
        faults.append(f"a payload has {result['max_payload_bytes']:.0f} bytes; the limit is {MAX_PAYLOAD_BYTES}")
    if result["max_history_events"] > MAX_EVENTS:
        faults.append(f"a history has {result['max_history_events']:.0f} events; the limit is {MAX_EVENTS}")
    return faults


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, default=48, help="groups a step, all in flight at once")
    parser.add_argument("--episodes", type=int, default=8, help="episodes a group")
    parser.add_argument("--steps", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    options = parser.parse_args()
    install_runtime()
    logging.getLogger("temporal_core").setLevel(logging.ERROR)  # slow workflow tasks show in the figures
    result = asyncio.run(run_benchmark(Size(options.groups, options.episodes, options.steps), options.rounds))
    for name, value in result.items():
        print(f"{name:36} {value:12.3f}")
    faults = find_faults(result)
    for fault in faults:
        print(f"fault: {fault}")
    if options.json:
        print(json.dumps(result))
    return 1 if faults else 0


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # the SDK's core now and then aborts an interpreter that shuts down in the ordinary way
