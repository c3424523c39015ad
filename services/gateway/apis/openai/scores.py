"""The endpoints /v1/score, /v1/rerank and /v1/classify.

The score of two texts is, as in vLLM, the cosine of their vectors for models that embed, and the probability of the one
class for models that compare texts (cross-encoders).
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

from services.common.errors import SluiceError, invalid
from services.gateway.apis.common.http import BodyReader, client_closed_response, json_response
from services.gateway.apis.openai.embedding_schemas import ClassifyRequest, PoolingFields, RerankRequest, ScoreRequest
from services.gateway.apis.openai.embeddings import EmbeddingEndpoints
from services.gateway.apis.openai.fields import one_by_one
from services.gateway.apis.openai.validation import check
from services.gateway.settings import GatewaySettings
from services.gateway.workers.embeddings import Embeddings
from services.gateway.workers.registry import WorkerEntry


class ScoreEndpoints:
    """Compares and classifies texts.

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
        found = await self._scores(request, fields, first * len(second) if len(first) == 1 else first, second)
        if found is None:
            return client_closed_response()
        scores, tokens = found
        data = [{"index": index, "object": "score", "score": score} for index, score in enumerate(scores)]
        head = {"id": f"score-{secrets.token_hex(12)}", "object": "list", "created": int(time.time())}
        return json_response({**head, "model": fields.model, "data": data, "usage": _usage(tokens)})

    async def rerank(self, request: Request) -> Response:
        """Order documents by their relevance for a query, the most relevant first."""
        fields = check(RerankRequest, await self._bodies.read(request), self._budgets)
        texts = fields.texts
        found = await self._scores(request, fields, [fields.query] * len(texts), texts)
        if found is None:
            return client_closed_response()
        scores, tokens = found
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
        return json_response({**head, "results": results, "usage": _usage(tokens)})

    async def classify(self, request: Request) -> Response:
        """Classify texts."""
        fields = check(ClassifyRequest, await self._bodies.read(request), self._budgets)
        entry = self._embeddings.worker(fields)
        if not entry.labels:
            raise _unsupported("it does not classify; use /v1/embeddings")
        found = await self._embeddings.vectors(request, fields, entry, one_by_one(fields.input))
        if found is None:
            return client_closed_response()
        data = [_class(index, _floats(values), entry.labels) for index, values in enumerate(found.vectors)]
        head = {"id": f"classify-{secrets.token_hex(12)}", "object": "list", "created": int(time.time())}
        usage = _usage(found.prompt_tokens)
        return json_response({**head, "model": fields.model, "data": data, "usage": usage})

    async def _scores(
        self, request: Request, fields: PoolingFields, first: Sequence[str], second: Sequence[str]
    ) -> tuple[list[float], int] | None:
        """Returns the score of each pair of texts and the tokens that it took; None if the client has disconnected."""
        entry = self._embeddings.worker(fields)
        if not entry.labels:
            vectors = await self._vectors(request, fields, entry, [*first, *second])
            if vectors is None:
                return None
            left, right = vectors.vectors[: len(first)], vectors.vectors[len(first) :]
            return await cosines(left, right), vectors.prompt_tokens
        if len(entry.labels) != 1:
            raise _unsupported(f"it classifies into {len(entry.labels)} classes, not one; use /v1/classify")
        found = await self._embeddings.vectors(request, fields, entry, list(zip(first, second, strict=True)))
        return None if found is None else ([_floats(value)[0] for value in found.vectors], found.prompt_tokens)

    async def _vectors(
        self, request: Request, fields: PoolingFields, entry: WorkerEntry, texts: list[str]
    ) -> Embeddings | None:
        distinct = list(dict.fromkeys(texts))
        found = await self._embeddings.vectors(request, fields, entry, distinct)
        if found is None:
            return None
        by_text = dict(zip(distinct, found.vectors, strict=True))
        return Embeddings([by_text[text] for text in texts], found.prompt_tokens)


def _unsupported(reason: str) -> SluiceError:
    return invalid(f"model is not supported here: {reason}.", param="model", code="unsupported_parameter")


def _class(index: int, probabilities: Sequence[float], labels: Sequence[str]) -> dict[str, Any]:
    likeliest = max(range(len(labels)), key=probabilities.__getitem__)
    return {"index": index, "label": labels[likeliest], "probs": probabilities, "num_classes": len(labels)}


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


def _usage(tokens: int) -> dict[str, int]:
    return {"prompt_tokens": tokens, "total_tokens": tokens}
