"""Commands that run one server: engine, simulated-engine, session-server."""

from __future__ import annotations

import typer

PASS_ARGUMENTS = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
"""Typer leaves all arguments, `--help` too, to these commands: their options come from the settings models."""


def engine(context: typer.Context) -> None:
    """Run the embedded inference engine, which speaks SGLang's wire (--help for its options)."""
    from everroll.cli.server_process import ServerProcess

    ServerProcess(
        name="engine",
        module="everroll.engines.embedded.server",
        settings="EngineSettings",
        extra="engine",
        help="Run the embedded inference engine, which speaks SGLang's wire.",
        start_errors=(
            "everroll.engines.embedded.server:EngineConfigurationError",
            "everroll.engines.embedded.model:UnsupportedModelError",
        ),
    ).run(context.args)


def simulated_engine(context: typer.Context) -> None:
    """Run a simulated engine of given latencies, to size a deployment without GPUs (--help for its options)."""
    from everroll.cli.server_process import ServerProcess

    ServerProcess(
        name="simulated-engine",
        module="everroll.simulation.server",
        settings="SimulatedEngineSettings",
        extra="sessions",
        help="Run a simulated engine of given latencies, which speaks SGLang's wire.",
        start_errors=("everroll.failures:ConfigurationError",),
    ).run(context.args)


def session_server(context: typer.Context) -> None:
    """Run the session server (--help for its options)."""
    from everroll.cli.server_process import ServerProcess

    ServerProcess(
        name="session-server",
        module="everroll.sessions.server",
        settings="SessionServerSettings",
        extra="sessions",
        help="Run the session server.",
        start_errors=("everroll.failures:ConfigurationError", "everroll.sessions.errors:JournalError"),
    ).run(context.args)
