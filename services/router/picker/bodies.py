"""Changes the bodies of requests on their way to the endpoint: the model, routing decisions of others, token ids."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson

from services.common.apis.prompts import dump_json
from services.router.scheduling.request_bodies import AnyBody, Api, read_prompt

_RANKS = frozenset({"data_parallel_rank", "routed_dp_rank", "disagg_prefill_dp_rank", "kv_hints"})
ROUTE_FIELDS: Mapping[str, frozenset[str]] = {
    "nvext": frozenset(
        {"backend_instance_id", "decode_worker_id", "prefill_worker_id", "dp_rank", "prefill_dp_rank", "token_data"}
    ),
    "vllm_xargs": _RANKS,
    "custom_params": _RANKS,
}
"""Fields of objects in a body that engines and gateways take as a routing decision, or as the prompt."""
_DECIDING = _RANKS | ROUTE_FIELDS.keys()
_IDS_PER_PIECE = 1 << 14  # token ids that are numbers at a time


def translated(api: Api | None, model: str, document: dict[str, Any], body: bytes) -> tuple[AnyBody | None, bytes]:
    """Returns the prompt of a body, and the body to send to the endpoint.

    Args:
        model: that the request is rewritten to; empty: the one in its body.
    """
    prompt = read_prompt(document, api, len(body))
    return prompt, dump_json(document) if _rewrite(document, model) else body


def _rewrite(document: dict[str, Any], model: str) -> bool:
    """Writes the model, if any, into a body without a routing decision; returns whether that changed it."""
    changed = bool(model) and model != document.get("model")
    if changed:
        document["model"] = model
    if _DECIDING.isdisjoint(document):
        return changed
    for name in _RANKS & document.keys():
        del document[name]
        changed = True
    for name, fields in ROUTE_FIELDS.items():
        found = document.get(name)
        if isinstance(found, dict) and not fields.isdisjoint(found):
            del document[name]
            kept = {field: value for field, value in found.items() if field not in fields}
            document |= {name: kept} if kept else {}
            changed = True
    return changed


def with_token_ids(body: bytes, token_ids: bytes) -> bytes:
    """Returns a body with the token ids of its prompt in `nvext.token_data`; unchanged if it has an `nvext` already.

    Args:
        body: a JSON object with at least one field.
        token_ids: packed u32.
    """
    end = body.rstrip()
    if b'"nvext"' in body or not end.endswith(b"}"):
        return body
    numbers = memoryview(token_ids).cast("I")
    starts = range(0, len(numbers), _IDS_PER_PIECE)
    pieces = (orjson.dumps(numbers[start : start + _IDS_PER_PIECE].tolist())[1:-1] for start in starts)
    return b'%s,"nvext":{"token_data":[%s]}}' % (end[:-1], b",".join(pieces))
