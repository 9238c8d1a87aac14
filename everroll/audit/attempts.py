"""I6 for the attempts at one member: a verdict that was given is the one that is trained. Pure.

A member is played again only after an attempt that had no verdict, and never after one that had. Otherwise whoever
refills could choose among rewards.
"""

from __future__ import annotations

from everroll.audit.evidence import EpisodeHistory, GroupHistory
from everroll.audit.report import Breach, Findings, Invariant
from everroll.contracts.outcomes import CauseKind, SampleStatus
from everroll.contracts.rollout import EpisodeKey, EpisodeOutcome

ATTEMPTS = "members are played again only where there was no verdict"


def check_attempts(step: int, history: GroupHistory, outcome: EpisodeOutcome, findings: Findings) -> None:
    """The trained attempt is the member's last, and all before it, from the group's first on, had no verdict."""
    key, first = outcome.key, history.request.first_attempt
    known = _list_attempts(history, key)
    breach = _breach(step, key, "the trained attempt is not the member's last", f"attempts {first} to {key.attempt}")
    found = f"attempts {', '.join(map(str, sorted(known)))}" if known else "none"
    wanted = list(range(first, key.attempt + 1))
    findings.expect(ATTEMPTS, sorted(known) == wanted, breach.model_copy(update={"found": found}))
    rollout = history.request.rollout
    most = rollout.max_refills if rollout.on_unusable == "refill" else 0
    breach = _breach(step, key, "the member was played again more often than its run allows", f"at most {most} times")
    breach = breach.model_copy(update={"found": f"{key.attempt - first} times"})
    findings.expect(ATTEMPTS, key.attempt - first <= most, breach)
    for attempt, episode in sorted(known.items()):
        if attempt >= key.attempt:
            continue
        verdict = describe_verdict(episode)
        breach = _breach(step, key, f"attempt {attempt} had a verdict, and the member was played again", "no verdict")
        findings.expect(ATTEMPTS, verdict is None, breach.model_copy(update={"found": verdict}))


def describe_verdict(episode: EpisodeHistory) -> str | None:
    """The verdict of an attempt in words. None: it had none, and may be played again.

    What infrastructure failed under has none, whatever the agent made of it, and neither has an agent that raised or
    gave no reward.
    """
    report, collected = episode.report, episode.collected
    if report is None or report.status is not SampleStatus.COMPLETED or report.reward is None:
        return None
    if collected is None or not collected.status.has_verdict or collected.samples is None:
        return None
    if collected.cause is not None and collected.cause.server is not None:
        return None
    if collected.engine_cause is not None and collected.engine_cause.kind is CauseKind.ENGINE:
        return None
    return f"{collected.status.value}, reward {report.reward!r}"


def _list_attempts(history: GroupHistory, key: EpisodeKey) -> dict[int, EpisodeHistory]:
    """Of one member, by number."""
    keys = [(episode.request.key, episode) for episode in history.episodes.values()]
    return {own.attempt: episode for own, episode in keys if (own.group, own.member) == (key.group, key.member)}


def _breach(step: int, key: EpisodeKey, message: str, expected: str) -> Breach:
    return Breach(
        invariant=Invariant.VERDICTS,
        step=step,
        group=key.group,
        member=key.member,
        session_id=key.session_id,
        message=message,
        expected=expected,
    )
