"""`everroll status` lists the groups that are open: number, state, for how long. Real Temporal."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path

from everroll.client import EverrollClient
from everroll.open_groups import OpenGroup, OpenGroups
from tests.conftest import TemporalServer
from tests.integration.test_orchestration import wait_for_status
from tests.integration.test_steering import command, wait_for
from tests.resume_helpers import RecordingSimulation


async def test_status_names_the_groups_that_can_be_skipped(
    temporal_server: TemporalServer, client: EverrollClient, run_name: str, task_queue: str, tmp_path: Path
) -> None:
    simulation = RecordingSimulation(client.temporal, tmp_path)
    simulation.held_from = 1
    rollout: dict[str, object] = {"groups_per_step": 11}
    spec = simulation.build_spec(run_name, task_queue, run={"num_steps": 1}, rollout=rollout)
    async with simulation.workers(client.temporal, task_queue):
        await client.start(spec)
        await wait_for_status(client, run_name, lambda view: view.status is not None and view.status.groups_ready == 1)
        await wait_for(lambda: len(simulation.episodes) >= 22)
        code, text = await command(temporal_server, "status", run_name)
        assert code == 0, text
        lines = [line for line in text.splitlines() if "group" in line and " for " in line]
        assert [line.partition(" for ")[0] for line in lines] == [
            "group 0: ready",
            *(f"group {group}: playing" for group in range(1, 8)),
        ]
        assert all(line.endswith(", episodes: 2 play") for line in lines[1:])
        assert "and 3 more groups" in text.splitlines()
        code, text = await command(temporal_server, "status", run_name, "--json")
        groups = json.loads(text)["open_groups"]
        assert [group["group"] for group in groups["first"]] == list(range(8))
        assert groups["num_more"] == 3
        await client.cancel(run_name)


def test_how_long() -> None:
    now = datetime(2026, 1, 1, tzinfo=UTC)
    playing = OpenGroup(5, "playing", now - timedelta(minutes=12, seconds=3.7), "2 play, 1 wait for a worker")
    ready = OpenGroup(6, "ready", now + timedelta(seconds=0.5))
    assert OpenGroups((playing, ready), 0).describe(now) == [
        "group 5: playing for 0:12:03, episodes: 2 play, 1 wait for a worker",
        "group 6: ready for 0:00:00",
    ]
    assert OpenGroups((), 4).describe(now) == []
