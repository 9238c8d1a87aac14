"""`run_episode`: one agent plays one prompt in one session."""

from __future__ import annotations

import math
import time

from temporalio import activity

from activities.boundary import CallAbortedError, retry_transient
from activities.deadline import DeadlinePassedError, run_within
from activities.heartbeats import Progress, heartbeating
from everroll.agents import AgentClients, AgentError, Episode, run_agent
from everroll.contracts import names
from everroll.contracts.outcomes import Cause, CauseKind, SampleStatus
from everroll.contracts.rollout import EpisodeReport, EpisodeRequest
from everroll.prompts import DatasetCache, Prompt
from everroll.sessions.client import SessionClient, SessionHandle


class EpisodeActivities:
    """Runs episodes. Safe to run twice: the session is re-opened, and recorded turns are served again."""

    def __init__(self, clients: AgentClients, datasets: DatasetCache, admin_key: str) -> None:
        self._clients = clients
        self._datasets = datasets
        self._admin_key = admin_key

    @activity.defn(name=names.RUN_EPISODE)
    async def run_episode(self, request: EpisodeRequest) -> EpisodeReport:
        started = time.monotonic()
        async with heartbeating("reading the prompt", first_seconds=math.inf) as progress:
            prompt = await self._datasets.find_prompt(request.dataset, request.key.group, request.prompt_index)
            progress.report("opening the session")
            report = await self._play(request, prompt, progress)
        return report.model_copy(update={"duration_seconds": time.monotonic() - started})

    async def _play(self, request: EpisodeRequest, prompt: Prompt, progress: Progress) -> EpisodeReport:
        client = SessionClient(self._clients.http, request.session_url, self._admin_key)
        try:
            session = await retry_transient(
                lambda: client.create(
                    request.key.session_id,
                    request.sampling,
                    request.seed,
                    activity.info().attempt,
                    request.min_weight_version,
                    request.key.run,
                    _series(),
                ),
                request.transport_attempts,
                request.session_url,
            )
        except CallAbortedError as error:
            return _build_report(request, prompt, SampleStatus.ABORTED, cause=error.cause)
        progress.report("agent running")
        return await self._run_agent(request, prompt, session)

    async def _run_agent(self, request: EpisodeRequest, prompt: Prompt, session: SessionHandle) -> EpisodeReport:
        episode = Episode(
            key=request.key,
            prompt=prompt,
            base_url=session.base_url,
            api_key=session.api_key,
            seed=request.seed,
            args=request.agent.args,
            clients=self._clients,
        )
        try:
            result = await run_within(run_agent(request.agent, episode), request.timeout_seconds)
        except DeadlinePassedError:
            text = f"the agent ran past its deadline of {request.timeout_seconds} s"
            return _build_failure(request, prompt, CauseKind.DEADLINE, "TimeoutError", text)
        except AgentError as error:
            name = type(error.__cause__ or error).__name__
            return _build_failure(request, prompt, CauseKind.AGENT, name, str(error))
        if result.reward is None:
            text = "the agent returned nothing: no verdict, and no reward is invented"
            return _build_failure(request, prompt, CauseKind.NO_REWARD, "", text)
        return _build_report(
            request, prompt, SampleStatus.COMPLETED, reward=result.reward, metrics=result.metrics, cause=None
        )


def _series() -> str:
    """Within what Temporal counts attempts: another one after a reset of the workflow."""
    info = activity.info()
    return f"{info.workflow_run_id}/{info.activity_id}"


def _build_failure(request: EpisodeRequest, prompt: Prompt, kind: CauseKind, error: str, message: str) -> EpisodeReport:
    activity.logger.warning("session %s: %s: %s", request.key.session_id, kind.value, message)
    cause = Cause(kind=kind, error=error, message=message[:2000])
    return _build_report(request, prompt, SampleStatus.FAILED, cause=cause)


def _build_report(
    request: EpisodeRequest,
    prompt: Prompt,
    status: SampleStatus,
    *,
    cause: Cause | None,
    reward: float | None = None,
    metrics: dict[str, float] | None = None,
) -> EpisodeReport:
    return EpisodeReport(
        key=request.key,
        status=status,
        prompt_index=prompt.index,
        reward=reward,
        metrics=metrics or {},
        cause=cause,
    )
