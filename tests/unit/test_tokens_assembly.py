"""Turns to samples: masks, branches, orphans, truncation."""

from __future__ import annotations

import numpy as np
import pytest

from everroll.contracts.outcomes import CauseKind, SampleStatus
from everroll.tokens.assembly import NothingToTrain, TurnTokens, assemble_samples
from everroll.tokens.samples import SampleSet, encode_samples


def make_turn(
    index: int,
    follows: int | None,
    added: list[int],
    completion: list[int],
    *,
    extends: bool | None = None,
    prompt: str | None = None,
    finish: str = "stop",
    version: int = 1,
) -> TurnTokens:
    return TurnTokens(
        index=index,
        follows=follows,
        extends=follows is not None if extends is None else extends,
        prompt_key=(prompt or f"prompt {index}").encode(),
        added_ids=np.array(added, dtype=np.int32),
        completion_ids=np.array(completion, dtype=np.int32),
        logprobs=np.array([-token / 100 for token in completion], dtype=np.float32),
        weight_versions=np.full(len(completion), version, dtype=np.int32),
        finish_reason=finish,
    )


def assemble(turns: list[TurnTokens], max_seq_len: int | None = None) -> SampleSet:
    samples = assemble_samples("s", turns, 0.5, max_seq_len, {})
    assert isinstance(samples, SampleSet)
    encode_samples(samples)  # validates
    return samples


def rows(samples: SampleSet) -> list[list[tuple[int, bool]]]:
    return [list(zip(sample.token_ids.tolist(), sample.loss_mask.tolist(), strict=True)) for sample in samples.samples]


def test_one_conversation_is_one_sample_and_the_mask_covers_the_completions() -> None:
    samples = assemble([make_turn(0, None, [1, 2], [3, 4]), make_turn(1, 0, [5], [6], version=2)])
    (sample,) = samples.samples
    assert sample.token_ids.tolist() == [1, 2, 3, 4, 5, 6]
    assert sample.loss_mask.tolist() == [False, False, True, True, False, True]
    assert sample.sampler_logprobs.tolist() == np.float32([0, 0, -0.03, -0.04, 0, -0.06]).tolist()
    assert sample.weight_versions.tolist() == [-1, -1, 1, 1, -1, 2]
    assert (sample.status, sample.finish_reason) == (SampleStatus.COMPLETED, "stop")
    assert (sample.temperature, sample.num_turns) == (0.5, 2)


def test_a_branch_trains_the_shared_prefix_once() -> None:
    turns = [make_turn(0, None, [1], [2]), make_turn(1, 0, [3], [4]), make_turn(2, 0, [5], [6])]
    assert rows(assemble(turns)) == [
        [(1, False), (2, True), (3, False), (4, True)],
        [(1, False), (2, False), (5, False), (6, True)],
    ]


def test_a_turn_that_was_rendered_again_starts_a_sequence_of_its_own() -> None:
    turns = [make_turn(0, None, [1], [2]), make_turn(1, 0, [1, 9, 3], [4], extends=False)]
    assert rows(assemble(turns)) == [[(1, False), (2, True)], [(1, False), (9, False), (3, False), (4, True)]]


@pytest.mark.parametrize("continued", [0, 1])
def test_an_orphaned_reply_is_not_trained(continued: int) -> None:
    """CASES D1, D2: two replies to one prompt, one of them continued."""
    turns = [
        make_turn(0, None, [1], [2], prompt="same"),
        make_turn(1, None, [1], [7], prompt="same"),
        make_turn(2, continued, [3], [4]),
    ]
    reply = 2 if continued == 0 else 7
    assert rows(assemble(turns)) == [[(1, False), (reply, True), (3, False), (4, True)]]


def test_an_orphan_deep_in_a_conversation_is_not_trained() -> None:
    turns = [
        make_turn(0, None, [1], [2]),
        make_turn(1, 0, [3], [4], prompt="same"),
        make_turn(2, 0, [3], [5], prompt="same"),
        make_turn(3, 2, [6], [7]),
    ]
    assert [[token for token, _ in row] for row in rows(assemble(turns))] == [[1, 2, 3, 5, 6, 7]]


def test_replies_of_which_none_was_continued_are_all_trained() -> None:
    turns = [make_turn(0, None, [1], [2], prompt="same"), make_turn(1, None, [1], [3], prompt="same")]
    assert len(assemble(turns).samples) == 2


def test_truncation_cuts_and_says_so() -> None:
    turns = [make_turn(0, None, [1, 2], [3, 4]), make_turn(1, 0, [5], [6, 7])]
    (sample,) = assemble(turns, max_seq_len=3).samples
    assert sample.token_ids.tolist() == [1, 2, 3]
    assert (sample.status, sample.finish_reason, sample.num_turns) == (SampleStatus.TRUNCATED, "max_seq_len", 1)
    (sample,) = assemble(turns, max_seq_len=6).samples
    assert (sample.num_tokens, sample.num_turns, sample.finish_reason) == (6, 2, "max_seq_len")


def test_a_sample_of_exactly_the_limit_is_whole() -> None:
    (sample,) = assemble([make_turn(0, None, [1, 2], [3])], max_seq_len=3).samples
    assert (sample.status, sample.finish_reason) == (SampleStatus.COMPLETED, "stop")


def test_a_sample_that_truncation_leaves_without_sampled_tokens_drops_out() -> None:
    turns = [make_turn(0, None, [1], [2]), make_turn(1, None, [1, 2, 3, 4], [5])]
    assert rows(assemble(turns, max_seq_len=3)) == [[(1, False), (2, True)]]


def test_a_branch_cut_before_its_own_tokens_drops_out() -> None:
    turns = [make_turn(0, None, [1], [2]), make_turn(1, 0, [3], [4]), make_turn(2, 0, [5, 5, 5], [6])]
    assert rows(assemble(turns, max_seq_len=4)) == [[(1, False), (2, True), (3, False), (4, True)]]


def test_a_last_turn_that_ended_at_its_length_limit_is_truncated() -> None:
    (sample,) = assemble([make_turn(0, None, [1], [2], finish="length")]).samples
    assert (sample.status, sample.finish_reason) == (SampleStatus.TRUNCATED, "length")


def test_nothing_recorded() -> None:
    nothing = assemble_samples("s", [], 1.0, None, {})
    assert isinstance(nothing, NothingToTrain)
    assert nothing.cause is CauseKind.NO_RECORDS


def test_everything_truncated_away() -> None:
    nothing = assemble_samples("s", [make_turn(0, None, [1, 2], [3])], 1.0, 2, {})
    assert isinstance(nothing, NothingToTrain)
    assert nothing.cause is CauseKind.ALL_TRUNCATED
    assert "max_seq_len 2" in nothing.message
