"""What a round does, and when: drawn from a seed, so that a breach can be repeated. Pure.

All kinds of strikes, one for each process or link, and all chosen moments are cards of one deck, dealt from the top
and shuffled anew when it is through: so each has its turn before any comes again. The moment at which a process really
dies still depends on the machine; the seed repeats what is done and when it is tried.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice

from tests.chaos.blows import Blow, Freeze, Kill, KillEverything, TakeOver, Together
from tests.chaos.disks import DISKS
from tests.chaos.judges import check_continued, check_generated_once
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
    training,
    turn_recorded,
)
from tests.chaos.outages import Cut, FillDisk, LoseNode, MoveClock, ResetLinks, Stall
from tests.chaos.world import WORKERS, Size, World

ROLLOUT = ("worker-rollout", "worker-rollout-2")
PROCESSES = (*WORKERS, "session-server", "engine", "temporal")
LINKS = ("engine", "sessions", *(f"{worker}-temporal" for worker in WORKERS))
_OVERLAPPED_SHARE = 0.2
_CLIENT_SECONDS = 10.0
"""The agents' patience with one request (`tests.chaos.agent`)."""

Judge = Callable[[World], Awaitable[None]]
"""Raises BreachError."""


@dataclass(frozen=True)
class Strike:
    """One blow, and the moment it waits for."""

    moment: Moment
    blow: Blow
    name: str
    """What it is counted as: a kind, with the process or link that it strikes, or a chosen moment."""
    judges: tuple[Judge, ...] = ()
    """What must be true besides where it is the only strike of its round."""

    @property
    def text(self) -> str:
        return f"{self.blow.text}, when {self.moment.text}"


@dataclass(frozen=True)
class Round:
    """A run's strikes, one after the other."""

    strikes: tuple[Strike, ...]
    size: Size

    @property
    def judges(self) -> tuple[Judge, ...]:
        return self.strikes[0].judges if len(self.strikes) == 1 else ()


def chosen_strikes() -> dict[str, Strike]:
    """The moments that are known to be delicate, each with the processes that are in the middle of it."""
    moments: dict[str, tuple[Moment, Blow]] = {
        "store-ack": (sample_stored(holding=ROLLOUT), Kill(ROLLOUT)),
        "group-ack": (group_stored(holding=("worker-workflows",)), Kill(("worker-workflows",))),
        "turn-ack": (turn_recorded(holding=("session-server",)), Kill(("session-server",))),
        "turn-worker": (turn_recorded(holding=("session-server",)), Kill(("session-server", *ROLLOUT))),
        "checkpoint": (checkpoint_written(), Kill(("worker-trainer",))),
        "rename": (checkpoint_renamed(), Kill(("worker-trainer",))),
        "step-ack": (step_applied(holding=("worker-trainer",)), Kill(("worker-trainer",))),
        "step-all": (step_applied(holding=("worker-trainer",)), KillEverything()),
        "publish-worker": (publishing(), Kill(("worker-workflows",))),
        "publish-engine": (publishing(), Kill(("engine",))),
        "publish-both": (publishing(), Kill(("worker-workflows", "engine"))),
        "publish-all": (publishing(), KillEverything()),
        "continue": (continuing_as_new(), Kill(("worker-workflows",))),
        "continue-temporal": (continuing_as_new(), Kill(("temporal", "worker-workflows"))),
        "take-over": (training(), TakeOver(1.0, kills_the_first=True)),
        "take-over-back": (training(), TakeOver(2.0, kills_the_first=False)),
    }
    continued = (check_continued, check_generated_once)
    return {
        name: Strike(moment, blow, name, continued if name.startswith("continue") else ())
        for name, (moment, blow) in moments.items()
    }


def build_deck(kinds: Sequence[str] | None = None) -> list[str]:
    """All cards: these kinds (by default all), and the chosen moments."""
    return [*(kinds or list_kinds(isolated=True, clocks=True)), *chosen_strikes()]


def draw_round(
    seed: str, number: int, num_strikes: int = 3, kinds: Sequence[str] | None = None, size: Size | None = None
) -> Round:
    """Round `number` of a seed: strikes at random and at chosen moments, of these kinds (by default all)."""
    deck = build_deck(kinds)
    names = islice(_deal(seed, deck), number * num_strikes, (number + 1) * num_strikes)
    rng = random.Random(f"round {seed}/{number}")
    size = size or Size(seed=rng.randrange(3))
    strikes = [draw_strike(name, rng, size, index / num_strikes) for index, name in enumerate(names)]
    max_staleness = 1 if rng.random() < _OVERLAPPED_SHARE else 0
    return Round(tuple(strikes), replace(size, max_staleness=max_staleness))


