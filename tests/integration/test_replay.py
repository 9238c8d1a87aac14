"""F5: the workflow code of today replays the recorded histories of each release; a change that breaks one is caught.

Recorded with `python -m tests.replay.record` (docs/upgrades.md).
"""

from __future__ import annotations

import gzip
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from temporalio.client import WorkflowHistory
from temporalio.worker import Replayer, WorkflowReplayResult

from everroll.temporal import build_plugin
from tests.replay.changed import ChangedRun
from tests.replay.record import HISTORIES
from tests.replay.scenarios import SCENARIOS
from workflows.evaluation import Evaluation
from workflows.rollout_group import RolloutGroup
from workflows.training_run import TrainingRun

FILES = sorted(HISTORIES.glob("*/*.json.gz"))


def read_file(path: Path) -> list[dict[str, Any]]:
    stored: list[dict[str, Any]] = json.loads(gzip.decompress(path.read_bytes()))
    return stored


async def replay(path: Path, run: type[TrainingRun]) -> list[WorkflowReplayResult]:
    """C7: nothing but workflow code runs; there is no worker for any activity."""

    async def histories() -> AsyncIterator[WorkflowHistory]:
        for item in read_file(path):
            yield WorkflowHistory.from_json(item["workflow_id"], item["history"])

    replayer = Replayer(workflows=[run, RolloutGroup, Evaluation], plugins=[build_plugin()])
    async with replayer.workflow_replay_iterator(histories()) as results:
        return [result async for result in results]


@pytest.mark.parametrize("path", FILES, ids=[f"{path.parent.name}-{path.name.split('.')[0]}" for path in FILES])
async def test_recorded_histories_replay(path: Path) -> None:
    results = await replay(path, TrainingRun)
    assert len(results) > 2
    assert [
        (result.history.workflow_id, str(result.replay_failure)) for result in results if result.replay_failure
    ] == []


async def test_a_changed_workflow_is_caught() -> None:
    (path,) = [path for path in FILES if path.name == "normal.json.gz"][-1:]
    failures = [result for result in await replay(path, ChangedRun) if result.replay_failure is not None]
    assert [failure.history.workflow_id for failure in failures] == ["everroll/recorded-normal"]
    assert "TMPRL1100" in str(failures[0].replay_failure)


def test_each_release_has_all_scenarios() -> None:
    names_by_release: dict[str, set[str]] = {}
    for path in FILES:
        names_by_release.setdefault(path.parent.name, set()).add(path.name.split(".")[0])
    assert names_by_release
    for found in names_by_release.values():
        assert {scenario.name for scenario in SCENARIOS} <= found
