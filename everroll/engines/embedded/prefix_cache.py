"""Which blocks of keys and values are kept after their sequence has gone, found again by the tokens before them.

A block covers `block_tokens` consecutive tokens. Its key is a chain: hash of the key of the block before it and its own
tokens, so that equal keys mean equal prefixes (the tokens are compared too, a hash is no proof). Blocks are evicted
least recently used first; a block is never fresher than the one before it, so chains lose their tail first.

Pure bookkeeping: the tensors are elsewhere (`kv_cache`), addressed by block number. All blocks belong to the weights
now serving; `clear` when they change.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence as AbstractSequence
from dataclasses import dataclass

_ROOT = 0


@dataclass(frozen=True, slots=True)
class _Block:
    number: int
    parent: int
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """What the cache has of a prompt."""

    blocks: list[int]
    """Numbers of the blocks that cover its first tokens, in order."""
    missing_key: int | None
    """Key of the first full block that is missing; None if there is none."""


class PrefixCache:
    """Blocks by prefix, for at most `num_blocks` blocks."""

    def __init__(self, num_blocks: int, block_tokens: int) -> None:
        self.block_tokens = block_tokens
        self._free = list(range(num_blocks - 1, -1, -1))
        self._blocks: OrderedDict[int, _Block] = OrderedDict()  # least recently used first

    def __len__(self) -> int:
        return len(self._blocks)

    def match(self, token_ids: AbstractSequence[int], num_tokens: int) -> PrefixMatch:
        """The cached blocks among the first `num_tokens` tokens, and mark them as used."""
        keys: list[int] = []
        missing_key = None
        for key, parent, tokens in self._chain(token_ids, num_tokens):
            if not self._holds(key, parent, tokens):
                missing_key = key
                break
            keys.append(key)
        self._touch(keys)
        return PrefixMatch([self._blocks[key].number for key in keys], missing_key)

    def insert(self, token_ids: AbstractSequence[int], num_tokens: int) -> list[tuple[int, int]]:
        """Make room for the full blocks among the first `num_tokens` tokens that are not held yet.

        Returns:
            Pairs (index of the block in the sequence, number of the block to fill), which the caller must fill.
        """
        to_fill: list[tuple[int, int]] = []
        keys: list[int] = []
        chain: set[int] = set()
        for index, (key, parent, tokens) in enumerate(self._chain(token_ids, num_tokens)):
            if not self._holds(key, parent, tokens):
                number = self._take_number(keep=chain)
                if number is None or key in self._blocks:
                    break
                self._blocks[key] = _Block(number, parent, tokens)
                to_fill.append((index, number))
            keys.append(key)
            chain.add(key)
        self._touch(keys)
        return to_fill

    def clear(self) -> None:
        """Forget everything."""
        self._free.extend(block.number for block in self._blocks.values())
        self._blocks.clear()

    def _chain(self, token_ids: AbstractSequence[int], num_tokens: int) -> list[tuple[int, int, tuple[int, ...]]]:
        """Key, parent key and tokens of each full block."""
        chain = []
        parent = _ROOT
        for start in range(0, num_tokens - self.block_tokens + 1, self.block_tokens):
            tokens = tuple(token_ids[start : start + self.block_tokens])
            key = hash((parent, tokens))
            chain.append((key, parent, tokens))
            parent = key
        return chain

    def _holds(self, key: int, parent: int, tokens: tuple[int, ...]) -> bool:
        block = self._blocks.get(key)
        return block is not None and block.parent == parent and block.token_ids == tokens

    def _touch(self, keys: list[int]) -> None:
        """Mark as used, the last block first, so that it is the first to be evicted."""
        for key in reversed(keys):
            self._blocks.move_to_end(key)

    def _take_number(self, keep: set[int]) -> int | None:
        """A free block number, evicting the least recently used block if need be, but none of `keep`."""
        if self._free:
            return self._free.pop()
        oldest = next((key for key in self._blocks if key not in keep), None)
        return None if oldest is None else self._blocks.pop(oldest).number
