"""A tiny random model and stored batches for the trainer's tests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from everroll.contracts.outcomes import SampleStatus
from everroll.contracts.rollout import EpisodeKey, EpisodeOutcome, GroupManifest, SamplesRef
from everroll.contracts.spec import ModelSection, TrainSection
from everroll.contracts.training import GroupBatchItem, PrepareTrainerRequest, TrainRequest
from everroll.store import LocalStore
from everroll.tokens.samples import NOT_SAMPLED_VERSION, Sample, SampleSet, encode_samples

VOCAB_SIZE = 64
RUN = "toy"

torch.set_num_threads(1)  # the tensors are tiny: threads would only wait for each other


def build_model(seed: int = 0, vocab_size: int = VOCAB_SIZE, hidden_size: int = 32) -> Qwen3ForCausalLM:
    """Two layers with random weights."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=hidden_size // 4,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
    )
    model = Qwen3ForCausalLM(config)
    model.eval()
    return model


def save_model(directory: Path, model: torch.nn.Module | None = None) -> Path:
    """A checkpoint directory such as a user has, with a file that is not the trainer's."""
    (build_model() if model is None else model).save_pretrained(directory)  # type: ignore[operator]
    (directory / "tokenizer_config.json").write_text('{"tokenizer_class": "None"}')
    return directory


def build_sample(
    rng: np.random.Generator,
    num_tokens: int = 12,
    num_prompt: int = 4,
    vocab_size: int = VOCAB_SIZE,
    weight_version: int = 0,
    temperature: float = 1.0,
    status: SampleStatus = SampleStatus.COMPLETED,
) -> Sample:
    """Random tokens: a prompt, a sampled turn, one token of a tool's answer, and a second sampled turn."""
    loss_mask = np.arange(num_tokens) >= num_prompt
    if num_tokens > num_prompt + 3:
        loss_mask[(num_prompt + num_tokens) // 2] = False
    logprobs = np.where(loss_mask, -rng.uniform(2.0, 5.0, num_tokens), 0.0)
    return Sample(
        token_ids=rng.integers(0, vocab_size, num_tokens).astype(np.int32),
        loss_mask=loss_mask,
        sampler_logprobs=logprobs.astype(np.float32),
        weight_versions=np.where(loss_mask, weight_version, NOT_SAMPLED_VERSION).astype(np.int32),
        status=status,
        finish_reason="stop",
        temperature=temperature,
        num_turns=2,
    )


def store_episode(
    store: LocalStore, group: int, member: int, reward: float | None, samples: Sequence[Sample]
) -> EpisodeOutcome:
    """Write one episode's samples."""
    key = EpisodeKey(run=RUN, group=group, member=member)
    blob = store.put("samples", ".safetensors", encode_samples(SampleSet(key.session_id, tuple(samples))))
    versions = np.concatenate([sample.weight_versions[sample.loss_mask] for sample in samples])
    reference = SamplesRef(
        blob=blob,
        num_samples=len(samples),
        num_tokens=sum(sample.num_tokens for sample in samples),
        num_sampled_tokens=sum(sample.num_sampled_tokens for sample in samples),
        min_weight_version=int(versions.min()),
        max_weight_version=int(versions.max()),
    )
    return EpisodeOutcome(key=key, status=SampleStatus.COMPLETED, prompt_index=group, reward=reward, samples=reference)


def store_group(store: LocalStore, group: int, outcomes: Sequence[EpisodeOutcome]) -> GroupBatchItem:
    """Write a group's manifest."""
    manifest = GroupManifest(run=RUN, group=group, prompt_index=group, outcomes=list(outcomes))
    return GroupBatchItem(group=group, manifest=store.put("groups", ".json", manifest.model_dump_json().encode()))


def store_random_batch(
    store: LocalStore,
    step: int,
    num_groups: int = 2,
    num_members: int = 3,
    make_sample: Callable[[np.random.Generator], Sample] | None = None,
) -> list[GroupBatchItem]:
    """The batch of one step: groups of random samples and rewards; a function of its arguments."""
    rng = np.random.default_rng(1000 + step)
    items = []
    for group in range((step - 1) * num_groups, step * num_groups):
        outcomes = [
            store_episode(store, group, member, float(rng.integers(0, 3)) / 2, [_draw(rng, step, make_sample)])
            for member in range(num_members)
        ]
        items.append(store_group(store, group, outcomes))
    return items


def _draw(rng: np.random.Generator, step: int, make_sample: Callable[[np.random.Generator], Sample] | None) -> Sample:
    if make_sample is not None:
        return make_sample(rng)
    return build_sample(rng, num_tokens=int(rng.integers(8, 24)), weight_version=step - 1)


def build_request(
    root: Path, step: int, train: TrainSection | None = None, batch: list[GroupBatchItem] | None = None
) -> TrainRequest:
    """A request over `root / "run"`, `root / "store"` and `root / "model"`; stores a random batch if none is given."""
    items = store_random_batch(LocalStore(root / "store"), step) if batch is None else batch
    return TrainRequest(
        run=RUN,
        run_dir=str(root / "run"),
        step=step,
        seed=7,
        store_url=str(root / "store"),
        batch=items,
        model=ModelSection(path=str(root / "model")),
        train=TrainSection(learning_rate=1e-2, device="cpu") if train is None else train,
    )


def build_prepare_request(root: Path, train: TrainSection | None = None) -> PrepareTrainerRequest:
    """Checkpoint 0 for `build_request`; makes `root / "model"` if there is none."""
    if not (root / "model").exists():
        save_model(root / "model")
    return PrepareTrainerRequest(
        run=RUN,
        run_dir=str(root / "run"),
        seed=7,
        model=ModelSection(path=str(root / "model")),
        train=TrainSection(learning_rate=1e-2, device="cpu") if train is None else train,
    )


def read_weights(root: Path, step: int) -> bytes:
    """The bytes of the weights that a step made."""
    return (root / "run" / "weights" / f"step_{step:06d}" / "model.safetensors").read_bytes()
