"""Evaluations on a real Temporal server, with simulated agent, engine and trainer."""

from __future__ import annotations

import asyncio
import functools
import json
import re
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from temporalio.client import WorkflowFailureError, WorkflowHandle
from temporalio.exceptions import ApplicationError, CancelledError

from everroll.audit.histories import HistoryReader
from everroll.audit.report import Findings
from everroll.audit.settlement import settle_groups
from everroll.client import EverrollClient, SteeringError
from everroll.contracts import names
from everroll.contracts.evaluation import EvaluateRequest, EvaluationRecord
from everroll.contracts.outcomes import ErrorType
from everroll.contracts.rollout import CollectResult, EpisodeKey, EpisodeReport, EpisodeRequest
from everroll.contracts.spec import RunSpec
from everroll.contracts.training import Phase
from everroll.evaluate import evaluate_run
from everroll.survey import survey_run
from tests.conftest import TemporalServer
from tests.integration.test_long_histories import grow_history
from tests.integration.test_orchestration import read_status, wait_for_status
from tests.integration.test_steering import command
from tests.simulation import Simulation, abort, build_spec, fail, succeed


def write_prompts(path: Path, number: int) -> str:
    path.write_text("".join(json.dumps({"text": f"say {n}"}) + "\n" for n in range(number)))
    return str(path)


def build(
    tmp_path: Path, run_name: str, task_queue: str, eval_section: dict[str, Any], **overrides: Mapping[str, object]
) -> RunSpec:
    sections = {
        **overrides,
        "run": {"output_dir": str(tmp_path / "runs"), **overrides.get("run", {})},
        "services": {
            "task_queue": task_queue,
            "store_url": str(tmp_path / "store"),
            "engine_urls": [f"http://{run_name}"],
        },
        "rollout": {"refill_backoff_seconds": 0.05, **overrides.get("rollout", {})},
    }
    prompts = write_prompts(tmp_path / "eval.jsonl", 4)
    return build_spec(run_name, task_queue, **sections, eval={"path": prompts, **eval_section})


def read_results(spec: RunSpec) -> list[EvaluationRecord]:
    path = Path(spec.run.output_dir) / spec.run.name / "evaluations.jsonl"
    return [EvaluationRecord.model_validate_json(line) for line in path.read_text().splitlines()]


def evaluated(simulation: Simulation) -> list[EpisodeRequest]:
    return [request for request in simulation.episodes if request.key.evaluation is not None]


def count_evaluated(simulation: Simulation) -> Counter[str | None]:
    """Episodes that began, by evaluation."""
    return Counter(request.key.evaluation for request in evaluated(simulation))


async def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.02)


async def wait_for(condition: Callable[[], Awaitable[bool]]) -> None:
    deadline = time.monotonic() + 60
    while not await condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.05)


async def has_pending(handle: WorkflowHandle[Any, Any], number: int) -> bool:
    """Whether so many activities of a workflow are not done."""
    return len((await handle.describe()).raw_description.pending_activities) >= number


async def has_signal(handle: WorkflowHandle[Any, Any]) -> bool:
    events = (await handle.fetch_history()).events
    return any(event.HasField("workflow_execution_signaled_event_attributes") for event in events)


def gate_evaluations() -> Simulation:
    return Simulation(gate=asyncio.Event(), is_gated=lambda key: key.evaluation is not None)


