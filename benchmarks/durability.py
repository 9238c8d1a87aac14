"""How long until work goes on after a kill, and what is lost: Everroll, and a plain asyncio loop.

    python -m benchmarks.durability [--kills 10] [--victims "rollout worker" trainer ...] [--json]

A run with a tiny model on the local stack, all on this machine, with two rollout workers. Each victim is killed again
and again with SIGKILL, and the supervisor starts it again as `everroll up` does. Measured is the time from the kill to
the next useful event, which is

    rollout worker     the last of the episodes that it was playing is given its next, unseen turn on another worker
    trainer            the step it was training, at a random moment of it, is applied
    session server     an agent sees its next turn
    engine             an agent sees its next turn
    workflow worker    a group is stored that was still playing at the kill, or a group of the next step sees a turn:
                       both take decisions of a workflow that were not made before
    Temporal server    the same
    everything         an agent sees its next turn; counted from the start of `everroll up`
    plain loop         the first turn that it had not played before; counted from the kill

Lost turns are those that the engine was asked for and that nobody recorded, and those of sessions that were given up
because their episode was begun anew; those that an agent is given again from the record are not. Lost tokens are those
turns times the tokens of a mean turn; of the plain loop they are counted. On a machine that does other things too,
times are longer: starting Python and torch is most of them.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import logging
import os
import random
import signal
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from everroll.contracts import names
from everroll.local.ports import choose_port
from everroll.temporal import install_runtime
from tests.chaos.judges import count_generated
from tests.chaos.world import RUN, SeenTurn, Size, World, open_world
from tests.small_run import make_model

SIZE = Size(
    num_steps=100_000,
    groups_per_step=4,
    episodes_per_group=4,
    turns=4,
    train_heartbeat_seconds=5.0,
    continue_as_new_events=4096,
    checkpoint_every=1,
    forked=False,
)
_EVENT_SECONDS = 180.0
_LOOK_SECONDS = 0.005
_SETTLE_SECONDS = (1.0, 4.0)
_TRAINING_SECONDS = 0.5
"""About what a step takes."""
_UNDER_WAY_SECONDS = 0.1
"""After which what was on its way at the kill has arrived."""

Wait = Callable[[World, float], Awaitable[float]]
"""Waits for the useful event after a kill at that time; returns when it was, in Unix seconds."""


@dataclass(frozen=True)
class Measured:
    """One victim."""

    system: str
    victim: str
    seconds: list[float]
    lost_turns: float
    """Of one kill, on average."""
    lost_tokens: float
    lost_episodes: float
    """Episodes that had to be begun anew, of one kill, on average."""

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)


@dataclass(frozen=True)
class Counts:
    """What had been lost so far."""

    turns: int
    episodes: int


async def measure(world: World, victim: str, num_kills: int, rng: random.Random) -> Measured:
    """Kill it so many times."""
    before = await count_lost(world)
    seconds = []
    for _ in range(num_kills):
        await asyncio.sleep(rng.uniform(*_SETTLE_SECONDS))
        seconds.append(await _KILLS[victim](world, rng))
        print(f"{victim}: {seconds[-1]:.2f} s", file=sys.stderr)
        await await_all_up(world)
    after = await count_lost(world)
    turns = (after.turns - before.turns) / num_kills
    seen = world.read_seen()
    tokens = turns * statistics.mean(turn.tokens for turn in seen)
    episodes = (after.episodes - before.episodes) / num_kills
    return told(Measured("everroll", victim, seconds, turns, tokens, episodes))


async def count_lost(world: World) -> Counts:
    """At a moment when nothing is being sampled: while a step is trained."""
    while True:
        await _until(lambda: _is_training(world))
        generated, recorded = count_generated(world), world.count_recorded_turns()
        if _is_training(world) and generated == count_generated(world):
            break
    with contextlib.closing(sqlite3.connect(f"file:{world.journal}?mode=ro", uri=True, timeout=10)) as journal:
        sessions = journal.execute(
            "SELECT session_id, (SELECT count(*) FROM turns WHERE turns.session_id = sessions.session_id) FROM sessions"
        ).fetchall()
    last: dict[str, tuple[int, int]] = {}
    given_up = 0
    for session_id, num_turns in sessions:
        episode, _, attempt = session_id.rpartition("-")
        earlier, later = sorted([last.get(episode, (-1, 0)), (int(attempt), num_turns)])
        given_up += earlier[1]
        last[episode] = later
    return Counts(generated - recorded + given_up, len(sessions) - len(last))


async def kill_rollout_worker(world: World, rng: random.Random) -> float:
    """In the middle of episodes of its own."""
    while True:
        identity = world.stack.find("worker-rollout")
        assert identity is not None
        if _open_sessions(world.read_seen(), identity.pid):
            break
        await asyncio.sleep(_LOOK_SECONDS)
    world.stack.signal("worker-rollout", signal.SIGKILL)
    killed = time.time()
    lines = list(world.read_seen())
    mine = _open_sessions(lines, identity.pid)
    if not mine:
        return await kill_rollout_worker(world, rng)
    known = {(turn.session, turn.turn) for turn in lines}

    def find() -> float | None:
        """An episode that ran into its length has no further turn: its group is stored then."""
        taken = _first_new_turns(world, known, but_not=identity.pid)
        left = {session for session in mine - taken.keys() if not _is_stored(world, session)}
        times = [at for session, at in taken.items() if session in mine]
        return max(times) if times and not left else None

    return (await _await_event(find)) - killed


def _first_new_turns(world: World, known: set[tuple[str, int]], but_not: int = 0) -> dict[str, float]:
    """By session: when it saw its first turn that is not known, on another process than that one."""
    found: dict[str, float] = {}
    for turn in world.read_seen():
        if turn.pid != but_not and (turn.session, turn.turn) not in known:
            found.setdefault(turn.session, turn.at)
    return found


def _is_stored(world: World, session: str) -> bool:
    return int(session.split("-")[1]) in _stored_groups(world)


def _stored_groups(world: World) -> dict[int, float]:
    """By group: when it was stored."""
    paths = (world.store / RUN / "groups").glob("*/[!.]*")
    return {int(path.parent.name): path.stat().st_mtime for path in paths}


def _open_sessions(seen: list[SeenTurn], pid: int) -> set[str]:
    """Sessions that this worker plays, and that have seen a turn but not the last."""
    last = {turn.session: turn for turn in seen}
    return {name for name, turn in last.items() if turn.pid == pid and turn.turn < SIZE.turns - 1}


async def kill_trainer(world: World, rng: random.Random) -> float:
    while True:
        await _until(lambda: _is_training(world))
        step = world.count_steps() + 1
        await asyncio.sleep(rng.uniform(0, _TRAINING_SECONDS))
        if _is_training(world) and world.count_steps() == step - 1:
            break
    killed = time.time()
    world.stack.signal("worker-trainer", signal.SIGKILL)
    record = world.run_dir / "steps" / f"step_{step:06d}.json"
    return (await _await_event(lambda: record.stat().st_mtime if record.exists() else None)) - killed


async def kill_workflow_worker(world: World, rng: random.Random) -> float:
    return await _kill_and_await_decision(world, "worker-workflows")


async def kill_temporal(world: World, rng: random.Random) -> float:
    return await _kill_and_await_decision(world, "temporal")


async def kill_session_server(world: World, rng: random.Random) -> float:
    return await _kill_and_await_turn(world, "session-server")


async def kill_engine(world: World, rng: random.Random) -> float:
    return await _kill_and_await_turn(world, "engine")


async def kill_everything(world: World, rng: random.Random) -> float:
    await world.stack.kill_everything()
    known = {(turn.session, turn.turn) for turn in world.read_seen()}
    started = time.time()
    world.stack.launch()
    seconds = (await _await_event(lambda: _find_turn(world, known))) - started
    await world.stack.await_healthy()
    return seconds


async def _kill_and_await_turn(world: World, name: str) -> float:
    """An agent sees a turn that its successor had a part in: it is there before it has loaded anything, and by then
    all answers that were on their way at the kill have arrived."""
    killed = time.time()
    victim = world.stack.signal(name, signal.SIGKILL)
    await _until(lambda: world.stack.find(name) not in (None, victim))
    known = {(turn.session, turn.turn) for turn in world.read_seen()}
    return (await _await_event(lambda: _find_turn(world, known))) - killed


async def _kill_and_await_decision(world: World, name: str) -> float:
    """Something that takes a decision which no workflow had made."""
    killed = time.time()
    world.stack.signal(name, signal.SIGKILL)
    await asyncio.sleep(_UNDER_WAY_SECONDS)
    last = {turn.session: turn for turn in world.read_seen()}
    playing = {turn.group for turn in last.values() if turn.turn < SIZE.turns - 1} - _stored_groups(world).keys()
    next_step = (world.count_steps() + 1) * SIZE.groups_per_step
    begun = len(world.read_seen())

    def find() -> float | None:
        times = [turn.at for turn in world.read_seen()[begun:] if turn.group >= next_step]
        times += [at for group, at in _stored_groups(world).items() if group in playing]
        return min(times, default=None)

    return (await _await_event(find)) - killed


def _find_turn(world: World, known: set[tuple[str, int]]) -> float | None:
    return min(_first_new_turns(world, known).values(), default=None)


def _is_training(world: World) -> bool:
    return (world.run_dir / "requests" / f"step_{world.count_steps() + 1:06d}.json").exists()


async def await_all_up(world: World) -> None:
    await _until(lambda: all(world.stack.is_healthy(name) for name in world.stack.names()))


async def _until(condition: Callable[[], bool]) -> None:
    await _await_event(lambda: time.time() if condition() else None)


async def _await_event(find: Callable[[], float | None]) -> float:
    deadline = time.monotonic() + _EVENT_SECONDS
    while (found := find()) is None:
        assert time.monotonic() < deadline, "nothing happened after the kill"
        await asyncio.sleep(_LOOK_SECONDS)
    return found


_KILLS: dict[str, Callable[[World, random.Random], Awaitable[float]]] = {
    "rollout worker": kill_rollout_worker,
    "trainer": kill_trainer,
    "session server": kill_session_server,
    "engine": kill_engine,
    "workflow worker": kill_workflow_worker,
    "Temporal server": kill_temporal,
    "everything": kill_everything,
}


def _parse(line: bytes) -> dict[str, Any] | None:
    """None for what a process was writing when it was killed."""
    try:
        parsed: dict[str, Any] = json.loads(line)
    except ValueError:
        return None
    return parsed


@dataclass(frozen=True)
class PlainLoss:
    """Of one kill of the plain loop: seconds until a turn that had not been played before, and what was lost."""

    seconds: float
    turns: int
    tokens: int
    episodes: int


class PlainLoop:
    """`benchmarks.plain_loop` and its engine, each a process that is started again at once when it ends."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.model = directory / "model"
        make_model(self.model)
        self.port = choose_port(0)
        self.engine: subprocess.Popen[bytes] | None = None
        self.loop: subprocess.Popen[bytes] | None = None

    def start_engine(self) -> None:
        """As that of Everroll's runs."""
        command = [sys.executable, "-m", "everroll.cli", "engine", "--model-path", str(self.model), "--deterministic"]
        self.engine = self._start([*command, "--port", str(self.port), "--num-threads", "1"])

    def start_loop(self) -> None:
        command = [sys.executable, "-m", "benchmarks.plain_loop", str(self.model), self.url, str(self.directory)]
        self.loop = self._start([*command, "--turns", str(SIZE.turns)])

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def read_seen(self) -> list[dict[str, Any]]:
        path = self.directory / "seen.jsonl"
        lines = path.read_bytes().splitlines() if path.exists() else []
        return [line for text in lines if (line := _parse(text)) is not None]

    def count_steps(self) -> int:
        return len(list(self.directory.glob("checkpoint-*")))

    def kill_and_wait(self, victim: str) -> PlainLoss:
        """The step that was under way is played again; its turns up to where it was are work done twice."""
        killed = time.time()
        step = self.count_steps()
        for process in (self.engine, self.loop) if victim == "everything" else (self._find(victim),):
            assert process is not None
            process.kill()
            process.wait(30)
        known = {(line["session"], line["turn"]) for line in self.read_seen()}
        lost = [line for line in self.read_seen() if str(line["session"]).startswith(f"{step}-")]
        if victim != "loop":
            self.start_engine()
        assert self.loop is not None
        self.loop.wait(_EVENT_SECONDS)  # an engine that is gone ends it
        begin = len(self.read_seen())
        self.start_loop()  # it loads while the engine does
        deadline = time.monotonic() + _EVENT_SECONDS
        while True:
            for line in self.read_seen()[begin:]:
                if (line["session"], line["turn"]) not in known:
                    sessions = {line["session"] for line in lost}
                    return PlainLoss(
                        line["at"] - killed, len(lost), sum(line["tokens"] for line in lost), len(sessions)
                    )
            assert time.monotonic() < deadline, "the plain loop does not get on"
            time.sleep(_LOOK_SECONDS)

    def _find(self, victim: str) -> subprocess.Popen[bytes] | None:
        return self.engine if victim == "engine" else self.loop

    def stop(self) -> None:
        for process in (self.loop, self.engine):
            if process is not None:
                process.kill()
                process.wait(30)

    def _start(self, command: list[str]) -> subprocess.Popen[bytes]:
        with (self.directory / "log").open("ab") as log:
            return subprocess.Popen(command, stdout=log, stderr=log, env=os.environ | {"OMP_WAIT_POLICY": "PASSIVE"})


