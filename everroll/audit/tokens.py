"""I2 for one trained episode: what lies in the store against what the session recorded, bit for bit. Pure.

Two proofs. The samples are assembled again from the recorded turns and compared value by value, so that truncation,
branches and shared prefixes are covered. And apart from the assembly, each trained token is looked up in the turns:
it must be a sampled one of the path that the sample follows, and be trained once in all samples of the session.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from everroll.audit.report import Breach, Findings, Invariant
from everroll.sessions.digest import SessionDigest, digest_sample, digest_samples, digest_turns
from everroll.sessions.reading import RecordedSession
from everroll.tokens.assembly import MAX_SEQ_LEN, NothingToTrain, TurnTokens, assemble_samples
from everroll.tokens.samples import Sample, SampleSet

EQUAL = "trained samples equal the session's record, bit for bit"
MASKS = "loss masks cover sampled tokens only, each once"
DIGESTS = "digests kept at release equal the journal"
BY_DIGEST = "trained samples equal the digest kept at release"
VERSIONS = "no token is newer than the weights it trained"
_I2 = Invariant.TOKENS
_FIELDS = ("token_ids", "loss_mask", "sampler_logprobs", "weight_versions")


@dataclass(frozen=True)
class TrainedEpisode:
    """Which episode is looked at; names every breach."""

    step: int
    group: int
    member: int
    session_id: str
    max_seq_len: int | None
    """What its samples were truncated to when they were collected."""

    def breach(self, message: str, **details: str | int | None) -> Breach:
        return Breach.model_validate(
            {
                "invariant": _I2,
                "message": message,
                "step": self.step,
                "group": self.group,
                "member": self.member,
                "session_id": self.session_id,
                **details,
            }
        )


def check_tokens(
    who: TrainedEpisode,
    stored: SampleSet,
    session: RecordedSession | None,
    digest: SessionDigest | None,
    findings: Findings,
) -> bool:
    """Compare the stored samples with the record, or with the digest where the rows are gone.

    Returns True if there was the digest only.
    """
    if stored.session_id != who.session_id:
        found = {"expected": who.session_id, "found": stored.session_id}
        findings.count(_I2, EQUAL)
        findings.add(EQUAL, who.breach("the samples are those of another session", **found))
        return False
    _check_versions(who, stored.samples, findings)
    if session is not None and session.turns:
        _compare_with_turns(who, stored, session, digest, findings)
        return False
    if digest is None:
        findings.count(_I2, EQUAL)
        findings.add(EQUAL, who.breach("the journal holds neither turns nor a digest of the session"))
        return False
    _compare_with_digest(who, stored.samples, digest, findings)
    return True


def _compare_with_turns(
    who: TrainedEpisode,
    stored: SampleSet,
    session: RecordedSession,
    digest: SessionDigest | None,
    findings: Findings,
) -> None:
    turns = session.live_turns()
    if digest is not None:
        now = digest_turns(who.session_id, turns, digest.max_seq_len)
        breach = who.breach(
            "the journal's turns are not those of the digest kept at release",
            expected=digest.sha256,
            found=now.sha256,
        )
        findings.expect(DIGESTS, now.sha256 == digest.sha256, breach)
    assembled = assemble_samples(who.session_id, turns, session.sampling.temperature, who.max_seq_len, {})
    recorded = () if isinstance(assembled, NothingToTrain) else assembled.samples
    findings.count(_I2, EQUAL)
    breaches = _compare_samples(who, recorded, stored.samples)
    if breaches:
        findings.add(EQUAL, breaches[0].model_copy(update={"message": breaches[0].message + _blame(stored, digest)}))
    _check_masks(who, stored.samples, turns, findings)


def _blame(stored: SampleSet, digest: SessionDigest | None) -> str:
    """Which side was changed, where the digest can tell."""
    if digest is None:
        return ""
    kept = digest_samples(stored.session_id, stored.samples, digest.max_seq_len).sha256 == digest.sha256
    side = "the store agrees with it, so the journal was changed" if kept else "the store does not agree with it"
    return f" (digest kept at release: {side})"


def _compare_samples(who: TrainedEpisode, recorded: Sequence[Sample], stored: Sequence[Sample]) -> list[Breach]:
    """The first difference of each sample."""
    breaches = []
    for index, (expected, found) in enumerate(zip(recorded, stored, strict=False)):
        breach = _compare_sample(who, index, expected, found)
        if breach is not None:
            breaches.append(breach)
    if len(recorded) != len(stored):
        counts = {"expected": str(len(recorded)), "found": str(len(stored))}
        sample = min(len(recorded), len(stored))
        breaches.append(who.breach("another number of samples", sample=sample, field="samples", **counts))
    return breaches


def _compare_sample(who: TrainedEpisode, index: int, expected: Sample, found: Sample) -> Breach | None:
    arrays = [(name, _array(expected, name), _array(found, name)) for name in _FIELDS]
    positions = {name: find_difference(left, right) for name, left, right in arrays}
    first = min((position for position in positions.values() if position is not None), default=None)
    for name, left, right in arrays:
        if first is not None and positions[name] == first:
            values = {"expected": _show(left, first), "found": _show(right, first)}
            return who.breach(f"{name} differs", sample=index, position=first, field=name, **values)
    for name, known, have in (
        ("status", expected.status.value, found.status.value),
        ("finish_reason", expected.finish_reason, found.finish_reason),
        ("temperature", expected.temperature, found.temperature),
        ("num_turns", expected.num_turns, found.num_turns),
    ):
        if known != have:
            return who.breach(f"{name} differs", sample=index, field=name, expected=str(known), found=str(have))
    return None


def find_difference(left: npt.NDArray[np.generic], right: npt.NDArray[np.generic]) -> int | None:
    """Index of the first element whose bits differ; the shorter length where one is a prefix of the other."""
    size = min(left.size, right.size)
    width = left.dtype.itemsize
    bits_left = np.ascontiguousarray(left[:size]).view(np.uint8).reshape(size, width)
    bits_right = np.ascontiguousarray(right[:size]).view(np.uint8).reshape(size, width)
    unequal = np.flatnonzero((bits_left != bits_right).any(axis=1))
    if unequal.size:
        return int(unequal[0])
    return None if left.size == right.size else size


def _array(sample: Sample, name: str) -> npt.NDArray[np.generic]:
    arrays: dict[str, npt.NDArray[np.generic]] = {
        "token_ids": sample.token_ids,
        "loss_mask": sample.loss_mask,
        "sampler_logprobs": sample.sampler_logprobs,
        "weight_versions": sample.weight_versions,
    }
    return arrays[name]


def _show(array: npt.NDArray[np.generic], position: int) -> str:
    """A value such that unequal bits look unequal."""
    if position >= array.size:
        return f"nothing (the sample ends after {array.size} tokens)"
    value = array[position]
    if isinstance(value, np.float32):
        return f"{float(value)!r} (bits {int(value.view(np.uint32)):#010x})"
    return str(value.item())


def _check_masks(
    who: TrainedEpisode, samples: Sequence[Sample], turns: Sequence[TurnTokens], findings: Findings
) -> None:
    """Look each trained token up in the turns, apart from how samples are assembled."""
    findings.count(_I2, MASKS)
    used: set[tuple[int, int]] = set()
    for index, sample in enumerate(samples):
        origins = _find_origins(sample, turns, used)
        if origins is None:
            findings.add(MASKS, who.breach("no path of the session's turns holds the sample's tokens", sample=index))
            return
        for position in np.flatnonzero(sample.loss_mask).tolist():
            origin = origins[position]
            if origin is None:
                values = {"expected": "False (a token of the prompt)", "found": "True"}
                breach = who.breach(
                    "a token that was not sampled is trained", sample=index, position=position, **values
                )
                findings.add(MASKS, breach.model_copy(update={"field": "loss_mask"}))
                return
            if origin in used:
                text = f"token {origin[1]} of turn {origin[0]} is trained twice"
                findings.add(MASKS, who.breach(text, sample=index, position=position, field="loss_mask"))
                return
            used.add(origin)


_Origin = tuple[int, int] | None
"""Turn and index of its completion that a token was sampled as; None for a token of a prompt."""


def _find_origins(sample: Sample, turns: Sequence[TurnTokens], used: set[tuple[int, int]]) -> list[_Origin] | None:
    """Where each token of the sample comes from; None when no path of turns begins with its tokens.

    Turns that were sampled alike from one prompt make paths of equal tokens: the sample is of the first of which it
    trains nothing that is `used`. Where there is none, its tokens are trained once more.
    """
    by_index = {turn.index: turn for turn in turns}
    trained = np.flatnonzero(sample.loss_mask).tolist()
    first: list[_Origin] | None = None
    for turn in turns:
        ids, origins = _walk(turn, by_index)
        size = sample.num_tokens
        whole = ids.size == size or (sample.finish_reason == MAX_SEQ_LEN and ids.size > size)
        if not whole or not np.array_equal(ids[:size], sample.token_ids):
            continue
        first = first or origins[:size]
        if not any(origins[position] is None or origins[position] in used for position in trained):
            return origins[:size]
    return first


def _walk(turn: TurnTokens, by_index: dict[int, TurnTokens]) -> tuple[npt.NDArray[np.int32], list[_Origin]]:
    """All tokens up to the end of a turn, and where each comes from."""
    path = [turn]
    while path[-1].extends and path[-1].follows is not None:
        path.append(by_index[path[-1].follows])
    ids, origins = [], list[_Origin]()
    for one in reversed(path):
        ids += [one.added_ids, one.completion_ids]
        origins += [None] * one.added_ids.size
        origins += [(one.index, offset) for offset in range(one.completion_ids.size)]
    return np.concatenate(ids), origins


def _compare_with_digest(
    who: TrainedEpisode, samples: Sequence[Sample], digest: SessionDigest, findings: Findings
) -> None:
    """The digest may be over samples that were cut elsewhere: then only those that were not cut can be told."""
    findings.count(_I2, BY_DIGEST)
    kept = [sample.sha256 for sample in digest.samples]
    now = [digest_sample(sample).sha256 for sample in samples]
    if digest.max_seq_len == who.max_seq_len:
        index = next((i for i, pair in enumerate(zip(kept, now, strict=False)) if pair[0] != pair[1]), None)
        if index is None and len(kept) == len(now):
            return
        sample = min(len(kept), len(now)) if index is None else index
        values = {"expected": _nth(kept, sample), "found": _nth(now, sample)}
        text = "the sample is not that of the digest kept at release (the journal's rows are gone)"
        findings.add(BY_DIGEST, who.breach(text, sample=sample, **values))
        return
    for index, sample_found in enumerate(samples):
        if sample_found.finish_reason == MAX_SEQ_LEN:
            findings.note(f"session {who.session_id} sample {index} was cut, and its digest was taken of the whole")
        elif now[index] not in kept:
            text = "the sample is none of those of the digest kept at release (the journal's rows are gone)"
            findings.add(BY_DIGEST, who.breach(text, sample=index, found=now[index]))
            return


def _nth(values: Sequence[str], index: int) -> str:
    return values[index] if index < len(values) else "no such sample"


def _check_versions(who: TrainedEpisode, samples: Sequence[Sample], findings: Findings) -> None:
    findings.count(_I2, VERSIONS)
    for index, sample in enumerate(samples):
        later = np.flatnonzero(sample.loss_mask & (sample.weight_versions >= who.step))
        if later.size:
            position = int(later[0])
            values = {"expected": f"at most {who.step - 1}", "found": str(int(sample.weight_versions[position]))}
            text = "the token was sampled by weights that did not exist yet"
            findings.add(VERSIONS, who.breach(text, sample=index, position=position, field="weight_versions", **values))
            return
