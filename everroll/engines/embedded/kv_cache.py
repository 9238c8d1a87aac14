"""Keys and values of the running sequences (rows) and of the prefix cache (blocks), as tensors.

Shapes: R rows, C tokens of room per row, H heads, D size per head, B blocks of K tokens, N rows in a forward pass,
T tokens fed per row, S keys attended to. Layers may differ in H and D, keys may differ from values in D.

Rows start small and double as they are needed. They are zeroed, never just allocated: a masked key still multiplies
its value by 0, and 0 times NaN is NaN.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers.cache_utils import Cache

_FIRST_ROWS = 8
_FIRST_ROOM = 128


@dataclass(frozen=True, slots=True)
class LayerShape:
    """One layer's keys and values for one token."""

    num_heads: int
    key_dim: int
    value_dim: int

    @property
    def num_elements(self) -> int:
        return self.num_heads * (self.key_dim + self.value_dim)


class KvCache:
    """All layers' rows and blocks."""

    def __init__(
        self,
        layers: list[LayerShape],
        dtype: torch.dtype,
        device: torch.device,
        *,
        max_row_tokens: int,
        num_blocks: int,
        block_tokens: int,
    ) -> None:
        """`max_row_tokens` bounds rows times room."""
        self._layers = layers
        self._dtype, self._device = dtype, device
        self._max_row_tokens = max_row_tokens
        self._block_tokens = block_tokens
        self.num_rows = 0
        self.room = 0
        self._keys, self._values = self._allocate(0, 0)
        self._block_keys, self._block_values = self._allocate(num_blocks, block_tokens)

    def reserve(self, num_rows: int, room: int) -> None:
        """Make at least so many rows of so much room. What the first `num_rows` rows hold is kept, up to `room`.

        Raises:
            ValueError: that is more than `max_row_tokens`.
        """
        if num_rows <= self.num_rows and room <= self.room:
            return
        if num_rows * room > self._max_row_tokens:
            raise ValueError(f"{num_rows} rows of {room} tokens are more than {self._max_row_tokens}")
        if room > self.room or num_rows * self.room > self._max_row_tokens:
            self.room = min(_round_up(room, _FIRST_ROOM), self._max_row_tokens // num_rows)
        self.num_rows = min(_round_up(num_rows, _FIRST_ROWS), self._max_row_tokens // self.room)
        # One tensor after the other, so that little is held twice.
        for tensors in (self._keys, self._values):
            for index, old in enumerate(tensors):
                _, num_heads, old_room, dim = old.shape
                tensors[index] = old.new_zeros(self.num_rows, num_heads, self.room, dim)
                kept_rows, kept_room = min(num_rows, old.shape[0]), min(self.room, old_room)
                tensors[index][:kept_rows, :, :kept_room] = old[:kept_rows, :, :kept_room]

    def shrink(self) -> None:
        """Give the rows back; for when no sequence runs."""
        self.num_rows, self.room = 0, 0
        self._keys, self._values = self._allocate(0, 0)

    def move_row(self, source: int, target: int) -> None:
        """Copy one row over another."""
        for tensor in (*self._keys, *self._values):
            tensor[target] = tensor[source]

    def zero_row(self, row: int) -> None:
        for tensor in (*self._keys, *self._values):
            tensor[row].zero_()

    def load_blocks(self, row: int, blocks: list[int]) -> None:
        """Fill the first tokens of a row from blocks."""
        num_tokens = len(blocks) * self._block_tokens
        numbers_B = torch.tensor(blocks, device=self._device)
        for target, source in self._rows_and_blocks():
            picked_BHKD = source[numbers_B]
            target[row, :, :num_tokens] = picked_BHKD.transpose(0, 1).flatten(1, 2)

    def store_blocks(self, row: int, pairs: list[tuple[int, int]]) -> None:
        """Fill blocks from a row: pairs of (index of the block in the row, number of the block)."""
        first, last = pairs[0][0], pairs[-1][0]
        if last - first + 1 != len(pairs):
            raise ValueError(f"blocks of a row must be consecutive: {pairs}")
        numbers_B = torch.tensor([number for _, number in pairs], device=self._device)
        start, stop = first * self._block_tokens, (last + 1) * self._block_tokens
        for source, target in self._rows_and_blocks():
            heads, _, dim = source.shape[1:]
            picked_HBKD = source[row, :, start:stop].reshape(heads, len(pairs), self._block_tokens, dim)
            target[numbers_B] = picked_HBKD.transpose(0, 1)

    def layer(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of all rows, [R, H, C, D] each."""
        return self._keys[index], self._values[index]

    def _rows_and_blocks(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        return [
            *zip(self._keys, self._block_keys, strict=True),
            *zip(self._values, self._block_values, strict=True),
        ]

    def _allocate(self, count: int, num_tokens: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        def zeros(layer: LayerShape, dim: int) -> torch.Tensor:
            return torch.zeros(count, layer.num_heads, num_tokens, dim, dtype=self._dtype, device=self._device)

        keys = [zeros(layer, layer.key_dim) for layer in self._layers]
        values = [zeros(layer, layer.value_dim) for layer in self._layers]
        return keys, values


class RowCache(Cache):  # type: ignore[misc]
    """What a Hugging Face model sees of the rows in one forward pass.

    The model hands over the keys and values of the tokens it was fed; they go to their positions, and the model gets
    the first S keys and values of its rows back. Which of them a token may attend to is the attention mask's business.
    """

    def __init__(self, kv: KvCache) -> None:
        super().__init__(layers=[])
        self._kv = kv
        self._rows_N: torch.Tensor | None = None
        self._num_rows = 0
        self._positions_NT = torch.empty(0, 0, dtype=torch.long)
        self._num_keys = 0

    def select(self, rows_N: torch.Tensor | None, positions_NT: torch.Tensor, num_keys: int) -> None:
        """Choose rows and positions of the next forward pass; `rows_N` None means the first N, without a copy."""
        self._rows_N, self._positions_NT, self._num_keys = rows_N, positions_NT, num_keys
        self._num_rows = positions_NT.shape[0]

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = self._kv.layer(layer_idx)
        return self._write(keys, key_states), self._write(values, value_states)

    def _write(self, rows_RHCD: torch.Tensor, states_NHTD: torch.Tensor) -> torch.Tensor:
        if self._rows_N is None:
            view_NHCD = rows_RHCD[: self._num_rows]
            view_NHCD.scatter_(2, self._positions_NT[:, None, :, None].expand_as(states_NHTD), states_NHTD)
            return view_NHCD[:, :, : self._num_keys]
        rows_RHCD[self._rows_N[:, None], :, self._positions_NT] = states_NHTD.transpose(1, 2)
        return rows_RHCD[:, :, : self._num_keys][self._rows_N]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Only asked for when positions or masks are left out, which they never are."""
        return self._num_keys

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return self._num_keys, 0

    def get_max_length(self, layer_idx: int = 0) -> int:
        return self._kv.room


def _round_up(want: int, first: int) -> int:
    """The next of `first` times a power of two, so that growing costs little in sum."""
    size = first
    while size < want:
        size *= 2
    return size
