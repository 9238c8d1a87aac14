"""Many episodes in flight, for a long time: what each process takes, and whether anything grows that should not.

    python -m benchmarks.load [--episodes 2000] [--episode-seconds 60] [--minutes 5] [--json]

Starts a local stack of its own, as `everroll up` does, each part a process: Temporal server with a database file,
workflow workers, rollout workers, session server, and a simulated engine. A run that only plays keeps `--episodes`
episodes in flight, each in a session of its own, with a few turns and waits of `--episode-seconds` in all. Every few
seconds memory, processor time, open files and threads of each process are read, and the sizes of Temporal's database
and of the journal. It prints a table over time, per process the growth of its memory per hour after warm-up, and what
went wrong: workflow tasks that failed or timed out, activities whose heartbeat came too late, episodes aborted, by
cause, or that so many episodes were never in flight. The exit code is 1 if any did. Linux only.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import sys
import tempfile
import time
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

from benchmarks.load_metrics import count
from benchmarks.load_processes import measure_files, read_usage
from benchmarks.load_report import Sample, compute_costs, compute_trends, render_row, summarize, thin
from benchmarks.load_stack import RAMP_PARTS, RUN, LoadedStack, LoadOptions, build_spec, hold_load_stack
from everroll.client import EverrollClient, SteeringError
from everroll.contracts import names
from everroll.contracts.training import RunStatus
from everroll.local.signals import InterruptedBySignalError, run_interruptibly
from everroll.local.state import ProcessState, StackDirectory
from everroll.temporal import install_runtime

_CONNECT_SECONDS = 30.0
_QUERY_TIMEOUT = timedelta(seconds=30)
_END_SECONDS = 60.0
_SAMPLE_SECONDS = (1.0, 15.0)
_RAMP_ATTEMPTS = 3
_REACHED_SHARE = 0.95
_FAULTS = (
    "failed_workflow_tasks",
    "timed_out_workflow_tasks",
    "heartbeat_timeouts",
    "activity_timeouts",
    "failed_activities",
    "session_errors",
)


class Watch:
    """Looks at the stack again and again."""

    def __init__(self, loaded: LoadedStack, home: Path, report_seconds: float) -> None:
        self._loaded = loaded
        self._home = home
        self._report_seconds = report_seconds
        self._started = time.monotonic()
        self.samples: list[Sample] = []

    async def follow(self, seconds: float) -> None:
        """For so long; each report is a line on standard error."""
        pause = min(max(_SAMPLE_SECONDS[0], seconds / 40), _SAMPLE_SECONDS[1])
        reported = await self._take()
        while (left := self._started + seconds - time.monotonic()) > 0:
            await asyncio.sleep(min(left, pause))
            sample = await self._take()
            if sample.seconds - reported.seconds >= self._report_seconds:
                print(render_row(sample, reported), file=sys.stderr, flush=True)
                reported = sample

    async def _take(self) -> Sample:
        await self._loaded.scraper.scrape()
        page = self._loaded.scraper.page
        stack = self._loaded.stack
        queue = names.rollout_queue(stack.addresses.task_queue)
        sample = Sample(
            seconds=time.monotonic() - self._started,
            usages={
                process.name: read_usage(process.identity.pid)
                for process in read_processes(stack.directory)
                if process.identity is not None
            },
            counts=count(page, queue),
            episodes_in_flight=page.total(
                "temporal_worker_task_slots_used", task_queue=queue, worker_type="ActivityWorker"
            ),
            temporal_heap_bytes=page.total("memory_heapinuse", service_name="history"),
            temporal_bytes=measure_files(self._home / "temporal.sqlite"),
            journal_bytes=measure_files(self._home / "sessions.sqlite"),
            load_average=os.getloadavg()[0],
        )
        self.samples.append(sample)
        return sample


async def run_load(options: LoadOptions, minutes: float, home: Path) -> tuple[dict[str, Any], list[Sample]]:
    directory = StackDirectory(home)
    async with hold_load_stack(directory, options, lambda text: print(text, file=sys.stderr, flush=True)) as loaded:
        addresses = loaded.stack.addresses
        client = await EverrollClient.connect(
            addresses.temporal_address, addresses.temporal_namespace, _CONNECT_SECONDS
        )
        await client.start(build_spec(options, loaded, addresses, home))
        ramping = asyncio.create_task(ramp_up(client, options))
        watch = Watch(loaded, home, report_seconds=max(10.0, minutes * 60 / 30))
        failing = asyncio.create_task(loaded.stack.watch())
        following = asyncio.create_task(watch.follow(minutes * 60))
        await asyncio.wait((failing, following), return_when=asyncio.FIRST_COMPLETED)
        failing.cancel()
        if not following.done():
            await failing  # a process has failed for good: says which
        await following
        ramping.cancel()
        await asyncio.gather(ramping, return_exceptions=True)
        status = await _read_status(client)
        restarts = {process.name: process.restarts for process in read_processes(directory)}
        await _end_run(client)
    return build_result(options, minutes, watch.samples, status, restarts), watch.samples


async def ramp_up(client: EverrollClient, options: LoadOptions) -> None:
    """Admit the other parts of the groups."""
    for part in range(2, RAMP_PARTS + 1):
        await asyncio.sleep(options.episode_seconds / RAMP_PARTS)
        await _set_groups(client, -(-options.groups * part // RAMP_PARTS))


async def _set_groups(client: EverrollClient, groups: int) -> None:
    for _ in range(_RAMP_ATTEMPTS):
        try:
            await client.set_values(RUN, {"rollout.max_groups_in_flight": groups})
        except SteeringError:  # in force already: parts are equal, or an answer was lost
            return
        except ConnectionError as error:
            print(f"no answer to {groups} groups in flight: {error}", file=sys.stderr, flush=True)
        else:
            return


def read_processes(directory: StackDirectory) -> list[ProcessState]:
    """By the stack's state file, as `everroll down` finds them."""
    state = directory.read_state()
    return state.processes if state is not None else []


