"""The audit of a session that answered one prompt more than once, with the same tokens."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from everroll.audit.report import Findings
from everroll.audit.tokens import TrainedEpisode, check_tokens
from everroll.contracts.spec import SamplingSpec
from everroll.sessions.reading import RecordedSession, RecordedTurn
from everroll.tokens.assembly import TurnTokens, assemble_samples
from everroll.tokens.samples import SampleSet


def make_turn(index: int, follows: int | None, completion: list[int], added: tuple[int, ...] = (1, 2)) -> TurnTokens:
    size = len(completion)
    return TurnTokens(
        index=index,
        follows=follows,
        extends=follows is not None,
        prompt_key=bytes([*added, 255 if follows is None else follows]),
        added_ids=np.array(added, np.int32),
        completion_ids=np.array(completion, np.int32),
        logprobs=np.full(size, -0.5, np.float32),
        weight_versions=np.zeros(size, np.int32),
        finish_reason="stop",
    )


def audit(turns: list[TurnTokens], max_seq_len: int | None = None, *, repeat_first: bool = False) -> list[str]:
    stored = assemble_samples("s", turns, 1.0, max_seq_len, {})
    assert isinstance(stored, SampleSet)
    if repeat_first:
        stored = dataclasses.replace(stored, samples=(stored.samples[0], *stored.samples))
    rows = [
        RecordedTurn(
            tokens=turn, attempt=0, depth=0, messages=[], tools=None, reply={}, num_prompt_tokens=0,
            num_cached_tokens=0, seed=0, created_at=0.0, note="",
        )
        for turn in turns
    ]  # fmt: skip
    session = RecordedSession("s", SamplingSpec(temperature=1.0), 0, 0.0, 0, None, rows)
    findings = Findings()
    check_tokens(TrainedEpisode(1, 0, 0, "s", max_seq_len), stored, session, None, findings)
    return [breach.message for breach in findings.breaches]


TWICE = [make_turn(0, None, [5, 6]), make_turn(1, None, [5, 6])]
UNDER_ONE_ROOT = [make_turn(0, None, [5]), make_turn(1, 0, [7, 8]), make_turn(2, 0, [7, 8])]
CONTINUED = [make_turn(0, None, [5]), make_turn(1, 0, [7]), make_turn(2, None, [5]), make_turn(3, 2, [7])]
CUT = [make_turn(0, None, [5, 6]), make_turn(1, 0, [7]), make_turn(2, None, [5, 6]), make_turn(3, 2, [8])]


@pytest.mark.parametrize(
    ("turns", "max_seq_len"), [(TWICE, None), (UNDER_ONE_ROOT, None), (CONTINUED, None), (CUT, 4), (CUT, 3)]
)
def test_equal_answers_to_one_prompt_are_each_trained_once(turns: list[TurnTokens], max_seq_len: int | None) -> None:
    assert audit(turns, max_seq_len) == []


@pytest.mark.parametrize("turns", [TWICE, UNDER_ONE_ROOT, CONTINUED])
def test_a_sample_that_is_there_once_too_often_is_found(turns: list[TurnTokens]) -> None:
    messages = audit(turns, repeat_first=True)
    assert any("is trained twice" in message for message in messages)
