"""When to strike. A moment is found by watching what the run leaves behind: no process is told that it is watched.

Files and directories are looked at every millisecond, so that a kill follows within a few.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from temporalio.service import RPCError

from everroll.contracts import names
from tests.chaos.world import RUN, UPDATE, World

_LOOK_SECONDS = 0.001
_ASK_SECONDS = 0.02


class RunEndedError(Exception):
    """The run was over before the moment came."""


@dataclass(frozen=True)
class Moment:
    """A moment in a run, by what can be seen of it from outside."""

    text: str
    """Completes the sentence "killed when ..."."""
    wait: Callable[[World], Awaitable[None]]


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


def sample_stored() -> Moment:
    """A sample appears in the store; its activity has not been acknowledged."""
    return Moment("a sample was stored and not acknowledged", lambda world: _await_new(world, world.store, "samples"))


def group_stored() -> Moment:
    """A group's manifest appears in the store; the workflow does not know yet."""
    return Moment("a group was stored and not acknowledged", lambda world: _await_new(world, world.store, "groups"))


def turn_recorded() -> Moment:
    """A turn is committed to the journal; its agent has not seen the answer."""

    async def wait(world: World) -> None:
        before = world.count_recorded_turns()
        await _until(world, lambda: world.count_recorded_turns() > before, _LOOK_SECONDS)

    return Moment("a turn was recorded and not seen", wait)


def checkpoint_written() -> Moment:
    """A checkpoint is being written under its temporary name, just before it is renamed."""

    async def wait(world: World) -> None:
        parent = world.run_dir / "checkpoints"
        await _until(world, lambda: any(parent.glob(".tmp-step_*-*/*")), _LOOK_SECONDS)

    return Moment("a checkpoint was being written", wait)


def checkpoint_renamed() -> Moment:
    """A checkpoint has its name, and its step is not on record yet."""

    async def wait(world: World) -> None:
        checkpoints, steps = world.run_dir / "checkpoints", world.run_dir / "steps"

        def is_ahead() -> bool:
            newest = max((path.name for path in checkpoints.glob("step_*")), default="step_000000")
            return newest != "step_000000" and not (steps / f"{newest}.json").exists()

        await _until(world, is_ahead, _LOOK_SECONDS)

    return Moment("a checkpoint was renamed and its step not on record", wait)


def step_applied() -> Moment:
    """A step is on record; Temporal does not know, and nothing of it is published."""
    return Moment(
        "a step was applied and not acknowledged", lambda world: _await_new_file(world, world.run_dir / "steps")
    )


def publishing() -> Moment:
    """The publishing activity of a step has begun."""

    async def wait(world: World) -> None:
        counts = world.links["engine"].counts
        before = counts[UPDATE]
        await _until(world, lambda: counts[UPDATE] > before, _LOOK_SECONDS)

    return Moment("weights were being published", wait)


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


async def _await_new(world: World, store: Path, kind: str) -> None:
    parent = store / RUN / kind

    def count() -> int:
        return sum(1 for _ in parent.glob("*/[!.]*"))

    before = count()
    await _until(world, lambda: count() > before, _LOOK_SECONDS)


async def _await_new_file(world: World, parent: Path) -> None:
    def count() -> int:
        return sum(1 for _ in parent.glob("step_*"))

    before = count()
    await _until(world, lambda: count() > before, _LOOK_SECONDS)


async def _until(world: World, condition: Callable[[], bool], look_seconds: float) -> None:
    while not condition():
        if world.ended.is_set():
            raise RunEndedError
        await asyncio.sleep(look_seconds)
