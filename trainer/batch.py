"""From batch references to validated training groups.

This is the trainer's own guard: whatever went wrong upstream, a batch with a sample that has no verdict, a reward that
is not a number, a missing member or tokens of a later weight version is refused here, by name, before it costs a step.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import numpy as np
from pydantic import ValidationError

from everroll.contracts.rollout import EpisodeOutcome, GroupManifest
from everroll.contracts.training import GroupBatchItem, TrainRequest
from everroll.store import LocalStore, open_store
from everroll.tokens.samples import MalformedSamplesError, Sample, SampleSet, decode_samples
from trainer.errors import TrainingDataError

_LARGEST_REWARD = 1e37
"""Advantages are float32, and squares of differences must not overflow in float64."""


@dataclass(frozen=True)
class TrainingEpisode:
    """A finite reward and at least one valid sample."""

    who: str
    """Run, group, member and attempt, for messages."""
    reward: float
    samples: tuple[Sample, ...]


@dataclass(frozen=True)
class TrainingGroup:
    """All episodes of one prompt, ordered by member; at least two."""

    group: int
    episodes: tuple[TrainingEpisode, ...]

    @property
    def rewards(self) -> list[float]:
        return [episode.reward for episode in self.episodes]


@dataclass(frozen=True)
class TrainingBatch:
    """Groups of equal size, ordered by group index."""

    groups: tuple[TrainingGroup, ...]


def load_batch(request: TrainRequest, vocab_size: int) -> TrainingBatch:
    """Read and validate the batch of one step.

    Raises:
        TrainingDataError: the batch must not be trained; names the group, member and sample, and what is wrong.
        StoreError: a blob is missing or not what was written.
    """
    _validate_order(request)
    store = open_store(request.store_url)
    limits = _Limits(max_weight_version=request.step - 1, vocab_size=vocab_size)
    groups = tuple(_load_group(request.played_by or request.run, item, store, limits) for item in request.batch)
    size = len(groups[0].episodes)
    for group in groups:
        if len(group.episodes) != size:
            raise TrainingDataError(
                f"run {request.run} group {group.group}: {len(group.episodes)} members, "
                f"group {groups[0].group} of the same batch has {size}"
            )
    return TrainingBatch(groups)


@dataclass(frozen=True)
class _Limits:
    max_weight_version: int
    vocab_size: int


def _validate_order(request: TrainRequest) -> None:
    indices = [item.group for item in request.batch]
    if not indices:
        raise TrainingDataError(f"run {request.run} step {request.step}: the batch is empty")
    if any(later <= earlier for earlier, later in itertools.pairwise(indices)):
        raise TrainingDataError(f"run {request.run} step {request.step}: groups are not in ascending order: {indices}")
    if len(indices) % request.train.num_minibatches:
        raise TrainingDataError(
            f"run {request.run} step {request.step}: {len(indices)} groups cannot be split into "
            f"num_minibatches = {request.train.num_minibatches} equal parts"
        )


def _load_group(run: str, item: GroupBatchItem, store: LocalStore, limits: _Limits) -> TrainingGroup:
    who = f"run {run} group {item.group}"
    try:
        manifest = GroupManifest.model_validate_json(store.get(item.manifest))
    except ValidationError as error:
        raise TrainingDataError(f"{who}: manifest {item.manifest.uri} cannot be read: {error}") from error
    if manifest.schema_version != 1:
        raise TrainingDataError(f"{who}: manifest schema {manifest.schema_version}, expected 1")
    if (manifest.run, manifest.group) != (run, item.group):
        raise TrainingDataError(f"{who}: the manifest is that of run {manifest.run} group {manifest.group}")
    members = [outcome.key.member for outcome in manifest.outcomes]
    if members != list(range(len(members))):
        raise TrainingDataError(f"{who}: members {members}, expected 0, 1, ... without gaps")
    if len(members) < 2:
        raise TrainingDataError(f"{who}: {len(members)} members; an advantage needs at least two")
    episodes = tuple(_load_episode(manifest, outcome, store, limits) for outcome in manifest.outcomes)
    return TrainingGroup(item.group, episodes)


def _load_episode(
    manifest: GroupManifest, outcome: EpisodeOutcome, store: LocalStore, limits: _Limits
) -> TrainingEpisode:
    who = str(outcome.key)
    if (outcome.key.run, outcome.key.group) != (manifest.run, manifest.group):
        raise TrainingDataError(f"{who}: found in the manifest of run {manifest.run} group {manifest.group}")
    if not outcome.status.has_verdict:
        raise TrainingDataError(f"{who}: status {outcome.status.value} carries no verdict")
    if outcome.reward is None or not math.isfinite(outcome.reward):
        raise TrainingDataError(f"{who}: reward {outcome.reward} is not a finite number")
    if abs(outcome.reward) > _LARGEST_REWARD:
        raise TrainingDataError(f"{who}: reward {outcome.reward:g} is beyond {_LARGEST_REWARD:g}")
    if outcome.samples is None:
        raise TrainingDataError(f"{who}: no samples are stored")
    try:
        sample_set = decode_samples(store.get(outcome.samples.blob))
    except MalformedSamplesError as error:
        raise TrainingDataError(f"{who}: {error}") from error
    _validate_samples(who, outcome, sample_set, limits)
    return TrainingEpisode(who, outcome.reward, sample_set.samples)


def _validate_samples(who: str, outcome: EpisodeOutcome, sample_set: SampleSet, limits: _Limits) -> None:
    """What `decode_samples` cannot know: whose samples these are, and what the trainer can take."""
    if sample_set.session_id != outcome.key.session_id:
        raise TrainingDataError(f"{who}: the samples are those of session {sample_set.session_id}")
    if outcome.samples is not None and len(sample_set.samples) != outcome.samples.num_samples:
        raise TrainingDataError(f"{who}: {len(sample_set.samples)} samples, {outcome.samples.num_samples} expected")
    for index, sample in enumerate(sample_set.samples):
        newest = int(np.max(sample.weight_versions))
        if newest > limits.max_weight_version:
            raise TrainingDataError(
                f"{who} sample {index}: tokens of weight version {newest}, "
                f"but the trainer holds version {limits.max_weight_version}"
            )
        largest = int(np.max(sample.token_ids))
        if largest >= limits.vocab_size:
            raise TrainingDataError(
                f"{who} sample {index}: token id {largest}, the model's vocabulary has {limits.vocab_size}"
            )
