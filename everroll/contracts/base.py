"""Base classes of all contracts."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


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
