"""`everroll session`: look at recorded conversations, straight from the session server's journal."""

from __future__ import annotations

import json as json_module
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from everroll.cli.audit import Journal, default_journal
from everroll.cli.errors import BAD_INPUT, CommandError
from everroll.cli.options import StackDir

if TYPE_CHECKING:
    from everroll.sessions.reading import JournalReader
    from everroll.sessions.view import Decode

_T = TypeVar("_T")
_STACK_DIR = Path(".everroll")

app = typer.Typer(name="session", help="Look at recorded sessions.", no_args_is_help=True, rich_markup_mode=None)


@app.command("show")
def show(
    session_id: Annotated[
        str, typer.Argument(metavar="ID", help="Session: <run>-<group>-<member>-<attempt>; see everroll session list.")
    ],
    logprobs: Annotated[bool, typer.Option("--logprobs", help="Colour by probability, and print each one.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    html: Annotated[Path | None, typer.Option("--html", metavar="FILE", help="Write one self-contained page.")] = None,
    model: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Checkpoint whose tokenizer is used.  [default: what the run has kept]"),
    ] = None,
    journal: Journal = None,
    directory: StackDir = _STACK_DIR,
) -> None:
    """Print a conversation token by token: turns and branches, what was sampled, how, and by which weights."""
    from rich.console import Console

    from everroll.cli.session_page import render_page
    from everroll.cli.session_text import print_session
    from everroll.sessions.view import build_view

    where = journal or default_journal(directory)
    session = _read(where, lambda reader: reader.read_session(session_id))
    if session is None:
        raise CommandError(f"the journal holds no session {session_id!r}; everroll session list shows some", BAD_INPUT)
    view = build_view(session, _find_decode(model, directory, session_id))
    if html is not None:
        try:
            html.write_text(render_page(view), encoding="utf-8")
        except OSError as error:
            raise CommandError(f"{html} cannot be written: {error}", BAD_INPUT) from error
        print(f"wrote {html}")
    elif json:
        print(view.model_dump_json(indent=2))
    else:
        print_session(Console(highlight=False), view, logprobs)


@app.command("list")
def list_sessions(
    run: Annotated[str | None, typer.Option(metavar="RUN", help="Only sessions of this run.")] = None,
    limit: Annotated[int, typer.Option(min=1, help="Most sessions that are listed.")] = 50,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON array.")] = False,
    journal: Journal = None,
    directory: StackDir = _STACK_DIR,
) -> None:
    """List recorded sessions, newest first."""
    import dataclasses

    from rich.console import Console

    from everroll.cli.session_text import render_listing

    where = journal or default_journal(directory)
    sessions = _read(where, lambda reader: reader.list_sessions(f"{run}-" if run else "", limit))
    if json:
        print(json_module.dumps([dataclasses.asdict(session) for session in sessions], indent=2))
    elif sessions:
        Console(highlight=False).print(render_listing(sessions))
    else:
        print(f"the journal holds no session of run {run}" if run else "the journal holds no session")


def _read(where: str, body: Callable[[JournalReader], Awaitable[_T]]) -> _T:
    """Open the journal, read, close.

    Raises:
        CommandError: it cannot be read.
    """
    import asyncio

    from everroll.sessions.reading import JournalReadError, open_journal_reader

    async def read() -> _T:
        reader = open_journal_reader(where)
        try:
            return await body(reader)
        finally:
            await reader.close()

    try:
        return asyncio.run(read())
    except JournalReadError as error:
        raise CommandError(f"{error}; name the session server's journal with --journal", BAD_INPUT) from error


def _find_decode(model: Path | None, directory: Path, session_id: str) -> Decode | None:
    """The tokenizer as told, else the one that the run keeps beside its checkpoints; None if there is none.

    Raises:
        CommandError: none in the directory that was named.
    """
    from everroll.failures import ConfigurationError
    from everroll.tokens.tokenizer import load_fast_tokenizer

    run = session_id.rsplit("-", 3)[0]
    place = model or directory / "runs" / run / "model_files"
    try:
        tokenizer = load_fast_tokenizer(place, str(place))
    except ConfigurationError as error:
        raise CommandError(str(error), BAD_INPUT) from error
    if tokenizer is None:
        if model is not None:
            raise CommandError(f"no tokenizer.json in {model}", BAD_INPUT)
        return None
    return tokenizer.decode
