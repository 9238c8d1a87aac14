"""Commands about the local stack: up, down."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from everroll.cli.errors import FAILED, CommandError
from everroll.cli.options import Overrides, StackDir, load_spec

if TYPE_CHECKING:
    from everroll.local.plan import StackOptions
    from everroll.local.state import StackAddresses, StackDirectory

_STACK_DIR = Path(".everroll")


def up(
    file: Annotated[Path | None, typer.Argument(metavar="FILE", help="Run file that names the model.")] = None,
    overrides: Overrides = None,
    detach: Annotated[bool, typer.Option("--detach", help="Return when the stack is up; it goes on running.")] = False,
    engine_url: Annotated[
        list[str] | None, typer.Option(metavar="URL", help="Use this engine; none is started here. May be repeated.")
    ] = None,
    trainer_processes: Annotated[
        int, typer.Option(min=1, metavar="N", help="Train with so many processes (docs/trainer-operations.md).")
    ] = 1,
    directory: StackDir = _STACK_DIR,
) -> None:
    """Start the local stack: Temporal with its web UI, session server, engine and workers.

    Without FILE there is no model, and neither a session server nor an engine is started.
    """
    from everroll.local.control import start_detached
    from everroll.local.state import StackDirectory, StackError

    stack_directory = StackDirectory(directory)
    try:
        if detach:
            print(start_detached(stack_directory, _arguments(file, overrides, engine_url, trainer_processes)))
        else:
            options = _build_options(stack_directory, file, overrides, engine_url, trainer_processes)
            _run_foreground(stack_directory, options)
    except StackError as error:
        raise CommandError(str(error), FAILED) from error


def down(directory: StackDir = _STACK_DIR) -> None:
    """Stop the local stack and wait until none of its processes is left."""
    from everroll.local.control import stop_stack
    from everroll.local.state import StackDirectory, StackError

    try:
        stopped = stop_stack(StackDirectory(directory))
    except StackError as error:
        raise CommandError(str(error), FAILED) from error
    print("the stack is down" if stopped else f"no stack runs in {directory}")


def report_with_time(text: str) -> None:
    """Print a line of news about the stack."""
    print(f"{datetime.now().astimezone():%H:%M:%S}  {text}", flush=True)


def _build_options(
    directory: StackDirectory,
    file: Path | None,
    overrides: list[str] | None,
    engine_url: list[str] | None,
    trainer_processes: int,
) -> StackOptions:
    from everroll.local.plan import StackOptions, wanted_ports
    from everroll.local.root import find_root
    from everroll.local.temporal_binary import find_temporal

    if file is None:
        return StackOptions(
            directory.root, find_root(), find_temporal(), Path.cwd(), trainer_processes=trainer_processes
        )
    spec = load_spec(file, overrides, directory.root)
    return StackOptions(
        directory=directory.root,
        root=find_root(),
        temporal=find_temporal(),
        import_path=Path.cwd(),
        model=spec.model,
        engine_urls=tuple(engine_url or ()),
        task_queue=spec.services.task_queue,
        trainer_processes=trainer_processes,
        ports=wanted_ports(spec.services),
    )


def _run_foreground(directory: StackDirectory, options: StackOptions) -> None:
    import asyncio

    from everroll.local.signals import InterruptedBySignalError, run_interruptibly
    from everroll.local.start import hold_stack

    async def serve() -> None:
        async with hold_stack(directory, options, report_with_time) as stack:
            _print_addresses(stack.addresses, directory)
            await stack.watch()

    try:
        asyncio.run(run_interruptibly(serve()))
    except InterruptedBySignalError:
        report_with_time("the stack is down")


def _print_addresses(addresses: StackAddresses, directory: StackDirectory) -> None:
    """What a person needs to use the stack."""
    print()
    print(f"The stack is up.    web UI {addresses.ui_url}    logs {directory.logs}")
    if addresses.session_url is None:
        print("It has no model, hence no session server and no engine; name a run file to start them.")
    print("Start a run with: everroll run FILE. Stop the stack with Ctrl-C, or: everroll down", flush=True)


def _arguments(
    file: Path | None, overrides: list[str] | None, engine_url: list[str] | None, trainer_processes: int
) -> list[str]:
    """The command line of the same `up` in the foreground."""
    settings = [part for text in overrides or [] for part in ("--set", text)]
    engines = [part for url in engine_url or [] for part in ("--engine-url", url)]
    return [*([str(file)] if file else []), *settings, *engines, "--trainer-processes", str(trainer_processes)]
