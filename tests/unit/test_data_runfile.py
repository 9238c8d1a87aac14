"""`data.path` in a run file: paths, globs and URLs, alone or in a list."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from everroll.runfile import RunFileError, load_run_file, spec_from_mapping

RUN: dict[str, Any] = {
    "run": {"name": "first", "num_steps": 1},
    "model": {"path": "model"},
    "rollout": {"agent": {"function": "a:b"}},
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "a.jsonl").write_text('{"text": "?"}\n')
    return tmp_path


def test_paths_and_globs_become_absolute_and_urls_stay(folder: Path) -> None:
    paths = ["a.jsonl", "*.jsonl", "https://host/a.parquet", "s3://bucket/b.jsonl"]
    spec = spec_from_mapping({**RUN, "data": {"path": paths}}, folder)
    assert spec.data.path == [str(folder / "a.jsonl"), str(folder / "*.jsonl"), *paths[2:]]
    assert spec_from_mapping({**RUN, "data": {"path": paths[2]}}, folder).data.path == paths[2]


def test_each_missing_file_is_a_fault(folder: Path) -> None:
    with pytest.raises(RunFileError) as caught:
        spec_from_mapping({**RUN, "data": {"path": ["a.jsonl", "b.jsonl", "c*.parquet"]}}, folder)
    assert [str(fault) for fault in caught.value.faults] == [
        f"data.path: no file {folder}/b.jsonl; create it (JSONL, one prompt a line) or correct the path",
        f"data.path: no file matches {folder}/c*.parquet; correct it",
    ]


def test_other_types_are_named(folder: Path) -> None:
    for wrong in (5, [], [5]):
        with pytest.raises(RunFileError, match=r"data\.path = .*: must be a string or a list of strings"):
            spec_from_mapping({**RUN, "data": {"path": wrong}}, folder)


def test_a_list_may_be_given_on_the_command_line(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "run.toml").write_text(
        '[run]\nname = "first"\nnum_steps = 1\n[model]\npath = "model"\n[data]\npath = "b"\n'
        '[rollout.agent]\nfunction = "a:b"\n'
    )
    monkeypatch.chdir(folder)
    spec = load_run_file(folder / "run.toml", {"data.path": '["a.jsonl", "https://host/b.jsonl"]'})
    assert spec.data.path == [str(folder / "a.jsonl"), "https://host/b.jsonl"]