def measure_plain(directory: Path, num_kills: int, rng: random.Random) -> Iterator[Measured]:
    loop = PlainLoop(directory)
    try:
        loop.start_engine()
        loop.start_loop()
        for victim in ("loop", "engine", "everything"):
            kills = []
            for _ in range(num_kills):
                _await_rollouts(loop)
                time.sleep(rng.uniform(0, 0.5))
                kills.append(loop.kill_and_wait(victim))
                print(f"plain loop, {victim}: {kills[-1].seconds:.2f} s", file=sys.stderr)
            yield told(
                Measured(
                    "plain loop",
                    victim,
                    [kill.seconds for kill in kills],
                    statistics.mean(kill.turns for kill in kills),
                    statistics.mean(kill.tokens for kill in kills),
                    statistics.mean(kill.episodes for kill in kills),
                )
            )
    finally:
        loop.stop()


def _await_rollouts(loop: PlainLoop) -> None:
    """In the middle of a step's episodes."""
    deadline = time.monotonic() + _EVENT_SECONDS
    begin = len(loop.read_seen())
    while len(loop.read_seen()) < begin + 8:
        assert time.monotonic() < deadline, "the plain loop does not get on"
        time.sleep(_LOOK_SECONDS)


async def measure_everroll(
    directory: Path, victims: list[str], num_kills: int, rng: random.Random
) -> tuple[list[Measured], dict[str, Any]]:
    """What was measured, and the run's settings."""
    async with open_world(SIZE, directory, lambda text: None) as world:
        await world.start_run()
        await _until(lambda: world.count_steps() >= 2)
        measured = [await measure(world, victim, num_kills, rng) for victim in victims]
        handle = world.client.temporal.get_workflow_handle(names.run_workflow_id(RUN))
        await handle.cancel()
    return measured, world.spec.model_dump(mode="json")


