"""Options that several commands share, and where their values come from when they are not given."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from everroll.cli.errors import CommandError

if TYPE_CHECKING:
    from everroll.contracts.spec import RunSpec
    from everroll.local.state import StackState

RunFile = Annotated[Path, typer.Argument(metavar="FILE", help="Run file (TOML).")]
RunName = Annotated[str, typer.Argument(metavar="RUN", help="Name of the run.")]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Override a key of the run file, e.g. train.learning_rate=1e-3."),
]
RolloutOnly = Annotated[
    bool, typer.Option("--rollout-only", help="Play and store batches, and train nothing (run.mode = rollout).")
]
TrainFrom = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR",
        help="Train the batches that the run in this directory has stored, and play none (run.mode = train).",
    ),
]
StackDir = Annotated[Path, typer.Option("--dir", metavar="DIR", help="Directory of the local stack.")]
Address = Annotated[
    str | None,
    typer.Option(
        envvar="EVERROLL_TEMPORAL_ADDRESS",
        metavar="HOST:PORT",
        help="Temporal server.  [default: that of the local stack, else 127.0.0.1:7233]",
    ),
]
Namespace = Annotated[
    str | None,
    typer.Option(envvar="EVERROLL_TEMPORAL_NAMESPACE", help="Temporal namespace.  [default: as for the address]"),
]
SkipFileChecks = Annotated[
    bool,
    typer.Option("--no-file-checks", help="Do not look for data and model on this machine; only the workers see them."),
]


@dataclass(frozen=True)
class Target:
    """A Temporal namespace, and the web UI that shows it if one is known."""

    address: str
    namespace: str
    ui_url: str | None = None


def find_target(directory: Path, address: str | None, namespace: str | None) -> Target:
    """Where to look for runs: as told, else the local stack that runs in `directory`, else the usual port."""
    state = read_stack(directory)
    if state is None:
        return Target(address or "127.0.0.1:7233", namespace or "default", os.environ.get("EVERROLL_UI_URL"))
    found = Target(address or state.addresses.temporal_address, namespace or state.addresses.temporal_namespace)
    return with_ui(found, state)


def with_ui(target: Target, state: StackState | None) -> Target:
    """Add the address of the web UI: the stack's for its own server, else what the environment says."""
    own = state is not None and state.addresses.temporal_address == target.address
    ui_url = state.addresses.ui_url if own and state is not None else os.environ.get("EVERROLL_UI_URL")
    return Target(target.address, target.namespace, ui_url)


def read_stack(directory: Path) -> StackState | None:
    """The local stack that runs in `directory`, if one does.

    Raises:
        CommandError: its state file cannot be read.
    """
    from everroll.local.state import StackDirectory, StackError

    try:
        return StackDirectory(directory).read_running_state()
    except StackError as error:
        raise CommandError(str(error)) from error


def load_spec(path: Path, overrides: list[str] | None, directory: Path, *, check_files: bool = True) -> RunSpec:
    """Load a run file; services that it does not set are those of the local stack in `directory`.

    Raises:
        CommandError: with all faults of the file and the overrides.
    """
    from everroll.runfile import RunFileError, load_run_file

    state = read_stack(directory)
    services = state.addresses.service_defaults() if state else None
    try:
        return load_run_file(path, parse_overrides(overrides or []), services=services, check_files=check_files)
    except RunFileError as error:
        raise CommandError(str(error)) from error


def choose_side(overrides: list[str] | None, rollout_only: bool, train_from: Path | None) -> list[str]:
    """Overrides, with those that `--rollout-only` and `--train-from` stand for.

    Raises:
        CommandError: both are given.
    """
    if rollout_only and train_from is not None:
        raise CommandError("--rollout-only and --train-from: give one of them")
    side = ['run.mode="rollout"'] if rollout_only else []
    if train_from is not None:
        side = ['run.mode="train"', f"run.batches_from={json.dumps(str(train_from))}"]
    return [*(overrides or []), *side]


def parse_overrides(texts: list[str]) -> dict[str, str]:
    """`KEY=VALUE` texts as a mapping.

    Raises:
        CommandError: one has no `=`.
    """
    overrides = {}
    for text in texts:
        key, separator, value = text.partition("=")
        if not separator or not key.strip():
            raise CommandError(f"--set {text}: write KEY=VALUE, e.g. --set train.learning_rate=1e-3")
        overrides[key.strip()] = value.strip()
    return overrides
