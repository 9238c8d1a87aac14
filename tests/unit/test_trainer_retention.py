"""What is removed after a step, and what a resume, an engine or an audit needs and therefore stays."""

from __future__ import annotations

from pathlib import Path

import pytest

from activities.forking import plan_fork, write_fork
from everroll.contracts.rollout import DatasetRef, GroupManifest
from everroll.contracts.spec import RunSpec, TrainSection
from everroll.contracts.training import ForkOrigin, ResumeRequest
from everroll.run_files import MANIFEST_NAME
from everroll.run_record import RunRecord
from everroll.store import LocalStore, StoreError
from tests.trainer_helpers import build_prepare_request, build_request
from trainer import retention
from trainer.durable import hash_file, write_directory
from trainer.retention import prune
from trainer.rundir import RunDirectory
from trainer.service import Trainer


def _fill(directory: Path) -> None:
    (directory / "a.bin").write_bytes(b"first")


def _build_run(root: Path, last: int, checkpoint_every: int) -> RunDirectory:
    """A run of `last` steps of which only the files that retention looks at are there."""
    run = RunDirectory(root / "run")
    run.lock(timeout_seconds=0)
    for step in range(last + 1):
        write_directory(run.weights(step), _fill)
        if step > 0:
            run.write_request(build_request(root, step))
        if step % checkpoint_every == 0:
            write_directory(run.checkpoint(step), _fill)
    run.unlock()
    return run


def _count_samples(root: Path) -> int:
    return len(list((root / "store" / "samples").glob("*.safetensors")))


def test_the_newest_checkpoints_stay_and_all_samples(tmp_path: Path) -> None:
    """A torn checkpoint does not count as kept."""
    run = _build_run(tmp_path, last=7, checkpoint_every=2)
    (run.checkpoint(6) / MANIFEST_NAME).unlink()
    prune(run, TrainSection(keep_checkpoints=1, keep_weights=2))
    assert run.checkpoint_steps() == [6, 4]
    assert run.weights_steps() == [7, 6]
    assert run.request_steps() == [7, 6, 5, 4, 3, 2, 1]
    assert _count_samples(tmp_path) == 7 * 6


def test_every_mth_checkpoint_stays_for_good(tmp_path: Path) -> None:
    run = _build_run(tmp_path, last=9, checkpoint_every=1)
    prune(run, TrainSection(keep_checkpoints=2, keep_every=3))
    assert run.checkpoint_steps() == [9, 8, 6, 3]


def test_samples_that_no_kept_checkpoint_needs_go_if_wanted(tmp_path: Path) -> None:
    """Those of the steps after the oldest kept checkpoint stay, and every manifest."""
    run = _build_run(tmp_path, last=6, checkpoint_every=2)
    request = run.read_request(5)
    prune(run, TrainSection(keep_checkpoints=2, keep_samples="replay"))
    assert run.checkpoint_steps() == [6, 4]
    assert run.request_steps() == [6, 5]
    assert _count_samples(tmp_path) == 2 * 6
    assert len(list((tmp_path / "store" / "groups").glob("*.json"))) == 6 * 2
    assert request is not None
    store = LocalStore(tmp_path / "store")
    for item in request.batch:
        for outcome in GroupManifest.model_validate_json(store.get(item.manifest)).outcomes:
            assert outcome.samples is not None
            store.get(outcome.samples.blob)


def test_samples_of_the_run_that_a_fork_comes_from_stay(tmp_path: Path) -> None:
    """The fork lets go of its copies of the requests all the same."""
    origin, fork = _build_run(tmp_path, last=3, checkpoint_every=1), RunDirectory(tmp_path / "fork")
    fork.lock(timeout_seconds=0)
    for step in (1, 2):
        request = origin.read_request(step)
        assert request is not None
        fork.write_request(request)
    fork.write_request(build_request(tmp_path, 4).model_copy(update={"run_dir": str(fork.root)}))
    write_directory(fork.checkpoint(4), _fill)
    fork.unlock()
    assert _count_samples(tmp_path) == 4 * 6
    prune(fork, TrainSection(keep_checkpoints=1, keep_samples="replay"))
    assert fork.request_steps() == []
    assert origin.request_steps() == [3, 2, 1]
    assert _count_samples(tmp_path) == 3 * 6


def test_an_interrupted_removal_goes_on_the_next_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Samples go before the request that names them, so nothing is left that no one knows of."""
    run = _build_run(tmp_path, last=3, checkpoint_every=1)
    train = TrainSection(keep_checkpoints=1, keep_samples="replay")
    removed = []

    class Interrupted(LocalStore):
        def delete(self, reference: object) -> None:
            removed.append(reference)
            if len(removed) == 3:
                raise StoreError("disk away")
            super().delete(reference)  # type: ignore[arg-type]

    monkeypatch.setattr(retention, "open_store", lambda url: Interrupted(Path(url)))
    prune(run, train)
    assert run.request_steps() == [3, 2, 1]
    monkeypatch.undo()
    prune(run, train)
    assert run.request_steps() == []
    assert _count_samples(tmp_path) == 0


def test_a_run_resumes_from_what_was_kept(tmp_path: Path) -> None:
    """The tightest retention: one checkpoint, and only the samples since."""
    train = TrainSection(
        device="cpu", learning_rate=1e-2, checkpoint_every=2, keep_checkpoints=1, keep_weights=2, keep_samples="replay"
    )

    def run_steps(root: Path, first: int, last: int) -> None:
        trainer = Trainer()
        trainer.prepare(build_prepare_request(root, train))
        for step in range(first, last + 1):
            trainer.train_step(build_request(root, step, train), lambda text: None)
        trainer.close()

    run_steps(tmp_path, 1, 0)
    beginning = hash_file(tmp_path / "run" / "weights" / "step_000000" / "model.safetensors")
    run_steps(tmp_path, 1, 3)
    assert RunDirectory(tmp_path / "run").request_steps() == [3]
    run_steps(tmp_path, 4, 4)
    clean = tmp_path / "clean"
    run_steps(clean, 1, 4)
    weights = [root / "run" / "weights" / "step_000004" / "model.safetensors" for root in (tmp_path, clean)]
    assert weights[0].read_bytes() == weights[1].read_bytes()
    assert 0 not in RunDirectory(tmp_path / "run").checkpoint_steps()
    assert _fork_from_the_beginning(tmp_path, train) == beginning


def _fork_from_the_beginning(root: Path, train: TrainSection) -> str:
    """sha256 of the weights that the fork begins with; its origin has no checkpoint of step 0 any more."""
    spec = RunSpec.model_validate(
        {
            "run": {"name": "fork", "num_steps": 4, "output_dir": str(root)},
            "model": {"path": str(root / "model")},
            "data": {"path": "p"},
            "rollout": {"agent": {"function": "a:b"}},
        }
    )
    dataset = DatasetRef(path="p", fingerprint="f", num_prompts=1, seed=0, shuffle=False)
    origin = ForkOrigin(run="run", run_dir=str(root / "run"), step=0)
    branch = plan_fork(origin, RunRecord(spec=spec, dataset=dataset, executions=["a"]), spec, ResumeRequest())
    assert branch.checkpoint is None
    write_fork(origin, branch, spec, dataset, "b")
    trainer = Trainer()
    weights = trainer.prepare(build_prepare_request(root, train).model_copy(update={"run_dir": str(root / "fork")}))
    trainer.close()
    assert weights.version == 0
    return hash_file(Path(weights.path) / "model.safetensors")
