"""A long prompt is built beside the event loop: other sessions go on meanwhile."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest

from everroll.tokens.renderer import Message, Tool, load_renderer
from tests.session_helpers import USER, model_section, run_fake_engine, run_stack, write_model_dir


async def test_a_long_prompt_holds_nobody_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model_dir = write_model_dir(tmp_path / "model")
    renderer = load_renderer(model_section(model_dir))
    render, go_on = renderer.render, threading.Event()

    def render_slowly(messages: list[Message], tools: list[Tool] | None) -> list[int]:
        if len(messages[0]["content"]) > 10_000:
            assert go_on.wait(20)
        return render(messages, tools)

    monkeypatch.setattr(renderer, "render", render_slowly)
    async with (
        run_fake_engine("one", "two") as engine,
        run_stack(renderer, model_dir, tmp_path / "journal.db", [engine]) as stack,
    ):
        long, short = await stack.open("long"), await stack.open("short")
        waiting = asyncio.create_task(stack.chat(long, {"role": "user", "content": "word " * 4000}))
        assert (await stack.chat(short, USER))["content"] == "one"
        assert not waiting.done()
        go_on.set()
        assert (await waiting)["content"] == "two"
