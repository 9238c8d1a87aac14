"""Runs planned forward passes: from sequences to tensors and back. Lives on the torch thread.

Shapes: N rows, T tokens fed per row, V tokens of the vocabulary.
"""

from __future__ import annotations

import torch

from everroll.engines.embedded.kv_cache import KvCache, RowCache
from everroll.engines.embedded.model import CausalModel
from everroll.engines.embedded.sampler import Draw, sample
from everroll.engines.embedded.scheduler import Forward
from everroll.engines.embedded.sequence import Sequence


class ModelRunner:
    """One model and the keys and values of its running sequences."""

    def __init__(self, model: CausalModel, kv: KvCache, max_context: int) -> None:
        self.model = model
        self.kv = kv
        self._max_context = max_context
        self._cache = RowCache(kv)

    @torch.inference_mode()
    def prefill(self, forward: Forward) -> None:
        """Compute the next tokens of each sequence, short of its last one."""
        rows = [
            sequence.token_ids[sequence.num_computed :][: min(forward.num_tokens, sequence.num_to_prefill)]
            for sequence in forward.sequences
        ]
        self._forward(forward, [row + [0] * (forward.num_tokens - len(row)) for row in rows])

    @torch.inference_mode()
    def decode(self, forward: Forward) -> tuple[list[int], list[float]]:
        """Feed one token to each sequence and draw the next; for sequences still in prefill the draw is void."""
        tokens = [[sequence.token_ids[sequence.num_computed]] for sequence in forward.sequences]
        logits_NV = self._forward(forward, tokens)[: len(forward.sequences)]
        return sample(logits_NV, [Draw(sequence.params, sequence.num_new) for sequence in forward.sequences])

    def _forward(self, forward: Forward, tokens: list[list[int]]) -> torch.Tensor:
        sequences: list[Sequence] = forward.sequences
        num_padding = forward.num_rows - len(sequences)
        device = self.model.device
        starts = [sequence.num_computed for sequence in sequences]
        tokens_NT = torch.tensor(tokens + tokens[-1:] * num_padding, device=device)
        starts_N = torch.tensor(starts + starts[-1:] * num_padding, device=device)
        positions_NT = starts_N[:, None]
        if forward.num_tokens > 1:
            # Padding may reach past the end of the row; what it writes there is overwritten before it is attended to.
            last = min(self.kv.room, self._max_context) - 1
            positions_NT = (positions_NT + torch.arange(forward.num_tokens, device=device)).clamp_(max=last)
        rows_N = None
        if not forward.is_contiguous:
            rows = [sequence.row for sequence in sequences]
            rows_N = torch.tensor(rows + rows[-1:] * num_padding, device=device)
        self._cache.select(rows_N, positions_NT, forward.num_keys)
        return self.model.forward(tokens_NT, positions_NT, self._cache, forward.num_keys)
