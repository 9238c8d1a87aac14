"""The bare program that `benchmarks.orchestration` compares with, and activities without side effects for both.

The bare run has Everroll's shape and nothing else: a run that prepares, starts a child per group, trains and
publishes; a group that runs two activities an episode, then stores and releases. Its payloads are a few bytes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import timedelta

from temporalio import activity, workflow

with workflow.unsafe.imports_passed_through():
    from activities.heartbeats import heartbeating
    from everroll.contracts import names
    from everroll.contracts.health import WatchEnginesRequest, WatchEnginesResult
    from everroll.contracts.outcomes import SampleStatus
    from everroll.contracts.rollout import (
        BlobRef,
        CollectRequest,
        CollectResult,
        DatasetRef,
        EpisodeReport,
        EpisodeRequest,
        ReleaseRequest,
        ReleaseResult,
        SamplesRef,
        StoreGroupRequest,
    )
    from everroll.contracts.training import (
        PrepareRunRequest,
        PrepareRunResult,
        PrepareTrainerRequest,
        PublishRequest,
        PublishResult,
        RecordRunRequest,
        TrainRequest,
        TrainResult,
        Weights,
    )
    from workflows import policies

_SHA = "0" * 64
_LIMIT = timedelta(seconds=20)
"""Short, for activities that do nothing: an overloaded server can lose a task on its way to the worker."""


@activity.defn(name=names.PREPARE_RUN)
async def prepare_run(request: PrepareRunRequest) -> PrepareRunResult:
    dataset = DatasetRef(path="/data/prompts.jsonl", fingerprint=_SHA, num_prompts=100_000, seed=0, shuffle=True)
    return PrepareRunResult(dataset=dataset)


@activity.defn(name=names.PREPARE_TRAINER)
async def prepare_trainer(request: PrepareTrainerRequest) -> Weights:
    return Weights(version=0, path="/runs/weights/0")


@activity.defn(name=names.RUN_EPISODE)
async def run_episode(request: EpisodeRequest) -> EpisodeReport:
    key = request.key
    async with heartbeating("opening the session") as progress:
        progress.report("agent running")
    return EpisodeReport(key=key, status=SampleStatus.COMPLETED, prompt_index=key.group, reward=key.member / 8)


@activity.defn(name=names.COLLECT_SAMPLES)
async def collect_samples(request: CollectRequest) -> CollectResult:
    key = request.key
    async with heartbeating("collecting"):
        uri = f"{key.run}/samples/{key.group:08d}/{_SHA}.safetensors"
        samples = SamplesRef(
            blob=BlobRef(uri=uri, sha256=_SHA, num_bytes=20_000),
            num_samples=1,
            num_tokens=2_000,
            num_sampled_tokens=700,
            min_weight_version=0,
            max_weight_version=0,
        )
    return CollectResult(key=key, status=SampleStatus.COMPLETED, samples=samples)


@activity.defn(name=names.STORE_GROUP)
async def store_group(request: StoreGroupRequest) -> BlobRef:
    return BlobRef(uri=f"{request.run}/groups/{request.group:08d}/{_SHA}.json", sha256=_SHA, num_bytes=5_000)


@activity.defn(name=names.RECORD_RUN)
async def record_run(request: RecordRunRequest) -> None:
    """Nothing is kept."""


@activity.defn(name=names.RELEASE_SESSIONS)
async def release_sessions(request: ReleaseRequest) -> ReleaseResult:
    return ReleaseResult(released=len(request.session_ids), failed=0)


@activity.defn(name=names.TRAIN_STEP)
async def train_step(request: TrainRequest) -> TrainResult:
    weights = Weights(version=request.step, path=f"/runs/weights/{request.step}")
    return TrainResult(step=request.step, weights=weights, metrics={"loss": 0.5})


@activity.defn(name=names.PUBLISH_WEIGHTS)
async def publish_weights(request: PublishRequest) -> PublishResult:
    return PublishResult(version=request.weights.version)


@activity.defn(name=names.WATCH_ENGINES)
async def watch_engines(request: WatchEnginesRequest) -> WatchEnginesResult:
    """Until the run ends: no engine loses anything."""
    async with heartbeating("watching"):
        await asyncio.sleep(policies.WATCH_ENGINES_LIMIT.total_seconds())
    return WatchEnginesResult(lost={})


@activity.defn(name="bare_activity")
async def bare_activity(number: int) -> int:
    return number


EVERROLL_LIGHT: list[Callable[..., object]] = [
    prepare_run,
    store_group,
    record_run,
    release_sessions,
    publish_weights,
    watch_engines,
]
EVERROLL_ROLLOUT: list[Callable[..., object]] = [run_episode, collect_samples]
EVERROLL_TRAIN: list[Callable[..., object]] = [prepare_trainer, train_step]


async def _call(queue: str, activity_id: str | None = None) -> int:
    return await workflow.execute_activity(
        bare_activity, 1, task_queue=queue, activity_id=activity_id, start_to_close_timeout=_LIMIT
    )


@workflow.defn(name="BareGroup")
class BareGroup:
    @workflow.run
    async def run(self, queue: str, episodes: int) -> int:
        played = await asyncio.gather(*(self._play(queue, member) for member in range(episodes)))
        await _call(queue)
        await _call(queue)
        return sum(played)

    async def _play(self, queue: str, member: int) -> int:
        rollout = names.rollout_queue(queue)
        await _call(rollout, f"episode-{member}-0")
        return await _call(rollout, f"collect-{member}-0")


@workflow.defn(name="BareRun")
class BareRun:
    @workflow.run
    async def run(self, queue: str, steps: int, groups: int, episodes: int) -> int:
        train = names.train_queue(queue)
        for work in (queue, train, queue):
            await _call(work)
        played = 0
        for step in range(steps):
            played += sum(
                await asyncio.gather(*(self._play(queue, episodes, step * groups + number) for number in range(groups)))
            )
            await _call(train)
            await _call(queue)
        return played

    async def _play(self, queue: str, episodes: int, group: int) -> int:
        return await workflow.execute_child_workflow(
            BareGroup.run, args=[queue, episodes], id=f"{workflow.info().workflow_id}/group/{group}", task_queue=queue
        )