def told(measured: Measured) -> Measured:
    """Say it as soon as it is known: all of it takes half an hour."""
    print(render_row(measured), file=sys.stderr, flush=True)
    return measured


def render(measured: list[Measured]) -> str:
    lines = [
        "| system | killed | kills | median s | worst s | lost turns | lost tokens | episodes begun anew |",
        "|---|---|---|---|---|---|---|---|",
    ]
    return "\n".join([*lines, *map(render_row, measured)])


def render_row(item: Measured) -> str:
    return (
        f"| {item.system} | {item.victim} | {len(item.seconds)} | {item.median:.1f} | {max(item.seconds):.1f} "
        f"| {item.lost_turns:.1f} | {item.lost_tokens:.0f} | {item.lost_episodes:.1f} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--victims", nargs="*", default=list(_KILLS), choices=list(_KILLS))
    parser.add_argument("--no-plain", action="store_true", help="leave the plain loop out")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    install_runtime()
    for name in ("temporalio", "temporal_core"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    with tempfile.TemporaryDirectory(prefix="everroll-durability-") as root:
        everroll, plain = Path(root, "everroll"), Path(root, "plain")
        plain.mkdir()
        measured: list[Measured] = []
        settings: dict[str, Any] = {}
        if options.victims:
            work = measure_everroll(everroll, options.victims, options.kills, random.Random(0))
            measured, settings = asyncio.run(work)
        if not options.no_plain:
            measured += measure_plain(plain, options.kills, random.Random(0))
    if options.json:
        results = [asdict(item) | {"median": item.median, "worst": max(item.seconds)} for item in measured]
        print(json.dumps({"run": settings, "size": asdict(SIZE), "kills": options.kills, "results": results}))
    else:
        print(render(measured))


if __name__ == "__main__":
    main()