async def test_a_run_is_evaluated_by_schedule_and_at_its_end(
    client: EverrollClient, run_name: str, task_queue: str, tmp_path: Path
) -> None:
    spec = build(tmp_path, run_name, task_queue, {"every": 2, "episodes_per_prompt": 2}, run={"num_steps": 3})
    simulation = Simulation()
    async with simulation.workers(client.temporal, task_queue):
        await client.start(spec)
        result = await asyncio.wait_for(client.result(run_name), 60)
        view = await read_status(client, run_name)
        history = await HistoryReader(client.temporal, run_name).read_run()
    assert result.steps == 3
    assert [record.version for record in result.evaluations] == [0, 2, 3]
    results = sorted(read_results(spec), key=lambda record: record.version)
    assert results == sorted(result.evaluations, key=lambda record: record.version)
    assert view.status is not None
    assert view.status.evaluations == result.evaluations
    assert view.status.evaluations_in_flight == []
    for record in results:
        assert record.failure is None
        assert record.complete
        assert (record.num_prompts, record.num_episodes, record.lost) == (4, 8, {})
        assert record.mean_reward is not None
        assert (record.mean_reward.value, record.mean_reward.low) == (0.25, 0.25)
        assert record.pass_at["1"].value == 0.0
        assert record.fingerprint == results[0].fingerprint
    by_version: dict[str, list[tuple[int, int, int]]] = {}
    for request in evaluated(simulation):
        key = request.key
        assert request.prompt_index == key.group
        by_version.setdefault(str(key.evaluation), []).append((key.group, key.member, request.seed))
    assert sorted(by_version) == ["eval.v0", "eval.v2", "eval.v3"]
    assert len({tuple(sorted(plays)) for plays in by_version.values()}) == 1, "each version is asked the same way"
    assert sorted(request.key.session_id for request in simulation.episodes) == sorted(simulation.released)
    assert [[item.group for item in request.batch] for request in simulation.trained] == [[0, 1], [2, 3], [4, 5]]
    # The audit's account of the run knows nothing of them.
    findings = Findings()
    account = settle_groups(history, findings)
    assert findings.breaches == []
    assert sorted(account.dispensed) == [0, 1, 2, 3, 4, 5]


async def test_training_goes_on_under_a_slow_evaluation_and_the_run_waits_for_it(
    client: EverrollClient, run_name: str, task_queue: str, tmp_path: Path
) -> None:
    """`overlap`: the result names the versions that it is made of."""
    spec = build(tmp_path, run_name, task_queue, {"every": 100, "concurrency": 2})
    simulation = gate_evaluations()
    assert simulation.gate is not None
    async with simulation.workers(client.temporal, task_queue):
        await client.start(spec)
        view = await wait_for_status(
            client, run_name, lambda view: view.status is not None and view.status.phase is Phase.EVALUATING
        )
        assert view.state == "running"
        assert view.status is not None
        assert view.status.step == 2
        assert {(start.name, start.version) for start in view.status.evaluations_in_flight} == {
            ("eval", 0),
            ("eval", 2),
        }
        await wait_until(lambda: count_evaluated(simulation)["eval.v2"] >= 2)
        assert count_evaluated(simulation) == {"eval.v0": 2, "eval.v2": 2}, "two at a time each"
        simulation.gate.set()
        result = await asyncio.wait_for(client.result(run_name), 60)
    first, last = sorted(result.evaluations, key=lambda record: record.version)
    assert (first.min_weight_version, first.max_weight_version, first.num_exact_episodes) == (2, 2, 0)
    assert (last.version, last.min_weight_version, last.num_exact_episodes) == (2, 2, 4)


async def test_new_weights_wait_for_an_evaluation_where_that_is_asked_for(
    client: EverrollClient, run_name: str, task_queue: str, tmp_path: Path
) -> None:
    spec = build(tmp_path, run_name, task_queue, {"every": 1, "on_publish": "block"}, run={"num_steps": 1})
    simulation = gate_evaluations()
    assert simulation.gate is not None
    async with simulation.workers(client.temporal, task_queue):
        await client.start(spec)
        await wait_until(lambda: len(simulation.trained) == 1)
        await wait_until(lambda: len(evaluated(simulation)) == 4)
        assert simulation.published == [0]
        simulation.gate.set()
        result = await asyncio.wait_for(client.result(run_name), 60)
    assert simulation.published == [0, 1]
    assert [record.num_exact_episodes for record in result.evaluations] == [4, 4]


@pytest.mark.parametrize("priority", [1, 5])
async def test_training_goes_first_where_both_wait_for_a_worker(
    client: EverrollClient, run_name: str, task_queue: str, tmp_path: Path, priority: int
) -> None:
    """One slot; the evaluation's episodes were in the queue before training's. At priority 1 they also go first."""
    spec = build(
        tmp_path, run_name, task_queue, {"every": 100, "concurrency": 12, "priority": priority}, run={"num_steps": 1}
    )
    write_prompts(tmp_path / "eval.jsonl", 12)
    simulation = Simulation(gate=asyncio.Event(), rollout_slots=1)
    assert simulation.gate is not None
    async with simulation.workers(client.temporal, task_queue):
        await client.start(spec)
        handle = client.temporal.get_workflow_handle(names.evaluation_workflow_id(run_name, "eval", 0))
        await wait_until(lambda: len(simulation.episodes) == 1)
        groups = [client.temporal.get_workflow_handle(names.group_workflow_id(run_name, group)) for group in (0, 1)]
        for workflow, wanted in ((handle, 10), *((group, 1) for group in groups)):
            await wait_for(functools.partial(has_pending, workflow, wanted))
        simulation.gate.set()
        await asyncio.wait_for(client.result(run_name), 60)
    order = [
        request.key.evaluation == "eval.v0" for request in simulation.episodes if request.key.evaluation != "eval.v1"
    ]
    training = [place for place, is_evaluation in enumerate(order) if not is_evaluation]
    assert len(order) == 16
    if priority == 5:
        # The first has the slot already; a poll may hold one more.
        assert max(training) <= 6, order
    else:
        assert max(training) >= 9, order


