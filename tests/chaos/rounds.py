"""One round: a run under blows, and what must be true of it afterwards."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tests.chaos.blows import MissedError
from tests.chaos.confirming import Confirm
from tests.chaos.judges import BreachError, check_audit, check_generated, check_seen, count_generated
from tests.chaos.moments import Moment, RunEndedError
from tests.chaos.plan import Round, Strike
from tests.chaos.world import RUN, Size, World, open_world

Say = Callable[[str], None]
_RUN_SECONDS = 600.0
"""Patience for a busy machine; a round takes less than a minute on a quiet one."""
_BRIEF_MOMENT_STEPS = 3
_LOOK_SECONDS = 0.05


@dataclass(frozen=True)
class Told:
    """What a round can tell."""

    seconds: float
    struck: tuple[str, ...]
    """Names of the strikes that came to pass, at the moment that they waited for."""
    num_resumes: int
    """How often it had stopped for want of room, and was told to go on."""
    num_turns: int
    num_generated: int
    """Turns that the engine was asked for; more than `num_turns` where one was in flight at a blow."""


class Baselines:
    """The weights that clean runs end with, one for each size; played when first asked for."""

    def __init__(self, root: Path, say: Say) -> None:
        self._root = root
        self._say = say
        self._hashes: dict[Size, str] = {}

    async def find(self, size: Size) -> str:
        clean = replace(size, num_rollout_workers=1)
        if clean not in self._hashes:
            directory = self._root / f"clean-{len(self._hashes)}"
            async with open_world(clean, directory, self._say) as world:
                await world.start_run()
                state = await world.await_end(_RUN_SECONDS)
                if state != "completed":
                    raise BreachError(f"the clean run is {state}: {await describe(world)}")
                await check_audit(world)
                check_generated(world, ())
                self._hashes[clean] = world.hash_weights()
            self._say(f"the clean run of seed {size.seed} ends with weights {self._hashes[clean][:12]}")
            shutil.rmtree(directory)
        return self._hashes[clean]


async def play_round(played: Round, directory: Path, baselines: Baselines, say: Say) -> Told:
    """A run under these strikes, judged. The weights of an overlapped one depend on time, and are not compared.

    Raises:
        BreachError: it did not complete, the audit found something or left something out, a turn was lost that an
            agent had seen, turns were sampled for nothing, or its weights are others than the clean run's.
    """
    size = played.size
    expected = await baselines.find(size) if size.max_staleness == 0 else None
    started = time.monotonic()
    async with open_world(size, directory, say) as world:
        await world.start_run()
        striking = asyncio.create_task(strike_all(world, played.strikes))
        state = await world.await_end(_RUN_SECONDS)
        fallen = await striking
        if state != "completed":
            raise BreachError(f"the run is {state} after {_RUN_SECONDS:.0f} s: {await describe(world)}")
        await check_audit(world)
        await check_seen(world)
        check_generated(world, [one.strike.blow for one in fallen])
        for judge in played.judges:
            await judge(world)
        if expected is not None and world.hash_weights() != expected:
            raise BreachError(f"the weights are {world.hash_weights()}, those of the clean run {expected}")
        struck = [one.strike for one in fallen if await was_in_time(world, one)]
        return Told(
            seconds=time.monotonic() - started,
            struck=tuple(strike.name for strike in struck),
            num_resumes=world.num_resumes,
            num_turns=world.count_recorded_turns(),
            num_generated=count_generated(world),
        )


@dataclass(frozen=True)
class Fallen:
    """A blow that met somebody."""

    strike: Strike
    at: float
    """Unix seconds, just before it fell."""
    confirm: Confirm | None


async def was_in_time(world: World, fallen: Fallen) -> bool:
    """Whether it fell at the moment that it waited for; asked when the run is over."""
    if fallen.confirm is None or await fallen.confirm(world, fallen.at):
        return True
    world.say(f"missed: {fallen.strike.blow.text}: {fallen.strike.moment.text}, but no more when it fell")
    return False


async def strike_all(world: World, strikes: Sequence[Strike]) -> list[Fallen]:
    """One after the other, each at its moment; returns those that met somebody before the run was over.

    The next one's turn comes also when a brief moment has been missed for three steps.
    """
    fallen: list[Fallen] = []
    with contextlib.suppress(RunEndedError):
        for strike in strikes:
            moment = await await_moment(world, strike.moment)
            if moment is None:
                world.say(f"missed: {strike.moment.text}")
                continue
            world.say(f"{strike.blow.text}, as {strike.moment.text}")
            at = time.time()
            try:
                await strike.blow.strike(world)
            except MissedError as error:
                world.say(f"missed: {error}")
            else:
                fallen.append(Fallen(strike, at, moment.confirm))
    return fallen


@dataclass(frozen=True)
class Come:
    """A moment has come."""

    confirm: Confirm | None


async def await_moment(world: World, moment: Moment) -> Come | None:
    """None if it is a brief one, and did not come while three steps were applied.

    Raises:
        RunEndedError: the run is over.
    """
    last = world.count_steps() + _BRIEF_MOMENT_STEPS
    waiting = asyncio.ensure_future(moment.wait(world))
    try:
        while not waiting.done():
            if moment.is_brief and world.count_steps() >= last:
                return None
            await asyncio.wait([waiting], timeout=_LOOK_SECONDS)
        return Come(waiting.result())
    finally:
        waiting.cancel()
        await asyncio.wait([waiting])


async def describe(world: World) -> str:
    """What the run says of itself; for the report of a breach."""
    view = await world.client.status(RUN, survey=True)
    waiting = "" if view.survey is None else "; ".join(f"{item.subject}: {item.stage}" for item in view.survey.waiting)
    status = "" if view.status is None else f"step {view.status.step}, {view.status.phase.value}, {view.status.pause}"
    return " ".join(filter(None, [view.failure, view.status_error, status, waiting]))
