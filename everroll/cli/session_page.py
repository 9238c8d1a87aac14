"""A session as one self-contained page: no external resource, all content escaped, details of a token on hover."""

from __future__ import annotations

import math
from datetime import datetime
from html import escape

from everroll.sessions.view import SessionView, TokenKind, TokenView, TurnView

_CLASSES = {TokenKind.TEMPLATE: "t", TokenKind.PROMPT: "p", TokenKind.SAMPLED: "s"}
_SHADES = 10
"""Steps from certain to improbable."""

_STYLE = """
:root { color-scheme: light; --line: #d9dee5; --ink: #1d2430; --soft: #667080; }
* { box-sizing: border-box; }
body { margin: 0; font: 14px/1.5 system-ui, sans-serif; color: var(--ink); background: #f6f7f9; }
header { position: sticky; top: 0; z-index: 2; background: #fff; border-bottom: 1px solid var(--line);
  padding: 10px 24px; }
h1 { font-size: 16px; margin: 0 0 2px; overflow-wrap: anywhere; }
.facts { color: var(--soft); }
.legend { margin-top: 6px; display: flex; flex-wrap: wrap; gap: 6px 16px; align-items: center; }
.ramp span { display: inline-block; width: 14px; height: 14px; vertical-align: -2px; }
#detail { font: 12.5px/1.5 ui-monospace, monospace; min-height: 1.5em; margin-top: 6px; color: var(--soft);
  white-space: pre-wrap; overflow-wrap: anywhere; }
main { max-width: 1040px; margin: 0 auto; padding: 16px 24px 60px; }
.tree { background: #fff; border: 1px solid var(--line); border-radius: 8px; padding: 10px 16px; margin-bottom: 18px; }
.tree ul { list-style: none; margin: 0; padding-left: 20px; border-left: 1px solid var(--line); }
.tree > ul { padding-left: 0; border: 0; }
.tree a { color: #1f5fbf; text-decoration: none; }
.dead, .dead a { color: #98a1ad; text-decoration: line-through; }
section { background: #fff; border: 1px solid var(--line); border-radius: 8px; margin: 0 0 14px;
  scroll-margin-top: 150px; }
section.branch { border-left: 4px solid #b9a3e3; }
section > h2 { font-size: 13px; font-weight: 600; margin: 0; padding: 8px 14px; border-bottom: 1px solid var(--line);
  display: flex; flex-wrap: wrap; gap: 2px 14px; }
h2 span { font-weight: 400; color: var(--soft); }
.note { padding: 6px 14px; background: #fff8e1; color: #7a5b00; border-bottom: 1px solid var(--line); }
.tokens { padding: 10px 14px; font: 13.5px/1.75 ui-monospace, monospace; white-space: pre-wrap; overflow-wrap: anywhere;
  margin: 0; }
i { font-style: normal; border-radius: 2px; }
i:hover { outline: 1.5px solid #1d2430; }
i.t { color: #76808d; }
i.p { color: #1f5fbf; }
i.s { color: #10351f; box-shadow: inset 1px 0 0 rgba(0, 0, 0, .14); }
.v { background: #6b46c1; color: #fff; border-radius: 3px; padding: 0 5px; font-size: 11.5px; margin: 0 2px; }
.end { border: 1px solid var(--line); border-radius: 3px; padding: 0 5px; font-size: 11.5px; color: var(--soft); }
.end.length { background: #fff8e1; color: #7a5b00; }
"""
_SCRIPT = """
const detail = document.getElementById('detail'), idle = detail.textContent;
const names = {t: 'template', p: 'prompt', s: 'sampled'};
document.addEventListener('mouseover', event => {
  const token = event.target.closest('i[data-i]');
  if (!token) { detail.textContent = idle; return; }
  const d = token.dataset, kind = token.className[0];
  let text = names[kind] + '  position ' + d.n + '  id ' + d.i + '  ' + JSON.stringify(d.x || '');
  if (d.l !== undefined)
    text += '  logprob ' + d.l + '  probability ' + Math.exp(+d.l).toPrecision(4) + '  weights ' + d.v;
  detail.textContent = text;
});
"""


def render_page(view: SessionView) -> str:
    """The page's HTML."""
    title = escape(f"session {view.session_id}")
    sections = "".join(_render_turn(view, turn) for turn in view.turns)
    shades = "".join(f".s{shade} {{ background: {_colour(shade)}; }}\n" for shade in range(_SHADES + 1))
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'; "
        "script-src 'unsafe-inline'\">"
        f"<title>{title}</title><style>{_STYLE}{shades}</style></head><body>"
        f"<header><h1>{title}</h1>{_render_facts(view)}{_render_legend()}"
        '<div id="detail">Hover over a token for its id, log-probability and weights.</div></header>'
        f'<main><nav class="tree"><strong>Turns</strong>{_render_tree(view)}</nav>{sections}</main>'
        f"<script>{_SCRIPT}</script></body></html>\n"
    )


