"""The trainer's own guard: a batch that must not be trained is refused by name."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

from everroll.contracts.outcomes import SampleStatus
from everroll.contracts.rollout import EpisodeOutcome, GroupManifest
from everroll.contracts.spec import TrainSection
from everroll.contracts.training import GroupBatchItem
from everroll.store import LocalStore, StoreError
from tests.trainer_helpers import RUN, VOCAB_SIZE, build_request, build_sample, store_episode, store_group
from trainer.batch import TrainingBatch, load_batch
from trainer.errors import TrainingDataError


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path / "store")


def _outcomes(store: LocalStore, group: int, num_members: int = 3, **sample: Any) -> list[EpisodeOutcome]:
    rng = np.random.default_rng(group)
    return [
        store_episode(store, group, member, float(member), [build_sample(rng, **sample)])
        for member in range(num_members)
    ]


def _load(tmp_path: Path, batch: list[GroupBatchItem], step: int = 1, **train: Any) -> TrainingBatch:
    request = build_request(tmp_path, step, TrainSection(device="cpu", **train), batch)
    return load_batch(request, VOCAB_SIZE)


def _refused(tmp_path: Path, outcomes: list[EpisodeOutcome], text: str, step: int = 1) -> None:
    """A batch of a good group and this one is refused in these words."""
    store = LocalStore(tmp_path / "store")
    good = store_group(store, 0, _outcomes(store, 0))
    with pytest.raises(TrainingDataError, match=text):
        _load(tmp_path, [good, store_group(store, 1, outcomes)], step)


def test_a_good_batch_is_read_unchanged(tmp_path: Path, store: LocalStore) -> None:
    batch = _load(tmp_path, [store_group(store, group, _outcomes(store, group)) for group in (4, 9)])
    assert [group.group for group in batch.groups] == [4, 9]
    assert batch.groups[1].rewards == [0.0, 1.0, 2.0]
    expected = build_sample(np.random.default_rng(9))
    np.testing.assert_array_equal(batch.groups[1].episodes[0].samples[0].token_ids, expected.token_ids)
    np.testing.assert_array_equal(batch.groups[1].episodes[0].samples[0].sampler_logprobs, expected.sampler_logprobs)


@pytest.mark.parametrize("status", [SampleStatus.ABORTED, SampleStatus.FAILED, SampleStatus.PENDING])
def test_a_member_without_a_verdict_is_refused(tmp_path: Path, store: LocalStore, status: SampleStatus) -> None:
    """E1."""
    outcomes = _outcomes(store, 1)
    outcomes[2] = outcomes[2].model_copy(update={"status": status})
    _refused(tmp_path, outcomes, f"run toy group 1 member 2 attempt 0: status {status.value} carries no verdict")


@pytest.mark.parametrize("reward", [None, math.nan, math.inf, -math.inf])
def test_a_reward_that_is_no_number_is_refused(tmp_path: Path, store: LocalStore, reward: float | None) -> None:
    """E2."""
    outcomes = _outcomes(store, 1)
    outcomes[1] = outcomes[1].model_copy(update={"reward": reward})
    _refused(tmp_path, outcomes, "group 1 member 1 .*is not a finite number")


def test_a_reward_that_is_a_word_is_refused(tmp_path: Path, store: LocalStore) -> None:
    """E2."""
    manifest = GroupManifest(run=RUN, group=1, prompt_index=1, outcomes=_outcomes(store, 1))
    body = manifest.model_dump_json().replace('"reward":1.0', '"reward":"good"').encode()
    item = GroupBatchItem(group=1, manifest=store.put("groups", ".json", body))
    with pytest.raises(TrainingDataError, match=r"run toy group 1: manifest .* cannot be read"):
        _load(tmp_path, [item])


@pytest.mark.parametrize(
    ("field", "change", "text"),
    [
        ("sampler_logprobs", lambda array: np.where(array < 0, np.nan, array).astype(np.float32), "no log-probability"),
        ("sampler_logprobs", lambda array: np.where(array < 0, np.inf, array).astype(np.float32), "no log-probability"),
        ("sampler_logprobs", lambda array: np.where(array < 0, -np.inf, array).astype(np.float32), "no log-prob"),
        ("sampler_logprobs", lambda array: array[:-1], "sampler_logprobs has shape"),
        ("loss_mask", lambda array: array[:-1], "loss_mask has shape"),
    ],
)
def test_samples_that_were_tampered_with_are_refused(
    tmp_path: Path, store: LocalStore, field: str, change: Any, text: str
) -> None:
    """D7: also when the collector's own checks were passed by."""
    outcomes = _outcomes(store, 1)
    samples = outcomes[2].samples
    assert samples is not None
    body = store.get(samples.blob)
    tensors = safetensors.numpy.load(body)
    tensors[field] = change(tensors[field])
    header_size = int.from_bytes(body[:8], "little")
    metadata = json.loads(body[8 : 8 + header_size])["__metadata__"]
    blob = store.put("samples", ".safetensors", safetensors.numpy.save(tensors, metadata=metadata))
    outcomes[2] = outcomes[2].model_copy(update={"samples": samples.model_copy(update={"blob": blob})})
    _refused(tmp_path, outcomes, f"run toy group 1 member 2 attempt 0: .*{text}")


