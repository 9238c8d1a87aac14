"""`everroll session sweep`: release and delete, by hand, what a session server would in time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from everroll.cli.errors import FAILED, CommandError

if TYPE_CHECKING:
    from everroll.sessions.client import Swept

_READ_SECONDS = 600.0


def sweep(
    url: Annotated[
        str, typer.Option(envvar="EVERROLL_SESSION_URL", metavar="URL", help="Address of the session server.")
    ] = "http://127.0.0.1:8810",
    run: Annotated[
        str | None, typer.Option(metavar="RUN", help="Say first that this run has ended; its retention begins.")
    ] = None,
    idle_hours: Annotated[
        float | None,
        typer.Option(min=0, metavar="H", help="Release what went unused for so long.  [default: the server's limit]"),
    ] = None,
) -> None:
    """Release sessions that nobody uses any more, and delete those whose retention has passed.

    The admin key is taken from EVERROLL_ADMIN_KEY.
    """
    import asyncio

    import httpx

    from everroll.failures import ServerStatusError

    try:
        swept = asyncio.run(_sweep(url, run, None if idle_hours is None else idle_hours * 3600))
    except (httpx.HTTPError, httpx.InvalidURL, ServerStatusError) as error:
        raise CommandError(f"session server {url}: {error}", FAILED) from error
    print(f"released {swept.num_released} sessions, deleted {swept.num_deleted} whose retention has passed")


async def _sweep(url: str, run: str | None, idle_seconds: float | None) -> Swept:
    from everroll.http_client import build_http_client
    from everroll.sessions.client import SessionClient
    from everroll.sessions.keys import load_admin_key

    async with build_http_client(read_seconds=_READ_SECONDS) as http:
        client = SessionClient(http, url, load_admin_key())
        if run is not None:
            await client.end_run(run)
        return await client.sweep(idle_seconds)
