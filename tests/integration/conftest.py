"""A session server over a stand-in engine, for all tests that speak to one. Files with other wishes have their own."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from everroll.tokens.renderer import ChatRenderer, load_renderer
from tests.session_helpers import FakeEngine, Stack, model_section, run_fake_engine, run_stack, write_model_dir


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tokenizer and configuration; nobody writes there."""
    return write_model_dir(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def renderer(model_dir: Path) -> ChatRenderer:
    return load_renderer(model_section(model_dir))


@pytest.fixture
async def engine() -> AsyncIterator[FakeEngine]:
    async with run_fake_engine("one", "two", "three", "four") as engine:
        yield engine


@pytest.fixture
async def stack(engine: FakeEngine, renderer: ChatRenderer, model_dir: Path, tmp_path: Path) -> AsyncIterator[Stack]:
    async with run_stack(renderer, model_dir, tmp_path / "journal.db", [engine]) as stack:
        yield stack