def test_tokens_of_a_later_version_are_refused(tmp_path: Path, store: LocalStore) -> None:
    _refused(tmp_path, _outcomes(store, 1, weight_version=1), "sample 0: tokens of weight version 1, .* version 0")
    items = [store_group(store, 1, _outcomes(store, 1, weight_version=1))]
    assert len(_load(tmp_path, items, step=2).groups) == 1


def test_a_token_outside_the_vocabulary_is_refused(tmp_path: Path, store: LocalStore) -> None:
    _refused(tmp_path, _outcomes(store, 1, vocab_size=1000), "token id .*, the model's vocabulary has 64")


def test_a_missing_member_is_refused(tmp_path: Path, store: LocalStore) -> None:
    outcomes = _outcomes(store, 1)
    _refused(tmp_path, [outcomes[0], outcomes[2]], r"group 1: members \[0, 2\]")


def test_a_smaller_group_is_refused(tmp_path: Path, store: LocalStore) -> None:
    _refused(tmp_path, _outcomes(store, 1, num_members=2), "group 1: 2 members, group 0 of the same batch has 3")


def test_a_group_of_one_is_refused(tmp_path: Path, store: LocalStore) -> None:
    """E4."""
    _refused(tmp_path, _outcomes(store, 1, num_members=1), "group 1: 1 members; an advantage needs at least two")


def test_a_member_of_another_group_is_refused(tmp_path: Path, store: LocalStore) -> None:
    outcomes = _outcomes(store, 1)
    _refused(
        tmp_path, [*outcomes[:2], _outcomes(store, 5)[2]], "group 5 member 2 .*found in the manifest of .* group 1"
    )


def test_samples_of_another_session_are_refused(tmp_path: Path, store: LocalStore) -> None:
    outcomes = _outcomes(store, 1)
    outcomes[2] = outcomes[2].model_copy(update={"samples": outcomes[1].samples})
    _refused(tmp_path, outcomes, "member 2 attempt 0: the samples are those of session toy-1-1-0")


def test_a_missing_sample_is_refused(tmp_path: Path, store: LocalStore) -> None:
    outcomes = _outcomes(store, 1)
    assert outcomes[0].samples is not None
    samples = outcomes[0].samples.model_copy(update={"num_samples": 2})
    outcomes[0] = outcomes[0].model_copy(update={"samples": samples})
    _refused(tmp_path, outcomes, "member 0 attempt 0: 1 samples, 2 expected")


def test_an_empty_batch_is_refused(tmp_path: Path) -> None:
    """A8."""
    with pytest.raises(TrainingDataError, match="the batch is empty"):
        _load(tmp_path, [])


def test_groups_by_arrival_are_refused(tmp_path: Path, store: LocalStore) -> None:
    """I3: ordered by index; the same one twice is out of order, too."""
    items = [store_group(store, group, _outcomes(store, group)) for group in (1, 0)]
    with pytest.raises(TrainingDataError, match="not in ascending order"):
        _load(tmp_path, items)
    with pytest.raises(TrainingDataError, match="not in ascending order"):
        _load(tmp_path, [items[0], items[0]])


def test_groups_that_cannot_be_split_are_refused(tmp_path: Path, store: LocalStore) -> None:
    items = [store_group(store, group, _outcomes(store, group)) for group in range(3)]
    with pytest.raises(TrainingDataError, match="3 groups cannot be split into num_minibatches = 2"):
        _load(tmp_path, items, num_minibatches=2)


def test_a_damaged_blob_is_a_store_error(tmp_path: Path, store: LocalStore) -> None:
    item = store_group(store, 0, _outcomes(store, 0))
    path = store.root / item.manifest.uri
    path.write_bytes(path.read_bytes() + b" ")
    with pytest.raises(StoreError, match="has sha256"):
        _load(tmp_path, [item])
