"""`everroll audit` where a part of Temporal's histories is gone: the rest is checked, and what could not be is said."""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import Iterable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from temporalio.api.common.v1 import WorkflowExecution
from temporalio.api.workflowservice.v1 import DeleteWorkflowExecutionRequest
from temporalio.client import WorkflowHandle
from temporalio.service import RPCError, RPCStatusCode
from typer.testing import CliRunner

from everroll.audit.histories import HistoryReader
from everroll.audit.report import Findings
from everroll.audit.resumption import BY_RECORD
from everroll.audit.run import find_trained
from everroll.audit.settlement import settle_groups
from everroll.cli.main import app
from everroll.client import EverrollClient
from everroll.contracts import names
from tests.audit_helpers import FinishedRun, first_sampled, flip_token, make_finished_run, rewrite_blob
from tests.conftest import TemporalServer
from tests.simulation import Simulation, build_spec

_SECONDS = 60
_RPC_TIMEOUT = timedelta(seconds=10)


async def delete_histories(client: EverrollClient, executions: Iterable[tuple[str, str]]) -> None:
    """As the namespace's retention does; returns when they are gone. Executions by workflow id and run id."""
    for workflow_id, run_id in executions:
        execution = WorkflowExecution(workflow_id=workflow_id, run_id=run_id)
        request = DeleteWorkflowExecutionRequest(namespace=client.temporal.namespace, workflow_execution=execution)
        await client.temporal.workflow_service.delete_workflow_execution(request, timeout=_RPC_TIMEOUT)
        handle = client.temporal.get_workflow_handle(workflow_id, run_id=run_id or None)
        async with asyncio.timeout(_SECONDS):
            while await is_held(handle):  # noqa: ASYNC110
                await asyncio.sleep(0.05)


async def is_held(handle: WorkflowHandle[Any, Any]) -> bool:
    try:
        await handle.describe(rpc_timeout=_RPC_TIMEOUT)
    except RPCError as error:
        if error.status is RPCStatusCode.NOT_FOUND:
            return False
        raise
    return True


def audit(run: FinishedRun) -> tuple[int, dict[str, Any]]:
    done = CliRunner().invoke(app, [*run.arguments(), "--json"])
    assert done.stdout, done.stderr
    return done.exit_code, json.loads(done.stdout)


def count(report: dict[str, Any], what: str) -> int:
    return sum(int(line["num_checked"]) for line in report["checks"] if line["what"] == what)


def test_groups_whose_histories_are_gone(
    tmp_path_factory: pytest.TempPathFactory, temporal_server: TemporalServer, tmp_path: Path
) -> None:
    name = f"gone-{uuid.uuid4().hex[:8]}"
    home = tmp_path_factory.mktemp("finished")
    run = make_finished_run(home, name, f"queue-{name}", temporal_server)
    code, whole = audit(run)
    assert (code, whole["num_without_history"]) == (0, 0)

    async def delete() -> None:
        client = await EverrollClient.connect(temporal_server.address, temporal_server.namespace)
        await delete_histories(client, [(names.group_workflow_id(name, group), "") for group in (1, 2)])

    asyncio.run(delete())
    code, report = audit(run)
    assert code == 0, report["breaches"]
    assert report["num_without_history"] == 2
    (note,) = [note for note in report["notes"] if note.startswith("of 2 groups Temporal has no history")]
    assert "which prompt they played" in note
    same = ("num_steps", "num_groups", "fates", "num_episodes", "num_tokens")
    assert {key: report[key] for key in same} == {key: whole[key] for key in same}
    bits = "trained samples equal the session's record, bit for bit"
    assert count(report, bits) == count(whole, bits) == 8
    rewards = "rewards equal what the episodes reported"
    assert (count(report, rewards), count(whole, rewards)) == (4, 8)
    # What is left is still held to the journal.
    tampered = run.copy(tmp_path / "copy")
    outcome = next(manifest for manifest in tampered.manifests() if manifest.group == 1).outcomes[0]
    assert outcome.samples is not None
    rewrite_blob(tampered.store, outcome.samples.blob, lambda sample: flip_token(sample, first_sampled(sample)))
    code, report = audit(tampered)
    assert code == 1
    assert {(breach["invariant"], breach["group"]) for breach in report["breaches"]} == {("I2", 1)}


async def test_a_run_whose_first_executions_are_gone(client: EverrollClient, run_name: str, task_queue: str) -> None:
    """Retention takes what was continued as new while the run goes on: the state that was carried says what it did."""
    async with Simulation().workers(client.temporal, task_queue):
        await client.start(build_spec(run_name, task_queue, run={"num_steps": 14}, rollout={"max_staleness": 1}))
        await asyncio.wait_for(client.result(run_name), _SECONDS)
    whole = await HistoryReader(client.temporal, run_name).read_run()
    assert len(whole.generations) >= 2
    kept = len(whole.generations) - 1
    first = whole.generations[0].run_id
    await delete_histories(client, [(names.run_workflow_id(run_name), first)])
    history = await HistoryReader(client.temporal, run_name).read_run()
    findings = Findings()
    account = settle_groups(history, findings)
    assert [str(breach) for breach in findings.breaches] == []
    assert (history.is_cut, len(history.generations)) == (True, kept)
    assert account.num_steps == 14
    assert sorted(account.fates) == sorted(account.dispensed)
    carried = history.generations[0].start
    assert carried is not None
    assert list(account.fates.values()).count(BY_RECORD) == carried.trained_groups > 0
    assert {item.step for item in find_trained(account, None).values()} == set(range(carried.step + 1, 15))
