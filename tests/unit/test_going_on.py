"""What a run may go on with, and from which steps it can be forked, by settings and files alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from everroll.contracts.spec import RunSpec
from everroll.contracts.training import ForkOrigin, ResumeRequest
from everroll.failures import ConfigurationError
from everroll.going_on import KeptSteps, check_fork, check_resume, choose_spec, find_start, read_kept_steps
from everroll.runfile import find_input_faults
from tests.simulation import build_spec

OWN = build_spec("r", "q", run={"num_steps": 4})
ORIGIN = ForkOrigin(run="r", run_dir="/runs/r", step=3)


def with_steps(num_steps: int) -> RunSpec:
    return choose_spec(OWN, OWN, ResumeRequest(changes={"num_steps": num_steps}))


def test_as_many_steps_as_are_done_only_as_they_were() -> None:
    """A run that failed after its last step, as while it was evaluated, still ends properly."""
    check_resume(OWN, OWN, 4)
    check_resume(OWN, with_steps(3), 2)
    for num_steps, step in ((3, 3), (2, 3), (4, 5)):
        with pytest.raises(ConfigurationError, match=f"step {step} is done; give it at least {step + 1}"):
            check_resume(OWN, with_steps(num_steps), step)


def test_a_run_that_only_played_does_not_go_on() -> None:
    played = build_spec("r", "q", run={"mode": "rollout"})
    with pytest.raises(ConfigurationError, match="only played, and is not resumed: start another"):
        check_resume(played, played, 0)
    with pytest.raises(ConfigurationError, match="only played, and has no steps to fork from"):
        check_fork(played, played, ResumeRequest(), ORIGIN)


def test_a_fork_has_something_to_do_unless_it_is_told_not_to() -> None:
    check_fork(OWN, OWN, ResumeRequest(), ORIGIN)
    told = ResumeRequest(changes={"run.num_steps": 3})
    check_fork(OWN, choose_spec(OWN, OWN, told), told, ORIGIN)
    with pytest.raises(ConfigurationError, match=r"nothing to do with run.num_steps = 3"):
        check_fork(OWN, with_steps(3), ResumeRequest(), ORIGIN)


def test_a_torn_checkpoint_is_none(tmp_path: Path) -> None:
    for step, size in ((0, 3), (2, 3), (4, 4)):
        checkpoint = tmp_path / "checkpoints" / f"step_{step:06d}"
        checkpoint.mkdir(parents=True)
        (checkpoint / "a").write_bytes(b"abc")
        (checkpoint / "manifest.json").write_text(json.dumps({"files": {"a": {"sha256": "", "num_bytes": size}}}))
    for name, steps in (("steps", range(1, 6)), ("requests", (3, 5))):
        (tmp_path / name).mkdir()
        for step in steps:
            (tmp_path / name / f"step_{step:06d}.json").touch()
    kept = read_kept_steps(tmp_path)
    assert kept == KeptSteps(latest=5, checkpoints=(2, 0), requests=frozenset({3, 5}))
    assert [find_start(kept, ORIGIN.model_copy(update={"step": step})) for step in (0, 2, 3)] == [0, 2, 2]
    with pytest.raises(ConfigurationError, match=r"at step 5, and has checkpoints of the steps 0, 2; .* had: 0, 2-3"):
        find_start(kept, ORIGIN.model_copy(update={"step": 4}))
    assert read_kept_steps(tmp_path / "absent") == KeptSteps(0, (), frozenset())


def test_inputs_that_are_gone(tmp_path: Path) -> None:
    """What is relative is a worker's own."""
    spec = build_spec(
        "r",
        "q",
        data={"path": ["here.jsonl", f"{tmp_path}/gone.jsonl", "https://data.invalid/far.jsonl"]},
        eval={"sets": {"math": f"{tmp_path}/*.parquet"}},
        train={"kl_reference": f"{tmp_path}/reference"},
    )
    assert [fault.path for fault in find_input_faults(spec)] == ["data.path", "eval.sets.math", "train.kl_reference"]
    assert find_input_faults(OWN) == []
