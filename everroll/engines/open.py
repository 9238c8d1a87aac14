"""Engine clients by kind. A new kind of engine is a module beside `sglang` and a line here."""

from __future__ import annotations

import aiohttp

from everroll.contracts.spec import EngineKind
from everroll.engines.base import Engine
from everroll.engines.detect import DetectedEngine
from everroll.engines.http import EngineTimeouts
from everroll.engines.sglang import SGLangEngine
from everroll.engines.vllm import VllmEngine


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
        case "auto":
            return DetectedEngine(base_url, session, timeouts=timeouts, api_key=api_key)
        case "sglang":
            return SGLangEngine(base_url, session, timeouts=timeouts, api_key=api_key)
        case "vllm":
            return VllmEngine(base_url, session, timeouts=timeouts, api_key=api_key)
