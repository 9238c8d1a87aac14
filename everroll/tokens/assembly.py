"""Recorded turns to training samples. Pure.

The turns of a session form a tree: a turn's prompt either extends the token sequence of an earlier turn exactly, or
starts a sequence of its own. Each leaf gives one sample, the tokens on the path from the root to it. Tokens that
several leaves share are trained in the first of them only (by turn index); in the others the loss mask is off there.

Left out: an orphaned reply, that is one which was never continued while another reply to the same prompt was, so the
agent never saw it or threw it away.

Shapes: P prompt tokens that a turn added, C completion tokens, T tokens of a sample.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from everroll.contracts.outcomes import CauseKind, SampleStatus
from everroll.tokens.samples import NOT_SAMPLED_VERSION, Sample, SampleSet

MAX_SEQ_LEN = "max_seq_len"


@dataclass(frozen=True, eq=False)
class TurnTokens:
    """The tokens of one turn, as recorded."""

    index: int
    """Order of recording within the session."""
    follows: int | None
    """Index of the turn whose conversation this one continues; None for a new conversation."""
    extends: bool
    """Whether the prompt is the token sequence of `follows` plus `added_ids`; else `added_ids` is the whole prompt."""
    prompt_key: bytes
    """Equal for turns that answered the same messages and tools."""
    added_ids: npt.NDArray[np.int32]  # [P]
    completion_ids: npt.NDArray[np.int32]  # [C]
    logprobs: npt.NDArray[np.float32]  # [C]
    weight_versions: npt.NDArray[np.int32]  # [C]
    finish_reason: str
    """`stop` or `length`."""

    @property
    def parent(self) -> int | None:
        """Index of the turn whose tokens this one extends."""
        return self.follows if self.extends else None


@dataclass(frozen=True)
class NothingToTrain:
    """A session without a sample, and why."""

    cause: CauseKind
    """NO_RECORDS or ALL_TRUNCATED."""
    message: str


def assemble_samples(
    session_id: str,
    turns: Sequence[TurnTokens],
    temperature: float,
    max_seq_len: int | None,
    metadata: dict[str, Any],
) -> SampleSet | NothingToTrain:
    """Build one sample per leaf. `turns` must hold every turn that one of them follows."""
    if not turns:
        return NothingToTrain(CauseKind.NO_RECORDS, f"session {session_id} recorded no model call")
    kept = _drop_orphans(turns)
    by_index = {turn.index: turn for turn in kept}
    extended = {turn.parent for turn in kept}
    leaves = sorted(turn.index for turn in kept if turn.index not in extended)
    trained: set[int] = set()
    samples = []
    for leaf in leaves:
        path = _path_to(leaf, by_index)
        sample = _build_sample(path, trained, temperature, max_seq_len)
        trained.update(turn.index for turn in path)
        if sample is not None:
            samples.append(sample)
    if not samples:
        return NothingToTrain(
            CauseKind.ALL_TRUNCATED,
            f"session {session_id}: no sampled token within max_seq_len {max_seq_len} in {len(leaves)} sample(s)",
        )
    return SampleSet(session_id=session_id, samples=tuple(samples), metadata=metadata)


def _drop_orphans(turns: Iterable[TurnTokens]) -> list[TurnTokens]:
    turns = list(turns)
    continued = {turn.follows for turn in turns}
    answered = {(turn.follows, turn.prompt_key) for turn in turns if turn.index in continued}
    return [turn for turn in turns if turn.index in continued or (turn.follows, turn.prompt_key) not in answered]


def _path_to(leaf: int, by_index: dict[int, TurnTokens]) -> list[TurnTokens]:
    """Turns from the root of the token tree to `leaf`."""
    path = []
    index: int | None = leaf
    while index is not None:
        path.append(by_index[index])
        index = by_index[index].parent
    return path[::-1]


def _build_sample(
    path: list[TurnTokens], trained: set[int], temperature: float, max_seq_len: int | None
) -> Sample | None:
    """The sample of one path; None when truncation or sharing leaves no token to train."""
    pieces = [piece for turn in path for piece in _pieces_of(turn, turn.index not in trained)]
    token_ids, loss_mask, logprobs, versions = (np.concatenate(column) for column in zip(*pieces, strict=True))
    finish_reason = path[-1].finish_reason
    num_turns = len(path)
    if max_seq_len is not None and token_ids.size > max_seq_len:
        finish_reason = MAX_SEQ_LEN
        ends = np.cumsum([turn.added_ids.size + turn.completion_ids.size for turn in path])
        starts = ends - [turn.completion_ids.size for turn in path]
        num_turns = int((starts < max_seq_len).sum())
    cut = slice(0, max_seq_len)
    if not loss_mask[cut].any():
        return None
    return Sample(
        token_ids=token_ids[cut],
        loss_mask=loss_mask[cut],
        sampler_logprobs=logprobs[cut],
        weight_versions=versions[cut],
        status=SampleStatus.COMPLETED if finish_reason == "stop" else SampleStatus.TRUNCATED,
        finish_reason=finish_reason,
        temperature=temperature,
        num_turns=num_turns,
    )


_Piece = tuple[npt.NDArray[np.int32], npt.NDArray[np.bool_], npt.NDArray[np.float32], npt.NDArray[np.int32]]


def _pieces_of(turn: TurnTokens, train: bool) -> list[_Piece]:
    """A turn as (token_ids, loss_mask, logprobs, weight_versions): what it added to the prompt, then its completion."""
    completion = turn.completion_ids
    if not train:
        return [_untrained(turn.added_ids), _untrained(completion)]
    sampled = np.ones(completion.size, dtype=np.bool_)
    return [_untrained(turn.added_ids), (completion, sampled, turn.logprobs, turn.weight_versions)]


def _untrained(token_ids: npt.NDArray[np.int32]) -> _Piece:
    size = token_ids.size
    return (
        token_ids,
        np.zeros(size, dtype=np.bool_),
        np.zeros(size, dtype=np.float32),
        np.full(size, NOT_SAMPLED_VERSION, dtype=np.int32),
    )
