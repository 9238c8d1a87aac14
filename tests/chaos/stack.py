"""The local stack of a chaos run, in a supervisor process of its own: `python -m tests.chaos.stack PLAN`.

It is `everroll up`'s stack but for what PLAN (`StackPlan`) changes: links lie between the processes, the engine is in
its deterministic mode, there may be several rollout workers, histories continue as new early, and nothing is given up
however often it is killed. Killing the supervisor kills everything, as losing the machine would.
"""

from __future__ import annotations

import asyncio
import dataclasses
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from pydantic import BaseModel

from everroll.contracts.spec import ModelSection
from everroll.local.identity import ProcessIdentity, identify, is_running, send_signal
from everroll.local.plan import StackOptions, plan_processes
from everroll.local.process import ProcessSpec, launch_with_parent, read_log_tail
from everroll.local.restarts import RestartPolicy
from everroll.local.root import find_root
from everroll.local.signals import InterruptedBySignalError, run_interruptibly
from everroll.local.stack import LocalStack, run_stack
from everroll.local.state import ProcessPhase, StackAddresses, StackDirectory, StackPhase, StackState
from everroll.local.temporal_binary import find_temporal
from tests.chaos.ancestor import find_ancestor
from tests.chaos.children import Nursery
from tests.chaos.zygote import NODE_VARIABLE

ROOT = find_root()
ADMIN_KEY = "chaos"
_PATIENT = RestartPolicy(max_delay_seconds=1.0, max_failed_starts=1000, max_crashes=10_000)
_START_SECONDS = 300.0
_POLL_SECONDS = 0.02
_started: list[subprocess.Popen[bytes]] = []
"""So that those that have ended are reaped."""


class StackPlan(BaseModel):
    """What the supervisor is told."""

    directory: Path
    model: ModelSection
    addresses: StackAddresses
    """Where the services listen."""
    engine_link: str
    """URL at which the session server finds the engine."""
    temporal_links: dict[str, str]
    """Address at which a worker, by the name of its process, finds Temporal."""
    num_rollout_workers: int = 1
    journal: Path
    temporal_database: Path
    node: Path | None = None
    """Network namespace of `worker-rollout`; None for that of all others."""
    continue_as_new_events: int = 4096
    """Events after which the server suggests to continue as new."""
    deterministic: bool = True
    forked: bool = True
    """All processes are forks of one that has imported everything, and nothing is given up however often it is killed;
    otherwise they are started, and started again, as by `everroll up`."""


def plan_stack(plan: StackPlan) -> list[ProcessSpec]:
    options = StackOptions(
        directory=plan.directory,
        root=ROOT,
        temporal=find_temporal(),
        import_path=plan.directory,
        model=plan.model,
        task_queue=plan.addresses.task_queue,
    )
    places = {
        str(options.directory.absolute() / "sessions.sqlite"): str(plan.journal),
        str(options.directory.absolute() / "temporal.sqlite"): str(plan.temporal_database),
    }
    specs = plan_processes(options, plan.addresses, ADMIN_KEY)
    moved = [dataclasses.replace(spec, argv=tuple(places.get(part, part) for part in spec.argv)) for spec in specs]
    return [changed for spec in moved for changed in _change(spec, plan)]


def _change(spec: ProcessSpec, plan: StackPlan) -> Iterator[ProcessSpec]:
    if spec.name == "temporal":
        suggest = f"limit.historyCount.suggestContinueAsNew={plan.continue_as_new_events}"
        yield dataclasses.replace(spec, argv=(*spec.argv, "--dynamic-config-value", suggest))
    elif spec.name == "engine":
        extra = ("--num-threads", "1", *(("--deterministic",) if plan.deterministic else ()))
        yield dataclasses.replace(spec, argv=(*spec.argv, *extra))
    elif spec.name == "session-server":
        (engine,) = plan.addresses.engine_urls
        yield dataclasses.replace(spec, argv=tuple(plan.engine_link if part == engine else part for part in spec.argv))
    else:
        count = plan.num_rollout_workers if spec.name == "worker-rollout" else 1
        for name in (spec.name, *(f"{spec.name}-{number}" for number in range(2, count + 1))):
            env = {"EVERROLL_TEMPORAL_ADDRESS": plan.temporal_links[name], "EVERROLL_TORCH_THREADS": "1"}
            if plan.node is not None and name == "worker-rollout":  # from there it finds no address of this node
                env |= {NODE_VARIABLE: str(plan.node), "EVERROLL_WAIT_FOR": ""}
            yield dataclasses.replace(spec, name=name, env=spec.env | env)


