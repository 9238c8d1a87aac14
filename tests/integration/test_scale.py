"""What no run may do at any size, on a small run; `python -m benchmarks.orchestration --groups 512` takes a large one.

The test server suggests continue-as-new at 200 events, so that a few steps see it several times.
"""

from __future__ import annotations

import asyncio

from benchmarks.orchestration_history import read_histories
from everroll.client import EverrollClient
from everroll.contracts import names
from everroll.payloads import MAX_PAYLOAD_BYTES
from tests.simulation import Simulation, build_spec

_GROUPS_PER_STEP = 8
_NUM_STEPS = 5
_SUGGESTED_AT = 200
_EVENTS_PER_GROUP = 12
"""Of the run, at most: its start, a report, its end, and the workflow tasks for them."""


async def test_histories_and_payloads_stay_small_and_no_workflow_task_fails(
    client: EverrollClient, run_name: str, task_queue: str
) -> None:
    """Steps overlap, so that groups are in flight at each continue-as-new; each is trained once all the same."""
    simulation = Simulation()
    rollout = {"groups_per_step": _GROUPS_PER_STEP, "episodes_per_group": 2, "max_staleness": 1}
    spec = build_spec(run_name, task_queue, run={"num_steps": _NUM_STEPS}, rollout=rollout)
    async with simulation.workers(client.temporal, task_queue):
        await client.start(spec)
        await asyncio.wait_for(client.result(run_name), 120)
    num_groups = _GROUPS_PER_STEP * _NUM_STEPS
    assert sorted(item.group for request in simulation.trained for item in request.batch) == list(range(num_groups))
    assert len(simulation.episodes) == 2 * num_groups
    found = await read_histories(client.temporal, names.run_workflow_id(run_name), num_groups)
    assert found.generations > 1
    assert found.failed_tasks == []
    assert found.max_payload_bytes < MAX_PAYLOAD_BYTES
    assert found.run_events < _SUGGESTED_AT + _EVENTS_PER_GROUP * 2 * _GROUPS_PER_STEP
    assert max(found.group_events) < _SUGGESTED_AT
