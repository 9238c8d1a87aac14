"""`prepare_run` and `await_groups`: what a run needs before its first step, and after it continued as new."""

from __future__ import annotations

import asyncio
import time

import httpx
from temporalio import activity
from temporalio.client import Client

from activities.claims import plan_claim, take_claim
from activities.engine_owners import EngineOwners
from activities.group_waits import GroupWaits
from activities.heartbeats import heartbeating
from activities.preflight import Preflight
from everroll.contracts import names
from everroll.contracts.health import AwaitServerRequest, Survey, SurveyRequest
from everroll.contracts.rollout import AwaitGroupsRequest, AwaitGroupsResult, DatasetRef
from everroll.contracts.spec import RunSpec
from everroll.contracts.training import PrepareRunRequest, PrepareRunResult
from everroll.failures import Outcome, ServerStatusError, classify, raise_for_status
from everroll.prompts import Dataset
from everroll.survey import survey_run

_LINGER_SECONDS = 0.2
"""Groups that end so close to each other are reported together."""
_MAX_RESULTS = 32
"""Reported at once, so that the payload stays small."""


class RunActivities:
    """Checks before the first episode that everything a run needs is there."""

    def __init__(self, preflight: Preflight, owners: EngineOwners) -> None:
        self._preflight = preflight
        self._owners = owners

    @activity.defn(name=names.PREPARE_RUN)
    async def prepare_run(self, request: PrepareRunRequest) -> PrepareRunResult:
        """
        Raises:
            ConfigurationError: a list of everything that is not as it must be, or the run directory is not the run's.
        """
        async with heartbeating("checking services, reading the data set"):
            claim = await asyncio.to_thread(plan_claim, request)
            goes_on = request.resume is not None
            patience = claim.spec.rollout.abort_budget.dead_seconds if goes_on else 0.0
            await self._owners.check(claim.spec)
            dataset = await self._preflight.check(claim.spec, patience)
            reference = _build_reference(claim.spec, dataset)
            await asyncio.to_thread(take_claim, claim, reference, request)
        return PrepareRunResult(dataset=reference)


class GroupActivities:
    """Re-attaches a run to the groups that its earlier generation left in flight."""

    def __init__(self, client: Client) -> None:
        self._waits = GroupWaits(client)

    @activity.defn(name=names.AWAIT_GROUPS)
    async def await_groups(self, request: AwaitGroupsRequest) -> AwaitGroupsResult:
        """Return when a group has ended, with those that end shortly after it."""
        with self._waits.hold(request.run, request.groups) as waits:
            async with heartbeating(f"waiting for {len(waits)} groups"):
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
                done, _ = await asyncio.wait(waits, timeout=_LINGER_SECONDS)
            # The others are found ended by the next call.
            return AwaitGroupsResult(results=[wait.result() for wait in waits if wait in done][:_MAX_RESULTS])


class HealthActivities:
    """What a run asks while it does not get on."""

    def __init__(self, client: Client, http: httpx.AsyncClient) -> None:
        self._client = client
        self._http = http

    @activity.defn(name=names.AWAIT_SERVER)
    async def await_server(self, request: AwaitServerRequest) -> None:
        """Probe until the server answers 2xx; the workflow bounds how long."""
        started = time.monotonic()
        async with heartbeating(f"probing {request.server}") as progress:
            while (trouble := await self._probe(request.server)) is not None:
                progress.report(f"{request.server} for {time.monotonic() - started:.0f} s: {trouble}")
                await asyncio.sleep(request.probe_seconds)

    @activity.defn(name=names.SURVEY_GROUPS)
    async def survey_groups(self, request: SurveyRequest) -> Survey:
        async with heartbeating("looking"):
            return await survey_run(self._client, request.run, request.groups)

    async def _probe(self, server: str) -> str | None:
        try:
            response = await self._http.get(f"{server.rstrip('/')}/health")
            raise_for_status(response)
        except Exception as error:
            # Whatever a server says that is being mended, garbage included, it will say something else later.
            if classify(error).outcome is Outcome.TRANSIENT or isinstance(
                error, (ServerStatusError, httpx.DecodingError)
            ):
                return f"{type(error).__name__}: {error}"
            raise
        return None


def _build_reference(spec: RunSpec, dataset: Dataset) -> DatasetRef:
    return DatasetRef(
        path=spec.data.path,
        fingerprint=dataset.fingerprint,
        num_prompts=len(dataset.prompts),
        seed=spec.data.seed,
        shuffle=spec.data.shuffle,
    )
