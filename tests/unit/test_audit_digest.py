"""The digest that stays of a session: its bytes are fixed for good, and every bit of what was trained counts."""

from __future__ import annotations

import dataclasses
import hashlib
import struct
from collections.abc import Callable

import numpy as np
import pytest

from everroll.contracts.outcomes import SampleStatus
from everroll.sessions.digest import digest_sample, digest_samples, digest_turns
from everroll.sessions.reading import parse_digest
from everroll.tokens.assembly import TurnTokens, assemble_samples
from everroll.tokens.samples import Sample, SampleSet

SAMPLE = Sample(
    token_ids=np.array([5, 6, 300_000], dtype=np.int32),
    loss_mask=np.array([False, True, True]),
    sampler_logprobs=np.array([0.0, -0.5, -1.25], dtype=np.float32),
    weight_versions=np.array([-1, 3, 4], dtype=np.int32),
    status=SampleStatus.COMPLETED,
    finish_reason="stop",
    temperature=1.0,
    num_turns=1,
)


def test_the_bytes_are_fixed() -> None:
    """Written out by hand from the format's description, and as the constant that old journals hold."""
    body = b"everroll sample 1\n" + struct.pack("<q", 3)
    body += struct.pack("<3i", 5, 6, 300_000) + b"\x00\x01\x01"
    body += struct.pack("<3f", 0.0, -0.5, -1.25) + struct.pack("<3i", -1, 3, 4)
    digest = digest_sample(SAMPLE)
    assert digest.sha256 == hashlib.sha256(body).hexdigest()
    assert digest.sha256 == "805426faaee12fbd18545307c51452b46856ad523b0aa852415631171cf19213"
    assert (digest.num_tokens, digest.num_sampled_tokens) == (3, 2)
    whole = digest_samples("s", [SAMPLE, SAMPLE], None)
    raw = bytes.fromhex(digest.sha256)
    assert whole.sha256 == hashlib.sha256(b"everroll session 1\n" + struct.pack("<q", 2) + raw + raw).hexdigest()
    assert whole.sha256 == "c163ff18092dc993ba8dc1329216efeaf31ab5d144e6f746238660369aac7040"
    assert parse_digest(whole.model_dump_json()) == whole


def test_a_digest_of_another_version_is_none() -> None:
    text = digest_samples("s", [SAMPLE], None).model_copy(update={"version": 2}).model_dump_json()
    assert parse_digest(text) is None
    assert parse_digest("bec06350fbe6d0ee792291ed19200ed2") is None


@pytest.mark.parametrize(
    "change",
    [
        lambda sample: {"token_ids": sample.token_ids + np.array([0, 1, 0], dtype=np.int32)},
        lambda sample: {"loss_mask": np.array([True, True, True])},
        lambda sample: {"sampler_logprobs": np.nextafter(sample.sampler_logprobs, np.float32(-9))},
        lambda sample: {"sampler_logprobs": np.array([-0.0, -0.5, -1.25], dtype=np.float32)},
        lambda sample: {"weight_versions": np.array([-1, 3, 3], dtype=np.int32)},
    ],
)
def test_every_bit_counts(change: Callable[[Sample], dict[str, object]]) -> None:
    changed = dataclasses.replace(SAMPLE, **change(SAMPLE))  # type: ignore[arg-type]
    assert digest_sample(changed).sha256 != digest_sample(SAMPLE).sha256


@pytest.mark.parametrize("max_seq_len", [None, 5])
def test_turns_give_the_digest_of_their_samples(max_seq_len: int | None) -> None:
    turn = TurnTokens(
        index=0,
        follows=None,
        extends=False,
        prompt_key=b"",
        added_ids=np.arange(4, dtype=np.int32),
        completion_ids=np.array([9, 8, 7], dtype=np.int32),
        logprobs=np.array([-0.1, -0.2, -0.3], dtype=np.float32),
        weight_versions=np.array([0, 0, 1], dtype=np.int32),
        finish_reason="stop",
    )
    samples = assemble_samples("s", [turn], 0.7, max_seq_len, {})
    assert isinstance(samples, SampleSet)
    assert digest_turns("s", [turn], max_seq_len) == digest_samples("s", samples.samples, max_seq_len)
    assert digest_turns("s", [], max_seq_len).samples == []
