"""`GET /v1/models`, in one form that clients of OpenAI and of Anthropic both read. No I/O."""

from __future__ import annotations

from everroll.sessions.wires.base import Json


def build_models(model: str) -> Json:
    """The list of the one model that is served."""
    return {"object": "list", "data": [build_model(model)], "has_more": False, "first_id": model, "last_id": model}


def build_model(model: str) -> Json:
    return {
        "id": model,
        "object": "model",
        "created": 0,
        "owned_by": "everroll",
        "type": "model",
        "display_name": model,
        "created_at": "1970-01-01T00:00:00Z",
    }
