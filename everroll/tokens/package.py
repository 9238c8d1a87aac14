"""The `renderers` package, without the OpenAI client that it imports for the sake of one annotation.

That client takes longer to import than all of Everroll, in every process that only wants to render. An `import openai`
after this one gets the real thing.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType


def _import_renderers() -> ModuleType:
    if "renderers" in sys.modules or "openai" in sys.modules:
        return importlib.import_module("renderers")
    stand_in = ModuleType("openai")
    stand_in.AsyncOpenAI = object  # type: ignore[attr-defined]
    sys.modules["openai"] = stand_in
    try:
        return importlib.import_module("renderers")
    finally:
        del sys.modules["openai"]


renderers = _import_renderers()
