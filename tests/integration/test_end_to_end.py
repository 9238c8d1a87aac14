"""The whole product as a user has it: `everroll up`, a run file, an agent of one's own, and a kill -9 on the way.

The model has random weights: what is tested is that its tokens go round, not that it learns (the demo shows that).
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from everroll.contracts.rollout import BlobRef, GroupManifest
from everroll.store import LocalStore
from everroll.tokens.samples import decode_samples
from tests.small_run import make_model

AGENT = '''
import os

async def run(episode):
    """Two turns in one conversation; the reward is the share of small letters."""
    client = episode.openai()
    messages = list(episode.prompt.messages)
    text = ""
    for _ in range(2):
        answer = await client.chat.completions.create(model=episode.model, messages=messages)
        message = answer.choices[0].message
        if answer.choices[0].finish_reason == "length" or message.content is None:
            break
        text += message.content
        messages += [message.model_dump(exclude_none=True), {"role": "user", "content": "go on"}]
    with open("episodes.txt", "a") as file:
        print(os.getpid(), episode.key.session_id, file=file, flush=True)
    return {"reward": sum(letter.islower() for letter in text) / (len(text) + 1) + 0.01 * episode.key.member}
'''

RUN = """
[run]
name = "whole"
num_steps = 5

[model]
path = "model"
renderer = "qwen3"
chat_template = { enable_thinking = false }

[data]
path = "prompts.jsonl"

[rollout]
groups_per_step = 2
episodes_per_group = 4
heartbeat_timeout_seconds = 2.0
agent = { function = "my_agent:run" }
sampling = { max_tokens = 12 }

[train]
learning_rate = 1e-3
"""


def everroll(directory: Path, *arguments: str, timeout: float = 100) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "everroll.cli", *arguments],
        cwd=directory,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def find_pid(directory: Path, name: str) -> int:
    state = json.loads((directory / ".everroll" / "stack.json").read_text())
    return next(int(process["identity"]["pid"]) for process in state["processes"] if process["name"] == name)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A user's directory, with the local stack up in it."""
    directory = tmp_path_factory.mktemp("home")
    make_model(directory / "model")
    (directory / "my_agent.py").write_text(AGENT)
    (directory / "run.toml").write_text(RUN)
    (directory / "prompts.jsonl").write_text("".join(json.dumps({"text": f"say {n}"}) + "\n" for n in range(6)))
    started = everroll(directory, "up", "run.toml", "--detach")
    try:
        assert started.returncode == 0, started.stdout + started.stderr
        yield directory
    finally:
        stopped = everroll(directory, "down")
    assert stopped.returncode == 0, stopped.stdout + stopped.stderr


def read_status(home: Path) -> dict[str, object]:
    shown = everroll(home, "status", "whole", "--json")
    assert shown.returncode == 0, shown.stdout + shown.stderr
    status: dict[str, object] = json.loads(shown.stdout)
    return status


@pytest.mark.timeout(240)
def test_a_run_that_loses_its_rollout_worker(home: Path) -> None:
    """Killed in mid-run: its episodes go on elsewhere, every group is trained, on exactly what was sampled."""
    started = everroll(home, "start", "run.toml")
    assert started.returncode == 0, started.stdout + started.stderr
    episodes = home / "episodes.txt"
    deadline = time.monotonic() + 60
    while not episodes.exists() or len(episodes.read_text().splitlines()) < 10:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    killed = find_pid(home, "worker-rollout")
    os.kill(killed, signal.SIGKILL)
    watched = everroll(home, "watch", "whole", timeout=150)
    assert watched.returncode == 0, watched.stdout + watched.stderr

    status = read_status(home)
    assert status["state"] == "completed"
    pids = {line.split()[0] for line in episodes.read_text().splitlines()}
    assert len(pids) == 2
    assert str(killed) in pids
    check_metrics(home)
    check_samples(home)


def check_metrics(home: Path) -> None:
    lines = (home / ".everroll" / "runs" / "whole" / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    assert [record["step"] for record in records] == [1, 2, 3, 4, 5]
    for record in records:
        # The trainer computes the log-probabilities that the engine sampled with, for the same weights and tokens.
        assert record["logprob_gap_max"] < 1e-3, record


def check_samples(home: Path) -> None:
    """Each group of each step was sampled by the version that was out, by all its members."""
    store = LocalStore(home / ".everroll" / "store")
    manifests = sorted((store.root / "whole" / "groups").glob("*/*.json"))
    assert len(manifests) == 10
    for index, path in enumerate(manifests):
        manifest = GroupManifest.model_validate_json(path.read_text())
        assert manifest.group == index
        assert len(manifest.outcomes) == 4
        for outcome in manifest.outcomes:
            assert outcome.samples is not None
            reference: BlobRef = outcome.samples.blob
            for sample in decode_samples(store.get(reference)).samples:
                versions = set(sample.weight_versions[sample.loss_mask].tolist())
                assert versions == {index // 2}
