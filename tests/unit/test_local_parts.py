"""The parts of the local stack that start nothing: restart policy, plan, ports, versions, state."""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path

import pytest

from everroll.contracts.spec import ModelSection, ServicesSection
from everroll.local.identity import identify, is_running
from everroll.local.plan import (
    StackOptions,
    WantedPorts,
    choose_addresses,
    last_ports,
    plan_processes,
    wanted_ports,
)
from everroll.local.ports import PortReservations, choose_port
from everroll.local.restarts import CrashRecord, RestartPolicy
from everroll.local.root import find_root
from everroll.local.state import StackAddresses, StackDirectory, StackError
from everroll.local.temporal_binary import find_temporal, parse_server_version

REPOSITORY = Path(__file__).resolve().parents[2]


def test_failed_starts_back_off_and_end() -> None:
    record = CrashRecord(RestartPolicy(first_delay_seconds=1.0, max_delay_seconds=5.0, max_failed_starts=5))
    delays = [record.add(100.0 * attempt, was_healthy=False) for attempt in range(5)]
    assert delays == [1.0, 2.0, 4.0, 5.0, None]


def test_process_that_was_healthy_starts_again_at_once_however_often() -> None:
    record = CrashRecord(RestartPolicy(first_delay_seconds=0.25, max_crashes=30, window_seconds=300.0))
    assert {record.add(20.0 * attempt, was_healthy=True) for attempt in range(100)} == {0.25}


def test_rapid_crashes_back_off_and_end_even_when_healthy_in_between() -> None:
    record = CrashRecord(RestartPolicy(first_delay_seconds=0.25, max_delay_seconds=10.0, max_crashes=6))
    delays = [record.add(float(attempt), was_healthy=True) for attempt in range(6)]
    assert delays == [0.25, 0.5, 1.0, 2.0, 4.0, None]


def make_options(tmp_path: Path, **values: object) -> StackOptions:
    return StackOptions(
        directory=tmp_path / "stack", root=tmp_path, temporal=Path("temporal"), import_path=tmp_path, **values
    )


def plan(options: StackOptions) -> dict[str, tuple[str, ...]]:
    addresses = choose_addresses(options, lambda wanted: wanted, print)
    return {spec.name: spec.argv for spec in plan_processes(options, addresses, "secret")}


def test_several_trainer_processes_are_planned_under_torchrun(tmp_path: Path) -> None:
    """The other roles are one process each."""
    planned = plan(make_options(tmp_path, trainer_processes=2))
    assert planned["worker-trainer"][1:3] == ("-m", "torch.distributed.run")
    assert planned["worker-trainer"][-6:] == ("--standalone", "--nproc-per-node", "2", "-m", "worker", "trainer")
    assert planned["worker-rollout"][1:] == ("-m", "worker", "rollout")


def test_whole_stack_is_planned_from_a_model(tmp_path: Path) -> None:
    model = ModelSection(path="/models/tiny", renderer="qwen3", chat_template={"enable_thinking": False})
    planned = plan(make_options(tmp_path, model=model))
    workers = ["worker-workflows", "worker-rollout", "worker-trainer"]
    assert list(planned) == ["temporal", "engine", "session-server", *workers]
    session_server = " ".join(planned["session-server"])
    assert "--model-path /models/tiny --model-renderer qwen3" in session_server
    assert '--model-chat-template {"enable_thinking": false}' in session_server
    assert session_server.endswith("--engine-urls http://127.0.0.1:8820")
    assert all("secret" not in argument for argv in planned.values() for argument in argv)


def test_what_computes_comes_last_where_cores_are_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Heartbeats would be lost. What a person has set for Go's programs counts."""
    monkeypatch.setenv("GOGC", "50")
    options = make_options(tmp_path, model=ModelSection(path="/models/tiny", renderer="qwen3"))
    temporal, *others = plan_processes(options, choose_addresses(options, lambda port: port, print), "secret")
    assert temporal.niceness == 0
    assert {other.name for other in others if other.niceness > 0} == {"engine", "worker-trainer"}
    assert temporal.env == {"GOGC": "50", "GOMEMLIMIT": "1GiB", "GODEBUG": "adaptivestackstart=1"}


def test_rollout_workers_load_beside_the_servers_that_they_wait_for(tmp_path: Path) -> None:
    """Those that are started here only: a stack comes up whether or not an engine elsewhere does."""
    here, elsewhere = (
        make_options(tmp_path, model=ModelSection(path="m"), engine_urls=urls) for urls in ((), ("http://gpu:30000",))
    )
    waits = []
    for options in (here, elsewhere):
        specs = {spec.name: spec for spec in plan_processes(options, choose_addresses(options, int, print), "secret")}
        rollout, session_server = specs["worker-rollout"], specs["session-server"]
        assert rollout.early_stage == session_server.stage < rollout.stage
        waits.append(rollout.env["EVERROLL_WAIT_FOR"])
    sessions = "http://127.0.0.1:8810/health"
    assert waits == [f"{sessions},http://127.0.0.1:8820/health", sessions]


