"""The state of a run of 512 groups a step, as it is carried through continue-as-new, is a payload that may be sent."""

from __future__ import annotations

import hashlib

from everroll.contracts.outcomes import Cause, CauseKind
from everroll.contracts.rollout import BlobRef, GroupResult
from everroll.contracts.training import MAX_RECENT_STEPS, RunState, StepRecord
from everroll.payloads import MAX_PAYLOAD_BYTES
from everroll.temporal import build_data_converter

_NUM_GROUPS = 512


def build_result(group: int) -> GroupResult:
    """A group that had its troubles."""
    digest = hashlib.sha256(str(group).encode()).hexdigest()
    cause = Cause(kind=CauseKind.TRANSPORT, error="ReadError", message=f"connection {digest} was lost " * 5)
    return GroupResult(
        group=group,
        prompt_index=group,
        manifest=BlobRef(uri=f"a-run-of-weeks/groups/{group:08d}/{digest}.json", sha256=digest, num_bytes=5000 + group),
        num_episodes=9,
        num_tokens=16_000 + group,
        num_sampled_tokens=5_600 + group,
        mean_reward=group / 7,
        min_weight_version=1000,
        unusable={"transport": 1},
        last_cause=cause,
        agent_metrics=dict.fromkeys(("turns", "tool_calls", "tests_passed", "seconds"), group / 7),
        duration_seconds=group / 3,
    )


def build_state() -> RunState:
    step = StepRecord(
        step=1,
        weight_version=1,
        groups=list(range(_NUM_GROUPS)),
        mean_reward=0.5,
        num_episodes=8 * _NUM_GROUPS,
        num_tokens=1,
        num_sampled_tokens=1,
        rollout_seconds=1.0,
        train_seconds=1.0,
        publish_seconds=1.0,
    )
    return RunState(
        in_flight=dict.fromkeys(range(_NUM_GROUPS), 1000),
        ready=[build_result(group) for group in range(_NUM_GROUPS)],
        recent_steps=[step] * MAX_RECENT_STEPS,
    )


async def test_the_state_of_a_large_run_may_be_sent_and_comes_back() -> None:
    converter, state = build_data_converter(), build_state()
    assert len(state.model_dump_json()) > 2 * MAX_PAYLOAD_BYTES
    (payload,) = await converter.encode([state])
    assert len(payload.data) < MAX_PAYLOAD_BYTES / 2
    assert await converter.decode([payload], [RunState]) == [state]


async def test_small_payloads_stay_readable() -> None:
    (payload,) = await build_data_converter().encode([build_result(3)])
    assert GroupResult.model_validate_json(payload.data) == build_result(3)
