"""What a person sees in the web UI, as text."""

from __future__ import annotations

from everroll.contracts.health import Pause, Survey, Waiting
from everroll.contracts.outcomes import Cause, CauseKind
from everroll.contracts.steering import SteeringRecord
from everroll.contracts.training import Phase, RunStatus, StepRecord
from workflows.presentation import render_details
from workflows.tables import render_table, show_count

_AT = 1_700_000_000.0


def build_status(**overrides: object) -> RunStatus:
    known: dict[str, object] = {
        "run": "calc",
        "phase": Phase.ROLLOUT,
        "phase_since": _AT,
        "step": 3,
        "num_steps": 60,
        "weight_version": 3,
        "groups_in_flight": [12, 13],
        "groups_ready": 2,
        "groups_wanted": 4,
        "next_group": 14,
        "trained_groups": 12,
        "dropped_groups": {},
        "unusable_episodes": {},
        "last_cause": None,
        "num_episodes": 56,
        "num_sampled_tokens": 900,
        "mean_reward": 0.5,
        "recent_steps": [],
    }
    return RunStatus.model_validate(known | overrides)


def build_step(step: int) -> StepRecord:
    return StepRecord(
        step=step,
        weight_version=step,
        groups=[0],
        mean_reward=0.25 * step,
        num_episodes=16,
        num_tokens=30_000,
        num_sampled_tokens=12_345,
        dropped={"stale": 1, "agent": 2},
        rollout_seconds=4.06,
        train_seconds=12.0,
        publish_seconds=0.5,
    )


def test_the_headline_says_what_it_does_and_since_when() -> None:
    text = render_details(build_status())
    assert text.splitlines()[0] == "**Run calc**: step 3 of 60, rollout since 2023-11-14 22:13:20 UTC"
    assert "- groups: 2 of 4 ready, 2 in flight (12, 13)" in text
    assert "```" not in text, "no empty tables"
    assert "None" not in text


def test_the_last_steps_are_a_table_newest_first() -> None:
    text = render_details(build_status(recent_steps=[build_step(step) for step in range(1, 13)]))
    lines = text.split("```")[1].strip("\n").splitlines()
    assert lines[0] == "step  reward  episodes  tokens  dropped  rollout  train  publish"
    assert lines[1] == "  12   3.000        16   12.3k        3      4.1   12.0      0.5"
    assert len(lines) == 11
    assert len({len(line) for line in lines}) == 1


def test_a_step_before_a_resume_has_no_times() -> None:
    untimed = build_step(1).model_copy(update=dict.fromkeys(("rollout_seconds", "train_seconds", "publish_seconds"), 0))
    line = render_details(build_status(recent_steps=[untimed])).split("```")[1].strip("\n").splitlines()[1]
    assert line.split()[-3:] == ["-", "-", "-"]


def test_losses_are_a_table_by_cause() -> None:
    status = build_status(
        dropped_groups={"stale": 1, "agent": 2},
        unusable_episodes={"transport": 30},
        last_cause=Cause(kind=CauseKind.STALE, message="group 7 is 2 versions old"),
    )
    text = render_details(status)
    assert text.split("```")[1].strip("\n").splitlines() == [
        "cause      groups dropped  episodes unusable",
        "agent                   2                  0",
        "stale                   1                  0",
        "transport               0                 30",
    ]
    assert "latest cause: stale: group 7 is 2 versions old" in text


def test_what_is_waited_for_and_who_asked_for_what() -> None:
    waiting = Waiting(group=12, activity="episode-3-0", stage="agent running", attempt=2, since=_AT - 90)
    status = build_status(
        phase=Phase.PAUSED,
        pause=Pause(message="too many aborts", since=_AT, server="http://sessions"),
        survey=Survey(taken_at=_AT, waiting=[waiting], num_waiting=5),
        steerings=[SteeringRecord(number=1, at=_AT, action="pause", by="ann@host", reason="look")],
    )
    text = render_details(status)
    assert "**Paused** since 2023-11-14 22:13:20 UTC, goes on by itself when http://sessions answers" in text
    assert "it waited for 5 tasks:\n\n- group 12 episode-3-0: agent running, for 90 s, attempt 2" in text
    assert "- 2023-11-14 22:13:20 UTC: pause by ann@host: look" in text


def test_tables_are_aligned() -> None:
    assert render_table(["a", "number"], [["long name", "1"]], num_left=1) == [
        "```",
        "a          number",
        "long name       1",
        "```",
    ]
    assert [show_count(count) for count in (0, 9999, 12_345, 4_560_000)] == ["0", "9999", "12.3k", "4.56M"]
