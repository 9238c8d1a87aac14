"""Evaluation and one side alone, as a user has them: the local stack, the command line, and the tiny model."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from everroll.contracts.evaluation import EvaluationRecord
from tests.integration.test_end_to_end import AGENT, RUN, everroll
from tests.small_run import make_model

ROOT = Path(__file__).resolve().parents[2]
EVAL = """
[eval]
every = 2
episodes_per_prompt = 2
pass_reward = 0.5
on_publish = "block"

[eval.sets]
small = "small.jsonl"

[eval.sampling]
max_tokens = 8
"""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    directory = tmp_path_factory.mktemp("home")
    make_model(directory / "model")
    (directory / "my_agent.py").write_text(AGENT)
    (directory / "run.toml").write_text(RUN.replace("num_steps = 5", "num_steps = 2"))
    (directory / "eval.toml").write_text(RUN.replace("num_steps = 5", "num_steps = 2") + EVAL)
    for name, number in (("prompts", 6), ("small", 3), ("more", 2)):
        (directory / f"{name}.jsonl").write_text(
            "".join(json.dumps({"text": f"say {n}"}) + "\n" for n in range(number))
        )
    started = everroll(directory, "up", "run.toml", "--detach", timeout=300)
    try:
        assert started.returncode == 0, started.stdout + started.stderr
        yield directory
    finally:
        everroll(directory, "down", timeout=200)


def succeed(home: Path, *arguments: str) -> str:
    done = everroll(home, *arguments, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_batches_that_were_only_played_are_trained_by_a_run_and_by_the_trainer(home: Path) -> None:
    succeed(home, "run", "run.toml", "--set", "run.name=played", "--rollout-only")
    played = home / ".everroll" / "runs" / "played"
    assert len((played / "rollouts.jsonl").read_text().splitlines()) == 2
    assert not (played / "weights").exists()
    succeed(home, "run", "run.toml", "--set", "run.name=trained", "--train-from", str(played))
    trained = home / ".everroll" / "runs" / "trained"
    alone = subprocess.run(
        [sys.executable, "-m", "trainer", str(played / "requests"), "--run-dir", str(home / "alone"), "--threads", "1"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert alone.returncode == 0, alone.stderr
    losses = [
        [json.loads(line)["loss"] for line in (directory / "metrics.jsonl").read_text().splitlines()]
        for directory in (trained, home / "alone")
    ]
    assert len(losses[0]) == 2
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)
    for name, fate in (("played", "stored"), ("trained", "trained")):
        report = json.loads(succeed(home, "audit", name, "--json"))
        assert report["passed"]
        assert report["fates"] == {fate: 4}
    assert report["notes"]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_run_is_evaluated_as_it_goes_and_again_after_its_end(home: Path) -> None:
    succeed(home, "run", "eval.toml", "--set", "run.name=watched")
    results = home / ".everroll" / "runs" / "watched" / "evaluations.jsonl"
    records = [EvaluationRecord.model_validate_json(line) for line in results.read_text().splitlines()]
    assert [(record.name, record.version) for record in records] == [("small", 0), ("small", 2)]
    for record in records:
        assert (record.num_episodes, record.num_exact_episodes, record.lost) == (6, 6, {})
        assert sorted(record.pass_at) == ["1", "2"]
        assert 0 < record.mean_sampled_tokens <= 16
    assert "evaluation small, version 2: reward" in succeed(home, "status", "watched")
    status = json.loads(succeed(home, "status", "watched", "--json"))
    assert [record["version"] for record in status["status"]["evaluations"]] == [0, 2]
    (line,) = succeed(
        home, "eval", "watched", "--path", "more.jsonl", "--name", "more", "--version", "1", "--episodes", "1", "--json"
    ).splitlines()
    again = EvaluationRecord.model_validate_json(line)
    assert (again.name, again.version, again.num_episodes, again.num_exact_episodes) == ("more", 1, 2, 2)
    assert len(results.read_text().splitlines()) == 3
    refused = everroll(home, "eval", "watched")
    assert refused.returncode == 2
    assert "was evaluated on version 2 already" in refused.stderr
    report = json.loads(succeed(home, "audit", "watched", "--json"))
    assert report["passed"]
    assert report["num_groups"] == 4
