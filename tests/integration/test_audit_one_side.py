"""The audit of a run that trains what another has played: its batches are that one's."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

from everroll.audit.evidence import BatchRead, RunEvent, RunHistory, StepScheduled
from everroll.audit.histories import HistoryReader
from everroll.audit.report import Breach, Findings
from everroll.audit.run import check_played
from everroll.audit.settlement import settle_groups
from everroll.audit.sources import RecordedEvidence
from everroll.client import EverrollClient
from everroll.contracts.training import TrainRequest
from everroll.sessions.journal import open_journal
from everroll.sessions.reading import open_journal_reader
from tests.integration.test_one_side import build, play
from tests.simulation import Simulation


def settle(history: RunHistory, change: Callable[[list[RunEvent]], list[RunEvent]]) -> list[Breach]:
    (generation,) = history.generations
    generation = dataclasses.replace(generation, events=change(list(generation.events)))
    findings = Findings()
    settle_groups(dataclasses.replace(history, generations=[generation]), findings)
    return findings.breaches


def swap_batches(events: list[RunEvent]) -> list[RunEvent]:
    """Step 1 trains what was played for step 2."""
    other = next(event.request for event in events if isinstance(event, StepScheduled) and event.request.step == 2)
    return [
        dataclasses.replace(event, request=event.request.model_copy(update={"batch": other.batch}))
        if isinstance(event, StepScheduled) and event.request.step == 1
        else event
        for event in events
    ]


def never_read(events: list[RunEvent]) -> list[RunEvent]:
    return [event for event in events if not (isinstance(event, BatchRead) and event.step == 1)]


async def test_the_batches_of_a_run_that_plays_nothing(
    client: EverrollClient, run_name: str, task_queue: str, tmp_path: Path
) -> None:
    await play(client, run_name, task_queue, tmp_path)
    other, played = f"{run_name}-t", tmp_path / "runs" / run_name
    async with Simulation(rollout_queue_suffix="-nobody").workers(client.temporal, task_queue):
        await client.start(build(tmp_path, other, task_queue, mode="train", batches_from=str(played)))
        await client.result(other)
    history = await HistoryReader(client.temporal, other).read_run()
    assert settle(history, lambda events: events) == []
    for change, text in (
        (swap_batches, "another batch was trained than was played for it"),
        (never_read, "the trainer was given a batch that was never read"),
    ):
        first = settle(history, change)[0]
        assert (first.step, first.message) == (1, text)
    journal = tmp_path / "journal.db"
    await (await open_journal(str(journal))).close()
    reader = open_journal_reader(str(journal))
    source = RecordedEvidence(client.temporal, other, reader, str(tmp_path / "store"), tmp_path / "runs" / other)

    async def compare() -> Findings:
        findings = Findings()
        await check_played(source, history, settle_groups(history, Findings()), findings)
        return findings

    assert (await compare()).breaches == []
    path = played / "requests" / "step_000002.json"
    stored = TrainRequest.model_validate_json(path.read_bytes())
    path.write_text(stored.model_copy(update={"batch": stored.batch[::-1]}).model_dump_json())
    (breach,) = (await compare()).breaches
    assert (breach.step, breach.message) == (2, "another batch was trained than was played for it")
    path.unlink()
    findings = await compare()
    assert (findings.breaches, len(findings.notes)) == ([], 1)
    assert findings.notes[0].startswith(f"1 batches could not be read in {played}")
    await reader.close()