async def test_a_terminal_failure_ends_the_evaluation_and_not_the_run(
    client: EverrollClient, run_name: str, task_queue: str, tmp_path: Path
) -> None:
    simulation = Simulation()
    broken = True

    def collect(key: EpisodeKey) -> CollectResult:
        if key.evaluation is not None and broken:
            raise ApplicationError("POST /samples answered 500: boom", type=ErrorType.SERVER.value, non_retryable=True)
        return simulation.build_collected(key)

    simulation.collect = collect
    spec = build(tmp_path, run_name, task_queue, {"every": 5, "at_start": False}, run={"num_steps": 1})
    async with simulation.workers(client.temporal, task_queue):
        await client.start(spec)
        result = await asyncio.wait_for(client.result(run_name), 60)
        handle = client.temporal.get_workflow_handle(names.evaluation_workflow_id(run_name, "eval", 1))
        with pytest.raises(WorkflowFailureError):
            await handle.result()
        assert result.steps == 1
        assert [record.failure for record in result.evaluations] == ["POST /samples answered 500: boom"]
        assert [record.failure for record in read_results(spec)] == ["POST /samples answered 500: boom"]
        # After the run: the engines get the weights again, and what failed may be tried again.
        broken = False
        (Path(spec.run.output_dir) / run_name / "weights" / "step_000001").mkdir(parents=True)
        again = await evaluate_run(client, run_name, EvaluateRequest())
        with pytest.raises(SteeringError, match="was evaluated on version 1 already"):
            await evaluate_run(client, run_name, EvaluateRequest())
        with pytest.raises(SteeringError, match="there is no step_000007"):
            await evaluate_run(client, run_name, EvaluateRequest(), version=7)
    assert [record.num_episodes for record in again.records] == [4]
    assert simulation.published == [0, 1, 1]
    assert [record.failure for record in read_results(spec)] == ["POST /samples answered 500: boom", None]


async def test_lost_episodes_are_counted_by_cause_and_never_as_0(
    client: EverrollClient, run_name: str, task_queue: str, tmp_path: Path
) -> None:
    """Prompt 0's agent always fails, prompt 1's first attempt is aborted."""
    simulation = Simulation()

    def play(request: EpisodeRequest) -> EpisodeReport:
        if request.key.evaluation is None:
            return succeed(request)
        return fail(request) if request.key.group == 0 else succeed(request).model_copy(update={"reward": 1.0})

    def collect(key: EpisodeKey) -> CollectResult:
        first = key.evaluation is not None and (key.group, key.attempt) == (1, 0)
        return abort(key) if first else simulation.build_collected(key)

    simulation.play, simulation.collect = play, collect
    rollout = {"max_refills": 2}
    spec = build(tmp_path, run_name, task_queue, {"every": 1, "at_start": False}, run={"num_steps": 1}, rollout=rollout)
    async with simulation.workers(client.temporal, task_queue):
        await client.start(spec)
        result = await asyncio.wait_for(client.result(run_name), 60)
    (record,) = result.evaluations
    assert record.lost == {"agent": 1}
    assert record.unusable == {"agent": 3, "transport": 1}
    assert record.num_episodes == 3
    assert record.pass_at["1"].value == 1.0
    assert record.pass_at["1"].low == pytest.approx(0.4385, abs=1e-4)
    assert result.unusable_episodes == {}, "training's own counts"
    lines = (tmp_path / "store" / record.episodes.uri).read_text().splitlines() if record.episodes else []
    assert len(lines) == 4


