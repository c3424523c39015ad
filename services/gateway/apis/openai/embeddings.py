"""The endpoint /v1/embeddings, and what all endpoints of pooling models share."""

from __future__ import annotations

import asyncio
import base64
import secrets
import struct
from collections.abc import Sequence
from typing import Any

from services.common.base import logs
from services.common.base.errors import SluiceError, invalid
from services.common.base.packing import pack_u32
from services.common.observability import telemetry
from services.gateway.apis.openai.embedding_schemas import EmbeddingRequest, PoolingFields
from services.gateway.apis.openai.fields import one_by_one
from services.gateway.apis.openai.validation import check
from services.gateway.backends.workers.capabilities import able
from services.gateway.backends.workers.embeddings import (
    NEEDS,
    EmbedClient,
    Embeddings,
    EmbedInput,
    all_or_none,
    pooling,
)
from services.gateway.backends.workers.registry import WorkerEntry
from services.gateway.core import context
from services.gateway.core.request import TextPrompt, TokenPrompt
from services.gateway.operations.field_names import FieldNameMap
from services.gateway.operations.operation import Caller, Whole
from services.gateway.operations.waiting import result_unless_gone
from services.gateway.pipeline.models import Pipelines
from services.gateway.settings import GatewaySettings

MAX_CONCURRENT_TOKENIZATIONS = 32
"""Inputs of one request that are tokenized at the same time; the others wait."""
PoolingInput = str | list[int] | tuple[str, str]
"""A text, token ids, or a pair of texts."""
_FIELD_NAMES = FieldNameMap({"model": "model"}, default="input")


class EmbeddingOperations:
    """Tokenizes the inputs and computes their embeddings on workers that support it."""

    def __init__(self, pipelines: Pipelines, client: EmbedClient, settings: GatewaySettings) -> None:
        self._pipelines = pipelines
        self._client = client
        self._budgets = settings.budgets

    async def embeddings(self, body: dict[str, Any], caller: Caller) -> Whole | None:
        """Create embeddings of texts or of token ids."""
        fields = check(EmbeddingRequest, body, self._budgets)
        entry = able(self._workers(fields), NEEDS)[0]
        result = await self.vectors(caller, fields, entry, one_by_one(fields.input), fields.dimensions or 0)
        if result is None:
            return None
        data = [
            {"object": "embedding", "index": index, "embedding": _encoded(vector, fields)}
            for index, vector in enumerate(result.vectors)
        ]
        usage = {"prompt_tokens": result.prompt_tokens, "total_tokens": result.prompt_tokens}
        return Whole({"object": "list", "data": data, "model": fields.model, "usage": usage})

    def worker(self, fields: PoolingFields) -> WorkerEntry:
        """Returns a worker of the model, which embeds or classifies; raises SluiceError if there is none."""
        return pooling(self._workers(fields))[0]

    def _workers(self, fields: PoolingFields) -> Sequence[WorkerEntry]:
        registry = self._pipelines.registry
        registry.model(fields.model)
        return registry.of_model(fields.model)

    async def vectors(
        self,
        caller: Caller,
        fields: PoolingFields,
        entry: WorkerEntry,
        inputs: Sequence[PoolingInput],
        dimensions: int = 0,
    ) -> Embeddings | None:
        """Returns the vectors or classes of inputs; None if the caller is gone.

        Args:
            entry: a worker of the model.
            dimensions: of the vectors; 0 for those of the model.
        """
        adapter = fields.lora_path or ("" if entry.model == fields.model else fields.model)
        request_id = f"embd-{secrets.token_hex(12)}"
        logs.request_id.set(request_id)
        label = fields.request_id or fields.rid
        with telemetry.stage(
            "gateway.embed", telemetry.carrier_of_headers(caller.headers), model=fields.model, client_request_id=label
        ):
            ids = await self._tokenized(inputs, fields, entry)
            permit = context.current().permit
            await permit.charge(sum(len(each.token_ids) for each in ids) // 4)
            computed = self._client.embed(request_id, entry.model, ids, dimensions, adapter)
            result = await result_unless_gone(caller.gone, computed)
        if result is not None:
            permit.spent(result.prompt_tokens)
            if (audit := context.current().audit) is not None:
                audit.model, audit.prompt_tokens = fields.model, result.prompt_tokens
        return result

    async def _tokenized(
        self, inputs: Sequence[PoolingInput], fields: PoolingFields, entry: WorkerEntry
    ) -> list[EmbedInput]:
        semaphore = asyncio.Semaphore(MAX_CONCURRENT_TOKENIZATIONS)

        async def tokenize(given: PoolingInput) -> EmbedInput:
            prompt = _prompt(given, fields)
            async with semaphore:
                try:
                    tokenized = await self._pipelines.preprocess.tokenize(entry.model, prompt)
                except SluiceError as error:
                    raise _FIELD_NAMES.rename(error) from None
            context = tokenized.context_limit(entry.context_length)
            return _truncated(EmbedInput(tokenized.token_ids, tokenized.second_text_at), fields, context)

        return await all_or_none(tokenize(value) for value in inputs)


def _prompt(given: PoolingInput, fields: PoolingFields) -> TextPrompt | TokenPrompt:
    if isinstance(given, str):
        return TextPrompt(given, fields.add_special_tokens)
    if isinstance(given, tuple):
        return TextPrompt(given[0], fields.add_special_tokens, given[1])
    return TokenPrompt(pack_u32(given))


def _truncated(given: EmbedInput, fields: PoolingFields, context: int) -> EmbedInput:
    """Returns the ids, truncated as the request specifies; raises SluiceError if there are none or too many."""
    ids, second_text_at = given
    max_tokens = context if fields.truncate_prompt_tokens == -1 else fields.truncate_prompt_tokens
    if max_tokens and (cut := len(ids) // 4 - max_tokens) > 0:
        # By default the end is cut: the beginning usually represents a text best.
        if fields.truncation_side == "left":
            ids, second_text_at = ids[4 * cut :], max(second_text_at - cut, 0)
        else:
            ids, second_text_at = ids[: 4 * max_tokens], second_text_at if second_text_at < max_tokens else 0
    if not ids:
        raise invalid("An input has no tokens; send only non-empty inputs.", param="input", code="empty_input")
    if context and len(ids) > 4 * context:
        raise invalid(
            f"An input has {len(ids) // 4} tokens, but the context of {fields.model} holds {context}; shorten it or "
            "set truncate_prompt_tokens.",
            param="input",
            code="context_length_exceeded",
        )
    return EmbedInput(ids, second_text_at)


def _encoded(vector: bytes, fields: EmbeddingRequest) -> Any:
    if fields.encoding_format == "base64":
        return base64.b64encode(vector).decode()
    return list(struct.unpack(f"<{len(vector) // 4}f", vector))
