"""The arithmetic of `benchmarks.sizing`."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.sizing import Costs, Load, estimate, parse_costs

_LOAD = Load(episodes=2000, episode_seconds=50.0, turns=3, episodes_per_group=8, heartbeat_timeout_seconds=30.0)


def test_cores_follow_from_rates_and_costs() -> None:
    costs = replace(
        Costs(),
        rollout_ms_per_episode=10,
        rollout_ms_per_turn=5,
        rollout_ms_per_heartbeat=1,
        temporal_ms_per_episode=20,
    )
    found = estimate(_LOAD, replace(costs, temporal_ms_per_heartbeat=2, utilization=0.5))
    assert (found.episodes_per_second, found.heartbeats_per_second) == (40, 200)
    assert found.rollout_cores == pytest.approx(40 * 0.025 + 200 * 0.001)
    assert found.rollout_workers == 3
    assert found.episodes_per_rollout_worker == 667
    assert found.temporal_cores == pytest.approx(40 * 0.02 + 200 * 0.002)


def test_each_limit_of_a_part_is_kept() -> None:
    many = replace(_LOAD, episodes=100_000)
    costs = Costs()
    found = estimate(many, costs)
    assert found.session_servers * costs.sessions_in_memory >= many.episodes
    assert found.workflow_workers * costs.groups_in_cache >= many.groups_in_flight
    assert found.runs * costs.groups_per_run >= many.groups_in_flight
    assert found.history_shards * costs.writes_per_shard_per_second >= found.temporal_writes_per_second
    assert found.history_shards & (found.history_shards - 1) == 0
    assert found.temporal_writes_per_second > found.heartbeats_per_second


def test_long_episodes_cost_heartbeats_and_little_else() -> None:
    long = estimate(replace(_LOAD, episode_seconds=5000.0), Costs())
    rare = estimate(replace(_LOAD, episode_seconds=5000.0, heartbeat_timeout_seconds=300.0), Costs())
    assert long.temporal_cores > 5 * rare.temporal_cores
    assert estimate(replace(_LOAD, episodes=1), Costs()).rollout_workers == 1


def test_own_costs_are_taken_by_name() -> None:
    assert parse_costs(["session_mib=300"]).session_mib == 300
    with pytest.raises(ValueError, match="there is no cost 'sesion_mib'; there are"):
        parse_costs(["sesion_mib=300"])
    with pytest.raises(ValueError):
        parse_costs(["session_mib=much"])
