"""`python -m tests.chaos --minutes 30 --seed S`: rounds of chaos until the time is over or a promise is broken.

Each round is a run of its own on a stack of its own, struck at moments that the seed draws. It must complete, the audit
must pass, and its weights must equal, bit for bit, those of a clean run. At the first breach it stops with exit code 1,
keeps the directory of that round, and prints the command that repeats it.

    python -m tests.chaos --minutes 30                       # a fresh seed, printed
    python -m tests.chaos --seed S --round 7                 # that round alone
    python -m tests.chaos --chosen                           # each chosen moment once, no random ones
    python -m tests.chaos --chosen store-ack                 # one of them
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import secrets
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

from everroll.temporal import install_runtime
from tests.chaos.plan import Round, chosen_strikes, draw_round
from tests.chaos.rounds import Baselines, BreachError, play_round
from tests.chaos.world import Size


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description="Break a run on purpose, and judge it.")
    parser.add_argument("--minutes", type=float, default=30.0, help="no round begins after so long")
    parser.add_argument("--seed", default="", help="what the rounds are drawn from; a fresh one by default")
    parser.add_argument("--round", type=int, help="play this round of the seed alone")
    parser.add_argument("--chosen", nargs="*", metavar="NAME", help=f"chosen moments: {', '.join(chosen_strikes())}")
    parser.add_argument("--strikes", type=int, default=3, help="strikes in a round")
    parser.add_argument("--dir", type=Path, help="where the rounds' files go; a temporary directory by default")
    return parser.parse_args()


def list_rounds(arguments: argparse.Namespace) -> Iterator[tuple[str, Round, str]]:
    """Rounds with their names, and the options that repeat each."""
    if arguments.chosen is not None:
        for name in arguments.chosen or chosen_strikes():
            yield name, Round((chosen_strikes()[name],), Size()), f"--chosen {name}"
        return
    number = arguments.round or 0
    while True:
        options = f"--seed {arguments.seed} --strikes {arguments.strikes} --round {number}"
        yield str(number), draw_round(f"{arguments.seed}/{number}", arguments.strikes), options
        if arguments.round is not None:
            return
        number += 1


def say(text: str) -> None:
    print(f"{datetime.now().astimezone():%H:%M:%S}  {text}", flush=True)


async def play(arguments: argparse.Namespace, root: Path) -> int:
    deadline = time.monotonic() + arguments.minutes * 60
    baselines = Baselines(root, say)
    num_rounds = num_struck = 0
    for name, drawn, options in list_rounds(arguments):
        if time.monotonic() > deadline:
            break
        say(f"round {name}: {'; '.join(strike.text for strike in drawn.strikes)}")
        directory = root / f"round-{name}"
        try:
            told = await play_round(drawn.strikes, drawn.size, directory, baselines, say)
        except Exception as error:
            say(f"BREACH in round {name}: {type(error).__name__}: {error}")
            say(f"evidence in {directory}; repeat it with: python -m tests.chaos {options}")
            if isinstance(error, BreachError):
                return 1
            raise
        shutil.rmtree(directory)
        num_rounds, num_struck = num_rounds + 1, num_struck + told.struck
        say(
            f"round {name} passed in {told.seconds:.0f} s: {told.struck} of {len(drawn.strikes)} strikes, "
            f"{told.num_turns} turns recorded, {told.num_generated} generated"
        )
    say(f"no breach in {num_rounds} rounds, {num_struck} strikes")
    return 0


def main() -> int:
    arguments = parse_arguments()
    arguments.seed = arguments.seed or secrets.token_hex(4)
    # The SDK warns of each broken connection, and there will be many.
    install_runtime()
    for name in ("temporalio", "temporal_core"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    root = arguments.dir or Path(tempfile.mkdtemp(prefix="everroll-chaos-"))
    if arguments.chosen is None:
        say(f"seed {arguments.seed}")
    code = asyncio.run(play(arguments, root))
    if code == 0 and arguments.dir is None:
        shutil.rmtree(root, ignore_errors=True)
    return code


if __name__ == "__main__":
    sys.exit(main())
