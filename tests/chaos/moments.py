"""When to strike. A moment is found by watching what the run leaves behind: no process is told that it is watched.

Files and directories are looked at every millisecond, so that a kill follows within a few. Whether it was soon enough
is found out when the run is over (`confirming`).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from temporalio.service import RPCError

from everroll.contracts import names
from everroll.tokens.samples import decode_samples
from tests.chaos.confirming import (
    Confirm,
    group_activity,
    list_turns,
    run_activity,
    was_begun_again,
    was_under_way,
    was_unseen,
    was_written_later,
)
from tests.chaos.world import RUN, UPDATE, World

_LOOK_SECONDS = 0.001
_ASK_SECONDS = 0.02
_SLICE_SECONDS = 0.0005
_WRITING = ".tmp-step_*-*"


class RunEndedError(Exception):
    """The run was over before the moment came."""


@dataclass(frozen=True)
class Moment:
    """A moment in a run, by what can be seen of it from outside."""

    text: str
    """Completes the sentence "killed when ..."."""
    wait: Callable[[World], Coroutine[Any, Any, Confirm | None]]
    """Returns how to find out afterwards whether a blow met it; None if it cannot be missed."""
    is_brief: bool = False
    """It can be missed."""


def after_turns(num_turns: int, delay_seconds: float) -> Moment:
    """When agents have seen so many turns, and a little later."""

    async def wait(world: World) -> None:
        await _until(world, lambda: world.count_seen() >= num_turns, _ASK_SECONDS)
        await asyncio.sleep(delay_seconds)

    return Moment(f"{num_turns} turns had been seen", wait)


def after_steps(num_steps: int, delay_seconds: float) -> Moment:
    async def wait(world: World) -> None:
        await _until(world, lambda: world.count_steps() >= num_steps, _ASK_SECONDS)
        await asyncio.sleep(delay_seconds)

    return Moment(f"{num_steps} steps had been applied", wait)


def sample_stored(holding: Sequence[str] = ()) -> Moment:
    """A sample appears in the store; its activity has not been acknowledged. `holding`: who is stopped in that instant,
    to be killed."""

    async def wait(world: World) -> Confirm:
        path = await _await_new(world, world.store, "samples", holding)
        body = path.read_bytes()

        async def confirm(world: World, blow_at: float) -> bool:  # reading it takes longer than the moment lasts
            group, member, attempt = decode_samples(body).session_id.split("-")[-3:]
            again = was_begun_again(*group_activity(int(group), f"collect-{member}-{attempt}"))
            return await again(world, blow_at)

        return confirm

    return Moment("a sample was stored and not acknowledged", wait, is_brief=True)


def group_stored(holding: Sequence[str] = ()) -> Moment:
    """A group's manifest appears in the store; the workflow does not know yet."""

    async def wait(world: World) -> Confirm:
        path = await _await_new(world, world.store, "groups", holding)
        return was_begun_again(*group_activity(int(path.parent.name), names.STORE_GROUP))

    return Moment("a group was stored and not acknowledged", wait, is_brief=True)


def turn_recorded(holding: Sequence[str] = ()) -> Moment:
    """A turn is committed to the journal; its agent has not seen the answer."""

    async def wait(world: World) -> Confirm:
        before = list_turns(world)
        with _first_in_line():
            hold = _prepare_hold(world, holding)
            await _until(world, lambda: world.count_recorded_turns() > len(before) and hold(), _LOOK_SECONDS)
            return was_unseen(list_turns(world) - before)

    return Moment("a turn was recorded and not seen", wait, is_brief=True)


def training() -> Moment:
    """A step is being trained: its batch is on record, and nothing of it is applied."""

    async def wait(world: World) -> None:
        await _await_new_file(world, world.run_dir / "requests")

    return Moment("a step was being trained", wait)


def checkpoint_written() -> Moment:
    """A checkpoint is being written under its temporary name, just before it is renamed."""

    async def wait(world: World) -> Confirm:
        find = _watch_for_writing(world, f"{_WRITING}/*")
        with _first_in_line():
            await _until(world, lambda: find() is not None, _LOOK_SECONDS)
            name = find()
        return was_written_later(world.run_dir / "checkpoints" / (name or ""))

    return Moment("a checkpoint was being written", wait, is_brief=True)


def checkpoint_renamed() -> Moment:
    """A checkpoint has its name, and its step is not on record yet.

    That is a matter of a millisecond, so the trainer is slowed down from when it begins to write: it runs half a
    millisecond at a time, and is looked at while it stands still.
    """

    async def wait(world: World) -> Confirm:
        checkpoints, steps = world.run_dir / "checkpoints", world.run_dir / "steps"

        find = _watch_for_writing(world, _WRITING)

        def is_written() -> bool:
            return find() is not None

        def is_ahead() -> bool:
            newest = max((path.name for path in checkpoints.glob("step_*")), default="step_000000")
            return newest != "step_000000" and not (steps / f"{newest}.json").exists()

        with _first_in_line():
            while not is_ahead():
                await _until(world, lambda: is_written() or is_ahead(), _LOOK_SECONDS)
                try:
                    while is_written() and not is_ahead():
                        await asyncio.sleep(0)  # the relays go on
                        _step_forward(world, "worker-trainer")
                finally:
                    if not is_ahead():
                        world.stack.signal("worker-trainer", signal.SIGCONT)
        return was_begun_again(*run_activity(names.TRAIN_STEP))

    return Moment("a checkpoint was renamed and its step not on record", wait, is_brief=True)


