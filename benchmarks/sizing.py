"""How much of each part so many episodes need, from measured costs: arithmetic, nothing is run.

    python -m benchmarks.sizing --episodes 100000 --episode-seconds 600 --turns 8 --heartbeat-timeout 120

The costs are those that `benchmarks.load` measured on one machine (docs/sizing.md); put your own in by
`--set temporal_ms_per_episode=12` and the like. Not counted: what agents and their environments take themselves,
engines, and the trainer.
"""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import asdict, dataclass, fields, replace


@dataclass(frozen=True)
class Load:
    """What is to be borne."""

    episodes: int
    """In flight at once."""
    episode_seconds: float
    turns: float
    """Model calls of an episode."""
    episodes_per_group: int
    heartbeat_timeout_seconds: float

    @property
    def episodes_per_second(self) -> float:
        return self.episodes / self.episode_seconds

    @property
    def groups_in_flight(self) -> int:
        return math.ceil(self.episodes / self.episodes_per_group)

    @property
    def heartbeats_per_second(self) -> float:
        """Three in each heartbeat timeout."""
        return 3 * self.episodes / self.heartbeat_timeout_seconds


@dataclass(frozen=True)
class Costs:
    """Milliseconds of one core, and what else counts. Measured with groups of 8."""

    rollout_ms_per_episode: float = 18.0
    """Opening the session, two activities, collecting and storing the samples."""
    rollout_ms_per_turn: float = 6.0
    """The call through the OpenAI client."""
    rollout_ms_per_heartbeat: float = 0.6
    session_ms_per_episode: float = 8.0
    """Opening, assembling the samples, releasing."""
    session_ms_per_turn: float = 3.5
    workflow_ms_per_episode: float = 12.6
    """A group's workflow tasks and its share of the run's, divided by its episodes."""
    temporal_ms_per_episode: float = 45.0
    temporal_ms_per_heartbeat: float = 3.0
    temporal_writes_per_episode: float = 9.2
    """Changes of a workflow's state, heartbeats not counted; each of those is one more."""
    temporal_requests_per_episode: float = 8.0
    """Polls and answers of activities and workflow tasks."""
    temporal_kib_per_episode: float = 8.5
    """History and visibility, until the namespace's retention has passed."""
    journal_kib_per_episode: float = 9.8
    """Of three short turns; nearly all of it grows with the tokens."""
    rollout_mib: float = 125.0
    """Of a worker that plays nothing."""
    rollout_kib_per_episode_in_flight: float = 90.0
    session_mib: float = 115.0
    session_kib_per_episode_in_flight: float = 26.0
    utilization: float = 0.6
    """Share of a core that one process is to use in the mean: above it, bursts queue."""
    sessions_in_memory: float = 4096.0
    """`max_cached_sessions` of one session server; the others are read from the journal at their next turn."""
    groups_in_cache: float = 2000.0
    """Workflows that one worker keeps; of others it reads the history again at each task."""
    writes_per_shard_per_second: float = 25.0
    """Half of the rate at which Temporal warns (`system.shardRPSWarnLimit`). A shard writes one thing at a time."""
    requests_per_frontend_per_second: float = 1200.0
    """Half of `frontend.rps` and `frontend.namespaceRPS`, whose defaults are 2,400."""
    tasks_per_partition_per_second: float = 500.0
    """Half of what one partition of a task queue hands out by default."""
    groups_per_run: float = 1800.0
    """Below the 2,000 children that a workflow may have at once (`limit.numPendingChildExecutions.error`)."""


@dataclass(frozen=True)
class Estimate:
    """What it takes."""

    episodes_per_second: float
    heartbeats_per_second: float
    rollout_cores: float
    rollout_workers: int
    episodes_per_rollout_worker: int
    """At least so many must `EVERROLL_MAX_EPISODES` allow."""
    rollout_worker_mib: float
    session_cores: float
    session_servers: int
    session_server_mib: float
    workflow_cores: float
    workflow_workers: int
    temporal_cores: float
    temporal_writes_per_second: float
    history_shards: int
    """A power of two; fixed for the life of a Temporal cluster."""
    frontends: int
    queue_partitions: int
    """Of the queue `everroll-rollout`."""
    runs: int
    """Runs among which the episodes must be divided."""
    temporal_gib_per_day: float
    journal_gib_per_day: float


