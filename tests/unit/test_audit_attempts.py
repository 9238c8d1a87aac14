"""The audit of a member's attempts: only one without a verdict may be followed by another."""

from __future__ import annotations

from typing import Any

import pytest

from everroll.audit.attempts import check_attempts
from everroll.audit.evidence import EpisodeHistory, GroupHistory
from everroll.audit.report import Breach, Findings
from everroll.contracts.outcomes import Cause, CauseKind, SampleStatus
from everroll.contracts.rollout import (
    BlobRef,
    CollectResult,
    DatasetRef,
    EpisodeKey,
    EpisodeOutcome,
    EpisodeReport,
    EpisodeRequest,
    GroupRequest,
    SamplesRef,
)
from tests.simulation import build_spec

SPEC = build_spec("refilled", "queue")
DATA = DatasetRef(path="data", fingerprint="0", num_prompts=5, seed=1, shuffle=False)
BLOB = BlobRef(uri="blob", sha256="0", num_bytes=1)
SAMPLES = SamplesRef(
    blob=BLOB, num_samples=1, num_tokens=2, num_sampled_tokens=1, min_weight_version=0, max_weight_version=0
)
SERVER = Cause(kind=CauseKind.TRANSPORT, message="reset", server="http://127.0.0.1:1")
ENGINE = Cause(kind=CauseKind.ENGINE, message="no engine")
GOOD = CollectResult(key=EpisodeKey(run="refilled", group=0, member=0), status=SampleStatus.COMPLETED, samples=SAMPLES)
LOST = GOOD.model_copy(update={"status": SampleStatus.ABORTED, "samples": None, "cause": SERVER})


def play(
    attempt: int,
    status: SampleStatus = SampleStatus.COMPLETED,
    reward: float | None = 0.5,
    collected: CollectResult | None = GOOD,
    *,
    reported: bool = True,
) -> EpisodeHistory:
    key = EpisodeKey(run="refilled", group=0, member=0, attempt=attempt)
    request = EpisodeRequest(
        key=key,
        dataset=DATA,
        agent=SPEC.rollout.agent,
        sampling=SPEC.rollout.sampling,
        seed=1,
        session_url="",
        timeout_seconds=1.0,
    )
    report = EpisodeReport(key=key, status=status, reward=reward, prompt_index=0) if reported else None
    return EpisodeHistory(request, report, None, collected)


def check(*episodes: EpisodeHistory, trained: int, **request: Any) -> list[Breach]:
    rollout = SPEC.rollout.model_copy(update={"max_refills": request.pop("max_refills", 3), "on_unusable": "refill"})
    group = GroupRequest(
        run="refilled",
        group=0,
        weight_version=0,
        dataset=DATA,
        rollout=rollout,
        seed=1,
        session_url="",
        store_url="",
        task_queue="",
        **request,
    )
    history = GroupHistory(group, {episode.request.key.session_id: episode for episode in episodes})
    key = EpisodeKey(run="refilled", group=0, member=0, attempt=trained)
    findings = Findings()
    check_attempts(1, history, EpisodeOutcome(key=key, status=SampleStatus.COMPLETED), findings)
    assert findings.checks
    return findings.breaches


@pytest.mark.parametrize(
    "lost",
    [
        play(0, SampleStatus.FAILED),
        play(0, SampleStatus.ABORTED, None, None),
        play(0, reward=None),
        play(0, collected=LOST),
        play(0, collected=None),
        play(0, collected=GOOD.model_copy(update={"engine_cause": ENGINE})),
        play(0, reported=False, collected=None),
    ],
    ids=["agent raised", "aborted", "no reward", "lost samples", "not collected", "engine", "timed out"],
)
def test_an_attempt_without_a_verdict_is_followed_by_another(lost: EpisodeHistory) -> None:
    assert check(lost, play(1), trained=1) == []


def test_attempts_after_a_resume_begin_later() -> None:
    assert check(play(1000, SampleStatus.FAILED), play(1001), trained=1001, first_attempt=1000) == []


@pytest.mark.parametrize(
    ("episodes", "trained", "text", "found"),
    [
        ([play(0, reward=0.0), play(1)], 1, "attempt 0 had a verdict", "completed, reward 0.0"),
        ([play(0), play(1, reward=0.9)], 0, "is not the member's last", "attempts 0, 1"),
        ([play(1)], 1, "is not the member's last", "attempts 1"),
        ([play(0, SampleStatus.FAILED), play(1), play(2)], 1, "is not the member's last", "attempts 0, 1, 2"),
    ],
)
def test_a_reward_that_was_chosen(episodes: list[EpisodeHistory], trained: int, text: str, found: str) -> None:
    (breach,) = check(*episodes, trained=trained)
    assert text in breach.message
    assert breach.found == found


def test_more_refills_than_the_run_allows() -> None:
    lost = [play(attempt, SampleStatus.FAILED) for attempt in (0, 1)]
    (breach,) = check(*lost, play(2), trained=2, max_refills=1)
    assert (breach.expected, breach.found) == ("at most 1 times", "2 times")
