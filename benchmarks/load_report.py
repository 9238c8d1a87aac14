"""What `benchmarks.load` saw: samples over time, and what they come to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.load_metrics import Counts
from benchmarks.load_processes import MIB, Usage, fit_slope

_MAX_ROWS = 16


@dataclass(frozen=True)
class Sample:
    """One look at the whole stack."""

    seconds: float
    """Since the run was started."""
    usages: dict[str, Usage]
    """By process."""
    counts: Counts
    episodes_in_flight: float
    """Slots that rollout workers have in use: episodes, and the odd collection."""
    temporal_heap_bytes: float
    """In use by the Temporal server: what of its memory is not the runtime's to give back."""
    temporal_bytes: int
    """Of its database, as `journal_bytes` is of the session server's."""
    journal_bytes: int
    load_average: float
    """Of the machine, over the last minute."""


@dataclass(frozen=True)
class Trend:
    """One process after warm-up."""

    rss_mib: float
    """At the end."""
    growth_mib_per_hour: float
    """Slope of its memory, by least squares."""
    late_growth_mib_per_hour: float
    """The same over the second half: caches that fill up grow ever more slowly, a leak does not."""
    cpu_cores: float
    num_files: int
    num_threads: int


def render_row(sample: Sample, before: Sample) -> str:
    """A line of the table over time: memory in MiB and processor use in cores, by process."""
    seconds = max(1e-9, sample.seconds - before.seconds)
    counts = sample.counts - before.counts
    parts = [
        f"{sample.seconds / 60:6.1f} min",
        f"{sample.episodes_in_flight:7.0f} in flight",
        f"{counts.episodes / seconds:6.1f}/s",
        f"load {sample.load_average:5.1f}",
        f"heap {sample.temporal_heap_bytes / MIB:5.0f}",
        f"db {sample.temporal_bytes / MIB:6.0f}",
        f"journal {sample.journal_bytes / MIB:6.0f}",
    ]
    for name, usage in sample.usages.items():
        cores = (usage.cpu_seconds - before.usages.get(name, Usage()).cpu_seconds) / seconds
        parts.append(f"{name} {usage.rss_bytes / MIB:5.0f} {max(0.0, cores):4.2f}")
    return " | ".join(parts)


def thin(samples: Sequence[Sample]) -> list[Sample]:
    """So many of them, evenly, that they fit a table."""
    step = max(1, -(-len(samples) // _MAX_ROWS))
    return [*samples[::step], *([samples[-1]] if (len(samples) - 1) % step else [])]


def compute_trends(samples: Sequence[Sample]) -> dict[str, Trend]:
    """By process, over the samples after warm-up."""
    late = samples[len(samples) // 2 :]
    return {name: _compute_trend(name, samples, late) for name in samples[-1].usages}


def _compute_trend(name: str, samples: Sequence[Sample], late: Sequence[Sample]) -> Trend:
    first, last = samples[0].usages[name], samples[-1].usages[name]
    seconds = samples[-1].seconds - samples[0].seconds
    return Trend(
        rss_mib=last.rss_bytes / MIB,
        growth_mib_per_hour=_fit_memory(name, samples),
        late_growth_mib_per_hour=_fit_memory(name, late),
        cpu_cores=(last.cpu_seconds - first.cpu_seconds) / seconds if seconds else 0.0,
        num_files=last.num_files,
        num_threads=last.num_threads,
    )


def _fit_memory(name: str, samples: Sequence[Sample]) -> float:
    hours = [sample.seconds / 3600 for sample in samples]
    return fit_slope(hours, [sample.usages[name].rss_bytes / MIB for sample in samples])


def summarize(samples: Sequence[Sample]) -> dict[str, float]:
    """What happened after warm-up, and what an episode costs."""
    first, last = samples[0], samples[-1]
    seconds, counts = max(1e-9, last.seconds - first.seconds), last.counts - first.counts
    episodes = max(1.0, counts.episodes)
    return {
        "measured_seconds": seconds,
        "episodes": counts.episodes,
        "episodes_per_second": counts.episodes / seconds,
        "turns_per_second": counts.turns / seconds,
        "heartbeats_per_second": counts.heartbeats / seconds,
        "mean_episodes_in_flight": sum(sample.episodes_in_flight for sample in samples) / len(samples),
        "mean_episode_seconds": counts.episode_seconds / episodes,
        "activity_wait_ms": 1000 * counts.activity_wait_seconds / max(1.0, counts.activity_waits),
        "workflow_task_wait_ms": 1000 * counts.workflow_wait_seconds / max(1.0, counts.workflow_tasks),
        "journal_write_ms": 1000 * counts.journal_seconds / max(1.0, counts.journal_writes),
        "temporal_writes_per_episode": (counts.temporal_writes - counts.heartbeats) / episodes,
        "workflow_tasks_per_episode": counts.workflow_tasks / episodes,
        "temporal_kib_per_episode": (last.temporal_bytes - first.temporal_bytes) / 1024 / episodes,
        "journal_kib_per_episode": (last.journal_bytes - first.journal_bytes) / 1024 / episodes,
        "failed_workflow_tasks": counts.failed_workflow_tasks,
        "timed_out_workflow_tasks": counts.timed_out_workflow_tasks,
        "sticky_timeouts": counts.sticky_timeouts,
        "heartbeat_timeouts": counts.heartbeat_timeouts,
        "activity_timeouts": counts.activity_timeouts,
        "failed_activities": counts.failed_activities,
        "failed_temporal_requests": counts.requests_failed,
        "session_errors": counts.session_errors,
        "mean_load_average": sum(sample.load_average for sample in samples) / len(samples),
    }


def compute_costs(samples: Sequence[Sample]) -> dict[str, float]:
    """Milliseconds of processor time per episode, by process."""
    first, last = samples[0], samples[-1]
    episodes = max(1.0, (last.counts - first.counts).episodes)
    return {
        name: 1000 * (usage.cpu_seconds - first.usages[name].cpu_seconds) / episodes
        for name, usage in last.usages.items()
    }
