"""The stack that `benchmarks.load` loads: that of `everroll up`, with a simulated engine, more workers and metrics."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.load_metrics import Scraper
from everroll.contracts.spec import ModelSection, RunSpec
from everroll.local.plan import NICENESS_OF_COMPUTING, StackOptions, WantedPorts, choose_addresses, plan_processes
from everroll.local.ports import PortReservations
from everroll.local.process import ProcessSpec
from everroll.local.readiness import HttpReady
from everroll.local.root import find_root
from everroll.local.stack import LocalStack, run_stack
from everroll.local.state import StackAddresses, StackDirectory
from everroll.local.supervisor import Report
from everroll.local.temporal_binary import find_temporal

RUN = "load"
RAMP_PARTS = 12
"""Groups are admitted in so many parts, over the time of an episode: all at once they would go in lock-step."""
_ADMIN_KEY = "load-benchmark"
_EPISODES_PER_GROUP = 8
_GROUPS_AHEAD = 1.15
"""A group waits for its slowest episode, and then settles: so many more groups keep the wanted episodes playing."""
_SPREAD_P95 = 1.25
"""95th percentile of every wait, as a multiple of its median: no lock-step, and no long tail either."""
_SPREAD_MEAN = 1.0093
"""Mean of that log-normal distribution, as a multiple of its median."""
_FIRST_TOKEN_SECONDS = 0.3
_TOKENS_PER_SECOND = 60.0
_COMPLETION_TOKENS = 60


@dataclass(frozen=True)
class LoadOptions:
    """What is loaded, and with what."""

    episodes: int
    """In flight at once."""
    episode_seconds: float
    """Mean length of an episode, nearly all of it spent waiting."""
    turns: int
    rollout_workers: int
    workflow_workers: int
    session_processes: int
    heartbeat_timeout_seconds: float

    @property
    def groups(self) -> int:
        return max(1, round(self.episodes * _GROUPS_AHEAD / _EPISODES_PER_GROUP))

    @property
    def episodes_per_worker(self) -> int:
        """A worker takes no more; some to spare, as the queue does not deal evenly."""
        return -(-self.groups * _EPISODES_PER_GROUP * 5 // (4 * self.rollout_workers))


@dataclass(frozen=True)
class LoadedStack:
    """A stack that is up."""

    stack: LocalStack
    model: ModelSection
    prompts: Path
    scraper: Scraper


@asynccontextmanager
async def hold_load_stack(
    directory: StackDirectory, options: LoadOptions, report: Report
) -> AsyncIterator[LoadedStack]:
    """The stack, up and healthy inside the block.

    Raises:
        StackError: a process does not come up.
    """
    directory.create()
    home = directory.root
    make_model(home)
    model = ModelSection.model_validate(
        {"path": str(home / "model"), "renderer": "qwen3", "chat_template": {"enable_thinking": False}}
    )
    root = find_root()
    with directory.lock(), PortReservations() as ports:
        engine_url = f"http://127.0.0.1:{ports.choose(0)}"
        stack_options = StackOptions(
            directory=home,
            root=root,
            temporal=find_temporal(),
            import_path=root,
            model=model,
            engine_urls=(engine_url,),
            ports=WantedPorts(temporal=0, ui=0, sessions=0, engine=0),
        )
        addresses = choose_addresses(stack_options, ports.choose, report)
        plan = _Plan(options, ports)
        specs = plan.spread(plan_processes(stack_options, addresses, _ADMIN_KEY))
        specs.append(_plan_engine(model, engine_url, home))
        assert addresses.session_url is not None
        scraper = Scraper(plan.metrics, addresses.session_url, _ADMIN_KEY)
        async with run_stack(LocalStack(directory, addresses, _ADMIN_KEY, specs, report)) as stack:
            yield LoadedStack(stack, model, home / "prompts.jsonl", scraper)


class _Plan:
    """Takes the usual processes, and makes of them those that are wanted here."""

    def __init__(self, options: LoadOptions, ports: PortReservations) -> None:
        self._options = options
        self._ports = ports
        self.metrics: dict[str, str] = {}
        """Where each process serves its metrics, besides the session server."""

    def spread(self, usual: list[ProcessSpec]) -> list[ProcessSpec]:
        specs: list[ProcessSpec] = []
        for spec in usual:
            if spec.name == "temporal":
                specs.append(self._measure_temporal(spec))
            elif spec.name == "session-server":
                argv = (*spec.argv, "--processes", str(self._options.session_processes))
                specs.append(dataclasses.replace(spec, argv=argv))
            elif spec.name == "worker-workflows":
                specs += self._repeat(spec, self._options.workflow_workers, {})
            elif spec.name == "worker-rollout":
                slots = {"EVERROLL_MAX_EPISODES": str(self._options.episodes_per_worker)}
                specs += self._repeat(spec, self._options.rollout_workers, slots)
        return specs

    def _measure_temporal(self, spec: ProcessSpec) -> ProcessSpec:
        port = self._ports.choose(0)
        self.metrics[spec.name] = f"127.0.0.1:{port}"
        return dataclasses.replace(spec, argv=(*spec.argv, "--metrics-port", str(port)))

    def _repeat(self, spec: ProcessSpec, times: int, env: dict[str, str]) -> list[ProcessSpec]:
        specs = []
        for number in range(1, times + 1):
            name = f"{spec.name}-{number}"
            self.metrics[name] = f"127.0.0.1:{self._ports.choose(0)}"
            variables = spec.env | env | {"EVERROLL_METRICS_ADDRESS": self.metrics[name]}
            specs.append(dataclasses.replace(spec, name=name, env=variables))
        return specs


def _plan_engine(model: ModelSection, url: str, home: Path) -> ProcessSpec:
    behaviour = {
        "--first-token-seconds": _FIRST_TOKEN_SECONDS,
        "--tokens-per-second": _TOKENS_PER_SECOND,
        "--completion-tokens": _COMPLETION_TOKENS,
        "--completion-p95-tokens": 2 * _COMPLETION_TOKENS,
        "--max-batch-size": 100_000,
        "--update-seconds": 0,
    }
    return ProcessSpec(
        name="engine (simulated)",
        argv=(
            *(sys.executable, "-m", "everroll.cli", "simulated-engine"),
            *("--model-path", model.path, "--port", url.rpartition(":")[2]),
            *(item for name, value in behaviour.items() for item in (name, str(value))),
        ),
        niceness=NICENESS_OF_COMPUTING,
        ready=HttpReady(f"{url}/health"),
        stage=1,
        cwd=home,
        address=url,
        ready_timeout_seconds=180.0,
    )


def make_model(home: Path) -> None:
    """The calculator's tokenizer, prompts and an untrained model: only the tokenizer is used."""
    from examples.calculator.make import make
    from examples.calculator.warmup import Recipe

    make(home, seed=0, recipe=Recipe(num_steps=0, num_short_steps=0))


