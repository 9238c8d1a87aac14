"""Commands that steer a run: stop, pause, resume, cancel."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from everroll.cli.options import Address, Namespace, RunName, StackDir, find_target

if TYPE_CHECKING:
    from everroll.client import EverrollClient

_STACK_DIR = Path(".everroll")
Reason = Annotated[str, typer.Option(help="Why; shown in status and web UI.")]


def stop(run: RunName, address: Address = None, namespace: Namespace = None, directory: StackDir = _STACK_DIR) -> None:
    """Ask a run to stop after the step it is in."""
    text = f"run {run} will stop after the step it is in; follow it with: everroll watch {run}"
    _steer(directory, address, namespace, lambda client: client.stop(run), text)


def pause(
    run: RunName,
    reason: Reason = "",
    address: Address = None,
    namespace: Namespace = None,
    directory: StackDir = _STACK_DIR,
) -> None:
    """Start nothing new in a run until it is resumed; what is under way goes on."""
    text = f"run {run} is paused; it goes on with: everroll resume {run}"
    _steer(directory, address, namespace, lambda client: client.pause(run, reason), text)


def resume(
    run: RunName,
    reason: Reason = "",
    address: Address = None,
    namespace: Namespace = None,
    directory: StackDir = _STACK_DIR,
) -> None:
    """Go on with a paused run, whoever paused it."""
    _steer(directory, address, namespace, lambda client: client.resume(run, reason), f"run {run} goes on")


def cancel(
    run: RunName, address: Address = None, namespace: Namespace = None, directory: StackDir = _STACK_DIR
) -> None:
    """Cancel a run at once, with all that is under way in it."""
    _steer(directory, address, namespace, lambda client: client.cancel(run), f"run {run} is being cancelled")


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
