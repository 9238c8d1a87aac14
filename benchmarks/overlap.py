"""What overlap is worth: the same training with slow episodes, synchronous and with `max_staleness`, to equal reward.

    python -m benchmarks.overlap [--steps 20] [--max-staleness 2] [--target 0.85] [--json]

Starts a local stack of its own, makes the calculator model, and trains it twice from the same start: each episode also
waits as an environment would, log-normally (median 1 s, 95th percentile 6 s by default), so that a synchronous step
waits for the slowest of its 64 episodes. A run is stopped when the mean reward of three steps in a row has reached the
target. Prints for both the seconds until then, the seconds per step, and what was dropped as stale. On two cores that
nobody else uses it takes about five minutes.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from everroll.client import EverrollClient, RunNotFoundError
from everroll.contracts.spec import RunSpec
from everroll.contracts.training import StepRecord
from everroll.local.plan import StackOptions, WantedPorts
from everroll.local.root import find_root
from everroll.local.start import hold_stack
from everroll.local.state import StackDirectory
from everroll.local.temporal_binary import find_temporal
from everroll.runfile import load_run_file
from everroll.temporal import install_runtime

_WINDOW = 3
_RUN_SECONDS = 3600.0


@dataclass(frozen=True)
class Measured:
    """One run."""

    seconds: float
    """From its start to the end of its last step, which is the one after the target was reached."""
    seconds_to_target: float | None
    """None when the reward never got there."""
    rewards: list[float]
    num_stale: int


class Benchmark:
    """Trains one run after the other on one stack."""

    def __init__(self, client: EverrollClient, overrides: dict[str, str], target: float) -> None:
        self._client = client
        self._overrides = overrides
        self._target = target

    async def measure(self, max_staleness: int) -> Measured:
        spec = self._load_spec(max_staleness)
        started = time.monotonic()
        await self._client.start(spec)
        reached: float | None = None
        steps: list[StepRecord] = []
        while time.monotonic() - started < _RUN_SECONDS:
            view = await self._client.status(spec.run.name)
            if view.status is not None:
                steps = view.status.recent_steps
                if reached is None and self._is_reached([step.mean_reward for step in steps]):
                    reached = time.monotonic() - started
                    await self._stop(spec.run.name)
            if view.state != "running":
                break
            await asyncio.sleep(0.5)
        result = await self._client.result(spec.run.name)
        rewards = [step.mean_reward for step in steps]
        stale = result.dropped_groups.get("stale", 0)
        return Measured(time.monotonic() - started, reached, rewards, stale)

    async def _stop(self, run: str) -> None:
        with contextlib.suppress(RunNotFoundError):  # it has just taken its last step
            await self._client.stop(run, "the target is reached")

    def _is_reached(self, rewards: list[float]) -> bool:
        windows = zip(*(rewards[start:] for start in range(_WINDOW)), strict=False)
        return any(sum(window) / _WINDOW >= self._target for window in windows)

    def _load_spec(self, max_staleness: int) -> RunSpec:
        overrides = self._overrides | {
            "run.name": f"overlap-{max_staleness}",
            "rollout.max_staleness": str(max_staleness),
        }
        return load_run_file(find_root() / "examples/calculator/run.toml", overrides=overrides)


async def run_benchmark(options: argparse.Namespace, home: Path) -> dict[str, float | int | None]:
    root = find_root()
    directory = StackDirectory(home)
    directory.create()
    make = (sys.executable, "-m", "examples.calculator.make", "--out", str(home))
    await asyncio.to_thread(subprocess.run, make, cwd=root, check=True, timeout=900, stdout=subprocess.DEVNULL)
    overrides = {
        "model.path": str(home / "model"),
        "data.path": str(home / "prompts.jsonl"),
        "run.output_dir": str(home / "runs"),
        "run.num_steps": str(options.steps),
        "rollout.agent.function": "benchmarks.slow_calculator:play",
        "rollout.agent.args": f"{{ median_seconds = {options.median}, p95_seconds = {options.p95} }}",
    }
    spec = load_run_file(root / "examples/calculator/run.toml", overrides=overrides)
    stack_options = StackOptions(
        directory=home,
        root=root,
        temporal=find_temporal(),
        import_path=root,
        model=spec.model,
        ports=WantedPorts(temporal=0, ui=0, sessions=0, engine=0),
    )
    async with hold_stack(directory, stack_options, lambda text: print(text, file=sys.stderr)) as stack:
        addresses = stack.addresses
        places = {
            "services.temporal_address": addresses.temporal_address,
            "services.session_url": str(addresses.session_url),
            "services.engine_urls": json.dumps(addresses.engine_urls),
            "services.store_url": addresses.store_url,
        }
        client = await EverrollClient.connect(addresses.temporal_address, addresses.temporal_namespace, 30.0)
        benchmark = Benchmark(client, overrides | places, options.target)
        synchronous = await benchmark.measure(0)
        print(f"synchronous: {synchronous}", file=sys.stderr)
        overlapped = await benchmark.measure(options.max_staleness)
        print(f"overlapped: {overlapped}", file=sys.stderr)
    return summarize(synchronous, overlapped, options)


def summarize(
    synchronous: Measured, overlapped: Measured, options: argparse.Namespace
) -> dict[str, float | int | None]:
    both = (synchronous.seconds_to_target, overlapped.seconds_to_target)
    return {
        "target_reward": options.target,
        "max_staleness": options.max_staleness,
        "synchronous_seconds_to_target": both[0],
        "overlapped_seconds_to_target": both[1],
        "share_of_synchronous_time": both[1] / both[0] if both[0] and both[1] else None,
        "synchronous_steps": len(synchronous.rewards),
        "overlapped_steps": len(overlapped.rewards),
        "synchronous_seconds_per_step": synchronous.seconds / len(synchronous.rewards),
        "overlapped_seconds_per_step": overlapped.seconds / len(overlapped.rewards),
        "synchronous_last_reward": sum(synchronous.rewards[-_WINDOW:]) / _WINDOW,
        "overlapped_last_reward": sum(overlapped.rewards[-_WINDOW:]) / _WINDOW,
        "overlapped_stale_groups": overlapped.num_stale,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20, help="most steps of a run")
    parser.add_argument("--max-staleness", type=int, default=2)
    parser.add_argument("--target", type=float, default=0.85, help="mean reward of three steps in a row")
    parser.add_argument("--median", type=float, default=1.0, help="seconds that an episode waits")
    parser.add_argument("--p95", type=float, default=6.0)
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    options = parser.parse_args()
    install_runtime()
    with tempfile.TemporaryDirectory() as home:
        result = asyncio.run(run_benchmark(options, Path(home)))
    for name, value in result.items():
        print(f"{name:32} {value if value is None else round(value, 3)}")
    if options.json:
        print(json.dumps(result))
    reached = (result["synchronous_seconds_to_target"], result["overlapped_seconds_to_target"])
    return 0 if None not in reached else 1


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # the SDK's core now and then aborts an interpreter that shuts down in the ordinary way
