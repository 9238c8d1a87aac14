"""The command `demo`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from everroll.cli.errors import FAILED, INTERRUPTED, CommandError


def demo(
    keep: Annotated[bool, typer.Option("--keep", help="Leave the stack up afterwards, until Ctrl-C.")] = False,
    chaos: Annotated[bool, typer.Option("--chaos", help="Kill one process after the other while it trains.")] = False,
    seed: Annotated[int, typer.Option(help="Seed of the model, its data and the run.", min=0)] = 0,
    directory: Annotated[Path, typer.Option("--dir", metavar="DIR", help="Directory for the demos' files.")] = Path(
        ".everroll/demo"
    ),
) -> None:
    """Start everything on this machine and train a small model to use a tool.

    Exit code 0 only if the reward really rose and the audit finds nothing; with --chaos, only if moreover every process
    was killed and came back.
    """
    import asyncio

    from everroll.audit.report import AuditInputError
    from everroll.cli.demo_run import Demo
    from everroll.client import RunFailedError
    from everroll.local.signals import InterruptedBySignalError, run_interruptibly
    from everroll.local.state import StackError

    try:
        code = asyncio.run(run_interruptibly(Demo(directory, seed, keep, chaos).run()))
    except InterruptedBySignalError as error:
        print(f"stopped by {error}; nothing is left running")
        code = INTERRUPTED
    except (StackError, RunFailedError, AuditInputError, ConnectionError) as error:
        raise CommandError(str(error), FAILED) from error
    raise typer.Exit(code)
