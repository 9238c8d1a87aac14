"""JSON bodies to sequences and back, without HTTP."""

from __future__ import annotations

import pytest

from everroll.engines.embedded.sequence import Finish, FinishKind
from everroll.engines.embedded.wire import (
    BadRequestError,
    GenerateBody,
    ModelLimits,
    PauseBody,
    UpdateBody,
    build_answer,
    build_sequence,
    parse_body,
)

LIMITS = ModelLimits(vocab_size=50, max_context=20, eos_token_ids=frozenset({7}))


class Words:
    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        return f"{ids} {skip_special_tokens}"


def parse(text: str) -> GenerateBody:
    return parse_body(GenerateBody, text.encode())


def test_the_models_own_end_of_text_stops_unless_ignored() -> None:
    both = build_sequence(parse('{"input_ids": [1], "sampling_params": {"stop_token_ids": [9]}}'), LIMITS)
    assert both.params.stop_token_ids == {7, 9}
    ignored = build_sequence(parse('{"input_ids": [1], "sampling_params": {"ignore_eos": true}}'), LIMITS)
    assert ignored.params.stop_token_ids == frozenset()


def test_completions_end_at_the_context() -> None:
    sequence = build_sequence(parse('{"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 100}}'), LIMITS)
    assert sequence.params.max_new_tokens == 17


def test_requests_without_a_seed_get_different_ones() -> None:
    seeds = {build_sequence(parse('{"input_ids": [1]}'), LIMITS).params.seed for _ in range(5)}
    assert len(seeds) == 5


def test_the_stop_token_is_in_the_ids_and_the_versions_but_trimmed_from_the_text() -> None:
    body = parse('{"input_ids": [1], "rid": "r", "return_logprob": true}')
    sequence = build_sequence(body, LIMITS)
    sequence.append(4, -0.5, 2)
    sequence.append(7, -0.25, 3)
    answer = build_answer(body, sequence, 3, Words())
    assert answer["text"] == "[4] True"
    assert answer["output_ids"] == [4, 7]
    meta = answer["meta_info"]
    assert meta["finish_reason"] == {"type": "stop", "matched": 7}
    assert meta["output_token_logprobs"] == [[-0.5, 4, None], [-0.25, 7, None]]
    assert meta["token_weight_versions"] == [2, 3]
    assert meta["weight_version"] == "3"
    kept = parse('{"input_ids": [1], "sampling_params": {"no_stop_trim": true, "skip_special_tokens": false}}')
    assert build_answer(kept, sequence, 3, Words())["text"] == "[4, 7] False"


def test_an_aborted_call_says_so_and_keeps_what_it_had() -> None:
    body = parse('{"input_ids": [1]}')
    sequence = build_sequence(body, LIMITS)
    sequence.append(4, -0.5, 0)
    sequence.finish = Finish(FinishKind.ABORT, message="why")
    answer = build_answer(body, sequence, 0, None)
    assert answer["output_ids"] == [4]
    assert answer["meta_info"]["finish_reason"] == {"type": "abort", "message": "why", "status_code": 503}


@pytest.mark.parametrize("payload", [b"{", b"[]", b"\xff", b'{"input_ids": "abc"}'])
def test_bodies_that_are_no_request(payload: bytes) -> None:
    with pytest.raises(BadRequestError):
        parse_body(GenerateBody, payload)


def test_an_empty_body_stands_for_the_defaults() -> None:
    assert parse_body(PauseBody, b"").mode == "abort"
    with pytest.raises(BadRequestError, match="model_path: Field required"):
        parse_body(UpdateBody, b"")