async def test_a_person_asks_for_an_evaluation_while_the_run_goes_on(
    client: EverrollClient, run_name: str, task_queue: str, tmp_path: Path
) -> None:
    simulation = Simulation(train_gate=asyncio.Event())
    assert simulation.train_gate is not None
    spec = build(tmp_path, run_name, task_queue, {}, run={"num_steps": 1})
    other = write_prompts(tmp_path / "other.jsonl", 3)
    async with simulation.workers(client.temporal, task_queue):
        await client.start(spec)
        await wait_until(lambda: len(simulation.trained) == 1)
        found = await evaluate_run(client, run_name, EvaluateRequest(episodes_per_prompt=3, by="ada@box"), version=0)
        assert found.version == 0
        assert [(record.num_episodes, record.requested) for record in found.records] == [(12, True)]
        with pytest.raises(SteeringError, match="was evaluated on version 0 already"):
            await evaluate_run(client, run_name, EvaluateRequest())
        with pytest.raises(SteeringError, match="the run is at version 0"):
            await evaluate_run(client, run_name, EvaluateRequest(), version=3)
        with pytest.raises(SteeringError, match="no set 'math'"):
            await evaluate_run(client, run_name, EvaluateRequest(name="math"))
        more = await evaluate_run(client, run_name, EvaluateRequest(path=other, max_prompts=2, name="other"))
        assert [(record.name, record.num_prompts) for record in more.records] == [("other", 2)]
        simulation.train_gate.set()
        result = await asyncio.wait_for(client.result(run_name), 60)
        view = await read_status(client, run_name)
    assert [record.name for record in result.evaluations] == ["eval", "other"]
    assert view.status is not None
    assert [(done.action, done.by) for done in view.status.steerings][:1] == [("evaluate", "ada@box")]
    assert len(read_results(spec)) == 2


async def test_a_long_evaluation_continues_as_new_and_plays_each_episode_once(
    client: EverrollClient, run_name: str, task_queue: str, tmp_path: Path
) -> None:
    """The test server suggests it at 200 events. Outcomes lie in the store meanwhile, not in the history."""
    spec = build(
        tmp_path,
        run_name,
        task_queue,
        {"every": 1, "at_start": False, "episodes_per_prompt": 2, "concurrency": 16},
        run={"num_steps": 1},
    )
    write_prompts(tmp_path / "eval.jsonl", 70)
    simulation = Simulation()
    simulation.collect = lambda key: (
        abort(key) if key.evaluation and key.group % 7 == key.attempt == 0 else simulation.build_collected(key)
    )
    async with simulation.workers(client.temporal, task_queue):
        await client.start(spec)
        result = await asyncio.wait_for(client.result(run_name), 60)
        handle = client.temporal.get_workflow_handle(names.evaluation_workflow_id(run_name, "eval", 1))
        description = await handle.describe()
    (record,) = result.evaluations
    assert description.raw_description.workflow_execution_info.first_run_id != description.run_id
    assert (record.num_episodes, record.lost, record.unusable) == (140, {}, {"transport": 20})
    played = [request.key.session_id for request in evaluated(simulation)]
    assert len(played) == len(set(played)) == 160
    assert description.history_length < 1000


async def test_a_run_that_continues_as_new_finds_its_evaluation_again(
    client: EverrollClient, run_name: str, task_queue: str, tmp_path: Path
) -> None:
    spec = build(tmp_path, run_name, task_queue, {"every": 100}, run={"num_steps": 1})
    simulation = Simulation(gate=asyncio.Event())
    assert simulation.gate is not None
    async with simulation.workers(client.temporal, task_queue):
        await client.start(spec)
        await wait_until(lambda: len(evaluated(simulation)) == 4)
        await grow_history(client, run_name)
        await wait_for_status(client, run_name, lambda view: view.status is not None and view.status.generation >= 1)
        simulation.gate.set()
        result = await asyncio.wait_for(client.result(run_name), 60)
    assert [record.version for record in result.evaluations] == [0, 1]
    assert [record.num_episodes for record in result.evaluations] == [4, 4]
    assert len(evaluated(simulation)) == 8


async def test_what_was_played_by_the_deadline_is_the_result(
    client: EverrollClient, run_name: str, task_queue: str, tmp_path: Path
) -> None:
    section = {"every": 1, "at_start": False, "timeout_seconds": 1.5}
    spec = build(tmp_path, run_name, task_queue, section, run={"num_steps": 1})
    simulation = Simulation(gate=asyncio.Event(), is_gated=lambda key: bool(key.evaluation) and key.group == 2)
    async with simulation.workers(client.temporal, task_queue):
        await client.start(spec)
        result = await asyncio.wait_for(client.result(run_name), 60)
    (record,) = result.evaluations
    assert not record.complete
    assert (record.num_episodes, record.lost) == (3, {"deadline": 1})


