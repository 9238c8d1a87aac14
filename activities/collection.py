"""`collect_samples`, `store_group`, `release_sessions`: from sessions to the store."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx
from temporalio import activity

from activities.boundary import CallAbortedError, retry_transient
from activities.heartbeats import heartbeating
from everroll.contracts import names
from everroll.contracts.outcomes import Cause, SampleStatus
from everroll.contracts.rollout import (
    BlobRef,
    CollectRequest,
    CollectResult,
    GroupManifest,
    ReleaseRequest,
    ReleaseResult,
    SamplesRef,
    StoreGroupRequest,
)
from everroll.run_record import RunRecordDirectory
from everroll.sessions.client import CollectedSamples, EmptySamples, SessionClient
from everroll.store import open_store
from everroll.tokens.samples import MalformedSamplesError, SampleSet

_RELEASE_CONCURRENCY = 16


class CollectionActivities:
    """Fetches assembled samples and stores them. Repeatable: the same session gives the same blob."""

    def __init__(self, http: httpx.AsyncClient, admin_key: str) -> None:
        self._http = http
        self._admin_key = admin_key

    @activity.defn(name=names.COLLECT_SAMPLES)
    async def collect_samples(self, request: CollectRequest) -> CollectResult:
        key = request.key
        client = SessionClient(self._http, request.session_url, self._admin_key)
        metadata = key.model_dump()
        async with heartbeating("collecting") as progress:
            try:
                collected = await retry_transient(
                    lambda: client.collect(key.session_id, request.max_seq_len, metadata, seal=True),
                    request.transport_attempts,
                    request.session_url,
                )
            except CallAbortedError as error:
                return CollectResult(key=key, status=SampleStatus.ABORTED, cause=error.cause)
            if isinstance(collected, EmptySamples):
                cause = Cause(kind=collected.cause_kind, message=collected.text)
                trouble = collected.engine_trouble
                return CollectResult(key=key, status=SampleStatus.ABORTED, cause=cause, engine_cause=trouble)
            _check_versions(request, collected.sample_set)
            progress.report("storing")
            blob = await asyncio.to_thread(_store_samples, request, collected)
        return CollectResult(
            key=key,
            status=_summarize_status(collected.sample_set),
            samples=_build_ref(blob, collected.sample_set),
            engine_cause=collected.engine_trouble,
        )

    @activity.defn(name=names.RELEASE_SESSIONS)
    async def release_sessions(self, request: ReleaseRequest) -> ReleaseResult:
        """Best effort: a failure is a warning, and a sweep catches what is left."""
        client = SessionClient(self._http, request.session_url, self._admin_key)
        gate = asyncio.Semaphore(_RELEASE_CONCURRENCY)
        errors: list[str] = []

        async def release(session_id: str) -> None:
            async with gate:
                try:
                    await client.release(session_id)
                except Exception as error:
                    errors.append(f"{session_id}: {type(error).__name__}: {error}")

        async with heartbeating("releasing"):
            await asyncio.gather(*(release(session_id) for session_id in request.session_ids))
            if request.ended_run:
                await client.end_run(request.ended_run)
        if errors:
            activity.logger.warning("%d sessions were not released; the first: %s", len(errors), errors[0])
        return ReleaseResult(
            released=len(request.session_ids) - len(errors),
            failed=len(errors),
            last_error=errors[-1][:500] if errors else "",
        )


@activity.defn(name=names.STORE_GROUP)
async def store_group(request: StoreGroupRequest) -> BlobRef:
    """Write a group's manifest, which the trainer reads, and the record that tells a resumed run that it is ready."""
    manifest = GroupManifest(
        run=request.run,
        group=request.group,
        prompt_index=request.outcomes[0].prompt_index,
        outcomes=request.outcomes,
    )
    body = manifest.model_dump_json().encode()
    prefix = f"{request.run}/groups/{request.group:08d}"
    async with heartbeating("writing"):
        reference = await asyncio.to_thread(open_store(request.store_url).put, prefix, ".json", body)
        if request.run_dir is not None and request.result is not None:
            settled = request.result.model_copy(update={"manifest": reference})
            await asyncio.to_thread(RunRecordDirectory(Path(request.run_dir)).write_settled, settled)
    return reference


def _store_samples(request: CollectRequest, collected: CollectedSamples) -> BlobRef:
    key = request.key
    parent = key.run if key.evaluation is None else f"{key.run}/evaluations/{key.evaluation}"
    return open_store(request.store_url).put(f"{parent}/samples/{key.group:08d}", ".safetensors", collected.body)


def _check_versions(request: CollectRequest, sample_set: SampleSet) -> None:
    """The last gate before the store. Tokens of a version that is not out yet are refused by the trainer.

    Raises:
        MalformedSamplesError: a token was sampled by older weights than the group may use.
    """
    for index, sample in enumerate(sample_set.samples):
        oldest = int(sample.weight_versions[sample.loss_mask].min())
        if oldest < request.min_weight_version:
            raise MalformedSamplesError(
                f"{request.key} sample {index}: tokens of weight version {oldest}, the group started at "
                f"{request.min_weight_version}"
            )


def _summarize_status(sample_set: SampleSet) -> SampleStatus:
    truncated = any(sample.status is SampleStatus.TRUNCATED for sample in sample_set.samples)
    return SampleStatus.TRUNCATED if truncated else SampleStatus.COMPLETED


def _build_ref(blob: BlobRef, sample_set: SampleSet) -> SamplesRef:
    versions = [sample.weight_versions[sample.loss_mask] for sample in sample_set.samples]
    return SamplesRef(
        blob=blob,
        num_samples=len(sample_set.samples),
        num_tokens=sum(sample.num_tokens for sample in sample_set.samples),
        num_sampled_tokens=sum(sample.num_sampled_tokens for sample in sample_set.samples),
        min_weight_version=min(int(v.min()) for v in versions),
        max_weight_version=max(int(v.max()) for v in versions),
    )
