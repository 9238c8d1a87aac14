"""A run that must end does so at once, and what it was about is settled once all the same."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from temporalio.exceptions import ApplicationError

from everroll.client import EverrollClient, RunFailedError
from everroll.contracts.outcomes import ErrorType
from everroll.contracts.rollout import EpisodeReport, EpisodeRequest
from everroll.contracts.training import ResumeRequest
from tests.resume_helpers import RecordingSimulation, audit_settlement, read_fates
from tests.simulation import succeed


async def test_a_terminal_failure_ends_a_run_while_a_step_is_trained(
    client: EverrollClient, run_name: str, task_queue: str, tmp_path: Path
) -> None:
    """The trainer has applied the step and is not done; the run does not wait for it, and a resume finds it."""
    simulation = RecordingSimulation(client.temporal, tmp_path)
    simulation.train_gate = asyncio.Event()
    broken = True

    def play(request: EpisodeRequest) -> EpisodeReport:
        if broken and simulation.trained and request.key.group == 3:
            raise ApplicationError("POST /sessions: 500", type=ErrorType.SERVER.value, non_retryable=True)
        return succeed(request)

    simulation.play = play
    simulation.held_from = 3
    spec = simulation.build_spec(run_name, task_queue, run={"num_steps": 3}, rollout={"max_staleness": 1})
    async with simulation.workers(client.temporal, task_queue):
        await client.start(spec)
        async with asyncio.timeout(60):
            while not simulation.trained:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        simulation.held_from = None
        with pytest.raises(RunFailedError, match="500"):
            await asyncio.wait_for(client.result(run_name), 30)
        assert not simulation.train_gate.is_set()
        simulation.train_gate.set()
        broken = False
        await client.resume_ended(spec, ResumeRequest())
        result = await asyncio.wait_for(client.result(run_name), 60)
    assert result.steps == 3
    assert [request.step for request in simulation.trained] == [1, 2, 3]
    assert sorted(simulation.trained_groups(run_name)) == list(range(6))
    assert read_fates(simulation.run_dir(run_name)) == {group: ["trained"] for group in range(6)}
    assert set((await audit_settlement(client, run_name)).values()) == {"trained"}