def build_spec(options: LoadOptions, loaded: LoadedStack, addresses: StackAddresses, home: Path) -> RunSpec:
    """A run that only plays, with the first part of its groups."""
    engine_seconds = options.turns * (_FIRST_TOKEN_SECONDS + _COMPLETION_TOKENS / _TOKENS_PER_SECOND)
    wait = max(0.0, options.episode_seconds - engine_seconds) / options.turns / _SPREAD_MEAN
    return RunSpec.model_validate(
        {
            "run": {"name": RUN, "num_steps": 1_000_000, "mode": "rollout", "output_dir": str(home / "runs")},
            "model": loaded.model.model_dump(),
            "data": {"path": str(loaded.prompts)},
            "rollout": {
                "groups_per_step": max(1, options.groups // 8),
                "episodes_per_group": _EPISODES_PER_GROUP,
                "max_groups_in_flight": -(-options.groups // RAMP_PARTS),
                "max_staleness": 12,
                "heartbeat_timeout_seconds": options.heartbeat_timeout_seconds,
                "sampling": {"max_tokens": 256},
                "agent": {
                    "function": "everroll.simulation.agent:play",
                    "args": {
                        "turns": options.turns,
                        "start_seconds": wait,
                        "start_p95_seconds": wait * _SPREAD_P95,
                        "tool_seconds": wait,
                        "tool_p95_seconds": wait * _SPREAD_P95,
                        "tool_words": 50,
                    },
                },
            },
            "services": addresses.service_defaults(),
        }
    )
