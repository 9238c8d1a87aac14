"""Base classes of all contracts."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, ValidationError


class Payload(BaseModel):
    """A value that travels through Temporal or between processes.

    Immutable. Unknown fields are ignored, so that a worker one release behind can read what a newer one wrote;
    therefore every field that is added later is optional.
    """

    model_config = ConfigDict(frozen=True, extra="ignore", use_attribute_docstrings=True, ser_json_inf_nan="constants")


class Spec(BaseModel):
    """A piece of configuration that a person writes: unknown keys are errors, each field is documented."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, validate_default=True, allow_inf_nan=False
    )


def list_faults(error: ValidationError, whole: str = "") -> list[str]:
    """`key: what is wrong with it` for each fault, in words for people; `whole` stands for a key where it concerns the
    value as a whole."""
    faults = []
    for item in error.errors(include_url=False, include_input=False):
        key = ".".join(map(str, item["loc"])) or whole
        faults.append(f"{key}: {word_fault(item['msg'])}" if key else word_fault(item["msg"]))
    return faults


def word_fault(message: str) -> str:
    """A message of pydantic without the name of the exception that a check of ours raised."""
    return message.removeprefix("Value error, ").removeprefix("Assertion failed, ")
