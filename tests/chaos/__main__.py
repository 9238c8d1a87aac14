"""`python -m tests.chaos --minutes 30 --seed S`: rounds of chaos until the time is over or a promise is broken.

Each round is a run of its own on a stack of its own, struck at moments that the seed draws. It must complete, the
audit must pass, what agents saw must be on record, and its weights must equal, bit for bit, those of a clean run. At
the first breach it stops with exit code 1, keeps the directory of that round, and prints the command that repeats it.

A strike can be missed: its moment does not come before the run is over, or nobody meets what is broken. It is then
tried again in a round of its own. At the end it says what was struck how often, and which cards of the deck never came
to pass; where the whole deck was dealt, or where cards were asked for by name, there must be none.

    python -m tests.chaos --minutes 30                       # a fresh seed, printed
    python -m tests.chaos --seed S --round 7                 # that round alone
    python -m tests.chaos --chosen                           # each chosen moment once, no random ones
    python -m tests.chaos --chosen store-ack                 # one of them
    python -m tests.chaos --seed S --kind freeze --kind 'cut engine'  # a round for each strike of these kinds
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import logging
import random
import secrets
import shutil
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from everroll.temporal import install_runtime
from tests.chaos import clock, machine
from tests.chaos.judges import BreachError
from tests.chaos.plan import Round, build_deck, chosen_strikes, draw_round, draw_strike, list_kinds
from tests.chaos.rounds import Baselines, Told, play_round
from tests.chaos.tally import Tally
from tests.chaos.world import Size

_TRIES = 4
"""Of a strike in rounds of its own: a brief moment can be missed."""
_LACKS = {"nothing": (True, True), "nodes": (False, True), "clocks": (True, False), "both": (False, False)}
"""What a deck can go without; whether it has nodes with disks, and clocks."""


@dataclass(frozen=True)
class Planned:
    """A round, its name, and the options that repeat it."""

    name: str
    drawn: Round
    options: str


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description="Break a run on purpose, and judge it.")
    parser.add_argument("--minutes", type=float, default=30.0, help="no drawn round begins after so long")
    parser.add_argument("--seed", default="", help="what the rounds are drawn from; a fresh one by default")
    parser.add_argument("--round", type=int, help="play this round of the seed alone")
    parser.add_argument("--chosen", nargs="*", metavar="NAME", help=f"chosen moments: {', '.join(chosen_strikes())}")
    parser.add_argument(
        "--kind",
        action="append",
        metavar="KIND",
        help="a round with one strike of this kind; 'freeze' is short for all that begin so. "
        f"Kinds: {', '.join(list_kinds(isolated=True, clocks=True))}",
    )
    parser.add_argument("--strikes", type=int, default=3, help="strikes in a round")
    parser.add_argument(
        "--lacks", choices=_LACKS, help="what the deck goes without; by default what is not possible here"
    )
    parser.add_argument("--dir", type=Path, help="where the rounds' files go; a temporary directory by default")
    arguments = parser.parse_args()
    for name in arguments.chosen or ():
        if name not in chosen_strikes():
            parser.error(f"no chosen moment {name!r}; there are: {', '.join(chosen_strikes())}")
    for kind in arguments.kind or ():
        if not match_kinds(kind, list_kinds(isolated=True, clocks=True)):
            parser.error(f"no kind begins with {kind!r}")
    return arguments


def match_kinds(wanted: str, kinds: Sequence[str]) -> list[str]:
    """The kind of that name, or those whose first words it is."""
    return [kind for kind in kinds if kind == wanted or kind.startswith(f"{wanted} ")]


def plan_alone(names: Iterable[str], seed: str) -> Iterator[Planned]:
    """A round for each of these cards, with no other strike."""
    for name in names:
        strike = draw_strike(name, random.Random(f"{name} {seed}"), Size())
        option = f"--chosen {name}" if name in chosen_strikes() else f"--seed {seed} --kind '{name}'"
        yield Planned(f"{name} alone", Round((strike,), Size()), option)


def plan_drawn(arguments: argparse.Namespace, kinds: Sequence[str], number: int) -> Planned:
    """A round of the seed."""
    options = f"--seed {arguments.seed} --strikes {arguments.strikes} --lacks {arguments.lacks} --round {number}"
    return Planned(str(number), draw_round(arguments.seed, number, arguments.strikes, kinds), options)


def say(text: str) -> None:
    print(f"{datetime.now().astimezone():%H:%M:%S}  {text}", flush=True)


def find_lacks() -> str:
    """What is not possible here, as a key of `_LACKS`; says so, and why."""
    missing = clock.find_missing()
    if missing:
        say(f"SKIPPED: clock: {missing}")
    possible = (machine.is_inside(), not missing)
    return next(name for name, has in _LACKS.items() if has == possible)


class Player:
    """Plays rounds until the time is over or one is a breach."""

    def __init__(self, root: Path, seconds: float, tally: Tally) -> None:
        self._root = root
        self._deadline = time.monotonic() + seconds
        self._tally = tally
        self._baselines = Baselines(root, say)
        self._num_played = 0

    @property
    def is_over(self) -> bool:
        return time.monotonic() > self._deadline

    async def play_drawn(self, rounds: Iterator[Planned], seed: str) -> None:
        """Rounds of several strikes; what is missed in one is tried again by itself.

        Raises:
            BreachError: the first one that is.
        """
        for planned in rounds:
            if self.is_over:
                return
            told = await self.play(planned)
            missed = [strike.name for strike in planned.drawn.strikes if strike.name not in told.struck]
            await self.play_alone(again for again in plan_alone(missed, seed) if not self.is_over)

    async def play_alone(self, rounds: Iterator[Planned]) -> None:
        """Rounds of one strike, each until it comes to pass.

        Raises:
            BreachError: the first one that is.
        """
        for planned in rounds:
            for _ in range(_TRIES):
                if (await self.play(planned)).struck:
                    break

    async def play(self, planned: Planned) -> Told:
        name, drawn = planned.name, planned.drawn
        say(f"round {name}: {'; '.join(strike.text for strike in drawn.strikes)}")
        self._num_played += 1
        directory = self._root / f"round-{self._num_played}"
        try:
            told = await play_round(drawn, directory, self._baselines, say)
        except Exception as error:
            self._tally.note_breach(drawn)
            say(f"BREACH in round {name}: {type(error).__name__}: {error}")
            say(f"evidence in {directory}; repeat it with: python -m tests.chaos {planned.options}")
            raise
        shutil.rmtree(directory)
        self._tally.note(drawn, told)
        stopped = f", stopped and resumed {told.num_resumes} times" if told.num_resumes else ""
        say(
            f"round {name} passed in {told.seconds:.0f} s: {len(told.struck)} of {len(drawn.strikes)} strikes, "
            f"{told.num_turns} turns recorded, {told.num_generated} generated{stopped}"
        )
        return told


async def play(arguments: argparse.Namespace, kinds: Sequence[str], root: Path, tally: Tally) -> list[str]:
    """All that is asked for; returns the cards that had their turn and never came to pass.

    Raises:
        BreachError: the first one that is.
    """
    player = Player(root, arguments.minutes * 60, tally)
    if arguments.chosen is None and arguments.kind is None:
        if arguments.round is not None:
            await player.play(plan_drawn(arguments, kinds, arguments.round))
        else:
            rounds = (plan_drawn(arguments, kinds, number) for number in itertools.count())
            await player.play_drawn(rounds, arguments.seed)
        missed = tally.find_missed()
        if missed:
            say(f"never came to pass: {', '.join(missed)}")
        return missed if tally.has_planned(build_deck(kinds)) else []
    wanted = list(arguments.chosen or chosen_strikes()) if arguments.chosen is not None else []
    everywhere = list_kinds(isolated=True, clocks=True)
    wanted += [kind for start in arguments.kind or () for kind in match_kinds(start, everywhere)]
    possible = [name for name in wanted if name in build_deck(kinds)]
    await player.play_alone(plan_alone(possible, arguments.seed))
    return [name for name in wanted if name not in possible or name in tally.find_missed()]


def enter_machine() -> None:
    """Go on in a machine of our own if that is permitted; otherwise say what will not be played, and why."""
    if not machine.is_inside():
        missing = machine.enter(["-m", "tests.chaos", *sys.argv[1:]])
        say(f"SKIPPED: node-lost, full disks: {missing}")
    else:
        machine.settle()


def main() -> int:
    arguments = parse_arguments()
    enter_machine()
    arguments.seed = arguments.seed or secrets.token_hex(4)
    # The SDK warns of each broken connection, and there will be many.
    install_runtime()
    for name in ("temporalio", "temporal_core"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    root = arguments.dir or Path(tempfile.mkdtemp(prefix="everroll-chaos-"))
    possible = find_lacks()
    arguments.lacks = arguments.lacks or possible
    isolated, clocks = _LACKS[arguments.lacks]
    if (isolated and not _LACKS[possible][0]) or (clocks and not _LACKS[possible][1]):
        say(f"this deck lacks {arguments.lacks}, and here one must lack {possible}")
        return 2
    if arguments.chosen is None:
        say(f"seed {arguments.seed}")
    tally, code = Tally(), 1
    try:
        missed = asyncio.run(play(arguments, list_kinds(isolated=isolated, clocks=clocks), root, tally))
        if missed:
            say(f"FAILED: never came to pass, or cannot here: {', '.join(missed)}")
        code = int(bool(missed))
    except BreachError:
        return 1
    finally:
        print(tally.describe(), flush=True)
    if code == 0 and arguments.dir is None:
        shutil.rmtree(root, ignore_errors=True)
    return code


if __name__ == "__main__":
    sys.exit(main())
