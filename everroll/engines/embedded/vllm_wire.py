"""vLLM's token-level wire as values: its bodies to the engine's own, finished sequences to its answers.

Only what a token-level client needs: no text, no streaming, one choice.
"""

from __future__ import annotations

import secrets
from typing import Annotated, Any, Literal

from pydantic import AliasChoices, BaseModel, ConfigDict, Field

from everroll.engines.embedded.sequence import FinishKind, Sequence
from everroll.engines.embedded.wire import BadRequestError, GenerateBody, SamplingBody, TokenId


class VllmSampling(BaseModel):
    """Sampling parameters, as vLLM names them. Parameters that are not listed are refused."""

    model_config = ConfigDict(extra="forbid")

    max_tokens: Annotated[int, Field(ge=1)] = 16
    temperature: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=-1)] = -1
    stop_token_ids: list[TokenId] | None = None
    ignore_eos: bool = False
    seed: int | None = None
    logprobs: Annotated[int, Field(ge=0, le=0)] | None = None
    """0: of the sampled token only."""
    skip_special_tokens: bool = True
    n: Literal[1] = 1


class VllmGenerateBody(BaseModel):
    """Body of `/inference/v1/generate`. Unknown fields are ignored: they do not change what is sampled."""

    token_ids: Annotated[list[TokenId], Field(min_length=1)]
    sampling_params: VllmSampling
    request_id: str | None = None
    stream: Literal[False] = False


class CompletionsBody(BaseModel):
    """Body of `/v1/completions`, with a prompt of token ids only."""

    prompt: Annotated[list[TokenId], Field(min_length=1)]
    max_tokens: Annotated[int, Field(ge=1)] = 16
    temperature: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=-1)] = -1
    stop_token_ids: list[TokenId] | None = None
    ignore_eos: bool = False
    seed: int | None = None
    logprobs: Annotated[int, Field(ge=0, le=0)] | None = None
    n: Literal[1] = 1
    stop: Annotated[list[str], Field(max_length=0)] | None = None
    echo: Literal[False] = False
    stream: Literal[False] = False
    request_id: str | None = None

    def as_generate(self) -> VllmGenerateBody:
        fields = self.model_dump(include=set(VllmSampling.model_fields))
        return VllmGenerateBody(
            token_ids=self.prompt, sampling_params=VllmSampling(**fields), request_id=self.request_id
        )


class ReloadArguments(BaseModel):
    weights_path: str


class RpcBody(BaseModel):
    """Body of `/collective_rpc`; the one method that the engine has is `reload_weights`."""

    method: Literal["reload_weights"]
    arguments: ReloadArguments = Field(validation_alias=AliasChoices("kwargs"))


class NewVersionBody(BaseModel):
    new_version: Annotated[str, Field(pattern=r"^\d{1,9}$")]


def parse_pause_mode(mode: str) -> Literal["abort", "in_place"]:
    """vLLM's pause modes as the engine's; `wait` is not offered.

    Raises:
        BadRequestError: another mode.
    """
    if mode == "keep":
        return "in_place"
    if mode == "abort":
        return "abort"
    raise BadRequestError(f"mode must be abort or keep, not {mode!r}")


def to_generate(body: VllmGenerateBody) -> GenerateBody:
    """The same request in the engine's own form."""
    wanted = body.sampling_params
    return GenerateBody(
        input_ids=body.token_ids,
        sampling_params=SamplingBody(
            max_new_tokens=wanted.max_tokens,
            temperature=wanted.temperature,
            top_p=wanted.top_p,
            top_k=wanted.top_k or -1,
            stop_token_ids=wanted.stop_token_ids,
            ignore_eos=wanted.ignore_eos,
            sampling_seed=wanted.seed,
        ),
        rid=body.request_id or secrets.token_hex(16),
        return_logprob=wanted.logprobs is not None,
    )


def build_generate_answer(body: GenerateBody, sequence: Sequence) -> dict[str, Any]:
    """The answer to `/inference/v1/generate`; tokens are named `token_id:N`."""
    choice: dict[str, Any] = {
        "index": 0,
        "token_ids": sequence.new_token_ids,
        "finish_reason": _finish_reason(sequence),
        "logprobs": None,
    }
    if body.return_logprob:
        pairs = zip(sequence.new_token_ids, sequence.logprobs, strict=True)
        content = [{"token": f"token_id:{token}", "logprob": logprob, "top_logprobs": []} for token, logprob in pairs]
        choice["logprobs"] = {"content": content}
    return {"request_id": sequence.rid, "choices": [choice], "usage": _usage(sequence)}


def build_completions_answer(body: GenerateBody, sequence: Sequence, model: str) -> dict[str, Any]:
    """The answer to `/v1/completions` with `return_token_ids`; its text stays empty."""
    choice: dict[str, Any] = {
        "index": 0,
        "text": "",
        "token_ids": sequence.new_token_ids,
        "finish_reason": _finish_reason(sequence),
        "logprobs": {"token_logprobs": sequence.logprobs} if body.return_logprob else None,
    }
    return {"object": "text_completion", "model": model, "choices": [choice], "usage": _usage(sequence)}


def _finish_reason(sequence: Sequence) -> str:
    finish = sequence.finish
    if finish is None:
        raise ValueError(f"sequence {sequence.rid} has not finished")
    failed = finish.kind is FinishKind.ABORT and finish.status_code == 500
    return "error" if failed else finish.kind.value


def _usage(sequence: Sequence) -> dict[str, Any]:
    return {
        "prompt_tokens": sequence.num_prompt,
        "completion_tokens": sequence.num_new,
        "prompt_tokens_details": {"cached_tokens": sequence.num_cached},
    }
