"""The failure boundary end to end: real workflows, episodes, collection, session server and store; real broken sockets.

One fault proxy stands between workers and the session server, another one between that and the engine.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
from temporalio import activity
from temporalio.testing import ActivityEnvironment

from activities import deadline
from everroll.client import RunFailedError
from everroll.contracts.outcomes import SampleStatus
from everroll.contracts.rollout import EpisodeKey
from everroll.contracts.training import Phase, PrepareRunRequest, PrepareRunResult, ResumeRequest
from everroll.http_client import build_http_client
from everroll.sessions.client import SessionClient
from tests import boundary_agents
from tests.boundary_world import World, model_dir_fixture, world_fixture, write_dataset  # noqa: F401
from tests.conftest import TemporalServer
from tests.fault_proxy import Kind
from tests.integration.test_orchestration import wait_for_status
from tests.session_helpers import ADMIN_KEY

_STALLS = (Kind.STALL, Kind.STALL_IN_BODY)
_ONE_COLLECTION = "-1-1-0/samples"
"""That of group 1's member 1 at its first attempt, however often Temporal gives that out."""


@pytest.mark.parametrize(
    "kind",
    [
        Kind.RESET_BEFORE_SERVER,
        Kind.RESET_AFTER_SERVER,
        Kind.RESET_IN_HEADERS,
        Kind.RESET_IN_BODY,
        Kind.HALF_CLOSE,
        Kind.CLOSE_QUIETLY,
        Kind.STALL,
        Kind.STALL_IN_BODY,
    ],
)
async def test_one_broken_collection_costs_one_sample(world: World, kind: Kind) -> None:
    """A1, A2, B1: that sample is aborted and only its member is played again; everything else is trained."""
    if kind in _STALLS:
        world.be_impatient()
    fault = world.proxy.fault(kind, _ONE_COLLECTION, times=-1)
    result = await world.run(world.spec())
    assert fault.hits
    assert result.steps == 2
    assert sum(result.unusable_episodes.values()) == 1
    assert result.unusable_episodes == {"timeout" if kind in _STALLS else "transport": 1}
    assert result.dropped_groups == {}
    assert world.trained_groups() == [[0, 1], [2, 3]]


async def test_one_broken_session_start_costs_one_sample(world: World) -> None:
    """A6: creating a session has the same policy as collecting from it."""
    world.be_impatient()
    fault = world.proxy.fault(Kind.STALL, "/sessions", "POST")
    result = await world.run(world.spec())
    assert fault.hits == ["POST /sessions"]
    assert result.unusable_episodes == {"timeout": 1}
    assert world.trained_groups() == [[0, 1], [2, 3]]


async def test_a_retry_heals_a_broken_call(world: World) -> None:
    world.proxy.fault(Kind.RESET_IN_BODY, "/samples", times=2)
    world.proxy.fault(Kind.CLOSE_QUIETLY, "/sessions", "POST", times=1)
    result = await world.run(world.spec(rollout={"collect_attempts": 3}))
    assert result.unusable_episodes == {}


async def test_eight_groups_of_eight_with_one_reset(world: World, temporal_server: TemporalServer) -> None:
    world.proxy.fault(Kind.RESET_IN_BODY, _ONE_COLLECTION, times=-1)
    spec = world.spec(run={"num_steps": 1}, rollout={"groups_per_step": 8, "episodes_per_group": 8})
    result = await world.run(spec)
    assert result.unusable_episodes == {"transport": 1}
    assert world.trained_groups() == [list(range(8))]
    status = (await show_status(spec.run.name, temporal_server))["status"]
    assert status["num_episodes"] == 65
    assert status["unusable_episodes"] == {"transport": 1}
    assert status["last_cause"]["error"] == "RemoteProtocolError"
    assert status["last_cause"]["server"] == world.proxy.url


