"""The endpoint /v1/embeddings."""

from __future__ import annotations

import asyncio
import base64
import secrets
import struct
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from services.common import logs
from services.common.errors import SluiceError, invalid
from services.common.observability import telemetry
from services.common.packing import pack_u32
from services.gateway import context
from services.gateway.apis.common.field_names import FieldNameMap
from services.gateway.apis.common.http import BodyReader, client_closed_response, json_response
from services.gateway.apis.openai.embedding_schemas import EmbeddingRequest, PoolingFields
from services.gateway.apis.openai.fields import one_by_one
from services.gateway.apis.openai.validation import check
from services.gateway.core.request import TextPrompt, TokenPrompt
from services.gateway.http.sse import result_unless_gone
from services.gateway.pipeline.models import Pipelines
from services.gateway.settings import GatewaySettings
from services.gateway.workers.capabilities import able
from services.gateway.workers.embeddings import NEEDS, EmbedClient, Embeddings, all_or_none
from services.gateway.workers.registry import WorkerEntry

MAX_CONCURRENT_TOKENIZATIONS = 32
_FIELD_NAMES = FieldNameMap({"model": "model"}, default="input")


class EmbeddingEndpoints:
    """Tokenizes the inputs and computes their embeddings on workers that support it.

    Args:
        bodies: reads the bodies of requests.
    """

    def __init__(
        self, pipelines: Pipelines, client: EmbedClient, settings: GatewaySettings, bodies: BodyReader
    ) -> None:
        self._pipelines = pipelines
        self._client = client
        self._budgets = settings.budgets
        self._bodies = bodies

    async def embeddings(self, request: Request) -> Response:
        """Create embeddings of texts or of token ids."""
        fields = check(EmbeddingRequest, await self._bodies.read(request), self._budgets)
        result = await self.vectors(request, fields, one_by_one(fields.input), fields.dimensions or 0)
        if result is None:
            return client_closed_response()
        data = [
            {"object": "embedding", "index": index, "embedding": _encoded(vector, fields)}
            for index, vector in enumerate(result.vectors)
        ]
        usage = {"prompt_tokens": result.prompt_tokens, "total_tokens": result.prompt_tokens}
        return json_response({"object": "list", "data": data, "model": fields.model, "usage": usage})

    async def vectors(
        self, request: Request, fields: PoolingFields, inputs: list[str | list[int]], dimensions: int = 0
    ) -> Embeddings | None:
        """Returns the vectors of inputs; None if the client has disconnected.

        Args:
            dimensions: of the vectors; 0 for those of the model.
        """
        registry = self._pipelines.registry
        registry.model(fields.model)
        entry = able(registry.of_model(fields.model), NEEDS)[0]
        adapter = fields.lora_path or ("" if entry.model == fields.model else fields.model)
        request_id = f"embd-{secrets.token_hex(12)}"
        logs.request_id.set(request_id)
        label = fields.request_id or fields.rid
        with telemetry.stage("gateway.embed", dict(request.headers), model=fields.model, client_request_id=label):
            ids = await self._tokenized(inputs, fields, entry)
            permit = context.current().permit
            await permit.charge(sum(map(len, ids)) // 4)
            computed = self._client.embed(request_id, entry.model, ids, dimensions, adapter)
            result = await result_unless_gone(request.receive, computed)
        if result is not None:
            permit.spent(result.prompt_tokens)
            if (audit := context.current().audit) is not None:
                audit.model, audit.prompt_tokens = fields.model, result.prompt_tokens
        return result

    async def _tokenized(self, inputs: list[str | list[int]], fields: PoolingFields, entry: WorkerEntry) -> list[bytes]:
        semaphore = asyncio.Semaphore(MAX_CONCURRENT_TOKENIZATIONS)

        async def tokenize(text_or_ids: str | list[int]) -> bytes:
            prompt = (
                TextPrompt(text_or_ids, fields.add_special_tokens)
                if isinstance(text_or_ids, str)
                else TokenPrompt(pack_u32(text_or_ids))
            )
            async with semaphore:
                try:
                    tokenized = await self._pipelines.preprocess.tokenize(entry.model, prompt)
                except SluiceError as error:
                    raise _FIELD_NAMES.rename(error) from None
            return _truncated(tokenized.token_ids, fields, tokenized.context_limit(entry.context_length))

        return await all_or_none(tokenize(value) for value in inputs)


def _truncated(ids: bytes, fields: PoolingFields, context: int) -> bytes:
    """Returns the ids, truncated as the request specifies; raises SluiceError if there are none or too many."""
    max_tokens = context if fields.truncate_prompt_tokens == -1 else fields.truncate_prompt_tokens
    if max_tokens and len(ids) > 4 * max_tokens:
        # By default the end is cut: the beginning usually represents a text best.
        ids = ids[-4 * max_tokens :] if fields.truncation_side == "left" else ids[: 4 * max_tokens]
    if not ids:
        raise invalid("An input has no tokens; send only non-empty inputs.", param="input", code="empty_input")
    if context and len(ids) > 4 * context:
        raise invalid(
            f"An input has {len(ids) // 4} tokens, but the context of {fields.model} holds {context}; shorten it or "
            "set truncate_prompt_tokens.",
            param="input",
            code="context_length_exceeded",
        )
    return ids


def _encoded(vector: bytes, fields: EmbeddingRequest) -> Any:
    if fields.encoding_format == "base64":
        return base64.b64encode(vector).decode()
    return list(struct.unpack(f"<{len(vector) // 4}f", vector))
