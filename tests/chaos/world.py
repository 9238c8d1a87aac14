"""One stack, the links between its processes, and one run on it: made, watched, and judged when it is over."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import re
import sqlite3
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from everroll.audit.report import AuditReport
from everroll.audit.run import Places, audit_run
from everroll.client import EverrollClient
from everroll.contracts import names
from everroll.contracts.spec import RunSpec
from everroll.contracts.training import ResumeRequest
from everroll.local.ports import PortReservations
from everroll.local.state import StackAddresses
from tests.chaos.ancestor import find_ancestor
from tests.chaos.clock import Clock
from tests.chaos.disks import open_disks
from tests.chaos.links import LOOPBACK, Link, open_link
from tests.chaos.machine import is_inside
from tests.chaos.node import HERE, Node, open_node
from tests.chaos.stack import Stack, StackPlan
from tests.session_helpers import model_section
from tests.small_run import make_model, write_prompts

RUN = "chaos"
QUEUE = "chaos"
_NUM_PROMPTS = 7
"""Fewer than a run has groups, so that the end of the epoch is crossed."""
STOP_TOKEN_IDS = list(range(64))
"""A quarter of the vocabulary: random weights would hardly ever end a turn by themselves."""
_POLL_SECONDS = 0.05
NO_ROOM = re.compile(r"No space left|takes no new sessions|disk is full", re.IGNORECASE)
"""What a run says that stopped for want of room."""
_MAX_RESUMES = 5
GENERATE = b"POST /generate "
UPDATE = b"POST /update_weights"
"""What goes to the engine: turns, and new weights."""
REFUSED = b"HTTP/1.1 507 "
"""What an agent is answered when the journal has no room."""
WORKERS = ("worker-workflows", "worker-rollout", "worker-rollout-2", "worker-trainer")


@dataclass(frozen=True)
class Size:
    """How large the run is, and how soon its processes are taken for dead."""

    num_steps: int = 5
    groups_per_step: int = 3
    episodes_per_group: int = 4
    turns: int = 2
    max_tokens: int = 32
    max_staleness: int = 0
    seed: int = 0
    heartbeat_seconds: float = 2.0
    train_heartbeat_seconds: float = 5.0
    continue_as_new_events: int = 100
    num_rollout_workers: int = 2
    checkpoint_every: int = 2
    forked: bool = True
    """See `StackPlan`."""

    @property
    def num_turns(self) -> int:
        return self.num_steps * self.groups_per_step * self.episodes_per_group * self.turns


@dataclass(frozen=True)
class SeenTurn:
    """A line of the agent: it saw this turn's answer."""

    session: str
    group: int
    turn: int
    pid: int
    at: float
    tokens: int
    created: int
    """When it was recorded, as the answer says; Unix seconds."""
    digest: str
    """Of what was sampled in this turn and those before it."""


