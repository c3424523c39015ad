"""The endpoints /v1/score and /v1/rerank.

The score of two texts is the cosine of their vectors, as vLLM computes it for models that embed.
"""

from __future__ import annotations

import asyncio
import math
import secrets
import struct
import time
from collections.abc import Sequence
from operator import mul
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from services.gateway.apis.common.http import BodyReader, client_closed_response, json_response
from services.gateway.apis.openai.embedding_schemas import PoolingFields, RerankRequest, ScoreRequest
from services.gateway.apis.openai.embeddings import EmbeddingEndpoints
from services.gateway.apis.openai.validation import check
from services.gateway.settings import GatewaySettings
from services.gateway.workers.embeddings import Embeddings


class ScoreEndpoints:
    """Compares texts by their embeddings.

    Args:
        embeddings: computes the vectors.
        bodies: reads the bodies of requests.
    """

    def __init__(self, embeddings: EmbeddingEndpoints, settings: GatewaySettings, bodies: BodyReader) -> None:
        self._embeddings = embeddings
        self._budgets = settings.budgets
        self._bodies = bodies

    async def score(self, request: Request) -> Response:
        """Score pairs of texts: one with each of several, or each with its counterpart."""
        fields = check(ScoreRequest, await self._bodies.read(request), self._budgets)
        first, second = fields.pairs
        found = await self._vectors(request, fields, [*first, *second])
        if found is None:
            return client_closed_response()
        left, right = found.vectors[: len(first)], found.vectors[len(first) :]
        scores = await cosines([*left] * len(right) if len(left) == 1 else left, right)
        data = [{"index": index, "object": "score", "score": score} for index, score in enumerate(scores)]
        head = {"id": f"score-{secrets.token_hex(12)}", "object": "list", "created": int(time.time())}
        return json_response({**head, "model": fields.model, "data": data, "usage": _usage(found)})

    async def rerank(self, request: Request) -> Response:
        """Order documents by their relevance for a query, the most relevant first."""
        fields = check(RerankRequest, await self._bodies.read(request), self._budgets)
        texts = fields.texts
        found = await self._vectors(request, fields, [fields.query, *texts])
        if found is None:
            return client_closed_response()
        scores = await cosines([found.vectors[0]] * len(texts), found.vectors[1:])
        order = sorted(range(len(texts)), key=lambda index: -scores[index])[: fields.top_n or None]
        results = [
            {
                "index": index,
                **({} if fields.return_documents is False else {"document": {"text": texts[index]}}),
                "relevance_score": scores[index],
            }
            for index in order
        ]
        head = {"id": f"rerank-{secrets.token_hex(12)}", "model": fields.model}
        return json_response({**head, "results": results, "usage": _usage(found)})

    async def _vectors(self, request: Request, fields: PoolingFields, texts: list[str]) -> Embeddings | None:
        distinct = list(dict.fromkeys(texts))
        found = await self._embeddings.vectors(request, fields, [*distinct])
        if found is None:
            return None
        by_text = dict(zip(distinct, found.vectors, strict=True))
        return Embeddings([by_text[text] for text in texts], found.prompt_tokens)


async def cosines(left: Sequence[bytes], right: Sequence[bytes]) -> list[float]:
    """Returns the cosine of each pair of vectors of packed little-endian float32; 0 for a vector of zeros."""
    found = []
    for one, other in zip(left, right, strict=True):
        found.append(_cosine(_floats(one), _floats(other)))
        await asyncio.sleep(0)  # a pair takes up to half a millisecond
    return found


def _floats(vector: bytes) -> tuple[float, ...]:
    return struct.unpack(f"<{len(vector) // 4}f", vector)


def _cosine(one: Sequence[float], other: Sequence[float]) -> float:
    norm = math.hypot(*one) * math.hypot(*other)
    return sum(map(mul, one, other)) / norm if norm else 0.0


def _usage(found: Embeddings) -> dict[str, Any]:
    return {"prompt_tokens": found.prompt_tokens, "total_tokens": found.prompt_tokens}
