"""The response objects of POST /inference/v1/generate: token ids, no text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import orjson

from services.gateway.apis.openai.completion_objects import CompletedChoice, Detail, Format
from services.gateway.apis.openai.response_schemas import Open, Usage
from services.gateway.operations.logprobs import Naming, TokenText, chat_logprobs


class TokenFormat(Format):
    """Formats responses whose choices are token ids; tokens are named `token_id:5`.

    Args:
        request_id: the client's name of the request, or the gateway's.
    """

    id_prefix = "generate-tokens-"
    prompt_in_choice = False
    _response_object = _chunk_object = "generate.tokens"
    _role, _no_output = b"", b""
    _choice_details, _response_details = (), ("prompt_logprobs", "kv_transfer_params")

    def __init__(self, completion_id: str, created: int, model: str, include_usage: bool, request_id: str) -> None:
        super().__init__(completion_id, created, model, include_usage)
        self._head["request_id"] = self._chunk_head["request_id"] = request_id
        self._chunk = b"data: " + orjson.dumps(self._chunk_head)[:-1] + b',"choices":[{"index":'

    def logprobs(self, tokens: Sequence[TokenText], naming: Naming) -> dict[str, Any]:
        """See Format."""
        return chat_logprobs(tokens, naming)

    def text_affixes(self, index: int) -> tuple[bytes, bytes]:
        """See Format; every chunk has details, so that none is made of these."""
        return b"", b""

    def _text(self, piece: bytes) -> bytes:
        return b""

    def _reasoning(self, piece: bytes) -> bytes:
        return b""

    def _call(self, call: int, call_id: str, name: str, arguments: str) -> bytes:
        return b""

    def _output(self, choice: CompletedChoice) -> dict[str, Any]:
        return {}

    def _event(self, index: int, output: bytes, detail: Detail, reason: bytes = b"null", extra: bytes = b"") -> bytes:
        return super()._event(index, b'"object":"generate.tokens.choice"', detail, reason, extra)


class GeneratedTokens(Open):
    """One choice."""

    index: int
    token_ids: list[int]
    finish_reason: str
    logprobs: dict[str, Any] | None


class Generated(Open):
    """The response."""

    id: str
    request_id: str
    created: int
    model: str
    choices: list[GeneratedTokens]
    usage: Usage
    prompt_logprobs: list[dict[str, Any] | None] | None
    kv_transfer_params: None
