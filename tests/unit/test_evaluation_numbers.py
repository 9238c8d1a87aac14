"""The numbers of an evaluation against counting and against published values."""

from __future__ import annotations

import itertools
import math
import random
from pathlib import Path

import pytest

from everroll.contracts.evaluation import EvaluateRequest, EvaluationRecord, find_request_fault, select_sets
from everroll.contracts.outcomes import Cause, CauseKind, SampleStatus
from everroll.contracts.rollout import BlobRef, EpisodeKey, EpisodeOutcome, SamplesRef
from everroll.contracts.spec import EvalSection
from everroll.evaluation import (
    compute_pass_at_k,
    compute_wilson_interval,
    estimate_mean,
    estimate_rate,
    list_ks,
    summarize_outcomes,
)
from everroll.records import append_once


def play(prompt: int, member: int, reward: float | None, version: int = 3, newest: int | None = None) -> EpisodeOutcome:
    """`reward` None: aborted."""
    key = EpisodeKey(run="r", group=prompt, member=member, evaluation="eval.v3")
    if reward is None:
        cause = Cause(kind=CauseKind.TRANSPORT, error="ReadError")
        return EpisodeOutcome(key=key, status=SampleStatus.ABORTED, cause=cause)
    samples = SamplesRef(
        blob=BlobRef(uri="b", sha256="0", num_bytes=1),
        num_samples=1,
        num_tokens=10,
        num_sampled_tokens=4,
        min_weight_version=version,
        max_weight_version=newest or version,
    )
    return EpisodeOutcome(key=key, status=SampleStatus.COMPLETED, reward=reward, samples=samples)


@pytest.mark.parametrize(("n", "c"), [(1, 0), (1, 1), (4, 1), (5, 3), (6, 6), (7, 0)])
def test_pass_at_k_is_the_share_of_all_subsets_with_a_pass(n: int, c: int) -> None:
    for k in range(1, n + 1):
        subsets = list(itertools.combinations([True] * c + [False] * (n - c), k))
        assert compute_pass_at_k(n, c, k) == pytest.approx(sum(map(any, subsets)) / len(subsets))


@pytest.mark.parametrize(("n", "c", "k"), [(2, 3, 1), (2, 1, 3), (2, 1, 0)])
def test_pass_at_k_of_what_cannot_be_is_refused(n: int, c: int, k: int) -> None:
    with pytest.raises(ValueError, match="pass@"):
        compute_pass_at_k(n, c, k)


@pytest.mark.parametrize(
    ("passed", "num", "low", "high"),
    # Newcombe, "Two-sided confidence intervals for the single proportion", Statist. Med. 17 (1998), table I, method 3.
    [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611), (1, 29, 0.0061, 0.1718)],
)
def test_wilson_intervals_are_the_published_ones(passed: int, num: int, low: float, high: float) -> None:
    assert compute_wilson_interval(passed, num) == pytest.approx((low, high), abs=5e-5)


def test_the_interval_of_a_mean_covers_it_as_often_as_it_says() -> None:
    draw = random.Random(0)
    hits = 0
    for _ in range(1000):
        estimate = estimate_mean([draw.gauss(0.3, 0.5) for _ in range(40)])
        hits += estimate.low <= 0.3 <= estimate.high
    assert 930 <= hits <= 965


def test_a_rate_stays_between_0_and_1() -> None:
    assert estimate_rate([1.0, 1.0]).low == pytest.approx(0.3424, abs=1e-4)
    assert estimate_rate([0.5, 1.0]).high == 1.0
    assert estimate_rate([0.0, 0.5]).low == 0.0


def test_ks_are_powers_of_two_and_the_number_itself() -> None:
    assert list_ks(1) == [1]
    assert list_ks(4) == [1, 2, 4]
    assert list_ks(6) == [1, 2, 4, 6]


def test_prompts_weigh_the_same_and_episodes_without_a_verdict_count_nowhere() -> None:
    record = EvaluationRecord(name="eval", version=3, episodes_per_prompt=2, lost={"transport": 2})
    outcomes = [
        *(play(0, 0, 1.0), play(0, 1, 0.0)),
        *(play(1, 0, 1.0), play(1, 1, None)),
        *(play(2, 0, None), play(2, 1, None)),
        *(play(3, 0, 0.5), play(3, 1, 0.25, version=3, newest=4)),
    ]
    found = summarize_outcomes(record, outcomes)
    assert found.num_episodes == 5
    assert found.mean_reward is not None
    assert found.mean_reward.num_prompts == 3
    assert found.mean_reward.value == pytest.approx((0.5 + 1.0 + 0.375) / 3)
    spread = math.sqrt(sum((value - 0.625) ** 2 for value in (0.5, 1.0, 0.375)) / 2 / 3)
    assert found.mean_reward.high == pytest.approx(0.625 + 1.96 * spread, abs=1e-4)
    assert found.pass_at["1"].value == pytest.approx((0.5 + 1.0 + 0.0) / 3)
    assert found.pass_at["2"].num_prompts == 2, "prompt 1 has one verdict only"
    assert found.pass_at["2"].value == 0.5
    assert (found.min_weight_version, found.max_weight_version, found.num_exact_episodes) == (3, 4, 4)
    assert found.mean_sampled_tokens == 4


def test_nothing_with_a_verdict_gives_no_number() -> None:
    found = summarize_outcomes(EvaluationRecord(name="eval", version=3, episodes_per_prompt=1), [play(0, 0, None)])
    assert found.mean_reward is None
    assert found.pass_at == {}
    assert found.min_weight_version is None


def test_session_ids_are_those_of_no_episode_of_training() -> None:
    key = EpisodeKey(run="a", group=1, member=2, attempt=0, evaluation="eval.v3")
    assert key.session_id == "a-1-2-0-eval.v3"
    assert not key.session_id.rpartition("-")[2].isdigit()


def test_a_record_is_written_once_and_a_torn_line_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "run" / "records.jsonl"
    assert append_once(path, {"n": 1}, lambda line: line["n"] == 1)
    assert not append_once(path, {"n": 1}, lambda line: line["n"] == 1)
    with path.open("ab") as file:
        file.write(b'{"n": 2, "cut')
    assert append_once(path, {"n": 2}, lambda line: line["n"] == 2)
    assert path.read_text() == '{"n": 1}\n{"n": 2}\n'


def test_requests_are_refused_by_name() -> None:
    section = EvalSection(sets={"math": "m.jsonl", "code": "c.jsonl"})
    assert find_request_fault(section, EvaluateRequest()) is None
    assert select_sets(section, EvaluateRequest(name="code")) == {"code": "c.jsonl"}
    assert select_sets(section, EvaluateRequest(path="x.jsonl")) == {"other": "x.jsonl"}
    assert "there are code, math" in str(find_request_fault(section, EvaluateRequest(name="cod")))
    assert "already" in str(find_request_fault(section, EvaluateRequest(name="math", path="x.jsonl")))
    assert "not a name" in str(find_request_fault(section, EvaluateRequest(name="a-b", path="x.jsonl")))
    assert "--path" in str(find_request_fault(EvalSection(), EvaluateRequest()))
