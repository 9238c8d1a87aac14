"""Settings of the embedded engine, before any model is loaded."""

from __future__ import annotations

import subprocess
import sys

import pytest
from pydantic import ValidationError

from everroll.engines.embedded.server import (
    API_KEY_VARIABLE,
    EngineConfigurationError,
    EngineSettings,
    open_listener,
    read_api_key,
)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.1.2.3", "engine.example"])
def test_a_public_bind_needs_a_key(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = EngineSettings(model_path="model", host=host)
    monkeypatch.delenv(API_KEY_VARIABLE, raising=False)
    with pytest.raises(EngineConfigurationError, match=API_KEY_VARIABLE):
        read_api_key(settings)
    monkeypatch.setenv(API_KEY_VARIABLE, "secret")
    assert read_api_key(settings) == "secret"


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1", "127.1.2.3"])
def test_loopback_needs_none(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(API_KEY_VARIABLE, raising=False)
    assert read_api_key(EngineSettings(model_path="model", host=host)) is None


def test_a_taken_port_is_named() -> None:
    with open_listener(EngineSettings(model_path="model", port=0)) as first:
        first.listen()
        port = first.getsockname()[1]
        with pytest.raises(EngineConfigurationError, match=f"cannot listen on 127.0.0.1:{port}"):
            open_listener(EngineSettings(model_path="model", port=port))


def test_unknown_settings_are_refused() -> None:
    with pytest.raises(ValidationError, match="max_batch"):
        EngineSettings.model_validate({"model_path": "model", "max_batch": 3})


@pytest.mark.parametrize(
    ("module", "heavy"),
    [
        ("everroll.engines.embedded.server", ["torch", "transformers", "uvicorn", "starlette", "aiohttp"]),
        ("everroll.engines.base", ["torch", "aiohttp", "httpx", "starlette"]),
        ("everroll.engines.open", ["torch", "starlette", "uvicorn"]),
    ],
)
def test_importing_loads_nothing_heavy(module: str, heavy: list[str]) -> None:
    code = f"import sys, {module}; print([name for name in {heavy!r} if name in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert result.stdout.strip() == "[]"
