"""`everroll session show` and `list` over the journal of a real session server: terminal, JSON and page."""

from __future__ import annotations

import asyncio
import html.parser
import io
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from everroll.cli.main import run_command_line
from everroll.cli.session_page import render_page
from everroll.cli.session_text import print_session
from everroll.sessions.reading import open_journal_reader
from everroll.sessions.view import SessionView, TokenKind, build_view
from everroll.tokens.renderer import load_renderer
from everroll.tokens.tokenizer import load_fast_tokenizer
from tests.session_helpers import TOOL_CALL_TEXT, TOOLS, model_section, run_fake_engine, run_stack, write_model_dir

HOSTILE = 'what is <b>1 + 2</b> & "why"? <script>alert(1)</script> \x1b[31mred é 漢'
SESSION = "shown-0-1-0"

Cli = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def stack_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A stack's directory after an episode with a tool call, a branch and new weights on the way."""
    directory = tmp_path_factory.mktemp("stack")
    asyncio.run(record_sessions(directory))
    return directory


async def record_sessions(directory: Path) -> None:
    """Play it."""
    model = write_model_dir(directory / "runs" / "shown" / "model_files")
    renderer = load_renderer(model_section(model))
    replies = (f"Let me compute that.\n{TOOL_CALL_TEXT}", "The sum is 3. <i>Done</i>", "No, it is 4.", "x" * 300, "old")
    async with (
        run_fake_engine(*replies) as engine,
        run_stack(renderer, model, directory / "sessions.sqlite", [engine]) as stack,
    ):
        handle = await stack.open(SESSION, attempt=1)
        first: list[Any] = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": HOSTILE}]
        call = await stack.chat(handle, *first, tools=TOOLS)
        answered = [*first, call, {"role": "tool", "tool_call_id": call["tool_calls"][0]["id"], "content": "3"}]
        engine.weight_version = 4
        reply = await stack.chat(handle, *answered, tools=TOOLS)
        await stack.chat(handle, *answered, reply, {"role": "user", "content": "Sure?"}, tools=TOOLS)
        await stack.chat(handle, *answered, reply, {"role": "user", "content": "Go on."}, tools=TOOLS)
        await stack.client.collect(SESSION, None, {})
        await stack.client.release(SESSION)
        other = await stack.open("other-0-0-0")
        await stack.chat(other, {"role": "user", "content": "hi"})


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], stack_dir: Path) -> Cli:
    def run(*arguments: str, directory: Path = stack_dir) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["everroll", "session", *arguments, "--dir", str(directory)])
        monkeypatch.setenv("COLUMNS", "120")
        code = run_command_line()
        output = capsys.readouterr()
        return code, output.out, output.err

    return run


@pytest.fixture
def view(stack_dir: Path) -> SessionView:
    async def read() -> SessionView:
        reader = open_journal_reader(f"sqlite://{stack_dir}/sessions.sqlite")
        session = await reader.read_session(SESSION)
        await reader.close()
        assert session is not None
        tokenizer = load_fast_tokenizer(stack_dir / "runs" / "shown" / "model_files", "")
        assert tokenizer is not None
        return build_view(session, tokenizer.decode)

    return asyncio.run(read())


def test_json_has_every_token_with_its_kind(cli: Cli) -> None:
    code, output, _ = cli("show", SESSION, "--json")
    assert code == 0
    session = json.loads(output)
    assert [(turn["index"], turn["parent"]) for turn in session["turns"]] == [(0, None), (1, 0), (2, 1), (3, 1)]
    assert [turn["finish_reason"] for turn in session["turns"]] == ["stop", "stop", "stop", "length"]
    assert [turn["weight_versions"] for turn in session["turns"]] == [[3], [4], [4], [4]]
    first = session["turns"][0]["tokens"]
    prompt = "".join(token["text"] for token in first if token["kind"] == "prompt")
    assert prompt == "Be brief." + HOSTILE
    template = "".join(token["text"] for token in first if token["kind"] == "template")
    assert template.startswith("<|im_start|>system\n")
    assert "<|im_start|>user\n" in template
    sampled = [token for token in first if token["kind"] == "sampled"]
    assert "".join(token["text"] for token in sampled) == f"Let me compute that.\n{TOOL_CALL_TEXT}<|im_end|>"
    assert [round(token["logprob"], 4) for token in sampled[:3]] == [-0.1, -0.101, -0.102]
    assert {token["weight_version"] for token in sampled} == {3}
    assert all(token["logprob"] is None for token in first if token["kind"] != "sampled")
    second = session["turns"][1]["tokens"]
    assert "".join(token["text"] for token in second if token["kind"] == "prompt") == "3"


