"""Paths to handlers, and what the server's start does not load."""

from __future__ import annotations

import subprocess
import sys

import pytest

from everroll.sessions.routing import compile_path


@pytest.mark.parametrize(
    ("template", "path", "found"),
    [
        ("/sessions/{session_id}", "/sessions/a-1.b", {"session_id": "a-1.b"}),
        ("/sessions/{session_id}", "/sessions/a/b", None),
        ("/sessions/{session_id}", "/sessions/a\n", {"session_id": "a\n"}),
        ("/sessions/{session_id}", "/sessions/", None),
        ("/s/{session_id}/v1/models/{model:path}", "/s/x/v1/models/org/name", {"session_id": "x", "model": "org/name"}),
        ("/health", "/health", {}),
        ("/health", "/health/", None),
        ("/a.b", "/aXb", None),
    ],
)
def test_paths(template: str, path: str, found: dict[str, str] | None) -> None:
    match = compile_path(template).match(path)
    assert (match.groupdict() if match else None) == found


def test_the_server_starts_without_the_openai_client_which_stays_itself() -> None:
    code = (
        "import sys, everroll.sessions.server; assert 'openai' not in sys.modules; "
        "import openai; assert openai.AsyncOpenAI.__module__.startswith('openai')"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
