"""What a round does, and when: drawn from a seed, so that a breach can be repeated. Pure.

The moment at which a process really dies still depends on the machine; the seed repeats what is done and when it is
tried.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from tests.chaos.blows import Blow, CutLinks, Freeze, Kill, KillEverything, ResetLinks, StallLinks, Together
from tests.chaos.moments import (
    Moment,
    after_steps,
    after_turns,
    checkpoint_renamed,
    checkpoint_written,
    continuing_as_new,
    group_stored,
    publishing,
    sample_stored,
    step_applied,
    turn_recorded,
)
from tests.chaos.world import Size

ROLLOUT = ("worker-rollout", "worker-rollout-2")
PROCESSES = (*ROLLOUT, "worker-trainer", "session-server", "engine", "worker-workflows", "temporal")
_OVERLAPPED_SHARE = 0.2
LINKS = ("engine", "sessions", "worker-rollout-temporal", "worker-trainer-temporal", "worker-workflows-temporal")


@dataclass(frozen=True)
class Strike:
    """One blow, and the moment it waits for."""

    moment: Moment
    blow: Blow

    @property
    def text(self) -> str:
        return f"{self.blow.text}, when {self.moment.text}"


@dataclass(frozen=True)
class Round:
    """A run's strikes, one after the other."""

    strikes: tuple[Strike, ...]
    size: Size


def chosen_strikes() -> dict[str, Strike]:
    """The moments that are known to be delicate, each with the processes that are in the middle of it."""
    return {
        "store-ack": Strike(sample_stored(), Kill(ROLLOUT)),
        "group-ack": Strike(group_stored(), Kill(("worker-workflows",))),
        "turn-ack": Strike(turn_recorded(), Kill(("session-server",))),
        "turn-worker": Strike(turn_recorded(), Kill(("session-server", *ROLLOUT))),
        "checkpoint": Strike(checkpoint_written(), Kill(("worker-trainer",))),
        "rename": Strike(checkpoint_renamed(), Kill(("worker-trainer",))),
        "step-ack": Strike(step_applied(), Kill(("worker-trainer",))),
        "step-all": Strike(step_applied(), KillEverything()),
        "publish-worker": Strike(publishing(), Kill(("worker-workflows",))),
        "publish-engine": Strike(publishing(), Kill(("engine",))),
        "publish-both": Strike(publishing(), Kill(("worker-workflows", "engine"))),
        "publish-all": Strike(publishing(), KillEverything()),
        "continue": Strike(continuing_as_new(), Kill(("worker-workflows",))),
        "continue-temporal": Strike(continuing_as_new(), Kill(("temporal", "worker-workflows"))),
    }


def draw_round(seed: str, num_strikes: int = 3) -> Round:
    """A round of strikes at random and at chosen moments."""
    rng = random.Random(f"round {seed}")
    size = Size(seed=rng.randrange(3))
    strikes = [_draw_strike(rng, size, index / num_strikes) for index in range(num_strikes)]
    max_staleness = 1 if rng.random() < _OVERLAPPED_SHARE else 0
    return Round(tuple(strikes), replace(size, max_staleness=max_staleness))


def _draw_strike(rng: random.Random, size: Size, share: float) -> Strike:
    """`share` of the run should be over when it comes."""
    if rng.random() < 0.5:
        return rng.choice(list(chosen_strikes().values()))
    delay = rng.uniform(0.0, 0.5)
    blow = _draw_blow(rng)
    if rng.random() < 0.3:
        return Strike(after_steps(1 + int(share * (size.num_steps - 1)), delay), blow)
    num_turns = int((share + rng.uniform(0.02, 0.25)) * size.num_turns)
    return Strike(after_turns(min(num_turns, size.num_turns - 4), delay), blow)


def _draw_blow(rng: random.Random) -> Blow:
    kind = rng.choices(
        ("kill", "kill two", "everything", "freeze", "reset", "stall", "cut", "kill and cut"),
        (5, 3, 2, 3, 2, 2, 2, 2),
    )[0]
    seconds = rng.uniform(0.5, 6.0)
    if kind == "kill":
        return Kill((rng.choice(PROCESSES),))
    if kind == "kill two":
        return Kill(tuple(rng.sample(PROCESSES, 2)))
    if kind == "everything":
        return KillEverything(rng.uniform(0.0, 1.0))
    if kind == "freeze":
        return Freeze(rng.choice(PROCESSES), seconds)
    names = tuple(rng.sample(LINKS, rng.choice((1, 1, 2))))
    if kind == "reset":
        return ResetLinks(names)
    if kind == "stall":
        return StallLinks(names, seconds)
    if kind == "cut":
        return CutLinks(names, seconds)
    return Together((Kill((rng.choice(PROCESSES),)), CutLinks(names, seconds)))
