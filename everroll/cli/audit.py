"""`everroll audit`: prove what a run did from what it left behind."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from everroll.cli.errors import BAD_INPUT, FAILED, CommandError
from everroll.cli.options import Address, Namespace, RunName, StackDir, find_target

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from everroll.audit.report import AuditReport
    from everroll.audit.run import OnProgress, Places
    from everroll.client import EverrollClient

Journal = Annotated[
    str | None,
    typer.Option(
        envvar="EVERROLL_JOURNAL",
        metavar="PATH",
        help="Journal of the session server, by path or URL.  [default: that of the local stack]",
    ),
]
_SHOWN_BREACHES = 20


def audit(
    run: RunName,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    journal: Journal = None,
    store: Annotated[
        str | None, typer.Option(metavar="URL", help="Store of the samples.  [default: as the run was started]")
    ] = None,
    run_dir: Annotated[
        Path | None, typer.Option(metavar="DIR", help="The run's own directory.  [default: as the run was started]")
    ] = None,
    address: Address = None,
    namespace: Namespace = None,
    directory: StackDir = Path(".everroll"),
) -> None:
    """Check a run against Temporal's history, the session journal, the store and the run directory.

    Exit code 0: nothing found. 1: the evidence contradicts itself; the first differing index is named. 2: there is
    nothing to audit, or evidence is missing.
    """
    from rich.console import Console

    from everroll.audit.report import AuditInputError
    from everroll.audit.run import Places
    from everroll.cli.execution import execute

    if journal is None:
        _check_stack(directory)
    places = Places(journal=journal or default_journal(directory), store_url=store, run_dir=run_dir)

    async def check(client: EverrollClient) -> int:
        try:
            report = await audit_with_progress(client, run, places, Console(stderr=True))
        except AuditInputError as error:
            raise CommandError(str(error)) from error
        if json:
            print(report.model_dump_json(indent=2))
        else:
            Console(highlight=False).print(render_report(report))
        return 0 if report.passed else FAILED

    try:
        code = execute(find_target(directory, address, namespace), check)
    except CommandError as error:
        # 1 says that the evidence was seen, and contradicts itself.
        raise CommandError(str(error), BAD_INPUT) from error
    raise typer.Exit(code)


def _check_stack(directory: Path) -> None:
    """
    Raises:
        CommandError: no local stack has been there.
    """
    journal = Path(default_journal(directory)).absolute()
    if not journal.is_file():
        raise CommandError(
            f"no journal at {journal}: no local stack has been in this directory. Go where `everroll up` was started, "
            f"or name its directory with --dir, e.g. --dir ~/work/{directory.name}. Without a local stack name the "
            "session server's journal with --journal, and where the workers' paths are not seen from here, the run's "
            "directory with --run-dir and the store with --store"
        )


def default_journal(directory: Path) -> str:
    """Where the local stack in `directory` keeps its sessions."""
    return str(directory / "sessions.sqlite")


async def audit_with_progress(client: EverrollClient, run: str, places: Places, console: Console) -> AuditReport:
    """Audit while a line on a terminal says how far it has come.

    Raises:
        AuditInputError: no such run, or evidence is missing.
    """
    from everroll.audit.run import audit_run

    if not console.is_terminal:
        return await audit_run(client.temporal, run, places)
    with console.status(f"reading the history of run {run}") as status:
        on_progress: OnProgress = lambda done, total: status.update(f"group {done} of {total}")  # noqa: E731
        return await audit_run(client.temporal, run, places, on_progress)


def render_report(report: AuditReport) -> RenderableType:
    """For people: what was compared, what was found, what could not be told."""
    from rich.console import Group
    from rich.padding import Padding
    from rich.text import Text

    parts: list[RenderableType] = [Text(_describe(report)), Text(), _build_table(report)]
    if report.breaches:
        number = "1 breach:" if report.num_breaches == 1 else f"{report.num_breaches} breaches, the first of them:"
        parts += [Text(), Text(number, style="bold red")]
        parts += [Padding(Text(str(breach)), (0, 0, 0, 2)) for breach in report.breaches[:_SHOWN_BREACHES]]
        hidden = report.num_breaches - min(_SHOWN_BREACHES, len(report.breaches))
        if hidden:
            parts.append(Text(f"  and {hidden} more; --json lists up to {len(report.breaches)}"))
    if report.notes:
        parts += [Text(), *(Text(f"note: {text}") for text in report.notes)]
    verdict = "passed" if report.passed else "FAILED"
    style = "bold green" if report.passed else "bold red"
    parts += [Text(), Text(f"audit {verdict} in {report.seconds:.1f} s", style=style)]
    return Group(*parts)


def _describe(report: AuditReport) -> str:
    fates = ", ".join(f"{count} {fate}" for fate, count in report.fates.items()) or "none"
    executions = f", {report.num_generations} executions" if report.num_generations > 1 else ""
    return (
        f"run {report.run}, {report.state}{executions}: {report.num_steps} steps, "
        f"{report.num_groups} groups ({fates})\n"
        f"{report.num_episodes} trained episodes, {report.num_tokens} tokens, {report.num_sampled_tokens} of them "
        "sampled"
    )


def _build_table(report: AuditReport) -> RenderableType:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("")
    table.add_column("what was checked")
    table.add_column("times", justify="right")
    table.add_column("breaches", justify="right")
    for line in report.checks:
        style = "red" if line.num_breaches else "green"
        breaches = Text(str(line.num_breaches) if line.num_breaches else "none", style=style)
        table.add_row(line.invariant.value, line.what, str(line.num_checked), breaches)
    return table
