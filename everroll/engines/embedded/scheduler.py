"""Who runs next: admission, batching and removal. Pure; knows no torch, no HTTP and no clock.

Running sequences hold rows 0..n-1 of the key-value cache, without holes: when one leaves, the last one moves into its
row. A row must hold the longest its sequence can become, so that a sequence once admitted is never short of room.

A step has two parts. `plan_prefill` computes prompt tokens up to the last but one, in chunks; `plan_decode` feeds the
last token of every sequence whose prefill is done and samples its next. So every sampled token, the first one too,
comes from the same kind of forward pass, and a prompt that the prefix cache holds needs no prefill at all.

Admission is first come, first served, with one exception: a prompt that shares its next missing block with one that is
being prefilled waits for that prefill (one step, most often), to find the block in the prefix cache.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from everroll.engines.embedded.prefix_cache import PrefixCache, PrefixMatch
from everroll.engines.embedded.sequence import Finish, FinishKind, Sequence


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """Shapes of batches, in tokens and rows."""

    max_rows: int
    max_context: int
    """Longest sequence."""
    max_kv_tokens: int
    """Rows times the room of each row must stay within this. One row of `max_context` must fit, or it never starts."""
    key_step: int = 32
    """Keys attended to are rounded up to a multiple of this."""
    chunk_tokens: int = 1024
    """Most tokens of one sequence in one prefill."""
    max_prefill_tokens: int = 4096
    """Most tokens in one prefill, padding included."""
    decode_tile: int | None = None
    """Deterministic mode: every decode forward has exactly this many rows, all with equally many keys."""
    prefill_tile: int | None = None
    """Deterministic mode: every prefill forward has this many rows of exactly `chunk_tokens` tokens, chunks aligned."""


@dataclass(frozen=True, slots=True)
class Forward:
    """One forward pass over R rows of T tokens each, padded."""

    sequences: list[Sequence]
    """One per row that matters; rows beyond them repeat the last one."""
    num_rows: int
    num_tokens: int
    num_keys: int
    """Keys attended to: at least every row's start + T, padding left out."""
    is_contiguous: bool
    """Rows are 0..R-1 of the cache, in order: they need no gathering. Sequences in prefill are among them; what a
    decode forward does to those is void, and overwritten by their next chunk."""


@dataclass(frozen=True, slots=True)
class Admitted:
    sequence: Sequence
    blocks: list[int]
    """Blocks of the prefix cache to copy into the sequence's row."""


@dataclass(frozen=True, slots=True)
class Move:
    """Copy the keys and values of one row to another."""

    source: int
    target: int


