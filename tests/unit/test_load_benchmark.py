"""The load benchmark's own machinery: what it reads of processes and counters, and what it makes of them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.load import find_warm_up
from benchmarks.load_metrics import Counts, Page, count
from benchmarks.load_processes import MIB, Usage, fit_slope, measure_files, read_usage
from benchmarks.load_report import Sample, compute_costs, compute_trends, summarize, thin
from benchmarks.load_stack import LoadOptions

_NOTHING = count(Page(), "queue")
_PAGE = """\
# HELP temporal_activity_execution_latency ignored
temporal_activity_execution_latency_count{activity_type="run_episode",task_queue="queue"} 3
temporal_activity_execution_latency_sum{activity_type="run_episode",task_queue="queue"} 180000
temporal_activity_execution_latency_count{activity_type="collect_samples",task_queue="queue"} 2
activity_task_timeout{timeout_type="Heartbeat",operation="x, \\"y\\""} 1
activity_task_timeout{timeout_type="StartToClose"} 4
start_to_close_timeout{operation="TimerActiveTaskWorkflowTaskTimeout"} 5
start_to_close_timeout{operation="TimerActiveTaskActivityTimeout"} 4
memory_heapinuse 2.5e+07
"""


def test_usage_counts_a_process_and_its_descendants() -> None:
    program = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'print(1, flush=True); input()'])"
    alone = read_usage(os.getpid())
    assert alone.rss_bytes > MIB
    assert alone.num_threads >= 1
    assert alone.num_files >= 3
    parent = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert parent.stdout is not None
        parent.stdout.readline()  # the grandchild runs
        assert read_usage(os.getpid()).num_threads >= alone.num_threads + 2
        assert read_usage(parent.pid).num_threads >= 2
    finally:
        parent.communicate(b"\n", timeout=20)
    assert read_usage(parent.pid) == Usage()


def test_slope_is_that_of_least_squares() -> None:
    assert fit_slope([0, 1, 2, 3], [5, 7, 9, 11]) == pytest.approx(2.0)
    assert fit_slope([0, 1, 2], [1, 0, 1]) == pytest.approx(0.0)
    assert fit_slope([4.0], [1.0]) == 0.0
    assert fit_slope([4.0, 4.0], [1.0, 2.0]) == 0.0


def test_size_of_a_database_includes_its_log(tmp_path: Path) -> None:
    for ending, size in (("", 10), ("-wal", 20), ("-shm", 5)):
        (tmp_path / f"a.sqlite{ending}").write_bytes(b"x" * size)
    (tmp_path / "b.sqlite").write_bytes(b"x" * 100)
    assert measure_files(tmp_path / "a.sqlite") == 35


def test_counters_are_read_by_name_and_label() -> None:
    page = Page()
    page.update(_PAGE, process="one")
    page.update(_PAGE, process="one")  # the same series again
    page.update(_PAGE, process="two")
    counts = count(page, "queue")
    assert (counts.episodes, counts.collections, counts.episode_seconds) == (6, 4, 360)
    assert (counts.heartbeat_timeouts, counts.activity_timeouts, counts.timed_out_workflow_tasks) == (2, 10, 10)
    assert page.total("memory_heapinuse", process="two") == 2.5e7
    assert (counts - counts) == _NOTHING


def _sample(minute: float, rss_mib: float, cpu_seconds: float, episodes: float) -> Sample:
    usage = Usage(int(rss_mib * MIB), cpu_seconds, num_files=7, num_threads=2)
    counts = Counts(**(vars(_NOTHING) | {"episodes": episodes, "episode_seconds": 60 * episodes}))
    return Sample(60 * minute, {"worker": usage}, counts, 100.0, 0.0, int(episodes * 1024), 0, 1.0)


def test_a_leak_is_told_from_a_cache_that_fills_up() -> None:
    leaking = compute_trends([_sample(minute, 100 + minute, 0, 0) for minute in range(60)])["worker"]
    assert leaking.growth_mib_per_hour == pytest.approx(60)
    assert leaking.late_growth_mib_per_hour == pytest.approx(60)
    filling = compute_trends([_sample(minute, min(100 + minute, 120), 0, 0) for minute in range(60)])["worker"]
    assert filling.growth_mib_per_hour > 10
    assert filling.late_growth_mib_per_hour == pytest.approx(0)


def test_an_episode_costs_what_its_process_took_meanwhile() -> None:
    samples = [_sample(10, 100, 5.0, 200), _sample(20, 100, 17.0, 1400)]
    assert compute_costs(samples) == {"worker": pytest.approx(10.0)}
    summary = summarize(samples)
    assert summary["episodes_per_second"] == pytest.approx(2.0)
    assert summary["mean_episode_seconds"] == pytest.approx(60)
    assert summary["temporal_kib_per_episode"] == pytest.approx(1.0)


def test_a_table_is_short_and_ends_with_the_last_sample() -> None:
    samples = [_sample(minute, 1, 0, 0) for minute in range(100)]
    assert len(thin(samples)) <= 17
    assert thin(samples)[0] is samples[0]
    assert thin(samples)[-1] is samples[-1]
    assert thin(samples[:5]) == samples[:5]


def test_groups_and_slots_suffice_for_the_episodes() -> None:
    options = LoadOptions(2000, 60.0, 3, 2, 1, 1, 30.0)
    assert options.groups * 8 >= 2000
    assert options.episodes_per_worker * options.rollout_workers >= options.groups * 8
    assert find_warm_up(60.0, 62.0) == pytest.approx(1240)
    assert find_warm_up(60.0, 5.0) == pytest.approx(180)
