"""SGLang's wire as values: JSON bodies to sequences, finished sequences to JSON bodies. Knows no HTTP server.

What the engine does not do is refused, never quietly ignored, where it would change what is sampled or answered.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Protocol, TypeVar

from pydantic import BaseModel, ConfigDict, Field, StrictInt, ValidationError

from everroll.contracts.base import list_faults
from everroll.engines.embedded.sequence import FinishKind, SamplingParams, Sequence

TokenId = Annotated[StrictInt, Field(ge=0)]
BodyT = TypeVar("BodyT", bound=BaseModel)


class BadRequestError(ValueError):
    """The request cannot be served as it stands; answered with 400 and this text."""


class TextDecoder(Protocol):
    """A tokenizer, as far as answers need it."""

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str: ...


class SamplingBody(BaseModel):
    """`sampling_params` of `/generate`. Parameters that are not listed are refused."""

    model_config = ConfigDict(extra="forbid")

    max_new_tokens: Annotated[int, Field(ge=1)] = 128
    temperature: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=-1)] = -1
    stop_token_ids: list[TokenId] | None = None
    ignore_eos: bool = False
    sampling_seed: int | None = None
    skip_special_tokens: bool = True
    no_stop_trim: bool = False
    spaces_between_special_tokens: bool = True
    n: Literal[1] = 1
    stop: Annotated[list[str], Field(max_length=0)] | None = None
    min_new_tokens: Literal[0] = 0
    min_p: Annotated[float, Field(ge=0, le=0)] = 0.0
    frequency_penalty: Annotated[float, Field(ge=0, le=0)] = 0.0
    presence_penalty: Annotated[float, Field(ge=0, le=0)] = 0.0
    repetition_penalty: Annotated[float, Field(ge=1, le=1)] = 1.0


class GenerateBody(BaseModel):
    """Body of `/generate`. Unknown fields are ignored: they do not change what is sampled."""

    model_config = ConfigDict(extra="ignore")

    input_ids: Annotated[list[TokenId], Field(min_length=1)]
    sampling_params: SamplingBody = Field(default_factory=SamplingBody)
    rid: str | None = None
    return_logprob: bool = False
    stream: Literal[False] = False
    return_text_in_logprobs: Literal[False] = False
    logprob_start_len: Literal[-1] | None = None
    """Log-probabilities of prompt tokens are not offered."""


class PauseBody(BaseModel):
    mode: Literal["abort", "retract", "in_place"] = "abort"


class UpdateBody(BaseModel):
    """Body of `/update_weights_from_disk`. The prefix cache is always flushed."""

    model_path: str
    load_format: Literal["auto", "safetensors"] | None = None
    weight_version: Annotated[str, Field(pattern=r"^\d{1,9}$")] | None = None
    """A number, since each token carries its version as one. None keeps the version."""
    abort_all_requests: bool = False


class AbortBody(BaseModel):
    rid: str | None = None
    abort_all: bool = False


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """What requests are checked against."""

    vocab_size: int
    max_context: int
    eos_token_ids: frozenset[int]


def parse_body(kind: type[BodyT], payload: bytes) -> BodyT:
    """A JSON body as a model; an empty body stands for `{}`.

    Raises:
        BadRequestError: names every field that is wrong.
    """
    try:
        return kind.model_validate_json(payload or b"{}")
    except ValidationError as error:
        raise BadRequestError(_describe(error)) from error


def build_sequence(body: GenerateBody, limits: ModelLimits) -> Sequence:
    """A sequence ready for the scheduler.

    Raises:
        BadRequestError: a token the model does not know, or no room for a single new token.
    """
    num_prompt = len(body.input_ids)
    if num_prompt >= limits.max_context:
        raise BadRequestError(
            f"input_ids has {num_prompt} tokens; the context is {limits.max_context} tokens, "
            f"so that a prompt can have {limits.max_context - 1} at most"
        )
    largest = max(body.input_ids)
    if largest >= limits.vocab_size:
        index = body.input_ids.index(largest)
        raise BadRequestError(f"input_ids[{index}] is {largest}; the vocabulary has {limits.vocab_size} tokens")
    wanted = body.sampling_params
    stops = frozenset(wanted.stop_token_ids or ()) | (frozenset() if wanted.ignore_eos else limits.eos_token_ids)
    params = SamplingParams(
        max_new_tokens=min(wanted.max_new_tokens, limits.max_context - num_prompt),
        temperature=wanted.temperature,
        top_p=wanted.top_p,
        top_k=wanted.top_k,
        stop_token_ids=stops,
        seed=secrets.randbits(63) if wanted.sampling_seed is None else wanted.sampling_seed,
    )
    return Sequence(rid=body.rid or secrets.token_hex(16), token_ids=list(body.input_ids), params=params)


def build_answer(
    body: GenerateBody, sequence: Sequence, weight_version: int, decoder: TextDecoder | None
) -> dict[str, Any]:
    """The answer to `/generate`. `output_ids` holds the stop token too; only the text is trimmed."""
    token_ids = sequence.new_token_ids
    meta: dict[str, Any] = {
        "id": sequence.rid,
        "prompt_tokens": sequence.num_prompt,
        "completion_tokens": len(token_ids),
        "cached_tokens": sequence.num_cached,
        "weight_version": str(weight_version),
        "token_weight_versions": sequence.weight_versions,
        "finish_reason": _build_finish_reason(sequence),
    }
    if body.return_logprob:
        pairs = zip(sequence.logprobs, token_ids, strict=True)
        meta["output_token_logprobs"] = [[logprob, token_id, None] for logprob, token_id in pairs]
    return {"text": _build_text(body, sequence, decoder), "output_ids": token_ids, "meta_info": meta}


def _build_finish_reason(sequence: Sequence) -> dict[str, Any]:
    finish = sequence.finish
    if finish is None:
        raise ValueError(f"sequence {sequence.rid} has not finished")
    if finish.kind is FinishKind.STOP:
        return {"type": "stop", "matched": finish.matched}
    if finish.kind is FinishKind.LENGTH:
        return {"type": "length", "length": sequence.num_new}
    return {"type": "abort", "message": finish.message or "aborted", "status_code": finish.status_code}


def _build_text(body: GenerateBody, sequence: Sequence, decoder: TextDecoder | None) -> str:
    """Empty when the checkpoint has no tokenizer."""
    if decoder is None:
        return ""
    token_ids = sequence.new_token_ids
    stopped = sequence.finish is not None and sequence.finish.kind is FinishKind.STOP
    if stopped and not body.sampling_params.no_stop_trim:
        token_ids = token_ids[:-1]
    return decoder.decode(token_ids, skip_special_tokens=body.sampling_params.skip_special_tokens)


def _describe(error: ValidationError) -> str:
    return "; ".join(list_faults(error, whole="body")[:5])