async def show_status(run: str, server: TemporalServer) -> dict[str, Any]:
    """`everroll status RUN --json`."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "everroll.cli", "status", run, "--json", "--address", server.address),
        stdout=asyncio.subprocess.PIPE,
    )
    output, _ = await asyncio.wait_for(process.communicate(), 60)
    shown: dict[str, Any] = json.loads(output)
    return shown


@pytest.mark.parametrize(("path", "method"), [("/samples", "POST"), ("/sessions", "POST")])
async def test_one_500_fails_the_run_after_one_attempt(
    world: World, temporal_server: TemporalServer, path: str, method: str
) -> None:
    """A5, F3."""
    fault = world.proxy.fault(Kind.ANSWER, path, method, times=-1, status=500, body=b"broken token invariant at 7")
    spec = world.spec(rollout={"groups_per_step": 1, "episodes_per_group": 2, "collect_attempts": 3})
    with pytest.raises(RunFailedError) as caught:
        await world.run(spec)
    hits = [hit for hit in fault.hits if "chat" not in hit]
    assert len(hits) <= 2, "one attempt per member"
    text = str(caught.value)
    assert text.startswith("RuntimeError: POST http://127.0.0.1:")
    assert "answered 500: broken token invariant at 7" in text
    shown = await show_status(spec.run.name, temporal_server)
    assert shown["state"] == "failed"
    assert "answered 500: broken token invariant at 7" in shown["failure"]
    assert world.simulation.trained == []


@pytest.mark.parametrize("kind", [Kind.CORRUPT, Kind.BAD_GZIP])
async def test_a_corrupt_body_is_terminal(world: World, kind: Kind) -> None:
    """A10."""
    world.proxy.fault(kind, "/samples")
    with pytest.raises(RunFailedError, match="BadAnswerError"):
        await world.run(world.spec())
    assert world.simulation.trained == []


async def test_a_wrong_scheme_is_terminal(world: World) -> None:
    """A9."""
    spec = world.spec(services={"session_url": world.proxy.url.replace("http://", "htp://")})
    with pytest.raises(RunFailedError, match="ConfigurationError: UnsupportedProtocol"):
        await world.run(spec)


async def test_an_agent_that_raises_is_contained(world: World, caplog: pytest.LogCaptureFixture) -> None:
    """A7: its samples are collected all the same, its group is dropped, nothing is trained as reward 0."""
    result = await world.run(world.spec("raise_for_group_0", rollout={"max_refills": 1}))
    assert result.dropped_groups == {"agent": 1}
    assert result.unusable_episodes == {"agent": 4}
    assert world.trained_groups() == [[1, 2], [3, 4]]
    assert sum("/samples" in request and "-0-" in request for request in world.proxy.requests) >= 4
    for session in ("0-0-0", "0-0-1", "0-1-0", "0-1-1"):
        assert f"session {result.run}-{session}: agent: KeyError: 'tool'" in caplog.text


async def test_a_deadline_ends_an_agent_that_never_returns(world: World) -> None:
    """B3."""
    result = await world.run(world.spec("never_return", rollout={"episode_timeout_seconds": 1.5}))
    assert set(result.unusable_episodes) == {"deadline"}  # on a slow machine others may miss so short a deadline too
    assert world.trained_groups() == [[0, 1], [2, 3]]


async def test_no_model_call_is_no_verdict(world: World) -> None:
    """A8 with a reward out of thin air."""
    spec = world.spec("call_nothing", rollout={"max_refills": 0, "max_empty_rounds": 1})
    with pytest.raises(RunFailedError, match=r"(?s)NoProgressError.*no_records"):
        await world.run(spec)
    assert world.simulation.trained == []


async def test_a_reward_that_is_text_is_refused(world: World) -> None:
    """E2."""
    result = await world.run(world.spec("return_text"))
    assert result.unusable_episodes == {"agent": 8}
    assert result.dropped_groups == {}


async def test_an_engine_that_is_away_is_no_reward_0(world: World) -> None:
    """E1: the agent hides the 503 and returns 0; the session knows better, and the budget names the engine."""
    world.engine.status = 503
    budget = {"window": 4, "max_share": 0.5, "on_exceeded": "fail"}
    spec = world.spec("hide_failure", rollout={"max_refills": 0, "abort_budget": budget})
    with pytest.raises(RunFailedError, match=rf"(?s)AbortBudgetExceeded.*{world.engine.base_url} is named by"):
        await world.run(spec)
    assert world.simulation.trained == []


@pytest.mark.parametrize(
    "kind",
    [
        Kind.RESET_BEFORE_SERVER,
        Kind.RESET_AFTER_SERVER,
        Kind.RESET_IN_HEADERS,
        Kind.RESET_IN_BODY,
        Kind.HALF_CLOSE,
        Kind.CLOSE_QUIETLY,
    ],
)
async def test_a_broken_connection_to_the_engine_costs_nothing(world: World, kind: Kind) -> None:
    """The session server holds the token ids and asks again; the agent does not notice, nothing half-made is kept."""
    fault = world.engine_proxy.fault(kind, "/generate")
    result = await world.run(world.spec(run={"num_steps": 1}))
    assert len(fault.hits) == 1
    assert result.unusable_episodes == {}
    assert world.trained_groups() == [[0, 1]]


@pytest.mark.parametrize("kind", [Kind.ANSWER, Kind.CORRUPT, Kind.STALL, Kind.STALL_IN_BODY])
async def test_an_engine_that_fails_a_call_costs_one_sample(world: World, kind: Kind) -> None:
    """500, an answer that cannot be trusted, or none at all: no verdict, whatever the agent makes of it."""
    if kind in _STALLS:
        world.be_impatient()
    fault = world.engine_proxy.fault(kind, "/generate")
    result = await world.run(world.spec("hide_failure", run={"num_steps": 1}))
    assert len(fault.hits) == 1
    assert result.unusable_episodes == {"engine": 1}
    assert result.dropped_groups == {}
    assert world.trained_groups() == [[0, 1]]
    status = (await world.client.status(result.run)).status
    assert status is not None
    assert status.last_cause is not None
    assert status.last_cause.server == world.engine_proxy.url


async def test_a_deadline_holds_for_agents_that_swallow_their_cancellation(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B3: the group settles all the same; the agent is left behind."""
    monkeypatch.setattr(deadline, "_GRACE_SECONDS", 0.3)
    boundary_agents.stubborn.append(True)
    try:
        spec = world.spec("ignore_cancellation", run={"num_steps": 1}, rollout={"episode_timeout_seconds": 1.0})
        result = await world.run(spec)
    finally:
        boundary_agents.stubborn.clear()
    assert result.unusable_episodes == {"deadline": 1}
    assert world.trained_groups() == [[0, 1]]


