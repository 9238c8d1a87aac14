"""Which renderer a checkpoint needs, when the run file says `auto`.

The `renderers` package tells a model's chat format by its exact hub name, because checkpoints of one architecture may
come with different templates. A directory has no such name of its own, so two things are tried:

1. Names where tools leave them: the path, the hub's cache layout, `_name_or_path` in the configuration files.
2. The checkpoint's own chat template: the renderer that gives the same token ids for a few probe conversations.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from everroll.failures import ConfigurationError
from everroll.tokens.registry import MODEL_RENDERER_MAP, RENDERER_NAMES, build_package_renderer
from everroll.tokens.tokenizer import FastTokenizer, load_fast_tokenizer, load_json_object

_CALL = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
_TOOL = {
    "type": "function",
    "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object", "properties": {}}},
}
_NOT_TRIED = {"gpt-oss"}
"""Brings a vocabulary of its own, which it would download just to be tried."""
_PROBES: list[tuple[list[dict[str, Any]], list[dict[str, Any]] | None]] = [
    ([{"role": "user", "content": "a"}], None),
    ([{"role": "system", "content": "b"}, {"role": "user", "content": "c"}], None),
    (
        [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": "d"},
            {"role": "user", "content": "e"},
        ],
        None,
    ),
    (
        [
            {"role": "system", "content": "b"},
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": "", "tool_calls": [_CALL]},
            {"role": "tool", "tool_call_id": "call_1", "name": "add", "content": "f"},
        ],
        [_TOOL],
    ),
]


def detect_renderer_name(directory: Path, arguments: dict[str, Any]) -> tuple[str, str | None]:
    """Renderer name, and the hub name if that gave it away.

    Args:
        directory: the checkpoint.
        arguments: of the chat template; the renderer must understand them.

    Raises:
        ConfigurationError: it cannot be told; the text says what to set.
    """
    for name in _candidate_names(directory):
        if name in MODEL_RENDERER_MAP:
            return MODEL_RENDERER_MAP[name], name
    matches = _match_template(directory, arguments)
    if len(matches) == 1:
        return matches[0], None
    found = f"several give what its chat template gives ({', '.join(matches)})" if matches else "no name or template"
    raise ConfigurationError(
        f'model.renderer = "auto": the chat format of {directory} cannot be told, {found} fits. '
        f"Set model.renderer to one of: {', '.join(RENDERER_NAMES)}, default (the checkpoint's own Jinja template)"
    )


def _candidate_names(directory: Path) -> Iterator[str]:
    """Hub names this directory may go by, the most telling first."""
    resolved = directory.resolve()
    for parent in (resolved, *resolved.parents):  # the hub's cache: models--Qwen--Qwen3-0.6B/snapshots/<commit>
        if parent.name.startswith("models--"):
            yield parent.name.removeprefix("models--").replace("--", "/", 1)
    yield "/".join(resolved.parts[-2:])
    for file in ("config.json", "tokenizer_config.json"):
        content = load_json_object(directory / file)
        for key in ("_name_or_path", "name_or_path"):
            if isinstance(name := content.get(key), str):
                yield name


def _match_template(directory: Path, arguments: dict[str, Any]) -> list[str]:
    """Renderers that agree with the checkpoint's chat template on every probe; one named like the model type wins."""
    tokenizer = load_fast_tokenizer(directory, str(directory))
    if tokenizer is None or not tokenizer.chat_template:
        return []
    try:
        wanted = [_render_template(tokenizer, messages, tools, arguments) for messages, tools in _PROBES]
    except (TemplateError, TypeError, ValueError, KeyError):
        return []
    matches = [
        name
        for name in RENDERER_NAMES
        if name not in _NOT_TRIED and _render_probes(tokenizer, name, arguments) == wanted
    ]
    model_type = str(load_json_object(directory / "config.json").get("model_type", ""))
    like_type = [name for name in matches if name.replace("-", "_") == model_type]
    return like_type or matches


def _render_probes(tokenizer: FastTokenizer, name: str, arguments: dict[str, Any]) -> list[list[int]] | None:
    """The probes as a renderer of the package renders them; None when it does not fit this tokenizer."""
    try:
        renderer = build_package_renderer(tokenizer, name, arguments)
    except ConfigurationError:
        return None
    return [renderer.render_ids(messages, tools=tools, add_generation_prompt=True) for messages, tools in _PROBES]


def _render_template(
    tokenizer: FastTokenizer,
    messages: list[dict[str, Any]],
    tools: list[dict[str, Any]] | None,
    arguments: dict[str, Any],
) -> list[int]:
    """A probe as the checkpoint's Jinja template renders it, in the environment that such templates expect."""

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    def to_json(value: Any, indent: int | None = None, **_: Any) -> str:
        return json.dumps(value, ensure_ascii=False, indent=indent)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = to_json
    environment.globals.update(
        raise_exception=raise_exception, strftime_now=lambda form: datetime.now(UTC).strftime(form)
    )
    template = environment.from_string(tokenizer.chat_template)
    text = template.render(
        messages=messages, tools=tools, add_generation_prompt=True, **tokenizer.special_tokens, **arguments
    )
    return tokenizer.encode(text, add_special_tokens=False)
