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

from services.common.base.errors import SluiceError, invalid
from services.gateway.apis.openai.embedding_schemas import PoolingFields
from services.gateway.apis.openai.embeddings import EmbeddingOperations
from services.gateway.apis.openai.fields import one_by_one
from services.gateway.apis.openai.openapi import GENERATING, responses
from services.gateway.apis.openai.validation import check
from services.gateway.apis.parts import ApiParts
from services.gateway.apis.routes import ApiRoutes
from services.gateway.apis.scores.schemas import (
    ClassifyRequest,
    ClassList,
    Reranked,
    RerankRequest,
    ScoreList,
    ScoreRequest,
)
from services.gateway.backends.workers.embeddings import Embeddings
from services.gateway.backends.workers.registry import WorkerEntry
from services.gateway.operations.operation import Caller, Whole
from services.gateway.settings import GatewaySettings


class ScoreOperations:
    """Compares and classifies texts.

    Args:
        embeddings: computes the vectors.
    """

    def __init__(self, embeddings: EmbeddingOperations, settings: GatewaySettings) -> None:
        self._embeddings = embeddings
        self._budgets = settings.budgets

    async def score(self, body: dict[str, Any], caller: Caller) -> Whole | None:
        """Score pairs of texts: one with each of several, or each with its counterpart."""
        fields = check(ScoreRequest, body, self._budgets)
        first, second = fields.pairs
        found = await self._scores(caller, fields, first * len(second) if len(first) == 1 else first, second)
        if found is None:
            return None
        scores, tokens = found
        data = [{"index": index, "object": "score", "score": score} for index, score in enumerate(scores)]
        head = {"id": f"score-{secrets.token_hex(12)}", "object": "list", "created": int(time.time())}
        return Whole({**head, "model": fields.model, "data": data, "usage": _usage(tokens)})

    async def rerank(self, body: dict[str, Any], caller: Caller) -> Whole | None:
        """Order documents by their relevance for a query, the most relevant first."""
        fields = check(RerankRequest, body, self._budgets)
        texts = fields.texts
        found = await self._scores(caller, fields, [fields.query] * len(texts), texts)
        if found is None:
            return None
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
        return Whole({**head, "results": results, "usage": _usage(tokens)})

    async def classify(self, body: dict[str, Any], caller: Caller) -> Whole | None:
        """Classify texts."""
        fields = check(ClassifyRequest, body, self._budgets)
        entry = self._embeddings.worker(fields)
        if not entry.labels:
            raise _unsupported("it does not classify; use /v1/embeddings")
        found = await self._embeddings.vectors(caller, fields, entry, one_by_one(fields.input))
        if found is None:
            return None
        data = [_class(index, _floats(values), entry.labels) for index, values in enumerate(found.vectors)]
        head = {"id": f"classify-{secrets.token_hex(12)}", "object": "list", "created": int(time.time())}
        usage = _usage(found.prompt_tokens)
        return Whole({**head, "model": fields.model, "data": data, "usage": usage})

    async def _scores(
        self, caller: Caller, fields: PoolingFields, first: Sequence[str], second: Sequence[str]
    ) -> tuple[list[float], int] | None:
        """Returns the score of each pair of texts and the tokens that it took; None if the caller is gone."""
        entry = self._embeddings.worker(fields)
        if not entry.labels:
            vectors = await self._vectors(caller, fields, entry, [*first, *second])
            if vectors is None:
                return None
            left, right = vectors.vectors[: len(first)], vectors.vectors[len(first) :]
            return await cosines(left, right), vectors.prompt_tokens
        if len(entry.labels) != 1:
            raise _unsupported(f"it classifies into {len(entry.labels)} classes, not one; use /v1/classify")
        found = await self._embeddings.vectors(caller, fields, entry, list(zip(first, second, strict=True)))
        return None if found is None else ([_floats(value)[0] for value in found.vectors], found.prompt_tokens)

    async def _vectors(
        self, caller: Caller, fields: PoolingFields, entry: WorkerEntry, texts: list[str]
    ) -> Embeddings | None:
        distinct = list(dict.fromkeys(texts))
        found = await self._embeddings.vectors(caller, fields, entry, distinct)
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


def add_api(parts: ApiParts, routes: ApiRoutes) -> None:
    """Adds the routes."""
    scores = ScoreOperations(parts.embeddings, parts.settings)
    routes.add("/v1/score", scores.score, responses(ScoreList, GENERATING), body=ScoreRequest)
    routes.add("/v1/classify", scores.classify, responses(ClassList, GENERATING), body=ClassifyRequest)
    routes.add("/v1/rerank", scores.rerank, responses(Reranked, GENERATING), body=RerankRequest)
