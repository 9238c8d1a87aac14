"""Which renderer a checkpoint needs, when the run file says `auto`.

The `renderers` package tells a model's chat format by its exact hub name, because checkpoints of one architecture may
come with different templates. A directory has no such name of its own, so it is looked for where tools leave it.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from renderers.base import MODEL_RENDERER_MAP

from everroll.failures import ConfigurationError
from everroll.tokens.tokenizer import load_json_object


def detect_renderer_name(directory: Path) -> tuple[str, str]:
    """Renderer name and the hub name that gave it away.

    Raises:
        ConfigurationError: no known name is found; the text says what to set.
    """
    for name in _candidate_names(directory):
        if name in MODEL_RENDERER_MAP:
            return MODEL_RENDERER_MAP[name], name
    known = ", ".join(sorted(set(MODEL_RENDERER_MAP.values())))
    raise ConfigurationError(
        f'model.renderer = "auto": the chat format of {directory} cannot be told from its name. '
        f"Set model.renderer to one of: {known}, default (the checkpoint's own Jinja template)"
    )


def _candidate_names(directory: Path) -> Iterator[str]:
    """Hub names this directory may go by, the most telling first."""
    yield str(directory)
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