@dataclass
class World:
    """What a blow strikes at, and what a judge looks at."""

    size: Size
    directory: Path
    stack: Stack
    links: dict[str, Link]
    client: EverrollClient
    spec: RunSpec
    say: Callable[[str], None]
    node: Node | None = None
    """Where the first rollout worker runs, if that is another node."""
    clock: Clock | None = None
    """Of all processes but Temporal's server, if it can be set."""
    full: set[str] = field(default_factory=set)
    """Disks that have no room at this moment."""
    was_full: bool = False
    """Whether any disk ever was."""
    clock_moved: bool = False
    """Whether clocks ever were."""
    num_resumes: int = 0
    _seen: list[SeenTurn] = field(default_factory=list)
    _seen_bytes: int = 0
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the run is over: no moment is waited for any longer."""

    @property
    def run_dir(self) -> Path:
        return Path(self.spec.run.output_dir) / RUN

    @property
    def store(self) -> Path:
        return Path(self.spec.services.store_url)

    def read_seen(self) -> list[SeenTurn]:
        """All lines so far; only what is new is read, as it is looked at hundreds of times a second."""
        with contextlib.suppress(FileNotFoundError), (self.directory / "seen.jsonl").open("rb") as file:
            file.seek(self._seen_bytes)
            new = file.read()
            self._seen_bytes += len(new)
            self._seen += [SeenTurn(**json.loads(line)) for line in new.splitlines()]
        return self._seen

    def count_seen(self) -> int:
        """How many different turns agents have seen."""
        return len({(turn.session, turn.turn) for turn in self.read_seen()})

    def count_steps(self) -> int:
        return len(list((self.run_dir / "steps").glob("step_*.json")))

    def count_recorded_turns(self) -> int:
        """Turns in the journal."""
        with contextlib.closing(sqlite3.connect(f"file:{self.journal}?mode=ro", uri=True, timeout=10)) as journal:
            return int(journal.execute("SELECT count(*) FROM turns").fetchone()[0])

    def count_refusals(self) -> int:
        """How often anybody met a disk without room: in logs, in answers to agents, or as the end of the run."""
        logs = (log.read_text(errors="replace") for log in self.stack.directory.logs.glob("*.log"))
        told = sum(len(NO_ROOM.findall(text)) for text in logs)
        return told + self.links["sessions"].counts[REFUSED] + self.num_resumes

    @property
    def journal(self) -> Path:
        return self.stack.plan.journal

    @property
    def disks(self) -> Path:
        """Holds a directory for each of `DISKS`."""
        return self.directory / "disks"

    async def count_generations(self) -> int:
        """Executions of the run's workflow so far."""
        query = f"WorkflowId = '{names.run_workflow_id(RUN)}'"
        return (await self.client.temporal.count_workflows(query)).count

    def hash_weights(self) -> str:
        """Of the last step's published weights."""
        last = self.run_dir / "weights" / f"step_{self.size.num_steps:06d}" / "model.safetensors"
        return hashlib.sha256(last.read_bytes()).hexdigest()

    async def start_run(self) -> None:
        await self.client.start(self.spec)

    async def await_end(self, seconds: float) -> str:
        """The state the run ended in, `running` if it did not in time. Outages of Temporal are waited out.

        A run that stopped because a disk had been filled goes on when there is room, as a person would let it.
        """
        deadline = time.monotonic() + seconds
        state = "running"
        while state == "running" and time.monotonic() < deadline:
            with contextlib.suppress(Exception):
                view = await self.client.status(RUN)
                state = view.state
                no_room = self.was_full and NO_ROOM.search(view.failure or "")
                if state == "failed" and no_room and self.num_resumes < _MAX_RESUMES:
                    state = "running"
                    await self._resume(view.failure or "", deadline)
            await asyncio.sleep(_POLL_SECONDS)
        self.ended.set()
        return state

    async def _resume(self, failure: str, deadline: float) -> None:
        while self.full and time.monotonic() < deadline:  # noqa: ASYNC110
            await asyncio.sleep(_POLL_SECONDS)
        self.say(f"the run stopped: {failure[-200:]!r}; there is room again, and it goes on")
        await self.client.resume_ended(self.spec, ResumeRequest(reason="there is room again"))
        self.num_resumes += 1

    async def audit(self) -> AuditReport:
        return await audit_run(self.client.temporal, RUN, Places(journal=str(self.journal)))