def test_the_terminal_form(cli: Cli) -> None:
    code, output, _ = cli("show", SESSION)
    assert code == 0
    assert output.splitlines()[0].startswith("session shown-0-1-0: 4 turns, ")
    assert "turn 3" in output
    assert "The sum is 3. <i>Done</i><|im_end|>" in output
    assert "\\x1b[31mred é 漢" in output, "what an agent sent cannot steer the terminal"
    assert "\x1b" not in output
    assert "[length]" in output
    assert ", released" in output
    code, output, _ = cli("show", SESSION, "--logprobs")
    assert code == 0
    assert "T(-0.10)h(-0.10)e(-0.10)" in output


def test_colours_tell_the_mask(view: SessionView) -> None:
    def render(logprobs: bool) -> str:
        console = Console(file=io.StringIO(), force_terminal=True, color_system="truecolor", width=400)
        print_session(console, view, logprobs)
        output = console.file
        assert isinstance(output, io.StringIO)
        return output.getvalue()

    plain = render(False)
    assert "\x1b[1;32mThe sum is 3. <i>Done</i><|im_end|>\x1b[0m" in plain
    assert "\x1b[36mSure?\x1b[0m" in plain
    assert "\x1b[2m<|im_start|>assistant" in plain
    assert "\x1b[1;32mT\x1b[0m" in render(True)


def test_weights_that_change_within_a_turn_are_marked(view: SessionView) -> None:
    turn = view.turns[1]
    tokens = [
        token.model_copy(update={"weight_version": 5})
        if token.kind is TokenKind.SAMPLED and token.text == "."
        else token
        for token in turn.tokens
    ]
    changed = view.model_copy(update={"turns": [view.turns[0], turn.model_copy(update={"tokens": tokens})]})
    console = Console(file=io.StringIO(), width=200)
    print_session(console, changed, False)
    output = console.file
    assert isinstance(output, io.StringIO)
    assert "The sum is 3[weights 5].[weights 4] <i>Done</i>" in output.getvalue()
    assert '<span class="v">weights 5</span>' in render_page(changed)


class Page(html.parser.HTMLParser):
    """Collects what a browser would make of the page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tokens: list[dict[str, str | None]] = []
        self.tags: list[str] = []
        self.addresses: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        values = dict(attrs)
        self.addresses += [value or "" for name, value in attrs if name in ("src", "href")]
        if tag == "i" and "data-i" in values:
            self.tokens.append(values)


def test_the_page_is_self_contained_and_escaped(cli: Cli, tmp_path: Path, view: SessionView) -> None:
    path = tmp_path / "session.html"
    code, output, _ = cli("show", SESSION, "--html", str(path))
    assert (code, output) == (0, f"wrote {path}\n")
    page = Page(path.read_text())
    assert page.tags.count("script") == 1
    assert "b" not in page.tags
    assert all(address.startswith("#turn-") for address in page.addresses)
    assert HOSTILE in "".join(token["data-x"] or "" for token in page.tokens)
    tokens = [token for turn in view.turns for token in turn.tokens]
    assert [token["data-i"] for token in page.tokens] == [str(token.id) for token in tokens]
    assert [token["data-x"] for token in page.tokens] == [token.text for token in tokens]
    sampled = [token for token in page.tokens if (token["class"] or "").startswith("s ")]
    assert [float(token["data-l"] or "") for token in sampled] == [t.logprob for t in tokens if t.logprob is not None]


def test_without_a_tokenizer_ids_are_shown(cli: Cli, stack_dir: Path, tmp_path: Path) -> None:
    journal = ("--journal", str(stack_dir / "sessions.sqlite"))
    code, output, _ = cli("show", SESSION, *journal, directory=tmp_path)
    assert code == 0
    assert "name one with --model" in output
    assert "⟨" in output
    code, _, error = cli("show", SESSION, *journal, "--model", str(tmp_path))
    assert (code, error) == (2, f"no tokenizer.json in {tmp_path}\n")


def test_sessions_are_listed(cli: Cli, tmp_path: Path) -> None:
    code, output, _ = cli("list")
    assert code == 0
    assert [line.split()[0] for line in output.splitlines()] == ["session", "other-0-0-0", SESSION]
    code, output, _ = cli("list", "--run", "shown", "--json")
    assert [(one["session_id"], one["num_turns"]) for one in json.loads(output)] == [(SESSION, 4)]
    code, _, error = cli("show", "nobody")
    assert (code, error.startswith("the journal holds no session 'nobody'")) == (2, True)
    code, _, error = cli("list", directory=tmp_path)
    assert code == 2
    assert "no journal at" in error
