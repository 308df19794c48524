"""Checks the lines of an input file before any of them is run."""

from __future__ import annotations

from collections.abc import AsyncIterator
from hashlib import blake2b
from typing import Any

from services.gateway.batches.files import Line
from services.gateway.batches.schema import BatchLine
from services.gateway.batches.throttle import Turns
from services.gateway.errors import ApiError, invalid
from services.gateway.openai.gateway import Gateway

MAX_ERRORS = 100  # of one batch that are shown


class InputCheck:
    """Checks the lines of one batch. `errors`: the first MAX_ERRORS errors of them."""

    def __init__(self, gateway: Gateway, endpoint: str) -> None:
        self._gateway = gateway
        self._endpoint = endpoint
        self._ids: set[bytes] = set()
        self._models: list[str | None] = []  # the first line's model, perhaps None; the others must have the same
        self.num_lines = 0
        self.errors: list[dict[str, Any]] = []

    async def read(self, lines: AsyncIterator[Line]) -> None:
        """Check all lines, or up to MAX_ERRORS errors."""
        turns = Turns()
        async for line in lines:
            await turns.take(len(line.text or b""))
            self.num_lines += 1
            try:
                self._check(await parse_line(self._gateway, line))
            except ApiError as error:
                self._add(error, line.number)
                if len(self.errors) == MAX_ERRORS:
                    return
        if not self.num_lines:
            self._add(invalid(None, "the input file has no request", code="empty_file"), None)

    def _check(self, line: BatchLine) -> None:
        """Raises ApiError."""
        if line.url != self._endpoint:
            message = f"url: {line.url[:80]!r} is not the endpoint of the batch, {self._endpoint!r}"
            raise invalid("url", message, code="invalid_url")
        model = line.body.get("model")
        if model is not None and not isinstance(model, str):
            raise invalid("body.model", "body.model must be a string", code="invalid_type")
        try:
            self._gateway.check_model(model)
        except ApiError as error:
            raise invalid("body.model", error.message, code=error.code) from None
        self._models = self._models or [model]
        if model != self._models[0]:
            message = f"body.model: all lines must have the same model, and the first has {self._models[0]!r}"
            raise invalid("body.model", message, code="mismatched_model")
        for name in ("stream", "background"):
            if line.body.get(name) not in (None, False):
                raise invalid(f"body.{name}", f"body.{name} is not possible in a batch", code="unsupported_value")
        # 16 bytes of each, because ids may be long.
        digest = blake2b(line.custom_id.encode(), digest_size=16).digest()
        if digest in self._ids:
            message = f"custom_id: {line.custom_id[:80]!r} is on an earlier line, too"
            raise invalid("custom_id", message, code="duplicate_custom_id")
        self._ids.add(digest)

    def _add(self, error: ApiError, number: int | None) -> None:
        code = error.code or "invalid_request"
        self.errors.append({"code": code, "line": number, "message": error.message, "param": error.param})


async def parse_line(gateway: Gateway, line: Line) -> BatchLine:
    """The request of a line. Raises ApiError 400, and 503 if the process that parses large lines has died."""
    if line.text is None:
        message = f"the line is larger than {gateway.max_body_bytes} bytes (--max-body-bytes)"
        raise invalid(None, message, code="line_too_large")
    try:
        parsed, _ = await gateway.parser.parse(BatchLine, line.text, gateway.builder.max_model_len, gone=lambda: False)
    except ApiError as error:
        code = "invalid_json_line" if error.code == "invalid_json" else error.code
        raise ApiError(error.status, error.message, param=error.param, code=code) from None
    return parsed
