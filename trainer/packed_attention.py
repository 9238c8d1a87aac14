"""Attention over samples that lie end to end in one row: each sees itself alone, and no padding is computed.

Registered with transformers as an attention implementation of its own, which a model then calls in every layer. Where
the samples begin travels with the call, in the arguments that transformers has for flash attention over packed rows.
Not every model can be packed: `enable_packing` says why not.

Shape suffixes: H heads, K heads of keys and values, T positions of the row, L positions of one sample, D head size, S
samples.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

IMPLEMENTATION = "everroll_packed"
_UNSUPPORTED_ARGUMENTS = ("softcap", "s_aux", "position_bias")
_HAS_FLASH = importlib.util.find_spec("flash_attn") is not None
_PROBE_LENGTHS = (5, 3, 7)


@dataclass(frozen=True)
class Packing:
    """Where the samples of a packed row begin and end."""

    bounds_S1: Tensor  # int32, [S + 1]: 0, end of the first sample, ..., end of the last
    position_ids_1T: Tensor  # int64, [1, T]: each sample counts from 0
    lengths: tuple[int, ...]

    def to(self, device: torch.device) -> Packing:
        return Packing(self.bounds_S1.to(device), self.position_ids_1T.to(device), self.lengths)

    def model_arguments(self) -> dict[str, Any]:
        """What a model's forward takes besides the token ids."""
        longest = max(self.lengths)
        return {
            "position_ids": self.position_ids_1T,
            "cu_seq_lens_q": self.bounds_S1,
            "cu_seq_lens_k": self.bounds_S1,
            "max_length_q": longest,
            "max_length_k": longest,
            "packed_lengths": self.lengths,  # read here without waiting for the device
        }


def build_packing(lengths: Sequence[int]) -> Packing:
    """Of samples with so many positions each."""
    bounds = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    position_ids_T = torch.cat([torch.arange(length) for length in lengths])
    return Packing(bounds, position_ids_T[None], tuple(lengths))


def compute_packed_attention(
    module: nn.Module,
    query_1HTD: Tensor,
    key_1KTD: Tensor,
    value_1KTD: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    packed_lengths: tuple[int, ...] | None = None,
    **arguments: Any,
) -> tuple[Tensor, None]:
    """Causal attention within each sample; without `packed_lengths`, within each row. Returns [1, T, H, D].

    Raises:
        NotImplementedError: the model asks for something that is not computed here, such as a cap on scores.
    """
    asked = [name for name in _UNSUPPORTED_ARGUMENTS if arguments.get(name) is not None]
    if asked or attention_mask is not None or dropout:
        raise NotImplementedError(f"packed attention knows no {', '.join(asked) or 'mask or dropout'}")
    if packed_lengths is not None and _can_flash(query_1HTD):
        return _flash(query_1HTD, key_1KTD, value_1KTD, scaling, arguments), None
    lengths = [query_1HTD.shape[2]] if packed_lengths is None else list(packed_lengths)
    parts = zip(*(torch.split(tensor, lengths, dim=2) for tensor in (query_1HTD, key_1KTD, value_1KTD)), strict=True)
    grouped = query_1HTD.shape[1] != key_1KTD.shape[1]
    outputs = [
        nn.functional.scaled_dot_product_attention(
            query_1HLD, key_1KLD, value_1KLD, is_causal=True, scale=scaling, enable_gqa=grouped
        ).transpose(1, 2)
        for query_1HLD, key_1KLD, value_1KLD in parts
    ]
    return torch.cat(outputs, dim=1), None


AttentionInterface.register(IMPLEMENTATION, compute_packed_attention)


def enable_packing(model: Any, device: torch.device) -> str | None:
    """Switch a model to packed attention. Answers why that cannot be, the model being as before; or None.

    Attention other than full is told from the configuration. For the rest the model is asked: three short samples in
    one row must give what each gives alone, with the attention that the model came with.
    """
    obstacle = _find_other_attention(model.config.get_text_config())
    if obstacle is not None:
        return obstacle
    before = model.config._attn_implementation
    generator = torch.Generator().manual_seed(0)
    vocab_size = model.get_output_embeddings().weight.shape[0]
    samples = [torch.randint(vocab_size, (1, n), generator=generator).to(device) for n in _PROBE_LENGTHS]
    try:
        with torch.no_grad():
            alone = torch.cat([model(input_ids=ids, use_cache=False).logits for ids in samples], dim=1)
            model.set_attn_implementation(IMPLEMENTATION)
            arguments = build_packing(_PROBE_LENGTHS).to(device).model_arguments()
            packed = model(input_ids=torch.cat(samples, dim=1), use_cache=False, **arguments).logits
        same = torch.allclose(alone, packed, rtol=1e-3, atol=1e-4)
        obstacle = None if same else "samples in one row see each other"
    except (NotImplementedError, TypeError, RuntimeError, ValueError) as error:
        obstacle = str(error).splitlines()[0]
    if obstacle is not None:
        model.set_attn_implementation(before)
    return obstacle


def _find_other_attention(config: Any) -> str | None:
    kinds = set(getattr(config, "layer_types", None) or ())
    if kinds - {"full_attention"}:
        return f"it has layers of other kinds than full attention: {', '.join(sorted(kinds))}"
    if not kinds and getattr(config, "sliding_window", None) is not None:
        return "it attends to a sliding window"
    if getattr(config, "attention_chunk_size", None) is not None:
        return "it attends in chunks"
    return None


def _can_flash(query: Tensor) -> bool:
    return _HAS_FLASH and query.is_cuda and query.dtype in (torch.float16, torch.bfloat16)


def _flash(query_1HTD: Tensor, key_1KTD: Tensor, value_1KTD: Tensor, scaling: float | None, arguments: Any) -> Tensor:
    from flash_attn import flash_attn_varlen_func  # type: ignore[import-not-found, unused-ignore]

    output_THD: Tensor = flash_attn_varlen_func(
        *(tensor[0].transpose(0, 1) for tensor in (query_1HTD, key_1KTD, value_1KTD)),
        arguments["cu_seq_lens_q"],
        arguments["cu_seq_lens_k"],
        arguments["max_length_q"],
        arguments["max_length_k"],
        softmax_scale=scaling,
        causal=True,
    )
    return output_THD[None]
