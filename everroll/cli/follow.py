"""Follow a run until it ends, and print what became of it."""

from __future__ import annotations

import asyncio
import json
import sys
from dataclasses import asdict
from datetime import UTC, datetime

from rich.console import Console

from everroll.cli.display import Display, make_display, render_steps
from everroll.cli.errors import FAILED
from everroll.cli.progress import Progress, describe_indexed, format_time, list_attention, list_evaluations
from everroll.client import EverrollClient, RunListing, RunView
from everroll.open_groups import OpenGroups

_POLL_SECONDS = 1.0
_STEERINGS_SHOWN = 3
_SERVER_AWAY_SECONDS = 120.0
"""How long a Temporal server may be away (it may be restarting) before following gives up."""


async def follow(client: EverrollClient, run: str, ui_url: str | None) -> int:
    """Follow `run` on this terminal; returns the command's exit code.

    Raises:
        RunNotFoundError: no such run.
        ConnectionError: the server was away for two minutes.
    """
    console = Console(highlight=False)
    view = await client.status(run)
    url = view.url(ui_url) if ui_url else None
    print_started(view, ui_url)
    progress = Progress()
    try:
        with make_display(console, url) as display:
            view = await follow_quietly(client, run, progress, display)
    except asyncio.CancelledError:
        if view.state == "running":
            text = f"The run goes on. Follow it with: everroll watch {run}; stop it with: everroll stop {run}"
            console.print(text, soft_wrap=True)
        raise
    console.print(render_steps(progress.ordered_steps))
    for line in list_evaluations(view):
        console.print(line, markup=False, soft_wrap=True)
    print_end(console, view)
    return exit_code_of(view)


async def follow_quietly(client: EverrollClient, run: str, progress: Progress, display: Display) -> RunView:
    """Poll until the run has ended, feeding `progress` and `display`.

    Raises:
        ConnectionError: the server was away for two minutes.
    """
    loop = asyncio.get_running_loop()
    last_answer = loop.time()
    silent = False
    while True:
        try:
            # Without a worker's answer, Temporal tells what is waited for.
            view = await client.status(run, survey=silent)
            silent = view.status is None
        except ConnectionError:
            if loop.time() - last_answer > _SERVER_AWAY_SECONDS:
                raise
        else:
            last_answer = loop.time()
            progress.add(last_answer, view)
            display.update(last_answer, progress)
            if view.state != "running":
                return view
        await asyncio.sleep(_POLL_SECONDS)


def exit_code_of(view: RunView) -> int:
    return 0 if view.state in ("running", "completed") else FAILED


def print_started(view: RunView, ui_url: str | None) -> None:
    print(f"run {view.run} started {view.started_at:%Y-%m-%d %H:%M:%S} UTC, workflow {view.workflow_id}")
    if ui_url:
        print(f"web UI {view.url(ui_url)}")


def print_end(console: Console, view: RunView) -> None:
    """How the run ended; a failure is printed from the outermost error to the cause."""
    console.print(f"run {view.run}: {view.state}", markup=False)
    if view.failure:
        console.print(view.failure, markup=False, soft_wrap=True)


def print_status(view: RunView, ui_url: str | None, *, as_json: bool) -> None:
    """Print what `everroll status` shows, for people or as one JSON object."""
    if as_json:
        json.dump(describe_view(view, ui_url), sys.stdout, indent=2)
        print()
        return
    progress = Progress()
    progress.add(0.0, view)
    console = Console(highlight=False)
    console.print(f"run {view.run}: {view.state}, started {view.started_at:%Y-%m-%d %H:%M:%S} UTC")
    line = progress.describe() if view.status else describe_indexed(view)
    if line:
        console.print(line, markup=False, soft_wrap=True)
    for line in list_attention(view):
        console.print(line, markup=False, soft_wrap=True)
    for line in view.open_groups.describe(datetime.now(UTC)) if view.open_groups else []:
        console.print(line, markup=False, soft_wrap=True)
    if view.status and view.status.last_cause:
        console.print(f"last cause: {view.status.last_cause}", markup=False, soft_wrap=True)
    for record in (view.status.steerings if view.status else [])[-_STEERINGS_SHOWN:]:
        console.print(f"{format_time(record.at)} {record.describe()}", markup=False, soft_wrap=True)
    if view.failure:
        console.print(view.failure, markup=False, soft_wrap=True)
    if view.result:
        console.print(f"{view.result.steps} steps, {view.result.trained_groups} groups trained", soft_wrap=True)
    if progress.ordered_steps:
        console.print(render_steps(progress.ordered_steps))
    for line in list_evaluations(view):
        console.print(line, markup=False, soft_wrap=True)
    if ui_url:
        console.print(f"web UI {view.url(ui_url)}", soft_wrap=True)


def describe_view(view: RunView, ui_url: str | None) -> dict[str, object]:
    """The JSON object of `everroll status --json`."""
    return {
        "run": view.run,
        "state": view.state,
        "workflow_id": view.workflow_id,
        "run_id": view.run_id,
        "namespace": view.namespace,
        "url": view.url(ui_url) if ui_url else None,
        "started_at": view.started_at.isoformat(),
        "closed_at": view.closed_at.isoformat() if view.closed_at else None,
        "failure": view.failure,
        "status": view.status.model_dump(mode="json") if view.status else None,
        "status_error": view.status_error,
        "indexed": asdict(view.indexed) if view.indexed else None,
        "result": view.result.model_dump(mode="json") if view.result else None,
        "open_groups": _describe_groups(view.open_groups),
        "survey": view.survey.model_dump(mode="json") if view.survey else None,
    }


def _describe_groups(groups: OpenGroups | None) -> dict[str, object] | None:
    if groups is None:
        return None
    first = [{**asdict(group), "since": group.since.isoformat()} for group in groups.first]
    return {"first": first, "num_more": groups.num_more}


def print_runs(runs: list[RunListing]) -> None:
    if not runs:
        print("no runs")
    for run in runs:
        print(f"{run.started_at:%Y-%m-%d %H:%M:%S}  {run.state:<10}  {run.run}")
