"""What a round of chaos does is a function of its seed, and the tools it breaks things with do what they say."""

from __future__ import annotations

import asyncio
import os
import random
import socket
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.chaos import clock
from tests.chaos.blows import Blow, Freeze
from tests.chaos.judges import count_losable
from tests.chaos.links import open_link
from tests.chaos.outages import Stall
from tests.chaos.plan import LINKS, PROCESSES, ROLLOUT, Round, chosen_strikes, draw_round, draw_strike, list_kinds
from tests.chaos.rounds import Told
from tests.chaos.tally import Tally
from tests.chaos.world import Size

KINDS = list_kinds(isolated=True, clocks=True)


def test_a_seed_repeats_its_round() -> None:
    texts = [[strike.text for strike in draw_round("s", number).strikes] for number in (1, 1, 2)]
    assert texts[0] == texts[1]
    assert texts[0] != texts[2]


def test_every_kind_and_every_chosen_moment_has_its_turn_before_any_comes_again() -> None:
    num_cards = len(KINDS) + len(chosen_strikes())
    names = [strike.name for number in range(num_cards) for strike in draw_round("s", number, 3).strikes]
    cards = Counter([*KINDS, *chosen_strikes()])
    for cycle in range(3):
        assert Counter(names[cycle * num_cards : (cycle + 1) * num_cards]) == cards


def test_kinds_that_are_not_possible_are_not_drawn() -> None:
    possible = list_kinds(isolated=False, clocks=False)
    names = {strike.name for number in range(30) for strike in draw_round("s", number, 3, possible).strikes}
    assert names == {*possible, *chosen_strikes()}
    assert {"node-lost", "clock", "full journal", "full store", "full runs", "full temporal"} == {*KINDS} - names


def test_every_process_and_every_link_has_cards_of_its_own() -> None:
    assert {f"{what} {name}" for what in ("kill", "freeze") for name in PROCESSES} < {*KINDS}
    assert {f"{what} {name}" for what in ("reset", "stall", "cut") for name in LINKS} < {*KINDS}
    assert len(KINDS) == len({*KINDS})


def test_a_frozen_worker_is_taken_for_dead_before_it_comes_back() -> None:
    size = Size()
    for name in (*ROLLOUT, "worker-trainer"):
        timeout = size.train_heartbeat_seconds if name == "worker-trainer" else size.heartbeat_seconds
        for seed in range(20):
            for kind in (f"freeze {name}", f"stall {name}-temporal"):
                blow = draw_strike(kind, random.Random(seed), size).blow
                assert isinstance(blow, Freeze | Stall)
                assert blow.seconds > timeout


def test_some_stalls_outlast_the_patience_of_agents() -> None:
    seconds = [blow.seconds for seed in range(20) if isinstance(blow := _draw("stall sessions", seed), Stall)]
    assert min(seconds) < 6 < 10 < max(seconds)


def _draw(kind: str, seed: int) -> Blow:
    return draw_strike(kind, random.Random(seed), Size()).blow


def test_the_table_counts_what_was_planned_and_what_came_to_pass() -> None:
    strike = chosen_strikes()["store-ack"]
    tally = Tally()
    tally.note(Round((strike, strike), Size()), Told(60.0, ("store-ack",), 0, 10, 10))
    tally.note_breach(Round((strike,), Size()))
    text = tally.describe()
    assert text.startswith("2 rounds, 1 strikes, 1 breaches\n")
    assert "| store-ack | 3 | 1 | 1 | 60 |" in text


def test_what_never_came_to_pass_is_told() -> None:
    strikes = tuple(chosen_strikes()[name] for name in ("rename", "store-ack"))
    tally = Tally()
    tally.note(Round(strikes, Size()), Told(60.0, ("store-ack",), 0, 10, 10))
    assert tally.find_missed() == ["rename"]
    assert tally.has_planned(["rename", "store-ack"])
    assert not tally.has_planned(["rename", "checkpoint"])
    tally.note(Round(strikes, Size()), Told(60.0, ("rename",), 0, 10, 10))
    assert tally.find_missed() == []


async def test_a_link_can_be_cut_and_healed() -> None:
    with socket.create_server(("127.0.0.1", 0)) as far:
        async with open_link("test", far.getsockname()[1]) as link:
            link.cut()
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection(("127.0.0.1", link.port), timeout=5)
            await link.heal()
            socket.create_connection(("127.0.0.1", link.port), timeout=5).close()


@pytest.mark.skipif(sys.platform != "linux", reason="other kernels keep more in a listener's queue than was asked for")
async def test_a_stalled_link_holds_back_what_is_sent_and_answers_no_new_connection() -> None:
    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(await reader.read(100))
        await writer.drain()
        writer.close()

    async with (
        await asyncio.start_server(echo, "127.0.0.1", 0) as server,
        open_link("test", server.sockets[0].getsockname()[1], (b"ping",)) as link,
    ):
        reader, writer = await asyncio.open_connection("127.0.0.1", link.port)
        link.stall()
        writer.write(b"ping")
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(reader.read(100), 0.1)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.open_connection("127.0.0.1", link.port), 0.1)
        await link.heal()
        assert await asyncio.wait_for(reader.read(100), 5) == b"ping"
        assert link.counts == {b"ping": 2}, "asked and answered"
        writer.close()


_TELL = """
import sqlite3, sys, time
from datetime import datetime
database = sqlite3.connect(":memory:")
for line in sys.stdin:
    (stamp,) = database.execute("SELECT strftime('%s', 'now')").fetchone()
    print(time.time(), datetime.now().timestamp(), stamp, time.monotonic(), flush=True)
"""


def test_a_clock_that_is_moved_moves_the_wall_clock_alone(tmp_path: Path) -> None:
    missing = clock.find_missing()
    if missing:
        pytest.skip(missing)
    moved = clock.open_clock(tmp_path)
    assert moved is not None

    def ask(process: subprocess.Popen[str]) -> list[float]:
        assert process.stdin is not None
        assert process.stdout is not None
        print("?", file=process.stdin, flush=True)
        return [float(part) for part in process.stdout.readline().split()]

    command = [sys.executable, "-I", "-c", _TELL]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=os.environ | moved.environment) as process:
        before = ask(process)
        moved.move(-3600)
        after = ask(process)
        moved.move(0)
        again = ask(process)
    assert [round((b - a) / 3600) for a, b in zip(before, after, strict=True)] == [-1, -1, -1, 0]
    assert [round((b - a) / 3600) for a, b in zip(before, again, strict=True)] == [0, 0, 0, 0]


@pytest.mark.parametrize("kind", KINDS)
def test_a_strike_of_a_kind_is_counted_as_that(kind: str) -> None:
    strike = draw_strike(kind, random.Random(1), Size())
    assert (strike.name, strike.blow.kind) == (kind, kind)


@pytest.mark.parametrize(
    ("kinds", "most"),
    [
        (["kill worker-rollout", "freeze worker-trainer", "kill temporal", "cut sessions"], 0),
        (["kill session-server", "cut engine"], 24),
        (["kill engine", "reset engine", "everything"], 72),
    ],
)
def test_only_what_holds_turns_in_flight_can_lose_them(kinds: list[str], most: int) -> None:
    blows = [draw_strike(kind, random.Random(1), Size()).blow for kind in kinds]
    assert count_losable(Size(), blows, 0) == most
    assert count_losable(Size(), blows, 1) == most + 12
    assert count_losable(Size(max_staleness=1), blows, 0) is None