async def test_a_group_that_fails_releases_its_sessions(world: World) -> None:
    world.proxy.fault(Kind.ANSWER, "/samples", times=1, status=500, body=b"broken")
    with pytest.raises(RunFailedError, match="broken"):
        await world.run(world.spec(rollout={"groups_per_step": 1}))
    # The group waits for that before it fails, and the run fails with it.
    assert sum(request.startswith("DELETE /sessions/") for request in world.proxy.requests) == 2


async def test_the_input_of_an_aborted_sample_is_left_alone(world: World) -> None:
    """A1: the aborted one is a copy; collecting again from the same session gives the sample after all."""
    world.proxy.fault(Kind.RESET_AFTER_SERVER, "/samples", times=-1)
    budget = {"window": 4, "max_share": 0.5, "on_exceeded": "fail"}
    spec = world.spec(run={"num_steps": 1}, rollout={"on_unusable": "drop", "abort_budget": budget})
    with pytest.raises(RunFailedError, match="AbortBudgetExceeded"):
        await world.run(spec)
    key = EpisodeKey(run=spec.run.name, group=0, member=0)
    async with build_http_client() as http:
        collected = await SessionClient(http, world.stack.client.base_url, ADMIN_KEY).collect(key.session_id, None, {})
    assert hasattr(collected, "sample_set")
    assert collected.sample_set.samples[0].status is SampleStatus.COMPLETED


async def test_releasing_fails_without_consequence(world: World) -> None:
    """F4: release comes after the samples are stored; its failure is a warning."""
    world.proxy.fault(Kind.ANSWER, "/sessions", "DELETE", times=-1, status=500)
    result = await world.run(world.spec())
    assert result.steps == 2
    assert result.dropped_groups == {}


async def test_preflight_names_a_server_that_is_not_there(world: World) -> None:
    """A3: no episode starts; the first attempt names the URL."""
    attempts: list[int] = []

    async def prepare(request: PrepareRunRequest) -> PrepareRunResult:
        attempts.append(activity.info().attempt)
        return await world.runs.prepare_run(request)

    world.simulation.preflight = prepare
    await world.proxy.refuse()
    spec = world.spec()
    with pytest.raises(
        RunFailedError, match=rf"(?s)ConfigurationError.*session server {world.proxy.url}: ConnectError"
    ):
        await world.run(spec)
    assert attempts == [1]
    assert not any("POST /sessions" in request for request in world.proxy.requests)


