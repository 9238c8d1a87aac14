"""An engine killed in mid-run comes back with its first weights: no turn is sampled by them, and all is trained."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from everroll.contracts.rollout import BlobRef, GroupManifest
from everroll.store import LocalStore
from everroll.tokens.samples import decode_samples
from tests.integration.test_end_to_end import AGENT, RUN, everroll, find_pid
from tests.small_run import make_model

STEPS = 6
KILL_AT = 3


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Path]:
    make_model(tmp_path / "model")
    (tmp_path / "my_agent.py").write_text(AGENT)
    text = RUN.replace('name = "whole"', 'name = "restart"').replace("num_steps = 5", f"num_steps = {STEPS}")
    refills = "episodes_per_group = 4\nmax_refills = 30\nrefill_backoff_seconds = 0.5\n"
    (tmp_path / "run.toml").write_text(text.replace("episodes_per_group = 4\n", refills))
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps({"text": f"say {n}"}) + "\n" for n in range(6)))
    started = everroll(tmp_path, "up", "run.toml", "--detach", timeout=200)
    try:
        assert started.returncode == 0, started.stdout + started.stderr
        yield tmp_path
    finally:
        everroll(tmp_path, "down")


def await_step(home: Path, step: int, seconds: float) -> None:
    metrics = home / ".everroll" / "runs" / "restart" / "metrics.jsonl"
    deadline = time.monotonic() + seconds
    while not metrics.exists() or len(metrics.read_text().splitlines()) < step:
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_an_engine_killed_in_mid_run_serves_no_old_weights(home: Path) -> None:
    started = everroll(home, "start", "run.toml")
    assert started.returncode == 0, started.stdout + started.stderr
    await_step(home, KILL_AT, 200)
    killed = find_pid(home, "engine")
    os.kill(killed, signal.SIGKILL)
    watched = everroll(home, "watch", "restart", timeout=300)
    assert watched.returncode == 0, watched.stdout + watched.stderr
    assert find_pid(home, "engine") != killed
    shown = json.loads(everroll(home, "status", "restart", "--json").stdout)
    assert shown["state"] == "completed"
    assert shown["status"]["dropped_groups"] == {}
    assert shown["status"]["trained_groups"] == 2 * STEPS
    assert shown["status"]["unusable_episodes"].keys() <= {"engine", "transport", "timeout"}
    store = LocalStore(home / ".everroll" / "store")
    oldest = {}
    for path in sorted((home / ".everroll" / "store" / "restart" / "groups").rglob("*.json")):
        manifest = GroupManifest.model_validate_json(path.read_bytes())
        samples = [
            decode_samples(store.get(BlobRef.model_validate(outcome.samples.blob.model_dump())))
            for outcome in manifest.outcomes
            if outcome.samples is not None
        ]
        versions = [sample.weight_versions[sample.loss_mask].min() for part in samples for sample in part.samples]
        oldest[manifest.group] = int(min(versions))
    assert oldest == {group: group // 2 for group in range(2 * STEPS)}