def _deal(seed: str, deck: Sequence[str]) -> Iterator[str]:
    cycle = 0
    while True:
        cards = list(deck)
        random.Random(f"deck {seed}/{cycle}").shuffle(cards)
        yield from cards
        cycle += 1


def list_kinds(*, isolated: bool, clocks: bool) -> list[str]:
    """Kinds of strikes at random moments; some need a machine of their own, or clocks that can be set."""
    kinds = [f"{what} {name}" for what in ("kill", "freeze") for name in PROCESSES]
    kinds += [f"{what} {name}" for what in ("reset", "stall", "cut") for name in LINKS]
    kinds += ["kill two", "freeze two", "everything", "stall two", "cut two", "kill and cut"]
    if isolated:
        kinds += ["node-lost", *(f"full {disk}" for disk in DISKS)]
    return [*kinds, "clock"] if clocks else kinds


def draw_strike(name: str, rng: random.Random, size: Size, share: float = 0.0) -> Strike:
    """A chosen moment, or a strike of that kind when about `share` of the run is over."""
    chosen = chosen_strikes().get(name)
    if chosen is not None:
        return chosen
    delay = rng.uniform(0.0, 0.5)
    blow = _draw_blow(name, rng, size)
    if rng.random() < 0.3:
        return Strike(after_steps(1 + int(share * (size.num_steps - 1)), delay), blow, name)
    num_turns = int((share + rng.uniform(0.02, 0.25)) * size.num_turns)
    return Strike(after_turns(min(num_turns, size.num_turns - 4), delay), blow, name)


def _draw_blow(kind: str, rng: random.Random, size: Size) -> Blow:
    what, _, name = kind.partition(" ")
    names = tuple(rng.sample(LINKS, 2)) if name == "two" else (name,)
    blows: dict[str, Callable[[], Blow]] = {
        "kill": lambda: Kill(tuple(rng.sample(PROCESSES, 2)) if name == "two" else (name,)),
        "everything": lambda: KillEverything(rng.uniform(0.0, 1.0)),
        "freeze": lambda: Freeze(name, _draw_freeze_seconds(name, rng, size)),
        "reset": lambda: ResetLinks(names),
        "stall": lambda: Stall(max(_draw_stall_seconds(link, rng, size) for link in names), names),
        "cut": lambda: Cut(rng.uniform(0.5, 6.0), names),
        "full": lambda: FillDisk(rng.uniform(2.0, 8.0), name),
        "node-lost": lambda: LoseNode(rng.uniform(1.0, 12.0)),
        "clock": lambda: MoveClock(rng.uniform(0.5, 6.0), rng.choice((-86400.0, -3600.0, -5.0, 5.0, 3600.0, 86400.0))),
    }
    if kind == "freeze two":
        frozen = (Freeze(process, _draw_freeze_seconds(process, rng, size)) for process in rng.sample(PROCESSES, 2))
        return Together(tuple(frozen), kind)
    if kind == "kill and cut":
        cut = Cut(rng.uniform(0.5, 6.0), tuple(rng.sample(LINKS, rng.choice((1, 2)))))
        return Together((Kill((rng.choice(PROCESSES),)), cut), kind)
    return blows[what]()


def _draw_freeze_seconds(process: str, rng: random.Random, size: Size) -> float:
    """Workers with heartbeats are taken for dead before they come back, some long before.

    Nothing notices a frozen workflow worker before its sticky queue's 2 s are over, and nothing takes the place of a
    server that is frozen: its clients wait, and agents give up after 10 s.
    """
    if process in ROLLOUT:
        return size.heartbeat_seconds + rng.uniform(0.5, 4.0)
    if process == "worker-trainer":
        return size.train_heartbeat_seconds + rng.uniform(0.2, 4.0)
    if process == "session-server":
        return _draw_patience(rng)
    return rng.uniform(2.5, 6.0) if process == "worker-workflows" else rng.uniform(0.5, 8.0)


def _draw_stall_seconds(link: str, rng: random.Random, size: Size) -> float:
    """As with freezes: what lies behind the link is taken for dead, or its clients give up."""
    if link.startswith(ROLLOUT):
        return size.heartbeat_seconds + rng.uniform(0.5, 4.0)
    if link.startswith("worker-trainer"):
        return size.train_heartbeat_seconds + rng.uniform(0.2, 4.0)
    return _draw_patience(rng) if link == "sessions" else rng.uniform(0.5, 8.0)


def _draw_patience(rng: random.Random) -> float:
    """Every other time longer than an agent waits for an answer."""
    return rng.choice((rng.uniform(0.5, 6.0), _CLIENT_SECONDS + rng.uniform(0.5, 2.0)))
