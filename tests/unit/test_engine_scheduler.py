"""Admission, batching and removal, without a model."""

from __future__ import annotations

from everroll.engines.embedded.prefix_cache import PrefixCache
from everroll.engines.embedded.scheduler import BatchLimits, Move, Scheduler
from everroll.engines.embedded.sequence import Finish, FinishKind, SamplingParams, Sequence

BLOCK = 16


def make_scheduler(num_blocks: int = 64, **limits: int | None) -> Scheduler:
    defaults: dict[str, int | None] = {"max_rows": 4, "max_context": 512, "max_kv_tokens": 4096}
    return Scheduler(BatchLimits(**(defaults | limits)), PrefixCache(num_blocks, BLOCK))  # type: ignore[arg-type]


def make_sequence(length: int, max_new_tokens: int = 8, first: int = 0, name: str = "r") -> Sequence:
    return Sequence(name, list(range(first, first + length)), SamplingParams(max_new_tokens=max_new_tokens))


def prefill_all(scheduler: Scheduler) -> int:
    """Run all prefills; returns how many forward passes it took."""
    count = 0
    while (forward := scheduler.plan_prefill()) is not None:
        scheduler.finish_prefill(forward)
        count += 1
    return count


def decode_once(scheduler: Scheduler, token: int = 500) -> None:
    for forward in scheduler.plan_decode():
        for sequence in forward.sequences:
            if sequence.num_to_prefill == 0:
                sequence.num_computed += 1
                sequence.append(token, -0.5, 0)


def test_first_come_first_served_up_to_the_rows() -> None:
    scheduler = make_scheduler()
    sequences = [make_sequence(5, first=100 * index) for index in range(6)]
    for sequence in sequences:
        scheduler.add(sequence)
    assert [item.sequence for item in scheduler.admit()] == sequences[:4]
    assert [sequence.row for sequence in scheduler.running] == [0, 1, 2, 3]
    scheduler.remove(sequences[1])
    assert [item.sequence for item in scheduler.admit()] == [sequences[4]]
    assert list(scheduler.waiting) == [sequences[5]]


def test_rows_must_hold_the_longest_that_any_sequence_can_become() -> None:
    scheduler = make_scheduler(max_kv_tokens=512)
    short, long, last = make_sequence(8), make_sequence(100, 156, first=200), make_sequence(8, first=400)
    for sequence in (short, long, last):
        scheduler.add(sequence)
    assert [item.sequence for item in scheduler.admit()] == [short, long]
    assert scheduler.row_tokens() == 256
    scheduler.remove(long)
    assert [item.sequence for item in scheduler.admit()] == [last]


def test_a_long_request_at_the_head_is_not_overtaken() -> None:
    scheduler = make_scheduler(max_kv_tokens=512)
    scheduler.add(make_sequence(8))
    scheduler.add(make_sequence(300, 100, first=100))
    scheduler.add(make_sequence(8, first=400))
    assert len(scheduler.admit()) == 1
    assert scheduler.admit() == []


def test_a_prompt_of_one_token_needs_no_prefill() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_sequence(1))
    scheduler.admit()
    assert scheduler.plan_prefill() is None
    (forward,) = scheduler.plan_decode()
    assert (forward.num_rows, forward.num_tokens, forward.num_keys) == (1, 1, 32)


def test_long_prompts_are_computed_in_chunks_while_others_decode() -> None:
    scheduler = make_scheduler(chunk_tokens=64)
    short, long = make_sequence(3), make_sequence(200, first=100)
    scheduler.add(short)
    scheduler.add(long)
    scheduler.admit()
    computed = []
    for _ in range(4):
        forward = scheduler.plan_prefill()
        assert forward is not None
        scheduler.finish_prefill(forward)
        computed.append(long.num_computed)
        decode_once(scheduler)
    assert computed == [64, 128, 192, 199]
    assert (short.num_new, long.num_new) == (4, 1)
    assert scheduler.plan_prefill() is None


def test_prefills_stay_within_their_token_budget() -> None:
    scheduler = make_scheduler(max_prefill_tokens=128)
    for index in range(4):
        scheduler.add(make_sequence(65, first=100 * index))
    scheduler.admit()
    forward = scheduler.plan_prefill()
    assert forward is not None
    assert (forward.num_rows, forward.num_tokens) == (2, 64)


def test_members_of_a_group_wait_for_the_first_ones_prefill_and_share_it() -> None:
    scheduler = make_scheduler()
    group = [make_sequence(40) for _ in range(3)]
    other = make_sequence(40, first=100)
    for sequence in (*group, other):
        scheduler.add(sequence)
    assert [item.sequence for item in scheduler.admit()] == [group[0], other]
    prefill_all(scheduler)
    admitted = scheduler.admit()
    assert [item.sequence for item in admitted] == group[1:]
    assert [len(item.blocks) for item in admitted] == [2, 2]
    assert [sequence.num_cached for sequence in group] == [0, 32, 32]


