"""`everroll eval`, and how evaluations are shown."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from everroll.cli.errors import FAILED, CommandError
from everroll.cli.options import Address, Namespace, RunName, StackDir, find_target

if TYPE_CHECKING:
    from everroll.client import EverrollClient
    from everroll.contracts.evaluation import EvaluateRequest
    from everroll.evaluate import Evaluated

_STACK_DIR = Path(".everroll")


def evaluate(
    run: RunName,
    name: Annotated[str | None, typer.Option(help="Which set of the run file; with --path, the name of it.")] = None,
    version: Annotated[
        int | None, typer.Option(help="Weight version; of a run that goes on, only what is out.  [default: the newest]")
    ] = None,
    path: Annotated[
        list[str] | None, typer.Option(help="Other prompts than the run file's: a file, glob or URL; may be repeated.")
    ] = None,
    episodes: Annotated[int | None, typer.Option(min=1, help="Episodes per prompt.  [default: the run file's]")] = None,
    max_prompts: Annotated[int | None, typer.Option(min=1, help="Only the first so many prompts.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object a set.")] = False,
    address: Address = None,
    namespace: Namespace = None,
    directory: StackDir = _STACK_DIR,
) -> None:
    """Evaluate a run's weights now, and wait for the result. Exit code 1 if there is none.

    The run goes on meanwhile; one that is paused is refused. Once it has ended, the weights are published to its
    engines again first.
    """
    from everroll.cli.execution import execute
    from everroll.evaluate import evaluate_run

    request = _build_request(name, path, episodes, max_prompts)

    async def act(client: EverrollClient) -> int:
        evaluated = await evaluate_run(client, run, request, version, lambda text: print(text, file=sys.stderr))
        _print(evaluated, as_json=json)
        return FAILED if any(record.failure for record in evaluated.records) else 0

    raise typer.Exit(execute(find_target(directory, address, namespace), act))


def _build_request(
    name: str | None, paths: list[str] | None, episodes: int | None, max_prompts: int | None
) -> EvaluateRequest:
    from pydantic import ValidationError

    from everroll.client import name_person
    from everroll.contracts.base import list_faults
    from everroll.contracts.evaluation import EvaluateRequest
    from everroll.runfile import resolve_input

    try:
        return EvaluateRequest(
            name=name,
            path=[resolve_input(path, Path.cwd()) for path in paths] if paths else None,
            episodes_per_prompt=episodes,
            max_prompts=max_prompts,
            by=name_person(),
        )
    except ValidationError as error:
        raise CommandError("; ".join(list_faults(error))) from error


def _print(evaluated: Evaluated, *, as_json: bool) -> None:
    for record in evaluated.records:
        print(record.model_dump_json() if as_json else record.describe(), flush=True)
