"""What stays of a session for good: a digest of its samples, from which the audit can tell that nothing was changed.

Pure and versioned: the bytes that are hashed are fixed by `DIGEST_VERSION` and must never change under it.

A sample of T tokens is hashed as `everroll sample 1\\n`, T as int64, then its arrays one after the other, all
little-endian: token ids int32 [T], loss mask one byte each (0 or 1) [T], sampler log-probabilities float32 [T] (their
exact bits), weight versions int32 [T]. A session is hashed as `everroll session 1\\n`, the number of its samples as
int64, then the raw sha256 of each sample, in the order of assembly.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

from everroll.contracts.base import Payload
from everroll.tokens.assembly import NothingToTrain, TurnTokens, assemble_samples
from everroll.tokens.samples import Sample

DIGEST_VERSION = 1
_SAMPLE_PREFIX = b"everroll sample 1\n"
_SESSION_PREFIX = b"everroll session 1\n"


class SampleDigest(Payload):
    """One sample, in short."""

    sha256: str
    num_tokens: int
    num_sampled_tokens: int


class SessionDigest(Payload):
    """All samples of a session, in short; small enough to be kept for good."""

    version: int = DIGEST_VERSION
    session_id: str
    max_seq_len: int | None
    """What the samples were truncated to before they were hashed; None if they were not."""
    samples: list[SampleDigest]
    """In the order of assembly; empty when there was nothing to train."""
    sha256: str
    """Over all of `samples`."""


def digest_turns(session_id: str, turns: Sequence[TurnTokens], max_seq_len: int | None) -> SessionDigest:
    """The digest of what the live turns of a session are assembled to. `turns` as for `assemble_samples`.

    Give the `max_seq_len` with which the samples were collected last, so that the digest speaks of what was trained.
    """
    samples = assemble_samples(session_id, turns, 1.0, max_seq_len, {})  # the temperature is not hashed
    return digest_samples(session_id, () if isinstance(samples, NothingToTrain) else samples.samples, max_seq_len)


def digest_samples(session_id: str, samples: Sequence[Sample], max_seq_len: int | None) -> SessionDigest:
    """The digest of assembled samples."""
    digests = [digest_sample(sample) for sample in samples]
    hasher = hashlib.sha256(_SESSION_PREFIX + len(digests).to_bytes(8, "little"))
    for digest in digests:
        hasher.update(bytes.fromhex(digest.sha256))
    return SessionDigest(session_id=session_id, max_seq_len=max_seq_len, samples=digests, sha256=hasher.hexdigest())


def digest_sample(sample: Sample) -> SampleDigest:
    """The digest of one sample: any other bit in any of its arrays gives another."""
    hasher = hashlib.sha256(_SAMPLE_PREFIX + sample.num_tokens.to_bytes(8, "little"))
    hasher.update(np.ascontiguousarray(sample.token_ids, dtype="<i4").tobytes())
    hasher.update(np.ascontiguousarray(sample.loss_mask, dtype=np.uint8).tobytes())
    hasher.update(np.ascontiguousarray(sample.sampler_logprobs, dtype="<f4").tobytes())
    hasher.update(np.ascontiguousarray(sample.weight_versions, dtype="<i4").tobytes())
    return SampleDigest(
        sha256=hasher.hexdigest(), num_tokens=sample.num_tokens, num_sampled_tokens=sample.num_sampled_tokens
    )
