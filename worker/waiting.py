"""A worker that starts beside the servers it works with takes no task before they serve."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence

import httpx

logger = logging.getLogger("worker")
_ASK_SECONDS = 5.0
_POLL_SECONDS = 0.1
_TELL_SECONDS = 30.0


async def wait_for_servers(urls: Sequence[str], seconds: float) -> None:
    """Return when GET of each URL has answered 200.

    Raises:
        ConnectionError: after so many seconds one has not; it says which, and what came instead.
    """
    started = time.monotonic()
    async with httpx.AsyncClient(timeout=_ASK_SECONDS, trust_env=False) as client:
        for url in urls:
            told = time.monotonic()
            while (trouble := await _find_trouble(client, url)) is not None:
                if time.monotonic() - started > seconds:
                    raise ConnectionError(f"waited {seconds:g} s for {url} (EVERROLL_WAIT_FOR): {trouble}")
                if time.monotonic() - told > _TELL_SECONDS:
                    told = time.monotonic()
                    logger.info("waiting for %s: %s", url, trouble)
                await asyncio.sleep(_POLL_SECONDS)


async def _find_trouble(client: httpx.AsyncClient, url: str) -> str | None:
    try:
        async with asyncio.timeout(_ASK_SECONDS):
            status = (await client.get(url)).status_code
    except (httpx.TransportError, TimeoutError) as error:
        return f"{type(error).__name__}: {error}"
    return None if status == 200 else f"it answers {status}"
