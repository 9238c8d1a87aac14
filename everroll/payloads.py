"""How values become payloads of Temporal: JSON of pydantic models, large ones compressed, none above 256 KiB (I9)."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

from temporalio.api.common.v1 import Payload
from temporalio.contrib.pydantic import PydanticJSONPlainPayloadConverter, PydanticPayloadConverter
from temporalio.converter import CompositePayloadConverter, EncodingPayloadConverter
from temporalio.exceptions import ApplicationError

from everroll.contracts.outcomes import ErrorType

MAX_PAYLOAD_BYTES = 256 * 1024
COMPRESSED_FROM_BYTES = 64 * 1024
"""JSON of so many bytes is compressed, to a fifth or less. Below, people can read it in the web UI."""

_ENCODING = "encoding"


class CompressedJSONConverter(EncodingPayloadConverter):
    """Reads what `GuardedConverter` compressed. It converts no value by itself."""

    def __init__(self, json: PydanticJSONPlainPayloadConverter) -> None:
        self._json = json

    @property
    def encoding(self) -> str:
        return "json/zlib"

    def to_payload(self, value: Any) -> Payload | None:
        return None

    def compress(self, payload: Payload) -> Payload:
        return Payload(metadata={_ENCODING: self.encoding.encode()}, data=zlib.compress(payload.data, level=1))

    def from_payload(self, payload: Payload, type_hint: type | None = None) -> Any:
        plain = Payload(metadata={_ENCODING: self._json.encoding.encode()}, data=zlib.decompress(payload.data))
        return self._json.from_payload(plain, type_hint)


_JSON = PydanticJSONPlainPayloadConverter()
_COMPRESSED = CompressedJSONConverter(_JSON)
_OTHERS = [item for item in PydanticPayloadConverter().converters.values() if item.encoding != _JSON.encoding]
_ENCODINGS: tuple[EncodingPayloadConverter, ...] = (*_OTHERS, _JSON, _COMPRESSED)


class GuardedConverter(CompositePayloadConverter):
    """Refuses what is above 256 KiB even when compressed: arrays belong in the store, references in history.

    It refuses where the value is given, so that a workflow or an activity fails by it; a codec would fail the workflow
    task, again and again. The SDK makes a converter for each workflow and more for each workflow task: the encodings
    are shared, since each keeps what it has worked out about types.
    """

    def __init__(self) -> None:
        super().__init__(*_ENCODINGS)

    def to_payloads(self, values: Sequence[Any]) -> list[Payload]:
        """
        Raises:
            ApplicationError: a value is too large, type `PayloadsTooLarge`; not retryable.
        """
        return [_fit(payload) for payload in super().to_payloads(values)]


def _fit(payload: Payload) -> Payload:
    size = len(payload.data)
    if size < COMPRESSED_FROM_BYTES:
        return payload
    fitted = _COMPRESSED.compress(payload) if payload.metadata[_ENCODING] == _JSON.encoding.encode() else payload
    if len(fitted.data) > MAX_PAYLOAD_BYTES:
        raise ApplicationError(
            f"a payload of {size} bytes, {len(fitted.data)} compressed, was about to be sent to Temporal; the limit is "
            f"{MAX_PAYLOAD_BYTES}. It starts with: {payload.data[:200]!r}",
            type=ErrorType.PAYLOAD_TOO_LARGE.value,
            non_retryable=True,
        )
    return fitted
