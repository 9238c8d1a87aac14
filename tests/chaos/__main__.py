"""`python -m tests.chaos --minutes 30 --seed S`: rounds of chaos until the time is over or a promise is broken.

Each round is a run of its own on a stack of its own, struck at moments that the seed draws. It must complete, the audit
must pass, and its weights must equal, bit for bit, those of a clean run. At the first breach it stops with exit code 1,
keeps the directory of that round, and prints the command that repeats it. At the end it says what was struck how often.

    python -m tests.chaos --minutes 30                       # a fresh seed, printed
    python -m tests.chaos --seed S --round 7                 # that round alone
    python -m tests.chaos --chosen                           # each chosen moment once, no random ones
    python -m tests.chaos --chosen store-ack                 # one of them
    python -m tests.chaos --seed S --kind freeze --kind cut  # a round for each: one strike of that kind
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import random
import secrets
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path

from everroll.temporal import install_runtime
from tests.chaos import clock, machine
from tests.chaos.judges import BreachError
from tests.chaos.plan import Round, chosen_strikes, draw_round, draw_strike, list_kinds
from tests.chaos.rounds import Baselines, play_round
from tests.chaos.tally import Tally
from tests.chaos.world import Size


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description="Break a run on purpose, and judge it.")
    kinds = list_kinds(isolated=True, clocks=True)
    parser.add_argument("--minutes", type=float, default=30.0, help="no round begins after so long")
    parser.add_argument("--seed", default="", help="what the rounds are drawn from; a fresh one by default")
    parser.add_argument("--round", type=int, help="play this round of the seed alone")
    parser.add_argument("--chosen", nargs="*", metavar="NAME", help=f"chosen moments: {', '.join(chosen_strikes())}")
    parser.add_argument("--kind", action="append", choices=kinds, help="a round with one strike of this kind")
    parser.add_argument("--strikes", type=int, default=3, help="strikes in a round")
    parser.add_argument("--dir", type=Path, help="where the rounds' files go; a temporary directory by default")
    return parser.parse_args()


def list_rounds(arguments: argparse.Namespace, kinds: Sequence[str]) -> Iterator[tuple[str, Round, str]]:
    """Rounds with their names, and the options that repeat each."""
    if arguments.chosen is not None:
        for name in arguments.chosen or chosen_strikes():
            yield name, Round((chosen_strikes()[name],), Size()), f"--chosen {name}"
        return
    if arguments.kind is not None:
        for number, kind in enumerate(arguments.kind):
            strike = draw_strike(kind, random.Random(f"{kind} {arguments.seed}"), Size())
            yield f"{number}-{kind}", Round((strike,), Size()), f"--seed {arguments.seed} --kind '{kind}'"
        return
    number = arguments.round or 0
    while True:
        options = f"--seed {arguments.seed} --strikes {arguments.strikes} --round {number}"
        yield str(number), draw_round(arguments.seed, number, arguments.strikes, kinds), options
        if arguments.round is not None:
            return
        number += 1


def say(text: str) -> None:
    print(f"{datetime.now().astimezone():%H:%M:%S}  {text}", flush=True)


def find_kinds() -> list[str]:
    """The kinds of strikes that are possible here; says which are not, and why."""
    missing = clock.find_missing()
    if missing:
        say(f"SKIPPED: clock: {missing}")
    return list_kinds(isolated=machine.is_inside(), clocks=not missing)


async def play(rounds: Iterator[tuple[str, Round, str]], root: Path, seconds: float, tally: Tally) -> int:
    deadline = time.monotonic() + seconds
    baselines = Baselines(root, say)
    for name, drawn, options in rounds:
        if time.monotonic() > deadline:
            break
        say(f"round {name}: {'; '.join(strike.text for strike in drawn.strikes)}")
        directory = root / f"round-{name.replace(' ', '-')}"
        try:
            told = await play_round(drawn, directory, baselines, say)
        except Exception as error:
            tally.note_breach(drawn)
            say(f"BREACH in round {name}: {type(error).__name__}: {error}")
            say(f"evidence in {directory}; repeat it with: python -m tests.chaos {options}")
            if isinstance(error, BreachError):
                return 1
            raise
        shutil.rmtree(directory)
        tally.note(drawn, told)
        stopped = f", stopped and resumed {told.num_resumes} times" if told.num_resumes else ""
        say(
            f"round {name} passed in {told.seconds:.0f} s: {len(told.struck)} of {len(drawn.strikes)} strikes, "
            f"{told.num_turns} turns recorded, {told.num_generated} generated{stopped}"
        )
    return 0


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
    kinds = find_kinds()
    if arguments.chosen is None:
        say(f"seed {arguments.seed}")
    tally = Tally()
    try:
        code = asyncio.run(play(list_rounds(arguments, kinds), root, arguments.minutes * 60, tally))
    finally:
        print(tally.describe(), flush=True)
    if code == 0 and arguments.dir is None:
        shutil.rmtree(root, ignore_errors=True)
    return code


if __name__ == "__main__":
    sys.exit(main())
