"""Simulated activities for tests of the orchestration alone: outcomes by script, in memory, no engine and no torch."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import os
import shutil
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

from temporalio import activity
from temporalio.client import Client
from temporalio.worker import Worker, WorkerDeploymentConfig

from activities.batches import read_batch, record_batch
from activities.boundary import BoundaryInterceptor
from activities.evaluation import EvaluationActivities, finish_evaluation, open_evaluation, store_episodes
from activities.runs import GroupActivities, HealthActivities
from everroll.contracts import names
from everroll.contracts.health import WatchEnginesRequest, WatchEnginesResult
from everroll.contracts.outcomes import Cause, CauseKind, SampleStatus
from everroll.contracts.rollout import (
    BlobRef,
    CollectRequest,
    CollectResult,
    DatasetRef,
    EpisodeKey,
    EpisodeReport,
    EpisodeRequest,
    ReleaseRequest,
    ReleaseResult,
    SamplesRef,
    StoreGroupRequest,
)
from everroll.contracts.spec import RunSpec
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
from everroll.http_client import build_http_client
from workflows.evaluation import Evaluation
from workflows.rollout_group import RolloutGroup
from workflows.training_run import TrainingRun

_OUTPUT_DIR = Path(tempfile.gettempdir()) / f"everroll-tests-{os.getpid()}"
"""Where runs of tests that do not look at it have their directories; removed at exit."""
atexit.register(shutil.rmtree, _OUTPUT_DIR, ignore_errors=True)

DATASET = DatasetRef(path="prompts.jsonl", fingerprint="f", num_prompts=100, seed=0, shuffle=False)
Collect = Callable[[EpisodeKey], CollectResult]
Play = Callable[[EpisodeRequest], EpisodeReport]


def build_spec(name: str, task_queue: str, /, **overrides: object) -> RunSpec:
    """A small run; keys of `overrides` are sections, merged into the defaults."""
    sections: dict[str, dict[str, object]] = {
        "run": {"name": name, "num_steps": 2, "seed": 3, "output_dir": str(_OUTPUT_DIR)},
        "model": {"path": "model"},
        "data": {"path": "prompts.jsonl"},
        "rollout": {"agent": {"function": "a:b"}, "groups_per_step": 2, "episodes_per_group": 2},
        "train": {},
        "services": {"task_queue": task_queue},
    }
    for key, section in overrides.items():
        assert isinstance(section, dict)
        sections[key] = {**sections.get(key, {}), **section}
    return RunSpec.model_validate(sections)


def succeed(request: EpisodeRequest) -> EpisodeReport:
    return EpisodeReport(
        key=request.key, status=SampleStatus.COMPLETED, prompt_index=request.key.group, reward=request.key.member / 2
    )


def fail(request: EpisodeRequest) -> EpisodeReport:
    cause = Cause(kind=CauseKind.AGENT, error="KeyError", message="tool")
    return EpisodeReport(key=request.key, status=SampleStatus.FAILED, prompt_index=request.key.group, cause=cause)


def abort(key: EpisodeKey) -> CollectResult:
    cause = Cause(kind=CauseKind.TRANSPORT, error="ReadError", message="reset", server="http://127.0.0.1:1")
    return CollectResult(key=key, status=SampleStatus.ABORTED, cause=cause)


@dataclass
class Simulation:
    """What the simulated activities do and what they saw."""

    play: Play = succeed
    collect: Collect | None = None
    weight_version: int = 0
    """Version last published."""
    episodes: list[EpisodeRequest] = field(default_factory=list)
    stored: dict[int, StoreGroupRequest] = field(default_factory=dict)
    released: list[str] = field(default_factory=list)
    ended_runs: list[str] = field(default_factory=list)
    """Of which the session server was told that they have ended."""
    trained: list[TrainRequest] = field(default_factory=list)
    recorded: list[RecordRunRequest] = field(default_factory=list)
    events: list[str] = field(default_factory=list)
    """Collections, stores and releases in order, each with its group."""
    published: list[int] = field(default_factory=list)
    logs_plays: bool = False
    """Whether `events` holds episodes and publishes too."""
    gate: asyncio.Event | None = None
    """When given, episodes wait for it."""
    is_gated: Callable[[EpisodeKey], bool] = lambda key: True
    """Which of them."""
    rollout_queue_suffix: str = ""
    """Anything but empty leaves the episodes without a worker."""
    keeps_version_0: bool = False
    """The engine takes new weights and goes on with the first ones."""
    engine_restarts: asyncio.Event = field(default_factory=asyncio.Event)
    """Set it: the engine is found to serve version 0."""
    watched: list[int] = field(default_factory=list)
    """Versions at which a watch over engines began."""
    train_gate: asyncio.Event | None = None
    on_publish: Callable[[PublishRequest], None] = lambda request: None
    """May raise, as an engine that is away or refuses the weights makes `publish_weights` do."""
    on_prepare_trainer: Callable[[PrepareTrainerRequest], None] = lambda request: None
    """May raise."""
    train_queue_suffix: str = ""
    """Anything but empty leaves training without a worker."""
    rollout_slots: int | None = None
    """Activities that the rollout worker runs at once; None: as many as there are."""
    deployment_config: WorkerDeploymentConfig | None = None
    """Of the workflow worker."""
    dataset: DatasetRef = DATASET
    rollout_activities: list[Callable[..., object]] | None = None
    """In place of the simulated `run_episode` and `collect_samples`."""
    preflight: Callable[[PrepareRunRequest], Awaitable[PrepareRunResult]] | None = None
    """The real `prepare_run`, in place of the simulated one."""
    light_activities: list[Callable[..., object]] = field(default_factory=list)
    """In place of the simulated ones of the same name."""

    @activity.defn(name=names.PREPARE_RUN)
    async def prepare_run(self, request: PrepareRunRequest) -> PrepareRunResult:
        if self.preflight is not None:
            return await self.preflight(request)
        return PrepareRunResult(dataset=self.dataset)

    @activity.defn(name=names.PREPARE_TRAINER)
    async def prepare_trainer(self, request: PrepareTrainerRequest) -> Weights:
        self.on_prepare_trainer(request)
        return Weights(version=0, path="weights/0")

    @activity.defn(name=names.RUN_EPISODE)
    async def run_episode(self, request: EpisodeRequest) -> EpisodeReport:
        self.episodes.append(request)
        if self.logs_plays:
            self.events.append(f"play {request.key.group}")
        if self.gate is not None and self.is_gated(request.key):
            while not self.gate.is_set():
                activity.heartbeat("waiting")
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self.gate.wait(), 0.2)
        return self.play(request)

    @activity.defn(name=names.COLLECT_SAMPLES)
    async def collect_samples(self, request: CollectRequest) -> CollectResult:
        self.events.append(f"collect {request.key.group}")
        if self.collect is not None:
            return self.collect(request.key)
        return self.build_collected(request.key)

    def build_collected(self, key: EpisodeKey) -> CollectResult:
        samples = SamplesRef(
            blob=BlobRef(uri=f"samples/{key.session_id}", sha256="0", num_bytes=1),
            num_samples=1,
            num_tokens=10,
            num_sampled_tokens=4,
            min_weight_version=self.weight_version,
            max_weight_version=self.weight_version,
        )
        return CollectResult(key=key, status=SampleStatus.COMPLETED, samples=samples)

    @activity.defn(name=names.STORE_GROUP)
    async def store_group(self, request: StoreGroupRequest) -> BlobRef:
        self.events.append(f"store {request.group}")
        self.stored[request.group] = request
        return BlobRef(uri=f"groups/{request.group}", sha256="0", num_bytes=1)

    @activity.defn(name=names.RELEASE_SESSIONS)
    async def release_sessions(self, request: ReleaseRequest) -> ReleaseResult:
        if request.ended_run:
            self.ended_runs.append(request.ended_run)
        else:
            self.events.append(f"release {request.session_ids[0].rsplit('-', 3)[1]}")
        self.released += request.session_ids
        return ReleaseResult(released=len(request.session_ids), failed=0)

    @activity.defn(name=names.RECORD_RUN)
    async def record_run(self, request: RecordRunRequest) -> None:
        self.recorded.append(request)

    @activity.defn(name=names.TRAIN_STEP)
    async def train_step(self, request: TrainRequest) -> TrainResult:
        self.trained.append(request)
        if self.train_gate is not None:
            await asyncio.wait_for(self.train_gate.wait(), 60)
        weights = Weights(version=request.step, path=f"weights/{request.step}")
        return TrainResult(step=request.step, weights=weights, metrics={"loss": 0.5})

    @activity.defn(name=names.PUBLISH_WEIGHTS)
    async def publish_weights(self, request: PublishRequest) -> PublishResult:
        self.on_publish(request)
        self.weight_version = 0 if self.keeps_version_0 else request.weights.version
        self.published.append(request.weights.version)
        if self.logs_plays:
            self.events.append(f"publish {request.weights.version}")
        return PublishResult(version=request.weights.version)

    @activity.defn(name=names.WATCH_ENGINES)
    async def watch_engines(self, request: WatchEnginesRequest) -> WatchEnginesResult:
        self.watched.append(request.version)
        while not self.engine_restarts.is_set():
            activity.heartbeat("watching")
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.engine_restarts.wait(), 0.2)
        self.engine_restarts.clear()
        return WatchEnginesResult(lost=dict.fromkeys(request.engine_urls, 0))

    @contextlib.asynccontextmanager
    async def workers(self, client: Client, task_queue: str) -> AsyncIterator[None]:
        """The real workflows over these activities, on all three task queues."""
        light: dict[str, Callable[..., object]] = {
            names.PREPARE_RUN: self.prepare_run,
            names.STORE_GROUP: self.store_group,
            names.RELEASE_SESSIONS: self.release_sessions,
            names.RECORD_RUN: self.record_run,
            names.PUBLISH_WEIGHTS: self.publish_weights,
            names.WATCH_ENGINES: self.watch_engines,
            names.AWAIT_GROUPS: GroupActivities(client).await_groups,
            names.AWAIT_EVALUATION: EvaluationActivities(client).await_evaluation,
            names.RECORD_BATCH: record_batch,
            names.READ_BATCH: read_batch,
            names.OPEN_EVALUATION: open_evaluation,
            names.STORE_EPISODES: store_episodes,
            names.FINISH_EVALUATION: finish_evaluation,
        }
        light |= {replacement.__name__: replacement for replacement in self.light_activities}
        async with contextlib.AsyncExitStack() as stack:
            rollout_queue = names.rollout_queue(task_queue) + self.rollout_queue_suffix
            health = HealthActivities(client, await stack.enter_async_context(build_http_client()))
            queues: dict[str, list[Callable[..., object]]] = {
                task_queue: [*light.values(), health.await_server, health.survey_groups],
                rollout_queue: self.rollout_activities or [self.run_episode, self.collect_samples],
                names.train_queue(task_queue) + self.train_queue_suffix: [self.prepare_trainer, self.train_step],
            }
            for queue, queue_activities in queues.items():
                worker = Worker(
                    client,
                    task_queue=queue,
                    workflows=[TrainingRun, RolloutGroup, Evaluation] if queue == task_queue else [],
                    activities=queue_activities,
                    interceptors=[BoundaryInterceptor()],
                    deployment_config=self.deployment_config if queue == task_queue else None,
                    max_heartbeat_throttle_interval=timedelta(seconds=0.2),
                    max_concurrent_activities=self.rollout_slots if queue == rollout_queue else None,
                )
                await stack.enter_async_context(worker)
            yield
