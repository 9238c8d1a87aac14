"""A session on a terminal: its turns as a tree, then every token in its colour."""

from __future__ import annotations

import math
from datetime import datetime
from itertools import groupby

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.rule import Rule
from rich.style import Style
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from everroll.sessions.reading import SessionListing
from everroll.sessions.view import SessionView, TokenKind, TokenView, TurnView

_STYLES = {
    TokenKind.TEMPLATE: Style(dim=True),
    TokenKind.PROMPT: Style(color="cyan"),
    TokenKind.SAMPLED: Style(color="green", bold=True),
}
_PROBABILITY_COLOURS = ((0.9, "green"), (0.5, "yellow"), (0.1, "dark_orange"), (0.0, "red"))
"""Sampled tokens under `--logprobs`: at least so probable, this colour."""
_ESCAPES = {"\n": "⏎\n", "\t": "⇥\t", "\r": "␍"}


def print_session(console: Console, view: SessionView, show_logprobs: bool) -> None:
    """The whole session."""
    console.print(_describe(view), highlight=False)
    console.print()
    console.print(_build_tree(view))
    console.print()
    console.print(_build_legend(show_logprobs))
    for depth, turn in _walk(view, None, 0):
        console.print(Rule(_title(turn), align="left", style="dim"))
        console.print(Padding(render_tokens(turn, show_logprobs), (0, 0, 1, 2 * depth)))


def render_tokens(turn: TurnView, show_logprobs: bool) -> RenderableType:
    """A turn's tokens as running text; weight versions stand where they change."""
    runs: list[tuple[str, str | Style]] = []
    version: int | None = None
    for token in turn.tokens:
        if token.weight_version is not None and token.weight_version != version:
            if version is not None:
                runs.append((f"[weights {token.weight_version}]", "reverse magenta"))
            version = token.weight_version
        style = _style_of(token, show_logprobs)
        shown = _show(token.text)
        if show_logprobs and token.logprob is not None:
            runs.append((shown.removesuffix("\n"), style))
            runs.append((f"({token.logprob:.2f})", Style(color=style.color, dim=True)))
            shown = "\n" if shown.endswith("\n") else ""
        runs.append((shown, style))
    text = Text()
    for run_style, group in groupby(runs, key=lambda run: run[1]):
        text.append("".join(piece for piece, _ in group), style=run_style)
    text.append(f" [{turn.finish_reason}]", style="reverse" if turn.finish_reason == "stop" else "reverse yellow")
    if turn.note:
        return Group(Text(turn.note, style="yellow"), text)
    return text


def render_listing(sessions: list[SessionListing]) -> RenderableType:
    """A table of sessions."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in ("session", "turns", "created", "released"):
        table.add_column(name, justify="right" if name == "turns" else "left")
    for session in sessions:
        released = "no" if session.released_at is None else _time(session.released_at)
        table.add_row(Text(session.session_id), str(session.num_turns), _time(session.created_at), released)
    return table


def _walk(view: SessionView, parent: int | None, depth: int) -> list[tuple[int, TurnView]]:
    """Turns in the order of the tree: a branch is told to its end; only branches are indented."""
    found: list[tuple[int, TurnView]] = []
    pending = [(depth, turn) for turn in reversed(view.children(parent))]
    while pending:
        level, turn = pending.pop()
        found.append((level, turn))
        children = view.children(turn.index)
        below = level + (1 if len(children) > 1 else 0)
        pending += [(below, child) for child in reversed(children)]
    return found


def _build_tree(view: SessionView) -> RenderableType:
    tree = Tree(Text("turns", style="bold"), guide_style="dim")
    nodes: dict[int | None, Tree] = {None: tree}
    for turn in view.turns:
        nodes[turn.index] = nodes[turn.parent].add(Text(_title(turn), style="" if turn.live else "dim strike"))
    return tree


def _title(turn: TurnView) -> str:
    added = len(turn.tokens) - turn.num_sampled
    parts = [f"turn {turn.index}", f"{added} + {turn.num_sampled} sampled tokens", _describe_versions(turn)]
    parts.append(turn.finish_reason)
    if turn.follows is not None and turn.parent is None:
        parts.append(f"rendered again after turn {turn.follows}")
    if not turn.live:
        parts.append("of an earlier attempt, not trained")
    return " · ".join(parts)


def _describe_versions(turn: TurnView) -> str:
    return f"weights {' then '.join(map(str, turn.weight_versions))}"


def _describe(view: SessionView) -> str:
    sampling = view.sampling
    released = "open" if view.released_at is None else f"released {_time(view.released_at)}"
    sampled = sum(turn.num_sampled for turn in view.turns)
    text = (
        f"session {view.session_id}: {len(view.turns)} turns, {sampled} sampled tokens, "
        f"temperature {sampling.temperature:g}, top_p {sampling.top_p:g}, created {_time(view.created_at)}, {released}"
    )
    return text if view.has_text else f"{text}\nno tokenizer at hand: tokens are shown by id; name one with --model"


def _build_legend(show_logprobs: bool) -> Text:
    legend = Text("legend  ")
    for kind, style in _STYLES.items():
        if not (show_logprobs and kind is TokenKind.SAMPLED):
            legend.append(kind.value, style=style).append("  ")
    if show_logprobs:
        legend.append("sampled with probability ")
        for limit, colour in _PROBABILITY_COLOURS:
            legend.append(f">= {limit:g}" if limit else "below", style=Style(color=colour, bold=True)).append("  ")
    return legend


def _style_of(token: TokenView, show_logprobs: bool) -> Style:
    if not show_logprobs or token.logprob is None:
        return _STYLES[token.kind]
    probability = math.exp(token.logprob)
    colour = next(colour for limit, colour in _PROBABILITY_COLOURS if probability >= limit)
    return Style(color=colour, bold=True)


def _show(text: str) -> str:
    """Control characters made visible, so that a token can neither hide nor steer the terminal."""
    return "".join(_ESCAPES.get(c, c if c.isprintable() else f"\\x{ord(c):02x}") for c in text)


def _time(seconds: float) -> str:
    return f"{datetime.fromtimestamp(seconds).astimezone():%Y-%m-%d %H:%M:%S}"
