"""Directories that appear whole or not at all, and the small files of a run directory."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from everroll.run_files import MANIFEST_NAME, is_complete
from trainer.durable import TornDirectoryError, check_directory, write_directory
from trainer.errors import RunInUseError
from trainer.rundir import RunDirectory


def _fill(directory: Path) -> None:
    (directory / "a.bin").write_bytes(b"first")
    (directory / "b.bin").write_bytes(b"second")


def test_a_directory_is_listed_with_its_hashes(tmp_path: Path) -> None:
    manifest = write_directory(tmp_path / "made", _fill)
    assert check_directory(tmp_path / "made") == manifest
    assert {name: entry.num_bytes for name, entry in manifest.files.items()} == {"a.bin": 5, "b.bin": 6}


def test_a_failed_write_leaves_nothing(tmp_path: Path) -> None:
    def fail(directory: Path) -> None:
        _fill(directory)
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        write_directory(tmp_path / "made", fail)
    assert list(tmp_path.iterdir()) == []


def test_a_directory_can_be_replaced(tmp_path: Path) -> None:
    write_directory(tmp_path / "made", _fill)
    write_directory(tmp_path / "made", lambda directory: (directory / "c.bin").touch())
    assert sorted(path.name for path in (tmp_path / "made").iterdir()) == ["c.bin", MANIFEST_NAME]
    assert [path.name for path in tmp_path.iterdir()] == ["made"]


def test_all_is_on_disk_before_the_directory_appears(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """C8: after a power cut a rename may have lasted, and what was renamed not; only the order of calls shows it."""
    calls: list[tuple[str, str]] = []
    fsync, rename = os.fsync, os.rename

    def note_fsync(handle: int) -> None:
        calls.append(("fsync", Path(f"/proc/self/fd/{handle}").readlink().name))
        fsync(handle)

    def note_rename(source: Path, target: Path) -> None:
        calls.append(("rename", target.name))
        rename(source, target)

    monkeypatch.setattr(os, "fsync", note_fsync)
    monkeypatch.setattr(os, "rename", note_rename)
    write_directory(tmp_path / "made", _fill)
    assert [name for _, name in calls[:3]] == ["a.bin", "b.bin", MANIFEST_NAME]
    assert calls[3][1].startswith(".tmp-made-")
    assert calls[4:] == [("rename", "made"), ("fsync", tmp_path.name)]


def test_torn_directories_are_found(tmp_path: Path) -> None:
    """C8: no manifest, a short file, a missing file, other bytes of the same size."""
    for name in ("no_manifest", "short", "missing", "changed"):
        write_directory(tmp_path / name, _fill)
    (tmp_path / "no_manifest" / MANIFEST_NAME).unlink()
    (tmp_path / "short" / "a.bin").write_bytes(b"firs")
    (tmp_path / "missing" / "b.bin").unlink()
    (tmp_path / "changed" / "b.bin").write_bytes(b"sEcond")
    for name in ("no_manifest", "short", "missing", "changed"):
        with pytest.raises(TornDirectoryError):
            check_directory(tmp_path / name)
    assert not is_complete(tmp_path / "short")


def test_a_run_directory_has_one_owner(tmp_path: Path) -> None:
    first, second = RunDirectory(tmp_path), RunDirectory(tmp_path)
    first.lock(timeout_seconds=0)
    with pytest.raises(RunInUseError, match=r"in use by another trainer \(process \d+"):
        second.lock(timeout_seconds=0.1)
    first.unlock()
    second.lock(timeout_seconds=5)
    second.unlock()


def test_leftovers_are_cleared_by_the_next_owner(tmp_path: Path) -> None:
    (tmp_path / "weights" / ".tmp-step_000001-x").mkdir(parents=True)
    run = RunDirectory(tmp_path)
    run.lock(timeout_seconds=0)
    run.unlock()
    assert list((tmp_path / "weights").iterdir()) == []


def test_metrics_are_written_once_per_step(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    run.append_metrics(1, {"loss": 0.5})
    run.append_metrics(1, {"loss": 0.6})
    with run.metrics_path.open("ab") as file:
        file.write(b'{"step": 2, "lo')  # a crash in mid-line
    run.append_metrics(2, {"loss": 0.7})
    lines = [json.loads(line) for line in run.metrics_path.read_text().splitlines()]
    assert lines == [{"step": 1, "loss": 0.5}, {"step": 2, "loss": 0.7}]
