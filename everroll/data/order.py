"""The deterministic order in which groups draw prompts: computed, not stored. Pure."""

from __future__ import annotations

import hashlib

_ROUNDS = 4


def compute_prompt_index(group: int, num_prompts: int, seed: int, shuffle: bool) -> int:
    """The row that group `group` plays: position `group % num_prompts` of epoch `group // num_prompts`.

    A balanced Feistel network over the next power of four, walked until it lands inside (Black and Rogaway, "Ciphers
    with arbitrary finite domains", 2002): each epoch is a permutation of all rows.
    """
    epoch, position = divmod(group, num_prompts)
    if not shuffle or num_prompts == 1:
        return position
    half_bits = max(1, ((num_prompts - 1).bit_length() + 1) // 2)
    value = position
    while True:
        value = _feistel(value, half_bits, f"{seed}:{epoch}".encode())
        if value < num_prompts:
            return value


def _feistel(value: int, half_bits: int, key: bytes) -> int:
    mask = (1 << half_bits) - 1
    left, right = value >> half_bits, value & mask
    for round_index in range(_ROUNDS):
        digest = hashlib.blake2b(right.to_bytes(8, "little"), key=key, salt=bytes([round_index]), digest_size=8)
        left, right = right, left ^ (int.from_bytes(digest.digest(), "little") & mask)
    return (left << half_bits) | right
