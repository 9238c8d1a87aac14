"""What a round of chaos does is a function of its seed."""

from __future__ import annotations

import socket

import pytest

from tests.chaos.links import open_link
from tests.chaos.plan import chosen_strikes, draw_round


def test_a_seed_repeats_its_round() -> None:
    texts = [[strike.text for strike in draw_round(f"s/{number}").strikes] for number in (1, 1, 2)]
    assert texts[0] == texts[1]
    assert texts[0] != texts[2]


def test_many_seeds_reach_every_process_and_link() -> None:
    text = " ".join(strike.text for number in range(300) for strike in draw_round(f"s/{number}").strikes)
    for wanted in ("temporal", "engine", "worker-trainer", "worker-rollout-2", "everything", "SIGSTOP", "stall", "cut"):
        assert wanted in text
    for strike in chosen_strikes().values():
        assert strike.text in text


async def test_a_link_can_be_cut_and_healed() -> None:
    with socket.create_server(("127.0.0.1", 0)) as far:
        async with open_link("test", far.getsockname()[1]) as link:
            link.cut()
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection(("127.0.0.1", link.port), timeout=5)
            await link.heal()
            socket.create_connection(("127.0.0.1", link.port), timeout=5).close()
