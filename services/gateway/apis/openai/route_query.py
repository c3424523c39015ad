"""Responses to query-only requests: token ids and the workers that would be chosen."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from services.common.base.packing import unpack_u32
from services.gateway.apis.openai.completion_objects import Format, usage
from services.gateway.core.request import GenerationRequest, Route, TokenizedPrompt
from services.gateway.operations.operation import Fallback, Whole
from services.gateway.operations.output import Counts
from services.gateway.pipeline.pipeline import Pipeline


async def query_response(pipeline: Pipeline, generations: Sequence[GenerationRequest], form: Format) -> Whole:
    """Returns an answer without choices; `placements` has an entry per prompt, `nvext` the first in Dynamo's format.

    Raises:
        SluiceError: see Pipeline.query.
    """
    queried = [await pipeline.query(generation) for generation in generations]
    placements = [_placement(prompt, route) for prompt, route in queried]
    first = placements[0]
    nvext = {
        "worker_id": {key: first[key] for key in ("decode_worker_id", "prefill_worker_id")},
        "token_data": first["token_ids"],
    }
    tokens = sum(prompt.length for prompt, _ in queried)
    body = {**form.full_response([], usage(Counts(tokens))), "nvext": nvext, "placements": placements}
    reasons = {reason for _, route in queried for reason in (route.degraded, route.split_skipped) if reason}
    return Whole(body, [Fallback(reasons)])


def _placement(prompt: TokenizedPrompt, route: Route) -> dict[str, Any]:
    return {
        "token_ids": unpack_u32(prompt.token_ids).tolist(),
        "decode_worker_id": route.worker_id,
        "decode_dp_rank": route.rank,
        "prefill_worker_id": route.prefill_worker_id or None,
        "prefill_dp_rank": route.prefill_rank if route.prefill_worker_id else None,
        "tokens_to_compute": route.tokens_to_compute,
        "headers": dict(route.headers),
    }