def estimate(load: Load, costs: Costs) -> Estimate:
    """Straight lines through what was measured, and the limits of each part."""
    rate, heartbeats = load.episodes_per_second, load.heartbeats_per_second
    rollout = rate * (costs.rollout_ms_per_episode + load.turns * costs.rollout_ms_per_turn)
    rollout += heartbeats * costs.rollout_ms_per_heartbeat
    session = rate * (costs.session_ms_per_episode + load.turns * costs.session_ms_per_turn)
    workflow = rate * costs.workflow_ms_per_episode
    temporal = rate * costs.temporal_ms_per_episode + heartbeats * costs.temporal_ms_per_heartbeat
    writes = rate * costs.temporal_writes_per_episode + heartbeats
    requests = rate * costs.temporal_requests_per_episode + heartbeats
    workers = _count(rollout / 1000, costs.utilization)
    servers = max(_count(session / 1000, costs.utilization), _count(load.episodes, costs.sessions_in_memory))
    per_day = rate * 86_400 / 2**20
    return Estimate(
        episodes_per_second=rate,
        heartbeats_per_second=heartbeats,
        rollout_cores=rollout / 1000,
        rollout_workers=workers,
        episodes_per_rollout_worker=math.ceil(load.episodes / workers),
        rollout_worker_mib=costs.rollout_mib + load.episodes / workers * costs.rollout_kib_per_episode_in_flight / 1024,
        session_cores=session / 1000,
        session_servers=servers,
        session_server_mib=costs.session_mib + load.episodes / servers * costs.session_kib_per_episode_in_flight / 1024,
        workflow_cores=workflow / 1000,
        workflow_workers=max(
            _count(workflow / 1000, costs.utilization), _count(load.groups_in_flight, costs.groups_in_cache)
        ),
        temporal_cores=temporal / 1000,
        temporal_writes_per_second=writes,
        history_shards=2 ** math.ceil(math.log2(_count(writes, costs.writes_per_shard_per_second))),
        frontends=_count(requests, costs.requests_per_frontend_per_second),
        queue_partitions=_count(2 * rate, costs.tasks_per_partition_per_second),
        runs=_count(load.groups_in_flight, costs.groups_per_run),
        temporal_gib_per_day=per_day * costs.temporal_kib_per_episode,
        journal_gib_per_day=per_day * costs.journal_kib_per_episode,
    )


def _count(amount: float, each: float) -> int:
    return max(1, math.ceil(amount / each))


def parse_costs(settings: list[str]) -> Costs:
    """
    Raises:
        ValueError: a setting is not of the form NAME=NUMBER, or there is no such cost.
    """
    known = {field.name for field in fields(Costs)}
    values: dict[str, float] = {}
    for setting in settings:
        name, _, value = setting.partition("=")
        if name not in known:
            raise ValueError(f"there is no cost {name!r}; there are {', '.join(sorted(known))}")
        values[name] = float(value)
    return replace(Costs(), **values)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=2000, help="in flight at once")
    parser.add_argument("--episode-seconds", type=float, default=60.0)
    parser.add_argument("--turns", type=float, default=3.0, help="model calls in an episode")
    parser.add_argument("--episodes-per-group", type=int, default=8)
    parser.add_argument("--heartbeat-timeout", type=float, default=10.0, help="rollout.heartbeat_timeout_seconds")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=NUMBER", help="another cost")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    try:
        costs = parse_costs(options.set)
    except ValueError as error:
        parser.error(str(error))
    load = Load(
        options.episodes,
        options.episode_seconds,
        options.turns,
        options.episodes_per_group,
        options.heartbeat_timeout,
    )
    estimated = vars(estimate(load, costs))
    if options.json:
        print(json.dumps({"load": asdict(load), "costs": asdict(costs), "needed": estimated}))
        return
    for name, value in estimated.items():
        print(f"{name:32} {value:12,.1f}" if isinstance(value, float) else f"{name:32} {value:12,d}")


if __name__ == "__main__":
    main()