async def supervise(plan: StackPlan, nursery: Nursery | None) -> None:
    directory = StackDirectory(plan.directory)
    directory.create()
    with directory.lock():
        policy = _PATIENT if plan.forked else None
        stack = LocalStack(directory, plan.addresses, ADMIN_KEY, plan_stack(plan), print, policy, nursery)
        async with run_stack(stack):
            await stack.watch()


class Stack:
    """The supervisor and its processes, as the one who breaks them sees them."""

    def __init__(self, plan: StackPlan) -> None:
        self.plan = plan
        self.directory = StackDirectory(plan.directory)
        self._supervisor: ProcessIdentity | None = None
        self._file = plan.directory / "plan.json"
        self._log = plan.directory / "supervisor.log"

    def launch(self) -> None:
        """Start the supervisor; `await_healthy` says when all is up."""
        self.directory.create()
        self._file.write_text(self.plan.model_dump_json())
        if self.plan.forked:
            self._supervisor = find_ancestor().start("tests.chaos.stack", [str(self._file)], ROOT, self._log)
            return
        with self._log.open("ab") as log:
            command = launch_with_parent(sys.executable, "-m", "tests.chaos.stack", str(self._file))
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=ROOT)
        _started.append(process)
        self._supervisor = identify(process.pid) or ProcessIdentity(pid=process.pid, started="ended")

    async def await_healthy(self) -> None:
        """Raises AssertionError when it does not come up."""
        deadline = time.monotonic() + _START_SECONDS
        while True:
            state = self.directory.read_state()
            if state is not None and state.supervisor == self._supervisor and state.phase is StackPhase.HEALTHY:
                return
            assert self._runs(), f"the supervisor ended:\n{read_log_tail(self._log)}"
            assert time.monotonic() < deadline, f"the stack is not up in time:\n{read_log_tail(self._log)}"
            await asyncio.sleep(_POLL_SECONDS)

    def _runs(self) -> bool:
        return self._supervisor is not None and is_running(self._supervisor)

    def names(self) -> list[str]:
        return [process.name for process in self._state().processes]

    def find(self, name: str) -> ProcessIdentity | None:
        """The process of that name that runs now."""
        found = next(process.identity for process in self._state().processes if process.name == name)
        return found if found is not None and is_running(found) else None

    def find_each(self, names: Iterable[str]) -> dict[str, ProcessIdentity | None]:
        """The processes of these names, by the supervisor's last word; one may have ended since."""
        identities = {process.name: process.identity for process in self._state().processes}
        return {name: identities[name] for name in names}

    def is_healthy(self, name: str) -> bool:
        found = next(process for process in self._state().processes if process.name == name)
        return found.phase is ProcessPhase.HEALTHY and found.identity is not None and is_running(found.identity)

    def signal(self, name: str, number: signal.Signals) -> ProcessIdentity | None:
        """Signal the process; None if it does not run at this moment."""
        identity = self.find(name)
        return identity if identity is not None and send_signal(identity, number) else None

    def start_beside(self, name: str) -> ProcessIdentity:
        """One more process like that of this name, which the supervisor knows nothing of: as on another machine."""
        assert self.plan.forked
        spec = next(spec for spec in plan_stack(self.plan) if spec.name == name)
        log = self.directory.logs / f"{name}-beside.log"
        return find_ancestor().start(spec.argv[2], spec.argv[3:], spec.cwd, log, spec.env)

    async def kill_everything(self) -> None:
        """SIGKILL the supervisor and, in the same instant, its processes: the kernel would only do so when the
        supervisor's memory is gone. Returns when none is left."""
        assert self._supervisor is not None
        known = [process.identity for process in self._state().processes if process.identity is not None]
        left = [self._supervisor, *reversed(known)]  # workers first: what they are about to tell must not be told
        for identity in left:
            send_signal(identity, signal.SIGKILL)
        assert await _await(lambda: not any(map(is_running, left)), 30), "a process outlived its supervisor"

    async def stop(self) -> None:
        """SIGTERM, as Ctrl-C would; SIGKILL when that takes too long."""
        if self._supervisor is not None and self._runs():
            send_signal(self._supervisor, signal.SIGTERM)
            if not await _await(lambda: not self._runs(), 60):
                await self.kill_everything()

    def _state(self) -> StackState:
        state = self.directory.read_state()
        assert state is not None
        return state


async def _await(condition: Callable[[], bool], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:  # noqa: ASYNC110
        await asyncio.sleep(_POLL_SECONDS)
    return condition()


def main() -> int:
    plan = StackPlan.model_validate_json(Path(sys.argv[1]).read_bytes())
    nursery = Nursery() if plan.forked else None
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    try:
        asyncio.run(run_interruptibly(supervise(plan, nursery)))
    except InterruptedBySignalError:
        return 0
    finally:
        if nursery is not None:
            nursery.kill()
    return 0


if __name__ == "__main__":
    sys.exit(main())