async def _read_status(client: EverrollClient) -> RunStatus | None:
    for _ in range(5):
        view = await client.status(RUN, _QUERY_TIMEOUT)
        if view.status is not None:
            return view.status
    return None


async def _end_run(client: EverrollClient) -> None:
    """Its groups end their episodes; what is still left ends with the stack."""
    with contextlib.suppress(Exception):
        await client.cancel(RUN, "the measurement is over")
        await asyncio.wait_for(client.result(RUN), _END_SECONDS)


def build_result(
    options: LoadOptions, minutes: float, samples: list[Sample], status: RunStatus | None, restarts: dict[str, int]
) -> dict[str, Any]:
    """One JSON object."""
    warm_up = find_warm_up(options.episode_seconds, minutes)
    warm = [sample for sample in samples if sample.seconds >= warm_up]
    whole = samples[-1].counts - samples[0].counts
    result: dict[str, Any] = {
        "settings": asdict(options) | {"minutes": minutes, "groups": options.groups, "warm_up_seconds": warm_up},
        "summary": summarize(warm),
        "cpu_ms_per_episode": compute_costs(warm),
        "processes": {name: asdict(trend) for name, trend in compute_trends(warm).items()},
        "unusable_episodes": status.unusable_episodes if status else None,
        "dropped_groups": status.dropped_groups if status else None,
        "stored_groups": status.trained_groups if status else None,
        "generations": status.generation + 1 if status else None,
        "restarts": {name: number for name, number in restarts.items() if number},
        "samples": [asdict(sample) for sample in thin(samples)],
    }
    result["faults"] = [f"{name}: {vars(whole)[name]:.0f}" for name in _FAULTS if vars(whole)[name]]
    most = max(sample.episodes_in_flight for sample in samples)
    if most < _REACHED_SHARE * options.episodes:
        result["faults"].append(f"never more than {most:.0f} of {options.episodes} episodes in flight")
    result["faults"] += [f"aborted, {name}: {number}" for name, number in (result["unusable_episodes"] or {}).items()]
    result["faults"] += [f"restarted, {name}: {number}" for name, number in result["restarts"].items()]
    return result


def find_warm_up(episode_seconds: float, minutes: float) -> float:
    """Seconds after which memory counts: three generations of episodes, and a third of a long measurement."""
    return min(max(3 * episode_seconds, minutes * 20), minutes * 40)


def print_result(result: dict[str, Any], samples: list[Sample]) -> None:
    for before, sample in zip(thin(samples), thin(samples)[1:], strict=False):
        print(render_row(sample, before))
    print()
    columns = f"{'cores':>8} {'MiB':>8} {'MiB/h':>8} {'late':>8} {'files':>6} {'threads':>8} {'ms/episode':>11}"
    print(f"{'after warm-up':24} {columns}")
    for name, trend in result["processes"].items():
        print(
            f"{name:24} {trend['cpu_cores']:8.2f} {trend['rss_mib']:8.0f} {trend['growth_mib_per_hour']:8.1f} "
            f"{trend['late_growth_mib_per_hour']:8.1f} {trend['num_files']:6d} {trend['num_threads']:8d} "
            f"{result['cpu_ms_per_episode'][name]:11.2f}"
        )
    print()
    for name, value in result["summary"].items():
        print(f"{name:28} {value:12.2f}")
    for name in ("stored_groups", "dropped_groups", "unusable_episodes", "generations", "faults"):
        print(f"{name:28} {result[name]}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=2000, help="in flight at once")
    parser.add_argument("--episode-seconds", type=float, default=60.0)
    parser.add_argument("--minutes", type=float, default=5.0, help="how long, warm-up included")
    parser.add_argument("--turns", type=int, default=3, help="model calls in an episode")
    parser.add_argument("--rollout-workers", type=int, default=2)
    parser.add_argument("--workflow-workers", type=int, default=1)
    parser.add_argument("--session-processes", type=int, default=1)
    parser.add_argument("--heartbeat-timeout", type=float, default=30.0, help="seconds; a third of it lies between two")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    arguments = parser.parse_args()
    options = LoadOptions(
        episodes=arguments.episodes,
        episode_seconds=arguments.episode_seconds,
        turns=arguments.turns,
        rollout_workers=arguments.rollout_workers,
        workflow_workers=arguments.workflow_workers,
        session_processes=arguments.session_processes,
        heartbeat_timeout_seconds=arguments.heartbeat_timeout,
    )
    install_runtime()
    with tempfile.TemporaryDirectory(prefix="everroll-load-") as home:
        work = run_load(options, arguments.minutes, Path(home))
        try:
            result, samples = asyncio.run(run_interruptibly(work))
        except InterruptedBySignalError as error:
            print(f"interrupted by {error}; the stack has ended", file=sys.stderr)
            return 130
    print_result(result, samples)
    if arguments.json:
        print(json.dumps(result))
    return 1 if result["faults"] else 0


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # the SDK's core now and then aborts an interpreter that shuts down in the ordinary way