async def test_preflight_names_all_faults_at_once(world: World) -> None:
    world.simulation.preflight = world.runs.prepare_run
    await world.proxy.refuse()
    await world.engine_proxy.refuse()
    spec = world.spec(services={"store_url": "/proc/nowhere"}, data={"path": "/no/prompts.jsonl"})
    with pytest.raises(RunFailedError) as caught:
        await world.run(spec)
    faults = [line for line in str(caught.value).splitlines() if line.startswith("- ")]
    for start in (
        f"- session server {world.proxy.url}: ConnectError",
        "- store /proc/nowhere: ",
        f"- engine {world.engine_proxy.url}: EngineUnavailableError",
        "- data: ",
    ):
        assert any(fault.startswith(start) for fault in faults), (start, faults)


async def test_a_run_that_goes_on_waits_for_servers_that_are_still_coming_up(world: World) -> None:
    """Each has refused one question before it comes up; a fresh run would have said that they are not there."""
    spec = world.spec()
    await prepare(world, PrepareRunRequest(spec=spec, execution_id="first"))
    await world.proxy.refuse()
    await world.engine_proxy.refuse()
    asked: list[str] = []

    async def come_up(request: httpx.Request) -> None:
        asked.append(str(request.url))
        if len(asked) == 2:
            await world.proxy.listen()
            await world.engine_proxy.listen()

    world.http.event_hooks["request"].append(come_up)
    resumed = PrepareRunRequest(spec=spec, execution_id="second", resume=ResumeRequest())
    assert (await prepare(world, resumed)).dataset.num_prompts == 20
    assert len(asked) >= 2


async def prepare(world: World, request: PrepareRunRequest) -> PrepareRunResult:
    return await asyncio.wait_for(ActivityEnvironment().run(world.runs.prepare_run, request), 60)


async def test_a_session_server_that_dies_and_comes_back(world: World) -> None:
    """A4: paused within the budget, and on by itself; nothing is trained twice or from nothing."""
    budget = {"window": 8, "max_share": 0.5, "probe_seconds": 0.1}
    spec = world.spec(run={"num_steps": 4}, rollout={"abort_budget": budget, "max_refills": 20})
    await world.client.start(spec)
    await wait_for_status(world.client, spec.run.name, lambda view: view.status is not None and view.status.step >= 1)
    await world.proxy.refuse()
    view = await wait_for_status(
        world.client, spec.run.name, lambda view: view.status is not None and view.status.pause is not None
    )
    assert view.status is not None
    assert view.status.pause is not None
    assert world.proxy.url in view.status.pause.message
    await world.proxy.listen()
    result = await asyncio.wait_for(world.client.result(spec.run.name), 60)
    assert result.steps == 4
    assert result.dropped_groups == {}
    groups = [group for batch in world.trained_groups() for group in batch]
    assert groups == list(range(8))


async def test_cancelling_while_collecting_is_cancellation(world: World) -> None:
    """A11: never taken for a transport failure."""
    fault = world.proxy.fault(Kind.STALL, "/samples", times=-1)
    spec = world.spec(rollout={"groups_per_step": 1})
    await world.client.start(spec)
    await wait_for_status(world.client, spec.run.name, lambda view: len(fault.hits) == 2)
    await world.client.cancel(spec.run.name)
    view = await wait_for_status(world.client, spec.run.name, lambda view: view.state != "running")
    assert view.state == "canceled"
    assert view.status is not None
    assert view.status.unusable_episodes == {}
    assert view.status.dropped_groups == {}


async def test_a_prompt_that_is_too_long_settles_as_data(world: World) -> None:
    """B5: refused with 400 at every attempt; the job goes on."""
    world.engine.refuse = lambda body: len(body["input_ids"]) > 100
    world.simulation.dataset = write_dataset(
        Path(str(world.simulation.dataset.path)), ["too long " * 100 if n == 1 else "short" for n in range(20)]
    )
    result = await world.run(world.spec(rollout={"max_refills": 1}))
    assert result.dropped_groups == {"data": 1}
    assert result.unusable_episodes == {"data": 4}
    assert world.trained_groups() == [[0, 2], [3, 4]]
    status = (await world.client.status(result.run)).status
    assert status is not None
    assert status.last_cause is not None
    assert "too long for this model" in status.last_cause.message