class Scheduler:
    """The queue and the running batch."""

    def __init__(self, limits: BatchLimits, prefix_cache: PrefixCache) -> None:
        self._limits = limits
        self._prefix_cache = prefix_cache
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.weight_epoch = 0
        """Counts weight updates; keys and values of different epochs are never shared."""

    @property
    def is_deterministic(self) -> bool:
        return self._limits.decode_tile is not None

    @property
    def num_unfinished(self) -> int:
        return len(self.waiting) + len(self.running)

    @property
    def num_cached_blocks(self) -> int:
        return len(self._prefix_cache)

    def add(self, sequence: Sequence) -> None:
        self.waiting.append(sequence)

    def admit(self) -> list[Admitted]:
        """Move sequences from the queue to rows, as many as fit; their cached prefix counts as computed."""
        admitted: list[Admitted] = []
        deferred: list[Sequence] = []
        while self.waiting and self._fits(self.waiting[0]):
            sequence = self.waiting.popleft()
            match = self._match_prefix(sequence)
            if match.missing_key is not None and self._is_being_computed(match.missing_key):
                deferred.append(sequence)
                continue
            self._start(sequence, match)
            admitted.append(Admitted(sequence, match.blocks))
        self.waiting.extendleft(reversed(deferred))
        return admitted

    def plan_prefill(self) -> Forward | None:
        """The next chunk of prompts to compute, or None."""
        pending = [sequence for sequence in self.running if sequence.num_to_prefill > 0]
        if not pending:
            return None
        if self._limits.prefill_tile is not None:
            return self._plan_prefill_tile(pending, self._limits.prefill_tile)
        num_tokens = min(self._limits.chunk_tokens, max(sequence.num_to_prefill for sequence in pending))
        chosen = pending[: max(1, self._limits.max_prefill_tokens // num_tokens)]
        num_tokens = min(num_tokens, max(sequence.num_to_prefill for sequence in chosen))
        num_keys = max(sequence.num_computed + min(num_tokens, sequence.num_to_prefill) for sequence in chosen)
        return Forward(chosen, len(chosen), num_tokens, self._round_keys(num_keys), is_contiguous=False)

    def finish_prefill(self, forward: Forward) -> list[tuple[Sequence, list[tuple[int, int]]]]:
        """Account for a prefill that has run.

        Returns:
            For each sequence whose prompt is now complete, the prefix-cache blocks to fill from its row.
        """
        done = []
        for sequence in forward.sequences:
            sequence.num_computed += min(forward.num_tokens, sequence.num_to_prefill)
            if sequence.num_to_prefill == 0:
                sequence.missing_key = None
                done.append((sequence, self.share_prefix(sequence)))
        return done

    def plan_decode(self) -> list[Forward]:
        """Forward passes that give every sequence with a complete prefill its next token."""
        ready = [sequence for sequence in self.running if sequence.num_to_prefill == 0]
        if not ready:
            return []
        if self._limits.decode_tile is not None:
            return self._plan_decode_tiles(ready, self._limits.decode_tile)
        num_keys = self._round_keys(max(sequence.num_computed for sequence in ready) + 1)
        return [Forward(list(self.running), len(self.running), 1, num_keys, is_contiguous=True)]

    def share_prefix(self, sequence: Sequence) -> list[tuple[int, int]]:
        """Blocks of the prefix cache to fill from this sequence's row: pairs (block of the row, block number)."""
        if sequence.kv_epoch != self.weight_epoch:
            return []
        num_tokens = sequence.num_computed
        if self.is_deterministic:
            # Keys and values made by decoding differ in the last bits from those made by a prefill.
            num_tokens = min(num_tokens, sequence.num_prompt - 1)
        return self._prefix_cache.insert(sequence.token_ids, num_tokens)

    def remove(self, sequence: Sequence) -> Move | None:
        """Take a sequence out, wherever it is. Returns the move that closes the hole in the rows, if there is one."""
        if sequence.row < 0:
            self.waiting.remove(sequence)
            return None
        last = self.running.pop()
        row, sequence.row = sequence.row, -1
        if last is sequence:
            return None
        move = Move(source=last.row, target=row)
        last.row = row
        self.running[row] = last
        return move

    def retract_all(self) -> None:
        """Send all running sequences back to the front of the queue; they keep their tokens, not their row."""
        for sequence in sorted(self.running, key=lambda sequence: sequence.number, reverse=True):
            sequence.row, sequence.num_computed, sequence.missing_key = -1, 0, None
            self.waiting.appendleft(sequence)
        self.running.clear()

    def abort(self, which: Callable[[Sequence], bool], finish: Finish) -> list[Sequence]:
        """Mark the sequences chosen by `which` as aborted; the caller removes them."""
        if finish.kind is not FinishKind.ABORT:
            raise ValueError(f"not an abort: {finish}")
        chosen = [sequence for sequence in (*self.running, *self.waiting) if which(sequence)]
        for sequence in chosen:
            sequence.finish = finish
        return chosen

    def change_weights(self) -> None:
        """New weights serve from now on: what was computed with the old ones is not shared any more."""
        self.weight_epoch += 1
        self._prefix_cache.clear()

    def clear_prefix_cache(self) -> None:
        self._prefix_cache.clear()

    def row_tokens(self) -> int:
        """Room that each row must have now: for the longest that any running sequence can become."""
        return self._round_room(max((sequence.max_tokens for sequence in self.running), default=0))

    def _fits(self, sequence: Sequence) -> bool:
        num_rows = len(self.running) + 1
        room = max(self.row_tokens(), self._round_room(sequence.max_tokens))
        return num_rows <= self._limits.max_rows and num_rows * room <= self._limits.max_kv_tokens

    def _match_prefix(self, sequence: Sequence) -> PrefixMatch:
        match = self._prefix_cache.match(sequence.token_ids, len(sequence.token_ids) - 1)
        if self._limits.prefill_tile is None:
            return match
        blocks_per_chunk = self._limits.chunk_tokens // self._prefix_cache.block_tokens
        num_blocks = len(match.blocks) // blocks_per_chunk * blocks_per_chunk
        return PrefixMatch(match.blocks[:num_blocks], match.missing_key)

    def _is_being_computed(self, key: int) -> bool:
        return any(sequence.missing_key == key for sequence in self.running)

    def _start(self, sequence: Sequence, match: PrefixMatch) -> None:
        sequence.row = len(self.running)
        sequence.kv_epoch = self.weight_epoch
        sequence.num_computed = len(match.blocks) * self._prefix_cache.block_tokens
        sequence.missing_key = match.missing_key
        if sequence.num_new == 0:
            sequence.num_cached = sequence.num_computed
        self.running.append(sequence)

    def _plan_prefill_tile(self, pending: list[Sequence], num_rows: int) -> Forward:
        """Rows of one chunk each whose chunks end at the same token, so that their shapes depend on nothing else."""
        start = pending[0].num_computed
        chosen = [sequence for sequence in pending if sequence.num_computed == start][:num_rows]
        num_tokens = self._limits.chunk_tokens
        return Forward(chosen, num_rows, num_tokens, start + num_tokens, is_contiguous=False)

    def _plan_decode_tiles(self, ready: list[Sequence], num_rows: int) -> list[Forward]:
        by_keys: dict[int, list[Sequence]] = {}
        for sequence in ready:
            by_keys.setdefault(self._round_keys(sequence.num_computed + 1), []).append(sequence)
        return [
            Forward(group[start : start + num_rows], num_rows, 1, num_keys, is_contiguous=False)
            for num_keys, group in by_keys.items()
            for start in range(0, len(group), num_rows)
        ]

    def _round_keys(self, num_keys: int) -> int:
        step = self._limits.key_step
        return min(-(-num_keys // step) * step, self._round_room(self._limits.max_context))

    def _round_room(self, num_tokens: int) -> int:
        """Rows hold whole chunks in deterministic mode, whole key steps otherwise."""
        step = self._limits.key_step if self._limits.prefill_tile is None else self._limits.chunk_tokens
        step = max(step, self._limits.key_step)
        return -(-num_tokens // step) * step
