"""Entry point of `everroll`."""

from __future__ import annotations

import os
import sys

import typer

from everroll.cli import (
    audit,
    demo,
    evaluation,
    processes,
    reference,
    resuming,
    runs,
    session_sweep,
    sessions,
    stack,
    steering,
)
from everroll.cli.errors import FAILED, CommandError

app = typer.Typer(
    name="everroll",
    help="Durable rollouts for reinforcement learning of LLM agents, on Temporal.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.command("run")(runs.run)
app.command("start")(runs.start)
app.command("status")(runs.status)
app.command("watch")(runs.watch)
app.command("stop")(steering.stop)
app.command("pause")(steering.pause)
app.command("resume")(resuming.resume)
app.command("set")(steering.set_values)
app.command("skip")(steering.skip)
app.command("fork")(resuming.fork)
app.command("cancel")(steering.cancel)
app.command("eval")(evaluation.evaluate)
app.command("list")(runs.list_runs)
app.command("audit")(audit.audit)
sessions.app.command("sweep")(session_sweep.sweep)
app.add_typer(sessions.app)
app.command("spec")(runs.spec)
app.command("up")(stack.up)
app.command("down")(stack.down)
app.command("demo")(demo.demo)
app.command("engine", context_settings=processes.PASS_ARGUMENTS)(processes.engine)
app.command("simulated-engine", context_settings=processes.PASS_ARGUMENTS)(processes.simulated_engine)
app.command("session-server", context_settings=processes.PASS_ARGUMENTS)(processes.session_server)
app.command("run-file-reference", hidden=True)(reference.run_file_reference)


def main() -> None:
    """Run the command line and end the process."""
    code = run_command_line()
    if "temporalio" in sys.modules:
        # The SDK's core now and then aborts an interpreter that shuts down in the ordinary way.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def run_command_line() -> int:
    """Run the command that the arguments name; returns its exit code, whose reason has been printed."""
    try:
        app()
    except CommandError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    except SystemExit as error:
        return error.code if isinstance(error.code, int) else FAILED if error.code else 0
    return 0
