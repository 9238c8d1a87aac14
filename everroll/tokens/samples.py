"""Training samples and their encoding: one safetensors body per episode.

The same bytes travel from the session server to the store to the trainer, so their hash is the episode's fingerprint.
Ragged arrays are concatenated; `offsets` cuts them. Alignment: every array of a sample has length T, and index t speaks
of token t (not of the prediction at t): `sampler_logprobs[t]` is log p(token_ids[t] | token_ids[:t]).
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError
from safetensors.numpy import load as load_safetensors
from safetensors.numpy import save as save_safetensors

from everroll.contracts.outcomes import BadAnswerError, SampleStatus

SCHEMA_VERSION = 1
_HEADER_KEY = "everroll"
NOT_SAMPLED_VERSION = -1
_DTYPES = {
    "token_ids": np.dtype(np.int32),
    "loss_mask": np.dtype(np.bool_),
    "sampler_logprobs": np.dtype(np.float32),
    "weight_versions": np.dtype(np.int32),
    "offsets": np.dtype(np.int64),
}
_RAGGED = ("token_ids", "loss_mask", "sampler_logprobs", "weight_versions")


class MalformedSamplesError(BadAnswerError):
    """A samples body or a sample breaks the format; the message names the session, the sample and the field."""


@dataclass(frozen=True)
class Sample:
    """One training sequence of T tokens."""

    token_ids: npt.NDArray[np.int32]  # [T]
    loss_mask: npt.NDArray[np.bool_]  # [T] True exactly where the engine sampled the token
    sampler_logprobs: npt.NDArray[np.float32]  # [T] 0.0 where loss_mask is False
    weight_versions: npt.NDArray[np.int32]  # [T] NOT_SAMPLED_VERSION where loss_mask is False
    status: SampleStatus
    """COMPLETED or TRUNCATED."""
    finish_reason: str
    """Why the last turn ended: `stop`, `length`, or `max_seq_len` when the sample was cut."""
    temperature: float
    """Softmax temperature the tokens were drawn at."""
    num_turns: int

    @property
    def num_tokens(self) -> int:
        return int(self.token_ids.size)

    @property
    def num_sampled_tokens(self) -> int:
        return int(self.loss_mask.sum())


@dataclass(frozen=True)
class SampleSet:
    """All samples of one episode: one, or one per leaf when the conversation branched."""

    session_id: str
    samples: tuple[Sample, ...]
    metadata: dict[str, Any] = field(default_factory=dict)
    """What the collector sent along, unchanged."""


def validate_sample(sample: Sample, who: str) -> None:
    """Check lengths, types and values of one sample.

    Raises:
        MalformedSamplesError: names `who` and the first field that is wrong.
    """
    num_tokens = sample.token_ids.size
    for name in _RAGGED:
        array = getattr(sample, name)
        if array.ndim != 1 or array.size != num_tokens:
            raise MalformedSamplesError(f"{who}: {name} has shape {array.shape}, token_ids has ({num_tokens},)")
        if array.dtype != _DTYPES[name]:
            raise MalformedSamplesError(f"{who}: {name} has dtype {array.dtype}, expected {_DTYPES[name]}")
    if not sample.loss_mask.any():
        raise MalformedSamplesError(f"{who}: no sampled token")
    if sample.loss_mask[0]:
        raise MalformedSamplesError(f"{who}: the first token cannot be a sampled one")
    if (sample.token_ids < 0).any():
        raise MalformedSamplesError(f"{who}: negative token id")
    logprobs = sample.sampler_logprobs[sample.loss_mask]
    if not np.isfinite(logprobs).all() or (logprobs > 1e-4).any():
        index = int(np.flatnonzero(sample.loss_mask)[~np.isfinite(logprobs) | (logprobs > 1e-4)][0])
        value = sample.sampler_logprobs[index]
        raise MalformedSamplesError(f"{who}: sampler_logprobs[{index}] = {value} is no log-probability")
    if (sample.weight_versions[sample.loss_mask] < 0).any():
        raise MalformedSamplesError(f"{who}: a sampled token has no weight version")
    if not sample.status.has_verdict:
        raise MalformedSamplesError(f"{who}: status {sample.status.value} carries no verdict")
    if not (np.isfinite(sample.temperature) and sample.temperature > 0):
        raise MalformedSamplesError(f"{who}: temperature {sample.temperature}")


def encode_samples(sample_set: SampleSet) -> bytes:
    """Encode as one safetensors body; equal sets give equal bytes.

    Raises:
        MalformedSamplesError: a sample is not valid, or there is none.
    """
    if not sample_set.samples:
        raise MalformedSamplesError(f"session {sample_set.session_id}: no samples")
    for index, sample in enumerate(sample_set.samples):
        validate_sample(sample, f"session {sample_set.session_id} sample {index}")
    tensors = {name: np.concatenate([getattr(sample, name) for sample in sample_set.samples]) for name in _RAGGED}
    lengths = [sample.num_tokens for sample in sample_set.samples]
    tensors["offsets"] = np.cumsum([0, *lengths], dtype=np.int64)
    header = {
        "schema_version": SCHEMA_VERSION,
        "session_id": sample_set.session_id,
        "samples": [
            {
                "status": sample.status.value,
                "finish_reason": sample.finish_reason,
                "temperature": sample.temperature,
                "num_turns": sample.num_turns,
            }
            for sample in sample_set.samples
        ],
        "metadata": sample_set.metadata,
    }
    # One key only: safetensors does not keep the order of several, and equal sets must give equal bytes.
    body: bytes = save_safetensors(tensors, metadata={_HEADER_KEY: json.dumps(header, sort_keys=True)})
    return body


def decode_samples(body: bytes) -> SampleSet:
    """Decode and validate a samples body.

    Raises:
        MalformedSamplesError: not a safetensors body, another schema version, an unknown or missing tensor, or a
            sample that is not valid.
    """
    header = _read_header(body)
    try:
        session_id = str(header["session_id"])
        records = list(header["samples"])
        metadata = dict(header["metadata"])
        tensors = load_safetensors(body)
    except (SafetensorError, KeyError, TypeError, ValueError) as error:
        raise MalformedSamplesError(f"samples body cannot be read: {error!r}") from error
    if set(tensors) != set(_DTYPES):
        raise MalformedSamplesError(f"session {session_id}: tensors {sorted(tensors)}, expected {sorted(_DTYPES)}")
    offsets = tensors["offsets"]
    num_tokens = tensors["token_ids"].size
    monotonic = offsets.size == len(records) + 1 and offsets[0] == 0 and (np.diff(offsets) > 0).all()
    if not records or not monotonic or offsets[-1] != num_tokens:
        raise MalformedSamplesError(f"session {session_id}: offsets do not cut {num_tokens} tokens in {len(records)}")
    samples = []
    for index, record in enumerate(records):
        cut = slice(int(offsets[index]), int(offsets[index + 1]))
        try:
            sample = Sample(
                **{name: tensors[name][cut] for name in _RAGGED},
                status=SampleStatus(record["status"]),
                finish_reason=str(record["finish_reason"]),
                temperature=float(record["temperature"]),
                num_turns=int(record["num_turns"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise MalformedSamplesError(f"session {session_id} sample {index}: {error!r}") from error
        validate_sample(sample, f"session {session_id} sample {index}")
        samples.append(sample)
    return SampleSet(session_id=session_id, samples=tuple(samples), metadata=metadata)


def _read_header(body: bytes) -> dict[str, Any]:
    """Everroll's part of the safetensors header (`safetensors.numpy.load` drops it)."""
    try:
        size = int.from_bytes(body[:8], "little")
        if len(body) < 8 + size:
            raise ValueError(f"{len(body)} bytes, cut short")
        header = json.loads(json.loads(body[8 : 8 + size])["__metadata__"][_HEADER_KEY])
        version = header["schema_version"]
    except (ValueError, KeyError, TypeError) as error:
        raise MalformedSamplesError(f"not a samples body: {error!r}") from error
    if version != SCHEMA_VERSION:
        raise MalformedSamplesError(f"samples schema {version!r}, expected {SCHEMA_VERSION!r}")
    return dict(header)