@pytest.mark.parametrize("trainer_processes", [1, 2])
def test_engine_and_trainer_are_forks_of_what_has_imported_torch(tmp_path: Path, trainer_processes: int) -> None:
    """But for the trainer that is several processes: torchrun starts them, after the engine has loaded."""
    options = make_options(tmp_path, model=ModelSection(path="m"), trainer_processes=trainer_processes)
    specs = {spec.name: spec for spec in plan_processes(options, choose_addresses(options, int, print), "secret")}
    trainer, torch = specs["worker-trainer"], specs["engine"].preload
    assert torch is not None
    assert (trainer.preload, trainer.early_stage) == ((torch, 1) if trainer_processes == 1 else (None, None))
    others = {specs[name].preload for name in ("session-server", "worker-workflows", "worker-rollout")}
    assert len(others) == 1
    assert torch not in others


def test_without_a_model_and_with_engines_elsewhere(tmp_path: Path) -> None:
    assert "engine" not in plan(make_options(tmp_path))
    assert "session-server" not in plan(make_options(tmp_path))
    planned = plan(make_options(tmp_path, model=ModelSection(path="m"), engine_urls=("http://gpu:30000",)))
    assert "engine" not in planned
    assert planned["session-server"][-1] == "http://gpu:30000"


def test_replaced_ports_are_reported(tmp_path: Path) -> None:
    reports: list[str] = []
    addresses = choose_addresses(make_options(tmp_path), lambda wanted: wanted + 1, reports.append)
    assert addresses.temporal_address == "127.0.0.1:7234"
    assert reports == [
        "port 7233 is taken; Temporal uses 7234",
        "port 8233 is taken; the Temporal web UI uses 8234",
    ]


def test_ports_come_from_the_run_file_where_it_names_this_machine() -> None:
    assert wanted_ports(ServicesSection()) == WantedPorts()
    services = ServicesSection(
        temporal_address="127.0.0.1:9000", session_url="http://localhost:9001", engine_urls=["http://gpu:9002"]
    )
    assert wanted_ports(services) == WantedPorts(temporal=9000, ui=10000, sessions=9001, engine=8820)


def test_ports_are_reserved_between_stacks(tmp_path: Path) -> None:
    with PortReservations(tmp_path) as first, PortReservations(tmp_path) as second:
        port = first.choose(0)
        assert second.choose(port) != port
        with socket.create_server(("127.0.0.1", port)):
            assert first.choose(port) != port
    with PortReservations(tmp_path) as third:
        assert third.choose(port) == port


def test_server_version_is_read_off_the_program() -> None:
    assert parse_server_version("temporal version 1.9.1 (Server 1.32.0, UI 2.54.1)") == (1, 32)
    assert parse_server_version("temporal version 0.1") is None


def test_old_or_foreign_temporal_on_the_path_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "temporal"
    program.write_text("#!/bin/sh\necho 'temporal version 0.9 (Server 1.20.0, UI 2.0.0)'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert find_temporal() != program
    program.write_text("#!/bin/sh\necho 'temporal version 9.0 (Server 2.0.0, UI 9.0.0)'\n")
    assert find_temporal() == program


def test_root_is_found_from_anywhere_or_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("EVERROLL_ROOT", raising=False)
    monkeypatch.chdir(tmp_path)
    assert find_root() == REPOSITORY
    monkeypatch.setenv("EVERROLL_ROOT", str(tmp_path))
    with pytest.raises(StackError, match="holds no Everroll repository"):
        find_root()


def test_process_is_known_by_pid_and_start() -> None:
    own = identify(os.getpid())
    assert own is not None
    assert is_running(own)
    assert not is_running(own.model_copy(update={"started": "another time"}))
    assert identify(2**22 + 1) is None or sys.platform != "linux"


def test_state_file_of_another_version_is_refused(tmp_path: Path) -> None:
    directory = StackDirectory(tmp_path)
    assert directory.read_state() is None
    directory.state_file.write_text('{"schema_version": 1}')
    with pytest.raises(StackError, match="cannot be read"):
        directory.read_state()


def test_service_defaults_leave_out_what_the_stack_does_not_run() -> None:
    addresses = StackAddresses(temporal_address="127.0.0.1:1", task_queue="q", store_url="/s")
    assert addresses.service_defaults() == {
        "temporal_address": "127.0.0.1:1",
        "temporal_namespace": "default",
        "task_queue": "q",
        "store_url": "/s",
    }
    ServicesSection.model_validate(addresses.service_defaults())


def test_a_stack_comes_back_at_its_addresses(tmp_path: Path) -> None:
    """Open runs look for their services where they were, also when the usual ports are free again."""
    last = StackAddresses(
        temporal_address="127.0.0.1:7234",
        task_queue="everroll",
        ui_url="http://127.0.0.1:8234",
        session_url="http://127.0.0.1:8811",
        engine_urls=["http://127.0.0.1:8821"],
        store_url="store",
    )
    assert last_ports(last, WantedPorts()) == WantedPorts(temporal=7234, ui=8234, sessions=8811, engine=8821)
    assert last_ports(last, WantedPorts(sessions=9000)).sessions == 9000
    directory = StackDirectory(tmp_path)
    assert directory.read_last_addresses() is None
    directory.addresses_file.write_text(last.model_dump_json())
    assert directory.read_last_addresses() == last


def test_a_chosen_port_is_none_that_others_are_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """Found by chaos: one of Temporal's internal servers was given the session server's port, and kept it."""
    chosen = {choose_port(0) for _ in range(50)}
    assert max(chosen) < 32_768
    assert len(chosen) > 40
    monkeypatch.setattr("everroll.local.ports.is_free", lambda port: False)
    assert choose_port(0) > 0  # any, where all of those are taken
