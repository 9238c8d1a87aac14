"""Commands that steer a run that is under way: stop, pause, cancel, set, skip."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from everroll.cli.options import Address, Namespace, RunName, StackDir, find_target, parse_overrides

if TYPE_CHECKING:
    from everroll.client import EverrollClient

_STACK_DIR = Path(".everroll")
Reason = Annotated[str, typer.Option(help="Why; kept with who and when, and shown in status and web UI.")]
Command = Callable[..., None]
Values = Annotated[
    list[str], typer.Argument(metavar="KEY=VALUE...", help="Keys as in the run file, or their last part.")
]


def _build_command(help_text: str, ask: Callable[[EverrollClient, str, str], Awaitable[None]], said: str) -> Command:
    """A command that needs nothing but the run and a reason; `said` is printed once it is accepted."""

    def command(
        run: RunName,
        reason: Reason = "",
        address: Address = None,
        namespace: Namespace = None,
        directory: StackDir = _STACK_DIR,
    ) -> None:
        _steer(directory, address, namespace, lambda client: ask(client, run, reason), said.format(run=run))

    command.__doc__ = help_text
    return command


stop = _build_command(
    "Ask a run to stop after the step it is in.",
    lambda client, run, reason: client.stop(run, reason),
    "run {run} will stop after the step it is in; follow it with: everroll watch {run}",
)
pause = _build_command(
    "Start nothing new in a run until it is resumed; what is under way goes on.",
    lambda client, run, reason: client.pause(run, reason),
    "run {run} is paused; it goes on with: everroll resume {run}",
)
cancel = _build_command(
    "Cancel a run at once, with all that is under way in it.",
    lambda client, run, reason: client.cancel(run, reason),
    "run {run} is being cancelled; it can go on later with: everroll resume {run}",
)


def skip(
    run: RunName,
    group: Annotated[int, typer.Argument(metavar="GROUP", help="Number of the group, as status shows it.")],
    reason: Reason = "",
    address: Address = None,
    namespace: Namespace = None,
    directory: StackDir = _STACK_DIR,
) -> None:
    """Drop a group that plays or waits to be trained; its episodes are cancelled."""
    text = f"group {group} of run {run} is dropped"
    _steer(directory, address, namespace, lambda client: client.skip(run, group, reason), text)


def set_values(
    run: RunName,
    values: Values,
    reason: Reason = "",
    address: Address = None,
    namespace: Namespace = None,
    directory: StackDir = _STACK_DIR,
) -> None:
    """Change settings of a run that is under way: learning_rate, temperature, top_p, top_k, max_tokens, max_staleness,
    max_groups_in_flight, num_steps. A new learning rate counts from the next step, sampling for groups that start from
    now on.
    """
    parsed = parse_values(values)

    async def change(client: EverrollClient) -> None:
        record = await client.set_values(run, parsed, reason)
        for key, item in record.changes.items():
            print(f"{key} = {item.new} (was {item.old})")

    _steer(directory, address, namespace, change, f"run {run} goes by these settings from now on")


def parse_values(texts: list[str]) -> dict[str, Any]:
    """`KEY=VALUE` texts, values written as in TOML.

    Raises:
        CommandError: one has no `=`.
    """
    from everroll.runfile import parse_toml_value

    return {key: parse_toml_value(text) for key, text in parse_overrides(texts).items()}


def _steer(
    directory: Path,
    address: str | None,
    namespace: str | None,
    action: Callable[[EverrollClient], Awaitable[None]],
    text: str,
) -> None:
    from everroll.cli.execution import execute

    async def act(client: EverrollClient) -> int:
        await action(client)
        print(text)
        return 0

    raise typer.Exit(execute(find_target(directory, address, namespace), act))
