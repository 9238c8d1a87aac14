"""A checkpoint's tokenizer without transformers.

`tokenizer.json` holds all that encoding and decoding need. Reading it with the `tokenizers` library takes milliseconds,
where `AutoTokenizer` imports torch and takes seconds.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as RustTokenizer

from everroll.failures import ConfigurationError

_MAX_CACHED_CHARS = 64


class FastTokenizer:
    """`tokenizers.Tokenizer` behind the surface that the `renderers` package asks for (`renderers.Tokenizer`)."""

    def __init__(self, backend: RustTokenizer, name_or_path: str, config: dict[str, Any]) -> None:
        self.name_or_path = name_or_path
        self.chat_template = str(config.get("chat_template") or "")
        self.special_tokens = {name: _token_text(config.get(name)) or "" for name in ("bos_token", "eos_token")}
        self._backend = backend
        self._encode_short = lru_cache(maxsize=4096)(self._encode)
        self.unk_token_id = self._special_id(config.get("unk_token"))
        self.eos_token_id = self._special_id(config.get("eos_token"))

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        if len(text) <= _MAX_CACHED_CHARS:  # template scaffolding, the same in every turn
            return list(self._encode_short(text, add_special_tokens))
        return self._encode(text, add_special_tokens)

    def decode(
        self,
        token_ids: int | Sequence[int],
        skip_special_tokens: bool = False,
        clean_up_tokenization_spaces: bool = False,
    ) -> str:
        if clean_up_tokenization_spaces:
            raise ValueError("cleaning up spaces would change sampled text")
        ids = [token_ids] if isinstance(token_ids, int) else list(token_ids)
        text: str = self._backend.decode(ids, skip_special_tokens=skip_special_tokens)
        return text

    def convert_tokens_to_ids(self, tokens: str | list[str]) -> int | list[int | None] | None:
        if isinstance(tokens, str):
            return self._token_id(tokens)
        return [self._token_id(token) for token in tokens]

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        ids: list[int] = self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def _token_id(self, token: str) -> int | None:
        found = self._backend.token_to_id(token)
        return self.unk_token_id if found is None else int(found)

    def _special_id(self, entry: object) -> int | None:
        token = _token_text(entry)
        found = None if token is None else self._backend.token_to_id(token)
        return None if found is None else int(found)


def _token_text(entry: object) -> str | None:
    """A special token as `tokenizer_config.json` names it: a string, or an object with `content`."""
    token = entry.get("content") if isinstance(entry, dict) else entry
    return token if isinstance(token, str) else None


def load_fast_tokenizer(directory: Path, name_or_path: str) -> FastTokenizer | None:
    """Load `tokenizer.json`; None when the checkpoint has none.

    Raises:
        ConfigurationError: a tokenizer file is there but cannot be read.
    """
    path = directory / "tokenizer.json"
    if not path.is_file():
        return None
    try:
        backend = RustTokenizer.from_file(str(path))
    except Exception as error:  # the Rust library raises plain Exception
        raise ConfigurationError(f"{path} cannot be read as a tokenizer: {error}") from error
    backend.no_truncation()
    backend.no_padding()
    return FastTokenizer(backend, name_or_path, load_tokenizer_config(directory))


def load_tokenizer_config(directory: Path) -> dict[str, Any]:
    """`tokenizer_config.json`, with the chat template of `chat_template.jinja` put in; empty when there is neither.

    Raises:
        ConfigurationError: the file is no JSON object.
    """
    config = load_json_object(directory / "tokenizer_config.json")
    template = directory / "chat_template.jinja"
    if template.is_file():
        config["chat_template"] = template.read_text(encoding="utf-8")
    if isinstance(named := config.get("chat_template"), list):
        config["chat_template"] = next((entry["template"] for entry in named if entry.get("name") == "default"), None)
    return config


def load_json_object(path: Path) -> dict[str, Any]:
    """A JSON object from a file; empty when there is no such file.

    Raises:
        ConfigurationError: the file is no JSON object.
    """
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigurationError(f"{path} is no JSON: {error}") from error
    if not isinstance(value, dict):
        raise ConfigurationError(f"{path} holds no JSON object")
    return value