def test_waiting_for_a_shared_prefill_ends_when_it_is_aborted() -> None:
    scheduler = make_scheduler()
    first, second = make_sequence(40), make_sequence(40)
    scheduler.add(first)
    scheduler.add(second)
    scheduler.admit()
    scheduler.remove(first)
    assert [item.sequence for item in scheduler.admit()] == [second]


def test_removal_closes_the_hole_with_the_last_row() -> None:
    scheduler = make_scheduler()
    sequences = [make_sequence(4, first=100 * index) for index in range(3)]
    for sequence in sequences:
        scheduler.add(sequence)
    scheduler.admit()
    assert scheduler.remove(sequences[0]) == Move(source=2, target=0)
    assert [sequence.row for sequence in sequences] == [-1, 1, 0]
    assert scheduler.running == [sequences[2], sequences[1]]
    assert scheduler.remove(sequences[1]) is None


def test_retracted_sequences_keep_their_tokens_and_their_turn() -> None:
    scheduler = make_scheduler()
    sequences = [make_sequence(4, first=100 * index) for index in range(3)]
    for sequence in sequences:
        scheduler.add(sequence)
    scheduler.admit()
    prefill_all(scheduler)
    decode_once(scheduler)
    scheduler.remove(sequences[0])
    late = make_sequence(4, first=400)
    scheduler.add(late)
    scheduler.retract_all()
    assert list(scheduler.waiting) == [sequences[1], sequences[2], late]
    assert [sequence.num_computed for sequence in sequences[1:]] == [0, 0]
    assert sequences[1].new_token_ids == [500]
    scheduler.admit()
    assert sequences[1].num_to_prefill == 4


def test_keys_of_older_weights_are_neither_found_nor_shared() -> None:
    scheduler = make_scheduler()
    early = make_sequence(40, max_new_tokens=30)
    scheduler.add(early)
    scheduler.admit()
    prefill_all(scheduler)
    scheduler.change_weights()
    for _ in range(30):
        decode_once(scheduler)
    assert scheduler.share_prefix(early) == []
    again = make_sequence(40)
    scheduler.add(again)
    (admitted,) = scheduler.admit()
    assert admitted.blocks == []
    prefill_all(scheduler)
    assert len(scheduler.share_prefix(again)) == 0
    assert scheduler.num_cached_blocks == 2


def test_abort_reaches_running_and_waiting() -> None:
    scheduler = make_scheduler(max_rows=1)
    running, waiting = make_sequence(4, name="a"), make_sequence(4, name="b")
    scheduler.add(running)
    scheduler.add(waiting)
    scheduler.admit()
    aborted = scheduler.abort(lambda _: True, Finish(FinishKind.ABORT))
    assert aborted == [running, waiting]
    for sequence in aborted:
        scheduler.remove(sequence)
    assert scheduler.num_unfinished == 0


class TestDeterministic:
    """Shapes depend on a sequence's own length only."""

    def make(self) -> Scheduler:
        return make_scheduler(
            max_rows=32, max_kv_tokens=32768, key_step=64, chunk_tokens=64, decode_tile=4, prefill_tile=2
        )

    def test_every_forward_has_the_shape_of_its_tile(self) -> None:
        scheduler = self.make()
        for index in range(7):
            scheduler.add(make_sequence(30 + 20 * index, first=1000 * index))
        scheduler.admit()
        while (forward := scheduler.plan_prefill()) is not None:
            assert (forward.num_rows, forward.num_tokens) == (2, 64)
            assert {sequence.num_computed + 64 for sequence in forward.sequences} == {forward.num_keys}
            scheduler.finish_prefill(forward)
        forwards = scheduler.plan_decode()
        for forward in forwards:
            assert (forward.num_rows, forward.num_tokens) == (4, 1)
            for sequence in forward.sequences:
                assert forward.num_keys == (sequence.num_computed + 64) // 64 * 64
        assert sum(len(forward.sequences) for forward in forwards) == 7

    def test_only_whole_chunks_of_prompts_are_shared(self) -> None:
        scheduler = self.make()
        first = make_sequence(100, max_new_tokens=60)
        scheduler.add(first)
        scheduler.admit()
        prefill_all(scheduler)
        for _ in range(60):
            decode_once(scheduler)
        scheduler.share_prefix(first)
        scheduler.remove(first)
        second = Sequence("s", [*first.token_ids, 1, 2], SamplingParams(max_new_tokens=4))
        scheduler.add(second)
        scheduler.admit()
        assert second.num_cached == 64
