"""The audit's account of real histories: what the run's own ledger says, it finds from the events alone."""

from __future__ import annotations

import asyncio
import dataclasses

import pytest

from everroll.audit.evidence import RunHistory
from everroll.audit.histories import HistoryReader
from everroll.audit.report import AuditInputError, Findings
from everroll.audit.settlement import Account, settle_groups
from everroll.client import EverrollClient
from everroll.contracts import names
from everroll.contracts.rollout import EpisodeReport, EpisodeRequest
from tests.integration.test_orchestration import wait_for_status
from tests.simulation import Simulation, build_spec, fail, succeed


async def account_for(client: EverrollClient, run: str) -> Account:
    """The account of a run in whose history nothing is amiss."""
    history = await HistoryReader(client.temporal, run).read_run()
    findings = Findings()
    account = settle_groups(history, findings)
    assert [str(breach) for breach in findings.breaches] == []
    assert findings.checks
    return account


async def test_an_overlapped_run_over_several_executions(
    client: EverrollClient, run_name: str, task_queue: str
) -> None:
    """Groups in flight, ready and stale are carried through continue-as-new; every one is accounted for."""
    rollout = {"max_staleness": 1, "groups_per_step": 4, "on_unusable": "drop"}

    def play(request: EpisodeRequest) -> EpisodeReport:
        return fail(request) if request.key.group % 7 == 3 and request.key.member == 0 else succeed(request)

    simulation = Simulation(play=play)
    async with simulation.workers(client.temporal, task_queue):
        await client.start(build_spec(run_name, task_queue, run={"num_steps": 8}, rollout=rollout))
        result = await asyncio.wait_for(client.result(run_name), 150)
    history = await HistoryReader(client.temporal, run_name).read_run()
    assert len(history.generations) >= 2
    account = await account_for(client, run_name)
    fates = list(account.fates.values())
    assert len(account.dispensed) == len(fates)
    assert fates.count("trained") == result.trained_groups == 32
    dropped = {
        kind: fates.count(f"dropped: {kind}") for kind in {fate.partition(": ")[2] for fate in fates if ": " in fate}
    }
    assert dropped == result.dropped_groups
    assert dropped["agent"] > 0
    tell_of_another_drop(history)
    trained = [[item.group for item in request.batch] for request in simulation.trained]
    assert [[item.group for item in account.requests[step].batch] for step in sorted(account.requests)] == trained


def tell_of_another_drop(history: RunHistory) -> None:
    """What is carried on counts the dropped groups by cause, and that is compared."""
    second = history.generations[1]
    assert second.start is not None
    counts = second.start.dropped_groups
    start = second.start.model_copy(update={"dropped_groups": {**counts, "data": counts.get("data", 0) + 1}})
    generations = [history.generations[0], dataclasses.replace(second, start=start), *history.generations[2:]]
    findings = Findings()
    settle_groups(dataclasses.replace(history, generations=generations), findings)
    (breach,) = findings.breaches
    assert "took over other groups dropped than" in breach.message


async def test_an_open_run_is_accounted_for_up_to_now(client: EverrollClient, run_name: str, task_queue: str) -> None:
    gate = asyncio.Event()
    simulation = Simulation(gate=gate, is_gated=lambda key: key.group >= 3)
    async with simulation.workers(client.temporal, task_queue):
        await client.start(build_spec(run_name, task_queue))
        await wait_for_status(
            client,
            run_name,
            lambda view: view.status is not None and view.status.step == 1 and view.status.groups_ready == 1,
        )
        account = await account_for(client, run_name)
        assert account.fates == {0: "trained", 1: "trained", 2: "ready", 3: "in flight"}
        gate.set()
        await client.result(run_name)
    assert set((await account_for(client, run_name)).fates.values()) == {"trained"}


async def test_a_group_that_a_person_ended(client: EverrollClient, run_name: str, task_queue: str) -> None:
    gate = asyncio.Event()
    simulation = Simulation(gate=gate, is_gated=lambda key: key.group == 1)
    async with simulation.workers(client.temporal, task_queue):
        await client.start(build_spec(run_name, task_queue, run={"num_steps": 1}))
        await wait_for_status(
            client, run_name, lambda view: view.status is not None and view.status.groups_in_flight == [1]
        )
        await client.temporal.get_workflow_handle(names.group_workflow_id(run_name, 1)).terminate("skipped")
        await client.result(run_name)
    assert (await account_for(client, run_name)).fates == {0: "trained", 1: "dropped: skipped", 2: "trained"}


async def test_a_cancelled_run(client: EverrollClient, run_name: str, task_queue: str) -> None:
    simulation = Simulation(gate=asyncio.Event())
    async with simulation.workers(client.temporal, task_queue):
        await client.start(build_spec(run_name, task_queue))
        await wait_for_status(
            client, run_name, lambda view: view.status is not None and view.status.groups_in_flight == [0, 1]
        )
        await client.cancel(run_name)
        await wait_for_status(client, run_name, lambda view: view.state == "canceled")
    assert set((await account_for(client, run_name)).fates.values()) == {"ended with the run"}


async def test_a_run_that_is_stopped_with_groups_in_flight(
    client: EverrollClient, run_name: str, task_queue: str
) -> None:
    """It ends them itself, and its result does not count them as dropped; what it did count is still compared."""
    train_gate = asyncio.Event()
    simulation = Simulation(gate=asyncio.Event(), is_gated=lambda key: key.group >= 2, train_gate=train_gate)
    async with simulation.workers(client.temporal, task_queue):
        spec = build_spec(run_name, task_queue, run={"num_steps": 4}, rollout={"max_staleness": 2})
        await client.start(spec)
        await wait_for_status(
            client,
            run_name,
            lambda view: view.status is not None and view.status.groups_in_flight == [2, 3, 4, 5],
        )
        await client.stop(run_name)
        train_gate.set()
        result = await asyncio.wait_for(client.result(run_name), 60)
    assert (result.stopped, result.dropped_groups) == (True, {})
    fates = (await account_for(client, run_name)).fates
    assert fates == {0: "trained", 1: "trained", **dict.fromkeys(range(2, 6), "ended with the run")}
    history = await HistoryReader(client.temporal, run_name).read_run()
    for dropped in ({"data": 1}, {"skipped": 5}):
        findings = Findings()
        other = result.model_copy(update={"dropped_groups": dropped})
        settle_groups(dataclasses.replace(history, result=other), findings)
        (breach,) = findings.breaches
        assert "tells of other groups dropped" in breach.message
        assert breach.expected == "{} to {'skipped': 4}"


async def test_a_history_that_is_gone_is_said(client: EverrollClient, run_name: str) -> None:
    with pytest.raises(AuditInputError, match=f"no history of everroll/{run_name}/group/5"):
        await HistoryReader(client.temporal, run_name).read_group(5)
