"""Commands that let a run go on: resume, after a pause or an end of whatever kind, and fork, from one of its steps.

What cannot work is refused here, before anything is asked of Temporal, as far as it can be told from this machine: by
the run's directory where that is seen, else by Temporal's record.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from everroll.cli.errors import CommandError
from everroll.cli.options import Address, Namespace, RunName, SkipFileChecks, StackDir, find_target, load_spec
from everroll.cli.steering import Reason, parse_values

if TYPE_CHECKING:
    from everroll.client import EverrollClient
    from everroll.contracts.spec import RunSpec
    from everroll.contracts.training import ForkOrigin, ResumeRequest
    from everroll.run_record import RunRecord

_STACK_DIR = Path(".everroll")
_RUNS_DIR = Path(".everroll/runs")
Changes = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Change a setting, as `everroll set` does, e.g. num_steps=200."),
]
NewFile = Annotated[
    Path | None,
    typer.Option("--file", metavar="FILE", help="Run file whose settings hold from now on, in place of the run's own."),
]
RunDir = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR",
        help="The run's own directory, as this machine and the workers see it.  [default: as the run was started, "
        "else .everroll/runs/RUN]",
    ),
]


def resume(
    run: RunName,
    file: NewFile = None,
    changes: Changes = None,
    run_dir: RunDir = None,
    no_file_checks: SkipFileChecks = False,
    reason: Reason = "",
    address: Address = None,
    namespace: Namespace = None,
    directory: StackDir = _STACK_DIR,
) -> None:
    """Go on with a run: one that is paused, or one that failed, was cancelled, terminated or stopped, or that the
    Temporal server has lost. Nothing that is settled runs again.
    """
    from everroll.cli.execution import execute

    values = parse_values(changes or [])
    given = load_spec(file, None, directory, check_files=not no_file_checks) if file else None
    if given is not None and given.run.name != run:
        raise CommandError(f"{file} is of run {given.run.name}, not {run}; everroll fork starts a run of another name")

    async def go_on(client: EverrollClient) -> int:
        from everroll.client import build_resume

        state = await client.find_state(run)
        if state == "running":
            if given or values:
                raise CommandError(f"run {run} is running; change its settings with: everroll set {run} KEY=VALUE")
            await client.resume(run, reason)
            print(f"run {run} goes on")
            return 0
        asked = build_resume(reason, values, from_file=given is not None)
        spec = _place(given or await _find_spec(client, run, run_dir, state), run_dir)
        await _check_resume(client, spec, asked, state, look=not no_file_checks)
        await client.resume_ended(spec, asked)
        print(f"run {run} is resumed from its directory; follow it with: everroll watch {run}")
        return 0

    raise typer.Exit(execute(find_target(directory, address, namespace), go_on))


def fork(
    run: RunName,
    step: Annotated[int, typer.Option(min=0, help="The fork starts from the weights of this step; 0 is the model.")],
    name: Annotated[str, typer.Option(help="Name of the new run.")],
    file: NewFile = None,
    changes: Changes = None,
    run_dir: RunDir = None,
    no_file_checks: SkipFileChecks = False,
    reason: Reason = "",
    address: Address = None,
    namespace: Namespace = None,
    directory: StackDir = _STACK_DIR,
) -> None:
    """Start a new run from a step of another, which goes on undisturbed. What the other had settled by then counts as
    settled; prompts that it had only started are played by the new run.
    """
    from everroll.cli.execution import execute
    from everroll.contracts import names

    if not names.is_valid_run_name(name):
        raise CommandError(f"--name {name}: a run's name has letters, digits, '.', '_' and '-', 64 of them at most")
    values = parse_values(changes or [])
    given = load_spec(file, None, directory, check_files=not no_file_checks) if file else None

    async def branch(client: EverrollClient) -> int:
        from everroll.client import build_resume
        from everroll.contracts.training import ForkOrigin

        source = _place(await _find_spec(client, run, run_dir, await client.find_state(run)), run_dir)
        spec = given or source
        spec = spec.model_copy(update={"run": spec.run.model_copy(update={"name": name})})
        origin = ForkOrigin(run=run, run_dir=f"{source.run.output_dir}/{run}", step=step)
        asked = build_resume(reason, values, from_file=given is not None)
        _check_fork(source, spec, asked, origin, look=not no_file_checks)
        await client.fork(spec, origin, asked)
        print(f"run {name} is forked from step {step} of run {run}; follow it with: everroll watch {name}")
        return 0

    raise typer.Exit(execute(find_target(directory, address, namespace), branch))


async def _check_resume(
    client: EverrollClient, spec: RunSpec, asked: ResumeRequest, state: str | None, *, look: bool
) -> None:
    """
    Raises:
        CommandError: the run cannot go on so. Nothing has changed.
    """
    from everroll.failures import ConfigurationError
    from everroll.going_on import check_resume, choose_spec, find_latest_step

    name, directory = spec.run.name, Path(spec.run.output_dir, spec.run.name)
    record = _read_record(directory) if look else None
    if look and record is None and directory.parent.is_dir():
        raise CommandError(
            f"{directory} holds no run to resume: there is no run.json. A run that was refused before it began is "
            f"started again, by `everroll start` or `everroll fork`; name another place with --run-dir"
        )
    own = record.spec if record else (await client.read_start(name)).spec if state else spec
    step = find_latest_step(directory) if record else await client.find_step(name) if state else 0
    try:
        chosen = choose_spec(own, spec, asked)
        if state == "completed" and chosen.run.num_steps <= step:
            raise CommandError(f"run {name} has done all its {step} steps; give it more with: --set num_steps=N")
        check_resume(own, chosen, step)
    except ConfigurationError as error:
        raise CommandError(str(error)) from error
    if record:
        _check_inputs(chosen)


def _check_fork(source: RunSpec, spec: RunSpec, asked: ResumeRequest, origin: ForkOrigin, *, look: bool) -> None:
    """
    Raises:
        CommandError: there can be no such fork. Nothing has changed.
    """
    from everroll.contracts import names
    from everroll.failures import ConfigurationError
    from everroll.going_on import check_fork, choose_spec, find_start, read_kept_steps

    record = _read_record(Path(origin.run_dir)) if look else None
    own = record.spec if record else source
    try:
        chosen = choose_spec(own, spec, asked)
        check_fork(own, chosen, asked, origin)
        if record:
            find_start(read_kept_steps(Path(origin.run_dir)), origin)
    except ConfigurationError as error:
        raise CommandError(str(error)) from error
    target = Path(spec.run.output_dir, spec.run.name)
    if look and (target / names.RUN_RECORD_FILE).exists():
        raise CommandError(f"{target} holds a run of this name already; choose another --name")
    if record:
        _check_inputs(chosen)


def _check_inputs(spec: RunSpec) -> None:
    from everroll.runfile import find_input_faults

    faults = find_input_faults(spec)
    if faults:
        lines = "\n".join(f"  {fault}" for fault in faults)
        raise CommandError(
            f"run {spec.run.name} cannot go on without these:\n{lines}\nPut them back, or name others in a run file "
            "(--file). If only the workers see them: --no-file-checks"
        )


def _read_record(directory: Path) -> RunRecord | None:
    from everroll.failures import ConfigurationError
    from everroll.run_record import RunRecordDirectory

    try:
        return RunRecordDirectory(directory).read()
    except ConfigurationError as error:
        raise CommandError(str(error)) from error


async def _find_spec(client: EverrollClient, run: str, run_dir: Path | None, state: str | None) -> RunSpec:
    """What the run was started with, by its directory if that can be seen here, else by Temporal's record."""
    if state is not None and run_dir is None:
        return (await client.read_start(run)).spec
    where = run_dir or _RUNS_DIR / run
    record = _read_record(where)
    if record is None:
        raise CommandError(
            f"Temporal knows no run named {run!r}, and there is no run.json in {where}; name the run's directory with "
            "--run-dir, or its run file with --file"
        )
    return record.spec.model_copy(
        update={"run": record.spec.run.model_copy(update={"output_dir": str(where.resolve().parent)})}
    )


def _place(spec: RunSpec, run_dir: Path | None) -> RunSpec:
    """The same with the run's directory where it is now."""
    if run_dir is None:
        return spec
    return spec.model_copy(update={"run": spec.run.model_copy(update={"output_dir": str(run_dir.resolve().parent)})})