async def test_the_last_group_of_the_last_step_fails(world: World) -> None:
    """B6: never "completed"."""
    spec = world.spec()
    world.proxy.fault(Kind.ANSWER, f"{spec.run.name}-3-1-0/samples", times=-1, status=500, body=b"at the end")
    with pytest.raises(RunFailedError, match="at the end"):
        await world.run(spec)
    view = await world.client.status(spec.run.name)
    assert view.state == "failed"
    assert view.status is not None
    assert (view.status.phase, view.status.step) == (Phase.FAILED, 1)


async def test_one_of_several_fatal_errors_is_enough(world: World) -> None:
    """A server that answers 503 by itself is no lost connection."""
    world.proxy.fault(Kind.ANSWER, "/samples", times=1, status=503, body=b"overloaded")
    with pytest.raises(RunFailedError, match=r"RuntimeError: POST .* answered 503: overloaded"):
        await world.run(world.spec(rollout={"collect_attempts": 5}))


async def test_an_engine_that_never_answers_is_no_reward_0(world: World) -> None:
    """E1, B1: the agent's own timeout fires, it gives up and returns 0; the call has no answer yet."""
    world.be_impatient()
    world.engine.gate = asyncio.Event()
    spec = world.spec("hide_failure", rollout={"max_refills": 0, "groups_per_step": 1}, run={"num_steps": 1})
    await world.client.start(spec)
    view = await wait_for_status(
        world.client, spec.run.name, lambda view: view.status is not None and view.status.unusable_episodes != {}
    )
    assert view.status is not None
    assert set(view.status.unusable_episodes) == {"engine"}
    assert view.status.last_cause is not None
    assert view.status.last_cause.server == world.engine.base_url
    world.engine.gate.set()
    result = await asyncio.wait_for(world.client.result(spec.run.name), 60)
    assert result.steps == 1


async def test_an_agent_that_cancels_itself_is_contained(world: World) -> None:
    result = await world.run(world.spec("cancel_itself", run={"num_steps": 1}))
    assert result.unusable_episodes == {"agent": 4}


async def test_a_deadline_holds_for_agents_that_block_a_thread(world: World) -> None:
    """B3, for a function that no cancellation reaches; what it says afterwards goes to a session nobody trains."""
    result = await world.run(world.spec("block_the_thread", rollout={"episode_timeout_seconds": 1.5}))
    assert set(result.unusable_episodes) == {"deadline"}  # on a slow machine others may miss so short a deadline too
    assert world.trained_groups() == [[0, 1], [2, 3]]


@pytest.mark.parametrize(
    ("overrides", "text"),
    [
        ({"model": {"path": "/another/model"}}, "it serves the model .*, the run trains /another/model"),
        (
            {"model": {"renderer": "default"}},
            "it renders chats by qwen3, the run's model.renderer is default. Start",
        ),
        (
            {"model": {"chat_template": {}}},
            'has the arguments {"enable_thinking": false}, the run.s model.chat_template is {}. Start it anew',
        ),
        ({"model": {"history": "rerender"}}, "its history policy is extend, the run's model.history is rerender"),
        (
            {"model": {"history_match": "strict"}},
            "it matches histories by json, the run's model.history_match is strict",
        ),
        ({"services": {"engine_urls": ["http://127.0.0.1:9"]}}, "it does not use http://127.0.0.1:9 but http"),
        ({"services": {"store_url": "/proc/nowhere"}}, "store /proc/nowhere"),
        ({"data": {"path": "/no/prompts.jsonl"}}, "data set /no/prompts.jsonl cannot be read"),
    ],
)
async def test_preflight_names_what_does_not_fit(
    world: World, overrides: dict[str, dict[str, object]], text: str
) -> None:
    world.simulation.preflight = world.runs.prepare_run
    with pytest.raises(RunFailedError, match=rf"(?s)ConfigurationError: run .* cannot start:.*{text}"):
        await world.run(world.spec(**overrides))


async def test_preflight_takes_the_renderer_that_the_server_told(world: World) -> None:
    """Where the run file leaves it to be told."""
    world.simulation.preflight = world.runs.prepare_run
    assert (await world.run(world.spec(model={"renderer": "auto"}))).steps == 2


async def test_preflight_notices_another_tokenizer(world: World, model_dir: Path) -> None:
    world.simulation.preflight = world.runs.prepare_run
    path = model_dir / "tokenizer_config.json"
    before = path.read_text()
    path.write_text(before.replace("{", "{ ", 1))
    try:
        with pytest.raises(RunFailedError, match="its tokenizer is not the one in"):
            await world.run(world.spec())
    finally:
        path.write_text(before)
