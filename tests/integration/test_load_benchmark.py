"""The load benchmark at small scale, as a user starts it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from everroll.local.root import find_root

_COMMAND = (
    *(sys.executable, "-m", "benchmarks.load", "--episodes", "16", "--episode-seconds", "4", "--turns", "2"),
    *("--minutes", "0.75", "--heartbeat-timeout", "60", "--json"),
)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_load_is_put_on_a_real_stack_and_nothing_is_left_of_it() -> None:
    done = subprocess.run(_COMMAND, cwd=find_root(), capture_output=True, text=True, timeout=360)
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["summary"]["episodes"] > 0
    assert result["summary"]["turns_per_second"] > 0
    assert result["summary"]["mean_episodes_in_flight"] > 0
    assert result["stored_groups"] is not None
    names = {"temporal", "session-server", "engine (simulated)"}
    assert set(result["processes"]) == names | {"worker-workflows-1", "worker-rollout-1", "worker-rollout-2"}
    assert all(process["rss_mib"] > 10 for process in result["processes"].values())
    assert result["processes"]["temporal"]["cpu_cores"] > 0
    assert (done.returncode == 0) == (not result["faults"])
    pids = re.findall(r" is up.*\(pid (\d+)\)", done.stderr)
    assert len(pids) == 6
    assert not [pid for pid in pids if Path("/proc", pid).exists()]