async def test_an_evaluation_holds_while_its_run_is_paused(
    client: EverrollClient, run_name: str, task_queue: str, tmp_path: Path
) -> None:
    spec = build(tmp_path, run_name, task_queue, {"every": 100, "concurrency": 1}, run={"num_steps": 1})
    simulation = gate_evaluations()
    assert simulation.gate is not None
    async with simulation.workers(client.temporal, task_queue):
        await client.start(spec)
        await wait_until(lambda: len(evaluated(simulation)) == 1)
        await client.pause(run_name)
        handle = client.temporal.get_workflow_handle(names.evaluation_workflow_id(run_name, "eval", 0))
        await wait_for(lambda: has_signal(handle))
        simulation.gate.set()
        await wait_until(lambda: sum(event == "collect 0" for event in simulation.events) >= 1)
        await asyncio.sleep(0.5)  # time enough for what must not happen
        assert len(evaluated(simulation)) == 1
        await client.resume(run_name)
        result = await asyncio.wait_for(client.result(run_name), 60)
    assert [record.num_episodes for record in result.evaluations] == [4, 4]


async def test_a_paused_run_is_not_evaluated_and_says_so(
    temporal_server: TemporalServer, client: EverrollClient, run_name: str, task_queue: str, tmp_path: Path
) -> None:
    """Refused at once when it is paused; told of when it is paused while an evaluation is waited for."""
    simulation = gate_evaluations()
    assert simulation.gate is not None
    simulation.train_gate = asyncio.Event()
    spec = build(tmp_path, run_name, task_queue, {}, run={"num_steps": 1})
    paused = rf"run {run_name} is paused since .* \(paused by request by .*: lunch\) and plays nothing"
    async with simulation.workers(client.temporal, task_queue):
        await client.start(spec)
        await wait_until(lambda: len(simulation.trained) == 1)
        told: asyncio.Queue[str] = asyncio.Queue()
        asked = asyncio.create_task(evaluate_run(client, run_name, EvaluateRequest(), on_notice=told.put_nowait))
        await wait_until(lambda: len(evaluated(simulation)) > 0)
        await client.pause(run_name, "lunch")
        notice = await asyncio.wait_for(told.get(), 60)
        assert re.fullmatch(
            rf"{paused}; it goes on with: everroll resume {run_name}; the evaluation waits for that", notice
        )
        code, text = await command(temporal_server, "eval", run_name)
        assert code != 0
        assert re.search(rf"{paused}; it goes on with: everroll resume {run_name}; then evaluate it", text), text
        await client.resume(run_name)
        simulation.gate.set()
        simulation.train_gate.set()
        assert (await asyncio.wait_for(asked, 60)).records[0].num_episodes == 4
        await asyncio.wait_for(client.result(run_name), 60)
    assert told.empty()


async def test_a_cancelled_run_leaves_no_evaluation_behind(
    client: EverrollClient, run_name: str, task_queue: str, tmp_path: Path
) -> None:
    spec = build(tmp_path, run_name, task_queue, {"every": 100})
    simulation = gate_evaluations()
    async with simulation.workers(client.temporal, task_queue):
        await client.start(spec)
        await wait_until(lambda: len(evaluated(simulation)) == 4)
        await client.cancel(run_name)
        handle = client.temporal.get_workflow_handle(names.evaluation_workflow_id(run_name, "eval", 0))
        with pytest.raises(WorkflowFailureError) as caught:
            await asyncio.wait_for(handle.result(), 60)
    assert isinstance(caught.value.cause, CancelledError)


async def test_an_evaluation_that_waits_for_a_worker_is_named(
    client: EverrollClient, run_name: str, task_queue: str, tmp_path: Path
) -> None:
    spec = build(tmp_path, run_name, task_queue, {"every": 100}, run={"num_steps": 1})
    simulation = gate_evaluations()
    assert simulation.gate is not None
    async with simulation.workers(client.temporal, task_queue):
        await client.start(spec)
        await wait_until(lambda: len(evaluated(simulation)) == 4)

        async def is_named() -> bool:
            survey = await survey_run(client.temporal, run_name, [])
            return any(item.activity == "evaluation 0 run_episode" for item in survey.waiting)

        await wait_for(is_named)
        simulation.gate.set()
        await asyncio.wait_for(client.result(run_name), 60)
