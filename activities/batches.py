"""`record_batch` and `read_batch`: one side of the loop alone, by way of the run directory.

A run that plays without training writes each batch as the request that a trainer would have been given, where a trainer
would have kept it: `<run_dir>/requests/step_000012.json`. So what it leaves is what `python -m trainer` and a run with
`mode = "train"` take, and so is what any run that trained has left.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

from pydantic import ValidationError
from temporalio import activity

from activities.heartbeats import heartbeating
from everroll.contracts import names
from everroll.contracts.batches import ReadBatchRequest, StoredBatch, StoredGroup
from everroll.contracts.rollout import EpisodeOutcome, GroupManifest
from everroll.contracts.training import GroupBatchItem, TrainRequest, TrainResult, Weights
from everroll.failures import ConfigurationError
from everroll.records import append_once
from everroll.store import LocalStore, StoreError, open_store, write_durably

ROLLOUTS_FILE = "rollouts.jsonl"


@activity.defn(name=names.RECORD_BATCH)
async def record_batch(request: TrainRequest) -> TrainResult:
    """Write a batch down in place of training it. The weights stay what they are.

    Raises:
        ConfigurationError: the directory holds another batch for this step.
        StoreError: it cannot be written.
    """
    async with heartbeating("writing"):
        await asyncio.to_thread(_record, request)
    return TrainResult(step=request.step, weights=Weights(version=0, path=request.model.path), metrics={})


@activity.defn(name=names.READ_BATCH)
async def read_batch(request: ReadBatchRequest) -> StoredBatch:
    """
    Raises:
        ConfigurationError: there is no such batch.
        StoreError: a group of it is missing or broken.
    """
    async with heartbeating("reading"):
        return await asyncio.to_thread(_read, request)


def _record(request: TrainRequest) -> None:
    path = _find_request(Path(request.run_dir), request.step)
    known = _load_request(path)
    if known is not None and known.batch != request.batch:
        raise ConfigurationError(f"{path} holds another batch, of an earlier run; choose another run.name")
    line = _describe_batch(open_store(request.store_url), request)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_durably(path, request.model_dump_json().encode())
        append_once(Path(request.run_dir, ROLLOUTS_FILE), line, lambda other: other["step"] == request.step)
    except OSError as error:
        raise StoreError(f"{request.run_dir} cannot be written: {error}") from error


def _describe_batch(store: LocalStore, request: TrainRequest) -> dict[str, object]:
    manifests = [_read_manifest(store, item) for item in request.batch]
    outcomes = [outcome for manifest in manifests for outcome in manifest.outcomes]
    return {
        "step": request.step,
        "groups": [item.group for item in request.batch],
        "prompts": [manifest.prompt_index for manifest in manifests],
        "rewards": [[outcome.reward for outcome in manifest.outcomes] for manifest in manifests],
        "num_episodes": len(outcomes),
        "num_tokens": sum(outcome.samples.num_tokens for outcome in outcomes if outcome.samples),
        "num_sampled_tokens": _count_sampled(outcomes),
    }


def _read(request: ReadBatchRequest) -> StoredBatch:
    path = _find_request(Path(request.directory), request.step)
    known = _load_request(path)
    if known is None:
        steps = len(list(path.parent.glob("step_*.json")))
        raise ConfigurationError(
            f"run.batches_from = {request.directory}: it has no batch for step {request.step} ({path}), and {steps} in "
            "all; run.num_steps must not exceed them"
        )
    store = open_store(known.store_url)
    groups = [_describe_group(item, _read_manifest(store, item)) for item in known.batch]
    return StoredBatch(run=known.run, store_url=known.store_url, groups=groups)


def _describe_group(item: GroupBatchItem, manifest: GroupManifest) -> StoredGroup:
    rewards = [outcome.reward for outcome in manifest.outcomes if outcome.reward is not None]
    return StoredGroup(
        group=item.group,
        manifest=item.manifest,
        num_episodes=len(manifest.outcomes),
        num_tokens=sum(outcome.samples.num_tokens for outcome in manifest.outcomes if outcome.samples),
        num_sampled_tokens=_count_sampled(manifest.outcomes),
        mean_reward=sum(rewards) / len(rewards) if rewards else None,
    )


def _count_sampled(outcomes: list[EpisodeOutcome]) -> int:
    return sum(outcome.samples.num_sampled_tokens for outcome in outcomes if outcome.samples)


def _read_manifest(store: LocalStore, item: GroupBatchItem) -> GroupManifest:
    try:
        return GroupManifest.model_validate_json(store.get(item.manifest))
    except ValidationError as error:
        raise StoreError(f"manifest {item.manifest.uri} cannot be read: {error}") from error


def _find_request(run_dir: Path, step: int) -> Path:
    return run_dir / "requests" / f"step_{step:06d}.json"


def _load_request(path: Path) -> TrainRequest | None:
    try:
        return TrainRequest.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValidationError) as error:
        raise ConfigurationError(f"{path} cannot be read: {error}") from error
