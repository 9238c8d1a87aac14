"""Run files: all faults at once, overrides, and where relative paths lead."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from everroll.runfile import RunFileError, load_run_file, spec_from_mapping
from everroll.runfile_fields import run_file_fields
from everroll.runfile_reference import render_run_file_reference

REPOSITORY = Path(__file__).resolve().parents[2]

VALID = """
[run]
name = "first"
num_steps = 4
[model]
path = "model"
[data]
path = "prompts.jsonl"
[rollout.agent]
function = "package.module:play"
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A directory with a prompts file and a checkpoint directory, as far as a run file's checks look at them."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "prompts.jsonl").write_text('{"text": "1 + 1"}\n')
    return tmp_path


def write(folder: Path, text: str) -> Path:
    path = folder / "run.toml"
    path.write_text(text)
    return path


def faults(folder: Path, text: str, **overrides: str) -> list[str]:
    with pytest.raises(RunFileError) as caught:
        load_run_file(write(folder, text), {key.replace("__", "."): value for key, value in overrides.items()})
    return [str(fault) for fault in caught.value.faults]


def test_valid_file_gives_spec_with_absolute_paths(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere = folder / "elsewhere"
    elsewhere.mkdir()
    path = write(folder, VALID)
    monkeypatch.chdir(elsewhere)
    spec = load_run_file(path)
    assert spec.run.num_steps == 4
    assert spec.model.path == str(folder / "model")
    assert spec.data.path == str(folder / "prompts.jsonl")
    assert spec.run.output_dir == str(elsewhere / ".everroll/runs")
    assert spec.services.store_url == str(elsewhere / ".everroll/store")


def test_three_faults_are_named_at_once_and_how_to_mend_them(folder: Path) -> None:
    text = VALID.replace("num_steps = 4", "num_steps = -4").replace("prompts.jsonl", "missing.jsonl")
    assert faults(folder, text + "[train]\nlerning_rate = 1e-3\n") == [
        "run.num_steps = -4: must be an integer, at least 1",
        "train.lerning_rate: unknown key; did you mean train.learning_rate?",
        f"data.path: no file {folder}/missing.jsonl; create it (JSONL, one prompt a line) or correct the path",
    ]


def test_syntax_error_names_the_line(folder: Path) -> None:
    (text,) = faults(folder, VALID + "[train\n")
    assert "not valid TOML" in text
    assert "line 11" in text


def test_missing_file_and_bytes_that_are_no_text(folder: Path) -> None:
    with pytest.raises(RunFileError, match="cannot be read: No such file"):
        load_run_file(folder / "absent.toml")
    (folder / "run.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(RunFileError, match="not UTF-8"):
        load_run_file(folder / "run.toml")


def test_key_in_the_wrong_table_is_found_elsewhere(folder: Path) -> None:
    assert faults(folder, VALID + "[rollout]\nlearning_rate = 1e-3\n") == [
        "rollout.learning_rate: unknown key; did you mean train.learning_rate?"
    ]


def test_unknown_table_and_missing_tables(folder: Path) -> None:
    found = faults(folder, VALID.replace("[data]", "[dta]"))
    assert found == [
        "data: required, but missing; add a table [data] with path",
        "dta: unknown key; did you mean data?",
    ]


def test_missing_keys_say_what_to_give(folder: Path) -> None:
    (text,) = faults(folder, VALID.replace("num_steps = 4", ""))
    assert text == "run.num_steps: required, but missing; give an integer, at least 1 (Optimizer steps to take.)"


def test_values_of_the_wrong_type_are_not_converted(folder: Path) -> None:
    text = VALID.replace("num_steps = 4", 'num_steps = "4"') + "[rollout.sampling]\nstop_token_ids = [1, true]\n"
    assert faults(folder, text) == [
        'run.num_steps = "4": must be an integer, at least 1',
        "rollout.sampling.stop_token_ids = [1, true]: must be a list of integers",
    ]


def test_checks_across_keys_are_made_even_when_there_are_other_faults(folder: Path) -> None:
    text = VALID + 'command = ["play"]\n[train]\nnum_minibatches = 3\neps = 0\n'
    found = faults(folder, text)
    assert "train.eps = 0: must be a number, above 0" in found
    assert "rollout.agent: give exactly one of `function` and `command`" in found
    found = faults(folder, VALID + "[train]\nnum_minibatches = 3\neps = 0\n")
    assert "train.num_minibatches = 3 must divide rollout.groups_per_step = 8" in found


def test_model_must_be_a_checkpoint_directory(folder: Path) -> None:
    (folder / "model" / "config.json").unlink()
    (text,) = faults(folder, VALID)
    assert "holds no config.json" in text
    (text,) = faults(folder, VALID.replace('"model"', '"org/Model-1B"'))
    assert f"hf download org/Model-1B --local-dir {folder}/org/Model-1B" in text


def test_file_checks_can_be_left_to_the_workers(folder: Path) -> None:
    path = write(folder, VALID.replace("prompts.jsonl", "missing.jsonl"))
    assert load_run_file(path, check_files=False).data.path == str(folder / "missing.jsonl")


def test_overrides_are_toml_values_and_text(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = folder / "other"
    other.mkdir()
    (other / "more.jsonl").write_text("{}\n")
    path = write(folder, VALID)
    monkeypatch.chdir(other)
    overrides = {
        "train.learning_rate": "1e-3",
        "run.name": "second",
        "rollout.sampling.stop_token_ids": "[1, 2]",
        "data.shuffle": "false",
        "data.path": "more.jsonl",
    }
    spec = load_run_file(path, overrides)
    assert spec.train.learning_rate == 1e-3
    assert spec.run.name == "second"
    assert spec.rollout.sampling.stop_token_ids == [1, 2]
    assert not spec.data.shuffle
    assert spec.data.path == str(other / "more.jsonl")


def test_faulty_overrides_are_faults_like_others(folder: Path) -> None:
    assert faults(folder, VALID, train__eps="tiny", run__num_steps__x="1") == [
        "run.num_steps.x: cannot be set, since run.num_steps is not a table",
        'train.eps = "tiny": must be a number, above 0',
    ]


def test_services_of_the_stack_fill_only_what_is_not_set(folder: Path) -> None:
    path = write(folder, VALID + '[services]\nsession_url = "http://10.0.0.1:1"\n')
    spec = load_run_file(path, services={"session_url": "http://127.0.0.1:2", "temporal_address": "127.0.0.1:3"})
    assert spec.services.session_url == "http://10.0.0.1:1"
    assert spec.services.temporal_address == "127.0.0.1:3"
    assert spec.services.task_queue == "everroll"


def test_spec_from_mapping(folder: Path) -> None:
    data = tomllib.loads(VALID)
    assert spec_from_mapping(data, folder) == load_run_file(write(folder, VALID))
    assert data == tomllib.loads(VALID)
    with pytest.raises(RunFileError, match="run specification: 1 fault"):
        spec_from_mapping({**data, "extra": 1}, folder)


def test_every_key_is_documented() -> None:
    assert [field.dotted for field in run_file_fields().values() if not field.doc] == []


def test_reference_is_up_to_date() -> None:
    assert (REPOSITORY / "docs" / "run-file.md").read_text() == render_run_file_reference(), (
        "run `everroll run-file-reference > docs/run-file.md`"
    )


def find_run_files() -> list[Path]:
    found = [path for folder in ("examples", "benchmarks", "docs") for path in (REPOSITORY / folder).rglob("*.toml")]
    return sorted(path for path in found if "run" in tomllib.loads(path.read_text()))


@pytest.mark.parametrize("path", find_run_files(), ids=lambda path: str(path.relative_to(REPOSITORY)))
def test_run_files_in_the_repository_load(path: Path) -> None:
    load_run_file(path, check_files=False)
