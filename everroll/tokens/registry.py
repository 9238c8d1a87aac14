"""Renderers of the `renderers` package, by name."""

from __future__ import annotations

from typing import Any

from pydantic import TypeAdapter, ValidationError

from everroll.contracts.base import list_faults
from everroll.failures import ConfigurationError
from everroll.tokens.package import renderers

MODEL_RENDERER_MAP: dict[str, str] = renderers.base.MODEL_RENDERER_MAP
"""Names of models on the hub to chat formats."""

RENDERER_NAMES = tuple(sorted(set(MODEL_RENDERER_MAP.values())))
"""Chat formats that the package knows by heart."""

_CONFIG: TypeAdapter[Any] = TypeAdapter(renderers.RendererConfig)


def build_package_renderer(tokenizer: Any, name: str, arguments: dict[str, Any]) -> Any:
    """A renderer of the package over a tokenizer.

    Raises:
        ConfigurationError: no such renderer, an argument it does not know, or a tokenizer it does not fit.
    """
    try:
        config = _CONFIG.validate_python({"name": name, **arguments})
        return renderers.create_renderer(tokenizer, config)
    except ValidationError as error:
        raise ConfigurationError(
            f"model.renderer = {name!r} with {arguments}: {'; '.join(list_faults(error))}"
        ) from error
    except (AssertionError, AttributeError, ImportError, KeyError, NotImplementedError, TypeError, ValueError) as error:
        raise ConfigurationError(
            f"model.renderer = {name!r} does not fit the tokenizer of {tokenizer.name_or_path}: {error!r}"
        ) from error
