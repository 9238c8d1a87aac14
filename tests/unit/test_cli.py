"""The command line: quick to start, clear about faults, and what it prints about a run."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest
from pydantic import Field, model_validator
from rich.console import Console

from everroll.cli.demo_run import judge_rewards
from everroll.cli.display import PlainDisplay, render_progress, render_steps
from everroll.cli.errors import CommandError
from everroll.cli.follow import describe_view, exit_code_of
from everroll.cli.options import parse_overrides
from everroll.cli.progress import Progress, TokenRate, draw_sparkline, format_counts, list_attention
from everroll.cli.settings_options import read_settings
from everroll.client import RunView
from everroll.contracts.base import Spec
from everroll.contracts.health import Pause, Survey, Waiting
from everroll.contracts.spec import ModelSection
from everroll.contracts.training import Phase, RunStatus, StepRecord, TrainingRunRequest

HEAVY = ("torch", "transformers", "temporalio", "httpx", "starlette", "uvicorn", "renderers", "pydantic")


def everroll(*arguments: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "everroll.cli", *arguments]
    env = {**os.environ, **environment}
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, check=False, timeout=60)


def test_help_loads_nothing_heavy() -> None:
    program = "import sys, everroll.cli.main; print(*sys.modules)"
    answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert set(HEAVY) & set(answer.stdout.split()) == set()


def test_help_lists_the_commands(tmp_path: Path) -> None:
    answer = everroll("--help", cwd=tmp_path)
    assert answer.returncode == 0
    for command in ("run", "start", "status", "watch", "stop", "pause", "resume", "spec", "up", "down", "demo"):
        assert f"\n  {command} " in answer.stdout


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "prompts.jsonl").write_text('{"text": "1 + 1"}\n')
    path = tmp_path / "run.toml"
    path.write_text(
        '[run]\nname = "first"\nnum_steps = 4\n[model]\npath = "model"\n[data]\npath = "prompts.jsonl"\n'
        '[rollout.agent]\nfunction = "package.module:play"\n'
    )
    return path


def test_faulty_run_file_ends_with_all_faults_and_code_2(run_file: Path) -> None:
    run_file.write_text(run_file.read_text().replace("prompts.jsonl", "absent.jsonl") + "[train]\nlerning_rate = 1\n")
    answer = everroll("run", str(run_file), "--set", "run.num_steps=-1", cwd=run_file.parent)
    assert answer.returncode == 2
    assert "3 faults" in answer.stderr
    assert "train.lerning_rate: unknown key; did you mean train.learning_rate?" in answer.stderr
    assert "run.num_steps = -1: must be an integer, at least 1" in answer.stderr
    assert "absent.jsonl; create it" in answer.stderr
    assert "Traceback" not in answer.stderr


def test_spec_is_the_input_of_the_workflow(run_file: Path) -> None:
    answer = everroll("spec", str(run_file), "--set", "train.learning_rate=1e-3", cwd=run_file.parent)
    assert answer.returncode == 0, answer.stderr
    request = TrainingRunRequest.model_validate_json(answer.stdout)
    assert request.spec.train.learning_rate == 1e-3
    assert request.spec.model.path == str(run_file.parent / "model")
    assert request.state is None


def test_no_server_is_one_message_and_code_1(tmp_path: Path) -> None:
    answer = everroll("status", "first", "--address", "127.0.0.1:1", cwd=tmp_path)
    assert answer.returncode == 1
    assert answer.stderr.startswith("no Temporal server answers at 127.0.0.1:1")
    assert "everroll up" in answer.stderr
    assert "Traceback" not in answer.stderr


def test_audit_says_where_it_looked_and_what_to_name(tmp_path: Path) -> None:
    """Before it asks any server."""
    answer = everroll("audit", "first", "--address", "127.0.0.1:1", cwd=tmp_path)
    assert answer.returncode == 2
    assert answer.stderr.startswith(f"no journal at {tmp_path}/.everroll/sessions.sqlite: no local stack has been in")
    for option in ("--dir", "--journal", "--run-dir", "--store"):
        assert option in answer.stderr


def test_server_command_refuses_bad_settings(tmp_path: Path) -> None:
    answer = everroll("session-server", "--port", "many", cwd=tmp_path)
    assert answer.returncode == 2
    assert "--model-path: Field required" in answer.stderr
    assert "--port: Input should be a valid integer" in answer.stderr
    answer = everroll("engine", "--model-path", "absent", "--host", "0.0.0.0", "--port", "0", cwd=tmp_path)
    assert answer.returncode == 2
    assert "set EVERROLL_ENGINE_API_KEY" in answer.stderr
    assert "Traceback" not in answer.stderr


class ServerSettings(Spec):
    """Of a server that there is not."""

    model: ModelSection
    urls: list[str] = Field(min_length=1)
    """Some addresses."""
    quick: bool = False
    limit: float | None = None

    @model_validator(mode="after")
    def _check_limit(self) -> ServerSettings:
        if self.quick and self.limit == 0:
            raise ValueError("quick, but limited to nothing")
        return self


def read(*arguments: str, **environment: str) -> ServerSettings:
    settings = read_settings(ServerSettings, "everroll server", "Help.", arguments, environment)
    assert isinstance(settings, ServerSettings)
    return settings


def test_every_setting_is_an_option_and_a_variable() -> None:
    settings = read(
        *("--model-path", "m", "--model-chat-template", '{"think": false}', "--urls", "a", "b", "--quick"),
        EVERROLL_SERVER_LIMIT="2.5",
        EVERROLL_SERVER_MODEL_PATH="other",
    )
    assert settings.model == ModelSection(path="m", chat_template={"think": False})
    assert settings.urls == ["a", "b"]
    assert settings.quick
    assert settings.limit == 2.5
    assert read("--model-path", "m", EVERROLL_SERVER_URLS="a b").urls == ["a", "b"]


def test_options_are_refused_by_name() -> None:
    with pytest.raises(CommandError, match=r"--model-path: Field required\n--urls: Field required"):
        read()
    with pytest.raises(CommandError, match=r"--limit: .* \(given: 'x'\)"):
        read("--model-path", "m", "--urls", "a", "--limit", "x")
    with pytest.raises(CommandError, match=r"^settings: quick, but limited to nothing$"):
        read("--model-path", "m", "--urls", "a", "--quick", "--limit", "0")


def test_overrides_need_a_key_and_a_value() -> None:
    assert parse_overrides(["a.b=1", "c = x=y"]) == {"a.b": "1", "c": "x=y"}
    with pytest.raises(CommandError, match="write KEY=VALUE"):
        parse_overrides(["a.b"])


def make_step(step: int, reward: float) -> StepRecord:
    return StepRecord(
        step=step,
        weight_version=step,
        groups=[step],
        mean_reward=reward,
        num_episodes=8,
        num_tokens=100,
        num_sampled_tokens=50,
        unusable={"transport": 2},
    )


def make_view(state: str = "running", steps: int = 2) -> RunView:
    status = RunStatus(
        run="first",
        phase=Phase.ROLLOUT,
        step=steps,
        num_steps=4,
        weight_version=steps,
        groups_in_flight=[7, 8],
        groups_ready=1,
        groups_wanted=3,
        next_group=9,
        trained_groups=6,
        dropped_groups={},
        unusable_episodes={"transport": 2, "timeout": 1},
        last_cause=None,
        num_episodes=48,
        num_sampled_tokens=1000 * steps,
        mean_reward=0.5,
        recent_steps=[make_step(step, step / 4) for step in range(1, steps + 1)],
    )
    return RunView(
        run="first",
        workflow_id="everroll/first",
        run_id="r",
        namespace="default",
        state=state,
        started_at=datetime(2026, 1, 1, tzinfo=UTC),
        closed_at=None,
        status=status,
    )


def test_progress_line() -> None:
    progress = Progress()
    assert progress.describe() == "waiting for a worker to take the run"
    progress.add(0.0, make_view(steps=1))
    progress.add(10.0, make_view(steps=2))
    assert progress.describe() == (
        "step 2/4  rollout  groups 2 in flight, 1 of 3 ready, 6 trained  reward 0.500  100 tokens/s  "
        "aborts 3 (timeout 1, transport 2)"
    )
    assert [record.step for record in progress.ordered_steps] == [1, 2]


def test_attention_names_pause_and_what_is_waited_for() -> None:
    view = make_view()
    assert list_attention(view) == []
    waiting = [
        Waiting(group=group, activity="episode-3-0", stage="not started", attempt=1, since=0.0) for group in range(5)
    ]
    assert view.status is not None
    status = view.status.model_copy(
        update={
            "pause": Pause(message="engine http://e is dead", since=0.0),
            "survey": Survey(taken_at=1.0, waiting=waiting, num_waiting=70),
        }
    )
    lines = list_attention(replace(view, status=status))
    assert re.fullmatch(r"paused since \d\d:\d\d:\d\d: engine http://e is dead", lines[0])
    assert re.fullmatch(r"waits for group 0 episode-3-0 since \d\d:\d\d:\d\d: not started", lines[1])
    assert lines[-1] == "and 67 more"
    assert list_attention(replace(view, status=None, status_error="no worker answers")) == ["no worker answers"]


def test_token_rate_is_of_the_last_seconds() -> None:
    rate = TokenRate()
    assert rate.compute() is None
    for second in range(100):
        rate.add(float(second), 1000 * min(second, 50))
    assert rate.compute() == 0.0
    rate.add(101.0, 0)
    assert rate.compute() is None


def test_small_texts() -> None:
    assert draw_sparkline([0.0, 0.5, 1.0, 2.0], 0.0, 1.0) == "▁▅██"
    assert format_counts({}) == "0"
    assert format_counts({"b": 1, "a": 2}) == "3 (a 2, b 1)"


def render(renderable: object) -> str:
    console = Console(file=io.StringIO(), width=120)
    console.print(renderable)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_live_panel_and_table_show_the_run() -> None:
    progress = Progress()
    progress.add(0.0, make_view())
    panel = render(render_progress(progress, "http://ui/run"))
    for text in ("2/4", "2 in flight, 1 of 3 ready", "3 (timeout 1, transport 2)", "http://ui/run", "0.500"):
        assert text in panel
    timed = make_step(3, 0.5).model_copy(update={"train_seconds": 1.25})
    table = render(render_steps([*progress.ordered_steps, timed]))
    before, _, after = table.splitlines()[1:]
    assert before.split()[-4:] == ["-", "-", "-", "2"], "times of steps before a resume are not on record"
    assert after.split()[-7:] == ["0.0", "s", "1.2", "s", "0.0", "s", "2"]
    table = render(render_steps(progress.ordered_steps))
    assert [line.split()[:2] for line in table.splitlines()[1:]] == [["1", "0.250"], ["2", "0.500"]]


def test_plain_display_prints_when_a_step_is_done_and_now_and_then() -> None:
    console = Console(file=io.StringIO(), width=200)
    display = PlainDisplay(console)
    progress = Progress()
    for now, steps in ((0.0, 1), (1.0, 1), (2.0, 2), (3.0, 2), (13.0, 3)):
        progress.add(now, make_view(steps=steps))
        display.update(now, progress)
    assert isinstance(console.file, io.StringIO)
    assert [line[:8] for line in console.file.getvalue().splitlines()] == ["step 1/4", "step 2/4", "step 3/4"]


def test_status_as_json_holds_address_and_status() -> None:
    described = json.loads(json.dumps(describe_view(make_view(), "http://ui")))
    assert described["url"] == "http://ui/namespaces/default/workflows/everroll%2Ffirst"
    assert described["status"]["step"] == 2


def test_exit_code_tells_a_failed_run() -> None:
    assert exit_code_of(make_view("running")) == 0
    assert exit_code_of(make_view("completed")) == 0
    assert {exit_code_of(make_view(state)) for state in ("failed", "canceled", "terminated", "timed_out")} == {1}


def test_demo_passes_only_if_the_reward_rose() -> None:
    assert judge_rewards([0.4] * 3 + [0.9] * 5).passed
    assert not judge_rewards([0.6] * 3 + [0.9] * 5).passed
    assert not judge_rewards([0.4] * 3 + [0.8] * 5).passed
    assert not judge_rewards([0.9] * 5).passed
