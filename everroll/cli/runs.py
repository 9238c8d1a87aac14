"""Commands about runs: run, start, status, watch, list, spec."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from everroll.cli.options import (
    Address,
    Namespace,
    Overrides,
    RolloutOnly,
    RunFile,
    RunName,
    SkipFileChecks,
    StackDir,
    Target,
    TrainFrom,
    choose_side,
    find_target,
    load_spec,
    read_stack,
    with_ui,
)

if TYPE_CHECKING:
    from everroll.client import EverrollClient
    from everroll.contracts.spec import RunSpec

_STACK_DIR = Path(".everroll")


def run(
    file: RunFile,
    overrides: Overrides = None,
    rollout_only: RolloutOnly = False,
    train_from: TrainFrom = None,
    no_file_checks: SkipFileChecks = False,
    directory: StackDir = _STACK_DIR,
) -> None:
    """Start a run and follow it until it ends. Ctrl-C stops following; the run goes on."""
    from everroll.cli.execution import execute
    from everroll.cli.follow import follow

    spec = load_spec(file, choose_side(overrides, rollout_only, train_from), directory, check_files=not no_file_checks)
    target = _target_of(spec, directory)

    async def start_and_follow(client: EverrollClient) -> int:
        await client.start(spec)
        return await follow(client, spec.run.name, target.ui_url)

    raise typer.Exit(execute(target, start_and_follow))


def start(
    file: RunFile,
    overrides: Overrides = None,
    rollout_only: RolloutOnly = False,
    train_from: TrainFrom = None,
    no_file_checks: SkipFileChecks = False,
    directory: StackDir = _STACK_DIR,
) -> None:
    """Start a run and return at once."""
    from everroll.cli.execution import execute
    from everroll.cli.follow import print_started

    spec = load_spec(file, choose_side(overrides, rollout_only, train_from), directory, check_files=not no_file_checks)
    target = _target_of(spec, directory)

    async def start_only(client: EverrollClient) -> int:
        await client.start(spec)
        print_started(await client.status(spec.run.name), target.ui_url)
        return 0

    raise typer.Exit(execute(target, start_only))


def status(
    run: RunName,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    address: Address = None,
    namespace: Namespace = None,
    directory: StackDir = _STACK_DIR,
) -> None:
    """Show where a run stands. Exit code 1 if it failed, was cancelled, terminated or timed out."""
    from everroll.cli.execution import execute
    from everroll.cli.follow import exit_code_of, print_status

    target = find_target(directory, address, namespace)

    async def show(client: EverrollClient) -> int:
        view = await client.status(run, survey=True)
        print_status(view, target.ui_url, as_json=json)
        return exit_code_of(view)

    raise typer.Exit(execute(target, show))


def watch(
    run: RunName,
    address: Address = None,
    namespace: Namespace = None,
    directory: StackDir = _STACK_DIR,
) -> None:
    """Follow a run until it ends. Ctrl-C stops following; the run goes on."""
    from everroll.cli.execution import execute
    from everroll.cli.follow import follow

    target = find_target(directory, address, namespace)
    raise typer.Exit(execute(target, lambda client: follow(client, run, target.ui_url)))


def list_runs(
    address: Address = None,
    namespace: Namespace = None,
    directory: StackDir = _STACK_DIR,
) -> None:
    """List the latest runs, newest first."""
    from everroll.cli.execution import execute
    from everroll.cli.follow import print_runs

    async def show(client: EverrollClient) -> int:
        print_runs(await client.find_runs())
        return 0

    raise typer.Exit(execute(find_target(directory, address, namespace), show))


def spec(
    file: RunFile,
    overrides: Overrides = None,
    no_file_checks: SkipFileChecks = False,
    directory: StackDir = _STACK_DIR,
) -> None:
    """Print a run file as the input of the workflow TrainingRun.

    The output is what this takes:

    temporal workflow start --type TrainingRun --task-queue everroll --workflow-id everroll/NAME --input-file run.json \
        --id-reuse-policy RejectDuplicate --id-conflict-policy Fail
    """
    from everroll.contracts.training import TrainingRunRequest

    request = TrainingRunRequest(spec=load_spec(file, overrides, directory, check_files=not no_file_checks))
    print(request.model_dump_json(indent=2, exclude={"state"}))


def _target_of(spec: RunSpec, directory: Path) -> Target:
    """Where a run file wants its run."""
    target = Target(spec.services.temporal_address, spec.services.temporal_namespace)
    return with_ui(target, read_stack(directory))
