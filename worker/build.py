"""Workers for each role, built from their dependencies; nothing here reads the environment or starts anything."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import AsyncIterator
from datetime import timedelta
from typing import TYPE_CHECKING

from temporalio.client import Client
from temporalio.common import VersioningBehavior, WorkerDeploymentVersion
from temporalio.worker import PollerBehaviorAutoscaling, Worker, WorkerDeploymentConfig

from activities.batches import read_batch, record_batch
from activities.boundary import BoundaryInterceptor
from activities.collection import CollectionActivities, store_group
from activities.curriculum import CurriculumActivities
from activities.engine_owners import EngineOwners
from activities.episodes import EpisodeActivities
from activities.evaluation import EvaluationActivities, finish_evaluation, open_evaluation, store_episodes
from activities.preflight import Preflight
from activities.publishing import PublishingActivities
from activities.restoring import RunDirectoryActivities
from activities.runs import GroupActivities, HealthActivities, RunActivities
from activities.watching import EngineWatchActivities
from everroll.agents import AgentClients
from everroll.contracts import names
from everroll.engines.http import open_client_session
from everroll.http_client import build_http_client
from everroll.prompts import DatasetCache
from worker.settings import Role, WorkerSettings
from workflows.evaluation import Evaluation
from workflows.rollout_group import RolloutGroup
from workflows.training_run import TrainingRun

if TYPE_CHECKING:
    from trainer.distributed.ranks import Ranks

MAX_CACHED_WORKFLOWS = 2000
MAX_WORKFLOW_TASKS = 16
"""Under way at once. Each is a thread, and threads of one interpreter take turns: a hundred, the SDK's default, all
become so slow on a busy machine that they miss their deadlines. Beyond these, tasks wait at the server, which is no
failure."""
LIGHT_ACTIVITIES = 64
POLLERS = PollerBehaviorAutoscaling(maximum=10)
"""Of the SDK's default of a hundred, each task that is handed out waits at a busy server behind those of the others;
after a second the server takes it for undeliverable, though it counts as begun, and only its timeout brings it back."""


@contextlib.asynccontextmanager
async def build_worker(
    role: Role, client: Client, settings: WorkerSettings, ranks: Ranks | None = None
) -> AsyncIterator[Worker]:
    """A worker of one role and what it holds open. `ranks` are the processes of a trainer that has several."""
    if role is Role.TRAINER:
        async with _trainer_worker(client, settings, ranks) as worker:
            yield worker
        return
    builders = {Role.WORKFLOWS: _workflow_worker, Role.ROLLOUT: _rollout_worker}
    async with builders[role](client, settings) as worker:
        yield worker


def build_deployment_config(settings: WorkerSettings) -> WorkerDeploymentConfig | None:
    """The version of a workflow worker, if it has one. Only these have: what activities are given stays readable."""
    if settings.build_id is None:
        return None
    return WorkerDeploymentConfig(
        version=WorkerDeploymentVersion(deployment_name=settings.deployment_name, build_id=settings.build_id),
        use_worker_versioning=True,
        default_versioning_behavior=VersioningBehavior.PINNED,
    )


@contextlib.asynccontextmanager
async def _workflow_worker(client: Client, settings: WorkerSettings) -> AsyncIterator[Worker]:
    async with build_http_client() as http, open_client_session(api_key=settings.engine_api_key) as engine_session:
        runs = RunActivities(Preflight(http, engine_session, settings.admin_key), EngineOwners(client))
        groups = GroupActivities(client)
        directories = RunDirectoryActivities(client)
        health = HealthActivities(client, http)
        collection = CollectionActivities(http, settings.admin_key)
        publishing = PublishingActivities(engine_session)
        yield Worker(
            client,
            task_queue=settings.task_queue,
            workflows=[TrainingRun, RolloutGroup, Evaluation],
            activities=[
                runs.prepare_run,
                directories.record_run,
                directories.restore_run,
                groups.await_groups,
                health.await_server,
                health.survey_groups,
                EngineWatchActivities(engine_session).watch_engines,
                store_group,
                record_batch,
                read_batch,
                open_evaluation,
                store_episodes,
                finish_evaluation,
                EvaluationActivities(client).await_evaluation,
                collection.release_sessions,
                publishing.publish_weights,
            ],
            interceptors=[BoundaryInterceptor()],
            max_cached_workflows=MAX_CACHED_WORKFLOWS,
            max_concurrent_workflow_tasks=MAX_WORKFLOW_TASKS,
            max_concurrent_activities=LIGHT_ACTIVITIES,
            sticky_queue_schedule_to_start_timeout=timedelta(seconds=settings.sticky_timeout_seconds),
            max_heartbeat_throttle_interval=timedelta(seconds=settings.heartbeat_throttle_seconds),
            graceful_shutdown_timeout=timedelta(seconds=settings.graceful_shutdown_seconds),
            deployment_config=build_deployment_config(settings),
            workflow_task_poller_behavior=POLLERS,
            activity_task_poller_behavior=POLLERS,
        )


@contextlib.asynccontextmanager
async def _rollout_worker(client: Client, settings: WorkerSettings) -> AsyncIterator[Worker]:
    async with build_http_client() as http:
        clients = AgentClients(http, settings.max_episodes)
        with contextlib.suppress(ImportError):
            clients.get_openai()  # imports it: once episodes run, that would hold up the heartbeats of all of them
        datasets = DatasetCache()
        episodes = EpisodeActivities(clients, datasets, settings.admin_key)
        collection = CollectionActivities(http, settings.admin_key)
        yield Worker(
            client,
            task_queue=names.rollout_queue(settings.task_queue),
            activities=[
                episodes.run_episode,
                collection.collect_samples,
                CurriculumActivities(datasets).plan_block,
            ],
            interceptors=[BoundaryInterceptor()],
            # An episode and a collection are never under way at once for the same member; twice leaves room for both.
            max_concurrent_activities=2 * settings.max_episodes,
            max_heartbeat_throttle_interval=timedelta(seconds=settings.heartbeat_throttle_seconds),
            graceful_shutdown_timeout=timedelta(seconds=settings.graceful_shutdown_seconds),
            activity_task_poller_behavior=POLLERS,
        )
        await clients.close()


@contextlib.asynccontextmanager
async def _trainer_worker(client: Client, settings: WorkerSettings, ranks: Ranks | None) -> AsyncIterator[Worker]:
    # Torch is loaded by this role only.
    from activities.training import TrainingActivities
    from trainer.service import Trainer

    if settings.torch_threads:
        import torch

        torch.set_num_threads(settings.torch_threads)
    trainer = Trainer(ranks=ranks)
    training = TrainingActivities(trainer)
    yield Worker(
        client,
        # The local stack knows this worker by the process that it started, which with several ranks is torchrun.
        identity=None if ranks is None else f"{os.getppid()}@{socket.gethostname()}",
        task_queue=names.train_queue(settings.task_queue),
        activities=[training.prepare_trainer, training.train_step],
        interceptors=[BoundaryInterceptor()],
        max_concurrent_activities=1,
        max_heartbeat_throttle_interval=timedelta(seconds=settings.heartbeat_throttle_seconds),
        graceful_shutdown_timeout=timedelta(seconds=settings.graceful_shutdown_seconds),
    )
    trainer.close()
