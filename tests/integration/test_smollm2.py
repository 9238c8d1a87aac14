"""One step of the SmolLM2 example: a real model from a GGUF file, through the whole stack."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import torch
from safetensors.torch import load_file

from examples.smollm2.prepare import NoModelError, find_gguf, prepare
from examples.smollm2.task import build_prompts, compute_reward

ROOT = Path(__file__).resolve().parents[2]
RUN_FILE = ROOT / "examples/smollm2/run.toml"


def test_the_reward_is_for_the_number_and_little_else() -> None:
    assert compute_reward(21, "21") == {"reward": 1.0, "correct": 1.0, "brevity": 1.0}
    assert compute_reward(21, "14 + 7 = 21")["correct"] == 0.0
    assert compute_reward(21, "")["reward"] == pytest.approx(0.2)
    assert build_prompts(0, 3) == build_prompts(0, 4)[:3]


def _everroll(home: Path, *arguments: str, timeout: float) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "everroll.cli", *arguments],
        cwd=home,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def _overrides(home: Path) -> list[str]:
    values = {
        "model.path": str(home / "model.gguf"),
        "data.path": str(home / "prompts.jsonl"),
        "run.num_steps": "1",
        "rollout.groups_per_step": "2",
        "rollout.episodes_per_group": "4",
    }
    return [argument for key, value in values.items() for argument in ("--set", f"{key}={value}")]


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Path]:
    try:
        find_gguf()
    except NoModelError as error:
        pytest.skip(str(error))
    prepare(tmp_path, num_prompts=8)
    try:
        _everroll(tmp_path, "up", str(RUN_FILE), *_overrides(tmp_path), "--detach", timeout=900)
        yield tmp_path
    finally:
        _everroll(tmp_path, "down", timeout=120)


@pytest.mark.slow
@pytest.mark.timeout(2000)
def test_one_step_end_to_end(home: Path) -> None:
    _everroll(home, "run", str(RUN_FILE), *_overrides(home), timeout=900)
    run = home / ".everroll/runs/smollm2"
    metrics = json.loads((run / "metrics.jsonl").read_text())
    assert metrics["step"] == 1
    assert metrics["num_episodes"] == 8
    assert metrics["grad_norm"] > 0
    assert metrics["logprob_gap_max"] < 0.05  # the trainer sees what the engine sampled
    before, after = (load_file(run / f"weights/step_00000{version}/model.safetensors") for version in (0, 1))
    assert before.keys() == after.keys()
    assert {tensor.dtype for tensor in after.values()} == {torch.bfloat16}
    assert any(not torch.equal(before[name], after[name]) for name in before)
    state = json.loads((home / ".everroll/stack.json").read_text())
    url = state["addresses"]["engine_urls"][0]
    info = httpx.get(f"{url}/get_model_info", timeout=60).raise_for_status().json()
    assert info["model_path"] == str(run / "weights/step_000001")