@contextlib.asynccontextmanager
async def open_world(size: Size, directory: Path, say: Callable[[str], None]) -> AsyncIterator[World]:
    """A stack that is up in `directory`, with links between its processes; the run is not started."""
    model = await asyncio.to_thread(_write_inputs, directory)
    async with contextlib.AsyncExitStack() as resources:
        disks = directory / "disks"
        resources.enter_context(open_disks(disks, mounted=is_inside()))
        node = await resources.enter_async_context(open_node()) if is_inside() else None
        ports = resources.enter_context(PortReservations())
        addresses = _choose_addresses(ports, disks)
        links = await _open_links(resources, addresses, LOOPBACK if node is None else HERE)
        plan = StackPlan(
            directory=directory,
            model=model_section(model),
            addresses=addresses,
            engine_link=f"http://{links['engine'].address}",
            temporal_links={worker: links[f"{worker}-temporal"].address for worker in WORKERS},
            journal=disks / "journal" / "sessions.sqlite",
            temporal_database=disks / "temporal" / "temporal.sqlite",
            node=None if node is None else node.namespace,
            num_rollout_workers=size.num_rollout_workers,
            continue_as_new_events=size.continue_as_new_events,
            forked=size.forked,
        )
        stack = Stack(plan)
        resources.push_async_callback(stack.stop)
        stack.launch()
        await stack.await_healthy()
        client = await EverrollClient.connect(addresses.temporal_address, addresses.temporal_namespace, 60)
        spec = build_spec(size, directory, plan, links)
        clock = find_ancestor().clock if size.forked else None
        yield World(size, directory, stack, links, client, spec, say, node, clock)


def _choose_addresses(ports: PortReservations, disks: Path) -> StackAddresses:
    temporal, ui, sessions, engine = (f"{LOOPBACK}:{ports.choose(0)}" for _ in range(4))
    return StackAddresses(
        temporal_address=temporal,
        ui_url=f"http://{ui}",
        task_queue=QUEUE,
        session_url=f"http://{sessions}",
        engine_urls=[f"http://{engine}"],
        store_url=str(disks / "store"),
    )


async def _open_links(resources: contextlib.AsyncExitStack, addresses: StackAddresses, host: str) -> dict[str, Link]:
    """By name; they listen at `host`."""
    (engine,) = addresses.engine_urls
    ends = {
        "engine": engine,
        "sessions": addresses.session_url or "",
        **{f"{worker}-temporal": addresses.temporal_address for worker in WORKERS},
    }
    return {
        name: await resources.enter_async_context(
            open_link(name, int(end.rpartition(":")[2]), (GENERATE, UPDATE, REFUSED), host)
        )
        for name, end in ends.items()
    }


def _write_inputs(directory: Path) -> Path:
    """Prompts and a model; returns the model's directory."""
    directory.mkdir(parents=True, exist_ok=True)
    model = directory / "model"
    if not model.exists():
        make_model(model)
    write_prompts(directory / "prompts.jsonl", _NUM_PROMPTS)
    return model


def build_spec(size: Size, directory: Path, plan: StackPlan, links: dict[str, Link]) -> RunSpec:
    values: dict[str, Any] = {
        "run": {
            "name": RUN,
            "num_steps": size.num_steps,
            "seed": size.seed,
            "output_dir": str(directory / "disks" / "runs"),
        },
        "model": plan.model.model_dump(),
        "data": {"path": str(directory / "prompts.jsonl")},
        "rollout": {
            "groups_per_step": size.groups_per_step,
            "episodes_per_group": size.episodes_per_group,
            "max_staleness": size.max_staleness,
            "heartbeat_timeout_seconds": size.heartbeat_seconds,
            "agent": {
                "function": "tests.chaos.agent:run",
                "args": {"seen": str(directory / "seen.jsonl"), "turns": size.turns},
            },
            "sampling": {"max_tokens": size.max_tokens, "stop_token_ids": STOP_TOKEN_IDS},
            "max_refills": 50,
            "refill_backoff_seconds": 0.5,
            "abort_budget": {"probe_seconds": 0.5},
        },
        "train": {
            "learning_rate": 1e-3,
            "device": "cpu",
            "checkpoint_every": size.checkpoint_every,
            "keep_weights": size.num_steps + 2,
            "heartbeat_timeout_seconds": size.train_heartbeat_seconds,
            "on_replay_difference": "fail",
        },
        "services": {
            "temporal_address": plan.addresses.temporal_address,
            "task_queue": QUEUE,
            "session_url": f"http://{links['sessions'].address}",
            "engine_urls": [f"http://{links['engine'].address}"],
            "store_url": plan.addresses.store_url,
        },
    }
    return RunSpec.model_validate(values)