def _render_facts(view: SessionView) -> str:
    sampling = view.sampling
    facts = [
        f"{len(view.turns)} turns",
        f"{sum(turn.num_sampled for turn in view.turns)} sampled tokens",
        f"temperature {sampling.temperature:g}, top_p {sampling.top_p:g}, top_k {sampling.top_k}",
        f"seed {view.seed}",
        f"created {_time(view.created_at)}",
        "open" if view.released_at is None else f"released {_time(view.released_at)}",
    ]
    if not view.has_text:
        facts.append("no tokenizer was at hand: tokens are shown by id")
    return f'<div class="facts">{escape(" · ".join(facts))}</div>'


def _render_legend() -> str:
    ramp = "".join(f'<span class="s{shade}"></span>' for shade in range(_SHADES + 1))
    return (
        '<div class="legend"><i class="t">template</i><i class="p">prompt</i>'
        f'<span class="ramp">sampled: certain {ramp} improbable</span></div>'
    )


def _render_tree(view: SessionView) -> str:
    """Nested lists, built without recursion: conversations can be thousands of turns deep. Chains are not indented."""
    parts = ["<ul>"]
    pending: list[TurnView | str] = ["</ul>", *reversed(view.children(None))]
    while pending:
        item = pending.pop()
        if isinstance(item, str):
            parts.append(item)
            continue
        parts.append(_render_node(item))
        children = view.children(item.index)
        if len(children) > 1:
            parts.append("<li><ul>")
            pending.append("</ul></li>")
        pending += reversed(children)
    return "".join(parts)


def _render_node(turn: TurnView) -> str:
    added = len(turn.tokens) - turn.num_sampled
    text = f"{added} + {turn.num_sampled} tokens, weights {_versions(turn)}, {turn.finish_reason}"
    dead = "" if turn.live else ' class="dead"'
    return f'<li{dead}><a href="#turn-{turn.index}">turn {turn.index}</a> {escape(text)}</li>'


def _render_turn(view: SessionView, turn: TurnView) -> str:
    branch = ' class="branch"' if len(view.children(turn.parent)) > 1 else ""
    facts = [
        "begins a sequence" if turn.parent is None else f"extends turn {turn.parent}",
        f"weights {_versions(turn)}",
        f"{len(turn.tokens) - turn.num_sampled} added, {turn.num_sampled} sampled, "
        f"prompt {turn.num_prompt_tokens} ({turn.num_cached_tokens} cached)",
        f"seed {turn.seed}",
        _time(turn.created_at),
    ]
    if not turn.live:
        facts.append("of an earlier attempt, not trained")
    header = "".join(f"<span>{escape(fact)}</span>" for fact in facts)
    note = f'<div class="note">{escape(turn.note)}</div>' if turn.note else ""
    return (
        f'<section id="turn-{turn.index}"{branch}><h2>turn {turn.index} {header}</h2>{note}'
        f'<pre class="tokens">{_render_tokens(turn)}</pre></section>'
    )


def _render_tokens(turn: TurnView) -> str:
    parts = []
    version: int | None = None
    first = turn.num_prompt_tokens - (len(turn.tokens) - turn.num_sampled)
    for position, token in enumerate(turn.tokens, start=first):
        if token.weight_version is not None and token.weight_version != version:
            version = token.weight_version
            parts.append(f'<span class="v">weights {version}</span>')
        parts.append(_render_token(token, position))
    ending = "end" if turn.finish_reason == "stop" else "end length"
    parts.append(f' <span class="{ending}">{escape(turn.finish_reason)}</span>')
    return "".join(parts)


def _render_token(token: TokenView, position: int) -> str:
    kind = _CLASSES[token.kind]
    data = f'data-n="{position}" data-i="{token.id}" data-x="{escape(token.text)}"'
    if token.logprob is not None:
        kind += f" s{_shade(token.logprob)}"
        data += f' data-l="{token.logprob!r}" data-v="{token.weight_version}"'
    shown = escape(token.text).replace("\n", "↵\n") if token.text else "·"
    return f'<i class="{kind}" {data}>{shown}</i>'


def _shade(logprob: float) -> int:
    """0 for a certain token, 10 for one of a thousandth and below."""
    return min(_SHADES, round(-logprob / math.log(1000) * _SHADES))


def _colour(shade: int) -> str:
    """From green over yellow to red."""
    return f"hsl({round(135 - 135 * shade / _SHADES)} 70% {round(88 - 8 * shade / _SHADES)}%)"


def _versions(turn: TurnView) -> str:
    return " then ".join(map(str, turn.weight_versions))


def _time(seconds: float) -> str:
    return f"{datetime.fromtimestamp(seconds).astimezone():%Y-%m-%d %H:%M:%S}"
