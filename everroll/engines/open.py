"""Engine clients by kind. A new kind of engine is a module beside `sglang` and a line here."""

from __future__ import annotations

from typing import Literal

import aiohttp

from everroll.engines.base import Engine
from everroll.engines.http import EngineTimeouts
from everroll.engines.sglang import SGLangEngine

EngineKind = Literal["sglang"]
"""`sglang` is also what the embedded engine speaks."""


def open_engine(
    kind: EngineKind,
    base_url: str,
    session: aiohttp.ClientSession,
    *,
    timeouts: EngineTimeouts | None = None,
    api_key: str | None = None,
) -> Engine:
    """A client of the engine at `base_url`. The session stays the caller's."""
    match kind:
        case "sglang":
            return SGLangEngine(base_url, session, timeouts=timeouts, api_key=api_key)
