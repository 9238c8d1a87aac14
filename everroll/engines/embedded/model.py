"""A Hugging Face causal language model as the engine uses it: one call, whatever the architecture and version.

The model must keep its past as keys and values per token (attention, full or with a sliding window). Models with
another kind of state (linear attention, state spaces) are refused when they are loaded.

Shapes: N rows, T tokens fed per row, S keys attended to, V tokens of the vocabulary.
"""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.cache_utils import Cache
from transformers.utils.logging import disable_progress_bar

from everroll.engines.embedded.kv_cache import LayerShape

_FULL, _SLIDING = "full_attention", "sliding_attention"


class UnsupportedModelError(ValueError):
    """The engine cannot serve this model correctly; the message says why."""


class CausalModel:
    """The model, and what must be known of it to batch it."""

    def __init__(self, module: Any, device: torch.device) -> None:
        config = module.config.get_text_config()
        self.module: Any = module.to(device).eval().requires_grad_(False)
        self.device = device
        self.dtype: torch.dtype = module.dtype
        self.vocab_size: int = module.get_output_embeddings().weight.shape[0]
        self.max_positions: int | None = getattr(config, "max_position_embeddings", None)
        self.eos_token_ids = _read_eos(module)
        self._window: int | None = _read_window(config)
        self._layer_types = _read_layer_types(config)
        accepted = inspect.signature(module.forward).parameters
        self._cache_argument = "cache" if "cache" in accepted else "past_key_values"
        self._options: dict[str, Any] = {"use_cache": True}
        if "logits_to_keep" in accepted:
            self._options["logits_to_keep"] = 1
        if "position_ids" not in accepted:
            raise UnsupportedModelError(f"{type(module).__name__} takes no position_ids")
        self.layers = self._probe_layers()

    def forward(self, tokens_NT: torch.Tensor, positions_NT: torch.Tensor, cache: Cache, num_keys: int) -> torch.Tensor:
        """Logits of each row's last token, [N, V]. Keys and values go to the cache."""
        output = self.module(
            input_ids=tokens_NT,
            attention_mask=self._build_masks(positions_NT, num_keys),
            position_ids=positions_NT,
            **{self._cache_argument: cache},
            **self._options,
        )
        logits: torch.Tensor = output.logits[:, -1]
        return logits

    def compute_reference_logprobs(self, token_ids: list[int]) -> torch.Tensor:
        """Log-probabilities [T, V] of a plain forward pass over a whole sequence, without our cache and masks."""
        tokens_1T = torch.tensor([token_ids], device=self.device)
        logits_TV = self.module(input_ids=tokens_1T, use_cache=False).logits[0]
        return torch.log_softmax(logits_TV.float(), dim=-1)

    def _build_masks(self, positions_NT: torch.Tensor, num_keys: int) -> torch.Tensor | dict[str, torch.Tensor]:
        """Additive masks [N, 1, T, S]: a token attends to the positions up to its own, within the window if any."""
        keys_S = torch.arange(num_keys, device=self.device)
        positions_NT1 = positions_NT[:, :, None]
        causal_NTS = keys_S <= positions_NT1
        if self._window is None:
            return self._to_additive(causal_NTS)
        windowed = self._to_additive(causal_NTS & (keys_S > positions_NT1 - self._window))
        if not self._layer_types:
            return windowed
        return {_FULL: self._to_additive(causal_NTS), _SLIDING: windowed}

    def _to_additive(self, allowed_NTS: torch.Tensor) -> torch.Tensor:
        zero = torch.zeros((), dtype=self.dtype, device=self.device)
        return torch.where(allowed_NTS[:, None], zero, torch.finfo(self.dtype).min)

    @torch.inference_mode()
    def _probe_layers(self) -> list[LayerShape]:
        """Shapes of the keys and values of each layer, found by feeding two tokens."""
        probe = _ProbeCache()
        positions_NT = torch.arange(2, device=self.device)[None]
        try:
            self.forward(torch.zeros_like(positions_NT), positions_NT, probe, 2)
        except Exception as error:
            raise UnsupportedModelError(
                f"{type(self.module).__name__} does not run on a cache of keys and values per token: {error!r}"
            ) from error
        if not probe.shapes or sorted(probe.shapes) != list(range(len(probe.shapes))):
            raise UnsupportedModelError(
                f"{type(self.module).__name__} does not keep its past as keys and values in every layer"
            )
        return [probe.shapes[index] for index in range(len(probe.shapes))]


def load_model(path: str, device: torch.device, dtype: torch.dtype | None) -> CausalModel:
    """Load a checkpoint directory; `dtype` None keeps the checkpoint's.

    Raises:
        UnsupportedModelError: no such directory, or a model that the engine cannot serve.
    """
    if not Path(path).is_dir():
        raise UnsupportedModelError(f"{path}: no such directory")
    disable_progress_bar()
    try:
        module = AutoModelForCausalLM.from_pretrained(path, dtype=dtype or "auto", local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise UnsupportedModelError(f"{path}: cannot be loaded as a causal language model: {error}") from error
    return CausalModel(module, device)


class _ProbeCache(Cache):  # type: ignore[misc]
    """Remembers the shapes that each layer stores."""

    def __init__(self) -> None:
        super().__init__(layers=[])
        self.shapes: dict[int, LayerShape] = {}

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        heads, value_heads = key_states.shape[1], value_states.shape[1]
        if heads != value_heads:
            raise UnsupportedModelError(f"layer {layer_idx} has {heads} key heads and {value_heads} value heads")
        self.shapes[layer_idx] = LayerShape(heads, key_states.shape[-1], value_states.shape[-1])
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return query_length, 0

    def get_max_length(self, layer_idx: int = 0) -> int:
        return -1


def _read_eos(module: Any) -> frozenset[int]:
    """Token ids that end a text by the model's own account."""
    found: set[int] = set()
    for config in (module.generation_config, module.config.get_text_config()):
        value = getattr(config, "eos_token_id", None)
        found.update([value] if isinstance(value, int) else value or [])
    return frozenset(found)


def _read_layer_types(config: Any) -> frozenset[str]:
    types = frozenset(getattr(config, "layer_types", None) or ())
    if not types <= {_FULL, _SLIDING}:
        raise UnsupportedModelError(f"layers of type {sorted(types - {_FULL, _SLIDING})} are not supported")
    return types


def _read_window(config: Any) -> int | None:
    """Width of the sliding window, None if no layer has one."""
    types = getattr(config, "layer_types", None)
    if types and _SLIDING not in types:
        return None
    window: int | None = getattr(config, "sliding_window", None)
    return window
