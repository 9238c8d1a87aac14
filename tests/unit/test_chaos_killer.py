"""The demo's killer: what counts as killed and back, and how it is told."""

from __future__ import annotations

from pathlib import Path

from everroll.chaos.killer import EVERYTHING, Killer, Recovery, summarize
from everroll.local.identity import ProcessIdentity
from everroll.local.state import ProcessPhase, ProcessState, StackAddresses, StackDirectory, StackPhase, StackState

NAMES = ("temporal", "engine", "worker-trainer")


def make_killer(root: Path) -> Killer:
    directory = StackDirectory(root)
    directory.create()
    directory.write_state(
        StackState(
            phase=StackPhase.HEALTHY,
            supervisor=ProcessIdentity(pid=1, started="x"),
            addresses=StackAddresses(temporal_address="127.0.0.1:1", task_queue="q", store_url="s"),
            admin_key="k",
            processes=[ProcessState(name=name, phase=ProcessPhase.HEALTHY, log="x") for name in NAMES],
        )
    )
    return Killer(directory, 0, print, lambda: None)


def test_a_process_is_spared_until_it_was_killed_by_itself_and_came_back(tmp_path: Path) -> None:
    killer = make_killer(tmp_path)
    assert killer.find_spared() == [*NAMES]
    killer.recoveries += [Recovery(EVERYTHING, 9.0), Recovery("engine", 2.0)]
    assert killer.find_spared() == ["temporal", "worker-trainer"]
    killer.recoveries += [Recovery("temporal", 1.0), Recovery("worker-trainer", 3.0)]
    assert killer.find_spared() == []


def test_what_was_spared_is_told() -> None:
    assert "too soon" in summarize([], NAMES)
    told = summarize([Recovery("engine", 2.0)], ["temporal"])
    assert told.startswith("1 kills (engine 1); what was killed served again after 2.0 s (median)")
    assert "too soon for temporal" in told
    assert "too soon" not in summarize([Recovery("engine", 2.0)], [])