def _watch_for_writing(world: World, pattern: str) -> Callable[[], str | None]:
    """The name that a checkpoint which is being written will have; a killed trainer leaves some behind."""
    checkpoints = world.run_dir / "checkpoints"
    left_behind = set(checkpoints.glob(pattern))

    def find() -> str | None:
        for path in checkpoints.glob(pattern):
            if path not in left_behind:
                return path.relative_to(checkpoints).parts[0].removeprefix(".tmp-").rpartition("-")[0]
        return None

    return find


@contextlib.contextmanager
def _first_in_line() -> Iterator[None]:
    """On a busy machine half a millisecond becomes many, unless this process may go before all others."""
    try:
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    except (AttributeError, PermissionError):
        yield
        return
    try:
        yield
    finally:
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))


def _step_forward(world: World, name: str) -> None:
    """Let a process run for a moment, and stop it."""
    if world.stack.signal(name, signal.SIGCONT) is None:
        return
    time.sleep(_SLICE_SECONDS)
    process = world.stack.signal(name, signal.SIGSTOP)
    give_up = time.monotonic() + _SLICE_SECONDS * 20
    while process is not None and not _is_stopped(process.pid) and time.monotonic() < give_up:
        time.sleep(_SLICE_SECONDS / 10)


def _is_stopped(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    return True


def step_applied(holding: Sequence[str] = ()) -> Moment:
    """A step is on record; Temporal does not know, and nothing of it is published."""

    async def wait(world: World) -> Confirm:
        with _first_in_line():
            await _await_new_file(world, world.run_dir / "steps", holding)
        return was_begun_again(*run_activity(names.TRAIN_STEP))

    return Moment("a step was applied and not acknowledged", wait, is_brief=True)


def publishing() -> Moment:
    """The publishing activity of a step has begun."""

    async def wait(world: World) -> Confirm:
        counts = world.links["engine"].counts
        before = counts[UPDATE]
        await _until(world, lambda: counts[UPDATE] > before, _LOOK_SECONDS)
        return was_under_way(*run_activity(names.PUBLISH_WEIGHTS))

    return Moment("weights were being published", wait, is_brief=True)


def continuing_as_new() -> Moment:
    """The run has continued as new: its next generation has not taken its first task, or just has."""

    async def wait(world: World) -> None:
        first = await _find_generation(world)
        while first is None:
            first = await _find_generation(world)
        while await _find_generation(world) in (first, None):
            if world.ended.is_set():
                raise RunEndedError
            await asyncio.sleep(_ASK_SECONDS)

    return Moment("the run continued as new", wait)


async def _find_generation(world: World) -> str | None:
    """Temporal's id of the run's latest execution; None if it does not answer."""
    handle = world.client.temporal.get_workflow_handle(names.run_workflow_id(RUN))
    with contextlib.suppress(RPCError):
        return (await handle.describe(rpc_timeout=timedelta(seconds=2))).run_id
    await asyncio.sleep(_ASK_SECONDS)
    return None


def _prepare_hold(world: World, names: Sequence[str]) -> Callable[[], bool]:
    """Stops these processes when it is called, and returns true.

    What was waited for lasts as few milliseconds as it takes to find a process and to kill it. Stopped in the same
    instant, it is found there.
    """
    processes = [process for process in world.stack.find_each(names).values() if process is not None]

    def hold() -> bool:
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGSTOP)
        return True

    return hold


async def _await_new(world: World, store: Path, kind: str, holding: Sequence[str]) -> Path:
    """A file that was not there; another with the same contents makes none."""
    parent = store / RUN / kind
    before = set(parent.glob("*/[!.]*"))
    new: set[Path] = set()

    hold = _prepare_hold(world, holding)

    def find() -> bool:
        new.update(set(parent.glob("*/[!.]*")) - before)
        return bool(new) and hold()

    with _first_in_line():
        await _until(world, find, _LOOK_SECONDS)
    return new.pop()


async def _await_new_file(world: World, parent: Path, holding: Sequence[str] = ()) -> None:
    def find_newest() -> str:
        return max((path.name for path in parent.glob("step_*")), default="")

    before, hold = find_newest(), _prepare_hold(world, holding)
    await _until(world, lambda: find_newest() > before and hold(), _LOOK_SECONDS)


async def _until(world: World, condition: Callable[[], bool], look_seconds: float) -> None:
    while not condition():
        if world.ended.is_set():
            raise RunEndedError
        await asyncio.sleep(look_seconds)
